"""What waits for a person: list, watch, decide. Knows the routes of approvals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from urllib.parse import quote

from pydantic import ValidationError

from carrel.client._async.connection import AsyncConnection, encoded
from carrel.client._async.wire import FAILED
from carrel.errors import PlatformError
from carrel.models import ApprovalBatchResult, ApprovalInfo, ApprovalPage, ApprovalScope, ApprovalState


class AsyncApprovals:
    """`client.approvals`."""

    def __init__(self, connection: AsyncConnection):
        self._connection = connection

    def list(
        self, *, state: ApprovalState | str | None = None, context_id: str | None = None
    ) -> AsyncIterator[ApprovalInfo]:
        """Approvals, newest first, page by page."""
        query = {"state": state, "context_id": context_id}
        return self._connection.pages(ApprovalPage, "/v1/approvals", query)

    async def get(self, id: str) -> ApprovalInfo:
        """One approval, with the decision once there is one."""
        return await self._connection.get(ApprovalInfo, _path(id))

    async def approve(
        self,
        id: str,
        *,
        scope: ApprovalScope | str = "once",
        rule: str | None = None,
        message: str | None = None,
    ) -> ApprovalInfo:
        """Allow what waits: `once`, the same operation in its `context` from now on, or a `rule` for the context."""
        body = {"approve": True, "scope": "rule" if rule is not None else scope, "rule": rule, "message": message}
        return await self._connection.post(ApprovalInfo, f"{_path(id)}/decide", encoded(body))

    async def deny(self, id: str, *, message: str | None = None) -> ApprovalInfo:
        """Refuse what waits; the message reaches the agent."""
        return await self._connection.post(
            ApprovalInfo, f"{_path(id)}/decide", encoded({"approve": False, "message": message})
        )

    async def decide_many(
        self,
        ids: Iterable[str],
        *,
        approve: bool,
        scope: ApprovalScope | str = "once",
        rule: str | None = None,
        message: str | None = None,
    ) -> ApprovalBatchResult:
        """The same decision for several; says of each what became of it."""
        given = {"scope": "rule" if rule is not None else scope, "rule": rule, "message": message}
        decision = {"approve": approve, **{name: value for name, value in given.items() if value is not None}}
        body = encoded({"ids": [*ids], "decision": decision})
        return await self._connection.post(ApprovalBatchResult, "/v1/approvals/decide", body)

    async def watch(self) -> AsyncIterator[ApprovalInfo]:
        """What waits now, then each approval that comes, is decided or expires. Ends with the server."""
        connection = self._connection
        response = await connection.stream("GET", "/v1/approvals/watch", timeout=connection.patience(None))
        held = b""
        try:
            async for piece in response.aiter_raw():
                *lines, held = (held + piece).split(b"\n")
                for line in lines:
                    yield _info(line)
        except FAILED as error:
            raise connection.unreachable(error) from None
        finally:
            await response.aclose()


def _path(id: str) -> str:
    return f"/v1/approvals/{quote(id, safe='')}"


def _info(line: bytes) -> ApprovalInfo:
    try:
        return ApprovalInfo.model_validate_json(line)
    except ValidationError:
        raise PlatformError("the server sent an approval that cannot be read") from None
