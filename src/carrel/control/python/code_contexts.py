"""Operations on code contexts: run cells, interrupt, restart, list, delete. A cell passes admission as the equivalent
`python3 -c`.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from carrel.control.governance.redaction import clean_info, in_thread_if_large
from carrel.control.operations.caller import Caller
from carrel.control.operations.checks import deadline_of, require_id, size_of
from carrel.control.operations.command_ends import CommandEnds
from carrel.control.operations.happened import LATER, told_of
from carrel.control.operations.operations import Operations
from carrel.control.python.calls import NamesEnvironment, Redactors
from carrel.control.sessions.live import LiveSandbox
from carrel.control.supervisor.connection import Json
from carrel.control.supervisor.frames import StreamChunk
from carrel.control.supervisor.memory import for_memory
from carrel.control.supervisor.streaming import stream_output
from carrel.errors import InvalidRequest
from carrel.models import CellError, CellRequest, CellResult, CodeContextInfo, CodeContextList, CommandInfo, RichResult
from carrel.models import operations as op
from carrel.models.events import EventKind
from carrel.redaction.redact import Redactor
from carrel.store.code_contexts import CodeContextStore

_BINARY = ("image/png", "image/jpeg", "image/gif", "application/pdf")

MOST_REMEMBERED = 256
"""Code contexts of one sandbox whose environment is cached."""

FindEnvironment = Callable[[Caller, LiveSandbox, NamesEnvironment], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class _EnvironmentName:
    env: str | None
    requirements: None = None


class CodeContextOperations:
    """The code contexts of sandboxes."""

    def __init__(
        self,
        operations: Operations,
        redactor: Redactors,
        environment: FindEnvironment,
        store: CodeContextStore,
        ends: CommandEnds,
    ):
        self._operations = operations
        self._ends = ends
        self._redactor = redactor
        self._environment = environment
        self._store = store

    async def run_cell(self, caller: Caller, name: str, context: str, request: CellRequest) -> CellResult:
        """Run a cell to its end, after the cells before it."""
        _checked(context)
        async with self._operations.enter(caller, name, op.RUN_CELL, _asked(context, request)) as (box, traffic):
            body, env = await self._body(caller, box, context, request)
            result, size = await box.connection.run_cell(context, body)
            await self._remember(box, context, env)
            shown = await self._shown(box, result, size, traffic.count_out)
            traffic.told = told_of(shown)
            return shown

    async def start_cell(self, caller: Caller, name: str, context: str, request: CellRequest) -> CommandInfo:
        """Put a cell into the queue; its id is for `cell_output` and `get_cell`."""
        _checked(context)
        async with self._operations.enter(caller, name, op.RUN_CELL, _asked(context, request)) as (
            box,
            traffic,
        ):
            body, env = await self._body(caller, box, context, request)
            info = await box.connection.start_cell(context, body)
            traffic.told = LATER
            what: dict[str, object] = {"context": context, "cell_id": info.id, "record": traffic.record}
            end = partial(box.connection.cell_end, context, info.id)
            self._ends.watch(box, EventKind.PYTHON_STARTED, what, end)
            await self._remember(box, context, env)
            return clean_info(await self._redactor(box.record.owner), info)

    async def cell_output(
        self, caller: Caller, name: str, context: str, cell_id: str, *, offset: int = 0, follow: bool = True
    ) -> AsyncIterator[StreamChunk]:
        """Yield the output of a cell from `offset` on."""
        require_id(cell_id)
        arguments = {"code_context": context, "cell": cell_id, "offset": offset}
        async with self._operations.enter(caller, name, op.CELL_OUTPUT, arguments) as (box, traffic):
            current = partial(self._redactor, box.record.owner)
            open_at = partial(box.connection.cell_output, context, cell_id, follow=follow)
            chunks = stream_output(box, traffic, current, open_at, offset)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    async def get_cell(self, caller: Caller, name: str, context: str, cell_id: str) -> CellResult:
        """Wait for the result of a cell."""
        require_id(cell_id)
        arguments = {"code_context": context, "cell": cell_id}
        async with self._operations.enter(caller, name, op.GET_CELL, arguments) as (box, traffic):
            return await self._shown(box, *await box.connection.get_cell(context, cell_id), traffic.count_out)

    async def list(self, caller: Caller, name: str) -> CodeContextList:
        async with self._operations.enter(caller, name, op.LIST_CODE_CONTEXTS, {}) as (box, _):
            return await box.connection.list_code_contexts()

    async def get(self, caller: Caller, name: str, context: str) -> CodeContextInfo:
        async with self._operations.enter(caller, name, op.GET_CODE_CONTEXT, {"code_context": context}) as (box, _):
            return await box.connection.code_context(context)

    async def interrupt(self, caller: Caller, name: str, context: str) -> CodeContextInfo:
        """Interrupt the cell that runs; the variables stay."""
        async with self._operations.enter(caller, name, op.INTERRUPT_CODE_CONTEXT, {"code_context": context}) as (
            box,
            _,
        ):
            return await box.connection.code_context(context, "interrupt")

    async def restart(self, caller: Caller, name: str, context: str) -> CodeContextInfo:
        """Start the code context again, without its variables."""
        async with self._operations.enter(caller, name, op.RESTART_CODE_CONTEXT, {"code_context": context}) as (box, _):
            return await box.connection.code_context(context, "restart")

    async def delete(self, caller: Caller, name: str, context: str) -> None:
        """End a code context and forget its cells."""
        arguments = {"code_context": context}
        async with self._operations.enter(caller, name, op.DELETE_CODE_CONTEXT, arguments) as (box, _):
            await self._remember(box, context, None)
            await box.connection.delete_code_context(context)

    # inner

    async def _body(
        self, caller: Caller, box: LiveSandbox, context: str, request: CellRequest
    ) -> tuple[bytes, str | None]:
        """Return the body of the request, and its environment."""
        body: Json = request.model_dump(exclude={"requirements"}, exclude_defaults=True)
        body["timeout"] = deadline_of(request.timeout, box.record.limits.timeout_s)
        wanted: NamesEnvironment = request
        had = await self._recalled(box, context)
        if request.env is None and request.requirements is None and had is not None:
            wanted = _EnvironmentName(had)  # the sandbox may have been restarted, here or on another server
        env = body["env"] = await self._environment(caller, box, wanted)
        if had is None:
            await self._remember(box, context, env)  # before the run: the cell may end the sandbox
        return json.dumps(body, separators=(",", ":")).encode(), env

    async def _recalled(self, box: LiveSandbox, context: str) -> str | None:
        if context not in box.code_contexts:
            if len(box.code_contexts) >= MOST_REMEMBERED:
                box.code_contexts.clear()
            box.code_contexts[context] = await self._store.environment(box.record.id, context)
        return box.code_contexts[context]

    async def _remember(self, box: LiveSandbox, context: str, env: str | None) -> None:
        if await self._recalled(box, context) != env:
            await self._store.put(box.record.id, context, env)
            box.code_contexts[context] = env

    async def _shown(
        self, box: LiveSandbox, result: CellResult, size: int, count_out: Callable[[int], None]
    ) -> CellResult:
        count_out(size_of(result.stdout) + size_of(result.stderr))
        result.oom_killed = result.status == "died" and await for_memory(box, result)
        redactor = await self._redactor(box.record.owner)
        return await in_thread_if_large(size, clean_cell, redactor, result)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _checked(context: str) -> None:
    if not _NAME.fullmatch(context):
        raise InvalidRequest(
            "the name of a code context has letters, digits, '.', '_' and '-'", field="name", hint="64 at most"
        )


def _asked(context: str, request: CellRequest) -> dict[str, object]:
    """Return everything that policy decides of a cell."""
    arguments: dict[str, object] = {"command": ["python3", "-c", request.code], "code_context": context}
    arguments |= request.model_dump(include={"timeout", "requirements"}, exclude_defaults=True)
    if request.variables:
        arguments["env"] = dict(request.variables)
    if request.env is not None:
        arguments["environment"] = request.env
    return arguments


def clean_cell(redactor: Redactor, result: CellResult) -> CellResult:
    """Remove secrets from the result of a cell."""
    fault = result.error
    changes: dict[str, object] = {
        "stdout": redactor.text(result.stdout),
        "stderr": redactor.text(result.stderr),
        "results": [_clean(redactor, each) for each in result.results],
        "error": None if fault is None else CellError.model_validate(redactor.value(fault.model_dump())),
    }
    return result.model_copy(update=changes)


def _clean(redactor: Redactor, shown: RichResult) -> RichResult:
    data: dict[str, str] = {}
    for form, text in shown.data.items():
        if form in _BINARY:
            try:
                data[form] = base64.b64encode(redactor.data(base64.b64decode(text, validate=True))).decode()
            except (binascii.Error, ValueError):
                continue  # not base64
        else:
            data[form] = redactor.text(text)
    return RichResult(kind=shown.kind, data=data)
