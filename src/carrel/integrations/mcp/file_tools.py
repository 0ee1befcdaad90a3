"""The tools for files: read, write, edit, list, search."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import Field

from carrel.client import AsyncSandbox
from carrel.errors import InvalidRequest, TooLarge
from carrel.integrations.mcp.answers import Image, ToolAnswer
from carrel.integrations.mcp.calls import Parameters, Tool, ToolCall
from carrel.integrations.mcp.output import LIMIT, boundary
from carrel.models import FileInfo, FileKind
from carrel.models.base import NoNul, WorkspacePath
from carrel.models.files import MOST_LISTED

MOST_IMAGE_BYTES = 500_000
MOST_SCANNED = 64 * 1024 * 1024
SEARCH_S = 60.0
SEARCH_BYTES = 1024 * 1024
LONGEST_LINE = 500

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
_PATH = "Path relative to the workspace; it cannot leave it."
_FILE = {
    "path": {"type": "string"},
    "kind": {"type": "string", "enum": [*FileKind]},
    "size": {"type": "integer", "description": "bytes"},
    "mode": {"type": "string", "description": "octal permissions"},
    "modified_at": {"type": "string"},
}


class ReadFile(Parameters):
    """Parameters of `read_file`."""

    path: WorkspacePath = Field(description=_PATH)
    first_line: int = Field(default=1, ge=1, le=10**9, description="The line to start with; the first is 1.")
    max_lines: int | None = Field(default=None, ge=1, le=10**9, description="At most so many lines.")
    offset: int | None = Field(
        default=None,
        ge=0,
        le=10**15,
        description="Start at this byte instead of a line: goes on where an answer ended.",
    )


class WriteFile(Parameters):
    """Parameters of `write_file`."""

    path: WorkspacePath = Field(description=_PATH + " Missing directories are made.")
    content: str = Field(description="The whole new content.")
    encoding: Literal["utf-8", "base64"] = Field(default="utf-8", description="base64 for bytes that are no text.")
    executable: bool = Field(default=False, description="Make it executable.")
    overwrite: bool = Field(default=True, description="false: fail if there is a file already.")


class EditFile(Parameters):
    """Parameters of `edit_file`."""

    path: WorkspacePath = Field(description=_PATH)
    old: str = Field(
        min_length=1,
        description="The text to replace, exactly as it is in the file, with enough around it to be unique.",
    )
    new: str = Field(description="What takes its place; empty removes it.")
    replace_all: bool = Field(default=False, description="Replace every place, not exactly one.")


class ListFiles(Parameters):
    """Parameters of `list_files`."""

    path: WorkspacePath = Field(default=".", description=_PATH)
    recursive: bool = Field(default=False, description="Also what is in its directories.")
    glob: str | None = Field(
        default=None, max_length=1000, description="Only names like this, such as *.py; looks into all directories."
    )
    limit: int = Field(default=500, ge=1, le=5000, description="At most so many entries.")


class SearchFiles(Parameters):
    """Parameters of `search_files`."""

    pattern: NoNul = Field(min_length=1, max_length=10_000, description="What to look for: a regular expression (ERE).")
    literal: bool = Field(default=False, description="Take the pattern as plain text.")
    path: WorkspacePath = Field(default=".", description="Where: a directory or a file.")
    glob: NoNul | None = Field(default=None, min_length=1, max_length=1000, description="Only in files like *.py.")
    ignore_case: bool = Field(default=False, description="Upper and lower case are the same.")
    max_matches: int = Field(default=200, ge=1, le=2000, description="At most so many lines.")


async def _read(call: ToolCall, given: ReadFile) -> ToolAnswer:
    by_line = given.offset is None and (given.first_line > 1 or given.max_lines is not None)

    async def read(box: AsyncSandbox) -> _Part:
        if by_line:
            return await _lines(box, given)
        start = given.offset or 0
        part = _Part(start, await box.files.read(given.path, offset=start, length=LIMIT + 4))
        if start == 0 and _image(part.data) is not None:
            part.data = await box.files.read(given.path, length=MOST_IMAGE_BYTES + 1)
        return part

    part = await call.do(read)
    media_type = _image(part.data) if part.start == 0 and not by_line else None
    if media_type is not None:
        if len(part.data) > MOST_IMAGE_BYTES:
            raise TooLarge(
                f"'{given.path}' is an image of more than {MOST_IMAGE_BYTES} bytes",
                field="path",
                hint="make a smaller copy of it, and read that",
            )
        return ToolAnswer("", images=[Image(base64.b64encode(part.data).decode(), media_type)])
    if len(part.data) > LIMIT:
        part.data, part.more = part.data[: boundary(part.data, LIMIT)], True
    after = part.start + len(part.data)
    note = f"[there is more: read_file with offset {after} goes on]" if part.more else None
    return ToolAnswer(_text(given.path, part.data), note=note)


@dataclass
class _Part:
    """A part of a file, and whether the file goes on."""

    start: int
    data: bytes
    more: bool = False


async def _lines(box: AsyncSandbox, given: ReadFile) -> _Part:
    """Find the requested lines by reading the file from its start."""
    skip, start, held = given.first_line - 1, 0, b""
    left = given.max_lines
    async with aclosing(box.files.stream(given.path)) as pieces:
        async for piece in pieces:
            data = piece
            while skip and (at := data.find(b"\n")) >= 0:
                data, start, skip = data[at + 1 :], start + at + 1, skip - 1
            if skip:
                start += len(data)
                if start > MOST_SCANNED:
                    raise TooLarge(
                        f"line {given.first_line} is beyond the first {MOST_SCANNED} bytes of '{given.path}'",
                        field="first_line",
                        hint="use offset, or run_command with sed",
                    )
                continue
            held += data
            if left is not None:
                end = _after_lines(held, left)
                if end is not None:
                    return _Part(start, held[:end])
            if len(held) > LIMIT:
                return _Part(start, held)
    if skip:
        raise InvalidRequest(
            f"'{given.path}' has no line {given.first_line}", field="first_line", hint="start at an earlier line"
        )
    return _Part(start, held)


def _after_lines(data: bytes, count: int) -> int | None:
    """Return where the first `count` lines end; None when there are fewer."""
    at = 0
    for _ in range(count):
        found = data.find(b"\n", at)
        if found < 0:
            return None
        at = found + 1
    return at


def _image(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _MAGIC if data.startswith(magic)), None)


def _text(path: str, data: bytes) -> str:
    try:
        if b"\0" not in data:
            return data.decode()
    except UnicodeDecodeError:
        pass
    raise InvalidRequest(
        f"'{path}' is not UTF-8 text", field="path", hint="look at it with run_command: file, xxd or strings"
    )


async def _write(call: ToolCall, given: WriteFile) -> ToolAnswer:
    try:
        data = base64.b64decode(given.content, validate=True) if given.encoding == "base64" else given.content.encode()
    except (binascii.Error, UnicodeEncodeError):
        raise InvalidRequest(
            f"the content is not {given.encoding}", field="content", hint="send text, or bytes as base64"
        ) from None

    mode = 0o755 if given.executable else None
    info = await call.do(lambda box: box.files.write(given.path, data, mode=mode, exclusive=not given.overwrite))
    return ToolAnswer(f"Wrote {info.path}: {info.size} bytes.", _described(info))


async def _edit(call: ToolCall, given: EditFile) -> ToolAnswer:
    result = await call.do(lambda box: box.files.edit(given.path, given.old, given.new, replace_all=given.replace_all))
    places = "1 place" if result.replaced == 1 else f"{result.replaced} places"
    return ToolAnswer(
        f"Replaced {places} in {result.file.path}.", {"replaced": result.replaced, **_described(result.file)}
    )


async def _list(call: ToolCall, given: ListFiles) -> ToolAnswer:
    recursive = given.recursive or given.glob is not None
    wanted = MOST_LISTED if given.glob is not None else given.limit

    found = await call.do(lambda box: box.files.list(given.path, recursive=recursive, limit=wanted))
    items = [each for each in found if given.glob is None or _like(each.path, given.glob)]
    truncated = found.truncated or len(items) > given.limit
    shown = items[: given.limit]
    lines = _fitting(_line(info) for info in shown)
    truncated = truncated or len(lines) < len(shown)
    value = {"entries": [_described(each) for each in items[: len(lines)]], "truncated": truncated}
    text = "\n".join(lines) or "[nothing]"
    note = "[there is more: list a directory of it, or give a glob]" if truncated else None
    return ToolAnswer(text, value, note=note)


def _fitting(lines: Iterable[str]) -> list[str]:
    """Take as many lines as fit into an answer."""
    fitting: list[str] = []
    size = 0
    for line in lines:
        size += len(line) + 1
        if size > LIMIT:
            break
        fitting.append(line)
    return fitting


def _like(path: str, glob: str) -> bool:
    return fnmatchcase(path, glob) or fnmatchcase(path.rsplit("/", 1)[-1], glob)


def _line(info: FileInfo) -> str:
    if info.kind is FileKind.DIRECTORY:
        return f"{info.path}/"
    if info.kind is FileKind.SYMLINK:
        return f"{info.path} -> {info.target}"
    return f"{info.path}  {info.size}"


def _described(info: FileInfo) -> dict[str, object]:
    return info.model_dump(mode="json", exclude_none=True)


async def _search(call: ToolCall, given: SearchFiles) -> ToolAnswer:
    words = ["grep", "-rnIHZ", "-F" if given.literal else "-E", "--exclude-dir=.git"]
    words += ["-i"] if given.ignore_case else []
    words += [f"--include={given.glob}"] if given.glob is not None else []
    words += ["-e", given.pattern, "--", given.path]

    result = await call.do(lambda box: box.commands.run(words, timeout=SEARCH_S, output_limit=SEARCH_BYTES))
    matches = parsed_matches(result.stdout)
    if result.exit_code not in {0, 1} and not matches:
        what = "it took too long" if result.timed_out else result.stderr.strip()[:500] or "grep failed"
        raise InvalidRequest(
            f"the search failed: {what}", field="pattern", hint="narrow it with path or glob, or use run_command"
        )
    lines = _fitting(f"{each['path']}:{each['line']}:{each['text']}" for each in matches[: given.max_matches])
    truncated = len(lines) < len(matches) or result.truncated or result.timed_out
    value = {"matches": matches[: len(lines)], "truncated": truncated}
    note = "[there may be more: narrow it with path or glob]" if truncated else None
    return ToolAnswer("\n".join(lines) or "[no match]", value, note=note)


def parsed_matches(output: str) -> list[dict[str, object]]:
    """Parse the output of `grep -nHZ`: a path up to NUL, a number up to a colon, a line. Other lines are skipped."""
    matches: list[dict[str, object]] = []
    for line in output.split("\n"):
        path, nul, rest = line.partition("\0")
        number, colon, text = rest.partition(":")
        if nul and colon and number.isdecimal():
            if len(text) > LONGEST_LINE:
                text = f"{text[:LONGEST_LINE]} […{len(text) - LONGEST_LINE} characters more]"
            matches.append({"path": path.removeprefix("./"), "line": int(number), "text": text})
    return matches


TOOLS: list[Tool[Any]] = [
    Tool(
        name="read_file",
        title="Read a file",
        description=(
            "Read a text file of the workspace, exactly as it is, or see an image (PNG, JPEG, GIF, WebP). Long files "
            "come in parts: start at a line with first_line, or go on at the offset that the answer names."
        ),
        parameters=ReadFile,
        run=_read,
        read_only=True,
    ),
    Tool(
        name="write_file",
        title="Write a file",
        description="Make a file of the workspace, or replace it whole. To change a part of a file use edit_file.",
        parameters=WriteFile,
        run=_write,
        destructive=True,
        idempotent=True,
        output=_FILE,
    ),
    Tool(
        name="edit_file",
        title="Edit a file",
        description=(
            "Replace one text in a file by another. The old text must be in the file exactly once, unless replace_all: "
            "read the file first, and copy it with its spaces and line breaks."
        ),
        parameters=EditFile,
        run=_edit,
        destructive=True,
        output={"replaced": {"type": "integer"}, **_FILE},
    ),
    Tool(
        name="list_files",
        title="List files",
        description="List a directory of the workspace, or find files by name with glob. Directories end with a slash.",
        parameters=ListFiles,
        run=_list,
        read_only=True,
        output={
            "entries": {"type": "array", "items": {"type": "object", "properties": _FILE}},
            "truncated": {"type": "boolean", "description": "whether there are more"},
        },
    ),
    Tool(
        name="search_files",
        title="Search in files",
        description=(
            "Find lines in the text files of the workspace, like grep -rn. Binary files and .git are left out. "
            "To find files by name use list_files with glob."
        ),
        parameters=SearchFiles,
        run=_search,
        read_only=True,
        output={
            "matches": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "path": {"type": "string"},
                        "line": {"type": "integer"},
                        "text": {"type": "string"},
                    },
                },
            },
            "truncated": {"type": "boolean", "description": "whether there are more"},
        },
    ),
]
