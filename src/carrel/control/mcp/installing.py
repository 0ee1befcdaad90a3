"""What an MCP server needs to run: a Python environment, or npm packages in the workspace. Whoever asks has passed the
door with all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from carrel.control.mcp.request_checks import NPM_PLACE, declared
from carrel.control.operations.call import SELF
from carrel.control.operations.operations import Operations
from carrel.control.python.environment_checks import Asker, requirements_of
from carrel.control.python.environments import Environments
from carrel.control.sessions.live import LiveSandbox
from carrel.errors import FileMissing, InvalidRequest
from carrel.isolation.rootfs import WORKSPACE
from carrel.models import CommandRequest, EnvironmentRequest, McpServerRequest
from carrel.models.files import DeleteRequest, StatRequest
from carrel.models.operations import DELETE_FILE, STAT_FILE
from carrel.providers.base import Capability, Provider
from carrel.store import SessionRecord
from carrel.store.environments import EnvironmentRecord
from carrel.store.mcp_servers import McpServerRecord

LONGEST_WORDS = 2000
LOOK_S = 30.0


class Installing:
    """Installs what servers need."""

    def __init__(
        self, environments: Environments, operations: Operations, providers: Mapping[str, Provider], timeout_s: float
    ):
        self._environments = environments
        self._operations = operations
        self._providers = providers
        self._timeout_s = timeout_s

    async def python(self, session: SessionRecord, request: McpServerRequest, had: str = "") -> str | None:
        """The environment that a server runs in, held by its context from now on: the one it `had` if that is still
        there. None when it needs none.
        """
        if request.requirements is None:
            return None
        provider = self._providers.get(session.provider)
        if provider is not None:
            provider.require(Capability.ENVIRONMENTS)
        wanted = EnvironmentRequest(requirements=list(requirements_of(request.requirements)), python=request.python)
        asker = Asker.of(session)

        async def find() -> EnvironmentRecord:
            return self._environments.known(had) or await self._environments.ensure(wanted, asker)

        return (await self._environments.hold(find, session.owner)).name

    async def ready(self, session: SessionRecord, record: McpServerRecord) -> McpServerRecord:
        """A server whose environment lies ready here and is held: it may have been removed when nobody had it, or be on
        another server.
        """
        if record.environment is None:
            return record
        return replace(record, environment=await self.python(session, declared(record), record.environment))

    async def npm(self, box: LiveSandbox, server: str, request: McpServerRequest) -> str | None:
        """Install npm packages in the sandbox of a context, by its own way out. Where the program of the command lies
        among them; None when it is none of theirs, or one that the sandbox has anyhow.
        """
        place = f"{WORKSPACE}/{NPM_PLACE}/{server}"
        # A project of its own, or npm would look for one above. `--prefix` would hide the host's settings from it.
        await self._operations.write_file(box.record.id, f"{place}/package.json", b'{"private": true}\n', actor=SELF)
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-progress", "--loglevel=error"]
        wanted = CommandRequest(command=[*command, *(request.npm or ())], cwd=place, timeout=self._timeout_s)
        ran = await self._operations.run_command(box.record.id, wanted, SELF)
        if ran.timed_out or ran.exit_code != 0:
            said = (ran.stderr or ran.stdout).strip()[-LONGEST_WORDS:]
            why = f"within {self._timeout_s:g} seconds" if ran.timed_out else said or f"it ended with {ran.exit_code}"
            raise InvalidRequest(
                f"the npm packages cannot be installed: {why}",
                field="npm",
                hint="the sandbox needs npm, and a way out to the registry that its policy allows",
            )
        name = request.command[0]
        if "/" in name or await self._there(box, name):
            return None
        program = f"{place}/node_modules/.bin/{name}"
        try:
            await self._operations.forward(STAT_FILE, box.record.id, StatRequest(path=program), SELF)
        except FileMissing:
            return None
        return program

    async def _there(self, box: LiveSandbox, name: str) -> bool:
        """Whether a sandbox has a program of that name. Then it is the one that rules mean: the workspace is the
        agent's, who could put another there.
        """
        wanted = CommandRequest(command=["/bin/sh", "-c", 'command -v -- "$1"', "sh", name], timeout=LOOK_S)
        return (await self._operations.run_command(box.record.id, wanted, SELF)).exit_code == 0

    async def remove(self, box: LiveSandbox, server: str) -> None:
        """Delete what npm installed for a server."""
        try:
            unwanted = DeleteRequest(path=f"{NPM_PLACE}/{server}", recursive=True)
            await self._operations.forward(DELETE_FILE, box.record.id, unwanted, SELF)
        except FileMissing:
            return
