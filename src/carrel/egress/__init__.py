"""The only way out of a sandbox: a proxy in a process of its own that decides every connection."""
