"""A provider for tests whose sandboxes are reached over TCP with mutual TLS, as those on other machines are.

They are namespaces of this host made by `bwrap`, with the network of the host, so that their supervisors can listen on
loopback. What is tested is the way to them. A slot has its workspace from the start, so no pool may keep some.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from carrel.errors import PlatformError
from carrel.isolation import seccomp
from carrel.isolation.cgroups import start_time
from carrel.isolation.inside import BUNDLE, HOME, WORKSPACE
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.primitives.spiffe import SpiffeId
from carrel.primitives.trees import remove_tree
from carrel.providers import Capability, Handle, Launch, Provider, bundle, foreign_processes
from carrel.providers.control_directory import facts_of
from carrel.providers.links import RemoteAddress, RemoteLink, SupervisorLink
from carrel.providers.remote import give_facts
from carrel.spiffe.authority import CertificateAuthority
from carrel.spiffe.identities import Identities
from carrel.spiffe.identity import NodeIdentity, OwnSource
from carrel.spiffe.sandboxes import SandboxIdentities

TRUST_DOMAIN, POOL = "remote.test", "pool"
_CREDENTIALS = "/run/carrel/credentials"
_PROMISED = frozenset(
    {
        Capability.FILE_ISOLATION,
        Capability.PROCESS_ISOLATION,
        Capability.LIMIT_DISK,
        Capability.NETWORK_HOST,
        Capability.TERMINAL,
        Capability.SURVIVES_RESTART,
    }
)
_OPTIONAL = ("/etc/passwd", "/etc/group", "/etc/ld.so.cache", "/etc/alternatives", "/etc/ssl/certs")


def identities(
    *, name: str = "one", seed: bytes = b"s" * 32, trust_domain: str = TRUST_DOMAIN, lifetime_s: float = 3600
) -> Identities:
    """Return a server's identities. The SVID of the server is not renewed."""
    authority = CertificateAuthority(seed, trust_domain)
    id = SpiffeId.node(trust_domain, name)
    node = NodeIdentity(id, OwnSource(authority, id, lifetime_s), authority.issue(id, lifetime_s))
    return Identities(authority, node, SandboxIdentities(authority, node, lifetime_s))


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    yield port


class RemoteProvider(Provider):
    """See the module."""

    name = "remote"
    isolation_level = 1

    def __init__(self, run_dir: str, bundles: str, identities: SandboxIdentities):
        self._run_dir = run_dir
        self._bundles = bundles
        self._identities = identities
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def capabilities(self) -> frozenset[Capability]:
        return _PROMISED

    def missing(self) -> str | None:
        if shutil.which("bwrap") is None:
            return "there is no program bwrap"
        return None if os.geteuid() == 0 else "the tests do not run as root"

    def link(self, handle: Handle) -> SupervisorLink:
        return RemoteLink(RemoteAddress.parse(str(handle["socket"])), self._identities.client_context)

    async def start(self, launch: Launch) -> Handle:
        slot = await self.start_slot(launch)
        return await self.claim(slot, launch)

    async def start_slot(self, launch: Launch) -> Handle:
        self.require_for(launch)
        place = self._place(launch.id)
        try:
            await asyncio.to_thread(os.makedirs, f"{place}/private", 0o700)
            made = await asyncio.to_thread(bundle.provide, self._bundles, remote=True)
            credentials = self._identities.for_slot(POOL)
            Path(f"{place}/private/credentials").write_text(credentials.to_json())
            with free_port() as port:
                command = _command(made, f"{place}/private", launch.workspace, port)
            with open(f"{place}/log", "wb") as log:
                bwrap = await asyncio.to_thread(
                    subprocess.Popen, command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            self._children[bwrap.pid] = bwrap
            pid = await _child(bwrap, f"{place}/log")
            address = RemoteAddress("127.0.0.1", port, self._identities.id_of_slot(POOL))
            handle: Handle = {
                "provider": self.name,
                "id": launch.id,
                "socket": str(address),
                "pid": pid,
                "start_time": start_time(pid),
                "bwrap": bwrap.pid,
            }
            Path(f"{place}/handle").write_text(json.dumps(handle))
        except BaseException:
            await asyncio.shield(self.remove({"id": launch.id}))
            raise
        return handle

    async def claim(self, slot: Handle, launch: Launch) -> Handle:
        try:
            self.require_for(launch)
            facts = facts_of(launch, uid=SANDBOX_UID, gid=SANDBOX_UID, secrets=False, seccomp=seccomp.build())
            address = RemoteAddress.parse(str(slot["socket"]))
            ended = _ended(self._children[int(str(slot["bwrap"]))], f"{self._place(str(slot['id']))}/log")
            address = await give_facts(
                address, self._identities, launch.id, {**facts, "socket": "", "egress": ""}, ended
            )
        except BaseException:
            await asyncio.shield(self.remove(slot))
            raise
        return {**slot, "socket": str(address)}

    async def alive(self, handle: Handle) -> bool:
        pid, started = handle.get("pid"), handle.get("start_time")
        return isinstance(pid, int) and isinstance(started, int) and foreign_processes.runs(pid, started)

    async def remove(self, handle: Handle) -> None:
        place = self._place(str(handle["id"]))
        with contextlib.suppress(FileNotFoundError):
            kept = json.loads(await asyncio.to_thread(Path(f"{place}/handle").read_text))
            await foreign_processes.end(kept["pid"], kept["start_time"])
            if (child := self._children.pop(kept["bwrap"], None)) is not None:
                await asyncio.to_thread(child.wait)
        for pid, child in list(self._children.items()):
            if child.poll() is not None:
                del self._children[pid]
        await asyncio.to_thread(remove_tree, place)

    async def running(self) -> list[str]:
        return sorted(os.listdir(self._run_dir))

    async def close(self) -> None:
        """Wait for processes that another object has ended."""
        for child in self._children.values():
            await asyncio.to_thread(child.wait, 30)
        self._children.clear()

    def _place(self, id: str) -> str:
        return os.path.join(self._run_dir, id)


async def _ended(bwrap: subprocess.Popen[bytes], log: str) -> str:
    """Wait for the end of a sandbox; return what it said."""
    while bwrap.poll() is None:
        await asyncio.sleep(0.02)
    return Path(log).read_text()[:1000]


async def _child(bwrap: subprocess.Popen[bytes], log: str) -> int:
    """Wait for the process inside."""
    while bwrap.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            children = Path(f"/proc/{bwrap.pid}/task/{bwrap.pid}/children").read_text().split()
            if children:
                return int(children[0])
        await asyncio.sleep(0.01)
    raise PlatformError(f"the sandbox could not be started: {Path(log).read_text()[:1000]}")


def _command(made: bundle.SupervisorBundle, private: str, workspace: str, port: int) -> list[str]:
    words = ["bwrap", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--as-pid-1", "--hostname", "carrel"]
    words += ["--clearenv", "--chdir", "/"]
    for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
        words += ["--cap-add", capability]
    for path in ("/etc", "/etc/ssl", "/home", "/opt", "/run"):
        words += ["--perms", "0755", "--dir", path]
    words += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64"):
        words += ["--symlink", os.readlink(name), name] if os.path.islink(name) else ["--ro-bind-try", name, name]
    for path in _OPTIONAL:
        words += ["--ro-bind-try", path, path]
    for path in bundle.NAMES:
        words += ["--ro-bind", f"{made.path}{path}", path]
    words += ["--ro-bind", made.own_files, "/etc/carrel", "--ro-bind", made.path, BUNDLE]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/tmp", "/dev/shm", HOME):
        words += ["--perms", "1777", "--tmpfs", path]
    words += ["--bind", private, "/run/carrel", "--bind", workspace, WORKSPACE]
    return [*words, "--remount-ro", "/", "--", *bundle.remote_command("127.0.0.1", port, _CREDENTIALS)]
