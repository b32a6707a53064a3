"""How rewards are made: one rule a file."""
