"""Tokens: create, list, revoke. A token is shown once, when it is created."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from starlette.responses import Response

from carrel.api.guard import GuardedRouter
from carrel.api.parameters import Path, Query
from carrel.api.parts import Plane, Who, as_json
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.errors import NotFound
from carrel.identity import Grant, Identity, OwnerKind, Scope, Token
from carrel.models import IdentityInfo, NewToken, TokenInfo, TokenPage, TokenRequest
from carrel.models.operations import CREATE_TOKEN, GET_IDENTITY, GET_TOKEN, LIST_TOKENS, REVOKE_TOKEN

router = GuardedRouter(tags=["tokens"])

TokenId = Annotated[str, Path(min_length=1, max_length=64, description="id of a token")]


def _time(moment: float | None) -> datetime | None:
    return None if moment is None else datetime.fromtimestamp(moment, UTC)


def _values(token: Token) -> dict[str, object]:
    kept = token._asdict()
    del kept["hash"]
    moments = {name: _time(kept[name]) for name in ("created_at", "expires_at", "revoked_at", "used_at")}
    return {**kept, **moments}


def _within(token: Token, identity: Identity) -> bool:
    """Whether a token reaches no further than the caller: only then may the caller see and revoke it."""
    if identity.namespace is not None and token.namespace != identity.namespace:
        return False
    return identity.contexts is None or (token.contexts is not None and identity.contexts >= set(token.contexts))


async def _known(caller: Caller, plane: ControlPlane, token_id: str) -> Token:
    token = await plane.tokens.get(token_id)
    if not _within(token, caller.identity):
        raise NotFound(f"there is no token '{token_id}'", field="id", hint="list the tokens to see their ids")
    return token


@router.operation(CREATE_TOKEN, "Create a token", NewToken, 413, status=201)
async def create_token(body: TokenRequest, plane: Plane, caller: Who) -> Response:
    """A token cannot have more rights than its creator. Only this answer shows the token."""
    expires = body.expires_at
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    grant = Grant(
        body.name,
        OwnerKind(body.kind),
        [Scope(scope) for scope in body.scopes],
        body.namespace,
        body.contexts,
        None if expires is None else expires.timestamp(),
    )
    async with plane.operations.admit(caller, CREATE_TOKEN, body.model_dump(mode="json", exclude_none=True)):
        text, token = await plane.tokens.issue(grant, caller.identity)
    answer = as_json(NewToken.model_validate({**_values(token), "token": text}), 201)
    answer.headers["cache-control"] = "no-store"
    return answer


@router.operation(LIST_TOKENS, "List tokens", TokenPage)
async def list_tokens(
    plane: Plane,
    caller: Who,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=512, description="`next` of the page before")] = None,
) -> Response:
    """Newest first, revoked ones too. Only those that reach no further than the caller's token."""
    found, following = await plane.tokens.page(limit=limit, cursor=cursor)
    mine = [TokenInfo.model_validate(_values(token)) for token in found if _within(token, caller.identity)]
    return as_json(TokenPage(items=mine, next=following))


@router.operation(GET_IDENTITY, "The identity of the caller", IdentityInfo)
async def get_identity(caller: Who) -> Response:
    """The subject, scopes and reach of the token of this request. Every token may ask."""
    identity = caller.identity
    values = {name: getattr(identity, name) for name in ("subject", "kind", "namespace", "token_id")}
    contexts = None if identity.contexts is None else sorted(identity.contexts)
    expires = _time(identity.expires_at)
    scopes = sorted(identity.scopes)
    return as_json(
        IdentityInfo.model_validate({**values, "scopes": scopes, "contexts": contexts, "expires_at": expires})
    )


@router.operation(GET_TOKEN, "One token", TokenInfo, 404)
async def get_token(token_id: TokenId, plane: Plane, caller: Who) -> Response:
    """Everything but the token itself."""
    return as_json(TokenInfo.model_validate(_values(await _known(caller, plane, token_id))))


@router.operation(REVOKE_TOKEN, "Revoke a token", TokenInfo, 404)
async def revoke_token(token_id: TokenId, plane: Plane, caller: Who) -> Response:
    """It is invalid at once here, and within seconds on other servers. Revoking twice is not an error."""
    await _known(caller, plane, token_id)
    async with plane.operations.admit(caller, REVOKE_TOKEN, {"id": token_id}):
        return as_json(TokenInfo.model_validate(_values(await plane.tokens.revoke(token_id))))
