"""Where sandboxes come from: one backend a file."""
