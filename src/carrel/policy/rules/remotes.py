"""Checks the remotes of a git command against `git` in `sources.json`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from carrel.policy.documents.sources import Git
from carrel.policy.rules.patterns import pattern
from carrel.policy.shell import Argument, Unknown, base, is_safe_config, shown
from carrel.policy.verdict import Verdict

_GLOBAL_FLAGS = frozenset(
    {"--no-pager", "-P", "--paginate", "-p", "--bare", "--no-replace-objects", "--literal-pathspecs"}
    | {"--no-optional-locks"}
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SCP = re.compile(r"(?:[^/@:\s]+@)?(\[[^\]]+\]|[^/:\s]+):(?!//)(.*)", re.DOTALL)
_VALUED = frozenset(
    {"-b", "--branch", "--depth", "-o", "--origin", "-j", "--jobs", "--reference", "--filter", "--shallow-since", "-m"}
    | {"--separate-git-dir", "--name", "-t", "--track", "--deepen", "--refmap", "--server-option"}
)
_RISKY = ("-c", "--config", "-u", "--upload-pack", "--receive-pack", "--exec", "--template", "--recurse-submodules")
_REMOTE = frozenset({"clone", "fetch", "pull", "push", "ls-remote", "remote", "submodule", "archive", "fetch-pack"})


def judge(git: Git | None, argv: Sequence[Argument], source: str) -> Iterator[Verdict]:
    """Yield the verdicts of `sources.json` on a git command."""
    if git is None or not argv or argv[0] == "" or not isinstance(argv[0], str) or base(argv[0]) != "git":
        return
    at = 1
    while at < len(argv):
        argument = argv[at]
        if isinstance(argument, Unknown):
            yield _ask(source, f"an option of git is known only at run time: {argument.source}")
            return
        if argument in {"-C", "--git-dir", "--work-tree", "--namespace"}:
            at += 2
        elif argument == "-c":
            yield from _config(argv[at + 1] if at + 1 < len(argv) else "", source)
            at += 2
        elif argument.startswith(("--config-env", "--exec-path=", "-c")):
            yield _ask(source, f"option {argument} changes what git runs or connects to")
            at += 1
        elif argument in _GLOBAL_FLAGS or argument.startswith(("--git-dir=", "--work-tree=", "--namespace=")):
            at += 1
        elif argument.startswith("-"):
            if argument not in {"--version", "--help", "-h", "-v"}:
                yield _ask(source, f"option {argument} of git is unknown to this reader")
            return
        else:
            yield from _command(git, argument, argv[at + 1 :], source)
            return


def _config(setting: Argument, source: str) -> Iterator[Verdict]:
    if not is_safe_config(setting):
        yield _ask(source, f"a setting may change what git runs or connects to: {shown(setting)}")


def _command(git: Git, name: str, rest: Sequence[Argument], source: str) -> Iterator[Verdict]:
    if name == "config":
        keys = [each for each in rest if not (isinstance(each, str) and each.startswith("-"))]
        writes = len(keys) > 1 or any(each in {"--add", "--replace-all", "--edit", "-e"} for each in rest)
        if writes:
            yield from _config(keys[0] if keys else "", source)
        return
    if name not in _REMOTE:
        return
    if not git.enabled:
        yield disabled(source)
        return
    operands, asks = _operands(rest)
    for reason in asks:
        yield _ask(source, reason)
    if name == "remote":
        if operands[:1] not in (["add"], ["set-url"]):
            return
        operands = operands[2:]
    elif name == "submodule":
        if operands[:1] != ["add"]:
            if operands[:1] not in ([], ["status"], ["summary"]):
                yield _ask(source, "the remotes of submodules are known only at run time")
            return
        operands = operands[1:2]
    elif name == "archive":
        operands = [each.partition("=")[2] for each in rest if isinstance(each, str) and each.startswith("--remote=")]
    else:
        operands = operands[:1]
    for operand in operands:
        yield from remote(git, operand, source, named=name not in {"clone", "remote", "submodule"})


def _operands(rest: Sequence[Argument]) -> tuple[list[Argument], list[str]]:
    found: list[Argument] = []
    asks: list[str] = []
    skip = False
    for argument in rest:
        if skip:
            skip = False
        elif isinstance(argument, Unknown):
            found.append(argument)
        elif argument == "--":
            continue
        elif argument.startswith("-"):
            skip = argument in _VALUED
            if argument.startswith(_RISKY):
                asks.append(f"option {argument} changes what git runs or connects to")
        else:
            found.append(argument)
    return found, asks


def remote(git: Git, target: Argument, source: str, *, named: bool = False) -> Iterator[Verdict]:
    """Yield the verdicts on one remote. `named`: a word without colon and slash is the name of a configured remote."""
    if isinstance(target, Unknown):
        if target.count == "one" and _URL.match(target.prefix) and _allowed(git, target.prefix + "x"):
            return
        yield _ask(source, f"the remote is known only at run time: {target.source}")
        return
    if (named and re.fullmatch(r"[\w.-]+", target)) or _is_local(target):
        return
    if "::" in target.partition("/")[0] or not _allowed(git, target):
        if git.allowed_remotes is None and "::" not in target:
            return
        yield Verdict(
            "deny",
            f"{target[:200]} is not one of this agent's git remotes",
            "git.allowed_remotes",
            source,
            "use one of: " + ", ".join((git.allowed_remotes or ())[:10]),
        )


def _is_local(target: str) -> bool:
    if target.startswith(("/", "./", "../", "file://")):
        return True
    return not _URL.match(target) and not _SCP.fullmatch(target)


def _allowed(git: Git, target: str) -> bool:
    return git.allowed_remotes is None or any(url_matches(each, target) for each in git.allowed_remotes)


def url_matches(allowed: str, url: str) -> bool:
    """Whether a pattern matches a URL. User names do not count; scheme, host and port must be equal."""
    url = _as_url(url)
    try:
        mine, theirs = urlsplit(_as_url(allowed)), urlsplit(url)
        same = (mine.scheme.lower(), mine.port) == (theirs.scheme.lower(), theirs.port)
    except ValueError:
        return False
    host, theirs_host = (mine.hostname or "").lower(), (theirs.hostname or "").lower()
    if not same or "%" in theirs.netloc or "\\" in url or re.search(r"[\x00-\x20]", url):
        return False
    if not pattern(host).matches(theirs_host) or ("*" in host and not host.startswith("*.")):
        return False
    if re.search(r"(^|/)(\.|%2e){1,2}(/|$)", theirs.path, re.IGNORECASE):
        return False
    wanted = mine.path or "/*"
    return pattern(wanted).matches(theirs.path) or (not mine.path and not theirs.path)


_PORTS = {"https": 443, "http": 80, "ssh": 22, "git": 9418}


def _as_url(remote: str) -> str:
    """Convert `user@host:path` to a URL; URLs are returned unchanged."""
    found = None if _URL.match(remote) else _SCP.fullmatch(remote)
    return f"ssh://{found[1]}/{found[2].lstrip('/')}" if found else remote


@dataclass(frozen=True, slots=True)
class RemoteHost:
    """A host with allowed remotes, or every host below a domain, and the port. `text` is the pattern that allows it."""

    host: str
    port: int
    text: str

    def matches(self, host: str) -> bool:
        """Whether a host is this host or below this domain."""
        return host.endswith(self.host[1:]) if self.host.startswith("*.") else host == self.host


def remote_hosts(git: Git | None) -> tuple[RemoteHost, ...]:
    """Return the hosts of the allowed remotes; empty if remotes are disabled or none are named."""
    if git is None or not git.enabled:
        return ()
    found = (_remote_host(each) for each in git.allowed_remotes or ())
    return tuple(each for each in found if each is not None)


def _remote_host(allowed: str) -> RemoteHost | None:
    if "::" in allowed.partition("/")[0]:
        return None
    try:
        parts = urlsplit(_as_url(allowed))
        host, port = (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(parts.scheme.lower())
    except ValueError:
        return None
    # A pattern for hosts of more than one domain gives no host.
    below = host.removeprefix("*.")
    if not host or port is None or "*" in below or "?" in below or (below != host and "." not in below):
        return None
    return RemoteHost(host, port, allowed)


def disabled(source: str) -> Verdict:
    """Return the refusal of every remote."""
    return Verdict("deny", "git remotes are not enabled for this agent", "git.enabled: false", source)


def _ask(source: str, reason: str) -> Verdict:
    return Verdict("ask", reason, "git", source)
