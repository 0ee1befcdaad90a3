"""The control plane: sessions, the one door for operations, recovery and upkeep."""
