"""The REST API: one module per resource, everything through the control plane."""

from carrel.api.app import create_app

__all__ = ["create_app"]
