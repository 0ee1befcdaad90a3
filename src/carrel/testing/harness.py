"""The tools of a check: a provider, workspaces for it, and sandboxes that are always removed."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

from carrel.control.supervisor.connection import SupervisorConnection
from carrel.models import CommandInfo, CommandResult, Network
from carrel.providers.base import NETWORK_CAPABILITY, Handle, Launch, Provider, RootImage
from carrel.providers.links import LocalLink, SupervisorLink

MakeProvider = Callable[[], Provider]
MakeWorkspace = Callable[[str], str]

SANDBOX_OWNER = 1000
"""The owner of a workspace on disk when the provider runs as root."""


class Running:
    """A started sandbox and the connection to its supervisor."""

    def __init__(self, handle: Handle, workspace: str, link: SupervisorLink | None = None):
        """`link` is that of the provider; by default the handle's Unix socket."""
        self.handle = handle
        self.workspace = workspace
        self.connection = SupervisorConnection(link or LocalLink(str(handle["socket"])))

    async def run(self, command: str | list[str], *, timeout: float = 20, **fields: Any) -> CommandResult:
        body = {"command": command, "timeout": timeout, "output_limit": 1024 * 1024, **fields}
        answer = await self.connection.request_json("POST", "/commands?wait=1", body, deadline=timeout + 10)
        return CommandResult.model_validate(answer)

    async def start(self, command: str | list[str], *, timeout: float = 60, **fields: Any) -> CommandInfo:
        body = {"command": command, "timeout": timeout, "output_limit": 1024 * 1024, **fields}
        return CommandInfo.model_validate(await self.connection.request_json("POST", "/commands", body))

    async def result(self, id: str) -> CommandResult:
        return CommandResult.model_validate(
            await self.connection.request_json("GET", f"/commands/{id}/result", deadline=60)
        )

    async def write(self, path: str, data: bytes) -> None:
        await self.connection.request("PUT", f"/files/content?path={quote(path)}&parents=1", data)

    async def read(self, path: str) -> bytes:
        return await self.connection.request("GET", f"/files/content?path={quote(path)}")


class Harness:
    """Creates what checks need, given how to create a provider and a workspace."""

    def __init__(
        self,
        make_provider: MakeProvider,
        make_workspace: MakeWorkspace,
        images: str = "",
        image: RootImage | None = None,
    ):
        """`images` is the provider's directory of images, if it has one. Sandboxes run from `image`, if it is given; it
        must have a shell, the usual programs and Python.
        """
        self.make_provider = make_provider
        self.images = images
        self._image = image
        self._make_workspace = make_workspace
        self.provider = make_provider()

    def workspace(self) -> str:
        return self._make_workspace(f"eph-{secrets.token_hex(8)}")

    def launch(self, workspace: str | None = None, *, network: Network | None = None, **fields: Any) -> Launch:
        """Return a launch; by default with the strictest network of this provider."""
        promised = self.provider.capabilities()
        network = network or next((kind for kind in Network if NETWORK_CAPABILITY[kind] in promised), None)
        assert network is not None, f"provider '{self.provider.name}' promises no kind of network, not even none"
        name = f"check-{secrets.token_hex(6)}"
        fields.setdefault("image", self._image)
        return Launch(id=name, workspace=workspace or self.workspace(), network=network, **fields)

    @asynccontextmanager
    async def sandbox(
        self, workspace: str | None = None, *, env: Mapping[str, str] | None = None, **terms: Any
    ) -> AsyncIterator[Running]:
        """Start a sandbox, and remove it at the end of the block."""
        launch = self.launch(workspace, env=dict(env or {}), **terms)
        handle = await self.provider.start(launch)
        try:
            running = Running(handle, launch.workspace, self.provider.link(handle))
            try:
                yield running
            finally:
                running.connection.close()
        finally:
            await self.provider.remove(handle)

    async def close(self) -> None:
        await self.provider.close()


def workspaces_in(directory: str) -> MakeWorkspace:
    """Return a function that creates workspaces in a directory, as carrel's own providers expect them."""

    def make(name: str) -> str:
        path = os.path.join(directory, name)
        os.mkdir(path, 0o700)
        if os.geteuid() == 0:
            os.chown(path, SANDBOX_OWNER, SANDBOX_OWNER)
        return path

    return make
