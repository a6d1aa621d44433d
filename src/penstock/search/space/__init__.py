"""The space of plans: ways to divide a cluster into replicas and a batch into micro-batches, and what a stage may then be made of."""
