"""The client of one server: creates, finds and lists sandboxes."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Literal
from urllib.parse import quote

from carrel.client._async.approvals import AsyncApprovals
from carrel.client._async.audit import AsyncAudit
from carrel.client._async.checkpoints import AsyncFolderCheckpoints
from carrel.client._async.connection import AsyncConnection
from carrel.client._async.envs import AsyncEnvironments
from carrel.client._async.events import follow_events
from carrel.client._async.filespace import AsyncFilespace
from carrel.client._async.images import AsyncImages, OnImageProgress
from carrel.client._async.jobs import AsyncJobs
from carrel.client._async.policies import AsyncPolicy
from carrel.client._async.sandbox import AsyncSandbox
from carrel.client._async.secrets import AsyncSecrets
from carrel.client._async.stateless import AsyncStatelessPython
from carrel.client._async.tokens import AsyncTokens
from carrel.client.locate import locate
from carrel.client.requests import host_path_body, limits_body
from carrel.errors import Denied, NotFound
from carrel.models import (
    DiskUsage,
    EventInfo,
    HostPath,
    HostReport,
    Limits,
    LogReceipt,
    Network,
    NodeInfo,
    NodeList,
    SandboxInfo,
    SandboxPage,
    State,
    TemplateInfo,
    TemplateList,
    Trust,
)
from carrel.models.pools import PoolInfo, PoolList


class AsyncClient:
    """A client of one carrel server: the one at `url`, else the one of `CARREL_URL`, else the local one.

        async with AsyncClient() as client:
            box = await client.sandbox("conversation-42")
            print((await box.commands.run("uname -a")).stdout)

    Without a `token` or `CARREL_TOKEN`, the client uses the token that the local server has written for agents. It
    allows all work in sandboxes, but not to decide approvals or to administer. `administrator=True` uses the
    administrator's token instead.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        administrator: bool = False,
        timeout: float = 60.0,
    ):
        self._connection = AsyncConnection(locate(url, token, administrator=administrator), timeout)
        self.approvals = AsyncApprovals(self._connection)
        self.audit = AsyncAudit(self._connection)
        self.envs = AsyncEnvironments(self._connection)
        self.images = AsyncImages(self._connection)
        self.jobs = AsyncJobs(self._connection)
        self.python = AsyncStatelessPython(self._connection)
        self.tokens = AsyncTokens(self._connection)

    @property
    def url(self) -> str:
        """The server's address."""
        return self._connection.address.url

    async def sandbox(
        self,
        context_id: str | None = None,
        *,
        image: str | None = None,
        template: str | None = None,
        provider: str | None = None,
        trust: Trust | str | None = None,
        limits: Limits | Mapping[str, float | None] | None = None,
        network: Network | str | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        filespace: bool | None = None,
        workspace_path: str | os.PathLike[str] | None = None,
        host_paths: Sequence[HostPath | str] | None = None,
        start_in: Literal["workspace", "image"] | None = None,
        idempotency_key: str | None = None,
        progress: OnImageProgress | None = None,
    ) -> AsyncSandbox:
        """Create the sandbox of a context, or resume it with its files. Without a context it is ephemeral.

        `template` names a recipe of the server; a context keeps its first template. `filespace=True` keeps the
        workspace in sync with the filespace of the context: pulled before a start, pushed after operations. Calls with
        the same `idempotency_key` create one sandbox; by default each call has a key of its own.

        `image` is an OCI image such as `python:3.13-slim` that is the root of the sandbox, pulled if it is missing;
        `progress` is called meanwhile. A session keeps its image. Commands start in the workspace, or with
        `start_in="image"` in the working directory of the image.

        `workspace_path` is a folder of the server's host that becomes the workspace in place, and `host_paths` are
        further files and directories of that host, read-only. The operator lists where they may be.
        """
        if image is not None and progress is not None:
            with suppress(Denied):  # a token for some contexts cannot pull, but its sandboxes can
                await self.images.pull(image, only_if_missing=True, progress=progress)
        body = {
            "context_id": context_id,
            "image": image,
            "start_in": start_in,
            "template": template,
            "provider": provider,
            "trust": trust,
            "limits": None if limits is None else limits_body(limits),
            "network": network,
            "env": env,
            "labels": labels,
            "filespace": filespace,
            "workspace_path": None if workspace_path is None else os.fspath(workspace_path),
            "host_paths": None if host_paths is None else [host_path_body(each) for each in host_paths],
        }
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        # No deadline: the workspace may have to come from the archive first.
        info = await self._connection.post(SandboxInfo, "/v1/sandboxes", body, headers=headers, deadline=None)
        return self.attach(info)

    def attach(self, info: SandboxInfo) -> AsyncSandbox:
        """Make a sandbox object from the result of `sandboxes()` or `find()`. Sends no request."""
        return AsyncSandbox(self._connection, info)

    def filespace(self, context_id: str) -> AsyncFilespace:
        """Return the filespace of a context. Sends no request and needs no sandbox."""
        return AsyncFilespace(self._connection, context_id)

    def checkpoints(self, context_id: str) -> AsyncFolderCheckpoints:
        """Return the checkpoints of a context that works on a folder. Sends no request and needs no sandbox."""
        return AsyncFolderCheckpoints(self._connection, context_id)

    def policy(self, context_id: str) -> AsyncPolicy:
        """Return the policy of a context. Sends no request and needs no sandbox."""
        return AsyncPolicy(self._connection, context_id)

    def secrets(self, context_id: str | None = None, *, template: str | None = None) -> AsyncSecrets:
        """Return the secrets of a context or of a template. Sends no request and needs no sandbox."""
        return AsyncSecrets(self._connection, context_id, template)

    async def templates(self) -> list[TemplateInfo]:
        """List the templates of the server, sorted by name."""
        return (await self._connection.get(TemplateList, "/v1/templates")).items

    async def pools(self) -> list[PoolInfo]:
        """List the pools of warm sandboxes, which make starts with slow providers quick."""
        return (await self._connection.get(PoolList, "/v1/pools")).items

    async def resize_pool(self, name: str, size: int) -> list[PoolInfo]:
        """Change how many warm sandboxes each pool of a provider or a template keeps ready, until the server ends. For
        administrators. Returns these pools.

        await client.resize_pool("docker", 4)
        """
        path = f"/v1/pools/{quote(name, safe='')}"
        return (await self._connection.put(PoolList, path, {"size": size})).items

    def sandboxes(
        self, *, state: State | str | None = None, context_id: str | None = None
    ) -> AsyncIterator[SandboxInfo]:
        """List sandboxes, newest first: those in `state`, else all that are not terminated."""
        query = {"state": None if state is None else str(state), "context_id": context_id}
        return self._connection.pages(SandboxPage, "/v1/sandboxes", query)

    async def find(self, name: str) -> SandboxInfo:
        """Find a sandbox that is not terminated, by context id or sandbox id. Creates nothing; raises `NotFound`."""
        try:
            info = await self._connection.get(SandboxInfo, f"/v1/sandboxes/{quote(name, safe='')}")
        except NotFound:
            info = None
        if info is None or info.state is State.TERMINATED:
            raise NotFound(f"no sandbox named '{name}'", field="id", hint="`carrel ps` shows what there is")
        return info

    def events(
        self,
        context: str | None = None,
        *,
        kinds: Iterable[str] | None = None,
        job: str | None = None,
        after: int | None = None,
        follow: bool = True,
    ) -> AsyncIterator[EventInfo]:
        """Yield what happens in a context, or to the job with this id, or in every context that the token may access.

        `kinds` are kinds such as `command.ended`, or families such as `command`. `after` is the id of the last known
        event, 0 for all that the server still has; by default only new ones come. After a broken connection this goes
        on where it was: no event is missing, and none comes twice. An event of the kind `truncated` says that the
        server no longer has those before its id. `follow=False` ends with the newest event.
        """
        return follow_events(self._connection, context, kinds, after, follow=follow, job=job)

    async def publish_log(
        self, records: Iterable[Mapping[str, object]], *, context: str | None = None, dropped: int = 0
    ) -> int:
        """Add log records to the events: each has a `message`, and may have a `level`, a `logger` and a time (`at`).
        `dropped` counts those before that were not sent. `carrel.logging.BusHandler` does all this by itself.
        """
        body = {"context_id": context, "records": [dict(each) for each in records], "dropped": dropped}
        return (await self._connection.post(LogReceipt, "/v1/events", body)).stored

    async def forget(self, context_id: str) -> None:
        """Delete a context and all its data: files, snapshots, filespace, secrets, MCP servers, template and policy.
        Only the audit log remains. For administrators.
        """
        await self._connection.send("DELETE", f"/v1/contexts/{quote(context_id, safe='')}", deadline=None)

    async def disk(self) -> DiskUsage:
        """Report the disk usage of the server. Needs a token that reaches every context."""
        return await self._connection.get(DiskUsage, "/v1/disk")

    async def nodes(self) -> list[NodeInfo]:
        """List the servers on the server's database, by name."""
        return (await self._connection.get(NodeList, "/v1/nodes")).items

    async def revoke_node(self, name: str) -> list[NodeInfo]:
        """Revoke the SPIFFE ID of a server: the others refuse it within seconds. For administrators.

        await client.revoke_node("server-2")
        """
        return (await self._connection.post(NodeList, f"/v1/nodes/{quote(name, safe='')}/revoke")).items

    async def readmit_node(self, name: str) -> list[NodeInfo]:
        """Undo the revocation of a server. For administrators."""
        return (await self._connection.post(NodeList, f"/v1/nodes/{quote(name, safe='')}/readmit")).items

    async def host(self) -> HostReport:
        """Report which isolation the server's host offers."""
        return await self._connection.get(HostReport, "/v1/host")

    async def close(self) -> None:
        """Close the connections. Sandboxes keep running."""
        await self._connection.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
