"""carrel: a private, durable, governed workspace for every AI agent.

The public names. Each is imported at its first use.
"""

from __future__ import annotations

# Importing `typing` would cost more than the rest of this import; type checkers treat this name as true.
TYPE_CHECKING = False

__version__ = "0.1.0"

if TYPE_CHECKING:
    from carrel.client import (
        AsyncClient,
        AsyncCommand,
        AsyncSandbox,
        AsyncTerminal,
        Chunk,
        Client,
        Command,
        Output,
        Sandbox,
        Terminal,
    )
    from carrel.errors import (
        AlreadyExists,
        ApprovalNeeded,
        ArchiveUnavailable,
        CarrelError,
        CommandFailed,
        Conflict,
        DatabaseUnavailable,
        Denied,
        EditMismatch,
        FileMissing,
        ImageRefused,
        InvalidPath,
        InvalidRequest,
        LimitExceeded,
        McpServerFailed,
        NodeUnreachable,
        NotFound,
        NotRunning,
        PlatformError,
        ProviderUnavailable,
        RegistryFailed,
        SandboxLost,
        ServerUnreachable,
        SnapshotDamaged,
        ThreadBusy,
        TooLarge,
        Unauthorized,
        UnknownSetting,
        Unsupported,
    )
    from carrel.models import (
        ApprovalInfo,
        CommandInfo,
        CommandResult,
        FileInfo,
        FileKind,
        HostPath,
        HostReport,
        Limits,
        Network,
        NodeInfo,
        SandboxInfo,
        SnapshotInfo,
        State,
        Trust,
    )

__all__ = [
    "AlreadyExists",
    "ApprovalInfo",
    "ApprovalNeeded",
    "ArchiveUnavailable",
    "AsyncClient",
    "AsyncCommand",
    "AsyncSandbox",
    "AsyncTerminal",
    "CarrelError",
    "Chunk",
    "Client",
    "Command",
    "CommandFailed",
    "CommandInfo",
    "CommandResult",
    "Conflict",
    "DatabaseUnavailable",
    "Denied",
    "EditMismatch",
    "FileInfo",
    "FileKind",
    "FileMissing",
    "HostPath",
    "HostReport",
    "ImageRefused",
    "InvalidPath",
    "InvalidRequest",
    "LimitExceeded",
    "Limits",
    "McpServerFailed",
    "Network",
    "NodeInfo",
    "NodeUnreachable",
    "NotFound",
    "NotRunning",
    "Output",
    "PlatformError",
    "ProviderUnavailable",
    "RegistryFailed",
    "Sandbox",
    "SandboxInfo",
    "SandboxLost",
    "ServerUnreachable",
    "SnapshotDamaged",
    "SnapshotInfo",
    "State",
    "Terminal",
    "ThreadBusy",
    "TooLarge",
    "Trust",
    "Unauthorized",
    "UnknownSetting",
    "Unsupported",
    "__version__",
]

_CLIENT = frozenset(
    {"AsyncClient", "AsyncCommand", "AsyncSandbox", "AsyncTerminal", "Chunk"}
    | {"Client", "Command", "Output", "Sandbox", "Terminal"}
)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'carrel' has no attribute '{name}'")
    from importlib import import_module

    home = import_module("carrel.client" if name in _CLIENT else "carrel.errors")
    value: object = getattr(home if hasattr(home, name) else import_module("carrel.models"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
