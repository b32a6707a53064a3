"""How agents are started and read: one a file."""
