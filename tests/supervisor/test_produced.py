"""What changed in a workspace, told by the kernel, against what a full scan says."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carrel.supervisor import produced
from carrel.supervisor.files import Files
from carrel.supervisor.produced import ProducedFiles


@pytest.fixture
def workspace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def watch(workspace: Path) -> Iterator[ProducedFiles]:
    files = Files()
    files.configure(str(workspace))
    watch = ProducedFiles(files)
    yield watch
    watch.close()
    files.close()


async def test_finds_what_changes(workspace: Path, watch: ProducedFiles) -> None:
    (workspace / "old").write_text("1")
    (workspace / "deep/er").mkdir(parents=True)
    (workspace / "deep/er/known").write_text("1")
    async with watch.watching() as look:
        (workspace / "new").write_text("2")
        (workspace / "deep/er/known").write_text("2")
        (workspace / "made/here").mkdir(parents=True)
        (workspace / "made/here/file").write_text("2")
        (workspace / "gone").write_text("2")
        (workspace / "gone").unlink()
        (workspace / "link").symlink_to("/etc/passwd")
    assert look.found == ["deep/er/known", "made/here/file", "new"]
    async with watch.watching() as look:
        pass
    assert look.found == []


async def test_moved_folders_keep_being_watched(workspace: Path, watch: ProducedFiles) -> None:
    (workspace / "a/b").mkdir(parents=True)
    async with watch.watching() as look:
        (workspace / "a").rename(workspace / "z")
        (workspace / "z/b/file").write_text("1")
    assert look.found == ["z/b/file"]
    async with watch.watching() as look:
        (workspace / "z/b/file").write_text("2")
    assert look.found == ["z/b/file"]


async def test_what_was_given_is_not_produced(workspace: Path, watch: ProducedFiles) -> None:
    stamps = [watch._files.write_bytes(name, b"x") for name in ("kept", "changed")]
    async with watch.watching(stamps) as look:
        (workspace / "changed").write_text("y")
    assert look.found == ["changed"]


async def test_two_look_at_once(workspace: Path, watch: ProducedFiles) -> None:
    async with watch.watching() as outer:
        (workspace / "first").write_text("1")
        async with watch.watching() as inner:
            (workspace / "second").write_text("1")
        (workspace / "third").write_text("1")
    assert "second" in inner.found and "third" not in inner.found
    assert outer.found == ["first", "second", "third"]


async def test_one_who_goes_away_leaves_no_half_of_a_watch(workspace: Path, watch: ProducedFiles) -> None:
    names = [f"d{number:03}" for number in range(500)]
    for name in names:
        (workspace / name).mkdir()

    async def call() -> list[str]:
        async with watch.watching() as look:
            for name in names:
                (workspace / name / "new").write_text("")
        return look.found

    first = asyncio.create_task(call())
    for _ in range(4):
        await asyncio.sleep(0)
    assert not (workspace / names[0] / "new").exists(), "it is still being prepared"
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await call() == [f"{name}/new" for name in names]


async def test_one_who_goes_away_at_the_end_looks_no_more(workspace: Path, watch: ProducedFiles) -> None:
    """What changed is kept for those who look: were one never to end, it would be kept for ever."""
    begun, end = asyncio.Event(), asyncio.Event()

    async def call() -> None:
        async with watch.watching():
            begun.set()
            await end.wait()

    first = asyncio.create_task(call())
    await begun.wait()
    async with watch._busy:  # another is being told
        end.set()
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    (workspace / "new").write_text("")
    for _ in range(2):
        async with watch.watching():
            pass
    assert b"new" not in watch._changed


@pytest.mark.parametrize("what", ["too many folders", "too many events"])
async def test_falls_back_to_a_scan(
    workspace: Path, watch: ProducedFiles, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(produced, "MOST_WATCHED", 3)
    if what == "too many folders":
        for number in range(5):
            (workspace / f"d{number}").mkdir()
    async with watch.watching() as look:
        if what == "too many events":
            for number in range(5):
                (workspace / f"d{number}").mkdir()
        (workspace / "d4/file").write_text("1")
    assert look.found == ["d4/file"]
    async with watch.watching() as look:
        (workspace / "d3/file").write_text("1")
    assert "d3/file" in look.found  # a scan may name what was written a tick before, too


names = st.sampled_from(["a", "b", "c/a", "c/b", "c/d/a", "e/a"])
actions = st.lists(st.tuples(st.sampled_from(["write", "append", "rename", "remove"]), names, names), max_size=12)


@settings(max_examples=60, deadline=None)
@given(before=actions, during=actions)
async def test_agrees_with_a_scan(before: list[tuple[str, str, str]], during: list[tuple[str, str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = Files()
        files.configure(folder)
        watch = ProducedFiles(files)
        try:
            async with watch.watching():
                act(Path(folder), before)
            since = files.mark()
            async with watch.watching() as look:
                touched = act(Path(folder), during)
            scanned = set(files.produced_since(since))
            assert set(look.found) <= scanned
            assert scanned & touched <= set(look.found)
        finally:
            watch.close()
            files.close()


def act(root: Path, steps: list[tuple[str, str, str]]) -> set[str]:
    touched = set()
    for step, one, other in steps:
        path = root / one
        try:
            if step == "write":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("x")
                touched.add(one)
            elif step == "append":
                with path.open("a") as file:
                    file.write("y")
                touched.add(one)
            elif step == "rename":
                (root / other).parent.mkdir(parents=True, exist_ok=True)
                os.rename(path, root / other)
                if one != other:
                    touched.add(other)
            else:
                path.unlink()
        except OSError:
            pass
    return touched


async def test_the_description_of_the_workspace_is_not_produced(workspace: Path, watch: ProducedFiles) -> None:
    async with watch.watching() as look:
        (workspace / ".context.json").write_text("{}")
        (workspace / "made").write_text("x")
    assert look.found == ["made"]
