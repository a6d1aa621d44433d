"""From summed gradients to new weights: the global norm, the loss scale, update rules, and state that survives a change of plan."""
