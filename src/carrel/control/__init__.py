"""The control plane: sessions, admission of operations, recovery and upkeep."""
