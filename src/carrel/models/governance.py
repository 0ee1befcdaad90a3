"""Approvals, policies, secrets, the audit log and tokens. They hold and check values; they do nothing."""

from __future__ import annotations

from base64 import b64decode
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from carrel.models.base import Answer, Moment, NoNul, Request


class AuditRecord(Answer):
    """One operation in the audit log: its begin, and its end once there is one."""

    chain: str
    seq: int = Field(description="its place in the chain")
    at: datetime
    context_id: str | None
    node: str
    actor: str
    kind: str
    name: str
    decision: Literal["allow", "deny", "ask"]
    rule: str | None = None
    source: str | None = None
    approval: str | None = None
    request: str | None = None
    arguments: dict[str, object] = Field(default_factory=dict, description="redacted")
    truncated: bool = Field(default=False, description="whether arguments were left out because they were too large")
    arguments_hash: str | None = Field(default=None, description="of the full arguments, with the key of the server")
    result: str | None = Field(default=None, description="`ok` or the code of an error; None while it runs")
    reason: str | None = None
    duration_ms: float | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None


class AuditKey(Answer):
    """Who signs the audit log of a server: an Ed25519 key in hexadecimal."""

    node: str
    key: str


class AuditPruned(Answer):
    """What was removed from the audit log: records from before that moment, as far as a signed head covers them."""

    before: datetime
    records: int


class AuditPage(Answer):
    """Operations, newest first. A page may have few or none and still a `next`: so far, not further, was searched."""

    items: list[AuditRecord]
    next: str | None = None


class ApprovalState(StrEnum):
    """How far an approval is."""

    PENDING = "pending"
    APPROVED = "approved"
    DENIED = "denied"
    EXPIRED = "expired"


class ApprovalScope(StrEnum):
    """What an approval covers: this one operation, the same one in this context from now on, or a rule."""

    ONCE = "once"
    CONTEXT = "context"
    RULE = "rule"


class ApprovalInfo(Answer):
    """An operation that waits for a person, or waited."""

    id: str
    context_id: str | None
    sandbox_id: str
    kind: Literal["shell", "file", "network", "mcp", "session"]
    operation: str
    summary: str = Field(description="what is asked for, in one line; what it leaves out, it says")
    arguments: dict[str, object] = Field(description="secrets are redacted")
    reason: str = Field(description="why it needs a person")
    requested_by: str
    created_at: datetime
    expires_at: datetime
    state: ApprovalState
    scope: ApprovalScope | None = None
    rule: str | None = Field(default=None, description="the rule that was added to the context's settings")
    decided_by: str | None = None
    decided_at: datetime | None = None
    message: str | None = Field(default=None, description="what the person said to the agent")
    used_at: datetime | None = Field(default=None, description="when the operation ran; one approval runs it once")


class ApprovalPage(Answer):
    """A page of approvals, newest first; `next` is the cursor of the following page."""

    items: list[ApprovalInfo]
    next: str | None = None


class ApprovalDecision(Request):
    """Approve or deny what waits. `rule` is needed for the scope of that name, such as `shell(git push:*)`."""

    approve: bool
    scope: ApprovalScope = ApprovalScope.ONCE
    rule: str | None = Field(default=None, max_length=1000)
    message: str | None = Field(default=None, max_length=2000, description="reaches the agent")


class ApprovalBatch(Request):
    """The same decision for several approvals."""

    ids: list[Annotated[str, StringConstraints(max_length=64)]] = Field(min_length=1, max_length=1000)
    decision: ApprovalDecision


class ApprovalBatchResult(Answer):
    """What became of each: decided, or why not."""

    decided: list[ApprovalInfo]
    refused: dict[str, str] = Field(default_factory=dict, description="id → why")


class PolicyDocuments(Request):
    """The two documents of a context's policy. A document that is left out is not changed; null removes it."""

    settings: dict[str, object] | None = Field(default=None, description="as settings.json")
    sources: dict[str, object] | None = Field(default=None, description="as sources.json")
    version: int | None = Field(default=None, ge=0, description="change only this version; 0 when there is none yet")
    restart: bool = Field(default=False, description="restart a running sandbox when that is needed for it to hold")


class PolicyWarning(Answer):
    """Something about a rule that its author should know."""

    source: str
    rule: str
    text: str


class PolicyInfo(Answer):
    """The policy of a context."""

    context_id: str
    settings: dict[str, object] | None
    sources: dict[str, object] | None
    version: int
    updated_at: datetime | None = None
    updated_by: str | None = None
    warnings: list[PolicyWarning] = Field(default_factory=list)
    restart_needed: bool = Field(
        default=False, description="whether programs and files are masked as it says only after a restart"
    )


class ExplainRequest(Request):
    """A command to be explained, as a text for the shell or as a list of arguments."""

    command: Annotated[NoNul, Field(min_length=1, max_length=131_072)] | Annotated[list[NoNul], Field(min_length=1)]
    cwd: NoNul | None = Field(default=None, max_length=4096)


class ExplainedPart(Answer):
    """One thing a command would do, and what the policy says of it."""

    kind: str
    text: str
    verdict: Literal["allow", "deny", "ask"]
    reason: str
    rule: str | None = None
    source: str | None = None
    via: list[str] = Field(default_factory=list, description="what would run it")


class Explanation(Answer):
    """What the policy says of a command: the strictest answer of its parts."""

    verdict: Literal["allow", "deny", "ask"]
    reason: str
    rule: str | None = None
    parts: list[ExplainedPart] = Field(default_factory=list)


TokenKind = Literal["person", "agent", "service"]

TokenScope = Literal["read", "operate", "approve", "administer"]


class TokenRequest(Request):
    """A token to be made. Without `namespace` and `contexts` it reaches everything its maker reaches."""

    name: str = Field(min_length=1, max_length=128, description="who it is for; what they do is recorded under it")
    kind: TokenKind
    scopes: list[TokenScope] = Field(min_length=1, max_length=16)
    namespace: str | None = Field(default=None, max_length=128, description="only contexts of this namespace")
    contexts: list[str] | None = Field(default=None, max_length=1000, description="only these contexts")
    expires_at: Moment | None = Field(default=None, description="worthless from then on; by default it has no end")


class TokenInfo(Answer):
    """What is known of a token: everything but the token itself."""

    id: str
    name: str
    kind: TokenKind
    scopes: list[TokenScope]
    namespace: str | None = None
    contexts: list[str] | None = None
    created_at: datetime
    created_by: str
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    used_at: datetime | None = Field(default=None, description="to the hour")


class NewToken(TokenInfo):
    """A token that was just made: the only time that it is shown."""

    token: str


class IdentityInfo(Answer):
    """Who a token stands for. Two tokens of one name and kind are the same subject."""

    subject: str = Field(description="what is done with the token is recorded under it")
    kind: TokenKind
    scopes: list[TokenScope]
    namespace: str | None = None
    contexts: list[str] | None = None
    token_id: str | None = Field(default=None, description="none for the token of the data directory")
    expires_at: datetime | None = None


class TokenPage(Answer):
    """A page of tokens, newest first; `next` is the cursor of the following page."""

    items: list[TokenInfo]
    next: str | None = None


class SecretName(Answer):
    """A secret as it is listed: never its value."""

    name: str
    version: int = Field(description="how often it was put")
    created_at: datetime
    updated_at: datetime


class SecretList(Answer):
    """The secrets of a context."""

    items: list[SecretName]


class SecretValue(Request):
    """The value of a secret: text, or bytes in base64."""

    value: str | None = Field(default=None, max_length=65_536, repr=False)
    value_base64: str | None = Field(default=None, max_length=131_072, repr=False)

    @model_validator(mode="after")
    def _one(self) -> SecretValue:
        if (self.value is None) == (self.value_base64 is None):
            raise ValueError("give value or value_base64")
        if self.value_base64 is not None:
            b64decode(self.value_base64, validate=True)
        return self

    def bytes(self) -> bytes:
        """The value itself."""
        return self.value.encode() if self.value is not None else b64decode(self.value_base64 or "")
