"""Sandboxes and sessions. They hold and check values; they do nothing."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import Field

from carrel.models.base import MAX_TIMEOUT_S, Answer, ContextId, EnvName, NoNul, Request, TemplateName


class Trust(StrEnum):
    """How far the code that will run is trusted; picks the least isolation that is acceptable."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class Network(StrEnum):
    """What a sandbox can reach."""

    NONE = "none"
    ALLOWLIST = "allowlist"
    INTERNET = "internet"
    BRIDGE = "bridge"
    HOST = "host"

    @property
    def proxied(self) -> bool:
        """Whether the proxy is the one way out."""
        return self in (Network.ALLOWLIST, Network.INTERNET)


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
    template: TemplateName | None = Field(
        default=None, description="the recipe it is made by; a context keeps the one it was made with"
    )
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
    template: str | None = Field(default=None, description="the recipe it was made by")
    agent: str | None = Field(
        default=None,
        description="whom the workspace belongs to: the agent or service whose token made it, else its template",
    )
    expires_at: datetime | None = Field(
        default=None, description="when an unused workspace is deleted; None while that is not near"
    )
    files_kept: bool | None = Field(
        default=None, description="in a list of terminated sessions: whether the files are still on this server"
    )


class TemplateInfo(Answer):
    """A template: what a sandbox gets that is made by it and asks for nothing else."""

    name: str
    description: str = ""
    provider: str | None = None
    network: Network | None = None
    limits: Limits = Field(default_factory=Limits)
    env: list[str] = Field(default_factory=list, description="names of variables, without their values")
    labels: dict[str, str] = Field(default_factory=dict)
    packages: list[str] = Field(default_factory=list, description="Python packages that its sandboxes have")
    built: bool = Field(default=False, description="whether an environment of its packages lies ready")
    shipped: bool = Field(default=False, description="whether it came with carrel")
    settings: bool = Field(default=False, description="whether it has a settings.json of its own")
    sources: bool = Field(default=False, description="whether it has a sources.json of its own")
    error: str | None = Field(default=None, description="why it cannot be used")


class TemplateList(Answer):
    """The templates of a server, by name."""

    items: list[TemplateInfo]


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


class SupervisorHealth(Answer):
    """What a supervisor says of itself. It comes from inside the sandbox, so it proves nothing."""

    status: Literal["ok"]
    state: Literal["idle", "busy"]
    commands_running: int = Field(description="commands, and code contexts that have a cell to run")
    python_calls: int = Field(default=0, description="those of the commands that are calls of Python")
    code_contexts: int = Field(default=0, description="code contexts, whether they run a cell or not")
    processes: int = Field(default=0, description="those of the supervisor included")
    memory_bytes: int = Field(default=0, description="at most what is held: pages that a fork shares count twice")
    capacity: int = Field(description="how many commands may run at once")
    uptime_s: float


class WorkspaceUsage(Answer):
    """What a workspace holds against what it may."""

    context_id: str | None
    bytes: int
    limit_bytes: int | None
    measured_at: datetime
    enforced_by: Literal["kernel", "watch"] = Field(description="who stops a write beyond the limit")
