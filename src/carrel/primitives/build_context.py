"""The build context of an image: a directory in a tar file, without what `.dockerignore` names. Blocking."""

from __future__ import annotations

import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Sequence
from typing import IO

from carrel.errors import InvalidRequest

IGNORE_FILE = ".dockerignore"

IgnoreRule = tuple[re.Pattern[str], bool]
"""What a line of a `.dockerignore` matches, and whether it brings that back (`!`)."""


def read_rules(text: str) -> list[IgnoreRule]:
    """Read a `.dockerignore`."""
    rules: list[IgnoreRule] = []
    for number, line in enumerate(text.splitlines(), 1):
        pattern = line.strip()
        if not pattern or line.startswith("#"):
            continue
        back = pattern.startswith("!")
        clean = posixpath.normpath(pattern[back:].strip().lstrip("/"))
        if clean in {".", ""}:
            continue
        try:
            rules.append((re.compile(_translated(clean) + r"(?:/.*)?", re.DOTALL), back))
        except re.error:
            raise InvalidRequest(
                f"{IGNORE_FILE}, line {number}: '{pattern[:80]}' is no pattern", field="context"
            ) from None
    return rules


def _translated(pattern: str) -> str:
    found, index = "", 0
    while index < len(pattern):
        char = pattern[index]
        if pattern.startswith("**/", index):
            found, index = f"{found}(?:.*/)?", index + 3
        elif pattern.startswith("**", index):
            found, index = f"{found}.*", index + 2
        elif char == "[" and (end := pattern.find("]", index + 2)) > 0:
            found, index = f"{found}{pattern[index : end + 1]}", end + 1
        elif char == "\\" and index + 1 < len(pattern):
            found, index = f"{found}{re.escape(pattern[index + 1])}", index + 2
        else:
            found += {"*": "[^/]*", "?": "[^/]"}.get(char, re.escape(char))
            index += 1
    return found


def is_ignored(path: str, rules: Sequence[IgnoreRule]) -> bool:
    """Return whether a path is left out: the last line that matches it decides."""
    ignored = False
    for pattern, back in rules:
        if ignored == back and pattern.fullmatch(path):
            ignored = not back
    return ignored


def pack_context(directory: str, dockerfile: str, target: IO[bytes]) -> None:
    """Write a directory as a tar. The Dockerfile is always in it. The same files give the same bytes."""
    rules: list[IgnoreRule] = []
    if os.path.exists(ignore := os.path.join(directory, IGNORE_FILE)):
        with open(ignore, encoding="utf-8", errors="replace") as file:
            rules = read_rules(file.read())
    returns = any(back for _, back in rules)
    always = {posixpath.normpath(dockerfile), IGNORE_FILE}
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        waiting = [""]
        while waiting:
            below = waiting.pop()
            for name in sorted(os.listdir(os.path.join(directory, below)), reverse=True):
                path = posixpath.join(below, name)
                ignored = path not in always and is_ignored(path, rules)
                info = os.lstat(os.path.join(directory, path))
                if stat.S_ISDIR(info.st_mode) and (
                    not ignored or returns or any(each.startswith(f"{path}/") for each in always)
                ):
                    waiting.append(path)
                if not ignored:
                    _add(archive, directory, path, info)


def _add(archive: tarfile.TarFile, directory: str, path: str, info: os.stat_result) -> None:
    header = tarfile.TarInfo(path)
    header.mode, header.mtime = info.st_mode & 0o7777, 0
    if stat.S_ISDIR(info.st_mode):
        header.type = tarfile.DIRTYPE
        archive.addfile(header)
    elif stat.S_ISLNK(info.st_mode):
        header.type, header.linkname = tarfile.SYMTYPE, os.readlink(os.path.join(directory, path))
        archive.addfile(header)
    elif stat.S_ISREG(info.st_mode):
        with open(os.path.join(directory, path), "rb") as file:
            header.size = os.fstat(file.fileno()).st_size
            archive.addfile(header, file)
