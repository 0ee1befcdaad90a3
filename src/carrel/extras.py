"""The optional parts of carrel and the extra of the package that installs each. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from carrel import __version__

PARTS = {
    "cli": "the command line",
    "server": "the server",
    "supervisor": "the supervisor",
    "mcp": "the MCP server",
    "a2a": "the A2A agent",
    "langgraph": "the LangGraph integration",
    "deepagents": "the deepagents integration",
}
"""What each extra installs, as errors name it."""


class ExtraMissing(ImportError):
    """A part of carrel was used whose extra is not installed: what is missing (`detail`), what to do (`hint`)."""

    def __init__(self, extra: str, package: str):
        self.detail = f"{PARTS[extra]} is not installed: pip install 'carrel[{extra}]'"
        # A package of this name on a public index would be somebody else's.
        self.hint = (
            f"the package '{package}' is missing. carrel is not on a public index, so name its wheel or its clone: "
            f"pip install './carrel-{__version__}-py3-none-any.whl[{extra}]'"
        )
        super().__init__(f"{self.detail} ({self.hint})", name=package)


@contextmanager
def using(extra: str) -> Iterator[None]:
    """Raise `ExtraMissing` if the block imports a package of others that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in {"", "carrel"}:
            raise
        raise ExtraMissing(extra, package) from None
