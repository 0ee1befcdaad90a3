"""Who asks, and what they may do: scopes and the tokens that carry them. Knows no request and no database.

What no scope covers needs `administer`, so that an operation somebody forgot to declare is refused, not allowed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

from carrel.errors import Denied, InvalidRequest, NotFound, Unauthorized
from carrel.models.operations import OPERATIONS, TABLE
from carrel.models.operations import Scope as Scope  # noqa: PLC0414 - a name of this module too

T = TypeVar("T")

PREFIX = "carrel_"
DEFAULT_NAMESPACE = "default"
CACHE_S = 5.0
"""How long another server may still take a token that was revoked on this one."""
CACHE_SIZE = 4096
USED_S = 3600.0
MAX_TOKEN = 512
MAX_CONTEXTS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
_CONTEXT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class Kind(StrEnum):
    """What stands behind a token."""

    PERSON = "person"
    AGENT = "agent"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Declaration:
    """One scope: what it means, and the scopes it includes."""

    scope: Scope
    meaning: str
    includes: tuple[Scope, ...] = ()

    @property
    def operations(self) -> tuple[str, ...]:
        """The API operations it covers, by their ids."""
        return tuple(row.id for row in TABLE if row.scope is self.scope)


SCOPES = (
    Declaration(Scope.READ, "see sandboxes, files, output, approvals and the audit log; change nothing"),
    Declaration(
        Scope.OPERATE,
        "work in sandboxes: start and end them, run commands, write files, take snapshots",
        (Scope.READ,),
    ),
    Declaration(
        Scope.APPROVE,
        "decide what waits for a person; never one's own requests, and never with the token of an agent",
        (Scope.READ,),
    ),
    Declaration(
        Scope.ADMINISTER,
        "make and revoke tokens, change policies and secrets, and everything else; what no scope names needs this one",
        (Scope.READ, Scope.OPERATE, Scope.APPROVE),
    ),
)
"""Every scope. Which operations it covers is said in the table of operations."""

LISTED = frozenset(row.id for row in TABLE if row.context_from == "listed")
"""The API operations that are about no single context: they show what the identity may see, and no more."""
_INCLUDED = {each.scope: frozenset({each.scope, *each.includes}) for each in SCOPES}
_NOT_FOR_AGENTS = frozenset({Scope.APPROVE, Scope.ADMINISTER})


def scope_of(operation: str) -> Scope:
    """The scope an operation needs."""
    row = OPERATIONS.get(operation)
    return Scope.ADMINISTER if row is None or row.scope is None else row.scope


def namespace_of(context_id: str) -> str:
    """The namespace of a context: what its id has before the first colon, or the default one."""
    name, colon, _ = context_id.partition(":")
    return name if colon else DEFAULT_NAMESPACE


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks. `namespace` None reaches every namespace, `contexts` None every context of it."""

    subject: str
    kind: Kind
    scopes: frozenset[Scope]
    namespace: str | None = None
    contexts: frozenset[str] | None = None
    token_id: str | None = None
    expires_at: float | None = None

    def has(self, scope: Scope) -> bool:
        """Whether a scope was given, by itself or inside another. An agent never has those that are for people."""
        if self.kind is Kind.AGENT and scope in _NOT_FOR_AGENTS:
            return False
        return any(scope in _INCLUDED[each] for each in self.scopes)

    def reaches(self, context_id: str | None) -> bool:
        """Whether a context is within reach; None stands for what belongs to no context."""
        if context_id is None:
            return self.namespace is None and self.contexts is None
        if self.namespace is not None and namespace_of(context_id) != self.namespace:
            return False
        return self.contexts is None or context_id in self.contexts

    def may(self, operation: str, context_id: str | None = None) -> Denied | None:
        """None when the operation is allowed, else the refusal to raise. An operation on two contexts asks twice.

        Operations that list may be asked for by everyone with the scope: they show only what `reaches` says.
        """
        refused = self.lacks(operation)
        if refused is not None:
            return refused
        if (context_id is not None or operation not in LISTED) and not self.reaches(context_id):
            what = "what belongs to no context" if context_id is None else f"the context '{context_id}'"
            refused = self.refusal(operation, "reach", f"{what} is out of the token's reach")
            if context_id is None:
                refused.hint = f"name a context that the token reaches, or {refused.hint}"
            return refused
        return None

    def lacks(self, operation: str) -> Denied | None:
        """None when the scope for an operation is there, wherever it is to be done; else the refusal."""
        needed = scope_of(operation)
        if self.has(needed):
            return None
        only = self.kind is Kind.AGENT and needed in _NOT_FOR_AGENTS
        reason = "agents may not do this" if only else f"the token lacks the scope '{needed}'"
        return self.refusal(operation, f"scope({needed})", reason)

    def refusal(self, operation: str, rule: str, reason: str) -> Denied:
        """The refusal object that every protocol shows."""
        return Denied(
            reason,
            hint="ask whoever administers this server for a token that may",
            operation=operation,
            rule=rule,
            source=f"token {self.token_id}" if self.token_id else self.subject,
            reason=reason,
            retry=False,
            approval=None,
        )


ROOT = Identity("administrator", Kind.PERSON, frozenset({Scope.ADMINISTER}))
"""Whoever has the token of the data directory."""


def may_decide(identity: Identity, requester: str, context_id: str | None = None) -> Denied | None:
    """None when an identity may decide the request of `requester` (its subject), else the refusal to raise."""
    refused = identity.may("decide_approval", context_id)
    if refused is None and requester == identity.subject:
        reason = "nobody decides their own request"
        refused = identity.refusal("decide_approval", "own request", reason)
        refused.hint = "give the agent a token of its own, and decide with yours"
    return refused


@dataclass(frozen=True, slots=True)
class Grant:
    """What a new token is to be."""

    name: str
    kind: Kind
    scopes: Collection[Scope]
    namespace: str | None = None
    contexts: Collection[str] | None = None
    expires_at: float | None = None


class Token(NamedTuple):
    """What is kept of a token: everything but the token."""

    id: str
    name: str
    hash: str
    kind: Kind
    scopes: tuple[Scope, ...]
    namespace: str | None
    contexts: tuple[str, ...] | None
    created_at: float
    created_by: str
    expires_at: float | None = None
    revoked_at: float | None = None
    used_at: float | None = None

    def identity(self) -> Identity:
        """Who shows it. Two tokens of one name and kind are the same subject."""
        contexts = None if self.contexts is None else frozenset(self.contexts)
        return Identity(
            f"{self.kind}:{self.name}",
            self.kind,
            frozenset(self.scopes),
            self.namespace,
            contexts,
            self.id,
            self.expires_at,
        )


Names = tuple[str, ...]
Kept = tuple[str, str, str, str, Names, str | None, Names | None, float, str, float | None, float | None, float | None]
"""A token as the store gives it back: the fields of `Token` in their order."""


class Store(Protocol):
    """What tokens are kept in; `store.tokens.TokenStore` is one, and says what the methods do."""

    async def insert(self, token: Kept) -> None:
        """Add a token."""

    async def of_hash(self, hash: str) -> Kept | None:
        """The token with that hash."""

    async def of_new_hash(self, hash: str) -> Kept | None:
        """The token with that hash, which may be made up."""

    async def get(self, token_id: str) -> Kept | None:
        """The token with that id."""

    async def page(self, *, limit: int, cursor: str | None = None) -> tuple[Sequence[Kept], str | None]:
        """Tokens, newest first."""

    async def revoke(self, token_id: str, at: float) -> bool:
        """Revoke a token."""

    async def revoked(self, token_ids: Collection[str]) -> Collection[str]:
        """Those that were revoked."""

    async def used(self, token_id: str, at: float) -> None:
        """Note when a token was used."""


def hashed(token: str) -> str:
    """What is kept of a token. A slow hash would protect what people make up; these have 256 random bits, which no
    amount of trying finds, and a quick one does not slow every request down.
    """
    return hashlib.sha256(token.encode()).hexdigest()


class Tokens:
    """Issues, knows and revokes tokens. `root` is the token of the data directory, None when none is asked for.

    `on_revoked` is called with the id of each token that is revoked here.
    """

    def __init__(
        self, store: Store, root: str | None, on_revoked: Callable[[str], None], clock: Callable[[], float] = time.time
    ):
        self._store = store
        self._root = None if root is None else root.encode()
        self._clock = clock
        self._cache: OrderedDict[str, tuple[Identity, float]] = OrderedDict()
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._revocations = 0
        self._on_revoked = on_revoked

    async def issue(self, grant: Grant, by: Identity) -> tuple[str, Token]:
        """Make a token: the text to show once, and what is kept. Nobody gives away more than they have."""
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
        if grant.kind is Kind.AGENT and (wrong := _NOT_FOR_AGENTS & set(grant.scopes)):
            raise InvalidRequest(
                f"an agent's token cannot have the scope '{min(wrong)}'",
                field="scopes",
                hint="agents read and operate; people approve and administer",
            )
        if grant.namespace is not None and (":" in grant.namespace or not _NAME.fullmatch(grant.namespace)):
            raise InvalidRequest("this cannot be a namespace", field="namespace", hint="use letters, digits, . _ -")
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
                f"you can give tokens for the namespace '{by.namespace}' only", field="namespace", hint="name it"
            )
        if by.contexts is not None and not (grant.contexts is not None and by.contexts >= set(grant.contexts)):
            raise InvalidRequest(
                "you can give tokens for your own contexts only", field="contexts", hint="name some of them"
            )
        if by.expires_at is not None and (grant.expires_at is None or grant.expires_at > by.expires_at):
            raise InvalidRequest(
                "a token does not outlive the one it is made with", field="expires_at", hint="name an earlier moment"
            )
        for context in grant.contexts or ():
            if not _CONTEXT.fullmatch(context):
                raise InvalidRequest("this cannot be a context", field="contexts")
            if grant.namespace is not None and namespace_of(context) != grant.namespace:
                raise InvalidRequest(
                    f"the context '{context}' is not in the namespace '{grant.namespace}'", field="contexts"
                )

    async def identify(self, token: str | bytes) -> Identity:
        """Who shows this token; `Unauthorized` when nobody should."""
        given = token.encode(errors="replace") if isinstance(token, str) else token
        if self._root is not None and hmac.compare_digest(given, self._root):
            return ROOT
        if not given.startswith(PREFIX.encode()) or len(given) > MAX_TOKEN or not given.isascii():
            raise _unknown()
        key, now = hashed(given.decode()), self._clock()
        identity = self._cached(key, now)
        if identity is None:
            identity = await self._looked_up(key, now)
        if identity.expires_at is not None and identity.expires_at <= now:
            raise Unauthorized("the token has expired", field="Authorization", hint="ask for a new one")
        return identity

    def _cached(self, key: str, now: float) -> Identity | None:
        found = self._cache.get(key)
        if found is None or not found[1] <= now < found[1] + CACHE_S:
            return None
        self._cache.move_to_end(key)
        return found[0]

    async def _looked_up(self, key: str, now: float) -> Identity:
        seen = self._unknown.get(key)
        if seen is not None and seen <= now < seen + CACHE_S:
            raise _unknown()
        before = self._revocations
        # A token that was valid a while ago is not made up: it need not wait with those that may be.
        look_up = self._store.of_hash if key in self._cache else self._store.of_new_hash
        kept = await look_up(key)
        if kept is None:
            _remember(self._unknown, key, now)
            raise _unknown()
        token = _token(kept)
        if token.revoked_at is not None:
            self._cache.pop(key, None)
            raise Unauthorized("the token was revoked", field="Authorization", hint="ask for a new one")
        identity = token.identity()
        if token.used_at is None or now - token.used_at > USED_S:
            await self._store.used(token.id, now)
        if before != self._revocations:  # it may be the very one that was revoked meanwhile
            return await self._looked_up(key, now)
        _remember(self._cache, key, (identity, now))
        return identity

    async def revoke(self, token_id: str) -> Token:
        """Make a token worthless: at once here, within `CACHE_S` on other servers. Revoking twice is no error."""
        await self._store.revoke(token_id, self._clock())
        self._revocations += 1
        for key in [key for key, (identity, _) in self._cache.items() if identity.token_id == token_id]:
            del self._cache[key]
        self._on_revoked(token_id)
        return await self.get(token_id)

    async def revoked(self, token_ids: Collection[str]) -> Collection[str]:
        """Which of these tokens were revoked, here or by another server."""
        return await self._store.revoked(token_ids) if token_ids else ()

    async def get(self, token_id: str) -> Token:
        """What is kept of a token; `NotFound` when there is none."""
        kept = await self._store.get(token_id)
        if kept is None:
            raise NotFound(f"there is no token '{token_id[:64]}'", field="id", hint="list the tokens to see their ids")
        return _token(kept)

    async def page(self, *, limit: int = 100, cursor: str | None = None) -> tuple[list[Token], str | None]:
        """Tokens, newest first, and the cursor of the next page."""
        found, after = await self._store.page(limit=limit, cursor=cursor)
        return [_token(kept) for kept in found], after


def _remember(cache: OrderedDict[str, T], key: str, value: T) -> None:
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > CACHE_SIZE:
        cache.popitem(last=False)


def _unknown() -> Unauthorized:
    return Unauthorized(
        "the token is missing or wrong",
        field="Authorization",
        hint="send `Authorization: Bearer TOKEN`; the server printed where its token is kept",
    )


def _token(kept: Kept) -> Token:
    """A token of the store; a scope or kind this carrel does not know is no right at all."""
    id, name, key, kind, scopes, namespace, contexts, created_at, created_by, expires_at, revoked_at, used_at = kept
    return Token(
        id,
        name,
        key,
        Kind(kind) if kind in set(Kind) else Kind.AGENT,
        tuple(Scope(each) for each in scopes if each in set(Scope)),
        namespace,
        contexts,
        created_at,
        created_by,
        expires_at,
        revoked_at,
        used_at,
    )
