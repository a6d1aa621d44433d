"""How processes are started: one server forks them, and the script that asks for them must bear being imported again."""
