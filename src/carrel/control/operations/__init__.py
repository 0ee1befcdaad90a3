"""Admission and the operations in sandboxes: every operation is decided, recorded and performed here."""
