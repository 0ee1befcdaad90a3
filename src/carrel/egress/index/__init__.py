"""The package index for sandboxes: fetches from the operator's indexes once, and caches."""
