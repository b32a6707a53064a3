"""Ways to both ends of a program that runs in a sandbox, one variant a file: see `rollyard.stages.shell.Pipe`."""
