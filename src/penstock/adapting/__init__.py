"""Noticing slow devices, deciding for a better plan, and moving to it: the one place where `runtime` and `search` meet."""
