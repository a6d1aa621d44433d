"""Exact partition: the best contiguous stages of a chain, each with its own devices, degrees and recomputed ops."""
