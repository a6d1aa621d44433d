"""Aceso (EuroSys 2024): its profiled database, its plan files, its cost rules, and the search over them."""
