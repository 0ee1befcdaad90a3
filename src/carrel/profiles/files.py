"""Reads the documents of `carrel here` from disk, and asks git outside of the sandbox. Blocking.

A folder is hostile: an agent may have written anything in it. Its files are read without following links and up to a
limit, and git never runs with the folder as its working directory.
"""

from __future__ import annotations

import base64
import os
import re
import stat
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from carrel.errors import FileMissing, InvalidRequest
from carrel.profiles.documents import (
    Profile,
    ProjectConfig,
    UserConfig,
    UserDocument,
    read_project_settings,
    read_toml,
)
from carrel.profiles.resolve import AgentSetup, GitLogin, GitRemote, Project, resolve

DEFAULT = "default"
"""The profile whose lists are part of every other one. Alone it is for programs without a profile."""
CREDENTIAL_S = 30.0
"""How long a credential helper may take; it may ask the user something in a window."""
_MOST_BYTES = 1024 * 1024
_MOST_REMOTES = 32
_FOLDER = os.path.dirname(__file__)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_PATH = re.compile(r"/[A-Za-z0-9._~/+-]+")


def prepare(
    command: Sequence[str],
    folder: str | None,
    *,
    profile: str | None = None,
    options: UserConfig | None = None,
    environ: Mapping[str, str],
    home: str,
) -> AgentSetup:
    """Read all documents for a command in a folder and return its setup. Without `profile`, the program chooses it;
    without `folder`, the workspace is not one of this machine and has no documents.

    Raises `InvalidRequest` for documents that are not valid, `FileMissing` for an unknown profile.
    """
    directory = config_dir(environ, home)
    if profile is None:
        name, found = find_profile(command[0] if command else "", directory)
    else:
        name, found = profile, read_profile(profile, directory)
    default = read_profile(DEFAULT, directory)
    return resolve(
        name,
        command,
        default=default,
        profile=found if name != DEFAULT else Profile(description=default.description),
        user=read_user(directory),
        options=options or UserConfig(),
        project=Project() if folder is None else read_project(folder),
        environ=environ,
        home=home,
        identity=read_identity(),
    )


def config_dir(environ: Mapping[str, str], home: str) -> str:
    """Return the directory of the user's configuration."""
    given = environ.get("XDG_CONFIG_HOME", "")
    return os.path.join(given if given.startswith("/") else os.path.join(home, ".config"), "carrel")


def read_user(directory: str) -> UserDocument:
    """Read `here.toml` of the user; an empty one if there is none."""
    path = os.path.join(directory, "here.toml")
    try:
        with open(path, "rb") as file:
            return read_toml(file.read(_MOST_BYTES + 1), UserDocument, path)
    except FileNotFoundError:
        return UserDocument()


def names(directory: str) -> dict[str, str]:
    """Return the profiles by name, with their files: those of carrel, and those in `profiles/` of the directory, which
    replace them.
    """
    found: dict[str, str] = {}
    for folder in (_FOLDER, os.path.join(directory, "profiles")):
        with suppress(FileNotFoundError, NotADirectoryError):
            for file in sorted(os.listdir(folder)):
                if file.endswith(".toml") and _NAME.fullmatch(file[:-5]):
                    found[file[:-5]] = os.path.join(folder, file)
    return found


def read_profile(name: str, directory: str) -> Profile:
    """Read a profile. Raises `FileMissing` for an unknown name."""
    known = names(directory)
    if name not in known:
        raise FileMissing(
            f"there is no profile '{name[:100]}'",
            field="profile",
            hint=f"choose one of: {', '.join(sorted(known))}; or write {os.path.join(directory, 'profiles')}/NAME.toml",
        )
    with open(known[name], "rb") as file:
        return read_toml(file.read(_MOST_BYTES + 1), Profile, known[name])


def find_profile(program: str, directory: str) -> tuple[str, Profile]:
    """Return the profile for a program, by its name; the default one if there is none."""
    base = os.path.basename(program)
    known = names(directory)
    for name in sorted(known, key=lambda each: (each != base, each)):
        profile = read_profile(name, directory)
        if base in profile.programs:
            return name, profile
    return DEFAULT, read_profile(DEFAULT, directory)


def read_project(folder: str) -> Project:
    """Read what a folder says about itself. Raises `InvalidRequest` for documents that are not valid."""
    config = settings = None
    text = _read(folder, ".carrel/here.toml")
    if text is not None:
        config = read_toml(text, ProjectConfig, ".carrel/here.toml")
    for name in (".carrel/settings.json", "settings.json"):
        text = _read(folder, name)
        if settings is None and text is not None:
            try:
                settings = read_project_settings(text, name)
            except InvalidRequest:
                if name.startswith("."):
                    raise  # another program's settings.json need not be JSON
    with suppress(OSError):
        mode = os.lstat(os.path.join(folder, ".git")).st_mode
        return Project(config, settings, read_remotes(folder), not stat.S_ISDIR(mode))
    return Project(config, settings)


def _read(folder: str, path: str) -> bytes | None:
    """Read a small regular file of the folder without following links; None if there is none."""
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        *above, name = path.split("/")
        for each in above:
            inner = os.open(each, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = inner
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be read: {error.strerror}", field=path, hint="make it a regular file, or remove it"
        ) from None
    finally:
        os.close(directory)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise InvalidRequest(f"{path} is not a regular file", field=path, hint="remove it")
    with os.fdopen(file, "rb") as opened:
        data = opened.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise InvalidRequest(f"{path} is larger than {_MOST_BYTES} bytes", field=path, hint="shorten it")
    return data


# --- git outside


def read_remotes(folder: str) -> tuple[GitRemote, ...]:
    """Return the remotes of the folder's repository that can be reached by https."""
    found: dict[tuple[str, str], GitRemote] = {}
    said = _git("config", "--file", _git_config_file(folder), "--no-includes", "--get-regexp", r"^remote\..*\.url$")
    for line in said.splitlines()[:_MOST_REMOTES]:
        remote = read_remote(line.partition(" ")[2])
        if remote is not None:
            found.setdefault((remote.host, remote.path), remote)
    return tuple(found.values())


def read_remote(url: str) -> GitRemote | None:
    """Return the https remote that a URL means; None for one that https cannot reach."""
    ssh: tuple[str, ...] = ()
    short = re.fullmatch(r"([A-Za-z0-9_.-]+)@([A-Za-z0-9.-]+):(?!/)(.+)", url)
    try:
        parts = urlsplit(f"ssh://{short[1]}@{short[2]}/{short[3]}" if short else url)
        host, port, path = (parts.hostname or ""), parts.port, parts.path.rstrip("/")
    except ValueError:
        return None
    if parts.scheme == "ssh":
        user = f"{parts.username}@" if parts.username else ""
        ssh = (f"{user}{host}:", f"ssh://{user}{host}/")
    elif parts.scheme != "https":
        return None
    odd = re.search(r"//|/\.{1,2}(/|$)", path)
    if port is not None or odd or not _HOST.fullmatch(host) or "." not in host or not _PATH.fullmatch(path):
        return None
    return GitRemote(host, path, ssh)


def read_identity() -> dict[str, str]:
    """Return the name and the address that the user commits with."""
    return {key: value for key in ("name", "email") if (value := _git("config", "--global", f"user.{key}").strip())}


def ask_credential_helper(login: GitLogin) -> str | None:
    """Ask the user's git for the credential of a remote, and return it as HTTP writes it; None if git has none.

    Runs as the user, outside of every folder, so that only the user's own helpers are asked.
    """
    request = f"protocol=https\nhost={login.host}\npath={login.path.lstrip('/')}\n\n"
    said = _git("credential", "fill", stdin=request, timeout_s=CREDENTIAL_S)
    given = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    if not given.get("password"):
        return None
    return base64.b64encode(f"{given.get('username', '')}:{given['password']}".encode()).decode()


def _git_config_file(folder: str) -> str:
    """Return the configuration of the folder's repository, also of a worktree or a submodule."""
    place = os.path.join(folder, ".git")
    with suppress(InvalidRequest, OSError, UnicodeDecodeError):
        text = (_read(folder, ".git") or b"").decode()
        if text.startswith("gitdir: "):
            place = os.path.join(folder, text[8:].rstrip("\n"))
            common = (_read(place, "commondir") or b"").decode().strip()
            place = os.path.join(place, common) if common else place
    return os.path.join(place, "config")


def _git(*arguments: str, stdin: str = "", timeout_s: float = 5.0) -> str:
    """Run git outside of every repository; an empty text if it fails or there is none."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env = {**kept, "GIT_TERMINAL_PROMPT": "0", "GIT_CEILING_DIRECTORIES": "/", "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            ["git", *arguments],
            input=stdin.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd="/", env=env, timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""
