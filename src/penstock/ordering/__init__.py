"""Orders of actions made for the times and bytes of a workload: adaptive, greedy, and searched."""
