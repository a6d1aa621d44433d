"""Training: the ranks that run programs, their processes and transports, checkpoints, telemetry, and going on after a death."""
