"""Tools by name, and code by language: each is one of the other operations."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from pydantic import ValidationError

from carrel.control.operations.caller import Caller
from carrel.control.operations.operations import Operations
from carrel.control.python.calls import PythonOperations
from carrel.errors import InvalidRequest
from carrel.models import ExecuteRequest, ExecuteResult, PythonRequest, ToolRequest, ToolResult

TOOLS = ("create_file", "python_exec")


class Tools:
    """Calls tools by their names, and runs code by its language."""

    def __init__(self, operations: Operations, python: PythonOperations):
        self._operations = operations
        self._python = python

    async def execute(self, caller: Caller, name: str, request: ExecuteRequest) -> ExecuteResult:
        """Run code with files; the result has the names of the files that it produced."""
        if request.language == "python":
            return await self._python.execute(caller, name, request)
        return await self._operations.execute(caller, name, request)

    async def call(self, caller: Caller, name: str, request: ToolRequest) -> ToolResult:
        """Call a named tool: `create_file` or `python_exec`."""
        if request.tool_name not in TOOLS:
            raise InvalidRequest(
                f"there is no tool '{request.tool_name}'", field="tool_name", hint=f"the tools are: {', '.join(TOOLS)}"
            )
        if request.tool_name == "python_exec":
            ran = await self._python.run(caller, name, python_exec(request.params))
            return ToolResult(tool_name=request.tool_name, result=ran.model_dump(mode="json"))
        path, content, mode = create_file(request.params)
        info = await self._operations.write_file(caller, name, path, content, mode=mode)
        return ToolResult(tool_name=request.tool_name, result=info.model_dump(mode="json"))


def create_file(params: Mapping[str, object]) -> tuple[str, bytes, str | None]:
    """Return the path, content and mode of the file."""
    unknown = sorted(set(params) - {"path", "content", "content_base64", "mode"})
    if unknown:
        raise InvalidRequest(
            f"create_file has no parameter '{unknown[0][:100]}'",
            field=f"params.{unknown[0][:100]}",
            hint="it takes path, content or content_base64, and mode",
        )
    path, text, encoded, mode = (params.get(key) for key in ("path", "content", "content_base64", "mode"))
    if not isinstance(path, str):
        raise InvalidRequest("create_file needs a path", field="params.path", hint="give a path in the workspace")
    if mode is not None and not isinstance(mode, str):
        raise InvalidRequest("the mode is text such as '644'", field="params.mode", hint="quote it")
    if (text is None) == (encoded is None):
        raise InvalidRequest(
            "create_file needs exactly one of content and content_base64",
            field="params.content",
            hint="content for text, content_base64 for bytes",
        )
    try:
        if isinstance(text, str):
            return path, text.encode(), mode
        if isinstance(encoded, str):
            return path, base64.b64decode(encoded, validate=True), mode
    except (UnicodeEncodeError, binascii.Error, ValueError):
        pass
    field = "params.content" if text is not None else "params.content_base64"
    raise InvalidRequest("the content is not text or not base64", field=field, hint="send a string")


def python_exec(params: Mapping[str, object]) -> PythonRequest:
    """Return the request for the code."""
    try:
        return PythonRequest.model_validate(params)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(["params", *map(str, first["loc"])])[:100]
        hint = f"it takes {', '.join(name for name in PythonRequest.model_fields if name != 'interactive')}"
        raise InvalidRequest(f"python_exec: {first['msg']}", field=where, hint=hint) from None
