"""Masks: the paths and programs of its root that a sandbox must not use. A plain value, its validation and encoding.

`programs` finds the files of a program, `mask_mounts` mounts over them.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile

from carrel.errors import InvalidRequest, TooLarge, Unsupported
from carrel.isolation import inside

MOST = 2000
LARGEST_REFUSAL = 4096
LARGEST = 4 * 1024 * 1024
LONGEST_PATH = 4095
"""The longest path that the kernel accepts in one call, in bytes."""
_LONGEST_NAME = 255

_EMPTY = ("/dev/shm", inside.SECRETS, "/tmp", inside.HOME)
_THE_AGENTS_OWN = (*_EMPTY, "/dev", "/proc", inside.WORKSPACE)
_SPECIAL, _CHARACTER = re.compile(r"[*?\\]"), re.compile(r"\\(.)|(.)", re.DOTALL)
_FLEETING = ("self", "thread-self", "net", "mounts")


@dataclass(frozen=True)
class Masks:
    """Everything that is denied to a sandbox as long as it lives.

    `programs` are names, searched on the default PATH, or absolute paths. `hidden` are absolute paths or patterns (`*`
    and `?` inside a name, `**` for any number of names, a backslash before a literal character); files that match when
    the sandbox starts cannot be read. `writable`, if given, are the only paths of the workspace that can be written: an
    existing path, or a directory as `path/**`, which is created if it is missing. `readonly` are paths or patterns of
    the workspace that are applied to what exists when the sandbox starts: files that cannot be written, directories
    that cannot be moved or deleted, and as `path/**` directories with all their contents. `refusal` is the text that
    a denied program prints.
    """

    programs: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    writable: tuple[str, ...] | None = None
    refusal: Mapping[str, str] = field(default_factory=dict)
    readonly: tuple[str, ...] = ()

    def text(self, program: str) -> str:
        """Return the line that a masked program prints."""
        refusal = self.refusal.get(program)
        return _plain_refusal(program) if refusal is None else refusal.rstrip("\n") + "\n"

    def of_root(self) -> Masks | None:
        """Return those masks that concern files outside of the workspace; None if there is none."""
        hidden = tuple(pattern for pattern in self.hidden if not _within(_fixed_path(pattern), inside.WORKSPACE))
        if not self.programs and not hidden:
            return None
        return Masks(programs=self.programs, hidden=hidden, refusal=self.refusal)

    def of_workspace(self) -> Masks | None:
        """Return those masks that may concern files of the workspace; None if there is none."""
        hidden = tuple(
            pattern
            for pattern in self.hidden
            if _within(fixed := _fixed_path(pattern), inside.WORKSPACE) or fixed in {"/", inside.WORKSPACE}
        )
        if not hidden and self.writable is None and not self.readonly:
            return None
        return Masks(hidden=hidden, writable=self.writable, readonly=self.readonly)


Part = str | Callable[[str], object] | None
"""One part of a pattern: a name, a test for names, or None for any number of names."""


def check(masks: Masks) -> None:
    """Raise for masks that are malformed (`InvalidRequest`), too many (`TooLarge`) or impossible (`Unsupported`)."""
    count = len(masks.programs) + len(masks.hidden) + len(masks.writable or ()) + len(masks.readonly)
    if count > MOST:
        raise TooLarge(f"{count} masks are more than {MOST}", field="masks", hint="use patterns, or fewer rules")
    for program in masks.programs:
        check_program(program)
    for pattern in masks.hidden:
        _absolute(pattern, "masks.hidden")
        if (reason := unmaskable(pattern)) is not None:
            raise Unsupported(f"{pattern} cannot be hidden: {reason}", field="masks.hidden")
    for place in masks.writable or ():
        _absolute(place, "masks.writable")
        if not _within(place, inside.WORKSPACE):
            raise InvalidRequest(f"{place} is not in the workspace", field="masks.writable")
        if "*" in (path := place.removesuffix("/**")) or "?" in path:
            raise Unsupported(
                f"{place} is a pattern, and only a file or directory can be mounted writable",
                field="masks.writable",
                hint="name the directory the pattern lies in, as `directory/**`",
            )
    for pattern in masks.readonly:
        _absolute(pattern, "masks.readonly")
        if not pattern.startswith(f"{inside.WORKSPACE}/") or pattern == f"{inside.WORKSPACE}/**":
            raise InvalidRequest(f"{pattern} is not in the workspace", field="masks.readonly")
    for program, text in masks.refusal.items():
        if program not in masks.programs:
            raise InvalidRequest(f"a refusal for {program!r}, which is not masked", field="masks.refusal")
        if _size(text, "masks.refusal") > LARGEST_REFUSAL:
            raise TooLarge(f"the refusal of {program!r} has more than {LARGEST_REFUSAL} bytes", field="masks.refusal")


def check_program(program: str) -> None:
    """Raise for an invalid name (`InvalidRequest`) or a path that the agent can write (`Unsupported`)."""
    if "/" not in program:
        _name(program, "masks.programs")
        return
    _absolute(program, "masks.programs")
    if any(_within(program, place) for place in _THE_AGENTS_OWN):
        raise Unsupported(
            f"{program} lies where the agent can write, and cannot be masked",
            field="masks.programs",
            hint="mask programs of the sandbox's root, by name",
        )


def is_possible(path: str) -> bool:
    """Whether a file can exist at an absolute path or pattern: no name in it is too long."""
    try:
        _absolute(path, "masks")
    except InvalidRequest:
        return False
    return True


def unmaskable(pattern: str) -> str | None:
    """Return why a path or pattern cannot be hidden, or None if it can.

    These cannot: the root itself, files per process in `/proc`, devices by pattern, and memory file systems, which are
    empty when a sandbox starts.
    """
    parts = split(pattern)
    fixed = _fixed_path(pattern)
    exact = len(_fixed(parts)) == len(parts)
    if not parts or parts == (None,):
        return "it is the whole root"
    if _within(fixed, "/proc"):
        names = _fixed(parts)[1:]
        if not exact or not names or names[0].isdigit() or names[0] in _FLEETING:
            return "/proc shows a sandbox nothing but its own processes, and they come and go; name single files of it"
    for place in _EMPTY:
        if _within(fixed, place):
            return f"{place} is empty when a sandbox starts, and only what exists then can be hidden"
    if _within(fixed, "/dev") and (not exact or fixed == "/dev"):
        return "a sandbox needs its few devices; name single ones"
    return None


@lru_cache(maxsize=1024)  # every start on a folder reads the same hundred patterns, several times
def split(pattern: str) -> tuple[Part, ...]:
    if not _SPECIAL.search(pattern):
        return tuple(name for name in pattern.split("/") if name)
    parts: list[Part] = []
    for chars in _names(pattern):
        if chars == [("*", False), ("*", False)]:
            if parts[-1:] != [None]:
                parts.append(None)
        elif any(char in "*?" and not quoted for char, quoted in chars):
            parts.append(_test(chars))
        else:
            parts.append("".join(char for char, _ in chars))
    return tuple(parts)


def pack(masks: Masks) -> int:
    """Return masks as a file in memory, because they may not fit into a message to the zygote."""
    check(masks)
    body = {
        "programs": masks.programs,
        "hidden": masks.hidden,
        "writable": masks.writable,
        "refusal": dict(masks.refusal),
        "readonly": masks.readonly,
    }
    return in_memory(body)


def in_memory(body: object) -> int:
    """Return the descriptor of a file in memory with a JSON value."""
    written = json.dumps(body).encode()
    if len(written) > LARGEST:
        raise TooLarge(f"the masks take more than {LARGEST} bytes", field="masks", hint="use shorter refusals")
    descriptor = os.memfd_create("masks")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(written)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def content(descriptor: int) -> bytes:
    """Return the content of a file that `pack` made."""
    size = os.fstat(descriptor).st_size
    if size > LARGEST:
        raise TooLarge(f"the masks take more than {LARGEST} bytes", field="masks")
    return os.pread(descriptor, size, 0)


def unpack(packed: bytes) -> Masks:
    try:
        body = json.loads(packed)
        writable = body["writable"]
        masks = Masks(
            _texts(body["programs"]),
            _texts(body["hidden"]),
            None if writable is None else _texts(writable),
            {_text(program): _text(refusal) for program, refusal in body["refusal"].items()},
            _texts(body["readonly"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequest("the masks are malformed", field="masks") from error
    check(masks)
    return masks


def _plain_refusal(program: str) -> str:
    name = os.path.basename(program)
    refusal = {
        "code": "denied_by_policy",
        "operation": "shell",
        "rule": None,
        "source": None,
        "reason": f"{name} is denied in this sandbox",
        "retry": False,
        "approval": None,
        "hint": None,
    }
    return json.dumps(refusal) + "\n"


def _names(pattern: str) -> Iterator[list[tuple[str, bool]]]:
    """Yield the characters of each name, with whether they are quoted."""
    for name in pattern.split("/"):
        if name:
            yield [(quoted or plain, bool(quoted)) for quoted, plain in _CHARACTER.findall(name)]


def _test(chars: list[tuple[str, bool]]) -> Callable[[str], object]:
    wild = [index for index, (char, quoted) in enumerate(chars) if char in "*?" and not quoted]
    if len(wild) == 1 and chars[wild[0]][0] == "*":  # nearly all patterns; cheaper than a regular expression
        head, tail = ("".join(char for char, _ in part) for part in (chars[: wild[0]], chars[wild[0] + 1 :]))
        least = len(head) + len(tail)
        return lambda name: len(name) >= least and name.startswith(head) and name.endswith(tail)
    escaped = (f"[{char}]" if char == "[" or (quoted and char in "*?") else char for char, quoted in chars)
    return re.compile(fnmatch.translate("".join(escaped))).match


def _fixed_path(pattern: str) -> str:
    """Return the path up to the first part of a pattern that is not a plain name."""
    return "/" + "/".join(_fixed(split(pattern)))


def _fixed(parts: tuple[Part, ...]) -> list[str]:
    return [part for part in takewhile(lambda part: isinstance(part, str), parts) if isinstance(part, str)]


def _within(path: str, place: str) -> bool:
    return path == place or path.startswith(f"{place}/")


def _absolute(path: str, where: str) -> None:
    if not path.startswith("/"):
        raise InvalidRequest(f"{path!r} is not an absolute path", field=where)
    if _size(path, where) > LONGEST_PATH:
        raise InvalidRequest(f"a path of more than {LONGEST_PATH} bytes", field=where)
    if path != "/":
        for name in path[1:].split("/"):
            _name(name.replace("\\", ""), where)


def _name(name: str, where: str) -> None:
    if name in {"", ".", ".."} or "\0" in name or _size(name, where) > _LONGEST_NAME:
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:40]}…"
        raise InvalidRequest(
            f"{shown!r} cannot be the name of a file", field=where, hint="write paths without . and .."
        )


def _size(text: str, where: str) -> int:
    try:
        return len(os.fsencode(text))
    except UnicodeEncodeError:  # half a surrogate pair
        raise InvalidRequest(f"{text[:40]!r} is not text", field=where) from None


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return tuple(_text(each) for each in value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value
