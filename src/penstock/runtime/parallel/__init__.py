"""What ranks do together: process groups, tensor and sequence parallelism, ZeRO, tied weights, gradient sums."""
