"""Finds the server: from arguments, `CARREL_URL` and `CARREL_TOKEN`, then the files that a local server wrote.

Opens no connection.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from carrel.errors import InvalidRequest, ServerUnreachable
from carrel.primitives.file_lock import is_locked

START_HINT = "start one with `carrel serve`, or set CARREL_URL and CARREL_TOKEN"
LONGEST_TOKEN = 512
HERE = "-here"
"""Ends the name of the data directory of the server that `carrel here` starts where no other one runs."""


@dataclass(frozen=True)
class Address:
    """The URL of a server and a token for it. The token is left out of the printed form.

    `local_agent` is true for the token that the server on this machine wrote for agents.
    """

    url: str
    token: str | None = field(repr=False)
    local_agent: bool = False

    @property
    def loopback(self) -> bool:
        """Whether the server is on this machine; then no proxy is used."""
        return is_loopback(urlsplit(self.url).hostname or "")


def is_loopback(host: str) -> bool:
    """Return whether a host name or address reaches only this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def data_dir() -> Path:
    """Return the data directory of the local server."""
    if named := os.environ.get("CARREL_DATA_DIR"):
        return Path(named)
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "carrel"


def local_server(directory: Path | None = None, *, administrator: bool = False) -> Address | None:
    """Return the address that a server wrote to the data directory, or None.

    It has the token for agents, or with `administrator` the administrator's.
    """
    directory = directory or data_dir()
    try:
        found = json.loads((directory / "server.json").read_bytes())
    except (OSError, ValueError):
        return None
    url = found.get("url") if isinstance(found, dict) else None
    if not isinstance(url, str):
        return None
    token = _local_token(directory / ("token" if administrator else "agent-token"))
    return Address(_checked(url), token, local_agent=token is not None and not administrator)


def local_servers(*, administrator: bool = False) -> list[Address]:
    """Return the servers of this user on this machine: the usual one, and the one of `carrel here`.

    The address that a killed server has left is returned only if no server runs.
    """
    directories = (data_dir(), Path(f"{data_dir()}{HERE}"))
    found = {each: at for each in directories if (at := local_server(each, administrator=administrator))}
    running = [at for each, at in found.items() if len(found) > 1 and is_locked(str(each / "lock"))]
    return running or list(found.values())


def locate(url: str | None = None, token: str | None = None, *, administrator: bool = False) -> Address:
    """Return the server to use. Raises `ServerUnreachable` when none is named and none has run here.

    Without a token, given or in `CARREL_TOKEN`, the token that a server on this machine wrote for agents is used, or
    with `administrator` the administrator's.
    """
    if token and administrator:
        raise InvalidRequest(
            "give a token or administrator=True, not both", field="administrator", hint="leave one of them out"
        )
    url = url or os.environ.get("CARREL_URL") or None
    token = _usable(token or os.environ.get("CARREL_TOKEN") or "")
    local = local_servers(administrator=administrator)
    if url is None:
        if not local:
            raise _none_here(data_dir())
        return local[0] if token is None else Address(local[0].url, token)
    url = _checked(url)
    # The local tokens are only for the local server; another server must not receive them.
    same = [each for each in local if token is None and each.url == url]
    return same[0] if same else Address(url, token)


def _none_here(directory: Path) -> ServerUnreachable:
    try:
        (directory / "server.json").stat()
    except PermissionError:
        return ServerUnreachable(
            f"this user may not read {directory}, where the local server writes its address",
            hint="set CARREL_URL and CARREL_TOKEN; the operator of that server makes tokens with `carrel token create`",
        )
    except OSError:
        pass
    return ServerUnreachable(
        f"no carrel server runs here, and no `carrel here`: there is no address in {directory} or {directory}{HERE}",
        hint=START_HINT,
    )


def _local_token(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except (OSError, ValueError):
        return None


def sendable(token: str) -> bool:
    """Return whether a token has the form of a carrel token, so that it can be sent in a header."""
    return 0 < len(token) <= LONGEST_TOKEN and token.isascii() and token.isprintable() and " " not in token


def _usable(token: str) -> str | None:
    """Strip the line end of a token. The error does not show the token."""
    token = token.strip()
    if token and not sendable(token):
        raise InvalidRequest(
            "the token has characters that are not allowed in a token",
            field="token",
            hint="it is one line: `carrel_`, then letters, digits, - and _",
        )
    return token or None


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise InvalidRequest(
            f"'{url}' is not the URL of a server",
            field="url",
            hint="use for example http://127.0.0.1:7070",
        )
    return url.rstrip("/")
