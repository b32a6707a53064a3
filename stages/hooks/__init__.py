"""The hooks that ship, one a file. docs/hooks.md tells how to use them, and how to write one."""
