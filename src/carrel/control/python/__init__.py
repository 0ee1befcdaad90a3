"""Python calls, code contexts, environments and the pool for calls without a context."""
