"""The client: makes, finds and lists sandboxes on one server. Holds the connection and nothing else."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from urllib.parse import quote

from carrel.client._async.approvals import AsyncApprovals
from carrel.client._async.audit import AsyncAudit
from carrel.client._async.connection import AsyncConnection, encoded
from carrel.client._async.envs import AsyncEnvironments
from carrel.client._async.filespace import AsyncFilespace
from carrel.client._async.policies import AsyncPolicy
from carrel.client._async.sandbox import AsyncSandbox
from carrel.client._async.secrets import AsyncSecrets
from carrel.client._async.stateless import AsyncStatelessPython
from carrel.client._async.tokens import AsyncTokens
from carrel.client.locate import locate
from carrel.client.requests import limits_body
from carrel.errors import NotFound
from carrel.models import (
    DiskUsage,
    HostReport,
    Limits,
    Network,
    SandboxInfo,
    SandboxPage,
    State,
    TemplateInfo,
    TemplateList,
    Trust,
)


class AsyncClient:
    """Talks to one carrel server: the named one, that of `CARREL_URL`, or the local one.

    Without a `token` or `CARREL_TOKEN`, the local server is shown the token that it left for agents, who may work but
    neither decide approvals nor administer; with `administrator` it is shown the administrator's.
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
        template: str | None = None,
        provider: str | None = None,
        trust: Trust | str | None = None,
        limits: Limits | Mapping[str, float | None] | None = None,
        network: Network | str | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        filespace: bool | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncSandbox:
        """The sandbox of a context: made, or resumed with its files. Without a context an ephemeral one.

        `template` names a recipe of the server; a context keeps the one it was made with.
        With `filespace` the workspace is kept in sync with the context's filespace: pulled before a start, pushed after
        operations. The same `idempotency_key` never makes a second sandbox; by default each call has its own.
        """
        body = encoded(
            {
                "context_id": context_id,
                "template": template,
                "provider": provider,
                "trust": trust,
                "limits": None if limits is None else limits_body(limits),
                "network": network,
                "env": None if env is None else {**env},
                "labels": None if labels is None else {**labels},
                "filespace": filespace,
            }
        )
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        # A workspace may have to come from the archive first, so the server decides how long it takes.
        patience = self._connection.patience(None)
        info = await self._connection.post(SandboxInfo, "/v1/sandboxes", body, headers=headers, timeout=patience)
        return self.attach(info)

    def attach(self, info: SandboxInfo) -> AsyncSandbox:
        """A sandbox object for what `sandboxes()` or `find()` gave. Asks nothing of the server."""
        return AsyncSandbox(self._connection, info)

    def filespace(self, context_id: str) -> AsyncFilespace:
        """The filespace of a context. Asks nothing of the server, and needs no sandbox."""
        return AsyncFilespace(self._connection, context_id)

    def policy(self, context_id: str) -> AsyncPolicy:
        """The policy of a context. Asks nothing of the server, and needs no sandbox."""
        return AsyncPolicy(self._connection, context_id)

    def secrets(self, context_id: str | None = None, *, template: str | None = None) -> AsyncSecrets:
        """The secrets of a context or of a template. Asks nothing of the server, and needs no sandbox."""
        return AsyncSecrets(self._connection, context_id, template)

    async def templates(self) -> list[TemplateInfo]:
        """The templates of the server, by name."""
        return (await self._connection.get(TemplateList, "/v1/templates")).items

    def sandboxes(
        self, *, state: State | str | None = None, context_id: str | None = None
    ) -> AsyncIterator[SandboxInfo]:
        """The sandboxes the server knows, newest first: those in one state, else all that are not terminated."""
        query = {"state": None if state is None else str(state), "context_id": context_id}
        return self._connection.pages(SandboxPage, "/v1/sandboxes", query)

    async def find(self, name: str) -> SandboxInfo:
        """The live sandbox of a context id or sandbox id; nothing is made. Raises `NotFound`."""
        try:
            info = await self._connection.get(SandboxInfo, f"/v1/sandboxes/{quote(name, safe='')}")
        except NotFound:
            info = None
        if info is None or info.state is State.TERMINATED:
            raise NotFound(f"no sandbox named '{name}'", field="id", hint="`carrel ps` shows what there is")
        return info

    async def forget(self, context_id: str) -> None:
        """End the session of a context and delete everything that is kept of it: files, snapshots, filespace, secrets,
        MCP servers, template and policy. Only the audit log stays. For administrators.
        """
        path = f"/v1/contexts/{quote(context_id, safe='')}"
        await self._connection.call("DELETE", path, timeout=self._connection.patience(None))

    async def disk(self) -> DiskUsage:
        """What fills the disk of the server. Needs a token that reaches every context."""
        return await self._connection.get(DiskUsage, "/v1/disk")

    async def host(self) -> HostReport:
        """What the server's host can do."""
        return await self._connection.get(HostReport, "/v1/host")

    async def close(self) -> None:
        """Close the connections. Sandboxes are not touched."""
        await self._connection.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
