"""Tools and their calls: declaration, parameters, JSON schemas, and the context, approval and progress of a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from mcp import types
from pydantic import Field, ValidationError

from carrel.errors import InvalidRequest
from carrel.integrations.mcp.answers import ToolAnswer
from carrel.integrations.mcp.clients import ContextAccess, T, Work
from carrel.models.base import Request
from carrel.primitives import tasks

REPORT_EVERY_S = 1.0

Report = Callable[[float, str], Awaitable[None]]
"""Reports the progress of a call: a growing number, and a text."""


class Parameters(Request):
    """The parameters of every tool that may need approval."""

    approval: str | None = Field(
        default=None,
        max_length=64,
        description="The id of an approval from an earlier answer, after a person has approved it.",
    )


@dataclass
class ToolCall:
    """One call of a tool."""

    access: ContextAccess
    approval: str | None = None
    report: Report | None = None
    began: float = field(default_factory=time.monotonic)

    async def do(self, work: Work[T]) -> T:
        """Do the tool's operation, with the approval if there is one."""
        return await self.access.do(work, self.approval)

    @property
    def elapsed(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.began

    @asynccontextmanager
    async def reporting(self, words: Callable[[], str]) -> AsyncIterator[None]:
        """Report progress every second during the block, if the caller wants that."""
        if self.report is None:
            yield
            return
        ticking = asyncio.ensure_future(self._tick(self.report, words))
        try:
            yield
        finally:
            await tasks.cancel([ticking])

    async def _tick(self, report: Report, words: Callable[[], str]) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            await report(self.elapsed, words())


P = TypeVar("P", bound=Request)


@dataclass(frozen=True)
class Tool(Generic[P]):
    """A tool: its description for the model, its parameters, and its function."""

    name: str
    title: str
    description: str
    parameters: type[P]
    run: Callable[[ToolCall, P], Awaitable[ToolAnswer]]
    read_only: bool = False
    destructive: bool = False
    idempotent: bool = False
    open_world: bool = False
    output: dict[str, Any] | None = None
    """The properties of the structured answer. None of them is required, because errors have others."""

    def declared(self) -> types.Tool:
        """Declare the tool for MCP."""
        return types.Tool(
            name=self.name,
            title=self.title,
            description=self.description,
            input_schema=schema_of(self.parameters),
            output_schema=None if self.output is None else {"type": "object", "properties": self.output},
            annotations=types.ToolAnnotations(
                title=self.title,
                read_only_hint=self.read_only,
                destructive_hint=self.destructive,
                idempotent_hint=self.idempotent or self.read_only,
                open_world_hint=self.open_world,
            ),
        )

    def parse(self, arguments: dict[str, Any] | None) -> P:
        """Check the arguments of a call. Raises `InvalidRequest`."""
        try:
            return self.parameters.model_validate(arguments or {})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))[:100]
            raise InvalidRequest(
                f"{self.name}: {first['msg']}",
                field=where or None,
                hint=f"it takes {', '.join(schema_of(self.parameters)['properties']) or 'nothing'}",
            ) from None

    async def call(self, call: ToolCall, parameters: P) -> ToolAnswer:
        """Run it."""
        return await self.run(call, parameters)


def schema_of(model: type[Request]) -> dict[str, Any]:
    """Return a simple JSON schema of a tool's parameters. Limits that it leaves out are checked by `parse`."""
    whole = model.model_json_schema()
    properties = {name: _simple(value) for name, value in whole.get("properties", {}).items()}
    if "approval" in properties:  # seldom used, so it comes last
        properties["approval"] = properties.pop("approval")
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if "required" in whole:
        schema["required"] = whole["required"]
    return schema


_SIMPLE = ("type", "description", "enum", "default", "minimum", "maximum")
_LARGE = 10**6


def _simple(value: dict[str, Any]) -> dict[str, Any]:
    """Remove limits that only catch nonsense, and null where it means that the parameter is not given."""
    options = [each for each in value.get("anyOf", ()) if each.get("type") != "null"]
    if options:
        assert len(options) == 1, "one type for each parameter"
        value = {**options[0], **value}
    simple = {key: value[key] for key in _SIMPLE if value.get(key) is not None}
    if simple.get("maximum", 0) > _LARGE:
        del simple["maximum"]
    if "items" in value:
        simple["items"] = _simple(value["items"])
    if simple["type"] == "object":
        simple["additionalProperties"] = {"type": "string"}
    return simple
