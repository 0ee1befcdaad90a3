"""Models of ports: the servers that listen in a sandbox, and URLs for them."""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from carrel.models.base import Answer, Request

Port = Annotated[int, Field(ge=1, le=65_535)]
MAX_URL_S = 30 * 86_400.0
MAX_PORT_WAIT_S = 300.0


class PortInfo(Answer):
    """A port of a sandbox on which a server listens."""

    port: int = Field(ge=1, le=65_535)
    addresses: list[str] = Field(max_length=256, description="where it listens; URLs reach the loopback address")


class PortList(Answer):
    """The open ports of a sandbox."""

    items: list[PortInfo] = Field(max_length=256)
    truncated: bool = Field(default=False, description="whether there are more")


class ShareRequest(Request):
    """Asks for a URL of a port."""

    port: Port
    expires_s: float | None = Field(
        default=None, gt=0, le=MAX_URL_S, description="seconds until the URL is invalid; by default an hour"
    )
    public: bool = Field(
        default=False,
        description="let everybody reach the port without a token, until it is made private again; only where the "
        "server allows it",
    )
    wake: bool = Field(default=False, description="let a request start the sandbox again if it is stopped")


class PortUrl(Answer):
    """A URL of a port. Whoever has it reaches the port, unless it expires or the token that made it is revoked."""

    port: int
    path: str = Field(description="below the URL of the server")
    host: str | None = Field(default=None, description="the host of the port, if the server has a domain for ports")
    url: str | None = Field(default=None, description="the URL with that host")
    access: str | None = Field(
        default=None,
        description="what a program may send in the header `Carrel-Access` instead; none for a public port",
    )
    expires_at: datetime | None = None
    public: bool = False
    wake: bool = False
