"""Combines a profile, the configuration of the user and that of a project into what a sandbox for an agent needs.

Pure: no I/O. The project can only take away: without its documents the result is never stricter.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from carrel.errors import InvalidRequest
from carrel.policy.documents.settings import SettingsDocument
from carrel.profiles.documents import (
    AgentKey,
    Choice,
    Profile,
    ProjectConfig,
    PublishRule,
    UserConfig,
    UserDocument,
    check_host,
    split_host,
)

HOME = "/home/agent"
"""The home directory inside."""
WORKSPACE = "/workspace"
PROFILE_FILES = "profile"
"""The word in `home_files` that means the files that the profile names."""
DELETE_LIMIT = 200
"""Files that a run may delete before a person is asked, if no document says another number."""
_PORTS = (None, 80, 443)
"""The open ports of an allowed host without a port."""
_NETWORK_RULE = re.compile(r"\s*network\s*\(\s*outbound\s*:(.*)\)\s*")
_STRICTNESS: dict[Choice, int] = {"allow": 0, "ask": 1, "deny": 2}


@dataclass(frozen=True, slots=True)
class GitRemote:
    """An https remote of the folder. `ssh` are the beginnings of URLs that are rewritten to it."""

    host: str
    path: str
    ssh: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Project:
    """What is known of a folder: its documents, and its git repository."""

    config: ProjectConfig | None = None
    settings: SettingsDocument | None = None
    remotes: tuple[GitRemote, ...] = ()
    git_is_file: bool = False
    """Whether `.git` is a file that names another directory, as in a worktree or a submodule."""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file or directory of the host that is shown inside, read-only. One that is `optional` may be missing."""

    source: str
    target: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class GitLogin:
    """A host whose git credential is asked for outside and stored as the secret of this name."""

    secret: str
    host: str
    path: str


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """Everything that starts an agent in a sandbox."""

    profile: str
    command: tuple[str, ...]
    network: Literal["allowlist", "none"]
    settings: dict[str, object]
    sources: dict[str, object]
    env: dict[str, str]
    """Variables of the program. Keys are placeholders."""
    secrets: dict[str, str] = field(repr=False)
    """Secrets of the context, by name. The egress proxy puts them into requests; inside are placeholders."""
    git_logins: tuple[GitLogin, ...]
    """Secrets that `files.ask_credential_helper` can give. They may be put after the start."""
    shared_files: tuple[SharedFile, ...]
    home_texts: dict[str, str]
    """Small files to show in the home directory, read-only: path in it, and text."""
    notes: tuple[str, ...]
    """Sentences for the person: keys that are missing, wishes of the project that were not followed."""


def resolve(
    name: str,
    command: Sequence[str],
    *,
    default: Profile,
    profile: Profile,
    user: UserDocument,
    options: UserConfig,
    project: Project,
    environ: Mapping[str, str],
    home: str,
    identity: Mapping[str, str],
) -> AgentSetup:
    """Return the setup of an agent.

    `name` is the name of the profile, `options` what the command line adds, `environ` and `home` belong to the user,
    `identity` are the git settings `user.name` and `user.email`. Raises `InvalidRequest`.
    """
    chosen = _merge((user, user.profiles.get(name, UserConfig()), options))
    tightened = project.config or ProjectConfig()
    notes: list[str] = []
    hosts = [*profile.hosts, *chosen.allow_hosts, *chosen.registries]
    rules, ruled_hosts = _split_rules(chosen.allow)
    hosts += ruled_hosts
    env = {**profile.env, **chosen.env}
    secrets: dict[str, str] = {}
    credentials: list[dict[str, object]] = []
    for key in (*profile.credentials, *chosen.credentials):
        _add_key(key, environ, hosts, credentials, env, secrets, notes)
    variables = dict.fromkeys(each.variable for each in profile.credentials)
    if variables and not variables.keys() & secrets.keys():
        names = ", ".join(variables)
        notes.append(f"no key was found in {names}; the agent has to log in, or does without")
    remotes = [] if chosen.git_credentials is False or tightened.git_credentials is False else [*project.remotes]
    if tightened.only_hosts is not None:
        hosts = [each for host in hosts for each in _common(host, tightened.only_hosts)]
        remotes = [each for each in remotes if any(_covers(wide, each.host) for wide in tightened.only_hosts)]
        credentials = [each for each in credentials if any(_covers(host, str(each["host"])) for host in hosts)]
        secrets = {key: value for key, value in secrets.items() if any(key == each["secret"] for each in credentials)}
    push = max(chosen.push or "ask", tightened.push or "allow", key=_STRICTNESS.__getitem__)
    closed = "deny" in (chosen.unknown_hosts or "deny", tightened.unknown_hosts) or tightened.only_hosts is not None
    logins = _git_logins(remotes)
    web: dict[str, object] = {
        "unknown_domains": "deny" if closed else "ask",
        "blocked_domains": [*dict.fromkeys((*chosen.deny_hosts, *tightened.deny_hosts))],
        "credentials": [*credentials, *(_git_credential(each, remotes) for each in logins)],
        "requests": [
            *(each.model_dump(mode="json", exclude_none=True) for each in chosen.requests),
            *_publish_rules((*default.publishing, *profile.publishing), chosen.registries),
            *_push_rules(push, (*default.git_hosts, *profile.git_hosts, *(each.host for each in remotes))),
        ],
    }
    remote_urls = [url for each in remotes for url in _spellings(f"https://{each.host}{each.path}")]
    sources: dict[str, object] = {
        "web_access": web,
        "runtime": {"delete_limit": _delete_limit(default, profile, chosen, tightened)},
        **({"git": {"allowed_remotes": remote_urls}} if remote_urls else {}),
    }
    protected = _protected((*default.protect, *profile.protect), chosen, tightened, git_file=project.git_is_file)
    project_rules = () if project.settings is None else project.settings.permissions.deny
    if project.settings is not None and project.settings.permissions.allow:
        notes.append(
            f"{len(project.settings.permissions.allow)} allow rules of the folder's settings.json are not used: "
            "a folder can only take away. Put them into your own here.toml"
        )
    settings: dict[str, object] = {
        "context_workspace": WORKSPACE,
        "permissions": {
            "allow": [*_own_rules(command), *map(_host_rule, dict.fromkeys(hosts)), *rules],
            "deny": [
                *dict.fromkeys((*map(_write_rule, protected), *chosen.deny, *tightened.deny, *project_rules)),
            ],
        },
    }
    none = "none" in (chosen.network, tightened.network)
    shown = () if tightened.home_files is False else _shared(chosen.home_files, profile.home_files, home)
    return AgentSetup(
        profile=name,
        command=_with_arguments(profile, command, secrets),
        network="none" if none else "allowlist",
        settings=settings,
        sources=sources,
        env=env,
        secrets=secrets,
        git_logins=logins,
        shared_files=tuple(shown),
        home_texts={".config/git/config": _git_config(remotes, identity)},
        notes=tuple(notes),
    )


def _merge(configs: Iterable[UserConfig]) -> UserConfig:
    """Join configurations, the weakest first: lists are joined, a single value of a later one is used."""
    merged: dict[str, object] = {}
    for config in configs:
        for name in UserConfig.model_fields:
            value, before = getattr(config, name), merged.get(name)
            if isinstance(value, tuple):
                merged[name] = (*(before if isinstance(before, tuple) else ()), *value)
            elif isinstance(value, dict):
                merged[name] = {**(before if isinstance(before, dict) else {}), **value}
            elif value is not None:
                merged[name] = value
    return UserConfig.model_construct(**merged)  # type: ignore[arg-type]


# --- hosts


def _split_rules(allow: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the rules that are not about hosts, and the hosts of the others."""
    rules, hosts = [], []
    for rule in allow:
        found = _NETWORK_RULE.fullmatch(rule)
        if found is None:
            rules.append(rule)
            continue
        try:
            hosts.append(check_host(found[1].strip()))
        except ValueError as error:
            raise InvalidRequest(f"here.toml: allow: {rule[:200]}: {error}", field="allow") from None
    return rules, hosts


def _host_rule(text: str) -> str:
    host, port = split_host(text)
    shown = f"[{host}]" if ":" in host else host
    return f"network(outbound:{shown}{'' if port is None else f':{port}'})"


def _common(host: str, only: Iterable[str]) -> list[str]:
    """Return the part of an allowed host that a list contains too."""
    if any(_covers(wide, host) for wide in only):
        return [host]
    _, port = split_host(host)
    return [each for each in only if _covers(host, each) and (port or split_host(each)[1] in _PORTS)]


def _covers(wide: str, narrow: str) -> bool:
    """Whether a host of a list contains another one. One without a port is for all ports."""
    (outer, outer_port), (inner, inner_port) = split_host(wide), split_host(narrow)
    if outer_port not in (None, inner_port):
        return False
    if outer == inner or (outer.startswith("*.") and inner.endswith(outer[1:])):
        return True
    try:
        inside, around = ipaddress.ip_network(inner, strict=False), ipaddress.ip_network(outer, strict=False)
        return inside.version == around.version and inside.subnet_of(around)  # type: ignore[arg-type]
    except ValueError:
        return False


# --- keys


def _add_key(
    key: AgentKey,
    environ: Mapping[str, str],
    hosts: list[str],
    credentials: list[dict[str, object]],
    env: dict[str, str],
    secrets: dict[str, str],
    notes: list[str],
) -> None:
    """Add a key that the user has: its host, the header, a placeholder inside, and its value as a secret."""
    host = key.host
    if key.base_url is not None and (url := environ.get(key.base_url, "").strip()):
        host = _allow_server(key.base_url, url, hosts, notes)
        env[key.base_url] = url
    value = environ.get(key.variable, "").strip()
    if not value:
        return
    if not value.isascii() or not value.isprintable():
        raise InvalidRequest(
            f"the variable {key.variable} holds characters that a header cannot have",
            field=key.variable,
            hint="set it to the key alone, in one line",
        )
    for name in key.inside or (key.variable,):
        env[name] = f"carrel-placeholder-{key.variable}"
    if not host:
        return
    secrets[key.variable] = value
    credentials.append({"host": host, "secret": key.variable, "header": key.header, "format": key.format})


def _allow_server(variable: str, url: str, hosts: list[str], notes: list[str]) -> str:
    """Allow the server that a variable names; return its host, or nothing where a key cannot be put into requests."""
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        host, port = "", None
    if not host or parts.scheme not in ("http", "https") or parts.username is not None:
        raise InvalidRequest(
            f"the variable {variable} is not an address of a server",
            field=variable,
            hint="write https://host or https://host:port, without a user",
        )
    shown = f"[{host}]" if ":" in host else host
    hosts.append(shown if port is None else f"{shown}:{port}")
    if parts.scheme == "http":
        notes.append(f"{variable} is not https, so no key is put into requests to {host}")
        return ""
    return host


# --- git


def _spellings(path: str) -> tuple[str, str]:
    """Return both ways to write the path of a repository: servers accept it with and without `.git`."""
    bare = path.removesuffix(".git")
    return bare, f"{bare}.git"


def _git_logins(remotes: Iterable[GitRemote]) -> tuple[GitLogin, ...]:
    first: dict[str, GitLogin] = {}
    for each in remotes:
        first.setdefault(each.host, GitLogin(f"git-{each.host}", each.host, each.path))
    return tuple(first.values())


def _git_credential(login: GitLogin, remotes: Iterable[GitRemote]) -> dict[str, object]:
    """Return the credential of a host, only for the repositories of the folder."""
    paths = [path for each in remotes if each.host == login.host for path in _spellings(each.path)]
    return {"host": login.host, "secret": login.secret, "format": "Basic {secret}", "paths": paths}


def _push_rules(push: Choice, hosts: Iterable[str]) -> list[dict[str, object]]:
    """Return the rules for the upload of a push. A push that is allowed needs none."""
    if push == "allow":
        return []
    rule = {"methods": ["POST"], "paths": ["*/git-receive-pack"], "verdict": push, "reason": "git push"}
    return [{"host": host, **rule} for host in dict.fromkeys(hosts)]


def _publish_rules(rules: Iterable[PublishRule], hosts: Iterable[str]) -> list[dict[str, object]]:
    """Return the rules for uploads to registries."""
    values = [each.model_dump(mode="json", exclude_none=True) for each in rules]
    return [{"host": host, **value} for host in dict.fromkeys(hosts) for value in values]


def _git_config(remotes: Iterable[GitRemote], identity: Mapping[str, str]) -> str:
    """Return the git configuration inside: who commits, and https in place of ssh, which has no way out."""
    lines = ["[safe]", "\tdirectory = *"]
    shown = {name: value for name, value in identity.items() if value}
    if shown:
        lines += ["[user]", *(f"\t{name} = {_quoted(value)}" for name, value in sorted(shown.items()))]
    for remote in {each.host: each for each in remotes if each.ssh}.values():
        lines.append(f"[url {_quoted(f'https://{remote.host}/')}]")
        lines += [f"\tinsteadOf = {_quoted(each)}" for each in remote.ssh]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    plain = re.sub(r"[\x00-\x1f\x7f]", " ", value)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


# --- files and commands


def _protected(
    defaults: Sequence[str], chosen: UserConfig, tightened: ProjectConfig, *, git_file: bool
) -> tuple[str, ...]:
    for path in chosen.unprotect:
        if path not in defaults:
            near = difflib.get_close_matches(path, defaults, n=1)
            raise InvalidRequest(
                f"here.toml: unprotect: '{path}' is not in the list of protected paths",
                field="unprotect",
                hint=f"did you mean '{near[0]}'?" if near else f"the list: {', '.join(defaults)}",
            )
    kept = [path for path in defaults if path not in chosen.unprotect]
    own = [".git"] if git_file else []
    return tuple(dict.fromkeys((*kept, *own, *chosen.protect, *tightened.protect)))


def _delete_limit(default: Profile, profile: Profile, chosen: UserConfig, tightened: ProjectConfig) -> int:
    """Return the number of files: of the user, else of the profile; a project may only lower it."""
    given = (chosen.delete_limit, profile.delete_limit, default.delete_limit)
    limit = next((each for each in given if each is not None), DELETE_LIMIT)
    return limit if tightened.delete_limit is None else min(limit, tightened.delete_limit)


def _write_rule(path: str) -> str:
    return f"file(write:${{WORKSPACE}}/{path.removesuffix('/**')}/**)"


def _own_rules(command: Sequence[str]) -> list[str]:
    """Return the rules for the program itself, and for the files of the folder."""
    rules = [f"file({operation}:${{WORKSPACE}}/**)" for operation in ("read", "write")]
    program = command[0] if command else ""
    if program and not re.search(r"['\x00-\x1f]", program):
        rules.append(f"shell({program}:*)" if re.fullmatch(r"[\w./@+-]+", program) else f"shell('{program}':*)")
    return rules


def _with_arguments(profile: Profile, command: Sequence[str], keys: Collection[str]) -> tuple[str, ...]:
    if not command or os.path.basename(command[0]) not in profile.programs:
        return tuple(command)
    with_keys = [word for key in profile.credentials if key.variable in keys for word in key.arguments]
    return (command[0], *profile.arguments, *with_keys, *command[1:])


def _shared(wanted: Sequence[str], of_profile: Sequence[str], home: str) -> list[SharedFile]:
    """Return the files to show. Those below the user's home directory are shown in the home directory inside."""
    found: dict[str, SharedFile] = {}
    named = [(each, False) for each in wanted if each != PROFILE_FILES]
    if PROFILE_FILES in wanted:
        named += [(each, True) for each in of_profile]
    for text, optional in named:
        path = os.path.normpath(os.path.join(home, text[2:]) if text.startswith("~/") else text)
        if not path.startswith("/") or path in ("/", home):
            raise InvalidRequest(
                f"home_files: '{text[:200]}' is not a file below the home directory, or an absolute path",
                field="home_files",
                hint="name single files, for example ~/.gitconfig",
            )
        inside = f"{HOME}/{os.path.relpath(path, home)}" if path.startswith(f"{home.rstrip('/')}/") else path
        found.setdefault(path, SharedFile(path, inside, optional))
    return list(found.values())
