"""The SDK: `Client` and `AsyncClient` with the same names. Talks to the API and knows nothing behind it."""

from carrel.client._async.client import AsyncClient
from carrel.client._async.commands import AsyncCommand, AsyncCommands, AsyncOutputStream
from carrel.client._async.files import AsyncFiles
from carrel.client._async.sandbox import AsyncSandbox
from carrel.client._async.terminal import AsyncTerminal
from carrel.client._sync.client import Client
from carrel.client._sync.commands import Command, Commands, OutputStream
from carrel.client._sync.files import Files
from carrel.client._sync.sandbox import Sandbox
from carrel.client._sync.terminal import Terminal
from carrel.client.listing import Listing
from carrel.client.locate import Address, data_dir, local_server, locate
from carrel.client.output import Chunk, Output

__all__ = [
    "Address",
    "AsyncClient",
    "AsyncCommand",
    "AsyncCommands",
    "AsyncFiles",
    "AsyncOutputStream",
    "AsyncSandbox",
    "AsyncTerminal",
    "Chunk",
    "Client",
    "Command",
    "Commands",
    "Files",
    "Listing",
    "Output",
    "OutputStream",
    "Sandbox",
    "Terminal",
    "data_dir",
    "local_server",
    "locate",
]
