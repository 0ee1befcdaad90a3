"""The table of operations and the one door: every operation is decided, recorded and performed here."""
