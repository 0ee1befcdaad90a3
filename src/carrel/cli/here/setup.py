"""What a program on a folder may reach: reads the profiles and configurations, and keeps the result for the next start.

Reading them imports large packages and asks git, which takes longer than `carrel here` may take. So the result is kept
until a file or a variable that it came from has changed. Keys are never kept: they are read from the variables again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import carrel
from carrel.cli.here.server import client_directory
from carrel.cli.here.words import HereOptions

_FORMAT = 1
_MOST_FILES = 1000


class HereSetup(NamedTuple):
    """What the server and the program are told, as plain values."""

    command: list[str]
    network: str
    settings: dict[str, Any]
    sources: dict[str, Any]
    env: dict[str, str]
    secrets: dict[str, str]
    git_logins: list[list[str]]
    """Secret, host and path of each remote whose credential git is asked for, outside."""
    shown: list[list[Any]]
    """Source, place inside, and whether it may be missing, of each file to show."""
    home_texts: dict[str, str]
    notes: list[str]


class _SeenVariables(Mapping[str, str]):
    """The variables of this process, and which of them were looked at."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.seen.add(name)
        return os.environ[name]

    def __iter__(self) -> Iterator[str]:
        return iter(os.environ)

    def __len__(self) -> int:
        return len(os.environ)


def setup_for(options: HereOptions, folder: str, command: list[str], context: str) -> HereSetup:
    """Return the setup for a program on a folder. Raises `InvalidRequest` for documents that are not valid."""
    place = os.path.join(client_directory(), "setups", context)
    about = _about(options, folder, command)
    kept = _kept(place, about)
    if kept is not None:
        return kept
    from carrel.policy.documents.documents import build
    from carrel.profiles.documents import UserConfig
    from carrel.profiles.files import prepare

    environ = _SeenVariables()
    given = {"allow_hosts": [*options.allow_hosts], "unprotect": [*options.unprotect]}
    more = build(given, UserConfig, "the options")
    home = os.path.expanduser("~")
    found = prepare(command, folder, profile=options.profile, options=more, environ=environ, home=home)
    setup = HereSetup(
        command=[*found.command],
        network=found.network,
        settings=found.settings,
        sources=found.sources,
        env=found.env,
        secrets=found.secrets,
        git_logins=[[each.secret, each.host, each.path] for each in found.git_logins],
        shown=[[each.source, each.target, each.optional] for each in found.shared_files],
        home_texts=found.home_texts,
        notes=[*found.notes],
    )
    _keep(place, about, setup, environ.seen)
    return setup


def _kept(place: str, about: str) -> HereSetup | None:
    """Return the setup that was kept, if everything it came from is as it was."""
    try:
        with open(place, "rb") as file:
            stored = json.load(file)
        if stored["about"] != about or stored["variables"] != _variables(stored["variables"]):
            return None
        setup = HereSetup(**stored["setup"])
        return setup._replace(secrets={name: os.environ[name].strip() for name in setup.secrets})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(place: str, about: str, setup: HereSetup, variables: set[str]) -> None:
    from carrel.primitives.atomic import write_file

    without_keys = setup._replace(secrets=dict.fromkeys(setup.secrets, ""))._asdict()
    stored = {"about": about, "variables": _variables(variables), "setup": without_keys}
    os.makedirs(os.path.dirname(place), 0o700, exist_ok=True)
    write_file(place, json.dumps(stored).encode())


def _variables(names: set[str] | Mapping[str, object]) -> dict[str, str | None]:
    """Return a hash of the value of each variable: keys must not be on disk."""
    found = {name: os.environ.get(name) for name in sorted(names)}
    return {name: value and hashlib.sha256(os.fsencode(value)).hexdigest() for name, value in found.items()}


def _state(path: str) -> list[int] | None:
    """Return what changes when a file changes."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    if os.path.isdir(path):
        return [status.st_ino]
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)[:_MOST_FILES]
    except OSError:
        return []


def _about(options: HereOptions, folder: str, command: list[str]) -> str:
    """Return a hash of everything that a setup comes from, but for the variables."""
    home = os.path.expanduser("~")
    configuration = os.environ.get("XDG_CONFIG_HOME") or os.path.join(home, ".config")
    git = os.path.join(folder, ".git")
    directories = [
        os.path.join(os.path.dirname(carrel.__file__), "profiles"),
        os.path.join(configuration, "carrel", "profiles"),
    ]
    files = [
        os.path.join(configuration, "carrel", "here.toml"),
        os.path.join(configuration, "git", "config"),
        os.path.join(home, ".gitconfig"),
        "/etc/gitconfig",
        git,
        os.path.join(git, "config"),
        os.path.join(folder, ".carrel", "here.toml"),
        os.path.join(folder, ".carrel", "settings.json"),
        os.path.join(folder, "settings.json"),
    ]
    for directory in directories:
        files += sorted(os.path.join(directory, name) for name in _listed(directory) if name.endswith(".toml"))
    asked: tuple[object, ...] = (options.profile, options.allow_hosts, options.unprotect)
    if os.path.isfile(git):  # a worktree or submodule: its configuration is elsewhere, so nothing is kept
        asked = (*asked, os.urandom(16).hex())
    facts = [_FORMAT, carrel.__version__, folder, home, command, asked, [_state(file) for file in files]]
    return hashlib.sha256(json.dumps(facts).encode(errors="surrogateescape")).hexdigest()
