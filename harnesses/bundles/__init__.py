"""Agents as folders that run in any sandbox: how they are built, and where they lie."""
