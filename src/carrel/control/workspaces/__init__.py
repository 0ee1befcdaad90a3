"""Snapshots, archive and filespaces of contexts; the formats are in `carrel.workspaces`."""
