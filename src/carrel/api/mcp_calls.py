"""A plain call of a tool, told from all other requests of MCP clients, and its answer.

Most requests are of this one kind, and what serves them all costs each of them more than the call itself does. So one
that is beyond doubt is taken from here: judged by the package's own rules and shaped by them. Whatever is not, is None
here, and the package says what is wrong with it. Pure: no I/O.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from mcp import MCPError, types
from mcp.server.runner import modern_error_data
from mcp.shared.inbound import (
    ERROR_CODE_HTTP_STATUS,
    InboundModernRoute,
    classify_inbound_request,
    find_duplicated_routing_header,
)
from mcp_types import SERVER_INFO_META_KEY, methods
from pydantic import ValidationError
from starlette.types import Scope

from carrel.control.supervisor.connection import Json

_CALL = "tools/call"
_HEADERS = frozenset({b"accept", b"content-type", b"mcp-protocol-version", b"mcp-method", b"mcp-name"})


@dataclass(frozen=True, slots=True)
class PlainCall:
    """A call whose client wants nothing but the answer."""

    id: int | str
    version: str
    params: types.CallToolRequestParams

    def answered(self, result: Json, info: Json) -> tuple[int, bytes]:
        """The status and the body of the answer. `MCPError` when the result is none of the protocol."""
        try:
            valid = types.CallToolResult.model_validate(result).model_dump(
                mode="json", by_alias=True, exclude_none=True
            )
            shaped = methods.serialize_server_result(_CALL, self.version, valid)
        except ValidationError:
            raise nonsense() from None
        shaped["_meta"] = {SERVER_INFO_META_KEY: info}
        return 200, _encoded({"jsonrpc": "2.0", "id": self.id, "result": shaped})

    def refused(self, error: MCPError) -> tuple[int, bytes]:
        """The same for an error."""
        data = modern_error_data(error)
        told = data.model_dump(mode="json", by_alias=True, exclude_none=True)
        return ERROR_CODE_HTTP_STATUS.get(data.code, 200), _encoded({"jsonrpc": "2.0", "id": self.id, "error": told})


def nonsense() -> MCPError:
    """What is told when a hosted server answers something that is none of the protocol."""
    return MCPError(code=types.INTERNAL_ERROR, message="the MCP server answered something else")


def plain_call(scope: Scope, body: bytes) -> PlainCall | None:
    """The call that a request is, when it is one without doubt and its client did not ask to be told of progress."""
    given = [pair for pair in scope["headers"] if pair[0] in _HEADERS]
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in given]
    headers = dict(reversed(pairs))  # of two alike the first counts
    if headers.get("mcp-method") != _CALL or find_duplicated_routing_header(pairs) is not None:
        return None
    if headers.get("content-type", "").lower() != "application/json" or not _takes_both(headers.get("accept", "")):
        return None
    try:
        message = json.loads(body)
        asked = types.JSONRPCRequest.model_validate(message)
        route = classify_inbound_request(message, headers=headers)
        if asked.method != _CALL or not isinstance(route, InboundModernRoute) or asked.params is None:
            return None
        if "progressToken" in asked.params["_meta"]:
            return None
        methods.validate_client_request(_CALL, route.protocol_version, asked.params)
        params = types.CallToolRequestParams.model_validate(asked.params, by_name=False)
    except (ValueError, KeyError, RecursionError):
        return None
    return PlainCall(asked.id, route.protocol_version, params)


def _takes_both(accept: str) -> bool:
    """Whether an Accept header is the one that clients of the protocol send."""
    return {each.strip() for each in accept.split(",")} >= {"application/json", "text/event-stream"}


def _encoded(message: Json) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()
