"""Many deleted files of a folder: they are counted, and a person is asked."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.killed import killed
from tests.support.sandboxes import KINDS, ROOT, until

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.control.sessions import deletion_counter
from carrel.control.sessions.deletion_counter import DeletionCounter
from carrel.models import ApprovalDecision, ApprovalInfo, ApprovalState, CommandRequest, PolicyDocuments, SandboxRequest
from carrel.workspaces.folder_rules import IGNORED

OWNER = 1234


@pytest.fixture
def settings(settings: Settings, root: Path) -> Settings:
    sandbox = settings.sandbox.model_copy(update={"folder_roots": str(root)})
    return settings.model_copy(update={"sandbox": sandbox})


def filled(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def counter(root: Path) -> Iterator[DeletionCounter]:
    filled(root, *(f"d/{n}" for n in range(5)), "a", "node_modules/x", "target/x", "Cargo.toml", ".git/target/x")
    counter = DeletionCounter(str(root), IGNORED)
    yield counter
    counter.close()


def test_files_that_were_there_and_are_gone_are_counted(counter: DeletionCounter, root: Path) -> None:
    filled(root, "new", "later/x/new")
    assert counter.look() == 0
    for gone in ("new", "later/x/new", "node_modules/x", "target/x"):
        (root / gone).unlink()
    assert (counter.look(), counter.complete) == (0, True)
    shutil.rmtree(root / "d")
    (root / ".git" / "target" / "x").unlink()
    assert counter.look() == 6
    filled(root, "d/1")  # as a checkout does
    assert counter.look() == 5
    counter.reset()
    os.rename(root / "a", root / "later" / "b")
    assert counter.look() == 0
    os.rename(root / "later", root / "moved")
    assert counter.look() == 0
    os.rename(root / "moved" / "b", root / "node_modules" / "b")
    assert (counter.look(), list(counter.gone)) == (1, ["moved/b"])


def test_deletions_are_counted_when_events_are_lost(counter: DeletionCounter, root: Path) -> None:
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if most > 20_000:
        pytest.skip("the queue of this host is long")
    for number in range(most // 2 + 1):
        os.rename(root / "a", root / f"b{number}")
        os.rename(root / f"b{number}", root / "a")
    shutil.rmtree(root / "d")
    assert counter.look() == 5


def test_what_cannot_be_remembered_or_watched(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(root, *(f"d/{n}" for n in range(5)))
    monkeypatch.setattr(deletion_counter, "MOST_NAMES", 3)
    counter = DeletionCounter(str(root), ())
    filled(root, "d/new")
    counter.look()
    shutil.rmtree(root / "d")
    assert (counter.look(), counter.complete) == (6, False), "every file counts"
    counter.close()
    filled(root, "d/1")
    monkeypatch.setattr(deletion_counter, "MOST_WATCHES", 1)
    counter = DeletionCounter(str(root), ())
    counter.close()
    assert not counter.complete


async def asked(plane: ControlPlane) -> ApprovalInfo:
    found: list[ApprovalInfo] = []

    async def look() -> bool:
        found[:] = (await plane.approvals.page(states=[ApprovalState.PENDING])).items
        return bool(found)

    async with asyncio.timeout(20):
        while not await look():
            await asyncio.sleep(0.01)
    return found[0]


@pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")
@pytest.mark.parametrize("decided_meanwhile", [False, True])
async def test_a_run_that_deletes_many_files_is_stopped_until_a_person_answers(
    plane: ControlPlane, root: Path, decided_meanwhile: bool
) -> None:
    folder = filled(root / "project", *(f"{part}/{n}" for part in "abc" for n in range(60)))
    if ROOT:
        for each in (folder, *folder.rglob("*")):
            os.chown(each, OWNER, OWNER)
    await plane.policies.write("c", PolicyDocuments(sources={"runtime": {"delete_limit": 3}}), "test")
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", workspace_path=str(folder)))
    # a question that is answered with yes: it goes on, with ten times as many
    slowly = "for f in {}/*; do rm $f; echo x > {}/made; sleep 0.05; done; echo done"
    first = await plane.operations.start_command(ADMIN, "c", CommandRequest(command=slowly.format("a", "a")))
    question = await asked(plane)
    left = len(os.listdir(folder / "a"))
    assert question.kind == "file" and question.operation == "delete_many_files"
    assert "a/0" in question.summary and "more than 3 files" in question.reason and left > 20
    # a new server finds it stopped, and asks again
    await killed(plane)
    await plane.attachments.deletions.close()  # type: ignore[attr-defined]
    await plane.attachments.protected_folders.close()  # type: ignore[attr-defined]
    if decided_meanwhile:  # by another server on the same database: the new one must not ask again
        await plane.decisions.decide(ADMIN, question.id, ApprovalDecision(approve=True))
    other = await ControlPlane.open(plane.settings)
    try:
        if not decided_meanwhile:
            question = await asked(other)
            assert len(os.listdir(folder / "a")) == left, "nothing went on"
            await other.decisions.decide(ADMIN, question.id, ApprovalDecision(approve=True))
        await until(lambda: len(os.listdir(folder / "a")) < left, what="the command to go on")
        question = await asked(other)
        assert 60 - len(os.listdir(folder / "a")) > 30
        # no: what runs is killed, and the person is told what to do
        await other.decisions.decide(ADMIN, question.id, ApprovalDecision(approve=False))
        await until(lambda: "carrel undo" in (other.sessions.live()[0].record.notice or ""), what="a notice")
        result = await other.operations.command_result(ADMIN, "c", first.id)
        assert (result.signal, result.stdout) == ("SIGKILL", "")
        done = await other.operations.run_command(ADMIN, "c", CommandRequest(command="echo works"))
        assert done.stdout == "works\n"
        await other.sessions.stop("c")
        assert os.listdir(f"{other.layout.data_dir}/deletions") == []
    finally:
        await other.close()
