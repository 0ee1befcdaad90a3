"""Credentials of registries, from the configuration file of Docker: its own entries and its credential helpers."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from typing import Any, NamedTuple

from carrel.errors import RegistryFailed

_LARGEST = 1 << 20
_HELPER_S = 30.0
_HELPER = re.compile(r"[A-Za-z0-9._-]{1,100}")
_DOCKER_HUB = "https://index.docker.io/v1/"
_IDENTITY = "<token>"


class RegistryLogin(NamedTuple):
    """A user with a password, or an identity token that is exchanged for others (`user` is then empty)."""

    user: str
    secret: str


def docker_config_path() -> str:
    """Return where Docker keeps its configuration."""
    folder = os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")
    return os.path.join(folder, "config.json")


def find_login(path: str, registry: str) -> RegistryLogin | None:
    """Return the login for a registry, or None. Starts a credential helper if the file names one. Blocking."""
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read(_LARGEST))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise RegistryFailed(
            f"the Docker configuration {path} cannot be read: {type(error).__name__}",
            hint="correct the file, or name another one in images.docker_config",
        ) from None
    keys = [_DOCKER_HUB, registry] if registry == "docker.io" else [registry, f"https://{registry}"]
    helpers = _table(document, "credHelpers")
    for key in keys:
        helper = helpers.get(key) or _get(document, "credsStore")
        if isinstance(helper, str) and helper and (found := _from_helper(helper, key)) is not None:
            return found
    for name, entry in _table(document, "auths").items():
        if name in keys or _host(name) == registry:
            return _from_entry(entry)
    return None


def _get(document: Any, key: str) -> Any:
    return document.get(key) if isinstance(document, dict) else None


def _table(document: Any, key: str) -> dict[str, Any]:
    found = _get(document, key)
    return found if isinstance(found, dict) else {}


def _host(name: str) -> str:
    return name.partition("://")[2].partition("/")[0] if "://" in name else name.partition("/")[0]


def _from_entry(entry: Any) -> RegistryLogin | None:
    identity = _get(entry, "identitytoken")
    if isinstance(identity, str) and identity:
        return RegistryLogin("", identity)
    user, secret, both = (_get(entry, key) for key in ("username", "password", "auth"))
    if isinstance(both, str) and both:
        try:
            user, _, secret = base64.b64decode(both).decode().partition(":")
        except ValueError:
            return None
    if isinstance(user, str) and isinstance(secret, str) and user:
        return RegistryLogin(user, secret.rstrip("\0"))
    return None


def _from_helper(helper: str, key: str) -> RegistryLogin | None:
    if not _HELPER.fullmatch(helper):
        raise RegistryFailed(f"the Docker configuration names the invalid credential helper {helper[:100]!r}")
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run([program, "get"], input=key.encode(), capture_output=True, check=False, timeout=_HELPER_S)
        if done.returncode != 0:  # that is how helpers say that they have none
            return None
        answer = json.loads(done.stdout[:_LARGEST])
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise RegistryFailed(
            f"the credential helper {program} failed: {type(error).__name__}",
            hint="install it, or remove it from the Docker configuration",
        ) from None
    user, secret = _get(answer, "Username"), _get(answer, "Secret")
    if not isinstance(user, str) or not isinstance(secret, str):
        return None
    return RegistryLogin("" if user == _IDENTITY else user, secret)
