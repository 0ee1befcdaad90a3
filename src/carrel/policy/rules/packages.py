"""Packages of `sources.json`: what a command would install and from where, and what is said of it.

A requirements file is read through a function the caller gives; without it, or when it cannot be read, the answer
is to ask. What runs inside an interpreter is not seen here: the registries hold on the wire.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import urlsplit

from carrel.policy.documents.sources import PackageManager, Sources
from carrel.policy.rules import remotes
from carrel.policy.shell import PIP, PYTHON, Argument, Unknown, base, module_of, shown
from carrel.policy.verdict import Verdict

ReadFile = Callable[[str], str | None]
"""The text of a file of the sandbox by the path a command names it by; None when it cannot be had."""

MOST_FILES = 50
MOST_READ, SHORT_LINE = 1 << 20, 50
"""Characters of requirements files that are looked through for one decision; what a line counts as at least."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MANAGERS = {
    **dict.fromkeys(("pip", "pipx", "poetry", "pipenv", "pdm", "easy_install", "hatch"), "pip"),
    **dict.fromkeys(("uv", "uvx"), "uv"),
    **dict.fromkeys(("conda", "mamba", "micromamba"), "conda"),
    **dict.fromkeys(("npm", "npx", "yarn", "pnpm", "pnpx", "bun", "bunx", "corepack"), "npm"),
    **dict.fromkeys(("apt", "apt-get", "dpkg", "aptitude"), "apt"),
    **dict.fromkeys(("gem", "bundle"), "gem"),
    "cargo": "cargo",
}
_NAME = re.compile(r"\s*([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(\[[^\]]*\])?\s*(.*)", re.DOTALL)
_URL = re.compile(r"(?:(?:git|hg|svn|bzr)\+)?[A-Za-z][A-Za-z0-9+.-]*://|git@")
_FILE = re.compile(r"^([A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*?)-\d")

_FLAGS = _words("""
    -U --upgrade --pre --no-deps -q -qq -qqq --quiet -v -vv -vvv --verbose --user --no-cache-dir --dry-run -I
    --force-reinstall --ignore-installed --require-hashes --prefer-binary --disable-pip-version-check --no-input
    --isolated --no-index --break-system-packages --no-build-isolation --no-warn-script-location --no-clean
    --reinstall --no-compile --compile --use-pep517 --system --no-cache --offline --dev --frozen --locked --no-sync
    --exact --strict --no-progress --no-color --force --ignore-requires-python --no-warn-conflicts
""")
_VALUED = _words("""
    -t --target --prefix --root --only-binary --no-binary --progress-bar --timeout --retries --report
    --upgrade-strategy --platform --python-version --abi --implementation --root-user-action --src --cache-dir --log
    -d --dest -w --wheel-dir -p --python --group --extra --optional --resolution --prerelease --exclude-newer
    --refresh-package --reinstall-package -P --upgrade-package --link-mode --package --python-platform --color
    --directory --project
""")
_INDEXES = _words("-i --index-url --pypi-url --extra-index-url -f --find-links --index --default-index")
_FILES = frozenset({"-r", "--requirement", "--requirements", "-c", "--constraint", "--constraints"})


def normalised(name: str) -> str:
    """A package name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@lru_cache(maxsize=64)
def _all_normalised(names: tuple[str, ...]) -> frozenset[str]:
    """The names of a list: one command may name thousands of packages."""
    return frozenset(normalised(each) for each in names)


@dataclass(slots=True)
class _Judge:
    sources: Sources
    source: str
    key: str
    manager: PackageManager
    read: ReadFile | None
    files: set[str] = field(default_factory=set)

    def deny(self, reason: str, rule: str, hint: str | None = None) -> Verdict:
        return Verdict("deny", reason, f"package_managers.{self.key}.{rule}", self.source, hint)

    def ask(self, reason: str) -> Verdict:
        return Verdict("ask", reason, f"package_managers.{self.key}", self.source)

    # --- arguments

    def arguments(self, rest: Sequence[Argument]) -> Iterator[Verdict]:
        """What is said of the arguments of an install."""
        at = 0
        while at < len(rest):
            argument = rest[at]
            at += 1
            if isinstance(argument, Unknown):
                yield self.ask(f"what is installed is known only at run time: {argument.source}")
                continue
            if argument == "--":
                continue
            if not argument.startswith("-") or argument == "-":
                yield from self.requirement(argument)
                continue
            option, equals, given = argument.partition("=")
            if not argument.startswith("--") and len(argument) > 2 and argument[:2] in {"-r", "-c", "-i", "-f", "-e"}:
                option, equals, given = argument[:2], "=", argument[2:].removeprefix("=")
            if argument in _FLAGS:
                continue
            value: Argument | None = given if equals else rest[at] if at < len(rest) else None
            at += 0 if equals else 1
            yield from self.option(option, value)

    def option(self, option: str, value: Argument | None) -> Iterator[Verdict]:
        """What is said of an option that has a value."""
        if option in _VALUED:
            return
        if option in _INDEXES:
            yield from self.index(option, value)
        elif option in _FILES:
            yield from self.file(value)
        elif option in {"-e", "--editable", "--with", "--with-editable", "--from"}:
            if not isinstance(value, str):
                yield self.ask(f"what is installed is known only at run time: {option}")
            else:
                for each in value.split(",") if option == "--with" else [value]:
                    yield from self.requirement(each)
        elif option == "--with-requirements":
            yield from self.file(value)
        elif option == "--trusted-host":
            registries = self.manager.registries or ()
            hosts = {urlsplit(each.url).hostname for each in registries if each.trusted}
            if not isinstance(value, str) or value.partition(":")[0] not in hosts:
                yield self.deny(f"the host {_show(value)} is not a trusted registry", "registries")
        else:
            yield self.ask(f"option {option} is not known here")

    def index(self, option: str, value: Argument | None) -> Iterator[Verdict]:
        """What is said of an index."""
        if not isinstance(value, str):
            yield self.ask(f"the index is known only at run time: {_show(value)}")
            return
        url = value.partition("=")[2] if option == "--index" and re.match(r"[\w-]+=", value) else value
        local = option in {"-f", "--find-links"} and not _URL.match(url)
        if not local and not self.registered(url):
            yield self.deny(
                f"the index {url[:200]} is not among the registries of this agent", "registries", self._registries()
            )

    def registered(self, url: str) -> bool:
        """Whether a URL lies below a registry."""
        return any(_below(each.url, url) for each in self.manager.registries or ())

    def _registries(self) -> str | None:
        known = [each.url for each in self.manager.registries or ()]
        return "use " + ", ".join(known[:5]) if known else None

    def file(self, value: Argument | None) -> Iterator[Verdict]:
        """What is said of a requirements file."""
        if not isinstance(value, str):
            yield self.ask("the requirements file is known only at run time")
            return
        if value in self.files:
            return
        self.files.add(value)
        text = self.read(value) if self.read and len(self.files) <= MOST_FILES and not _URL.match(value) else None
        if text is None:
            yield self.ask(f"the requirements file {value[:200]} cannot be read, or is too long")
            return
        for line in re.sub(r"\\\n", "", text).splitlines():
            bare = re.sub(r"(^|\s)#.*", "", line).strip()
            if bare.startswith("-"):
                option, _, rest = bare.partition("=") if bare.startswith("--") and "=" in bare.split()[0] else (
                    bare.partition(" ")
                )  # fmt: skip
                yield from self.option(option, rest.strip()) if rest.strip() else self.arguments([bare])
            elif "${" in bare:
                yield self.ask(f"what is installed is known only at run time: {bare[:200]}")
            elif bare:
                yield from self.requirement(re.split(r"(?<!\s)\s+--", bare)[0])

    def requirement(self, text: str) -> Iterator[Verdict]:
        """What is said of one requirement: a name, a URL, a link to a repository, a file or a folder."""
        name, at, url = text.partition("@") if re.match(r"[\w.\[\], -]+@\s*\S+:", text) else ("", "", text)
        if at and _NAME.fullmatch(name):
            yield from self.named(name)
        target = url.strip()
        if _URL.match(target):
            yield from self.link(target, named=bool(at))
        elif at or re.match(r"[./~]", target) or "/" in target or re.search(r"\.(whl|zip|tar(\.\w+)?|tgz)$", target):
            yield from self.path(target)
        else:
            yield from self.named(target)

    def named(self, text: str) -> Iterator[Verdict]:
        """What is said of a package by name."""
        found = _NAME.fullmatch(text.partition(";")[0])
        if not found or not re.fullmatch(r"([<>=!~(@].*)?", found[4], re.DOTALL):
            yield self.ask(f"a requirement that is not understood: {text[:200]}")
            return
        yield from self.blocked(found[1])

    def blocked(self, name: str) -> Iterator[Verdict]:
        """Whether a package is blocked, or is none of those that are allowed."""
        if normalised(name) in _all_normalised(tuple(self.manager.blocked_packages)):
            yield self.deny(f"the package {name} is blocked for this agent", f"blocked_packages: {name}")
        allowed = self.manager.allowed_packages
        if allowed is not None and normalised(name) not in _all_normalised(tuple(allowed)):
            hint = "allowed are " + ", ".join(allowed[:10]) if allowed else None
            yield self.deny(f"the package {name} is not among those of this agent", "allowed_packages", hint)

    def nameless(self, text: str) -> Iterator[Verdict]:
        """What is said of a package whose name is not told, where only some are allowed."""
        if self.manager.allowed_packages is not None:
            yield self.ask(f"which package it is cannot be seen: {text[:200]}")

    def link(self, url: str, *, named: bool = False) -> Iterator[Verdict]:
        """What is said of a URL or a link to a repository. `named`: the name of its package was told before it."""
        plain, _, fragment = url.partition("#")
        if egg := re.search(r"(?:^|&)egg=([A-Za-z0-9._-]+)", fragment):
            yield from self.blocked(egg[1])
        elif re.match(r"(git|hg|svn|bzr)\+|git@", plain) and not named:
            yield from self.nameless(url)
        if version_control := re.match(r"(git|hg|svn|bzr)\+(.*)|(git@.*)", plain, re.DOTALL):
            target = version_control[2] or version_control[3]
            target = re.sub(r"(?<=.)@[^/@]*$", "", target)
            if version_control[1] in {None, "git"} and self.sources.git is not None:
                if not self.sources.git.enabled:
                    yield Verdict(
                        "deny", "git remotes are not enabled for this agent", "git.enabled: false", self.source
                    )
                yield from remotes.remote(self.sources.git, target, self.source)
            else:
                yield self.ask(f"a package from a repository: {url[:200]}")
            return
        if plain.startswith("file://"):
            yield from self.path(plain.removeprefix("file://"))
        elif not self.registered(plain):
            yield self.deny(
                f"the URL {plain[:200]} is not below a registry of this agent", "registries", self._registries()
            )
        else:
            yield from self.path(urlsplit(plain).path)

    def path(self, path: str) -> Iterator[Verdict]:
        """A file or folder: its name tells the package, where it is one that is built."""
        name = path.rstrip("/").rsplit("/", 1)[-1]
        if re.search(r"\.(whl|zip|tar(\.\w+)?|tgz)$", name):
            found = _FILE.match(name)
            yield from self.blocked(found[1]) if found else self.nameless(name)


def sparingly(read: ReadFile) -> ReadFile:
    """Read no more than can be looked through quickly: files beyond that are as if they could not be read."""
    left = MOST_READ

    def given(path: str) -> str | None:
        nonlocal left
        text = read(path) if left > 0 else None
        if text is not None:
            left -= max(len(text), SHORT_LINE * len(text.splitlines()))
        return text if left >= 0 else None

    return given


def judge(sources: Sources, argv: Sequence[Argument], source: str, read: ReadFile | None = None) -> Iterator[Verdict]:
    """What `sources.json` says of a command that may install packages."""
    if not argv or not isinstance(argv[0], str):
        return
    name, rest = base(argv[0]), list(argv[1:])
    if PYTHON.fullmatch(name):
        module = module_of(rest)
        if module is None:
            return
        name, rest = module[0], list(module[1])
    if PIP.fullmatch(name):
        name = "pip"
    key = _MANAGERS.get(name) or ("go" if name == "go" and rest[:1] in (["get"], ["install"]) else None)
    if key is None:
        return
    manager = getattr(sources.package_managers, key) or (sources.package_managers.pip if key == "uv" else None)
    if manager is None:
        if installed(name, rest) is not None:
            yield Verdict("ask", f"sources.json says nothing of {name}", "package_managers", source)
        return
    assert isinstance(manager, PackageManager)
    if not manager.enabled:
        yield Verdict("deny", f"{name} is not enabled for this agent", f"package_managers.{key}.enabled: false", source)
        return
    wanted = installed(name, rest)
    if wanted is None:
        return
    judging = _Judge(sources, source, key, manager, read)
    if wanted is UNSEEN:
        yield judging.ask(f"what {name} would install is not named in the command")
    elif key in {"pip", "uv"}:
        yield from judging.arguments(wanted)
    else:
        yield from _others(judging, wanted)


UNSEEN: list[Argument] = []
"""Stands for packages that are named in a file of the project."""

_INSTALLS: dict[str, tuple[tuple[str, ...], ...]] = {
    "pip": (("install",), ("download",), ("wheel",)),
    "easy_install": ((),),
    "pipx": (("install",), ("run",), ("inject",), ("upgrade",)),
    "poetry": (("add",), ("install",), ("update",)),
    "pipenv": (("install",), ("sync",), ("update",)),
    "pdm": (("add",), ("install",), ("sync",), ("update",)),
    "uv": (("pip", "install"), ("add",), ("tool", "install"), ("tool", "run"), ("sync",), ("lock",), ("pip", "sync")),
    "uvx": ((),),
    "conda": (("install",), ("create",), ("update",)),
    "npm": (("install",), ("i",), ("add",), ("ci",), ("exec",), ("x",)),
    "yarn": (("add",), ("install",), ("dlx",)),
    "pnpm": (("add",), ("install",), ("i",), ("dlx",)),
    "npx": ((),),
    "go": (("get",), ("install",)),
    "gem": (("install",),),
    "cargo": (("install",), ("add",)),
    "apt": (("install",),),
    "apt-get": (("install",),),
}
_PROJECT = frozenset({"sync", "lock", "ci", "update", "upgrade"})


def installed(name: str, rest: Sequence[Argument]) -> list[Argument] | None:
    """The arguments of an install; None when the command installs nothing, `UNSEEN` when a file names the packages."""
    words = list(rest)
    while words and isinstance(words[0], str) and words[0].startswith("-") and name in {"pip", "uv", "conda", "npm"}:
        option = words.pop(0)
        if isinstance(option, str) and option in _VALUED | _INDEXES and words:
            words.pop(0)
    if words and isinstance(words[0], Unknown):
        return words
    for command in _INSTALLS.get({"mamba": "conda", "micromamba": "conda"}.get(name, name), ()):
        if tuple(words[: len(command)]) == command:
            wanted = words[len(command) :]
            if command[-1:] and command[-1] in _PROJECT:
                return UNSEEN
            if name in {"uvx", "npx"} or command[-1:] in (("run",), ("exec",), ("x",), ("dlx",)):
                wanted = wanted[: _first_operand(wanted) + 1]
            return [*_leading(rest, words), *wanted] if wanted else UNSEEN
    if name == "uv" and words[:1] == ["run"]:
        return _with_packages(words[1:])
    return None


def _leading(rest: Sequence[Argument], words: Sequence[Argument]) -> list[Argument]:
    return list(rest[: len(rest) - len(words)])


def _first_operand(words: Sequence[Argument]) -> int:
    for index, word in enumerate(words):
        if not (isinstance(word, str) and word.startswith("-")):
            return index
    return len(words)


def _with_packages(words: Sequence[Argument]) -> list[Argument] | None:
    """The packages that `uv run --with` adds."""
    found: list[Argument] = []
    for index, word in enumerate(words):
        if isinstance(word, str) and word.startswith(("--with", "--index", "--default-index", "--extra-index")):
            found.append(word)
            if "=" not in word and index + 1 < len(words):
                found.append(words[index + 1])
    return found or None


def _others(judging: _Judge, wanted: Sequence[Argument]) -> Iterator[Verdict]:
    """Managers whose indexes are not told by the command: only names are looked at."""
    for argument in wanted:
        if isinstance(argument, Unknown):
            yield judging.ask(f"what is installed is known only at run time: {argument.source}")
        elif re.match(r"-c$|--channel|--registry|--index|--source", argument):
            yield judging.ask(f"option {argument} changes where packages come from")
        elif not argument.startswith("-"):
            name = re.split(r"[=<>!~]|(?<=.)@", argument)[0]
            yield from judging.blocked(name)
            if "://" in argument or argument.startswith("git@"):
                yield judging.ask(f"a package from a URL: {argument[:200]}")


def _below(registry: str, url: str) -> bool:
    try:
        mine, theirs = urlsplit(registry), urlsplit(url)
        same = (mine.scheme, (mine.hostname or "").lower(), mine.port) == (
            theirs.scheme.lower(), (theirs.hostname or "").lower(), theirs.port,
        )  # fmt: skip
    except ValueError:
        return False
    folder = mine.path.rstrip("/") + "/"
    if re.search(r"(^|/)(\.|%2e){1,2}(/|$)", theirs.path, re.IGNORECASE) or "\\" in url or "@" in theirs.netloc:
        return False
    return same and (theirs.path.rstrip("/") + "/").startswith(folder)


def _show(value: Argument | None) -> str:
    return "" if value is None else shown(value)[:200]
