"""The policy documents people write: settings, sources, templates."""
