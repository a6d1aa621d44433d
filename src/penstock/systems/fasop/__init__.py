"""FASOP: its layer times, node kinds and result rows, its cost rules, and the search over them."""
