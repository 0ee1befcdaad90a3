"""Git remotes of `sources.json`: which remotes a git command would talk to, and what is said of them."""

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
    """What `sources.json` says of a git command."""
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
            yield _ask(source, f"{argument} changes what git does")
            at += 1
        elif argument in _GLOBAL_FLAGS or argument.startswith(("--git-dir=", "--work-tree=", "--namespace=")):
            at += 1
        elif argument.startswith("-"):
            if argument not in {"--version", "--help", "-h", "-v"}:
                yield _ask(source, f"option {argument} of git is not known here")
            return
        else:
            yield from _command(git, argument, argv[at + 1 :], source)
            return


def _config(setting: Argument, source: str) -> Iterator[Verdict]:
    if not is_safe_config(setting):
        yield _ask(source, f"a setting may change what git runs or reaches: {shown(setting)}")


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
        yield Verdict("deny", "git remotes are not enabled for this agent", "git.enabled: false", source)
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
                yield _ask(source, "the remotes of submodules are known only when git reads them")
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
                asks.append(f"option {argument} of git changes what it runs or reaches")
        else:
            found.append(argument)
    return found, asks


def remote(git: Git, target: Argument, source: str, *, named: bool = False) -> Iterator[Verdict]:
    """What is said of one remote. `named`: a word without a colon or slash is the name of a remote that was added."""
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
            f"the remote {target[:200]} is not among the remotes of this agent",
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
    """Whether a URL is meant by a pattern. User names do not count; scheme, host and port must be the same."""
    if not _URL.match(url) and (found := _SCP.fullmatch(url)):
        url = f"ssh://{found[1]}/{found[2].lstrip('/')}"
    if not _URL.match(allowed) and (found := _SCP.fullmatch(allowed)):
        allowed = f"ssh://{found[1]}/{found[2].lstrip('/')}"
    try:
        mine, theirs = urlsplit(allowed), urlsplit(url)
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


@dataclass(frozen=True, slots=True)
class Place:
    """Where remotes lie: a host, or every host below one, and a port. `text` is the pattern that says so."""

    host: str
    port: int
    text: str

    def means(self, host: str) -> bool:
        """Whether remotes lie on a host."""
        return host.endswith(self.host[1:]) if self.host.startswith("*.") else host == self.host


def places(git: Git | None) -> tuple[Place, ...]:
    """The places of the remotes that are allowed; none where remotes are not enabled or none are named."""
    if git is None or not git.enabled:
        return ()
    found = (_place(each) for each in git.allowed_remotes or ())
    return tuple(each for each in found if each is not None)


def _place(allowed: str) -> Place | None:
    if "::" in allowed.partition("/")[0]:
        return None
    url = allowed
    if not _URL.match(url) and (found := _SCP.fullmatch(url)):
        url = f"ssh://{found[1]}/"
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(parts.scheme.lower())
    except ValueError:
        return None
    # A pattern that means hosts of more than one domain names none.
    below = host.removeprefix("*.")
    if not host or port is None or "*" in below or "?" in below or (below != host and "." not in below):
        return None
    return Place(host, port, allowed)


def _ask(source: str, reason: str) -> Verdict:
    return Verdict("ask", reason, "git", source)
