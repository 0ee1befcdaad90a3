"""The user that an image names (`USER`), found as container engines find it. The files of an image are hostile: they
are opened beneath its root, and a bounded part of them is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from carrel.errors import Unsupported
from carrel.primitives import libc

LARGEST = 1024 * 1024
MOST = 2**31 - 1
"""The largest number of a user or group in an image."""


@dataclass(frozen=True, slots=True)
class ImageUser:
    """A user of an image: its numbers, its name or an empty text, its home or `/`."""

    uid: int
    gid: int
    name: str
    home: str


def find(directory: str, user: str) -> ImageUser:
    """Return the user for `USER` of an image: `name`, `name:group`, `uid`, `uid:gid`; empty means root.

    A number needs no entry in the image's `/etc/passwd`, a name does. Raises `Unsupported` without it. Blocking.
    """
    wanted, _, group = user.partition(":")
    wanted = wanted or "0"
    if wanted == "0" and not group:
        return ImageUser(0, 0, "root", "/root")
    number = _number(wanted)
    # name:password:uid:gid:…
    found = next((row for row in _rows(directory, "etc/passwd", 4) if _is(row, wanted, number)), None)
    if number is None and found is None:
        raise _missing("user", wanted, "/etc/passwd")
    uid = number if number is not None else _number(found[2]) if found else None
    gid = _number(found[3]) if found else 0
    if group:
        gid = _number(group)
        if gid is None:
            row = next((row for row in _rows(directory, "etc/group", 3) if row[0] == group), None)
            if row is None:
                raise _missing("group", group, "/etc/group")
            gid = _number(row[2])
    if uid is None or gid is None:
        raise Unsupported(
            f"the numbers of user '{user[:64]}' in this image are not from 0 to {MOST}",
            field="image",
            hint="correct /etc/passwd and /etc/group in the image, or set another USER",
        )
    home = found[5] if found and len(found) > 5 and found[5].startswith("/") and found[5].isprintable() else "/"
    return ImageUser(uid, gid, found[0] if found else "", home)


def _is(row: list[str], wanted: str, number: int | None) -> bool:
    return row[0] == wanted if number is None else _number(row[2]) == number


def _number(text: str) -> int | None:
    digits = text.isascii() and text.isdigit() and len(text) <= 10
    return int(text) if digits and int(text) <= MOST else None


def _missing(kind: str, name: str, path: str) -> Unsupported:
    return Unsupported(
        f"the image wants to run as {kind} '{name[:64]}', which its {path} does not have",
        field="image",
        hint=f"add the {kind} in the image, or set USER to a number",
    )


def _rows(directory: str, path: str, fields: int) -> Iterator[list[str]]:
    """Yield the lines of a file that have at least this many fields; none if there is no such file."""
    for line in _content(directory, path).splitlines():
        row = line.split(":", 7)
        if len(row) >= fields and row[0]:
            yield row


def _content(directory: str, path: str) -> str:
    root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        file = libc.open_in_root(root, os.fsencode(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return ""
    finally:
        os.close(root)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return ""
        return os.pread(file, LARGEST, 0).decode(errors="replace")
    finally:
        os.close(file)
