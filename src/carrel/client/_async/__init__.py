"""The client, written once. `scripts/generate.py` derives the blocking one from this package."""
