from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from mcp import types

from carrel.client import AsyncClient
from carrel.integrations.mcp.file_tools import LONGEST_LINE, MOST_IMAGE_BYTES, parsed_matches
from carrel.integrations.mcp.output import LIMIT

Said = Callable[[types.CallToolResult], str]
PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 100


async def test_written_edited_and_read(connect: Any, context: str, said: Said) -> None:
    async with connect(context) as client:
        result = await client.call_tool("write_file", {"path": "src/a.py", "content": "one\ntwo\nthree\n"})
        assert (result.structured_content["path"], result.structured_content["size"]) == ("src/a.py", 14)
        result = await client.call_tool("edit_file", {"path": "src/a.py", "old": "two", "new": "2\n2b"})
        assert result.structured_content["replaced"] == 1
        assert said(await client.call_tool("read_file", {"path": "src/a.py"})) == "one\n2\n2b\nthree\n"
        part = await client.call_tool("read_file", {"path": "src/a.py", "first_line": 2, "max_lines": 2})
        assert said(part) == "2\n2b\n"
        assert said(await client.call_tool("read_file", {"path": "src/a.py", "first_line": 4})) == "three\n"
        assert said(await client.call_tool("read_file", {"path": "src/a.py", "offset": 4})) == "2\n2b\nthree\n"
        beyond = await client.call_tool("read_file", {"path": "src/a.py", "first_line": 9})
        assert beyond.is_error and beyond.structured_content["field"] == "first_line"
        unmatched = await client.call_tool("edit_file", {"path": "src/a.py", "old": "nine", "new": ""})
        assert unmatched.is_error and unmatched.structured_content["code"] == "edit_mismatch"
        again = {"path": "src/a.py", "content": "x", "overwrite": False}
        result = await client.call_tool("write_file", again)
        assert result.is_error and result.structured_content["code"] == "already_exists"
        script = {"path": "run.sh", "content": "#!/bin/sh\necho ran\n", "executable": True}
        await client.call_tool("write_file", script)
        assert (await client.call_tool("run_command", {"command": "./run.sh"})).structured_content["output"] == "ran\n"


async def test_nothing_leaves_the_workspace(connect: Any, context: str) -> None:
    async with connect(context) as client:
        for name, more in [("read_file", {}), ("write_file", {"content": ""}), ("list_files", {})]:
            result = await client.call_tool(name, {"path": "../../etc", **more})
            assert result.is_error and result.structured_content["code"] in {"invalid_path", "file_not_found"}
        missing = await client.call_tool("read_file", {"path": "none"})
        assert missing.is_error and missing.structured_content["code"] == "file_not_found"


async def test_long_files_come_in_parts(connect: Any, context: str, said: Said) -> None:
    whole = "".join(f"line {number} é\n" for number in range(10_000))
    async with connect(context) as client:
        await client.call_tool("write_file", {"path": "long", "content": whole})
        got, offset = "", 0
        while True:
            result = await client.call_tool("read_file", {"path": "long", "offset": offset})
            text, *note = [block.text for block in result.content]
            assert len(text.encode()) <= LIMIT
            got += text
            if not note:
                break
            offset = int(note[0].split("offset ")[1].split()[0])
            assert offset == len(got.encode())
        assert got == whole
        result = await client.call_tool("read_file", {"path": "long", "first_line": 9000, "max_lines": 1})
        assert said(result) == "line 8999 é\n"
        result = await client.call_tool("read_file", {"path": "long", "first_line": 2})
        assert result.content[0].text.startswith("line 1 é\n") and "there is more" in result.content[1].text


async def test_bytes_and_images(connect: Any, context: str, said: Said) -> None:
    async with connect(context) as client:
        given = {"path": "a.png", "content": base64.b64encode(PNG).decode(), "encoding": "base64"}
        await client.call_tool("write_file", given)
        [image] = (await client.call_tool("read_file", {"path": "a.png"})).content
        assert (image.type, image.mime_type, base64.b64decode(image.data)) == ("image", "image/png", PNG)
        large = base64.b64encode(PNG + b"\0" * MOST_IMAGE_BYTES).decode()
        await client.call_tool("write_file", {"path": "b.png", "content": large, "encoding": "base64"})
        result = await client.call_tool("read_file", {"path": "b.png"})
        assert result.is_error and result.structured_content["code"] == "too_large"
        await client.call_tool("write_file", {"path": "c", "content": "/wA=", "encoding": "base64"})
        result = await client.call_tool("read_file", {"path": "c"})
        assert result.is_error and "not UTF-8 text" in said(result)
        wrong = await client.call_tool("write_file", {"path": "c", "content": "not base64!", "encoding": "base64"})
        assert wrong.is_error and wrong.structured_content["field"] == "content"


async def test_listed(connect: Any, context: str, said: Said, ground: Any) -> None:
    async with connect(context) as client, AsyncClient(ground.url, ground.token) as own:
        assert said(await client.call_tool("list_files", {"path": "data"})) == "[nothing]"
        for path in ("a.txt", "sub/b.txt", "sub/c.py"):
            await client.call_tool("write_file", {"path": path, "content": "x"})
        box = own.attach(await own.find(context))
        await box.commands.run("ln -s a.txt link; printf x > 'odd\\xff'; printf x > \"$(printf 'o\\377dd')\"")
        top = said(await client.call_tool("list_files", {}))
        assert "a.txt  1" in top and "sub/" in top and "link -> a.txt" in top and "o\\udcffdd" in top
        assert "sub/b.txt" not in top
        found = await client.call_tool("list_files", {"glob": "*.txt"})
        assert [each["path"] for each in found.structured_content["entries"]] == ["a.txt", "sub/b.txt"]
        few = await client.call_tool("list_files", {"recursive": True, "limit": 2})
        assert len(few.structured_content["entries"]) == 2 and few.structured_content["truncated"]
        assert "there is more" in said(few)


async def test_searched(connect: Any, context: str, said: Said) -> None:
    async with connect(context) as client:
        await client.call_tool("write_file", {"path": "a.py", "content": "def here():\n    pass\n"})
        await client.call_tool(
            "write_file", {"path": "d e/b:1.txt", "content": "x\nHERE it is\n" + "here" * 1000 + "\n"}
        )
        await client.call_tool("write_file", {"path": ".git/c", "content": "here\n"})
        result = await client.call_tool("search_files", {"pattern": "her[e]", "ignore_case": True})
        matches = sorted(result.structured_content["matches"], key=lambda match: (match["path"], match["line"]))
        assert [(match["path"], match["line"]) for match in matches] == [
            ("a.py", 1),
            ("d e/b:1.txt", 2),
            ("d e/b:1.txt", 3),
        ]
        assert len(matches[2]["text"]) < LONGEST_LINE + 60 and not result.structured_content["truncated"]
        only = await client.call_tool("search_files", {"pattern": "here()", "literal": True, "glob": "*.py"})
        assert said(only) == "a.py:1:def here():"
        few = await client.call_tool("search_files", {"pattern": "here", "max_matches": 1})
        assert len(few.structured_content["matches"]) == 1 and few.structured_content["truncated"]
        none = await client.call_tool("search_files", {"pattern": "nothing like this"})
        assert said(none) == "[no match]" and not none.is_error
        for given in ({"pattern": "("}, {"pattern": "x", "path": "none"}):
            result = await client.call_tool("search_files", given)
            assert result.is_error and "the search failed" in said(result)
        option = await client.call_tool("search_files", {"pattern": "--help", "path": "a.py"})
        assert said(option) == "[no match]"


@given(st.text())
def test_what_a_sandbox_prints_is_read_or_left_out(output: str) -> None:
    for match in parsed_matches(output):
        assert isinstance(match["line"], int) and "\n" not in str(match["text"])


@given(st.lists(st.tuples(st.text("a:/ b", min_size=1), st.integers(1, 10**6), st.text("x:\t ", max_size=50))))
def test_matches_are_read_whatever_names_are(found: list[tuple[str, int, str]]) -> None:
    output = "".join(f"./{path}\0{line}:{text}\n" for path, line, text in found)
    assert [(match["path"], match["line"], match["text"]) for match in parsed_matches(output)] == found
