"""A stage on several ranks: tensor and sequence parallelism, ZeRO, tied weights, sums of gradients."""
