"""The Python SDK: `Client` and `AsyncClient`, with the same methods. It uses only the public HTTP API.

Each name is imported when first used, so a program that needs one client does not load the other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from carrel.client.locate import Address, data_dir, local_server, locate

if TYPE_CHECKING:
    from carrel.client._async.approvals import AsyncApprovals
    from carrel.client._async.audit import AsyncAudit
    from carrel.client._async.checkpoints import AsyncFolderCheckpoints
    from carrel.client._async.client import AsyncClient
    from carrel.client._async.commands import AsyncCommand, AsyncCommands, AsyncOutputStream
    from carrel.client._async.envs import AsyncEnvironments, AsyncSandboxEnvironments
    from carrel.client._async.files import AsyncFiles
    from carrel.client._async.filespace import AsyncFilespace
    from carrel.client._async.images import AsyncImages
    from carrel.client._async.jobs import AsyncJob, AsyncJobs
    from carrel.client._async.mcp import AsyncMcp
    from carrel.client._async.policies import AsyncPolicy
    from carrel.client._async.port_tunnel import AsyncPortTunnel
    from carrel.client._async.ports import AsyncPorts
    from carrel.client._async.python import AsyncCellStream, AsyncCodeContext, AsyncPython
    from carrel.client._async.sandbox import AsyncSandbox
    from carrel.client._async.secrets import AsyncSecrets
    from carrel.client._async.stateless import AsyncStatelessPython
    from carrel.client._async.terminal import AsyncTerminal
    from carrel.client._async.tokens import AsyncTokens
    from carrel.client._sync.approvals import Approvals
    from carrel.client._sync.audit import Audit
    from carrel.client._sync.checkpoints import FolderCheckpoints
    from carrel.client._sync.client import Client
    from carrel.client._sync.commands import Command, Commands, OutputStream
    from carrel.client._sync.envs import Environments, SandboxEnvironments
    from carrel.client._sync.files import Files
    from carrel.client._sync.filespace import Filespace
    from carrel.client._sync.images import Images
    from carrel.client._sync.jobs import Job, Jobs
    from carrel.client._sync.mcp import Mcp
    from carrel.client._sync.policies import Policy
    from carrel.client._sync.port_tunnel import PortTunnel
    from carrel.client._sync.ports import Ports
    from carrel.client._sync.python import CellStream, CodeContext, Python
    from carrel.client._sync.sandbox import Sandbox
    from carrel.client._sync.secrets import Secrets
    from carrel.client._sync.stateless import StatelessPython
    from carrel.client._sync.terminal import Terminal
    from carrel.client._sync.tokens import Tokens
    from carrel.client.listing import Listing
    from carrel.client.output import Chunk, Output

__all__ = [
    "Address",
    "Approvals",
    "AsyncApprovals",
    "AsyncAudit",
    "AsyncCellStream",
    "AsyncClient",
    "AsyncCodeContext",
    "AsyncCommand",
    "AsyncCommands",
    "AsyncEnvironments",
    "AsyncFiles",
    "AsyncFilespace",
    "AsyncFolderCheckpoints",
    "AsyncImages",
    "AsyncJob",
    "AsyncJobs",
    "AsyncMcp",
    "AsyncOutputStream",
    "AsyncPolicy",
    "AsyncPortTunnel",
    "AsyncPorts",
    "AsyncPython",
    "AsyncSandbox",
    "AsyncSandboxEnvironments",
    "AsyncSecrets",
    "AsyncStatelessPython",
    "AsyncTerminal",
    "AsyncTokens",
    "Audit",
    "CellStream",
    "Chunk",
    "Client",
    "CodeContext",
    "Command",
    "Commands",
    "Environments",
    "Files",
    "Filespace",
    "FolderCheckpoints",
    "Images",
    "Job",
    "Jobs",
    "Listing",
    "Mcp",
    "Output",
    "OutputStream",
    "Policy",
    "PortTunnel",
    "Ports",
    "Python",
    "Sandbox",
    "SandboxEnvironments",
    "Secrets",
    "StatelessPython",
    "Terminal",
    "Tokens",
    "data_dir",
    "local_server",
    "locate",
]

_MODULES = {
    "approvals": "Approvals", "audit": "Audit", "checkpoints": "FolderCheckpoints", "client": "Client",
    "commands": "Command Commands OutputStream", "envs": "Environments SandboxEnvironments", "files": "Files",
    "filespace": "Filespace", "images": "Images", "jobs": "Job Jobs", "mcp": "Mcp", "policies": "Policy",
    "port_tunnel": "PortTunnel", "ports": "Ports",
    "python": "CellStream CodeContext Python",
    "sandbox": "Sandbox", "secrets": "Secrets", "stateless": "StatelessPython", "terminal": "Terminal",
    "tokens": "Tokens",
}  # fmt: skip
_MODULE_OF = {"Chunk": "output", "Listing": "listing", "Output": "output"}
for _module, _names in _MODULES.items():
    for _name in _names.split():
        _MODULE_OF |= {_name: f"_sync.{_module}", f"Async{_name}": f"_async.{_module}"}


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'carrel.client' has no attribute '{name}'")
    value: object = getattr(import_module(f"carrel.client.{module}"), name)
    globals()[name] = value
    return value
