"""Models of MCP servers, their catalogues, and calls of their tools."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from carrel.models.base import MAX_PATH, Answer, EnvName, NoNul, Request, SecretFileName, ShortName
from carrel.models.environments import PythonVersion, Requirements

MCP_TIMEOUT_S = 60.0
MAX_MCP_TIMEOUT_S = 3600.0
MOST_MCP_SERVERS = 16
"""The most MCP servers of a context."""

McpServerName = ShortName

ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]{1,128}$")]
"""The names that the protocol allows: letters, digits, `_`, `-`, `.`, `/`; 1 to 128 characters."""

NpmPackage = Annotated[
    str, StringConstraints(pattern=r"^(@[a-z0-9~_][a-z0-9._~-]*/)?[a-z0-9~_][a-z0-9._~-]*(@[A-Za-z0-9.+^~<>=*-]+)?$")
]
"""The name of an npm package, optionally with a version or a tag: `@scope/name@1.2`."""

McpState = Literal["stopped", "running", "failed", "backing_off"]


class McpServerRequest(Request):
    """An MCP server that runs inside the sandbox and uses standard input and output."""

    command: list[NoNul] = Field(
        min_length=1, max_length=256, description="a program and its arguments, not a shell text"
    )
    variables: dict[EnvName, NoNul] = Field(default_factory=dict, max_length=256, description="environment variables")
    secret_variables: dict[EnvName, SecretFileName] = Field(
        default_factory=dict,
        max_length=64,
        description="environment variables with secrets: name of the variable → name of the secret",
    )
    requirements: Requirements | None = Field(
        default=None, description="Python packages that it needs, in the form of PEP 508"
    )
    python: PythonVersion | None = Field(default=None, description="the Python version for them, such as 3.11")
    npm: list[Annotated[NpmPackage, Field(max_length=214)]] | None = Field(
        default=None, min_length=1, max_length=64, description="npm packages, installed into the workspace"
    )
    cwd: NoNul | None = Field(default=None, max_length=MAX_PATH, description="relative to the workspace")
    enabled: bool = Field(default=True, description="whether it may start")

    @model_validator(mode="after")
    def _plain(self) -> Self:
        if not self.command[0]:
            raise ValueError("the command names no program")
        if twice := self.variables.keys() & self.secret_variables.keys():
            raise ValueError(f"the variable {min(twice)} is in variables and in secret_variables")
        if self.python is not None and self.requirements is None:
            raise ValueError("python needs requirements")
        return self


class McpTool(Answer):
    """A tool, as its server describes it."""

    name: str
    qualified: str = Field(description="`server:tool`, as in rules and approvals")
    title: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)
    output_schema: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None


class McpCatalogue(Answer):
    """The catalogue of an MCP server at its last discovery. Reading the catalogue does not start the server."""

    server: str
    protocol_version: str | None = None
    server_info: dict[str, Any] | None = Field(default=None, description="the server's description of itself")
    instructions: str | None = None
    tools: list[McpTool] = Field(default_factory=list)
    prompts: list[dict[str, Any]] = Field(default_factory=list, description="in the form of the protocol")
    resources: list[dict[str, Any]] = Field(default_factory=list, description="in the form of the protocol")
    resource_templates: list[dict[str, Any]] = Field(default_factory=list, description="in the form of the protocol")
    discovered_at: datetime | None = None
    current: bool = Field(default=False, description="whether the server's declaration is still the same")
    error: str | None = Field(default=None, description="why the last discovery failed")


class McpServerInfo(Answer):
    """An MCP server of a context, or one that the operator runs for all contexts."""

    name: str
    origin: Literal["context", "platform"] = "context"
    state: McpState = Field(description="state of its process; the next call starts a stopped one")
    enabled: bool = True
    command: list[str] = Field(default_factory=list)
    variables: list[str] = Field(default_factory=list, description="the names of its variables")
    secret_variables: dict[str, str] = Field(default_factory=dict)
    requirements: list[str] | None = None
    python: str | None = None
    npm: list[str] | None = None
    cwd: str | None = None
    environment: str | None = Field(default=None, description="its Python environment")
    generation: str = Field(description="changes whenever the declaration does")
    tools: int = Field(default=0, description="the number of tools in its catalogue")
    discovered_at: datetime | None = None
    discovery_error: str | None = None
    starts: int | None = Field(default=None, description="the number of starts in this sandbox")
    reason: str | None = Field(default=None, description="why it failed")
    retry_in_s: float | None = Field(default=None, description="seconds until it may start again after a failure")
    url: str = Field(description="the URL for MCP clients, relative to the server's URL")


class McpServerList(Answer):
    """The MCP servers of a context, by name."""

    items: list[McpServerInfo]


class McpRequest(Request):
    """A call of a tool."""

    tool: ToolName
    arguments: dict[str, Any] = Field(default_factory=dict)
    timeout: float = Field(default=MCP_TIMEOUT_S, gt=0, le=MAX_MCP_TIMEOUT_S, description="seconds")


class McpError(Answer):
    """An error response of an MCP server."""

    code: int
    message: str


class McpResult(Answer):
    """The result of a tool call. Errors of the tool or its server are results; failures of carrel are not."""

    server: str
    tool: str
    content: list[dict[str, Any]] = Field(
        default_factory=list, description="in the form of the protocol: text, images, …"
    )
    structured_content: Any = None
    is_error: bool = False
    timed_out: bool = False
    error: McpError | None = Field(default=None, description="set if the server refused the call")
    duration_ms: float

    @property
    def text(self) -> str:
        """The texts of the content, joined by line breaks."""
        return "\n".join(str(each.get("text", "")) for each in self.content if each.get("type") == "text")


class McpLog(Answer):
    """The log of an MCP server: its standard error, with its starts and ends."""

    text: str
    offset: int = Field(description="position of the text, in bytes since the start of the log")
    next: int = Field(description="the offset for the next request")
    dropped: int = Field(default=0, description="bytes before the text that were dropped")
