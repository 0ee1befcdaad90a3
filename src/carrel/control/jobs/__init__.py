"""Jobs: accepted durably, run in sandboxes, and brought to a visible end whatever dies meanwhile."""
