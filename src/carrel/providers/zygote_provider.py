"""The common part of the providers that get their sandboxes from a zygote."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from carrel.errors import PlatformError
from carrel.isolation import cgroups, image_user, masks
from carrel.isolation.image_user import ImageUser
from carrel.models import Network
from carrel.primitives.cache import Cache
from carrel.primitives.channel import close_all
from carrel.providers import foreign_processes
from carrel.providers.base import NETWORK_CAPABILITY, Capability, Handle, Launch, Provider
from carrel.providers.zygotes import ZygoteClient
from carrel.threads import run_to_end

LONGEST_SOCKET_PATH = 107
USERS_REMEMBERED = 1024


class ZygoteProvider(Provider):
    """Starts sandboxes by asking a zygote to fork one."""

    plain: bool

    def __init__(
        self,
        run_dir: str,
        workspaces: str,
        shared: Mapping[str, str] = MappingProxyType({}),
        zygote: ZygoteClient | None = None,
        folder_roots: Sequence[str] = (),
        images: str = "",
    ):
        """`zygote` is an optional client, with the same paths, whose zygote is being started already."""
        self._run_dir = run_dir
        self._images = images
        self._users: Cache[tuple[str, str], ImageUser] = Cache(USERS_REMEMBERED)
        self._zygote = zygote or ZygoteClient(
            run_dir, workspaces, plain=self.plain, shared=shared, folder_roots=folder_roots, images=images
        )

    async def warm(self) -> None:
        if await asyncio.to_thread(self.missing) is None:
            try:
                await self._zygote.request("describe")
            except PlatformError:
                pass  # the first start of a sandbox gets the reason

    async def start(self, launch: Launch) -> Handle:
        path = os.path.join(self._run_dir, f"{launch.id[:40]}-{os.urandom(4).hex()}.sock")
        if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
            raise PlatformError(
                f"the path of the sandbox's socket is longer than {LONGEST_SOCKET_PATH} bytes: {path}",
                hint="use a data directory with a shorter path",
            )
        self.require(NETWORK_CAPABILITY[launch.network])
        image = await self._image_fields(launch)
        mounts = await self._open_folders(launch)
        try:
            packed = self._pack(launch)
        except BaseException:
            close_all(mounts)
            raise
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(128)
            answer = await self._zygote.request(
                "start",
                (listener.fileno(), *packed, *mounts),
                id=launch.id,
                workspace=os.path.basename(launch.workspace),
                memory_mb=launch.memory_mb,
                cpus=launch.cpus,
                disk_mb=launch.disk_mb,
                processes=launch.processes,
                env=dict(launch.env),
                **self._optional_fields(launch, masked=bool(packed)),
                **image,
            )
            network_fields = await self._connect_network(launch, answer)
        except BaseException as error:
            _unlink(path)
            if isinstance(error, asyncio.CancelledError):
                # Remove the sandbox that is being created: the same name may be requested again at once.
                await asyncio.shield(self._zygote.known("remove", id=launch.id))
            if isinstance(error, OSError):
                raise PlatformError(f"the sandbox's socket could not be made: {error}") from error
            raise
        finally:
            listener.close()
            close_all((*packed, *mounts))
        return {
            "provider": self.name,
            "id": launch.id,
            "socket": path,
            "pid": int(answer["pid"]),
            "start_time": int(answer["start_time"]),
            **network_fields,
        }

    def _optional_fields(self, launch: Launch, *, masked: bool) -> dict[str, Any]:
        """Return the fields without their defaults, which are not sent: a zygote may be older than this server."""
        asked: dict[str, Any] = (
            {} if launch.network is Network.NONE or self.plain else {"network": _zygote_network(launch.network)}
        )
        asked |= {"masked": masked, "trust": launch.trust, "resolver": self._resolver(launch.network)}
        if launch.folder is not None:
            targets = [mount.target for mount in (launch.folder.home, *launch.folder.read_only)]
            asked |= {"folder": launch.folder.folder.target, "mounts": targets}
        return {name: value for name, value in asked.items() if value}

    def _resolver(self, network: Network) -> str:
        """Return the text of the sandbox's `/etc/resolv.conf`."""
        return ""

    async def _connect_network(self, launch: Launch, answer: dict[str, Any]) -> Handle:
        """Connect a new sandbox to its network, and return fields for its handle. Removes the sandbox on failure."""
        return {}

    async def _image_fields(self, launch: Launch) -> dict[str, Any]:
        """Return the field of the request for a sandbox from an image."""
        if (image := launch.image) is None:
            return {}
        self.require(Capability.IMAGES)
        place = os.path.relpath(image.directory, self._images)
        if place.startswith(".."):
            raise PlatformError(f"the image {image.directory} is not below {self._images}")
        key = image.directory, image.user  # the root of an image never changes
        user = self._users.get(key)
        if user is None:
            user = await asyncio.to_thread(image_user.find, *key)
            self._users.put(key, user)
        return {
            "image": {
                "root": place,
                "identity": image.identity,
                "uid": user.uid,
                "gid": user.gid,
                "user": user.name,
                "environment": dict(image.environment),
                "working_directory": image.working_directory,
                **({"writable": True, "home": user.home} if image.writable else {}),
            }
        }

    async def _open_folders(self, launch: Launch) -> list[int]:
        """Return the mounts of the folder, the home and what is read-only, in this order."""
        if launch.folder is None:
            return []
        self.require(Capability.FOLDERS)
        mounts = [(launch.folder.folder, False), (launch.folder.home, False)]
        mounts += [(mount, True) for mount in launch.folder.read_only]
        return await self._zygote.open_mounts([(each.source, each.identity, only) for each, only in mounts])

    def _pack(self, launch: Launch) -> tuple[int, ...]:
        """Return the masks as a descriptor, if there are any."""
        if launch.masks is None:
            return ()
        self.require(Capability.MASKS)
        return (masks.pack(launch.masks),)

    async def alive(self, handle: Handle) -> bool:
        return foreign_processes.runs(number(handle, "pid"), number(handle, "start_time"))

    async def running(self) -> list[str]:
        found = await self._zygote.known("list")
        return [str(name) for name in found.get("ids", [])]

    async def pause(self, handle: Handle) -> bool:
        # Also to the end when it is cancelled: what it stops after an `unpause` would stay stopped for ever.
        return await run_to_end(lambda: foreign_processes.stop_below(number(handle, "pid")))

    async def unpause(self, handle: Handle) -> None:
        await asyncio.to_thread(foreign_processes.continue_below, number(handle, "pid"))

    async def kill_paused(self, handle: Handle) -> None:
        await asyncio.to_thread(foreign_processes.kill_stopped, number(handle, "pid"))

    async def remove(self, handle: Handle) -> None:
        answer = await self._zygote.known("remove", id=handle["id"])
        if not answer.get("known") and await self.alive(handle):
            await self._kill(handle)
        if handle.get("socket"):
            _unlink(str(handle["socket"]))

    async def _kill(self, handle: Handle) -> None:
        """Kill a sandbox whose zygote is gone."""
        try:
            await foreign_processes.end(number(handle, "pid"), number(handle, "start_time"))
        except TimeoutError:
            raise PlatformError(f"sandbox {handle['id']} could not be ended") from None
        for _ in range(200):  # dying processes hold its groups for a moment
            if await asyncio.to_thread(cgroups.sweep):
                break
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self._zygote.close()


def number(handle: Handle, key: str) -> int:
    """Return a field of a handle that is a number; -1 if it is not one."""
    value = handle.get(key)
    return value if isinstance(value, int) else -1


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _zygote_network(network: Network) -> str:
    """Return the network as the zygote knows it: it does not distinguish what the proxy allows."""
    return str(Network.ALLOWLIST if network.proxied else network)
