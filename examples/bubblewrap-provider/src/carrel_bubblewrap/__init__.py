"""A provider of carrel whose sandboxes are made by bubblewrap (`bwrap`)."""

from carrel_bubblewrap.provider import BubblewrapProvider, open_provider

__all__ = ["BubblewrapProvider", "open_provider"]
