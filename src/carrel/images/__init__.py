"""OCI images: pull, import, unpack, store. Knows nothing of sandboxes, sessions and callers."""
