"""From plans and programs to weights."""
