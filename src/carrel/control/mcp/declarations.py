"""The MCP servers that contexts have declared, and what they need to run: a Python environment, or npm packages in the
workspace. Callers have been admitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from carrel.control.mcp.links import McpLinks
from carrel.control.operations.caller import OWN_WORK, Caller, OwnWork
from carrel.control.operations.operations import OwnOperations
from carrel.control.python.environment_checks import Requester, requirements_of
from carrel.control.python.environments import Environments
from carrel.control.sessions.attachments import Attachment, Fork
from carrel.control.sessions.live import LiveSandbox
from carrel.control.supervisor.connection import Json
from carrel.errors import FileMissing, InvalidRequest
from carrel.isolation.inside import WORKSPACE
from carrel.models import CommandRequest, EnvironmentRequest, McpServerRequest
from carrel.models.files import DeleteRequest, StatRequest
from carrel.models.operations import DELETE_FILE, STAT_FILE
from carrel.primitives.cache import Cache
from carrel.providers.base import Capability, Provider
from carrel.store import SessionRecord
from carrel.store.environments import EnvironmentRecord
from carrel.store.mcp_servers import McpServerRecord, McpServerStore

FRESH_S = 2.0
"""How long a change made by another server may go unnoticed."""
MOST_SEEN = 4096
LONGEST_WORDS = 2000
LOOK_S = 30.0
NPM_PLACE = ".mcp"
"""Where in the workspace npm packages are installed, a directory for each server."""


class McpDeclarations(Attachment):
    """The declarations of every context, with a short cache. They are forked and deleted with their contexts."""

    def __init__(self, store: McpServerStore, links: McpLinks):
        self._store = store
        self._links = links
        self._seen: Cache[tuple[str, str], McpServerRecord] = Cache(MOST_SEEN, FRESH_S)

    async def find(self, context: str, server: str) -> McpServerRecord | None:
        """Return a declaration, at most `FRESH_S` old."""
        record = self._seen.get((context, server))
        if record is None:
            record = await self._store.declared(context, server)
            if record is not None:
                self._seen.put((context, server), record)
        return record

    def changed(self, context: str, server: str) -> None:
        """Make the next `find` read the declaration from the store."""
        self._seen.pop((context, server))

    def forget_known(self) -> None:
        """Read every declaration again: another worker has changed one."""
        self._seen.clear()

    def detach(self, box: LiveSandbox) -> None:
        """End the conversations with the servers of a sandbox that is about to end."""
        self._links.ended(box)

    async def fork(self, fork: Fork) -> None:
        """Give a fork the servers of its origin."""
        fork.undo.push_async_callback(self.forget, fork.caller, fork.context_id)
        await self._store.copy(fork.origin, fork.context_id)

    async def forget(self, caller: Caller | OwnWork, context_id: str) -> None:
        """Delete the servers of a context."""
        await self._store.forget(context_id)
        for key in self._seen.keys():  # noqa: SIM118 - a cache is no mapping
            if key[0] == context_id:
                self._seen.pop(key)


class McpInstaller:
    """Installs the packages that servers need."""

    def __init__(
        self, environments: Environments, operations: OwnOperations, providers: Mapping[str, Provider], timeout_s: float
    ):
        self._environments = environments
        self._operations = operations
        self._providers = providers
        self._timeout_s = timeout_s

    async def python(self, session: SessionRecord, request: McpServerRequest, had: str = "") -> str | None:
        """Return the name of the environment of a server, held by its context from now on: the one it `had` if that
        still exists. None when the server needs none.
        """
        if request.requirements is None:
            return None
        provider = self._providers.get(session.provider)
        if provider is not None:
            provider.require(Capability.ENVIRONMENTS)
        wanted = EnvironmentRequest(requirements=list(requirements_of(request.requirements)), python=request.python)
        asker = Requester.of(session)

        async def find() -> EnvironmentRecord:
            return self._environments.known(had) or await self._environments.ensure(wanted, asker)

        return (await self._environments.hold(find, session.owner)).name

    async def ready(self, session: SessionRecord, record: McpServerRecord) -> McpServerRecord:
        """Return a server whose environment is on this machine and held: it may have been evicted, or built on another
        machine.
        """
        if record.environment is None:
            return record
        return replace(record, environment=await self.python(session, declared(record), record.environment))

    async def npm(self, box: LiveSandbox, server: str, request: McpServerRequest) -> str | None:
        """Install npm packages in the sandbox of a context, through its own network. Return the path of the command's
        program among them; None when it is not one of theirs, or the sandbox has a program of that name.
        """
        place = f"{WORKSPACE}/{NPM_PLACE}/{server}"
        # A project of its own, or npm would look for one above. `--prefix` would hide the host's settings from it.
        await self._operations.write_file(OWN_WORK, box.record.id, f"{place}/package.json", b'{"private": true}\n')
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-progress", "--loglevel=error"]
        wanted = CommandRequest(command=[*command, *(request.npm or ())], cwd=place, timeout=self._timeout_s)
        ran = await self._operations.run_command(OWN_WORK, box.record.id, wanted)
        if ran.timed_out or ran.exit_code != 0:
            said = (ran.stderr or ran.stdout).strip()[-LONGEST_WORDS:]
            why = f"within {self._timeout_s:g} seconds" if ran.timed_out else said or f"it ended with {ran.exit_code}"
            raise InvalidRequest(
                f"the npm packages cannot be installed: {why}",
                field="npm",
                hint="the sandbox needs npm, and its policy must allow the registry",
            )
        name = request.command[0]
        if "/" in name or await self._there(box, name):
            return None
        program = f"{place}/node_modules/.bin/{name}"
        try:
            await self._operations.forward(OWN_WORK, STAT_FILE, box.record.id, StatRequest(path=program))
        except FileMissing:
            return None
        return program

    async def _there(self, box: LiveSandbox, name: str) -> bool:
        """Whether the sandbox has a program of that name outside the workspace. Rules then mean that one: an agent
        could put another into the workspace.
        """
        wanted = CommandRequest(command=["/bin/sh", "-c", 'command -v -- "$1"', "sh", name], timeout=LOOK_S)
        return (await self._operations.run_command(OWN_WORK, box.record.id, wanted)).exit_code == 0

    async def remove(self, box: LiveSandbox, server: str) -> None:
        """Delete what npm installed for a server."""
        try:
            unwanted = DeleteRequest(path=f"{NPM_PLACE}/{server}", recursive=True)
            await self._operations.forward(OWN_WORK, DELETE_FILE, box.record.id, unwanted)
        except FileMissing:
            return


def declared(record: McpServerRecord) -> McpServerRequest:
    """Return the declaration of a server as the model."""
    return McpServerRequest.model_validate(record.declaration)


def launch(record: McpServerRecord, environment: str | None) -> Json:
    """Return the declaration for the supervisor. `environment` is the name of the Python environment."""
    request = declared(record)
    command = list(request.command)
    if record.program is not None:
        command[0] = record.program
    return {
        "command": command,
        "cwd": request.cwd,
        "variables": dict(request.variables),
        "secrets": dict(request.secret_variables),
        "environment": environment,
        "generation": record.generation,
    }


def policy_arguments(server: str, request: McpServerRequest) -> dict[str, object]:
    """Return everything that policy decides of a declaration."""
    arguments: dict[str, object] = {"server": server, "command": list(request.command)}
    if request.cwd is not None:
        arguments["cwd"] = request.cwd
    if request.variables or request.secret_variables:
        arguments["env"] = request.variables | {
            name: f"the secret {secret}" for name, secret in request.secret_variables.items()
        }
    if request.requirements is not None:
        arguments["install"] = [["pip", "install", *request.requirements]]
    if request.npm is not None:
        installs = arguments.setdefault("install", [])
        assert isinstance(installs, list)
        installs.append(["npm", "install", *request.npm])
    return arguments
