"""Images of sandboxes that are folders of this machine: the store, and what can be brought into it."""
