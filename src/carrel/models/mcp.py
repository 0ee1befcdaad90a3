"""MCP servers of a context, what they offer, and calls of their tools. They hold and check values; they do nothing."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from carrel.models.base import Answer, EnvName, NoNul, Request
from carrel.models.environments import PythonVersion, Requirement

MCP_TIMEOUT_S = 60.0
MAX_MCP_TIMEOUT_S = 3600.0
MOST_MCP_SERVERS = 16
"""How many MCP servers a context may have."""

McpServerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Letters, digits, `.`, `_`, `-`; 1 to 64 characters; starts with a letter or digit."""

ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]{1,128}$")]
"""What the protocol lets a tool be called: letters, digits, `_`, `-`, `.`, `/`; 1 to 128 characters."""

NpmPackage = Annotated[
    str, StringConstraints(pattern=r"^(@[a-z0-9~_][a-z0-9._~-]*/)?[a-z0-9~_][a-z0-9._~-]*(@[A-Za-z0-9.+^~<>=*-]+)?$")
]
"""A package of npm by its name, with a version or a tag: `@scope/name@1.2`."""

_SecretFile = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,127}$")]

McpState = Literal["stopped", "running", "failed", "backing_off"]


class McpServerRequest(Request):
    """How an MCP server is started inside the sandbox. It speaks over its standard input and output."""

    command: list[NoNul] = Field(min_length=1, max_length=256, description="a program and its arguments, no shell text")
    variables: dict[EnvName, NoNul] = Field(default_factory=dict, max_length=256, description="of its environment")
    secret_variables: dict[EnvName, _SecretFile] = Field(
        default_factory=dict,
        max_length=64,
        description="variables whose values are secrets: name of the variable → name of the secret; read inside",
    )
    requirements: list[Requirement] | None = Field(
        default=None, min_length=1, max_length=256, description="Python packages it runs with, as PEP 508 writes them"
    )
    python: PythonVersion | None = Field(default=None, description="the Python of the requirements, such as 3.11")
    npm: list[Annotated[NpmPackage, Field(max_length=214)]] | None = Field(
        default=None, min_length=1, max_length=64, description="npm packages, installed into the workspace"
    )
    cwd: NoNul | None = Field(default=None, max_length=4096, description="relative to the workspace")
    enabled: bool = Field(default=True, description="whether it may be started")

    @model_validator(mode="after")
    def _plain(self) -> McpServerRequest:
        if not self.command[0]:
            raise ValueError("the command names no program")
        if twice := self.variables.keys() & self.secret_variables.keys():
            raise ValueError(f"the variable {min(twice)} is given twice")
        if self.python is not None and self.requirements is None:
            raise ValueError("a version of Python is for requirements")
        return self


class McpTool(Answer):
    """A tool, as its server describes it: its words are the server's own."""

    name: str
    qualified: str = Field(description="`server:tool`, as rules and approvals name it")
    title: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)
    output_schema: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None


class McpCatalogue(Answer):
    """What an MCP server offers, as it was when it was last asked. Reading it starts nothing."""

    server: str
    protocol_version: str | None = None
    server_info: dict[str, Any] | None = Field(default=None, description="what the server calls itself")
    instructions: str | None = None
    tools: list[McpTool] = Field(default_factory=list)
    prompts: list[dict[str, Any]] = Field(default_factory=list, description="as the protocol has them")
    resources: list[dict[str, Any]] = Field(default_factory=list, description="as the protocol has them")
    resource_templates: list[dict[str, Any]] = Field(default_factory=list, description="as the protocol has them")
    discovered_at: datetime | None = None
    current: bool = Field(default=False, description="whether it is of the server as it is declared now")
    error: str | None = Field(default=None, description="why the server could not be asked when that was last tried")


class McpServerInfo(Answer):
    """An MCP server of a context, or one that the operator runs for all."""

    name: str
    origin: Literal["context", "platform"] = "context"
    state: McpState = Field(description="of its process; one that is stopped is started by the next call")
    enabled: bool = True
    command: list[str] = Field(default_factory=list)
    variables: list[str] = Field(default_factory=list, description="the names of its variables")
    secret_variables: dict[str, str] = Field(default_factory=dict)
    requirements: list[str] | None = None
    python: str | None = None
    npm: list[str] | None = None
    cwd: str | None = None
    environment: str | None = Field(default=None, description="the Python environment it runs in")
    generation: str = Field(description="changes whenever the declaration does")
    tools: int = Field(default=0, description="how many tools its catalogue has")
    discovered_at: datetime | None = None
    discovery_error: str | None = None
    starts: int | None = Field(default=None, description="how often it was started in this sandbox")
    reason: str | None = Field(default=None, description="why it does not run, when it failed")
    retry_in_s: float | None = Field(default=None, description="how long it is not started again after it failed")
    url: str = Field(description="where any MCP client connects to it, relative to the server's URL")


class McpServerList(Answer):
    """The MCP servers of a context, by name."""

    items: list[McpServerInfo]


class McpRequest(Request):
    """A call of a tool."""

    tool: ToolName
    arguments: dict[str, Any] = Field(default_factory=dict)
    timeout: float = Field(default=MCP_TIMEOUT_S, gt=0, le=MAX_MCP_TIMEOUT_S, description="seconds")


class McpError(Answer):
    """An error of the protocol that a server answered with."""

    code: int
    message: str


class McpResult(Answer):
    """What a tool answered. An error of the tool or of its server is a result; a failure of carrel never is."""

    server: str
    tool: str
    content: list[dict[str, Any]] = Field(default_factory=list, description="as the protocol has it: text, images, …")
    structured_content: Any = None
    is_error: bool = False
    timed_out: bool = False
    error: McpError | None = Field(default=None, description="when the server refused the call itself")
    duration_ms: float

    @property
    def text(self) -> str:
        """The texts of the content, one after the other."""
        return "\n".join(str(each.get("text", "")) for each in self.content if each.get("type") == "text")


class McpLog(Answer):
    """What an MCP server wrote to its standard error, and when it started and ended."""

    text: str
    offset: int = Field(description="where the text begins; bytes from the first one ever written")
    next: int = Field(description="where to go on")
    dropped: int = Field(default=0, description="bytes before the text that are gone")
