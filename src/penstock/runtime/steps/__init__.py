"""What follows each step: what processes say of it, what they agree on, what is written down, and what is not finite."""
