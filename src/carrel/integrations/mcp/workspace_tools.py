"""The tools for the workspace as a whole: snapshots, forks, environments."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from carrel.errors import InvalidRequest
from carrel.integrations.mcp.answers import ToolAnswer
from carrel.integrations.mcp.calls import Parameters, Tool, ToolCall
from carrel.models import EnvironmentInfo, SnapshotInfo
from carrel.models.base import ContextId, Request
from carrel.models.environments import EnvironmentName, PythonVersion, Requirement

MOST_SHOWN = 50

_SNAPSHOT = {
    "id": {"type": "string"},
    "created_at": {"type": "string"},
    "reason": {"type": "string", "description": "why it was taken: request, checkpoint, stop or fork"},
    "bytes": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "what the workspace held"},
}
_ENVIRONMENT = {
    "name": {"type": "string", "description": "pass it as env to python"},
    "path": {"type": "string", "description": "where the sandbox has it: path/bin/python"},
    "labels": {"type": "array", "items": {"type": "string"}},
    "python": {"type": "string"},
    "requirements": {"type": "array", "items": {"type": "string"}},
}


class NoParameters(Request):
    """Parameters of a tool that has none."""


class Restore(Request):
    """Parameters of `restore_snapshot`."""

    snapshot: str = Field(min_length=1, max_length=64, description="The id that snapshot or list_snapshots answered.")


class ForkParameters(Request):
    """Parameters of `fork`."""

    context: ContextId = Field(description="The name of the new context: letters, digits, `.`, `_`, `:`, `-`.")
    snapshot: str | None = Field(
        default=None, min_length=1, max_length=64, description="The snapshot to start from; without it, the files now."
    )


class AttachEnvironment(Parameters):
    """Parameters of `attach_environment`."""

    env: EnvironmentName | None = Field(default=None, description="The name or a label of an environment there is.")
    requirements: list[Requirement] | None = Field(
        default=None, min_length=1, max_length=256, description='Packages as pip takes them, such as ["pandas>=2"].'
    )
    python: PythonVersion | None = Field(default=None, description="Only with requirements: such as 3.12.")


async def _snapshot(call: ToolCall, _given: NoParameters) -> ToolAnswer:
    info = await call.do(lambda box: box.snapshot())
    return ToolAnswer(f"Took snapshot {info.id}.", _picture(info))


async def _snapshots(call: ToolCall, _given: NoParameters) -> ToolAnswer:
    found = [each for each in await call.do(lambda box: box.snapshots()) if each.status == "ready"]
    lines = [f"{each.id}  {each.created_at:%Y-%m-%d %H:%M:%S}  {each.reason}" for each in found[:MOST_SHOWN]]
    value = {"snapshots": [_picture(each) for each in found[:MOST_SHOWN]], "truncated": len(found) > MOST_SHOWN}
    note = f"[{len(found) - MOST_SHOWN} older ones are not shown]" if len(found) > MOST_SHOWN else None
    return ToolAnswer("\n".join(lines) or "[no snapshot]", value, note=note)


async def _restore(call: ToolCall, given: Restore) -> ToolAnswer:
    await call.do(lambda box: box.restore(given.snapshot))
    return ToolAnswer(f"The workspace has the files of snapshot {given.snapshot} again. What ran was ended.")


async def _fork(call: ToolCall, given: ForkParameters) -> ToolAnswer:
    twin = await call.do(lambda box: box.fork(given.context, given.snapshot))
    return ToolAnswer(
        f"Context {twin.context_id} has a copy of the files. These tools stay in {call.access.context_id}: "
        f"to work in the copy, a connection for {twin.context_id} is needed.",
        {"context": twin.context_id, "from": call.access.context_id},
    )


async def _environments(call: ToolCall, _given: NoParameters) -> ToolAnswer:
    mine = await call.do(lambda box: box.envs.list())
    names = {each.name for each in mine}
    # Others are listed by label only: a name would be enough to use one without the check that attaching makes.
    others = [
        each.model_copy(update={"name": each.labels[0], "path": ""})
        for each in await call.access.client.envs.list()
        if each.labels and each.name not in names
    ][:MOST_SHOWN]
    lines = [f"{_env_line(each)} (attached)" for each in mine] + [_env_line(each) for each in others]
    value = {"attached": [_environment(each) for each in mine], "others": [_environment(each) for each in others]}
    return ToolAnswer("\n".join(lines) or "[no environment: attach_environment makes one]", value)


async def _attach(call: ToolCall, given: AttachEnvironment) -> ToolAnswer:
    if (given.env is None) == (given.requirements is None):
        raise InvalidRequest(
            "name an environment or give requirements, one of the two", field="env", hint='such as requirements ["six"]'
        )
    wanted = given.env if given.env is not None else given.requirements or []
    last = ["starting"]

    def note(line: str) -> None:
        last.append(line[:200])

    async with call.reporting(lambda: f"{call.elapsed:.0f} s: {last[-1]}"):
        info = await call.do(lambda box: box.envs.attach(wanted, python=given.python, progress=note))
    return ToolAnswer(
        f"Environment {info.name} is attached: pass it as env to python, or run {info.path}/bin/python.\n"
        f"Python {info.python}; {len(info.packages)} packages, among them {', '.join(info.requirements)}.",
        _environment(info),
    )


def _picture(info: SnapshotInfo) -> dict[str, object]:
    return info.model_dump(mode="json", include=set(_SNAPSHOT))


def _environment(info: EnvironmentInfo) -> dict[str, object]:
    return info.model_dump(mode="json", include=set(_ENVIRONMENT))


def _env_line(info: EnvironmentInfo) -> str:
    labels = f" [{', '.join(info.labels)}]" if info.labels and info.labels != [info.name] else ""
    return f"{info.name}{labels}  Python {info.python}  {', '.join(info.requirements)[:200]}"


_ENVIRONMENTS = {"type": "array", "items": {"type": "object", "properties": _ENVIRONMENT}}

TOOLS: list[Tool[Any]] = [
    Tool(
        name="snapshot",
        title="Take a snapshot",
        description="Take a snapshot of the workspace's files, to come back to with restore_snapshot. Take one before "
        "something that may go wrong; it is quick, and what runs goes on.",
        parameters=NoParameters,
        run=_snapshot,
        output=_SNAPSHOT,
    ),
    Tool(
        name="list_snapshots",
        title="List snapshots",
        description="The snapshots of this workspace, newest first.",
        parameters=NoParameters,
        run=_snapshots,
        read_only=True,
        output={
            "snapshots": {"type": "array", "items": {"type": "object", "properties": _SNAPSHOT}},
            "truncated": {"type": "boolean"},
        },
    ),
    Tool(
        name="restore_snapshot",
        title="Restore a snapshot",
        description="Give the workspace the files of a snapshot again. What was changed since is lost, and what runs "
        "is ended: take a snapshot before if it may still be wanted.",
        parameters=Restore,
        run=_restore,
        destructive=True,
    ),
    Tool(
        name="fork",
        title="ForkParameters the workspace",
        description="Make a new context with a copy of the files, now or of a snapshot, for another agent or another "
        "try. These tools stay in the workspace they are in.",
        parameters=ForkParameters,
        run=_fork,
        output={"context": {"type": "string"}, "from": {"type": "string"}},
    ),
    Tool(
        name="list_environments",
        title="List environments",
        description="The Python environments this sandbox has, and others with a label that can be attached.",
        parameters=NoParameters,
        run=_environments,
        read_only=True,
        output={"attached": _ENVIRONMENTS, "others": _ENVIRONMENTS},
    ),
    Tool(
        name="attach_environment",
        title="Attach a Python environment",
        description="Get Python packages: by requirements, built once and then there at once, or by the name of an "
        "environment. Answers with the name to pass as env to python. Building can take a minute.",
        parameters=AttachEnvironment,
        run=_attach,
        idempotent=True,
        open_world=True,
        output={**_ENVIRONMENT},
    ),
]
