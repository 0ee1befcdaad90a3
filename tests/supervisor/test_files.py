from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.files_ground import MIB, Box, descriptors, head, receive, receive_head, serve, until

from carrel.errors import FileMissing, InvalidPath


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    # Not pytest's own folder: a socket's address must be short.
    with tempfile.TemporaryDirectory(prefix="carrel-") as top:
        async for made in serve(Path(top)):
            yield made


@pytest.mark.parametrize("content", [b"", b"text\n", bytes(range(256)) * 5, b"\r\n\0" * 100_000, os.urandom(MIB + 7)])
async def test_round_trip(box: Box, content: bytes) -> None:
    answer = await box.put("a/b c/ü.bin", content, parents=1)
    assert answer.status == 200
    assert answer.json["size"] == len(content)
    assert answer.json["kind"] == "file"
    got = await box.get("a/b c/ü.bin")
    assert (got.status, got.body) == (200, content)
    assert got.headers["content-type"] == "application/octet-stream"


async def test_ranges(box: Box) -> None:
    content = os.urandom(MIB)
    await box.put("f", content)
    cases = [(0, 10), (5, 0), (MIB - 3, 10), (MIB, 5), (MIB * 9, 5), (100, 600_000), (1, MIB * 4)]
    for offset, length in cases:
        assert (await box.get("f", offset=offset, length=length)).body == content[offset : offset + length]
    assert (await box.get("f", offset=MIB - 4)).body == content[-4:]
    assert (await box.get("f", offset="-1")).json["field"] == "offset"


async def test_absolute_paths_of_the_workspace_are_its_own(box: Box) -> None:
    assert (await box.put(f"{box.workspace}/f", b"x")).json["path"] == "f"
    assert (await box.get(f"{box.workspace}/f")).body == b"x"
    refused = (await box.get("/etc/passwd")).json
    assert refused["code"] == "invalid_path" and str(box.workspace) in refused["hint"]


@pytest.mark.parametrize(
    "path",
    [
        "../canary",
        "sub/../../canary",
        "out/canary",
        "canary-link",
        "abs/canary",
        "a//b",
        "a\0b",
        "",
        "{top}/canary",
    ],
)
async def test_no_call_leaves_the_workspace(box: Box, path: str) -> None:
    (box.workspace / "sub").mkdir()
    (box.workspace / "f").write_text("f")
    (box.workspace / "out").symlink_to("..")
    # Only ever this test's own folder: were the confinement broken, nothing of the host may suffer.
    (box.workspace / "abs").symlink_to(box.top)
    path = path.replace("{top}", str(box.top))
    (box.workspace / "canary-link").symlink_to("../canary")
    linked = path == "canary-link"
    answers = [
        await box.get(path),
        await box.put(path, b"stolen"),
        await box.put(path, b"stolen", parents=1),
        await box.call("GET", "/files/list", path=path),
        await box.post("/files/edit", path=path, old="outside", new="stolen"),
        await box.post("/files/mkdir", path=path + "/new"),
    ]
    if not linked:  # these work on the link itself
        answers += [
            await box.call("GET", "/files/stat", path=path),
            await box.post("/files/move", source=path, destination="got"),
            await box.post("/files/move", source="f", destination=path, overwrite=True),
            await box.call("DELETE", "/files", path=path, recursive=1),
        ]
    for answer in answers:
        assert (answer.status, answer.json["code"]) == (400, "invalid_path"), answer
        assert "traceback" not in answer.json["detail"].lower()
    assert (box.workspace / "f").read_text() == "f"


async def test_a_write_through_a_link_inside_replaces_its_target(box: Box) -> None:
    (box.workspace / "d").mkdir()
    (box.workspace / "d" / "real").write_text("old")
    (box.workspace / "link").symlink_to("d/real")
    assert (await box.put("link", b"new")).json["path"] == "link"
    assert (box.workspace / "link").is_symlink()
    assert (box.workspace / "d" / "real").read_text() == "new"
    assert (await box.put("link", b"x", exclusive=1)).json["code"] == "already_exists"


async def test_modes(box: Box) -> None:
    def mode() -> int:
        return stat.S_IMODE((box.workspace / "f").stat().st_mode)

    await box.put("f", b"1")
    assert mode() == 0o644
    assert (await box.put("f", b"2", mode="755")).json["mode"] == "755"
    await box.put("f", b"3")
    assert mode() == 0o755
    await box.post("/files/edit", path="f", old="3", new="4")
    assert mode() == 0o755
    for wrong in ("999", "4755", "", "rwx", "-1", "0o7"):
        assert (await box.put("f", b"", mode=wrong)).json["field"] == "mode"


async def test_writes_that_cannot_be(box: Box) -> None:
    (box.workspace / "d").mkdir()
    (box.workspace / "f").write_text("kept")
    os.mkfifo(box.workspace / "fifo")
    cases = {"d": "invalid_path", "f/x": "invalid_path", "no/x": "file_not_found", "d/": "invalid_path"}
    cases |= {"fifo": "invalid_path", ".": "invalid_path", "x" * 256: "invalid_path", "..": "invalid_path"}
    for path, code in cases.items():
        assert (await box.put(path, b"x")).json["code"] == code
    assert (await box.put("f", b"x", exclusive=1)).json["code"] == "already_exists"
    assert (await box.put("f", b"x", colour="red")).json["field"] == "colour"
    assert sorted(os.listdir(box.workspace)) == ["d", "f", "fifo"]
    assert (box.workspace / "f").read_text() == "kept"


async def test_what_is_no_regular_file_is_refused_not_hung_on(box: Box) -> None:
    os.mkfifo(box.workspace / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(box.workspace / "socket"))
        for path in ("fifo", "socket", "."):
            async with asyncio.timeout(5):
                assert (await box.get(path)).json["code"] == "invalid_path"
                edited = await box.post("/files/edit", path=path, old="a", new="b")
                assert edited.json["code"] == "invalid_path"
    assert (await box.call("GET", "/files/stat", path="fifo")).json["kind"] == "other"


async def test_a_broken_upload_leaves_nothing(box: Box) -> None:
    (box.workspace / "f").write_text("kept")
    _, writer = await box.open()
    writer.write(head("PUT", "/files/content", 1000, path="f") + b"half")
    await until(lambda: open_drafts(box) == 1)
    assert os.listdir(box.workspace) == ["f"], "a draft has no name"
    writer.close()
    await until(lambda: open_drafts(box) == 0)
    assert os.listdir(box.workspace) == ["f"]
    assert (box.workspace / "f").read_text() == "kept"


def open_drafts(box: Box) -> int:
    """How many nameless files of the workspace are open in this process."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{box.workspace}/#")
    return count


async def test_a_refused_upload_is_told_so(box: Box) -> None:
    reader, writer = await box.open()
    writer.write(head("PUT", "/files/content", 5 * MIB, path="../x") + b"some")
    answer = await receive(reader)
    assert answer.status == 400
    assert answer.headers["connection"] == "close"
    assert await reader.read() == b""


async def test_a_file_that_shrinks_breaks_the_answer(box: Box) -> None:
    size = 64 * MIB
    with (box.workspace / "f").open("wb") as file:
        file.truncate(size)
    reader, writer = await box.open()
    writer.write(head("GET", "/files/content", 0, path="f"))
    assert (await receive_head(reader))[1]["content-length"] == str(size)
    os.truncate(box.workspace / "f", 1000)
    got = 0
    async with asyncio.timeout(10):
        try:
            while chunk := await reader.read(MIB):
                got += len(chunk)
        except ConnectionResetError:
            pass
    assert got < size


async def test_big_files_pass_in_bounded_memory(box: Box) -> None:
    size, block = 64 * MIB, os.urandom(MIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader, writer = await box.open()
    writer.write(head("PUT", "/files/content", size, path="big"))
    for _ in range(size // MIB):
        writer.write(block)
        await writer.drain()
    assert (await receive(reader)).json["size"] == size
    writer.write(head("GET", "/files/content", 0, path="big"))
    await receive_head(reader)
    for _ in range(size // MIB):
        # Another request is answered in the middle of the stream.
        assert await reader.readexactly(MIB) == block
        assert (await box.call("GET", "/files/stat", path="big")).status == 200
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 24 * MIB


async def test_a_download_nobody_finishes_frees_its_file(box: Box) -> None:
    with (box.workspace / "f").open("wb") as file:
        file.truncate(1 << 40)
    before = descriptors()
    reader, writer = await box.open()
    writer.write(head("GET", "/files/content", 0, path="f"))
    await reader.readexactly(MIB)
    writer.close()
    await until(lambda: descriptors() <= before)
    assert (await box.get("f", offset=(1 << 40) - 2)).body == b"\0\0"


async def test_edit(box: Box) -> None:
    await box.put("f", b"eins zwei\ndrei zwei\n")
    answer = (await box.post("/files/edit", path="f", old="eins", new="één")).json
    assert answer["replaced"] == 1 and answer["file"]["path"] == "f"
    twice = await box.post("/files/edit", path="f", old="zwei", new="x")
    assert twice.status == 409
    assert twice.json["code"] == "edit_mismatch"
    assert twice.json["occurrences"] == 2 and twice.json["lines"] == [1, 2]
    assert "2 times" in twice.json["detail"]
    absent = (await box.post("/files/edit", path="f", old="vier", new="x")).json
    assert absent["occurrences"] == 0
    every = await box.post("/files/edit", path="f", old="zwei", new="", replace_all=True)
    assert every.json["replaced"] == 2
    assert (box.workspace / "f").read_text() == "één \ndrei \n"
    await box.put("f", b"aaa")
    assert (await box.post("/files/edit", path="f", old="aa", new="b")).json["code"] == "edit_mismatch"
    assert os.listdir(box.workspace) == ["f"]


async def test_an_edit_with_an_id_of_its_own_is_made_once(box: Box) -> None:
    await box.put("f", b"x")
    first = (await box.post("/files/edit", path="f", old="x", new="x x", id="k-only-once")).json
    again = (await box.post("/files/edit", path="f", old="x", new="x x", id="k-only-once")).json
    assert again == first and (box.workspace / "f").read_text() == "x x"
    assert (await box.post("/files/edit", path="f", old="no", new="", id="k-refused-1")).json["code"] == "edit_mismatch"
    for number in range(200):
        await box.post("/files/edit", path="f", old="x x", new="x x", id=f"k-many-{number:03}")
    assert len(box.files._edited) <= 128


async def test_edit_refuses(box: Box) -> None:
    await box.put("f", b"a" * 1000)
    wrong: list[tuple[dict[str, object], str]] = [
        ({"path": "f", "old": "", "new": "x"}, "old"),
        ({"path": "f", "old": "a"}, "new"),
        ({"path": "f", "old": "a", "new": 1}, "new"),
        ({"path": "f", "old": "a", "new": "b", "replace_all": "yes"}, "replace_all"),
        ({"path": "f", "old": "a", "new": "b", "extra": 1}, "extra"),
        ({"path": "f", "old": "\ud800", "new": "b"}, "old"),
    ]
    for body, name in wrong:
        answer = await box.post("/files/edit", **body)
        assert (answer.status, answer.json["field"]) == (400, name)
    grown = await box.post("/files/edit", path="f", old="a", new="b" * 100_000, replace_all=True)
    assert grown.status == 413
    with (box.workspace / "big").open("wb") as file:
        file.truncate(33 * MIB)
    assert (await box.post("/files/edit", path="big", old="a", new="b")).status == 413
    assert (await box.post("/files/edit", path="none", old="a", new="b")).json["code"] == "file_not_found"
    assert (await box.call("POST", "/files/edit", b"{broken")).json["field"] == "body"
    assert (await box.call("POST", "/files/edit", b"[]")).json["field"] == "body"


async def test_edits_at_once_all_take_effect(box: Box) -> None:
    await box.put("f", "".join(f"<{n}>" for n in range(40)).encode())
    answers = await asyncio.gather(*(box.post("/files/edit", path="f", old=f"<{n}>", new=f"[{n}]") for n in range(40)))
    assert {answer.status for answer in answers} == {200}
    assert (box.workspace / "f").read_text() == "".join(f"[{n}]" for n in range(40))


async def test_move(box: Box) -> None:
    await box.put("d/a", b"a", parents=1)
    await box.put("b", b"b")
    assert (await box.post("/files/move", source="d/a", destination="b")).json["code"] == "already_exists"
    assert (await box.post("/files/move", source="d/a", destination="c")).json["path"] == "c"
    assert (await box.post("/files/move", source="c", destination="b", overwrite=True)).status == 200
    assert (box.workspace / "b").read_bytes() == b"a"
    into = (await box.post("/files/move", source="d", destination="d/e")).json
    assert (into["code"], into["field"]) == ("invalid_path", "destination")
    assert (await box.post("/files/move", source="no", destination="x")).json["field"] == "source"
    assert (await box.post("/files/move", source="b", destination="no/x")).json["field"] == "destination"
    assert (await box.post("/files/move", source="b", destination="d", overwrite=True)).json["code"] == "conflict"
    for root in (".", "d/..", str(box.workspace)):
        assert (await box.post("/files/move", source=root, destination="x")).json["code"] == "invalid_path"
    (box.workspace / "link").symlink_to("nowhere")
    moved = (await box.post("/files/move", source="link", destination="d/link")).json
    assert (moved["kind"], moved["target"]) == ("symlink", "nowhere")


async def test_mkdir(box: Box) -> None:
    for _ in range(2):
        made = (await box.post("/files/mkdir", path="a/b/c")).json
        assert (made["path"], made["kind"], made["mode"]) == ("a/b/c", "directory", "755")
    await box.put("f", b"")
    assert (await box.post("/files/mkdir", path="f")).json["code"] == "invalid_path"
    assert (await box.post("/files/mkdir", path="f/g")).json["code"] == "invalid_path"


async def test_delete(box: Box) -> None:
    await box.put("d/sub/f", b"", parents=1)
    (box.workspace / "link").symlink_to("d")
    refused = await box.call("DELETE", "/files", path="d")
    assert (refused.status, refused.json["code"]) == (409, "conflict")
    assert "recursive" in refused.json["hint"]
    assert (await box.call("DELETE", "/files", path="link", recursive=1)).status == 204
    assert (box.workspace / "d" / "sub" / "f").exists()
    assert (await box.call("DELETE", "/files", path="d", recursive=1)).status == 204
    assert (await box.call("DELETE", "/files", path="d")).json["code"] == "file_not_found"
    for root in (".", "./", "..", str(box.workspace)):
        assert (await box.call("DELETE", "/files", path=root, recursive=1)).status == 400
    await box.post("/files/mkdir", path="empty")
    assert (await box.call("DELETE", "/files", path="empty")).status == 204
    assert os.listdir(box.workspace) == []


async def test_list_and_stat(box: Box) -> None:
    await box.put("b/c", b"123", parents=1, mode="600")
    await box.put("a", b"")
    (box.workspace / "l").symlink_to("../canary")
    os.utime(box.workspace / "a", (1_700_000_000, 1_700_000_000))
    listed = (await box.call("GET", "/files/list", path=".", recursive=1)).json
    assert [item["path"] for item in listed["items"]] == ["a", "b", "b/c", "l"]
    assert listed["items"][0]["modified_at"] == "2023-11-14T22:13:20+00:00"
    assert listed["items"][3]["target"] == "../canary"
    assert not listed["truncated"]
    cut = (await box.call("GET", "/files/list", limit=2)).json
    assert [item["path"] for item in cut["items"]] == ["a", "b"] and cut["truncated"]
    below = (await box.call("GET", "/files/list", path="b/")).json
    assert [item["path"] for item in below["items"]] == ["b/c"]
    one = (await box.call("GET", "/files/stat", path="b/c")).json
    assert one == below["items"][0]
    assert (one["size"], one["mode"]) == (3, "600")
    link = (await box.call("GET", "/files/stat", path="l")).json
    assert (link["kind"], link["target"]) == ("symlink", "../canary")
    assert (await box.call("GET", "/files/stat", path=".")).json["kind"] == "directory"
    assert (await box.call("GET", "/files/list", path="a")).json["code"] == "invalid_path"
    assert (await box.call("GET", "/files/list", path="none")).json["code"] == "file_not_found"
    assert (await box.call("GET", "/files/list", limit=0)).json["field"] == "limit"


async def test_names_that_are_not_utf8(box: Box) -> None:
    raw = os.fsencode(box.workspace) + b"/odd\xff\n%2f+"
    name = "odd\udcff\n%2f+"
    assert (await box.put(name, b"odd")).json["path"] == name
    assert Path(os.fsdecode(raw)).read_bytes() == b"odd"
    assert (await box.call("GET", "/files/list")).json["items"][0]["path"] == name
    assert (await box.get(name)).body == b"odd"
    assert (await box.post("/files/move", source=name, destination="plain")).status == 200


async def test_impossible_times_are_shown_as_the_nearest(box: Box) -> None:
    await box.put("f", b"")
    for moment in (-(10**9), 10**10):
        os.utime(box.workspace / "f", (moment, moment))
        assert "T" in (await box.call("GET", "/files/stat", path="f")).json["modified_at"]


@settings(max_examples=60, deadline=None)
@given(path=st.text(max_size=30), content=st.binary(max_size=300))
def test_any_path_is_either_refused_or_round_trips(path: str, content: bytes) -> None:
    async def attempt(top: Path) -> None:
        async for box in serve(top):
            quoted = path.encode("utf-8", "replace").decode()
            written = await box.put(quoted, content, parents=1)
            if written.status == 200:
                assert (await box.get(quoted)).body == content
            else:
                assert written.json["code"] in {"invalid_path", "file_not_found"}

    with tempfile.TemporaryDirectory(prefix="carrel-") as top:
        asyncio.run(attempt(Path(top)))


async def test_for_commands(box: Box) -> None:
    given = box.files.write_bytes("in/put", b"before")
    assert box.files.produced_since(box.files.mark(), given=[given]) == []
    assert box.files.produced_since(0, given=[]) == ["in/put"]
    old = (box.workspace / "in" / "put").stat()
    assert stat.S_IMODE(old.st_mode) == 0o644
    await until(lambda: box.files.mark() > old.st_ctime_ns)
    mark = box.files.mark()
    (box.workspace / "out").mkdir()
    (box.workspace / "out" / "put").write_text("after")
    (box.workspace / "kept-time").write_text("unpacked")
    os.utime(box.workspace / "kept-time", (1, 1))
    (box.workspace / "link").symlink_to("out/put")
    assert box.files.produced_since(mark, 10) == ["kept-time", "out/put"]
    assert box.files.produced_since(mark, 1) == ["kept-time"]
    handle = box.files.open_directory("out")
    try:
        assert os.fstat(handle).st_ino == (box.workspace / "out").stat().st_ino
    finally:
        os.close(handle)
    for path, kind in {"none": FileMissing, "kept-time": InvalidPath, "..": InvalidPath}.items():
        with pytest.raises(kind):
            box.files.open_directory(path)


async def _as_nobody(top: Path) -> None:
    async for box in serve(top):
        await box.put("locked/deep/f", b"x", parents=1)
        (box.workspace / "locked" / "deep").chmod(0)
        (box.workspace / "locked").chmod(0o500)
        listed = (await box.call("GET", "/files/list", recursive=1)).json
        assert [item["path"] for item in listed["items"]] == ["locked", "locked/deep"]
        assert listed["truncated"]
        refused = (await box.put("locked/g", b"")).json
        assert refused["code"] == "conflict" and "mode" in refused["hint"]
        assert (await box.call("DELETE", "/files", path="locked", recursive=1)).status == 204
        await box.put("f", b"x", mode="000")
        assert (await box.get("f")).json["code"] == "conflict"
        assert (await box.put("f", b"y", mode="600")).status == 200
        assert (await box.get("f")).body == b"y"
        assert os.listdir(box.workspace) == ["f"]


@pytest.mark.skipif(os.geteuid() != 0, reason="the whole file already runs as an ordinary user")
def test_as_an_ordinary_user() -> None:
    nobody = 65534
    top = tempfile.mkdtemp(prefix="carrel-")
    os.chown(top, nobody, nobody)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(nobody)
            os.setuid(nobody)
            asyncio.run(_as_nobody(Path(top)))
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            raise
        finally:
            os._exit(code)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        shutil.rmtree(top)
