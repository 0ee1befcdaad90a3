"""Models of sandboxes and sessions."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from carrel.models.base import MAX_PATH, MAX_TIMEOUT_S, Answer, ContextId, EnvName, NoNul, Request, TemplateName
from carrel.models.images import ImageName


class Trust(StrEnum):
    """How much the code is trusted. It decides the weakest isolation that is acceptable."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class Network(StrEnum):
    """The network access of a sandbox."""

    NONE = "none"
    ALLOWLIST = "allowlist"
    INTERNET = "internet"
    BRIDGE = "bridge"
    HOST = "host"

    @property
    def proxied(self) -> bool:
        """Whether all connections go through the egress proxy."""
        return self in (Network.ALLOWLIST, Network.INTERNET)


class State(StrEnum):
    """The states of a session."""

    CREATING = "creating"
    RUNNING = "running"
    IDLE_STOPPING = "idle_stopping"
    STOPPED = "stopped"
    ERROR = "error"
    TERMINATED = "terminated"


MOST_HOST_PATHS = 32
UNTIL_LABEL = "carrel.until"
"""A label of a sandbox that ends at a moment: seconds since 1970, a space, and `stop` or `terminate`. The first waits
until nothing runs in it; the other deletes its files too.
"""
Cpus = Annotated[float, Field(gt=0, le=1024)]
MemoryMb = Annotated[int, Field(ge=32, le=1_048_576)]
DiskMb = Annotated[int, Field(ge=1, le=1_048_576)]
Processes = Annotated[int, Field(ge=8, le=32_768)]
TimeoutS = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)]
LifetimeS = Annotated[float, Field(gt=0, le=366 * 86_400)]


class Limits(Request):
    """The limits of a sandbox. A limit that cannot be enforced is refused."""

    cpus: Cpus | None = Field(default=None, description="CPU cores")
    memory_mb: MemoryMb | None = Field(default=None, description="memory of all its processes, in MiB")
    disk_mb: DiskMb | None = Field(default=None, description="size of the workspace, in MiB")
    processes: Processes | None = Field(default=None, description="processes and threads")
    timeout_s: TimeoutS | None = Field(default=None, description="default deadline of a command, in seconds")
    lifetime_s: LifetimeS | None = Field(
        default=None, description="seconds after its start when the sandbox ends, whatever runs in it"
    )


AbsolutePath = Annotated[NoNul, StringConstraints(pattern=r"^/", max_length=MAX_PATH)]


class HostPath(Request):
    """A file or directory of the server's host that a sandbox sees, read-only."""

    source: AbsolutePath = Field(description="its path on the host, below `sandbox.folder_roots`")
    target: AbsolutePath | None = Field(
        default=None, description="its path in the sandbox, for example in /home/agent; null: the same"
    )


class SandboxRequest(Request):
    """The body of `deploy_or_resume`. Without `context_id` the sandbox is ephemeral: its files are deleted with it."""

    context_id: ContextId | None = None
    template: TemplateName | None = Field(
        default=None, description="the template of the sandbox; an existing context keeps its template"
    )
    provider: str = Field(default="auto", max_length=64)
    trust: Trust = Trust.MEDIUM
    network: Network | None = Field(
        default=None,
        description="null: the server's default for this trust, if the policy and the provider allow it",
    )
    limits: Limits = Field(default_factory=Limits)
    env: dict[EnvName, NoNul] = Field(default_factory=dict, max_length=256)
    labels: dict[NoNul, NoNul] = Field(default_factory=dict, max_length=32)
    filespace: bool | None = Field(
        default=None, description="keep the workspace in sync with the context's filespace; null: the server's default"
    )
    workspace_path: AbsolutePath | None = Field(
        default=None,
        description="an existing folder of the server's host that is the workspace, in place, at /workspace and at its "
        "own path; only below `sandbox.folder_roots`; an existing context keeps its folder",
    )
    image: ImageName | None = Field(
        default=None,
        description="an OCI image that is the root file system, such as `python:3.13-slim`; it is pulled if it is "
        "missing. `host`: the host's own root. null: that of the template or of the server's settings. An existing "
        "session keeps its image",
    )
    start_in: Literal["workspace", "image"] | None = Field(
        default=None,
        description="where commands start that name no directory: in the workspace, or in the working directory of "
        "the image; null: as before, at first in the workspace",
    )
    host_paths: list[HostPath] | None = Field(
        default=None,
        max_length=MOST_HOST_PATHS,
        description="with `workspace_path`: what else of the host the sandbox sees, read-only; null: as before",
    )


class ResourceUsage(Answer):
    """What a running sandbox uses, measured from outside; null: unknown."""

    cpu_seconds: float | None = Field(default=None, description="processor time since it started")
    memory_bytes: int | None = Field(default=None, description="memory now, as its limit counts it")
    memory_peak_bytes: int | None = Field(default=None, description="the most memory since it started")


class SandboxInfo(Answer):
    """A session and its sandbox."""

    id: str
    context_id: str | None
    ephemeral: bool
    state: State
    provider: str
    isolation_level: int
    unsafe: bool = Field(description="true if the provider does not isolate at all")
    trust: Trust
    network: Network
    limits: Limits
    labels: dict[str, str]
    created_at: datetime
    last_activity_at: datetime
    error: str | None = None
    node: str | None = Field(default=None, description="the server that runs the session")
    filespace: bool = Field(default=False, description="whether the workspace is kept in sync with the filespace")
    workspace_path: str | None = Field(
        default=None, description="the folder of the server's host that is the workspace; null: one of carrel's own"
    )
    host_paths: list[HostPath] = Field(default_factory=list, description="what else of the host it sees, read-only")
    image: str | None = Field(
        default=None, description="the image that was asked for; null: the root of the sandbox is the host's own"
    )
    image_digest: str | None = Field(
        default=None, description="the image that the session runs from, even if its name means another one by now"
    )
    snapshot: str | None = Field(default=None, description="the newest good snapshot")
    notice: str | None = Field(
        default=None,
        description="a warning about a working sandbox, such as an archive that does not answer",
    )
    template: str | None = Field(default=None, description="the template of the sandbox")
    agent: str | None = Field(
        default=None,
        description="the owner of the workspace: the agent or service whose token created it, or its template",
    )
    expires_at: datetime | None = Field(
        default=None, description="when the unused workspace will be deleted; null if that is not soon"
    )
    ends_at: datetime | None = Field(
        default=None, description="when the lifetime of the running sandbox is over; null: it has no lifetime"
    )
    resources: ResourceUsage | None = Field(
        default=None,
        description="what the running sandbox uses, a few seconds old; null in the answers to changes, for sandboxes "
        "on other machines, and beyond `metrics.sandboxes`",
    )
    files_kept: bool | None = Field(
        default=None, description="only in a list of terminated sessions: whether the files are still on this server"
    )


class TemplateInfo(Answer):
    """A template: the defaults of its sandboxes."""

    name: str
    description: str = ""
    provider: str | None = None
    image: str | None = None
    build: bool = Field(default=False, description="whether its image is built from a Dockerfile of the template")
    network: Network | None = None
    limits: Limits = Field(default_factory=Limits)
    env: list[str] = Field(default_factory=list, description="names of variables, without their values")
    labels: dict[str, str] = Field(default_factory=dict)
    packages: list[str] = Field(default_factory=list, description="Python packages of its sandboxes")
    built: bool = Field(default=False, description="whether the environment of its packages is built")
    shipped: bool = Field(default=False, description="whether it is part of carrel")
    settings: bool = Field(default=False, description="whether it has its own settings.json")
    sources: bool = Field(default=False, description="whether it has its own sources.json")
    error: str | None = Field(default=None, description="why it cannot be used")


class TemplateList(Answer):
    """The templates of a server, by name."""

    items: list[TemplateInfo]


class SandboxPage(Answer):
    """A page of sandboxes; `next` is the cursor of the following page."""

    items: list[SandboxInfo]
    next: str | None = None


class TerminateRequest(Request):
    """The body of a request to terminate a sandbox."""

    reason: str = Field(default="", max_length=1000)
    delete_files: bool = Field(default=False, description="delete a durable workspace too")
    snapshot: bool | None = Field(
        default=None, description="take a last snapshot of the workspace; null: only if its files are not deleted"
    )


class SupervisorHealth(Answer):
    """The state that a supervisor reports. It comes from inside the sandbox, so it is not reliable."""

    status: Literal["ok"]
    state: Literal["idle", "busy"]
    commands_running: int = Field(description="running commands, and code contexts with a cell to run")
    python_calls: int = Field(default=0, description="running commands that are calls of Python")
    code_contexts: int = Field(default=0, description="code contexts, busy or idle")
    processes: int = Field(default=0, description="processes, including those of the supervisor")
    memory_bytes: int = Field(default=0, description="an upper limit: pages that a fork shares count twice")
    capacity: int = Field(description="the most commands that may run at once")
    uptime_s: float


class WorkspaceUsage(Answer):
    """The size of a workspace, and its limit."""

    context_id: str | None
    bytes: int
    limit_bytes: int | None
    measured_at: datetime
    enforced_by: Literal["kernel", "watch"] = Field(description="what stops a write beyond the limit")
