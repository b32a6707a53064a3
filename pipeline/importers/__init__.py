"""Tasks made of what others call tasks: folders in Harbor's format, tables of questions, rows as of SWE-bench."""
