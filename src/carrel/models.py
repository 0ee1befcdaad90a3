"""The nouns of the public API, shared by server and client. They hold and check values; they do nothing.

An answer is built when it is first used: most programs need few of them.
"""

from __future__ import annotations

from base64 import b64decode
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

ContextId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
"""Letters, digits, `.`, `_`, `:`, `-`; 1 to 128 characters; starts with a letter or digit."""

EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]
NoNul = Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")]

MAX_TIMEOUT_S = 86_400.0
MAX_OUTPUT_BYTES = 100 * 1024 * 1024
DEFAULT_OUTPUT_BYTES = 10 * 1024 * 1024


class Request(BaseModel):
    """A body a caller sends: an unknown field is an error, not ignored."""

    model_config = ConfigDict(extra="forbid")


class Answer(BaseModel):
    """A body carrel sends: a newer server may add fields an older client ignores."""

    model_config = ConfigDict(extra="ignore", defer_build=True)


class Trust(StrEnum):
    """How far the code that will run is trusted; picks the least isolation that is acceptable."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class Network(StrEnum):
    """What a sandbox can reach."""

    NONE = "none"
    ALLOWLIST = "allowlist"
    BRIDGE = "bridge"
    HOST = "host"


class State(StrEnum):
    """The states of a session."""

    CREATING = "creating"
    RUNNING = "running"
    IDLE_STOPPING = "idle_stopping"
    STOPPED = "stopped"
    ERROR = "error"
    TERMINATED = "terminated"


class Limits(Request):
    """What a sandbox may use. A limit that is asked for and cannot be enforced is refused."""

    cpus: float | None = Field(default=None, gt=0, le=1024, description="CPU cores")
    memory_mb: int | None = Field(default=None, ge=32, le=1_048_576, description="memory of all its processes")
    disk_mb: int | None = Field(default=None, ge=1, le=1_048_576, description="bytes in the workspace")
    processes: int | None = Field(default=None, ge=8, le=32_768, description="processes and threads")
    timeout_s: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S, description="default deadline of a command")


class SandboxRequest(Request):
    """What `deploy_or_resume` takes. Without `context_id` the sandbox is ephemeral: nothing is kept."""

    context_id: ContextId | None = None
    provider: str = Field(default="auto", max_length=64)
    trust: Trust = Trust.MEDIUM
    network: Network | None = Field(default=None, description="None: the server's default, as far as it holds")
    limits: Limits = Field(default_factory=Limits)
    env: dict[EnvName, NoNul] = Field(default_factory=dict, max_length=256)
    labels: dict[NoNul, NoNul] = Field(default_factory=dict, max_length=32)
    filespace: bool | None = Field(
        default=None, description="keep the workspace in sync with the context's filespace; None: the server's default"
    )


class SandboxInfo(Answer):
    """A session and its sandbox as the API shows them."""

    id: str
    context_id: str | None
    ephemeral: bool
    state: State
    provider: str
    isolation_level: int
    unsafe: bool = Field(description="true when the provider does not isolate at all")
    trust: Trust
    network: Network
    limits: Limits
    labels: dict[str, str]
    created_at: datetime
    last_activity_at: datetime
    error: str | None = None
    node: str | None = Field(default=None, description="the server that has the session")
    filespace: bool = Field(default=False, description="whether the workspace is kept in sync with the filespace")
    snapshot: str | None = Field(default=None, description="the newest good snapshot")
    notice: str | None = Field(
        default=None, description="what a person should know though work goes on, such as an archive out of reach"
    )


class SandboxPage(Answer):
    """A page of sandboxes; `next` is the cursor of the following page."""

    items: list[SandboxInfo]
    next: str | None = None


class TerminateRequest(Request):
    """Why a sandbox ends."""

    reason: str = Field(default="", max_length=1000)
    delete_files: bool = Field(default=False, description="delete a durable workspace too")
    snapshot: bool | None = Field(
        default=None, description="take a last snapshot of the workspace; None: unless its files are deleted"
    )


class TerminalSize(Request):
    """Rows and columns of a terminal."""

    rows: int = Field(default=24, ge=1, le=1000)
    cols: int = Field(default=80, ge=1, le=1000)


class CommandRequest(Request):
    """A command: a string runs under `/bin/sh -c`, a list runs as it is."""

    command: (
        Annotated[NoNul, Field(min_length=1, max_length=131_072)]
        | Annotated[list[NoNul], Field(min_length=1, max_length=4096)]
    )
    cwd: NoNul | None = Field(default=None, max_length=4096, description="relative to the workspace")
    env: dict[EnvName, NoNul] = Field(default_factory=dict, max_length=256)
    timeout: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S, description="seconds; the tree dies then")
    stdin: str | None = Field(default=None, max_length=16 * 1024 * 1024, description="text given, then closed")
    output_limit: int = Field(default=DEFAULT_OUTPUT_BYTES, ge=0, le=MAX_OUTPUT_BYTES)
    terminal: TerminalSize | None = Field(default=None, description="run under a PTY of this size")
    interactive: bool = Field(default=False, description="keep stdin open for `send_input`; implies background")


class CommandResult(Answer):
    """A finished command. `exit_code` is None when a signal ended it, then `signal` names it."""

    id: str
    stdout: str
    stderr: str
    exit_code: int | None
    signal: str | None = None
    timed_out: bool = False
    oom_killed: bool = False
    duration_ms: float
    truncated: bool = False
    dropped_bytes: int = 0
    stdout_base64: str | None = Field(default=None, description="the exact bytes, when they are not UTF-8")
    stderr_base64: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the command ended with exit code 0."""
        return self.exit_code == 0

    @property
    def stdout_bytes(self) -> bytes:
        """Exactly what the command wrote to standard output."""
        return self.stdout.encode() if self.stdout_base64 is None else b64decode(self.stdout_base64)

    @property
    def stderr_bytes(self) -> bytes:
        """Exactly what the command wrote to standard error."""
        return self.stderr.encode() if self.stderr_base64 is None else b64decode(self.stderr_base64)


class CommandInfo(Answer):
    """A command as listed: running or ended."""

    id: str
    command: str | list[str]
    running: bool
    pid: int | None
    terminal: bool
    started_at: datetime
    duration_ms: float
    exit_code: int | None = None
    signal: str | None = None
    timed_out: bool = False
    oom_killed: bool = False
    output_bytes: int = Field(description="bytes kept; the offset of the end of the output")
    dropped_bytes: int = 0


class CommandList(Answer):
    """The commands a sandbox remembers, newest last."""

    items: list[CommandInfo]


class SignalRequest(Request):
    """A signal for a command: to its process group, or to every process of its tree."""

    signal: str = Field(default="TERM", max_length=16)
    tree: bool = False


class OutputEvent(Answer):
    """One line of an output stream. `text` for UTF-8, `base64` for other bytes, `result` on the last line."""

    stream: Literal["stdout", "stderr", "end"]
    offset: int = Field(description="offset after this chunk; re-attach from here")
    text: str | None = None
    base64: str | None = None
    result: CommandInfo | None = None


class FileKind(StrEnum):
    """What a directory entry is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    OTHER = "other"


class FileInfo(Answer):
    """A file or directory. Names that are not UTF-8 carry surrogate escapes as `\\udcXX`."""

    path: str
    kind: FileKind
    size: int
    mode: str = Field(description="octal permissions")
    modified_at: datetime
    target: str | None = Field(default=None, description="where a symlink points")


class FileList(Answer):
    """Entries of a directory; `truncated` when there were more than the limit."""

    items: list[FileInfo]
    truncated: bool = False


class EditRequest(Request):
    """Replace `old` with `new`; fails unless `old` occurs exactly once (or `replace_all`)."""

    path: NoNul = Field(min_length=1, max_length=4096)
    old: str = Field(min_length=1)
    new: str
    replace_all: bool = False


class EditResult(Answer):
    """How many places were replaced, and the file after."""

    replaced: int
    file: FileInfo


class MoveRequest(Request):
    """Move or rename inside the workspace."""

    source: NoNul = Field(min_length=1, max_length=4096)
    destination: NoNul = Field(min_length=1, max_length=4096)
    overwrite: bool = False


class MkdirRequest(Request):
    """Make a directory and its parents."""

    path: NoNul = Field(min_length=1, max_length=4096)


class ExecuteRequest(Request):
    """`/execute`: code in a language, files in, files produced out. Only `shell` so far."""

    code: str = Field(min_length=1, max_length=1_048_576)
    language: Literal["shell", "python"] = "shell"
    timeout: float | None = Field(default=None, gt=0, le=MAX_TIMEOUT_S)
    files: dict[NoNul, str] = Field(default_factory=dict, max_length=256, description="path → base64")


class ExecuteResult(Answer):
    """What `/execute` answers."""

    output: str
    stderr: str
    exit_code: int | None
    signal: str | None = None
    timed_out: bool = False
    truncated: bool = False
    execution_time_ms: float
    files_produced: list[str]


class ToolRequest(Request):
    """A named tool with its parameters."""

    tool_name: str = Field(max_length=64)
    params: dict[str, object] = Field(default_factory=dict)


class ToolResult(Answer):
    """What a tool answered."""

    tool_name: str
    result: dict[str, object]


class SupervisorHealth(Answer):
    """What a supervisor says of itself. It comes from inside the sandbox, so it proves nothing."""

    status: Literal["ok"]
    state: Literal["idle", "busy"]
    commands_running: int
    capacity: int
    uptime_s: float


class Check(Answer):
    """One line of `carrel doctor`: a primitive, whether it is there, why it matters, how to get it."""

    name: str
    status: Literal["ok", "degraded", "missing"]
    found: str
    why: str
    remedy: str | None = None


class ProviderStatus(Answer):
    """A provider on this host: whether it can be used, and what is missing when not."""

    name: str
    isolation_level: int
    unsafe: bool
    available: bool
    reason: str | None = None
    capabilities: list[str]


class HostReport(Answer):
    """What `carrel doctor` shows."""

    kernel: str
    user: str
    checks: list[Check]
    providers: list[ProviderStatus]


class SnapshotInfo(Answer):
    """An immutable picture of a workspace. Only a ready one can be restored."""

    id: str
    context_id: str
    status: Literal["creating", "ready", "failed"]
    created_at: datetime
    parent: str | None = None
    bytes: int | None = Field(default=None, description="what the workspace held")
    new_bytes: int | None = Field(default=None, description="what this snapshot added to the storage")
    files: int | None = None
    error: str | None = None
    reason: Literal["request", "checkpoint", "stop", "fork"] = Field(
        default="request", description="why it was taken; carrel keeps only the newest of those nobody asked for"
    )
    archived: bool = Field(default=False, description="whether it is in the archive, so that any server can restore it")


class SnapshotPage(Answer):
    """A page of snapshots, newest first; `next` is the cursor of the following page."""

    items: list[SnapshotInfo]
    next: str | None = None


class RestoreRequest(Request):
    """Which snapshot's files the workspace gets."""

    snapshot_id: str = Field(min_length=1, max_length=64)


class ForkRequest(Request):
    """The new context, and the snapshot it starts from; without one a snapshot is taken now."""

    context_id: ContextId
    snapshot_id: str | None = Field(default=None, min_length=1, max_length=64)


class FileChange(Answer):
    """One path that differs between two snapshots."""

    path: str
    kind: Literal["added", "removed", "changed"]


class FileChanges(Answer):
    """What leads from one snapshot to another; `truncated` when there were more than the limit."""

    items: list[FileChange]
    truncated: bool = False


class SyncDirection(StrEnum):
    """Which way files go between a workspace and its filespace."""

    PUSH = "push"
    PULL = "pull"
    BOTH = "both"


class SyncRequest(Request):
    """Push the workspace's changes to the filespace, pull the filespace's into the workspace, or both."""

    direction: SyncDirection = SyncDirection.BOTH


class SyncSummary(Answer):
    """What a sync did. `conflicts` are paths that both sides had changed: the later write won."""

    direction: SyncDirection
    pushed: int = Field(description="files written to the filespace")
    pushed_bytes: int
    push_deleted: int = Field(description="files deleted in the filespace")
    pulled: int = Field(description="files written to the workspace")
    pulled_bytes: int
    pull_deleted: int = Field(description="files deleted in the workspace")
    conflicts: list[str] = Field(default_factory=list, description="at most 100 paths")
    skipped: int = Field(description="links, sockets and other things a filespace does not hold")
    duration_ms: float


class FilespaceFile(Answer):
    """One file of a filespace."""

    path: str
    size: int
    mode: str = Field(description="octal permissions")
    hash: str
    updated_at: datetime


class FilespacePage(Answer):
    """Files of a filespace in the order of their paths; `next` is the cursor of the following page."""

    items: list[FilespaceFile]
    next: str | None = None


class WorkspaceUsage(Answer):
    """What a workspace holds against what it may."""

    context_id: str | None
    bytes: int
    limit_bytes: int | None
    measured_at: datetime
    enforced_by: Literal["kernel", "watch"] = Field(description="who stops a write beyond the limit")


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
    summary: str = Field(description="what is asked for, in one line")
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
    expires_at: datetime | None = Field(default=None, description="worthless from then on; by default it has no end")


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
