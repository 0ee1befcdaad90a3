"""What the providers that get their sandboxes from a zygote have in common."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from carrel.errors import PlatformError
from carrel.isolation import cgroups, masks
from carrel.models import Network
from carrel.providers import processes
from carrel.providers.base import NETWORK_CAPABILITY, Capability, Handle, Launch, Provider
from carrel.providers.zygotes import ZygoteClient

LONGEST_SOCKET_PATH = 107


class ZygoteProvider(Provider):
    """Starts sandboxes by asking a zygote to fork one."""

    plain: bool

    def __init__(
        self,
        run_dir: str,
        workspaces: str,
        shared: Mapping[str, str] = MappingProxyType({}),
        zygote: ZygoteClient | None = None,
    ):
        """`zygote` is one that is being started already, with the same paths."""
        self._run_dir = run_dir
        self._zygote = zygote or ZygoteClient(run_dir, workspaces, plain=self.plain, shared=shared)

    async def warm(self) -> None:
        """See `Provider.warm`."""
        if await asyncio.to_thread(self.missing) is None:
            try:
                await self._zygote.request("describe")
            except PlatformError:
                pass  # whoever starts a sandbox gets the reason

    async def start(self, launch: Launch) -> Handle:
        """See `Provider.start`."""
        path = os.path.join(self._run_dir, f"{launch.id[:40]}-{os.urandom(4).hex()}.sock")
        if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
            raise PlatformError(
                f"the path of the sandbox's socket is longer than {LONGEST_SOCKET_PATH} bytes: {path}",
                hint="use a data directory with a shorter path",
            )
        self.require(NETWORK_CAPABILITY[launch.network])
        worn = self._pack(launch)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(128)
            answer = await self._zygote.request(
                "start",
                (listener.fileno(), *worn),
                id=launch.id,
                workspace=os.path.basename(launch.workspace),
                memory_mb=launch.memory_mb,
                cpus=launch.cpus,
                disk_mb=launch.disk_mb,
                processes=launch.processes,
                env=dict(launch.env),
                **self._beyond(launch, masked=bool(worn)),
            )
            joined = await self._join(launch, answer)
        except BaseException as error:
            _unlink(path)
            if isinstance(error, asyncio.CancelledError):
                # Nobody waits for the sandbox that is being made, but one of the same name may be wanted at once.
                await asyncio.shield(self._zygote.known("remove", id=launch.id))
            if isinstance(error, OSError):
                raise PlatformError(f"the sandbox's socket could not be made: {error}") from error
            raise
        finally:
            listener.close()
            for descriptor in worn:
                os.close(descriptor)
        return {
            "provider": self.name,
            "id": launch.id,
            "socket": path,
            "pid": int(answer["pid"]),
            "start_time": int(answer["start_time"]),
            **joined,
        }

    def _beyond(self, launch: Launch, *, masked: bool) -> dict[str, Any]:
        """What is asked for beyond the ordinary. Nothing else is sent: a zygote may be older than this server."""
        asked: dict[str, Any] = (
            {} if launch.network is Network.NONE or self.plain else {"network": _made(launch.network)}
        )
        asked |= {"masked": masked, "trust": launch.trust, "resolver": self._resolver(launch.network)}
        return {name: value for name, value in asked.items() if value}

    def _resolver(self, network: Network) -> str:
        """The text of the sandbox's `/etc/resolv.conf`."""
        return ""

    async def _join(self, launch: Launch, answer: dict[str, Any]) -> Handle:
        """Connect a new sandbox to its network; what its handle must say of it. Leaves none behind when it fails."""
        return {}

    def _pack(self, launch: Launch) -> tuple[int, ...]:
        """The masks as a descriptor, if there are any."""
        if launch.masks is None:
            return ()
        self.require(Capability.MASKS)
        return (masks.pack(launch.masks),)

    async def alive(self, handle: Handle) -> bool:
        """See `Provider.alive`."""
        return processes.runs(number(handle, "pid"), number(handle, "start_time"))

    async def running(self) -> list[str]:
        """See `Provider.running`."""
        found = await self._zygote.known("list")
        return [str(name) for name in found.get("ids", [])]

    async def remove(self, handle: Handle) -> None:
        """See `Provider.remove`."""
        answer = await self._zygote.known("remove", id=handle["id"])
        if not answer.get("known") and await self.alive(handle):
            await self._kill(handle)
        if handle.get("socket"):
            _unlink(str(handle["socket"]))

    async def _kill(self, handle: Handle) -> None:
        """End a sandbox whose zygote is gone."""
        try:
            await processes.end(number(handle, "pid"), number(handle, "start_time"))
        except TimeoutError:
            raise PlatformError(f"sandbox {handle['id']} could not be ended") from None
        for _ in range(200):  # its groups are held for a moment by processes on their way out
            if await asyncio.to_thread(cgroups.sweep):
                break
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """See `Provider.close`."""
        await self._zygote.close()


def number(handle: Handle, key: str) -> int:
    """A field of a handle that is a number; -1 when it is none."""
    value = handle.get(key)
    return value if isinstance(value, int) else -1


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _made(network: Network) -> str:
    """The network as a zygote makes it: whom the proxy lets out is not its business."""
    return str(Network.ALLOWLIST if network.proxied else network)
