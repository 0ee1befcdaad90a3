"""MCP servers that the operator runs elsewhere, for every context: named in a file, reached over streamable HTTP.

No caller can add or change one. Each call has its own session, so that nothing of one context is left for another.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, TypeAdapter, ValidationError

from carrel.control.mcp.links import failed, import_session_module, known_failure
from carrel.errors import InvalidRequest, NotFound
from carrel.models import McpServerName

if TYPE_CHECKING:
    from carrel.control.mcp.session import Speaker

FIELD = "mcp.platform_file"
CONNECT_S = 10.0
MOST_EVENT = 4 * 1024 * 1024
_HINT = '[{"name": "search", "url": "https://host/mcp", "headers": {"Authorization": {"env": "SEARCH_TOKEN"}}}]'
_Header = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,64}$")]


class _Elsewhere(BaseModel):
    """A header value that is kept elsewhere: in an environment variable of carrel, or in a file."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    env: str | None = Field(default=None, min_length=1, max_length=256)
    file: str | None = Field(default=None, min_length=1, max_length=4096)

    def read(self) -> str:
        """Return the value. Blocking."""
        if (self.env is None) == (self.file is None):
            raise InvalidRequest("a header value needs exactly one of `env` and `file`", field=FIELD, hint=_HINT)
        if self.env is not None:
            value = os.environ.get(self.env)
            if value is None:
                raise InvalidRequest(f"the variable {self.env} is not set", field=FIELD)
            return value
        try:
            with open(str(self.file), encoding="utf-8") as file:
                return file.read().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{self.file} cannot be read: {type(error).__name__}", field=FIELD) from None


class _Setting(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True)

    name: McpServerName
    url: str = Field(pattern=r"^https?://\S+$", max_length=2048)
    headers: dict[_Header, SecretStr | _Elsewhere] = Field(default_factory=dict, max_length=32)


class PlatformServer:
    """One server of the operator. Its headers may hold credentials: they are never shown."""

    def __init__(self, name: str, url: str, headers: Mapping[str, str]):
        self.name = name
        self._url = url
        self._headers = dict(headers)

    @asynccontextmanager
    async def spoken(self, deadline_s: float) -> AsyncIterator[Speaker]:
        """Open a session for one request; `McpServerFailed` when the server cannot be reached."""
        await import_session_module()
        import httpx2
        from mcp import ClientSession
        from mcp.client.streamable_http import streamable_http_client

        from carrel.control.mcp.session import CLIENT, Speaker

        speaker = Speaker(self.name)
        timeout = httpx2.Timeout(CONNECT_S, read=deadline_s + CONNECT_S)
        try:
            async with (
                httpx2.AsyncClient(headers=self._headers, timeout=timeout) as http,
                streamable_http_client(self._url, http_client=http, max_sse_event_size=MOST_EVENT) as (read, write),
                ClientSession(read, write, client_info=CLIENT) as session,
            ):
                async with asyncio.timeout(deadline_s):
                    await speaker.introduce(session)
                yield speaker
        except TimeoutError:
            raise failed(self.name, f"did not introduce itself within {deadline_s:g} seconds") from None
        except BaseExceptionGroup as group:
            inner = known_failure(group)
            if inner is not None:
                raise inner from None
            raise failed(self.name, "cannot be reached", "the operator's log may say more") from None
        except (httpx2.HTTPError, OSError):
            raise failed(self.name, "cannot be reached", "the operator's log may say more") from None


class PlatformServers:
    """Every server of the operator, by name."""

    def __init__(self, servers: Sequence[PlatformServer] = ()):
        self._servers = {each.name: each for each in servers}

    def __contains__(self, name: str) -> bool:
        return name in self._servers

    def names(self) -> list[str]:
        """Return their names, sorted."""
        return sorted(self._servers)

    def get(self, name: str) -> PlatformServer:
        """Return one of them; `NotFound`."""
        found = self._servers.get(name)
        if found is None:
            raise NotFound(f"there is no MCP server '{name[:64]}'", field="server")
        return found


def read_platform(path: str | None) -> PlatformServers:
    """Read the servers from a file; `InvalidRequest` when it cannot be read. Blocking."""
    if path is None:
        return PlatformServers()
    try:
        with open(path, "rb") as file:
            found = TypeAdapter(list[_Setting]).validate_json(file.read())
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field=FIELD) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{path}: {place}: {first['msg']}", field=FIELD, hint=f"write {_HINT}") from None
    if len({each.name for each in found}) < len(found):
        raise InvalidRequest(f"{path} has a name twice", field=FIELD)
    return PlatformServers([PlatformServer(each.name, each.url, _headers(each)) for each in found])


def _headers(setting: _Setting) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, given in setting.headers.items():
        value = given.get_secret_value() if isinstance(given, SecretStr) else given.read()
        if not value.isascii() or not value.isprintable():
            raise InvalidRequest(f"the value of {name} cannot be a header", field=FIELD, hint="use printable ASCII")
        found[name] = value
    return found
