"""The secrets of contexts: stored, delivered to sandboxes, encrypted again with a new key."""
