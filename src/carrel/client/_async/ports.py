"""The ports of one sandbox: which are open, URLs for them, and connections to them. Runs no server itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carrel.client._async.connection import AsyncConnection
from carrel.errors import PortNotOpen
from carrel.models import PortInfo, PortList, PortUrl
from carrel.models.ports import MAX_PORT_WAIT_S

if TYPE_CHECKING:
    from carrel.client._async.port_tunnel import AsyncPortTunnel


class AsyncPorts:
    """The servers that listen in a sandbox."""

    def __init__(self, connection: AsyncConnection, sandbox_path: str):
        self._connection = connection
        self._path = f"{sandbox_path}/ports"

    async def list(self) -> list[PortInfo]:
        """List the open ports."""
        return (await self._connection.get(PortList, self._path)).items

    async def wait(self, port: int, timeout: float = 60.0) -> PortInfo:
        """Wait until a server listens on a port. Raises `PortNotOpen` when none does in time."""
        query: dict[str, str | int | None] = {"port": port, "wait_s": str(min(timeout, MAX_PORT_WAIT_S))}
        found = await self._connection.get(PortList, self._path, query, deadline=timeout)
        for each in found.items:
            if each.port == port:
                return each
        raise PortNotOpen(f"nothing listens on port {port} after {timeout:g} seconds", hint="see the server's output")

    async def url(self, port: int, *, expires: float | None = None, public: bool = False, wake: bool = False) -> str:
        """Make a URL of a port. Whoever has it reaches the server, until it expires: after `expires` seconds, by
        default an hour. With `public` it needs no access and does not expire; the server may forbid that. With `wake`
        a request starts the sandbox again if it is stopped.
        """
        made = await self.share(port, expires=expires, public=public, wake=wake)
        return made.url or self._connection.address.url.rstrip("/") + made.path

    async def share(
        self, port: int, *, expires: float | None = None, public: bool = False, wake: bool = False
    ) -> PortUrl:
        """Make a URL like `url`, and return everything about it."""
        body = {"port": port, "expires_s": expires, "public": public, "wake": wake}
        return await self._connection.post(PortUrl, self._path, body)

    async def close(self, port: int) -> None:
        """Make a public port private again."""
        await self._connection.send("DELETE", f"{self._path}/{port}")

    async def connect(self, port: int) -> AsyncPortTunnel:
        """Connect to a port: bytes in both directions."""
        from carrel.client._async.port_tunnel import AsyncPortTunnel

        return await AsyncPortTunnel.open(self._connection, f"{self._path}/{port}")
