"""Interleaved pipelines: several chunks of the model on each group of devices, with cuts of their own."""
