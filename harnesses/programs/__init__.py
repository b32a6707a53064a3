"""Agents that ship with Rollyard. They run inside sandboxes, so they use the standard library only."""
