"""Published planning systems: their cost tables, plan files, cost rules, and searches over their tables."""
