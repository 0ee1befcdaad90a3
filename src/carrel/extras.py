"""The optional parts of carrel, and the extra that installs each of them. Imports none of them."""

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
    "kubernetes": "the use of kubeconfig files",
    "nats": "the delivery of events to NATS",
    "otel": "the export of traces",
    "spiffe": "the client of SPIRE",
}
"""The name of each optional part in errors."""


class ExtraMissing(ImportError):
    """The extra for a part of carrel is not installed: what is missing (`detail`), what to do (`hint`)."""

    def __init__(self, extra: str, package: str):
        self.detail = f"{PARTS[extra]} is not installed: pip install 'carrel[{extra}]'"
        # A package with the name of carrel on a public index would belong to somebody else.
        self.hint = (
            f"the package '{package}' is missing. carrel is not on a public index, so name its wheel or its clone: "
            f"pip install './carrel-{__version__}-py3-none-any.whl[{extra}]'"
        )
        super().__init__(f"{self.detail} ({self.hint})", name=package)


@contextmanager
def using(extra: str) -> Iterator[None]:
    """Raise `ExtraMissing` if the block imports a third-party package that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in {"", "carrel"}:
            raise
        raise ExtraMissing(extra, package) from None
