"""How a supervisor is reached: a Unix socket on this machine, or TCP with mutual TLS on another one. Sends nothing."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from carrel.errors import PlatformError
from carrel.primitives.keepalive import notice_loss
from carrel.primitives.spiffe import SpiffeId, connect
from carrel.primitives.unix_sockets import short

_SCHEME = "tcp+tls"


class SupervisorLink(Protocol):
    """How one supervisor is reached."""

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Open a connection. Raises `OSError` or `TimeoutError`."""


@dataclass(frozen=True)
class LocalLink:
    """A supervisor on this machine."""

    path: str

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """See `SupervisorLink`."""
        await asyncio.get_running_loop().create_unix_connection(protocol, short(self.path))


@dataclass(frozen=True)
class RemoteAddress:
    """Where a supervisor on another machine is, and the ID that it must have. Its text is the `socket` of a handle."""

    host: str
    port: int
    id: SpiffeId

    @classmethod
    def parse(cls, text: str) -> RemoteAddress:
        """Read the text of an address; `PlatformError` when it is none."""
        try:
            parts = urlsplit(text)
            if parts.scheme == _SCHEME and parts.hostname and parts.port and parts.netloc:
                return cls(parts.hostname, parts.port, SpiffeId.parse(parts.fragment))
        except ValueError:
            pass
        raise PlatformError(f"'{text[:200]}' is not the address of a supervisor", field="socket")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{_SCHEME}://{host}:{self.port}#{self.id}"


@dataclass(frozen=True)
class RemoteLink:
    """A supervisor on another machine. `context` returns the TLS context of this server for new connections."""

    address: RemoteAddress
    context: Callable[[], ssl.SSLContext]

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """See `SupervisorLink`. A supervisor with another ID than the expected one is refused."""
        at = self.address
        notice_loss(await connect(protocol, at.host, at.port, self.context(), lambda peer: peer == at.id))
