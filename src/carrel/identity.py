"""Identities, scopes and tokens: who a caller is and what it may do. Knows no request and no database.

An operation without a scope needs `administer`, so that one that somebody forgot to declare is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from carrel.errors import Denied, InvalidRequest, NotFound, Unauthorized
from carrel.models.base import namespace_of
from carrel.models.operations import OPERATIONS, TABLE
from carrel.models.operations import Scope as Scope  # noqa: PLC0414 - a name of this module too
from carrel.primitives.cache import Cache

PREFIX = "carrel_"
CACHE_S = 5.0
"""How long another server may still accept a token that was revoked on this one."""
CACHE_SIZE = 4096
USED_S = 3600.0
MAX_TOKEN = 512
MAX_CONTEXTS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
_CONTEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class OwnerKind(StrEnum):
    """The kind of a token's owner."""

    PERSON = "person"
    AGENT = "agent"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class ScopeDeclaration:
    """A scope, its meaning, and the scopes it includes."""

    scope: Scope
    meaning: str
    includes: tuple[Scope, ...] = ()

    @property
    def operations(self) -> tuple[str, ...]:
        """The ids of the API operations it covers."""
        return tuple(row.id for row in TABLE if row.scope is self.scope)


SCOPES = (
    ScopeDeclaration(Scope.READ, "see sandboxes, files, output, approvals and the audit log; change nothing"),
    ScopeDeclaration(
        Scope.OPERATE,
        "work in sandboxes: start and end them, run commands, write files, take snapshots",
        (Scope.READ, Scope.LOG),
    ),
    ScopeDeclaration(
        Scope.APPROVE,
        "decide what waits for a person; never one's own requests, and never with the token of an agent",
        (Scope.READ,),
    ),
    ScopeDeclaration(
        Scope.ADMINISTER,
        "make and revoke tokens, change policies and secrets, and everything else; what no scope names needs this one",
        (Scope.READ, Scope.OPERATE, Scope.APPROVE, Scope.LOG),
    ),
    ScopeDeclaration(Scope.LOG, "send log records to the event log, and nothing else"),
)
"""Every scope. The table of operations says which operations it covers."""

LISTED = frozenset(row.id for row in TABLE if row.context_from == "listed")
"""The API operations that concern no single context: they show only what the identity may see."""
_INCLUDED = {each.scope: frozenset({each.scope, *each.includes}) for each in SCOPES}
_NOT_FOR_AGENTS = frozenset({Scope.APPROVE, Scope.ADMINISTER})


def scope_of(operation: str) -> Scope:
    """Return the scope that an operation needs."""
    row = OPERATIONS.get(operation)
    return Scope.ADMINISTER if row is None or row.scope is None else row.scope


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller. `namespace` None means every namespace, `contexts` None every context in it."""

    subject: str
    kind: OwnerKind
    scopes: frozenset[Scope]
    namespace: str | None = None
    contexts: frozenset[str] | None = None
    token_id: str | None = None
    expires_at: float | None = None

    def has(self, scope: Scope) -> bool:
        """Return whether the identity has a scope, directly or included. An agent never has the scopes for people."""
        if self.kind is OwnerKind.AGENT and scope in _NOT_FOR_AGENTS:
            return False
        return any(scope in _INCLUDED[each] for each in self.scopes)

    def reaches(self, context_id: str | None) -> bool:
        """Return whether the identity may access a context; None stands for things that belong to no context."""
        if context_id is None:
            return self.namespace is None and self.contexts is None
        if self.namespace is not None and namespace_of(context_id) != self.namespace:
            return False
        return self.contexts is None or context_id in self.contexts

    def may(self, operation: str, context_id: str | None = None) -> Denied | None:
        """Return None when the operation is allowed, else the error to raise. For two contexts, call it twice.

        Operations that list need only the scope: they show only contexts that the identity `reaches`.
        """
        refused = self.lacks(operation)
        if refused is not None:
            return refused
        if (context_id is not None or operation not in LISTED) and not self.reaches(context_id):
            what = "things without a context" if context_id is None else f"the context '{context_id}'"
            refused = self.refusal(operation, "reach", f"the token may not access {what}")
            if context_id is None:
                refused.hint = f"name a context that the token may access, or {refused.hint}"
            return refused
        return None

    def lacks(self, operation: str) -> Denied | None:
        """Return None when the identity has the scope for an operation in some context, else the error to raise."""
        needed = scope_of(operation)
        if self.has(needed):
            return None
        only = self.kind is OwnerKind.AGENT and needed in _NOT_FOR_AGENTS
        reason = "agents may not do this" if only else f"the token lacks the scope '{needed}'"
        return self.refusal(operation, f"scope({needed})", reason)

    def refusal(self, operation: str, rule: str, reason: str) -> Denied:
        """Return the error that every protocol shows."""
        return Denied(
            reason,
            hint="ask the administrator of this server for a token that may",
            operation=operation,
            rule=rule,
            source=f"token {self.token_id}" if self.token_id else self.subject,
            reason=reason,
            retry=False,
            approval=None,
        )


ROOT = Identity("administrator", OwnerKind.PERSON, frozenset({Scope.ADMINISTER}))
"""The owner of the token in the data directory."""


def may_decide(identity: Identity, requester: str, context_id: str | None = None) -> Denied | None:
    """Return None when an identity may decide the request of the subject `requester`, else the error to raise."""
    refused = identity.may("decide_approval", context_id)
    if refused is None and requester == identity.subject:
        reason = "nobody decides their own request"
        refused = identity.refusal("decide_approval", "own request", reason)
        refused.hint = "give the agent a token of its own, and decide with yours"
    return refused


@dataclass(frozen=True, slots=True)
class Grant:
    """The properties of a new token."""

    name: str
    kind: OwnerKind
    scopes: Collection[Scope]
    namespace: str | None = None
    contexts: Collection[str] | None = None
    expires_at: float | None = None


class Token(NamedTuple):
    """The stored facts of a token: everything except the token itself."""

    id: str
    name: str
    hash: str
    kind: OwnerKind
    scopes: tuple[Scope, ...]
    namespace: str | None
    contexts: tuple[str, ...] | None
    created_at: float
    created_by: str
    expires_at: float | None = None
    revoked_at: float | None = None
    used_at: float | None = None

    def identity(self) -> Identity:
        """Return the identity of its owner. Two tokens of one name and kind are the same subject."""
        subject, scopes = f"{self.kind}:{self.name}", frozenset(self.scopes)
        contexts = None if self.contexts is None else frozenset(self.contexts)
        return Identity(subject, self.kind, scopes, self.namespace, contexts, self.id, self.expires_at)


Names = tuple[str, ...]
Kept = tuple[str, str, str, str, Names, str | None, Names | None, float, str, float | None, float | None, float | None]
"""The fields of a `Token` as the store returns them."""


class TokenRecords(Protocol):
    """A store of tokens; `store.tokens.TokenStore` is one, and explains the methods."""

    async def insert(self, token: Kept) -> None:
        """Add a token."""

    async def of_hash(self, hash: str) -> Kept | None:
        """Return the token with this hash."""

    async def of_new_hash(self, hash: str) -> Kept | None:
        """Return the token with this hash, which may be made up."""

    async def get(self, token_id: str) -> Kept | None:
        """Return the token with this id."""

    async def page(self, *, limit: int, cursor: str | None = None) -> tuple[Sequence[Kept], str | None]:
        """Return tokens, newest first."""

    async def revoke(self, token_id: str, at: float) -> bool:
        """Revoke a token."""

    async def revoked(self, token_ids: Collection[str]) -> Collection[str]:
        """Return the revoked ones."""

    async def used(self, token_id: str, at: float) -> None:
        """Record when a token was used."""


def hashed(token: str) -> str:
    """Return the stored hash of a token. A fast hash is enough, because a token has 256 random bits that nobody can
    guess; a slow one would delay every request.
    """
    return hashlib.sha256(token.encode()).hexdigest()


class Tokens:
    """Issues, checks and revokes tokens. `root` is the token of the data directory, None when no token is needed.

    `on_revoked` is called with the id of each token that is revoked here.
    """

    def __init__(
        self,
        store: TokenRecords,
        root: str | None,
        on_revoked: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ):
        self._store = store
        self._root = None if root is None else root.encode()
        self._clock = clock
        self._identities: Cache[str, tuple[Identity, float]] = Cache(CACHE_SIZE)
        self._unknown: Cache[str, bool] = Cache(CACHE_SIZE, CACHE_S, clock=clock)
        self._revocations = 0
        self._on_revoked = on_revoked

    async def issue(self, grant: Grant, by: Identity) -> tuple[str, Token]:
        """Make a token, and return its text, to show once, and the stored facts. It grants no more than `by` has."""
        if (refused := by.lacks("create_token")) is not None:
            raise refused
        self._check(grant, by)
        text = PREFIX + secrets.token_urlsafe(32)
        token = Token(
            f"tok-{secrets.token_hex(8)}",
            grant.name,
            hashed(text),
            grant.kind,
            tuple(sorted(set(grant.scopes))),
            grant.namespace,
            None if grant.contexts is None else tuple(sorted(set(grant.contexts))),
            self._clock(),
            by.subject,
            grant.expires_at,
        )
        await self._store.insert(token)
        self._unknown.clear()
        return text, token

    def _check(self, grant: Grant, by: Identity) -> None:
        if not _NAME.fullmatch(grant.name):
            raise InvalidRequest(
                "a name has 1 to 128 letters, digits and . _ @ -, and starts with a letter or digit",
                field="name",
                hint="for example coder-1",
            )
        if not grant.scopes:
            raise InvalidRequest("a token needs a scope", field="scopes", hint=f"they are: {', '.join(Scope)}")
        if grant.kind is OwnerKind.AGENT and (wrong := _NOT_FOR_AGENTS & set(grant.scopes)):
            raise InvalidRequest(
                f"an agent's token cannot have the scope '{min(wrong)}'",
                field="scopes",
                hint="agents read and operate; people approve and administer",
            )
        if grant.namespace is not None and (":" in grant.namespace or not _NAME.fullmatch(grant.namespace)):
            raise InvalidRequest("this is not a valid namespace", field="namespace", hint="use letters, digits, . _ -")
        if grant.contexts is not None and not 0 < len(grant.contexts) <= MAX_CONTEXTS:
            raise InvalidRequest(
                f"a token is for 1 to {MAX_CONTEXTS} contexts, or for all",
                field="contexts",
                hint="leave it out for all",
            )
        if grant.expires_at is not None and not grant.expires_at > self._clock():
            raise InvalidRequest("the token would have expired already", field="expires_at", hint="name a later moment")
        if by.namespace is not None and grant.namespace != by.namespace:
            raise InvalidRequest(
                f"you can make tokens only for the namespace '{by.namespace}'", field="namespace", hint="name it"
            )
        if by.contexts is not None and not (grant.contexts is not None and by.contexts >= set(grant.contexts)):
            raise InvalidRequest(
                "you can make tokens only for your own contexts", field="contexts", hint="name some of them"
            )
        if by.expires_at is not None and (grant.expires_at is None or grant.expires_at > by.expires_at):
            raise InvalidRequest(
                "a token cannot expire later than the one it is made with",
                field="expires_at",
                hint="name an earlier moment",
            )
        for context in grant.contexts or ():
            if not _CONTEXT.fullmatch(context):
                raise InvalidRequest("this is not a valid context", field="contexts")
            if grant.namespace is not None and namespace_of(context) != grant.namespace:
                raise InvalidRequest(
                    f"the context '{context}' is not in the namespace '{grant.namespace}'", field="contexts"
                )

    async def identify(self, token: str | bytes) -> Identity:
        """Return the identity of a token; `Unauthorized` when the token is unknown, revoked or expired."""
        given = token.encode(errors="replace") if isinstance(token, str) else token
        if self._root is not None and hmac.compare_digest(given, self._root):
            return ROOT
        if not given.startswith(PREFIX.encode()) or len(given) > MAX_TOKEN or not given.isascii():
            raise _unknown()
        key, now = hashed(given.decode()), self._clock()
        known = self._identities.get(key)
        if known is not None and known[1] <= now < known[1] + CACHE_S:
            identity = known[0]
        else:
            identity = await self._look_up(key, now)
        return _unexpired(identity, now)

    async def of_id(self, token_id: str) -> Identity:
        """Return the identity of a token that another server has seen; `Unauthorized` when it is unknown, revoked or
        expired.
        """
        key, now = f"id {token_id}", self._clock()
        known = self._identities.get(key)
        if known is not None and known[1] <= now < known[1] + CACHE_S:
            identity = known[0]
        else:
            before = self._revocations
            kept = await self._store.get(token_id)
            if kept is None:
                raise _unknown()
            token = _token(kept)
            if token.revoked_at is not None:
                self._identities.pop(key)
                raise _revoked()
            identity = token.identity()
            if before != self._revocations:  # this token may have been revoked meanwhile
                return await self.of_id(token_id)
            self._identities.put(key, (identity, now))
        return _unexpired(identity, now)

    async def _look_up(self, key: str, now: float) -> Identity:
        if self._unknown.get(key):
            raise _unknown()
        before = self._revocations
        # A token that was valid a while ago is not made up, so it need not wait with those that may be.
        look_up = self._store.of_new_hash if self._identities.get(key) is None else self._store.of_hash
        kept = await look_up(key)
        if kept is None:
            self._unknown.put(key, True)
            raise _unknown()
        token = _token(kept)
        if token.revoked_at is not None:
            self._identities.pop(key)
            raise _revoked()
        identity = token.identity()
        if token.used_at is None or now - token.used_at > USED_S:
            await self._store.used(token.id, now)
        if before != self._revocations:  # this token may have been revoked meanwhile
            return await self._look_up(key, now)
        self._identities.put(key, (identity, now))
        return identity

    async def revoke(self, token_id: str) -> Token:
        """Revoke a token: at once here, within `CACHE_S` on other servers. Revoking twice is no error."""
        await self._store.revoke(token_id, self._clock())
        self._revocations += 1
        for key in list(self._identities.keys()):
            known = self._identities.get(key)
            if known is not None and known[0].token_id == token_id:
                self._identities.pop(key)
        self._on_revoked(token_id)
        return await self.get(token_id)

    def forget_known(self) -> None:
        """Look every token up again: another process of this server has changed one."""
        self._revocations += 1
        self._identities.clear()
        self._unknown.clear()

    async def revoked(self, token_ids: Collection[str]) -> Collection[str]:
        """Return which of these tokens were revoked, here or by another server."""
        return await self._store.revoked(token_ids) if token_ids else ()

    async def get(self, token_id: str) -> Token:
        """Return the stored facts of a token; `NotFound`."""
        kept = await self._store.get(token_id)
        if kept is None:
            raise NotFound(f"there is no token '{token_id[:64]}'", field="id", hint="list the tokens to see their ids")
        return _token(kept)

    async def page(self, *, limit: int = 100, cursor: str | None = None) -> tuple[list[Token], str | None]:
        """Return tokens, newest first, and the cursor of the next page."""
        found, after = await self._store.page(limit=limit, cursor=cursor)
        return [_token(kept) for kept in found], after


def _unknown() -> Unauthorized:
    return Unauthorized(
        "the token is missing or wrong",
        field="Authorization",
        hint="send `Authorization: Bearer TOKEN`; the server printed where it stores its token",
    )


def _revoked() -> Unauthorized:
    return Unauthorized("the token was revoked", field="Authorization", hint="ask for a new one")


def _unexpired(identity: Identity, now: float) -> Identity:
    if identity.expires_at is not None and identity.expires_at <= now:
        raise Unauthorized("the token has expired", field="Authorization", hint="ask for a new one")
    return identity


def _token(kept: Kept) -> Token:
    """Make a token from its stored fields. An unknown scope is dropped, and an unknown kind counts as an agent."""
    token = Token._make(kept)
    return token._replace(
        kind=OwnerKind(token.kind) if token.kind in set(OwnerKind) else OwnerKind.AGENT,
        scopes=tuple(Scope(each) for each in token.scopes if each in set(Scope)),
    )
