"""Measures ops, collectives and transfers on real devices into a profile."""
