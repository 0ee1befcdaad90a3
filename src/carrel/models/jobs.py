"""Models of jobs: work that is accepted durably and reaches a visible end."""

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from carrel.models.base import (
    DEFAULT_OUTPUT_BYTES,
    MAX_PATH,
    MAX_TIMEOUT_S,
    Answer,
    Code,
    CommandText,
    ContextId,
    EnvName,
    NoNul,
    Request,
    SecretFileName,
    Stdin,
    TemplateName,
)
from carrel.models.files import FileInfo
from carrel.models.images import ImageName
from carrel.models.mcp import McpServerName, ToolName
from carrel.models.sandboxes import Limits, Network, Trust

MOST_RETRIES = 20
LONGEST_BACKOFF_S = 3600.0
LONGEST_QUEUE_S = 7 * 86_400.0
LONGEST_WHOLE_S = 8 * 86_400.0
MAX_JOB_FILES = 1024 * 1024
"""The most bytes of all files that come with a job."""
MAX_JOB_OUTPUT = 50 * 1024 * 1024
MOST_ARTIFACTS = 1000
MAX_PROGRESS = 200
"""The most characters that a job can say about its progress."""

JobId = Annotated[str, StringConstraints(pattern=r"^job-[0-9a-f]{20}$")]


class JobState(StrEnum):
    """The states of a job."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING_APPROVAL = "waiting_approval"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    LOST = "lost"

    @property
    def terminal(self) -> bool:
        """Whether nothing happens to a job in this state any more."""
        return self in TERMINAL


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT, JobState.LOST})
"""The states in which a job has ended."""

JOB_STATES: Mapping[JobState, str] = {
    JobState.QUEUED: "it is stored, and starts when there is room, or when the pause before a retry is over",
    JobState.RUNNING: "a server has it: the sandbox is made ready, the work runs, or its results are put away",
    JobState.WAITING_APPROVAL: "a person has to decide about it; it takes no place of a running job",
    JobState.SUCCEEDED: "the work ended with exit code 0",
    JobState.FAILED: "the work ended otherwise, or it was refused or could not be started; `reason` says why",
    JobState.CANCELLED: "somebody cancelled it, and nothing of it runs any more",
    JobState.TIMED_OUT: "one of its timeouts passed; `reason` says which",
    JobState.LOST: "its sandbox or server died, and nobody knows how far it came; `reason` says what died",
}


class JobWorkspace(StrEnum):
    """What becomes of the workspace when a job has ended."""

    KEEP = "keep"
    REMOVE = "remove"


class PythonWork(Request):
    """Python code that a job runs, as a program of its own."""

    code: Annotated[Code, StringConstraints(max_length=100_000)] = Field(
        description="runs as `python3 -c`, and policy decides about it as such; bring longer programs as a file"
    )
    args: list[NoNul] = Field(default_factory=list, max_length=256, description="`sys.argv[1:]`")


class McpWork(Request):
    """A call of a tool of one of the context's MCP servers."""

    server: McpServerName
    tool: ToolName
    arguments: dict[str, object] = Field(default_factory=dict)


class JobTimeouts(Request):
    """The timeouts of a job, in seconds."""

    queue_s: float = Field(
        default=86_400.0, gt=0, le=LONGEST_QUEUE_S, description="until it starts, each time that it is queued"
    )
    run_s: float = Field(
        default=86_400.0, gt=0, le=MAX_TIMEOUT_S, description="from the start of an attempt to its end"
    )
    heartbeat_s: float | None = Field(
        default=None,
        ge=1,
        le=MAX_TIMEOUT_S,
        description="without output and without a heartbeat, after which it counts as stuck",
    )
    whole_s: float | None = Field(
        default=None, gt=0, le=LONGEST_WHOLE_S, description="from the submission to the end, with all attempts"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        given = self.model_fields_set
        if self.heartbeat_s is not None and self.heartbeat_s > self.run_s:
            raise ValueError("heartbeat_s is longer than run_s, so it could never pass")
        for name in ("queue_s", "run_s"):
            if self.whole_s is not None and name in given and getattr(self, name) > self.whole_s:
                raise ValueError(f"{name} is longer than whole_s, so it could never pass")
        return self


Glob = Annotated[NoNul, StringConstraints(min_length=1, max_length=MAX_PATH)]
_Label = Annotated[NoNul, StringConstraints(max_length=256)]


class JobRequest(Request):
    """A job: exactly one of `command`, `python` and `mcp`. Without `context_id` it gets a new workspace of its own."""

    command: CommandText | Annotated[list[NoNul], Field(min_length=1, max_length=4096)] | None = Field(
        default=None, description="a string runs with `/bin/sh -c`; a list runs without a shell"
    )
    python: PythonWork | None = None
    mcp: McpWork | None = None
    context_id: ContextId | None = Field(default=None, description="the context in whose workspace it runs")
    cwd: NoNul | None = Field(default=None, max_length=MAX_PATH, description="relative to the workspace")
    env: dict[EnvName, NoNul] = Field(default_factory=dict, max_length=256, description="environment variables")
    secret_variables: dict[EnvName, SecretFileName] = Field(
        default_factory=dict,
        max_length=64,
        description="environment variables with secrets of its context or template: name of the variable → name of the "
        "secret. The record of the job has no values",
    )
    stdin: Stdin | None = Field(default=None, description="text for standard input, which is then closed")
    files: dict[NoNul, str] = Field(
        default_factory=dict, max_length=256, description="files that are written before it starts: path → base64"
    )
    artifacts: list[Glob] = Field(
        default_factory=list, max_length=64, description="patterns of the files that are its result, such as `output/*`"
    )
    output_limit: int = Field(default=DEFAULT_OUTPUT_BYTES, ge=0, le=MAX_JOB_OUTPUT, description="bytes of kept output")
    template: TemplateName | None = None
    image: ImageName | None = None
    provider: str | None = Field(default=None, min_length=1, max_length=64)
    trust: Trust | None = None
    network: Network | None = None
    limits: Limits | None = None
    timeouts: JobTimeouts = Field(default_factory=JobTimeouts)
    retries: int = Field(
        default=0,
        ge=0,
        le=MOST_RETRIES,
        description="how often it is run again if it failed, was lost or timed out: only for work that may run twice",
    )
    backoff_s: float = Field(
        default=1.0, gt=0, le=LONGEST_BACKOFF_S, description="the pause before the first retry; it doubles each time"
    )
    priority: int = Field(
        default=0, ge=-100, le=100, description="among the jobs of its namespace; higher starts first"
    )
    labels: dict[_Label, _Label] = Field(default_factory=dict, max_length=32)
    snapshot: bool = Field(default=False, description="take a snapshot of the workspace at the end")
    workspace: JobWorkspace | None = Field(
        default=None,
        description="what becomes of the workspace at the end; null: it is kept, and one that was made for the job is "
        "removed with the record of the job",
    )
    ttl_s: float | None = Field(
        default=None,
        ge=1,
        le=366 * 86_400,
        description="how long the record and the output are kept after the end; null: the default of the server",
    )
    webhook: NoNul | None = Field(
        default=None,
        max_length=2048,
        description="a URL that is told the end, signed as the webhook of approvals; the operator lists the hosts",
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        kinds = [name for name in ("command", "python", "mcp") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError("give exactly one of command, python and mcp")
        if self.mcp is not None:
            if self.context_id is None:
                raise ValueError("an MCP call needs context_id: its servers belong to a context")
            if self.stdin is not None or self.env or self.secret_variables or self.cwd is not None:
                raise ValueError("an MCP call has no stdin, cwd and variables: they belong to the server")
        if twice := self.env.keys() & self.secret_variables.keys():
            raise ValueError(f"the variable {min(twice)} is in env and in secret_variables")
        for pattern in self.artifacts:
            require_inside(pattern)
        if self.workspace is JobWorkspace.REMOVE:
            if self.context_id is not None:
                raise ValueError("the workspace of a context is not removed by a job; terminate its sandbox instead")
            if self.artifacts:
                raise ValueError("the artifacts would be removed with the workspace")
        return self


def require_inside(pattern: str) -> None:
    """Refuse a pattern of files that could leave the workspace."""
    if pattern.startswith("/") or ".." in pattern.split("/"):
        raise ValueError(f"the pattern '{pattern[:200]}' leaves the workspace; write it relative to the workspace")


class JobInfo(Answer):
    """A job, with what became of it."""

    id: str
    state: JobState
    phase: str | None = Field(
        default=None, description="while it runs: `starting`, `running`, `stopping` or `archiving`"
    )
    reason: str | None = Field(default=None, description="why it is in this state, where that is not obvious")
    context_id: str = Field(description="the context of its workspace; for one of its own it begins with `job-`")
    own_workspace: bool = Field(default=False, description="whether the workspace was made for the job")
    kind: str = Field(description="`command`, `python` or `mcp`")
    summary: str = Field(description="what it runs, in one line")
    labels: dict[str, str] = Field(default_factory=dict)
    priority: int = 0
    attempt: int = Field(default=0, description="the number of the newest attempt; 0 before the first")
    retries: int = 0
    created_at: datetime
    started_at: datetime | None = Field(default=None, description="when the work of the newest attempt began")
    ended_at: datetime | None = None
    expires_at: datetime | None = Field(default=None, description="when the record and the output are removed")
    exit_code: int | None = None
    signal: str | None = None
    oom_killed: bool = False
    progress: str | None = Field(default=None, description="what the job said last about its progress")
    progress_at: datetime | None = None
    approval: str | None = Field(default=None, description="the approval that it waits for")
    session_id: str | None = None
    node: str | None = Field(default=None, description="the server that runs it")
    submitted_by: str = ""
    retry_of: str | None = Field(default=None, description="the job that this one repeats")
    cancel_requested: bool = False
    output_bytes: int = 0
    dropped_bytes: int = Field(default=0, description="bytes of output beyond the limit, which were not kept")
    snapshot: str | None = None
    artifacts: int | None = Field(default=None, description="the number of its artifacts, once it has ended")
    queued_ms: float | None = Field(default=None, description="time in the queue before the newest attempt")
    starting_ms: float | None = None
    running_ms: float | None = None
    archiving_ms: float | None = None
    cpu_seconds: float | None = Field(
        default=None, description="processor time of its sandbox, if that was made for the job"
    )
    memory_peak_bytes: int | None = Field(default=None, description="the same for the peak of memory")


class JobPage(Answer):
    """A page of jobs; `next` is the cursor of the following page."""

    items: list[JobInfo]
    next: str | None = None


class JobArtifacts(Answer):
    """The files that a job produced, as they were at its end. They are read from the workspace of its context."""

    context_id: str
    items: list[FileInfo]
    truncated: bool = Field(default=False, description=f"whether there were more than {MOST_ARTIFACTS}")
