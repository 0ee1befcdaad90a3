"""Reads a Dockerfile: text into stages, each a list of statements. Pure: no I/O.

What carrel does not support is refused with the number of its line, never ignored. Variables are expanded later (see
`build_steps`), because they depend on the image that a stage begins with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from carrel.errors import InvalidRequest
from carrel.images import here_documents
from carrel.images.dockerfile_words import WordError
from carrel.images.here_documents import HereDocument

LARGEST = 1 << 20
MOST_STATEMENTS = 5000
SCRATCH = "scratch"
_ARRAYS = frozenset({"ADD", "CMD", "COPY", "ENTRYPOINT", "RUN", "SHELL"})
_FLAGS = {
    "FROM": frozenset({"platform"}),
    "COPY": frozenset({"from", "chown", "chmod"}),
    "ADD": frozenset({"chown", "chmod"}),
}
_PLAIN = frozenset(
    {
        "ARG",
        "CMD",
        "ENTRYPOINT",
        "ENV",
        "EXPOSE",
        "LABEL",
        "MAINTAINER",
        "RUN",
        "SHELL",
        "STOPSIGNAL",
        "USER",
        "WORKDIR",
    }
)
_DIRECTIVE = re.compile(r"#\s*([A-Za-z]+)\s*=\s*(\S.*?)\s*")
_SYNTAX = re.compile(r"docker/dockerfile(?::1(?:\.\d+)*(?:-labs)?)?")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(\S*))?(?:\s+|$)")
_STAGE_NAME = re.compile(r"[a-z][a-z0-9_.-]*")


def refused(line: int, words: str, hint: str) -> InvalidRequest:
    """Return the error for a line of a Dockerfile."""
    return InvalidRequest(f"Dockerfile, line {line}: {words}", field="dockerfile", hint=hint)


@dataclass(frozen=True, slots=True)
class Statement:
    """One instruction. `array` has its words if they are written as a JSON array, else they are all in `rest`.

    `documents` are the here-documents that follow it.
    """

    line: int
    name: str
    flags: Mapping[str, str]
    rest: str
    array: tuple[str, ...] | None = None
    documents: tuple[HereDocument, ...] = ()

    @property
    def text(self) -> str:
        """The instruction in one line, for people."""
        flags = "".join(f"--{name}={value} " for name, value in self.flags.items())
        return f"{self.name} {flags}{self.rest}"


@dataclass(frozen=True, slots=True)
class BuildStage:
    """One `FROM` and what follows it. `base` and `platform` may contain variables; `name` is empty without `AS`."""

    line: int
    base: str
    platform: str
    name: str
    statements: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A whole Dockerfile. `arguments` are the `ARG` lines before the first stage, `escape` is its escape character."""

    arguments: tuple[Statement, ...]
    stages: tuple[BuildStage, ...]
    escape: str

    def last_of(self, target: str) -> int:
        """Return the number of the stage to build: the last one, or the one that `target` names."""
        if not target:
            return len(self.stages) - 1
        if (found := self.find(target, len(self.stages))) is None:
            named = ", ".join(stage.name for stage in self.stages if stage.name) or "none has a name"
            raise InvalidRequest(f"the Dockerfile has no stage '{target}'", field="target", hint=f"its stages: {named}")
        return found

    def find(self, name: str, before: int) -> int | None:
        """Return the number of the stage with this name or number, of those before stage `before`; else None."""
        for number in range(min(before, len(self.stages)) - 1, -1, -1):
            if self.stages[number].name and self.stages[number].name == name.lower():
                return number
        return int(name) if name.isascii() and name.isdigit() and len(name) < 5 and int(name) < before else None


def parse(text: str) -> Dockerfile:
    """Read a Dockerfile. Raises `InvalidRequest` with the number of the line."""
    if len(text) > LARGEST:
        raise InvalidRequest(
            f"the Dockerfile has more than {LARGEST} characters",
            field="dockerfile",
            hint="copy files with COPY instead",
        )
    lines = text.removeprefix("\ufeff").splitlines()
    escape, first = _directives(lines)
    arguments: list[Statement] = []
    stages: list[BuildStage] = []
    for statement in _statements(lines, first, escape):
        if statement.name == "FROM":
            stages.append(_stage(statement, stages))
        elif stages:
            last = stages[-1]
            stages[-1] = BuildStage(last.line, last.base, last.platform, last.name, (*last.statements, statement))
        elif statement.name == "ARG":
            arguments.append(statement)
        else:
            raise refused(statement.line, f"{statement.name} comes before the first FROM", "begin with a FROM line")
    if not stages:
        raise InvalidRequest("the Dockerfile has no FROM line", field="dockerfile", hint="begin with `FROM IMAGE`")
    return Dockerfile(tuple(arguments), tuple(stages), escape)


def _directives(lines: Sequence[str]) -> tuple[str, int]:
    """Return the escape character, and the index of the first line that is no directive."""
    escape, seen = "\\", set[str]()
    for index, line in enumerate(lines):
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None or (name := match[1].lower()) not in {"escape", "syntax", "check"} or name in seen:
            return escape, index
        seen.add(name)
        if name == "escape":
            if match[2] not in {"\\", "`"}:
                raise refused(index + 1, f"the escape character is '{match[2]}'", "use a backslash or a backtick")
            escape = match[2]
        elif name == "syntax" and not _SYNTAX.fullmatch(match[2]):
            raise refused(
                index + 1,
                f"the syntax '{match[2]}' is not supported",
                "remove the line: carrel reads Dockerfiles itself",
            )
    return escape, len(lines)


def _statements(lines: Sequence[str], first: int, escape: str) -> Iterator[Statement]:
    """Join lines that continue, leave out comments, and read each instruction with its here-documents."""
    count, parts, begun, index = 0, list[str](), 0, first
    while index < len(lines):
        line = lines[index]
        index += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue  # also in an instruction that continues
        begun = begun or index
        bare = line.rstrip()
        continues = bare.endswith(escape) and not bare.endswith(escape * 2)
        parts.append(bare[:-1] if continues else bare)
        if continues:
            continue
        statement = _read("".join(parts).strip(), begun)
        statement, index = _with_documents(statement, lines, index, escape)
        yield statement
        count, parts, begun = count + 1, [], 0
        if count > MOST_STATEMENTS:
            raise refused(index, f"more than {MOST_STATEMENTS} instructions", "build several images")
    if parts and (rest := "".join(parts).strip()):
        yield _read(rest, begun)


def _with_documents(statement: Statement, lines: Sequence[str], index: int, escape: str) -> tuple[Statement, int]:
    """Return an instruction with the here-documents that begin at this line, and the index of the line after them."""
    if statement.name not in {"RUN", "COPY", "ADD"} or statement.array is not None:
        return statement, index
    documents: list[HereDocument] = []
    try:
        for marker in here_documents.announced(statement.rest, escape):
            document, index = here_documents.take(marker, lines, index)
            documents.append(document)
    except WordError as error:
        raise refused(
            statement.line, str(error), "write <<EOF with blanks around it, and a line EOF after the text"
        ) from None
    if documents and statement.name == "ADD":
        raise refused(statement.line, "ADD of a here-document is not supported", "write COPY")
    return replace(statement, documents=tuple(documents)), index


def _read(text: str, line: int) -> Statement:
    word, *more = text.split(None, 1)
    name, rest = word.upper(), more[0].strip() if more else ""
    known = _FLAGS.get(name, frozenset())
    if name not in _PLAIN and name not in _FLAGS:
        raise refused(line, f"{word[:40]} is not supported", "remove the line, or build this image elsewhere")
    flags: dict[str, str] = {}
    while match := _FLAG.match(rest) if name in _FLAGS or name == "RUN" else None:
        if match[1] not in known or match[2] is None:
            raise refused(line, f"{name} --{match[1]} is not supported", "remove the option")
        flags[match[1]] = match[2]
        rest = rest[match.end() :]
    if not rest:
        raise refused(line, f"{name} needs an argument", f"write what {name} is for, or remove the line")
    array = _array(rest) if name in _ARRAYS else None
    if name == "SHELL" and not array:
        raise refused(line, "SHELL needs a JSON array", 'write SHELL ["/bin/bash", "-c"]')
    return Statement(line, name, flags, rest, array)


def _array(rest: str) -> tuple[str, ...] | None:
    if not rest.startswith("["):
        return None
    try:
        found = json.loads(rest)
    except (ValueError, RecursionError):
        return None  # a shell text, such as `[ -f x ] && y`
    if isinstance(found, list) and all(isinstance(each, str) for each in found):
        return tuple(found)
    return None


def _stage(statement: Statement, before: Sequence[BuildStage]) -> BuildStage:
    words = statement.rest.split()
    if len(words) not in {1, 3} or (len(words) == 3 and words[1].upper() != "AS"):
        raise refused(statement.line, "FROM is not understood", "write `FROM IMAGE` or `FROM IMAGE AS NAME`")
    name = words[2].lower() if len(words) == 3 else ""
    if name and not _STAGE_NAME.fullmatch(name):
        raise refused(
            statement.line, f"'{words[2]}' cannot be the name of a stage", "begin with a letter; use a-z 0-9 _ . -"
        )
    if name and any(each.name == name for each in before):
        raise refused(statement.line, f"there is already a stage '{name}'", "give each stage a name of its own")
    return BuildStage(statement.line, words[0], statement.flags.get("platform", ""), name, ())
