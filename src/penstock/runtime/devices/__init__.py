"""Devices whose time is what the cost model says: timed ones, on which ops are waits, and paced ones, which compute and then wait."""
