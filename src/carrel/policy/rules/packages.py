"""Checks what a command would install, and from where, against `package_managers` in `sources.json`.

A function of the caller reads requirements files; a file that it cannot read is a reason to ask. Code inside an
interpreter is not visible here; the egress proxy enforces the registries on its connections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import urlsplit

from carrel.policy.documents.sources import PackageManager, Sources
from carrel.policy.rules import remotes
from carrel.policy.shell import PIP, PYTHON, Argument, Unknown, base, module_of, shown, word_set
from carrel.policy.verdict import Verdict

ReadFile = Callable[[str], str | None]
"""Returns the text of a file of the sandbox; None if it cannot be read. The path is the one in the command."""

_UNKNOWN_PACKAGE = "the packages to install are known only at run time"
MOST_FILES = 50
MOST_READ, SHORT_LINE = 1 << 20, 50
"""The most characters of requirements files to read for one decision, and the fewest that a line counts as."""

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

_FLAGS = word_set("""
    -U --upgrade --pre --no-deps -q -qq -qqq --quiet -v -vv -vvv --verbose --user --no-cache-dir --dry-run -I
    --force-reinstall --ignore-installed --require-hashes --prefer-binary --disable-pip-version-check --no-input
    --isolated --no-index --break-system-packages --no-build-isolation --no-warn-script-location --no-clean
    --reinstall --no-compile --compile --use-pep517 --system --no-cache --offline --dev --frozen --locked --no-sync
    --exact --strict --no-progress --no-color --force --ignore-requires-python --no-warn-conflicts
""")
_VALUED = word_set("""
    -t --target --prefix --root --only-binary --no-binary --progress-bar --timeout --retries --report
    --upgrade-strategy --platform --python-version --abi --implementation --root-user-action --src --cache-dir --log
    -d --dest -w --wheel-dir -p --python --group --extra --optional --resolution --prerelease --exclude-newer
    --refresh-package --reinstall-package -P --upgrade-package --link-mode --package --python-platform --color
    --directory --project
""")
_INDEXES = word_set("-i --index-url --pypi-url --extra-index-url -f --find-links --index --default-index")
_FILES = frozenset({"-r", "--requirement", "--requirements", "-c", "--constraint", "--constraints"})


def normalised(name: str) -> str:
    """Normalise a package name as package indexes do."""
    return re.sub(r"[-_.]+", "-", name).lower()


@lru_cache(maxsize=64)
def _all_normalised(names: tuple[str, ...]) -> frozenset[str]:
    """Normalise a list of names. Cached, because one command may name thousands of packages."""
    return frozenset(normalised(each) for each in names)


@dataclass(slots=True)
class _InstallCheck:
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
        """Check the arguments of an install."""
        at = 0
        while at < len(rest):
            argument = rest[at]
            at += 1
            if isinstance(argument, Unknown):
                yield self.ask(f"{_UNKNOWN_PACKAGE}: {argument.source}")
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
        """Check an option with a value."""
        if option in _VALUED:
            return
        if option in _INDEXES:
            yield from self.index(option, value)
        elif option in _FILES or option == "--with-requirements":
            yield from self.file(value)
        elif option in {"-e", "--editable", "--with", "--with-editable", "--from"}:
            if not isinstance(value, str):
                yield self.ask(f"{_UNKNOWN_PACKAGE}: {option}")
            else:
                for each in value.split(",") if option == "--with" else [value]:
                    yield from self.requirement(each)
        elif option == "--trusted-host":
            registries = self.manager.registries or ()
            hosts = {urlsplit(each.url).hostname for each in registries if each.trusted}
            if not isinstance(value, str) or value.partition(":")[0] not in hosts:
                yield self.deny(f"the host {_show(value)} is not a trusted registry", "registries")
        else:
            yield self.ask(f"option {option} is unknown to this reader")

    def index(self, option: str, value: Argument | None) -> Iterator[Verdict]:
        """Check the URL of a package index."""
        if not isinstance(value, str):
            yield self.ask(f"the index is known only at run time: {_show(value)}")
            return
        url = value.partition("=")[2] if option == "--index" and re.match(r"[\w-]+=", value) else value
        local = option in {"-f", "--find-links"} and not _URL.match(url)
        if not local and not self.registered(url):
            yield self.deny(
                f"the index {url[:200]} is not one of this agent's registries", "registries", self._registries()
            )

    def registered(self, url: str) -> bool:
        """Whether a URL is below the URL of a registry."""
        return any(_below(each.url, url) for each in self.manager.registries or ())

    def _registries(self) -> str | None:
        known = [each.url for each in self.manager.registries or ()]
        return "use " + ", ".join(known[:5]) if known else None

    def file(self, value: Argument | None) -> Iterator[Verdict]:
        """Check the requirements in a file."""
        if not isinstance(value, str):
            yield self.ask("the requirements file is known only at run time")
            return
        if value in self.files:
            return
        self.files.add(value)
        text = self.read(value) if self.read and len(self.files) <= MOST_FILES and not _URL.match(value) else None
        if text is None:
            yield self.ask(f"the requirements file {value[:200]} cannot be read or is too long")
            return
        for line in re.sub(r"\\\n", "", text).splitlines():
            bare = re.sub(r"(^|\s)#.*", "", line).strip()
            if bare.startswith("-"):
                option, _, rest = bare.partition("=") if bare.startswith("--") and "=" in bare.split()[0] else (
                    bare.partition(" ")
                )  # fmt: skip
                yield from self.option(option, rest.strip()) if rest.strip() else self.arguments([bare])
            elif "${" in bare:
                yield self.ask(f"{_UNKNOWN_PACKAGE}: {bare[:200]}")
            elif bare:
                yield from self.requirement(re.split(r"(?<!\s)\s+--", bare)[0])

    def requirement(self, text: str) -> Iterator[Verdict]:
        """Check one requirement: a name, a URL, a repository, a file or a folder."""
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
        """Check a package by its name."""
        found = _NAME.fullmatch(text.partition(";")[0])
        if not found or not re.fullmatch(r"([<>=!~(@].*)?", found[4], re.DOTALL):
            yield self.ask(f"this reader does not support the requirement: {text[:200]}")
            return
        yield from self.blocked(found[1])

    def blocked(self, name: str) -> Iterator[Verdict]:
        """Refuse a package that is blocked or not allowed."""
        if normalised(name) in _all_normalised(tuple(self.manager.blocked_packages)):
            yield self.deny(f"the package {name} is blocked for this agent", f"blocked_packages: {name}")
        allowed = self.manager.allowed_packages
        if allowed is not None and normalised(name) not in _all_normalised(tuple(allowed)):
            hint = "use one of: " + ", ".join(allowed[:10]) if allowed else None
            yield self.deny(f"the package {name} is not one of this agent's packages", "allowed_packages", hint)

    def nameless(self, text: str) -> Iterator[Verdict]:
        """Ask about a package whose name is unknown, if only some packages are allowed."""
        if self.manager.allowed_packages is not None:
            yield self.ask(f"the name of the package is unknown: {text[:200]}")

    def link(self, url: str, *, named: bool = False) -> Iterator[Verdict]:
        """Check the URL of a package or repository. `named`: the name of the package came before it."""
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
                    yield remotes.disabled(self.source)
                yield from remotes.remote(self.sources.git, target, self.source)
            else:
                yield self.ask(f"a package from a version control repository: {url[:200]}")
            return
        if plain.startswith("file://"):
            yield from self.path(plain.removeprefix("file://"))
        elif not self.registered(plain):
            yield self.deny(f"{plain[:200]} is not in one of this agent's registries", "registries", self._registries())
        else:
            yield from self.path(urlsplit(plain).path)

    def path(self, path: str) -> Iterator[Verdict]:
        """Check a file or folder. The file name of a built package contains the name of the package."""
        name = path.rstrip("/").rsplit("/", 1)[-1]
        if re.search(r"\.(whl|zip|tar(\.\w+)?|tgz)$", name):
            found = _FILE.match(name)
            yield from self.blocked(found[1]) if found else self.nameless(name)


def limited_reader(read: ReadFile) -> ReadFile:
    """Limit how much `read` reads in total; beyond that it returns None, as for a file that cannot be read."""
    left = MOST_READ

    def given(path: str) -> str | None:
        nonlocal left
        text = read(path) if left > 0 else None
        if text is not None:
            left -= max(len(text), SHORT_LINE * len(text.splitlines()))
        return text if left >= 0 else None

    return given


def judge(sources: Sources, argv: Sequence[Argument], source: str, read: ReadFile | None = None) -> Iterator[Verdict]:
    """Yield the verdicts of `sources.json` on a command that may install packages."""
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
            yield Verdict("ask", f"sources.json does not mention {name}", "package_managers", source)
        return
    assert isinstance(manager, PackageManager)
    if not manager.enabled:
        yield Verdict("deny", f"{name} is not enabled for this agent", f"package_managers.{key}.enabled: false", source)
        return
    wanted = installed(name, rest)
    if wanted is None:
        return
    check = _InstallCheck(sources, source, key, manager, read)
    if wanted is UNNAMED:
        yield check.ask(f"the command does not name the packages that {name} would install")
    elif key in {"pip", "uv"}:
        yield from check.arguments(wanted)
    else:
        yield from _others(check, wanted)


UNNAMED: list[Argument] = []
"""Stands for packages that a file of the project names."""

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
"""Commands that install the packages of a project file."""


def installed(name: str, rest: Sequence[Argument]) -> list[Argument] | None:
    """Return the arguments of an install; None if the command installs nothing, `UNNAMED` if a file
    names the packages.
    """
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
                return UNNAMED
            if name in {"uvx", "npx"} or command[-1:] in (("run",), ("exec",), ("x",), ("dlx",)):
                wanted = wanted[: _first_operand(wanted) + 1]
            return [*rest[: len(rest) - len(words)], *wanted] if wanted else UNNAMED
    if name == "uv" and words[:1] == ["run"]:
        return _with_packages(words[1:])
    return None


def _first_operand(words: Sequence[Argument]) -> int:
    operands = (index for index, word in enumerate(words) if not (isinstance(word, str) and word.startswith("-")))
    return next(operands, len(words))


def _with_packages(words: Sequence[Argument]) -> list[Argument] | None:
    """Return the arguments of `uv run` that name packages or indexes."""
    found: list[Argument] = []
    for index, word in enumerate(words):
        if isinstance(word, str) and word.startswith(("--with", "--index", "--default-index", "--extra-index")):
            found.append(word)
            if "=" not in word and index + 1 < len(words):
                found.append(words[index + 1])
    return found or None


def _others(check: _InstallCheck, wanted: Sequence[Argument]) -> Iterator[Verdict]:
    """Check an install by a manager other than pip and uv: only the names of the packages."""
    for argument in wanted:
        if isinstance(argument, Unknown):
            yield check.ask(f"{_UNKNOWN_PACKAGE}: {argument.source}")
        elif re.match(r"-c$|--channel|--registry|--index|--source", argument):
            yield check.ask(f"option {argument} changes the source of packages")
        elif not argument.startswith("-"):
            name = re.split(r"[=<>!~]|(?<=.)@", argument)[0]
            yield from check.blocked(name)
            if "://" in argument or argument.startswith("git@"):
                yield check.ask(f"a package from a URL: {argument[:200]}")


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
