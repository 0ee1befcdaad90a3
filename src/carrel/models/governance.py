"""Models of approvals, policies, secrets, the audit log and tokens."""

from base64 import b64decode
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from carrel.models.base import MAX_PATH, Answer, CommandText, Moment, NoNul, Request


class AuditRecord(Answer):
    """One operation in the audit log: its start and, after it has ended, its end."""

    chain: str
    seq: int = Field(description="its number in the chain")
    at: datetime
    context_id: str | None
    namespace: str | None = Field(default=None, description="what the context has before its first colon, or `default`")
    agent: str | None = Field(default=None, description="whom the workspace of the sandbox belongs to")
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
    arguments_hash: str | None = Field(default=None, description="hash of the full arguments, with the server's key")
    result: str | None = Field(default=None, description="`ok` or the code of an error; null while it runs")
    reason: str | None = None
    duration_ms: float | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None


class AuditKey(Answer):
    """The Ed25519 key that signs the audit log of a server, in hexadecimal."""

    node: str
    key: str


class AuditPruned(Answer):
    """The number of records that were removed from the audit log. Only records that a signed head
    covers are removed.
    """

    before: datetime
    records: int


class AuditPage(Answer):
    """Operations, newest first. A page with few or no items may still have a `next`: the search continues there."""

    items: list[AuditRecord]
    next: str | None = None


class ApprovalState(StrEnum):
    """The states of an approval."""

    PENDING = "pending"
    APPROVED = "approved"
    DENIED = "denied"
    EXPIRED = "expired"


class ApprovalScope(StrEnum):
    """The extent of an approval: one operation, all equal operations in this context, or everything
    that a rule allows.
    """

    ONCE = "once"
    CONTEXT = "context"
    RULE = "rule"


class ApprovalInfo(Answer):
    """An operation that a person has to decide, or has decided."""

    id: str
    context_id: str | None
    sandbox_id: str
    kind: Literal["shell", "file", "network", "mcp", "session"]
    operation: str
    summary: str = Field(description="the operation in one line; it says so if something is left out")
    arguments: dict[str, object] = Field(description="secrets are redacted")
    reason: str = Field(description="why a person must decide")
    requested_by: str
    created_at: datetime
    expires_at: datetime
    state: ApprovalState
    scope: ApprovalScope | None = None
    rule: str | None = Field(default=None, description="the rule that was added to the context's settings")
    decided_by: str | None = None
    decided_at: datetime | None = None
    message: str | None = Field(default=None, description="the person's message to the agent")
    used_at: datetime | None = Field(default=None, description="when the operation ran; an approval is used once")


class ApprovalPage(Answer):
    """A page of approvals, newest first; `next` is the cursor of the following page."""

    items: list[ApprovalInfo]
    next: str | None = None


class ApprovalDecision(Request):
    """Approve or deny an operation. The scope `rule` needs a `rule`, such as `shell(git push:*)`."""

    approve: bool
    scope: ApprovalScope = ApprovalScope.ONCE
    rule: str | None = Field(default=None, max_length=1000)
    message: str | None = Field(default=None, max_length=2000, description="a message to the agent")


class ApprovalBatch(Request):
    """The same decision for several approvals."""

    ids: list[Annotated[str, StringConstraints(max_length=64)]] = Field(min_length=1, max_length=1000)
    decision: ApprovalDecision


class ApprovalBatchResult(Answer):
    """The approvals that were decided, and the reasons for the others."""

    decided: list[ApprovalInfo]
    refused: dict[str, str] = Field(default_factory=dict, description="id → reason")


class PolicyDocuments(Request):
    """The two documents of a context's policy. A document that is left out is not changed; null removes it."""

    settings: dict[str, object] | None = Field(default=None, description="the content of settings.json")
    sources: dict[str, object] | None = Field(default=None, description="the content of sources.json")
    version: int | None = Field(default=None, ge=0, description="change only this version; 0 if there is none yet")
    restart: bool = Field(default=False, description="restart a running sandbox if the policy needs it to take effect")


class PolicyWarning(Answer):
    """A warning about a rule for its author."""

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
        default=False, description="whether the sandbox hides programs and files by this policy only after a restart"
    )


class ExplainRequest(Request):
    """A command to explain, as a text for the shell or as a list of arguments."""

    command: CommandText | Annotated[list[NoNul], Field(min_length=1)]
    cwd: NoNul | None = Field(default=None, max_length=MAX_PATH)


class ExplainedPart(Answer):
    """One thing that a command would do, and the policy's verdict on it."""

    kind: str
    text: str
    verdict: Literal["allow", "deny", "ask"]
    reason: str
    rule: str | None = None
    source: str | None = None
    via: list[str] = Field(default_factory=list, description="the commands that would run it")


class Explanation(Answer):
    """The policy's verdict on a command: the strictest verdict on its parts."""

    verdict: Literal["allow", "deny", "ask"]
    reason: str
    rule: str | None = None
    parts: list[ExplainedPart] = Field(default_factory=list)


TokenKind = Literal["person", "agent", "service"]

TokenScope = Literal["read", "operate", "approve", "administer", "log"]


class TokenRequest(Request):
    """A token to create. Without `namespace` and `contexts` it has access to everything that its creator has."""

    name: str = Field(min_length=1, max_length=128, description="its owner; the audit log records operations under it")
    kind: TokenKind
    scopes: list[TokenScope] = Field(min_length=1, max_length=16)
    namespace: str | None = Field(default=None, max_length=128, description="only contexts of this namespace")
    contexts: list[str] | None = Field(default=None, max_length=1000, description="only these contexts")
    expires_at: Moment | None = Field(default=None, description="when it expires; by default never")


class TokenInfo(Answer):
    """A token, without its value."""

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
    used_at: datetime | None = Field(default=None, description="last use, to the hour")


class NewToken(TokenInfo):
    """A new token with its value, which is shown only this once."""

    token: str


class IdentityInfo(Answer):
    """The identity of a token. Two tokens with the same name and kind are the same subject."""

    subject: str = Field(description="the audit log records operations under it")
    kind: TokenKind
    scopes: list[TokenScope]
    namespace: str | None = None
    contexts: list[str] | None = None
    token_id: str | None = Field(default=None, description="null for the token of the data directory")
    expires_at: datetime | None = None


class TokenPage(Answer):
    """A page of tokens, newest first; `next` is the cursor of the following page."""

    items: list[TokenInfo]
    next: str | None = None


class SecretName(Answer):
    """A secret, without its value."""

    name: str
    version: int = Field(description="how often it was set")
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
    def _one(self) -> Self:
        if (self.value is None) == (self.value_base64 is None):
            raise ValueError("give value or value_base64")
        if self.value_base64 is not None:
            b64decode(self.value_base64, validate=True)
        return self

    def bytes(self) -> bytes:
        """The value itself."""
        return self.value.encode() if self.value is not None else b64decode(self.value_base64 or "")
