"""The table of operations: every operation is declared once, in one row.

A row has the name of the operation in policies, approvals, the audit log and metrics; the scope that a token needs; the
HTTP route; which arguments policy decides about; and, if the operation is one request to the supervisor, that request.
Scopes (`carrel.identity`), routes (`carrel.api`), decisions and the audit log (`carrel.control`) and the reference
pages are derived from these rows. Pure: this module does nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from carrel.models.events import EventKind
from carrel.models.files import (
    DeleteRequest,
    EditRequest,
    EditResult,
    FileInfo,
    FileList,
    ListRequest,
    MkdirRequest,
    MoveRequest,
    Nothing,
    StatRequest,
)

Q = TypeVar("Q", bound=BaseModel)
A = TypeVar("A", bound=BaseModel)

SMALL = 1024 * 1024
LIST = 32 * 1024 * 1024

Kind = Literal["shell", "file", "mcp", "network", "session"]
ContextSource = Literal["path", "listed", "handler"]
"""Where an API route finds the context of a request. `path`: the path names a sandbox or a context, or the route
belongs to no context. `listed`: the route lists only what the caller's token has access to. `handler`: the context is
in the body or in a record, and the route's function checks it.
"""


class Scope(StrEnum):
    """The scopes of a token."""

    READ = "read"
    OPERATE = "operate"
    APPROVE = "approve"
    ADMINISTER = "administer"
    LOG = "log"


@dataclass(frozen=True, slots=True)
class FileAccess:
    """An access of a file operation to the path in one of its arguments; with `tree`, to everything below it too. With
    `surely`, rules that only may match something in the tree do not count.
    """

    access: Literal["read", "write", "delete"]
    argument: str = "path"
    tree: bool = False
    surely: bool = False


Decides = Literal["nothing", "command", "variables", "tool", "host", "port", "deletions"] | tuple[FileAccess, ...]
"""What policy decides about: a command with its variables, files and packages; the variables of a sandbox; a tool of an
MCP server; a host and port; a port of the sandbox; the number of deleted files; or accesses to files.
"""

READS = (FileAccess("read"),)
WRITES = (FileAccess("write"),)
DELETES = (FileAccess("delete"),)
READS_ALL = (FileAccess("read", tree=True),)
DELETES_ALL = (FileAccess("delete", tree=True),)
MOVES = (
    FileAccess("read", tree=True, surely=True),  # the file can be read at its destination
    FileAccess("delete", tree=True, surely=True),
    FileAccess("write", "destination"),
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One row. `kind` is None for an API route that only shows records of the server, or performs other operations."""

    name: str
    kind: Kind | None = None
    scope: Scope | None = None
    """The scope that a token needs; None if there is no API route."""
    http: str = ""
    """Method and path of its API route."""
    id: str = ""
    """The operation id of that route, by default the name."""
    decides: Decides = "nothing"
    asks: bool = True
    """False: if policy asks, the operation is allowed, because a person was asked before."""
    context_from: ContextSource = "path"
    of_server: bool = False
    """It belongs to no context: its audit record goes into the chain of the server."""
    starts: EventKind | None = None
    """The event that is written when it begins."""
    event: EventKind | None = None
    """The event that is written when it has ended: always if the operation `starts` with one, else if it succeeded."""

    def __post_init__(self) -> None:
        if self.kind == "file" and not isinstance(self.decides, tuple) and self.decides != "deletions":
            raise ValueError(f"{self.name}: declare its file accesses in `decides`")
        if self.kind in {"mcp", "network"} and self.decides == "nothing":
            raise ValueError(f"{self.name}: declare in `decides` what policy decides about")

    @property
    def method(self) -> str:
        """The HTTP method of its API route."""
        return self.http.partition(" ")[0]

    @property
    def path(self) -> str:
        """The path of its API route."""
        return self.http.partition(" ")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardedOperation(Operation, Generic[Q, A]):
    """An operation on files that is one request to the supervisor. It needs no other code in the control plane and the
    API: the request is forwarded as JSON or as a query, and the response is checked against the model of the result.
    """

    supervisor: str
    """Method and path of the supervisor's route."""
    request: type[Q]
    result: type[A]
    arguments: Callable[[Q], Mapping[str, object]]
    """Returns the arguments for policy, approvals and the audit log."""
    summary: str
    """The summary and the description are for the OpenAPI document."""
    description: str
    paths: tuple[str, ...] = ("path",)
    """The fields of the request that are paths in the workspace."""
    content: str | None = None
    """The field of the request whose text is written to the workspace; its bytes are counted."""
    fills_disk: bool = False
    """It is refused while the workspace is over its quota."""
    deadline: float = 30.0
    largest_result: int = SMALL
    doubt: Callable[[Q, A], str | None] | None = None
    """Returns why a response cannot be right for its request, or None."""

    @property
    def has_body(self) -> bool:
        """Whether the request is sent as JSON; else it is a query."""
        return self.method in {"POST", "PUT"}


TABLE: list[Operation] = []
"""Every row, in the order of the reference pages."""


def _row(
    name: str,
    kind: Kind | None = None,
    scope: Scope | None = None,
    http: str = "",
    *,
    id: str = "",
    **given: Any,
) -> Operation:
    row = Operation(name, kind, scope, http, id or (name if scope else ""), **given)
    TABLE.append(row)
    return row


def _forwarded(row: ForwardedOperation[Q, A]) -> ForwardedOperation[Q, A]:
    TABLE.append(row)
    return row


def _only_path(request: BaseModel) -> dict[str, object]:
    return request.model_dump(include={"path"})


def _of_delete(request: DeleteRequest) -> dict[str, object]:
    return {"path": request.path} | ({"recursive": True} if request.recursive else {})


def _of_move(request: MoveRequest) -> dict[str, object]:
    return {"path": request.source, "destination": request.destination}


def _too_many(request: ListRequest, answer: FileList) -> str | None:
    return "the sandbox listed more files than were asked for" if len(answer.items) > request.limit else None


_SHOWN = 2000
"""Characters of a replaced text that are shown to the person who decides."""


def _of_edit(request: EditRequest) -> dict[str, object]:
    """Shorten both texts for a person, and add a digest of the full texts."""
    texts = f"{len(request.old)}:{request.old}{request.new}".encode("utf-8", "surrogatepass")
    arguments: dict[str, object] = {"path": request.path, "old": _cut(request.old), "new": _cut(request.new)}
    if request.replace_all:
        arguments["replace_all"] = True
    return arguments | {"digest": hashlib.sha256(texts).hexdigest()}


def _cut(text: str) -> str:
    left = len(text) - _SHOWN
    return text if left <= 0 else f"{text[:_SHOWN]} […] and {left} characters more"


READ, OPERATE, APPROVE, ADMINISTER, LOG = Scope
_COMMAND_STARTED, _PYTHON_STARTED = EventKind.COMMAND_STARTED, EventKind.PYTHON_STARTED
_WRITTEN, _DELETED = EventKind.FILE_WRITTEN, EventKind.FILE_DELETED
_COMMAND = {"starts": _COMMAND_STARTED, "event": EventKind.COMMAND_ENDED}
_PYTHON = {"starts": _PYTHON_STARTED, "event": EventKind.PYTHON_ENDED}
_TOOL = {"starts": EventKind.TOOL_STARTED, "event": EventKind.TOOL_ENDED}
_SANDBOX, _CONTEXT = "/v1/sandboxes/{id}", "/v1/contexts/{context_id}"
_ONE_COMMAND, _FILES, _CELLS = f"{_SANDBOX}/commands/{{cid}}", f"{_SANDBOX}/files", f"{_SANDBOX}/code-contexts/{{name}}"
_FILESPACE, _SNAPSHOTS = "/v1/filespaces/{context_id}", f"{_SANDBOX}/snapshots"
_MCP, _TEMPLATE_SECRETS = f"{_SANDBOX}/mcp-servers/{{server}}", "/v1/templates/{template}/secrets"

# sandboxes
LIST_SANDBOXES = _row("list_sandboxes", None, READ, "GET /v1/sandboxes", context_from="listed")
DEPLOY_OR_RESUME = _row(
    "deploy_or_resume", "session", OPERATE, "POST /v1/sandboxes", decides="variables", context_from="handler"
)
GET_SANDBOX = _row("get_sandbox", None, READ, f"GET {_SANDBOX}")
GET_USAGE = _row("get_usage", None, READ, f"GET {_SANDBOX}/usage")
HEALTH = _row("health", "session", READ, f"GET {_SANDBOX}/health", id="get_sandbox_health")
STOP = _row("stop", "session", OPERATE, f"POST {_SANDBOX}/stop")
TERMINATE = _row("terminate", "session", OPERATE, f"POST {_SANDBOX}/terminate")
EMPTY = _row("empty", "session")

# commands
RUN_COMMAND = _row(
    "run_command",
    "shell",
    OPERATE,
    f"POST {_SANDBOX}/commands",
    decides="command",
    **_COMMAND,
)
START_COMMAND = _row(
    "start_command",
    "shell",
    OPERATE,
    f"POST {_SANDBOX}/commands/start",
    decides="command",
    event=_COMMAND_STARTED,
)
STREAM_COMMAND = _row("stream_command", None, OPERATE, f"POST {_SANDBOX}/commands/stream")
LIST_COMMANDS = _row("list_commands", "shell", READ, f"GET {_SANDBOX}/commands")
GET_COMMAND = _row("get_command", "shell", READ, f"GET {_ONE_COMMAND}")
COMMAND_RESULT = _row("command_result", "shell", READ, f"GET {_ONE_COMMAND}/result", id="get_command_result")
COMMAND_OUTPUT = _row("command_output", "shell", READ, f"GET {_ONE_COMMAND}/output", id="get_command_output")
SEND_INPUT = _row("send_input", "shell", OPERATE, f"POST {_ONE_COMMAND}/stdin")
SIGNAL_COMMAND = _row("signal_command", "shell", OPERATE, f"POST {_ONE_COMMAND}/signal")
RESIZE_TERMINAL = _row("resize_terminal", "shell", OPERATE, f"POST {_ONE_COMMAND}/resize")
ATTACH_COMMAND = _row("attach_command", None, OPERATE, f"WEBSOCKET {_SANDBOX}/commands/attached")
OPEN_TERMINAL = _row("open_terminal", None, OPERATE, f"WEBSOCKET {_SANDBOX}/terminals")
DELETE_COMMAND = _row("delete_command", "shell", OPERATE, f"DELETE {_ONE_COMMAND}")
EXECUTE = _row(
    "execute",
    "shell",
    OPERATE,
    f"POST {_SANDBOX}/execute",
    decides="command",
    **_COMMAND,
)
TOOL_REQUEST = _row("tool_request", None, OPERATE, f"POST {_SANDBOX}/tools")
MCP_REQUEST = _row(
    "mcp_request",
    "mcp",
    OPERATE,
    f"POST {_MCP}/request",
    decides="tool",
    **_TOOL,
)

# ports
_PORTS = f"{_SANDBOX}/ports"
LIST_PORTS = _row("list_ports", "session", READ, f"GET {_PORTS}")
SHARE_PORT = _row("share_port", "session", OPERATE, f"POST {_PORTS}", decides="port", event=EventKind.PORT_SHARED)
CLOSE_PORT = _row("close_port", "session", OPERATE, f"DELETE {_PORTS}/{{port}}", event=EventKind.PORT_CLOSED)
REACH_PORT = _row("reach_port", "session", OPERATE, f"ANY {_PORTS}/{{port}}/", decides="port")
# A visitor has a URL, which was decided when it was made. What policy denies by now is denied.
VISIT_PORT = _row("visit_port", "session", decides="port", asks=False)
FORWARD_PORT = _row("forward_port", "session", OPERATE, f"WEBSOCKET {_PORTS}/{{port}}", decides="port")

# files
READ_FILE = _row("read", "file", READ, f"GET {_FILES}/content", id="read_file", decides=READS)
WRITE_FILE = _row("write", "file", OPERATE, f"PUT {_FILES}/content", id="write_file", decides=WRITES, event=_WRITTEN)
WRITE_FILES = _row("write_files", None, OPERATE, f"POST {_FILES}/bundle")
READ_FILES = _row("read_files", None, READ, f"POST {_FILES}/read")
STAT_FILE = _forwarded(
    ForwardedOperation(
        "stat", "file", READ, f"GET {_FILES}/stat", "stat_file", decides=READS,
        supervisor="GET /files/stat", request=StatRequest, result=FileInfo, arguments=_only_path,
        summary="Describe a path",
        description="A symlink is described itself, not its target.",
    )
)  # fmt: skip
LIST_FILES = _forwarded(
    ForwardedOperation(
        "list", "file", READ, f"GET {_FILES}", "list_files", decides=READS,
        supervisor="GET /files/list", request=ListRequest, result=FileList, arguments=_only_path,
        largest_result=LIST, doubt=_too_many,
        summary="List a directory",
        description="Returns at most `limit` entries.",
    )
)  # fmt: skip
EDIT_FILE = _forwarded(
    ForwardedOperation(
        "edit", "file", OPERATE, f"POST {_FILES}/edit", "edit_file", decides=WRITES,
        supervisor="POST /files/edit", request=EditRequest, result=EditResult, arguments=_of_edit,
        content="new", fills_disk=True,
        event=_WRITTEN,
        summary="Replace text in a file",
        description="Without `replace_all`, the old text must occur exactly once.",
    )
)  # fmt: skip
MOVE_FILE = _forwarded(
    ForwardedOperation(
        "move", "file", OPERATE, f"POST {_FILES}/move", "move_file", decides=MOVES,
        supervisor="POST /files/move", request=MoveRequest, result=FileInfo, arguments=_of_move,
        paths=("source", "destination"),
        event=EventKind.FILE_MOVED,
        summary="Move or rename",
        description="Source and destination are inside the workspace.",
    )
)  # fmt: skip
MAKE_DIRECTORY = _forwarded(
    ForwardedOperation(
        "mkdir", "file", OPERATE, f"POST {_FILES}/mkdir", "make_directory", decides=WRITES,
        supervisor="POST /files/mkdir", request=MkdirRequest, result=FileInfo, arguments=_only_path,
        fills_disk=True,
        event=_WRITTEN,
        summary="Make a directory",
        description="Missing parents are made too.",
    )
)  # fmt: skip
DELETE_FILE = _forwarded(
    ForwardedOperation(
        "delete", "file", OPERATE, f"DELETE {_FILES}", "delete_file", decides=DELETES,
        supervisor="DELETE /files", request=DeleteRequest, result=Nothing, arguments=_of_delete,
        deadline=600.0,
        event=_DELETED,
        summary="Delete a file or a tree",
        description="A directory that is not empty needs `recursive`.",
    )
)  # fmt: skip
DELETE_MANY_FILES = _row("delete_many_files", "file", decides="deletions")

# filespaces
SYNC_FILESPACE = _row("sync_filespace", "session", OPERATE, f"POST {_SANDBOX}/sync")
LIST_FILESPACE = _row("filespace_list", "file", READ, f"GET {_FILESPACE}/files", id="list_filespace", decides=READS)
READ_FILESPACE = _row("filespace_read", "file", READ, f"GET {_FILESPACE}/content", id="read_filespace", decides=READS)
WRITE_FILESPACE = _row(
    "filespace_write",
    "file",
    OPERATE,
    f"PUT {_FILESPACE}/content",
    id="write_filespace",
    decides=WRITES,
    event=_WRITTEN,
)
DELETE_FILESPACE = _row(
    "filespace_delete",
    "file",
    OPERATE,
    f"DELETE {_FILESPACE}/content",
    id="delete_filespace",
    decides=DELETES,
    event=_DELETED,
)
FORGET_FILESPACE = _row(
    "filespace_forget",
    "file",
    OPERATE,
    f"DELETE {_FILESPACE}",
    id="forget_filespace",
    decides=DELETES_ALL,
    event=_DELETED,
)

# snapshots
LIST_SNAPSHOTS = _row("list_snapshots", "session", READ, f"GET {_SNAPSHOTS}")
TAKE_SNAPSHOT = _row("snapshot", "session", OPERATE, f"POST {_SNAPSHOTS}", id="take_snapshot")
DELETE_SNAPSHOT = _row("delete_snapshot", "session", OPERATE, f"DELETE {_SNAPSHOTS}/{{snapshot_id}}")
EXPORT = _row(
    "export", "file", READ, f"GET {_SNAPSHOTS}/{{snapshot_id}}/tar", id="download_snapshot", decides=READS_ALL
)
EXPORT_BY_ADMINISTRATOR = _row("export", "session")  # no policy of a context holds for an administrator
DIFF_SNAPSHOTS = _row("diff", "session", READ, f"GET {_SANDBOX}/diff", id="diff_snapshots")
RESTORE = _row("restore", "session", OPERATE, f"POST {_SANDBOX}/restore", event=EventKind.SNAPSHOT_RESTORED)
FORK = _row("fork", "session", OPERATE, f"POST {_SANDBOX}/fork")

# checkpoints of folders
_CHECKPOINTS = f"{_CONTEXT}/checkpoints"
LIST_CHECKPOINTS = _row("list_checkpoints", "session", READ, f"GET {_CHECKPOINTS}")
TAKE_CHECKPOINT = _row("checkpoint", "session", OPERATE, f"POST {_CHECKPOINTS}", id="take_checkpoint")
COMPARE_CHECKPOINTS = _row("compare_checkpoints", "session", READ, f"GET {_CHECKPOINTS}/{{checkpoint_id}}/changes")
PATCH_CHECKPOINTS = _row(
    "patch_checkpoints", "file", READ, f"GET {_CHECKPOINTS}/{{checkpoint_id}}/patch", decides=READS_ALL
)
PATCH_BY_ADMINISTRATOR = _row("patch_checkpoints", "session")  # no policy of a context holds for an administrator
# A person decides about the work of an agent, so the token of the agent is not enough.
UNDO_CHECKPOINT = _row("undo", "session", APPROVE, f"POST {_CHECKPOINTS}/{{checkpoint_id}}/undo", id="undo_checkpoint")

# approvals
LIST_APPROVALS = _row("list_approvals", None, READ, "GET /v1/approvals", context_from="listed")
GET_APPROVAL = _row("get_approval", None, READ, "GET /v1/approvals/{approval_id}", context_from="handler")
WATCH_APPROVALS = _row("watch_approvals", None, READ, "GET /v1/approvals/watch", context_from="listed")
DECIDE_APPROVAL = _row(
    "decide_approval", "session", APPROVE, "POST /v1/approvals/{approval_id}/decide", context_from="handler"
)
DECIDE_APPROVALS = _row("decide_approvals", None, APPROVE, "POST /v1/approvals/decide", context_from="listed")

# jobs
_JOB = "/v1/jobs/{job_id}"
# A submission is a wish. Its work is decided and recorded when it begins, with the identity of the submitter.
SUBMIT_JOB = _row("submit_job", None, OPERATE, "POST /v1/jobs", context_from="handler")
LIST_JOBS = _row("list_jobs", None, READ, "GET /v1/jobs", context_from="listed")
GET_JOB = _row("get_job", None, READ, f"GET {_JOB}", context_from="handler")
WAIT_JOB = _row("wait_job", None, READ, f"GET {_JOB}/wait", context_from="handler")
GET_JOB_LOGS = _row("get_job_logs", None, READ, f"GET {_JOB}/logs", context_from="handler")
LIST_JOB_ARTIFACTS = _row("list_job_artifacts", None, READ, f"GET {_JOB}/artifacts", context_from="handler")
CANCEL_JOB = _row("cancel_job", "session", OPERATE, f"POST {_JOB}/cancel", context_from="handler")
RETRY_JOB = _row("retry_job", None, OPERATE, f"POST {_JOB}/retry", context_from="handler")

# events
STREAM_EVENTS = _row("stream_events", None, READ, "GET /v1/events", context_from="listed")
STREAM_CONTEXT = _row("stream_context", None, READ, "GET /api/stream/{id}")
PUBLISH_LOG = _row("publish_log", None, LOG, "POST /v1/events", context_from="handler")

# tokens
CREATE_TOKEN = _row("create_token", "session", ADMINISTER, "POST /v1/tokens", context_from="handler", of_server=True)
LIST_TOKENS = _row("list_tokens", None, ADMINISTER, "GET /v1/tokens", context_from="handler")
GET_TOKEN = _row("get_token", None, ADMINISTER, "GET /v1/tokens/{token_id}", context_from="handler")
REVOKE_TOKEN = _row(
    "revoke_token", "session", ADMINISTER, "DELETE /v1/tokens/{token_id}", context_from="handler", of_server=True
)

# policies
GET_POLICY = _row("get_policy", None, READ, f"GET {_CONTEXT}/policy")
PUT_POLICY = _row("put_policy", "session", ADMINISTER, f"PUT {_CONTEXT}/policy")
DELETE_POLICY = _row("delete_policy", "session", ADMINISTER, f"DELETE {_CONTEXT}/policy")
EXPLAIN_POLICY = _row("explain_policy", None, READ, f"POST {_CONTEXT}/policy/explain")

# secrets
PUT_SECRET = _row("put_secret", "session", ADMINISTER, f"PUT {_CONTEXT}/secrets/{{name}}")
LIST_SECRETS = _row("list_secrets", None, ADMINISTER, f"GET {_CONTEXT}/secrets")
DELETE_SECRET = _row("delete_secret", "session", ADMINISTER, f"DELETE {_CONTEXT}/secrets/{{name}}")
COPY_SECRETS = _row("copy_secrets", "session")
PUT_TEMPLATE_SECRET = _row(
    "put_template_secret", "session", ADMINISTER, f"PUT {_TEMPLATE_SECRETS}/{{name}}", of_server=True
)
LIST_TEMPLATE_SECRETS = _row("list_template_secrets", None, ADMINISTER, f"GET {_TEMPLATE_SECRETS}")
DELETE_TEMPLATE_SECRET = _row(
    "delete_template_secret", "session", ADMINISTER, f"DELETE {_TEMPLATE_SECRETS}/{{name}}", of_server=True
)

# the audit log
SEARCH_AUDIT = _row("search_audit", None, READ, "GET /v1/audit", context_from="handler")
EXPORT_AUDIT = _row("export_audit", None, READ, "GET /v1/audit/export", context_from="handler")
GET_AUDIT_KEY = _row("get_audit_key", None, READ, "GET /v1/audit/key", context_from="listed")
PRUNE_AUDIT = _row("prune_audit", None, ADMINISTER, "POST /v1/audit/prune")
FORGET_CONTEXT = _row("forget_context", "session", ADMINISTER, f"DELETE {_CONTEXT}")

# the server
GET_HOST = _row("get_host", None, READ, "GET /v1/host", context_from="listed")
LIST_NODES = _row("list_nodes", None, READ, "GET /v1/nodes")
REVOKE_NODE = _row("revoke_node", "session", ADMINISTER, "POST /v1/nodes/{node}/revoke", of_server=True)
READMIT_NODE = _row("readmit_node", "session", ADMINISTER, "POST /v1/nodes/{node}/readmit", of_server=True)
GET_METRICS = _row("get_metrics", None, READ, "GET /metrics")
HEALTHZ = _row("healthz", None, READ, "GET /healthz", context_from="listed")
READYZ = _row("readyz", None, READ, "GET /readyz", context_from="listed")
LIST_TEMPLATES = _row("list_templates", None, READ, "GET /v1/templates", context_from="listed")
LIST_POOLS = _row("list_pools", None, READ, "GET /v1/pools", context_from="listed")
RESIZE_POOL = _row("resize_pool", "session", ADMINISTER, "PUT /v1/pools/{pool}", of_server=True)

# environments
LIST_ENVS = _row("list_envs", None, READ, "GET /v1/envs", context_from="listed")
GET_ENV = _row("get_env", None, READ, "GET /v1/envs/{env}", context_from="listed")
BUILD_ENV = _row("build_env", "shell", OPERATE, "POST /v1/envs", decides="command")
DELETE_ENV = _row("delete_env", "session", OPERATE, "DELETE /v1/envs/{env}", of_server=True)
ATTACH_ENV = _row("attach_env", "shell", OPERATE, f"POST {_SANDBOX}/envs", decides="command")
DETACH_ENV = _row("detach_env", "session", OPERATE, f"DELETE {_SANDBOX}/envs/{{env}}")
LIST_SANDBOX_ENVS = _row("list_sandbox_envs", None, READ, f"GET {_SANDBOX}/envs")

# images
LIST_IMAGES = _row("list_images", None, READ, "GET /v1/images", context_from="listed")
GET_IMAGE = _row("get_image", None, READ, "GET /v1/images/{image:path}", context_from="listed")
PULL_IMAGE = _row("pull_image", "session", OPERATE, "POST /v1/images", of_server=True)
# Whoever may import an image decides what its name means for everybody.
BUILD_IMAGE = _row("build_image", "session", ADMINISTER, "POST /v1/images/build", of_server=True)
# A push uses the server's credentials, and an image may hold what its maker shows to nobody else.
PUSH_IMAGE = _row("push_image", "session", ADMINISTER, "POST /v1/images/push", of_server=True)
EXPORT_IMAGE = _row("export_image", "session", ADMINISTER, "POST /v1/images/export", of_server=True)
IMPORT_IMAGE = _row("import_image", "session", ADMINISTER, "POST /v1/images/import", of_server=True)
DELETE_IMAGE = _row("delete_image", "session", ADMINISTER, "DELETE /v1/images/{image:path}", of_server=True)

# Python
EXECUTE_STATELESS = _row("execute_stateless", None, OPERATE, "POST /v1/execute")
EXECUTE_BUNDLE = _row("execute_bundle", None, OPERATE, "POST /v1/execute/bundle")
RUN_PYTHON = _row(
    "python_exec",
    "shell",
    OPERATE,
    f"POST {_SANDBOX}/python",
    id="run_python",
    decides="command",
    **_PYTHON,
)
START_PYTHON = _row(
    "start_python", "shell", OPERATE, f"POST {_SANDBOX}/python/start", decides="command", event=_PYTHON_STARTED
)
STREAM_PYTHON = _row("stream_python", None, OPERATE, f"POST {_SANDBOX}/python/stream")
RUN_CELL = _row(
    "run_cell",
    "shell",
    OPERATE,
    f"POST {_CELLS}/cells",
    decides="command",
    **_PYTHON,
)
STREAM_CELL = _row("stream_cell", None, OPERATE, f"POST {_CELLS}/cells/stream")
LIST_CODE_CONTEXTS = _row("list_code_contexts", "shell", READ, f"GET {_SANDBOX}/code-contexts")
GET_CODE_CONTEXT = _row("get_code_context", "shell", READ, f"GET {_CELLS}")
GET_CELL = _row("get_cell", "shell", READ, f"GET {_CELLS}/cells/{{cell}}")
CELL_OUTPUT = _row("cell_output", "shell", READ, f"GET {_CELLS}/cells/{{cell}}/output", id="get_cell_output")
INTERRUPT_CODE_CONTEXT = _row("interrupt_code_context", "shell", OPERATE, f"POST {_CELLS}/interrupt")
RESTART_CODE_CONTEXT = _row("restart_code_context", "shell", OPERATE, f"POST {_CELLS}/restart")
DELETE_CODE_CONTEXT = _row("delete_code_context", "shell", OPERATE, f"DELETE {_CELLS}")

# MCP servers
ADD_MCP_SERVER = _row("add_mcp_server", "shell", OPERATE, f"PUT {_MCP}", decides="command")
LIST_MCP_SERVERS = _row("list_mcp_servers", "session", READ, f"GET {_SANDBOX}/mcp-servers")
GET_MCP_SERVER = _row("get_mcp_server", "session", READ, f"GET {_MCP}")
GET_MCP_CATALOGUE = _row("get_mcp_catalogue", "session", READ, f"GET {_MCP}/catalogue")
GET_MCP_LOG = _row("get_mcp_log", "session", READ, f"GET {_MCP}/log")
REMOVE_MCP_SERVER = _row("remove_mcp_server", "session", OPERATE, f"DELETE {_MCP}")
ENABLE_MCP_SERVER = _row("enable_mcp_server", "session", OPERATE, f"POST {_MCP}/start", id="start_mcp_server")
START_MCP_SERVER = _row("start_mcp_server", "shell", decides="command", asks=False)  # asked when it was added
STOP_MCP_SERVER = _row("stop_mcp_server", "session", OPERATE, f"POST {_MCP}/stop")
REFRESH_MCP_SERVER = _row("refresh_mcp_server", "session", OPERATE, f"POST {_MCP}/refresh")
CONNECT_MCP_SERVER = _row("connect_mcp_server", None, OPERATE, f"POST {_MCP}/mcp")

# others
GET_IDENTITY = _row("get_identity", None, READ, "GET /v1/tokens/me", context_from="listed")
GET_DISK_USAGE = _row("get_disk_usage", None, READ, "GET /v1/disk")
CONNECT = _row("connect", "network", decides="host")

OPERATIONS: Mapping[str, Operation] = {row.id: row for row in TABLE if row.id}
"""The rows that have an API route, by its operation id."""
