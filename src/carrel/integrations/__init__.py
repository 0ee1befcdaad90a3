"""The protocols agents speak, each a client of the public API and nothing more."""
