"""Operations that run Python code. Each passes admission as the equivalent `python3 -c`, so that a policy that denies
the interpreter denies this too. The audit log has the code, cut and without secrets, and its hash.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Protocol

from carrel.control.governance.redaction import clean_info
from carrel.control.operations.call import Traffic
from carrel.control.operations.caller import Caller
from carrel.control.operations.checks import brought, size_of
from carrel.control.operations.operations import Operations
from carrel.control.python.environment_use import EnvironmentUse
from carrel.control.python.template_packages import TemplatePackages
from carrel.control.sessions.live import LiveSandbox
from carrel.control.supervisor.connection import Json
from carrel.errors import InvalidRequest, LimitExceeded
from carrel.models import (
    MAX_PYTHON_TIMEOUT_S,
    PYTHON_TIMEOUT_S,
    CommandInfo,
    EnvironmentAttach,
    ExecuteRequest,
    ExecuteResult,
    PythonRequest,
    PythonResult,
)
from carrel.models.operations import RUN_PYTHON, START_PYTHON
from carrel.redaction.redact import Redactor

Redactors = Callable[[str | None], Awaitable[Redactor]]
"""Returns the redactor of a context, or of an ephemeral sandbox."""


class NamesEnvironment(Protocol):
    """A request that may name an environment."""

    @property
    def env(self) -> str | None: ...
    @property
    def requirements(self) -> list[str] | None: ...


class PythonOperations:
    """Runs Python code in sandboxes."""

    def __init__(
        self, operations: Operations, redactor: Redactors, environments: EnvironmentUse, packages: TemplatePackages
    ):
        self._operations = operations
        self._redactor = redactor
        self._environments = environments
        self._packages = packages

    async def run(self, caller: Caller, name: str, request: PythonRequest) -> PythonResult:
        """Run code to its end."""
        if request.interactive:
            raise InvalidRequest(
                "an interactive call runs in the background", field="interactive", hint="start it, then send input"
            )
        async with self._operations.enter(caller, name, RUN_PYTHON, _asked(request)) as (box, traffic):
            body, timeout = await self._body(caller, box, request, traffic)
            ran = await box.connection.run_python(body, timeout, request.output_limit)
            result = await self._operations.conclude(box, traffic, ran)
            redactor = await self._redactor(box.record.owner)
            return result.model_copy(update={"files_produced": list(map(redactor.text, result.files_produced))})

    async def start(self, caller: Caller, name: str, request: PythonRequest) -> CommandInfo:
        """Start code in the background: from then on it is a command like any other."""
        async with self._operations.enter(caller, name, START_PYTHON, _asked(request)) as (box, traffic):
            body, _ = await self._body(caller, box, request, traffic)
            info = await box.connection.start_python(body)
            self._operations.started(caller, box, traffic, START_PYTHON, info.id)
            return clean_info(await self._redactor(box.record.owner), info)

    async def execute(self, caller: Caller, name: str, request: ExecuteRequest) -> ExecuteResult:
        """Run code for the route `/execute`, with the result of that route."""
        timeout = None if request.timeout == "default" else request.timeout
        if timeout is not None and not 0 < timeout <= MAX_PYTHON_TIMEOUT_S:
            raise InvalidRequest(
                f"a call of Python may take {MAX_PYTHON_TIMEOUT_S:.0f} seconds at most",
                field="timeout",
                hint="start a command for what takes longer",
            )
        if request.env_name is not None and request.requirements is not None:
            raise InvalidRequest("name an environment or give requirements, not both", field="env_name")
        env, requirements = request.env_name, request.requirements
        if requirements is not None and request.python_index is not None:
            wanted = EnvironmentAttach(requirements=requirements, index=request.python_index)
            env, requirements = (await self._environments.attach(caller, name, wanted)).name, None
        call = PythonRequest(
            code=request.code, timeout=timeout, files=request.files, env=env, requirements=requirements
        )
        result = await self.run(caller, name, call)
        return ExecuteResult(
            output=result.stdout,
            stderr=result.stderr,
            exit_code=result.exit_code,
            signal=result.signal,
            timed_out=result.timed_out,
            oom_killed=result.oom_killed,
            truncated=result.truncated,
            execution_time_ms=result.duration_ms,
            files_produced=result.files_produced,
            files_truncated=result.files_truncated,
        )

    async def _body(
        self, caller: Caller, box: LiveSandbox, request: PythonRequest, traffic: Traffic
    ) -> tuple[bytes, float]:
        if request.files and box.over_quota is not None:
            raise LimitExceeded(box.over_quota, field="disk_mb", hint="delete files first, then write again")
        if request.files or request.stdin is not None:
            given = sum(3 * len(text.rstrip("=")) // 4 for text in request.files.values())
            traffic.count_in(given + size_of(request.stdin))
        timeout = request.timeout or min(PYTHON_TIMEOUT_S, box.record.limits.timeout_s or PYTHON_TIMEOUT_S)
        body: Json = request.model_dump(exclude={"requirements"}, exclude_defaults=True)
        body |= {"timeout": timeout, "env": await self.environment(caller, box, request)}
        return json.dumps(body, separators=(",", ":")).encode(), timeout

    async def environment(self, caller: Caller, box: LiveSandbox, request: NamesEnvironment) -> str | None:
        """Return the name of the requested environment in the sandbox, attached if necessary; None for the packages of
        the template, which need no name.
        """
        if request.env is None and request.requirements is None:
            await self._packages.ready(box)
            return None
        key = request.env or json.dumps(request.requirements)
        name = box.attached.get(key)
        if name is None:
            wanted = EnvironmentAttach(env=request.env, requirements=request.requirements)
            name = (await self._environments.attach(caller, box.record.id, wanted)).name
            box.attached.put(key, name)
        return name


def _asked(request: PythonRequest) -> dict[str, object]:
    """Return everything that policy decides of a call."""
    arguments: dict[str, object] = {"command": ["python3", "-c", request.code, *request.args]}
    chosen = request.model_dump(include={"cwd", "stdin", "timeout", "requirements"}, exclude_defaults=True)
    arguments |= chosen
    if request.variables:
        arguments["env"] = dict(request.variables)
    if request.env is not None:
        arguments["environment"] = request.env
    return arguments | brought(request.files)
