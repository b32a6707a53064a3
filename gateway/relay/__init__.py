"""The relay, one a machine: it carries connections of sandboxes that have no network to any gateway that lives."""
