"""Lengths of one global batch → micro-batches: ordering, splitting, balancing over replicas, recomputation, order of work."""
