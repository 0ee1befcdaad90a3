"""The steps of one stage of a build: statements of a Dockerfile whose variables are expanded, on a base image.

Pure: no I/O. A step that changes files is yielded; everything else changes the configuration of the image that is made.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from carrel.errors import InvalidRequest
from carrel.images.dockerfile import BuildStage, Dockerfile, Statement, refused
from carrel.images.dockerfile_words import WordError, expand, expand_text, pairs, split
from carrel.images.documents import ImageConfig, ImagePlatform
from carrel.images.here_documents import HereDocument, shell_text

T = TypeVar("T")
SHELL = ("/bin/sh", "-c")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The PATH of an image that sets none. Builds do not use the package launchers that carrel gives to agents."""
HIDDEN = ("/dev", "/envs", "/etc/carrel", "/home/agent", "/proc", "/run/secrets", "/workspace")
MOST_VARIABLES = 1000
LARGEST_ENVIRONMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class RunStep:
    """A command that changes files."""

    line: int
    text: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    working_directory: str
    user: str


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Files that are copied from the build context, or from another stage or image (`origin`).

    `target` is absolute, and ends with `/` if it is a directory for sure. `unpack` unpacks local archives (ADD).
    """

    line: int
    text: str
    origin: str
    sources: tuple[str, ...]
    target: str
    owner: str
    mode: int | None
    unpack: bool
    texts: tuple[tuple[str, str], ...] = ()
    """Names and contents of files that are in the Dockerfile itself."""


@dataclass(frozen=True, slots=True)
class DirectoryStep:
    """A directory that must exist."""

    line: int
    text: str
    path: str
    user: str


BuildStep = RunStep | CopyStep | DirectoryStep


def predefined(platform: ImagePlatform) -> dict[str, str]:
    """Return the arguments that every Dockerfile may declare without a value."""
    found: dict[str, str] = {}
    for kind in ("BUILD", "TARGET"):
        found |= {f"{kind}PLATFORM": str(platform), f"{kind}OS": platform.os, f"{kind}ARCH": platform.architecture}
        found[f"{kind}VARIANT"] = platform.variant
    return found


class BuildArguments:
    """The arguments of a build: those that the caller gave, and the `ARG` lines before the first stage."""

    def __init__(self, file: Dockerfile, given: Mapping[str, str], platform: ImagePlatform):
        statements = (*file.arguments, *(each for stage in file.stages for each in stage.statements))
        declared: set[str] = set()
        for statement in statements:
            if statement.name == "ARG":
                declared |= {name for name, _ in _declared(statement, file.escape)}
        if unknown := sorted(set(given) - declared):
            raise InvalidRequest(
                f"the Dockerfile declares no argument {', '.join(unknown[:10])}",
                field="build_args",
                hint="add an ARG line, or leave the argument out",
            )
        self.given = dict(given)
        self.predefined = predefined(platform)
        self.first: dict[str, str] = {}
        """The values for FROM lines, and for stages that declare the same name without a value."""
        for statement in file.arguments:
            for name, default in _declared(statement, file.escape):
                value = None if default is None else _expanded(statement, default, self.first, file.escape)
                found = self.given.get(name, value if value is not None else self.predefined.get(name))
                if found is not None:
                    self.first[name] = found

    def base_of(self, stage: BuildStage, escape: str) -> tuple[str, str]:
        """Return the image and the platform that a stage begins with."""
        known = {**self.predefined, **self.first}
        line = Statement(stage.line, "FROM", {}, stage.base)
        base = _expanded(line, stage.base, known, escape)
        if not base:
            raise refused(stage.line, f"FROM {stage.base} names no image", "give the argument a value")
        return base, _expanded(line, stage.platform, known, escape)


class StageEvaluation:
    """Walks the statements of a stage on a base. `config` is the configuration of the image so far."""

    def __init__(self, stage: BuildStage, base: ImageConfig, arguments: BuildArguments, escape: str):
        self.config = base
        self._stage = stage
        self._arguments = arguments
        self._escape = escape
        self._values: dict[str, str] = {}
        self._has_command = False
        self._changes: dict[str, Callable[[Statement], None]] = {
            "ARG": self._arg,
            "CMD": self._cmd,
            "ENTRYPOINT": self._entry_point,
            "ENV": self._env,
            "EXPOSE": self._expose,
            "LABEL": self._label,
            "MAINTAINER": self._maintainer,
            "SHELL": self._shell,
            "STOPSIGNAL": self._stop_signal,
            "USER": self._user,
        }

    def steps(self) -> Iterator[BuildStep]:
        """Yield the steps in order. After each, `config` is that of the image with the step."""
        for statement in self._stage.statements:
            if statement.name == "RUN":
                yield self._run(statement)
            elif statement.name in {"COPY", "ADD"}:
                yield self._copy(statement)
            elif statement.name == "WORKDIR":
                yield self._workdir(statement)
            else:
                self._changes[statement.name](statement)

    # steps

    def _run(self, statement: Statement) -> RunStep:
        return RunStep(
            statement.line,
            statement.text,
            self._command(statement),
            {"PATH": DEFAULT_PATH, **self._values, **self.config.environment},
            self.config.working_directory or "/",
            self.config.user,
        )

    def _copy(self, statement: Statement) -> CopyStep:
        words = statement.array if statement.array is not None else statement.rest.split()
        texts = tuple((each.name, self._text(statement, each)) for each in statement.documents)
        markers = {each.marker for each in statement.documents}
        *sources, target = [self._expand(statement, word) for word in words if word not in markers] or [""]
        if not (sources or texts) or not target or not all(sources):
            raise refused(statement.line, f"{statement.name} needs a source and a target", "write COPY FROM… TO")
        for source in sources if statement.name == "ADD" else []:
            if "://" in source or source.startswith("git@"):
                raise refused(statement.line, "ADD from the network is not supported", "download it in a RUN line")
        several = len(sources) + len(texts) > 1
        directory = target.endswith("/") or target in {".", ".."} or several
        if several and not target.endswith("/") and target not in {".", ".."}:
            raise refused(statement.line, "several sources need a directory as target", "end the target with /")
        path = self._absolute(target)
        _check_shown(statement, path)
        mode = self._expand(statement, statement.flags.get("chmod", ""))
        if mode and not (len(mode) <= 4 and set(mode) <= set("01234567")):
            raise refused(statement.line, f"--chmod={mode} is not an octal mode", "write --chmod=755")
        return CopyStep(
            statement.line,
            statement.text,
            self._expand(statement, statement.flags.get("from", "")),
            tuple(sources),
            path if not directory or path == "/" else f"{path}/",
            self._expand(statement, statement.flags.get("chown", "")),
            int(mode, 8) if mode else None,
            statement.name == "ADD",
            texts,
        )

    def _text(self, statement: Statement, document: HereDocument) -> str:
        if not document.expands:
            return document.text
        return _read(statement, lambda: expand_text(document.text, self._variables(), self._escape))

    def _workdir(self, statement: Statement) -> DirectoryStep:
        path = self._absolute(self._expand(statement, statement.rest))
        _check_shown(statement, path)
        self.config = replace(self.config, working_directory=path)
        return DirectoryStep(statement.line, statement.text, path, self.config.user)

    # configuration

    def _arg(self, statement: Statement) -> None:
        for name, default in _declared(statement, self._escape):
            value = self._arguments.given.get(name)
            if value is None and default is not None:
                value = self._expand(statement, default)
            if value is None:
                value = self._arguments.first.get(name, self._arguments.predefined.get(name))
            if value is not None:
                self._values[name] = value
        self._check_size(statement)

    def _env(self, statement: Statement) -> None:
        self.config = replace(self.config, environment={**self.config.environment, **self._pairs(statement)})
        self._check_size(statement)

    def _label(self, statement: Statement) -> None:
        self.config = replace(self.config, labels={**self.config.labels, **self._pairs(statement)})
        self._check_size(statement)

    def _cmd(self, statement: Statement) -> None:
        self.config = replace(self.config, command=self._command(statement))
        self._has_command = True

    def _entry_point(self, statement: Statement) -> None:
        # The command of the base belongs to the entry point of the base.
        command = self.config.command if self._has_command else ()
        self.config = replace(self.config, entry_point=self._command(statement), command=command)

    def _expose(self, statement: Statement) -> None:
        ports = list(self.config.exposed_ports)
        for word in statement.rest.split():
            port, _, protocol = self._expand(statement, word).partition("/")
            first, _, last = port.partition("-")
            numbers = [number for number in (first, last) if number]
            if (
                not first
                or protocol not in {"", "tcp", "udp"}
                or not all(number.isascii() and number.isdigit() and 0 < int(number[:6]) < 65536 for number in numbers)
            ):
                raise refused(statement.line, f"EXPOSE {word[:80]} is no port", "write EXPOSE 8080 or 8080/udp")
            ports.append(f"{port}/{protocol or 'tcp'}")
        self.config = replace(self.config, exposed_ports=tuple(dict.fromkeys(ports)))

    def _maintainer(self, statement: Statement) -> None:
        self.config = replace(self.config, labels={**self.config.labels, "maintainer": statement.rest})

    def _shell(self, statement: Statement) -> None:
        self.config = replace(self.config, shell=statement.array or SHELL)

    def _stop_signal(self, statement: Statement) -> None:
        self.config = replace(self.config, stop_signal=self._expand(statement, statement.rest))

    def _user(self, statement: Statement) -> None:
        self.config = replace(self.config, user=self._expand(statement, statement.rest))

    # words

    def _command(self, statement: Statement) -> tuple[str, ...]:
        if statement.array is not None:
            if not statement.array and statement.name == "RUN":
                raise refused(statement.line, "RUN has no command", 'write RUN ["program", "argument"]')
            return statement.array
        text = shell_text(statement.rest, statement.documents) if statement.documents else statement.rest
        return (*(self.config.shell or SHELL), text)

    def _variables(self) -> dict[str, str]:
        return {**self._values, **self.config.environment}

    def _expand(self, statement: Statement, word: str) -> str:
        return _expanded(statement, word, self._variables(), self._escape)

    def _pairs(self, statement: Statement) -> dict[str, str]:
        known = self._variables()  # `ENV a=1 b=$a` uses the value from before the line
        return {
            _expanded(statement, name, known, self._escape): _expanded(statement, value, known, self._escape)
            for name, value in _read(statement, lambda: pairs(statement.rest, self._escape))
        }

    def _absolute(self, path: str) -> str:
        joined = posixpath.join(self.config.working_directory or "/", path)
        return "/" + posixpath.normpath(joined).lstrip("/")

    def _check_size(self, statement: Statement) -> None:
        for each in (self._values, self.config.environment, self.config.labels):
            if len(each) > MOST_VARIABLES or sum(map(len, (*each, *each.values()))) > LARGEST_ENVIRONMENT:
                raise refused(
                    statement.line, "the variables or labels are too large together", "use fewer or shorter ones"
                )


def _check_shown(statement: Statement, path: str) -> None:
    """Refuse a place that every sandbox mounts something on: the files of the image there would be seen nowhere."""
    for place in HIDDEN:
        if f"{path}/".startswith(f"{place}/"):
            raise refused(
                statement.line, f"sandboxes have directories of their own at {place}", "choose another path, like /app"
            )


def _declared(statement: Statement, escape: str) -> list[tuple[str, str | None]]:
    """Return the names that an ARG line declares, with their defaults."""
    found: list[tuple[str, str | None]] = []
    for word in _read(statement, lambda: split(statement.rest, escape)):
        name, sign, default = word.partition("=")
        if not name.replace("_", "a").isalnum() or name[0].isdigit() or not name.isascii():
            raise refused(
                statement.line, f"'{name[:80]}' cannot be the name of an argument", "use letters, digits and _"
            )
        found.append((name, default if sign else None))
    return found


def _expanded(statement: Statement, word: str, variables: Mapping[str, str], escape: str) -> str:
    return _read(statement, lambda: expand(word, variables, escape))


def _read(statement: Statement, read: Callable[[], T]) -> T:
    try:
        return read()
    except WordError as error:
        raise refused(statement.line, str(error), "see the quotes and variables of the line") from None
