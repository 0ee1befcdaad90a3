"""Sessions: get or create, start, stop, resume, leases, recovery, upkeep."""
