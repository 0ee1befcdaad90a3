"""Operations on environments: build, attach, detach. Each passes admission, the first two as the equivalent `pip
install`.
"""

from __future__ import annotations

from carrel.control.operations.caller import OWN_WORK, Caller
from carrel.control.operations.operations import Operations, OwnOperations, require_open
from carrel.control.python.environment_checks import Requester, requirements_of
from carrel.control.python.environments import Environments, Say
from carrel.control.python.template_packages import TemplatePackages
from carrel.control.sessions.sessions import Sessions
from carrel.errors import Conflict, NotFound
from carrel.isolation.launchers import PLACE, VENV
from carrel.models import (
    CommandRequest,
    EnvironmentAttach,
    EnvironmentBuild,
    EnvironmentInfo,
    EnvironmentList,
    EnvironmentRequest,
    State,
)
from carrel.models.operations import ATTACH_ENV, BUILD_ENV, DETACH_ENV
from carrel.providers.base import Capability
from carrel.store import SessionRecord
from carrel.store.environments import EnvironmentRecord


class EnvironmentUse:
    """The operations of callers on environments."""

    def __init__(
        self,
        environments: Environments,
        packages: TemplatePackages,
        sessions: Sessions,
        operations: Operations,
        own: OwnOperations,
    ):
        self._own = own
        self._environments = environments
        self._packages = packages
        self._sessions = sessions
        self._operations = operations

    async def build(self, caller: Caller, request: EnvironmentBuild, say: Say | None = None) -> EnvironmentInfo:
        """Build an environment under the policy of the server, and give it its label."""
        asked = requirements_of(request.requirements)  # before the decision: this refuses options of pip
        arguments = {"command": ["pip", "install", *asked], "name": request.name}
        async with self._operations.admit(caller, BUILD_ENV, arguments):
            record = await self._environments.ensure(request, Requester(), say)
            if request.name is not None:
                record = await self._environments.label(record, request.name)
            return self._environments.info(caller, record)

    async def attach(
        self, caller: Caller, name: str, request: EnvironmentAttach, say: Say | None = None
    ) -> EnvironmentInfo:
        """Attach an environment to a running sandbox, built if there is none yet. The sandbox sees it at once, until
        the session ends.
        """
        box = await self._sessions.find(name)
        require_open(caller, box)  # the environment can become the Python of later calls
        box.provider.require(Capability.ENVIRONMENTS)
        if request.template:
            return await self._packages.info(caller, box, say)
        request = await self._here(caller, request, box.record)
        asker, holder = Requester.of(box.record), box.record.owner
        known = None if request.env is None else self._environments.find(caller, request.env, holder)
        # A named environment may have been built under another policy: all its packages are decided.
        named = request.requirements or () if known is None else [each["name"] for each in known.packages]
        asked = requirements_of(named)
        arguments = {"command": ["pip", "install", *asked], "env": request.env}

        async def find() -> EnvironmentRecord:
            if known is not None:
                # its label may have moved
                return self._environments.known(known.name) or self._environments.find(caller, known.name)
            wanted = EnvironmentRequest(
                requirements=request.requirements or [], python=request.python, index=request.index
            )
            return await self._environments.ensure(wanted, asker, say)

        record = box.record
        async with self._operations.admit(caller, ATTACH_ENV, arguments, record.id, record.context_id):
            box.in_flight += 1  # a sandbox that waits for its environment is not idle
            try:
                found = await self._environments.hold(find, holder)
                info = self._environments.info(caller, found)
                if request.venv:
                    await self._base(record.id, info.path)
                return info
            finally:
                box.in_flight -= 1
                box.touch()

    async def list(self, caller: Caller, name: str) -> EnvironmentList:
        record = await self._kept(name)
        return await self._environments.of(caller, record.owner)

    async def detach(self, caller: Caller, name: str, env: str) -> None:
        """Release an environment, so that it may be removed when nobody else holds it."""
        record = await self._kept(name)
        running = [each for each in self._sessions.live() if each.record.id == record.id]
        for box in running:
            require_open(caller, box)
        async with self._operations.admit(caller, DETACH_ENV, {"env": env}, record.id, record.context_id):
            await self._environments.release(caller, env, record.owner)
            for box in running:
                box.attached.clear()

    async def _here(self, caller: Caller, request: EnvironmentAttach, record: SessionRecord) -> EnvironmentAttach:
        """Return a request by requirements for a name that the session holds on another server and that is unknown
        here.
        """
        holder = record.owner
        try:
            if request.env is not None:
                self._environments.find(caller, request.env, holder)
        except NotFound:
            found = await self._environments.had_elsewhere(request.env or "", holder)
            if found is None:
                raise
            return EnvironmentAttach(requirements=found.requirements, python=found.python, venv=request.venv)
        return request

    async def _kept(self, name: str) -> SessionRecord:
        """Return the record of a session that is not terminated."""
        record = await self._sessions.record(name)
        if record.state is State.TERMINATED:
            await self._sessions.find(name)  # raises
        return record

    async def _base(self, name: str, path: str) -> None:
        command = CommandRequest(command=[f"{PLACE}/carrel-venv", path], timeout=60)
        result = await self._own.run_command(OWN_WORK, name, command)
        if result.exit_code != 0:
            words = (result.stderr or result.stdout).strip()[:500]
            raise Conflict(f"{VENV} could not be made: {words}", field="venv", hint="remove it, or do without")
