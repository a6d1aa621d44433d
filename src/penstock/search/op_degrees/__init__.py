"""Stages whose ops have tensor- and data-parallel degrees of their own."""
