"""Plain calls of tools by MCP clients: recognizes them, and builds their answers.

Most requests are plain calls, and the general machinery of the `mcp` package costs more than the call itself. So a
request that is certainly a plain call takes a shortcut here, with the validation and the answer format of the package
(see docs/decisions/0015). For every other request `plain_call` returns None, and the package serves it. Pure: no I/O.
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
    """A call whose client wants only the answer."""

    id: int | str
    version: str
    params: types.CallToolRequestParams

    def answered(self, result: Json, info: Json) -> tuple[int, bytes]:
        """Return the status and the body of the answer. `MCPError` when the result does not follow the protocol."""
        try:
            valid = types.CallToolResult.model_validate(result).model_dump(
                mode="json", by_alias=True, exclude_none=True
            )
            shaped = methods.serialize_server_result(_CALL, self.version, valid)
        except ValidationError:
            raise invalid_answer() from None
        shaped["_meta"] = {SERVER_INFO_META_KEY: info}
        return 200, _encoded({"jsonrpc": "2.0", "id": self.id, "result": shaped})

    def refused(self, error: MCPError) -> tuple[int, bytes]:
        """Return the status and the body of an error."""
        data = modern_error_data(error)
        shown = data.model_dump(mode="json", by_alias=True, exclude_none=True)
        return ERROR_CODE_HTTP_STATUS.get(data.code, 200), _encoded({"jsonrpc": "2.0", "id": self.id, "error": shown})


def invalid_answer() -> MCPError:
    """Return the error for an answer of a hosted server that does not follow the protocol."""
    return MCPError(code=types.INTERNAL_ERROR, message="the answer of the MCP server does not follow the protocol")


def plain_call(scope: Scope, body: bytes) -> PlainCall | None:
    """Return the call of a request if it is certainly a plain one, without progress notifications; else None."""
    given = [pair for pair in scope["headers"] if pair[0] in _HEADERS]
    pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in given]
    headers = dict(reversed(pairs))  # of equal names the first counts
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
    """Whether an Accept header accepts both content types of the protocol."""
    return {each.strip() for each in accept.split(",")} >= {"application/json", "text/event-stream"}


def _encoded(message: Json) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()
