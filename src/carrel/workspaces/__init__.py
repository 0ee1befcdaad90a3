"""The durable files of contexts: volumes and snapshots, the archive, filespace sync, environments."""
