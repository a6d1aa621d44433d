"""Checkpoints: what a rank's tensors are in the global ones, written while training goes on, read under any plan."""
