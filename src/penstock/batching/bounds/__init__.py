"""Lower bounds of batches: what no way to cut one can be faster than."""
