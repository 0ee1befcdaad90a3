"""Sandboxes that work on a folder of the host in place."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.killed import killed
from tests.support.records import SESSION
from tests.support.sandboxes import KINDS, ROOT, until

from carrel.audit import Filter, chain_of
from carrel.config import Settings
from carrel.control.operations.checks import command_body
from carrel.control.plane import ControlPlane
from carrel.control.sessions.folders import Folders
from carrel.control.sessions.home_limits import HomeLimits
from carrel.errors import CarrelError, Conflict, InvalidRequest, LimitExceeded, Unsupported
from carrel.models import CommandRequest, HostPath, PolicyDocuments, SandboxInfo, SandboxRequest, State
from carrel.models.files import StatRequest
from carrel.models.operations import STAT_FILE

pytestmark = pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")
OWNER = 1234


@pytest.fixture
def settings(settings: Settings, root: Path) -> Settings:
    sandbox = settings.sandbox.model_copy(update={"folder_roots": str(root), "home_mb": 1})
    return settings.model_copy(update={"sandbox": sandbox})


def made(path: Path, **files: str) -> Path:
    """A folder of an ordinary user's, with these files."""
    path.mkdir()
    for name, text in files.items():
        (path / name).write_text(text)
    if ROOT:
        for each in (path, *path.rglob("*")):
            os.chown(each, OWNER, OWNER)
    return path


async def started(plane: ControlPlane, context: str, folder: Path, **more: object) -> SandboxInfo:
    request = SandboxRequest.model_validate({"context_id": context, "workspace_path": str(folder), **more})
    return (await plane.sessions.deploy_or_resume(ADMIN, request))[0]


async def run(plane: ControlPlane, context: str, command: str, cwd: str | None = None) -> str:
    result = await plane.operations.run_command(ADMIN, context, CommandRequest(command=command, cwd=cwd))
    return result.stdout + result.stderr


async def protect(plane: ControlPlane, context: str, *paths: str) -> None:
    deny = [f"file(write:{path})" for path in paths]
    allow = ["file(write:/workspace/**)", "file(read:/**)", "file(delete:/workspace/**)"]
    allow += [f"shell({word}:*)" for word in ("cat", "ls", "touch", "mkdir", "mv", "rm", "ln", "sh", "stat", "cp")]
    await plane.policies.write(
        context, PolicyDocuments(settings={"permissions": {"allow": allow, "deny": deny}}), "test"
    )


async def test_the_folder_is_the_workspace_at_both_paths(plane: ControlPlane, root: Path) -> None:
    folder, beside = made(root / "project", a="old"), made(root / "beside", secret="x")
    made(root / "tools", tool="tool")
    shown = HostPath(source=str(root / "tools" / "tool"), target="/home/agent/.config/tool")
    info = await started(plane, "c", folder, host_paths=[shown.model_dump(), {"source": str(root / "tools")}])
    assert (info.workspace_path, info.host_paths[0], info.limits.disk_mb) == (str(folder), shown, None)
    assert await run(plane, "c", "pwd; cat a; cat /workspace/a") == f"{folder}\noldold"
    assert await run(plane, "c", "pwd", cwd="/workspace") == "/workspace\n"
    assert await run(plane, "c", "pwd", cwd=str(folder)) == f"{folder}\n"
    assert await run(plane, "c", f"ls {root}; cat ~/.config/tool {root}/tools/tool") == "project\ntools\ntooltool"
    assert "Read-only" in await run(plane, "c", f"echo x > ~/.config/tool; echo x > {root}/tools/tool")
    await run(plane, "c", "echo new > b; mkdir d; echo kept > ~/history; touch /workspace/e")
    assert (await plane.operations.forward(ADMIN, STAT_FILE, "c", StatRequest(path=f"{folder}/b"))).size == 4
    owner = folder.stat().st_uid
    assert {path.stat().st_uid for path in (folder / "b", folder / "d", folder / "e")} == {owner}
    await plane.sessions.stop("c")
    resumed = (await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c")))[0]
    assert (resumed.workspace_path, resumed.host_paths[0]) == (str(folder), shown)
    assert await run(plane, "c", "cat ~/history b") == "kept\nnew\n"
    # never deleted: neither with the session nor with the context
    await plane.sessions.terminate(ADMIN, "c", delete_workspace=True)
    assert sorted(os.listdir(folder)) == ["a", "b", "d", "e"]
    assert os.listdir(f"{plane.layout.data_dir}/homes") == []
    assert os.listdir(plane.driver.directory) == []
    await started(plane, "c", folder)
    await plane.context_deletion.forget(ADMIN, "c")
    assert sorted(os.listdir(folder)) == ["a", "b", "d", "e"]
    assert os.listdir(beside) == ["secret"]


async def test_folders_that_are_refused(plane: ControlPlane, root: Path) -> None:
    folder = made(root / "project", file="x")
    os.symlink(folder, root / "link")
    kinds: list[tuple[dict[str, object], type[CarrelError], str]] = [
        ({"workspace_path": "/etc"}, InvalidRequest, "outside of the directories"),
        ({"workspace_path": str(root / "link")}, InvalidRequest, "cannot be opened"),
        ({"workspace_path": str(root / "missing")}, InvalidRequest, "cannot be opened"),
        ({"workspace_path": str(folder / "file")}, InvalidRequest, "not a directory"),
        ({"workspace_path": f"{folder}/../project"}, InvalidRequest, "not a plain path"),
        ({"context_id": None}, InvalidRequest, "needs a context"),
        ({"limits": {"disk_mb": 10}}, Unsupported, "cannot be limited"),
        ({"filespace": True}, Unsupported, "filespace"),
        ({"provider": "process", "trust": "high"}, Unsupported, "folders"),
        ({"host_paths": [{"source": "/etc/hosts"}]}, InvalidRequest, "outside"),
        ({"host_paths": [{"source": str(root), "target": "/etc/x"}]}, InvalidRequest, "nothing can be mounted"),
        ({"host_paths": [{"source": str(root), "target": "/workspace/x"}]}, InvalidRequest, "nothing can be mounted"),
        ({"workspace_path": None, "host_paths": [{"source": str(root)}]}, InvalidRequest, "workspace_path"),
    ]
    for more, kind, words in kinds:
        fields = {"context_id": "c", "workspace_path": str(folder), **more}
        with pytest.raises(kind, match=words) as refused:
            await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest.model_validate(fields))
        assert refused.value.hint, words
    assert await plane.store.newest_of_context("c") is None
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="stored"))
    await plane.sessions.stop("stored")
    with pytest.raises(Conflict, match="workspace of carrel"):
        await started(plane, "stored", folder)
    assert os.listdir(folder) == ["file"]


@pytest.mark.parametrize("path", ["/", "/usr", "/proc/self", "/home", "/var/lib", "DATA", "DATA/storage"])
async def test_the_system_and_the_data_of_carrel_are_no_folders(path: str, data_dir: str) -> None:
    record = replace(SESSION, workspace_path=path.replace("DATA", data_dir))
    with pytest.raises(InvalidRequest, match="belongs to the system"):
        Folders(["/"], data_dir, home_mb=1)._check(record)
    with pytest.raises(InvalidRequest, match="lets nobody"):
        Folders([], data_dir, home_mb=1)._check(record)


async def test_a_home_that_is_too_large_stops_its_sandbox(plane: ControlPlane, root: Path) -> None:
    folder = made(root / "project")
    await started(plane, "c", folder)
    folders = plane.attachments.folders
    assert isinstance(folders, Folders)
    await HomeLimits(plane.sessions, folders).enforce()
    assert plane.sessions.find_live("c") is not None
    await plane.operations.run_command(ADMIN, "c", CommandRequest(command="head -c 2M /dev/zero > ~/large"))
    await HomeLimits(plane.sessions, folders).enforce()
    assert plane.sessions.find_live("c") is None
    info = (await plane.sessions.record("c")).info()
    assert info.state is State.ERROR
    assert "more than 1 MB" in (info.error or "")
    with pytest.raises(LimitExceeded, match="more than 1 MB") as refused:
        await started(plane, "c", folder)
    large = Path(str(refused.value.hint).split()[3].rstrip(",")) / "large"
    large.unlink()
    assert (await started(plane, "c", folder)).state is State.RUNNING


async def test_what_a_folder_cannot_do(plane: ControlPlane, root: Path) -> None:
    folder = made(root / "project", a="x")
    await started(plane, "c", folder)
    for refused in (
        plane.snapshots.take(ADMIN, "c"),
        plane.snapshots.page(ADMIN, "c"),
        plane.snapshots.restore(ADMIN, "c", "snap-1"),
        plane.snapshots.fork(ADMIN, "c", "d"),
        plane.filespaces.sync(ADMIN, "c"),
        plane.sessions.usage("c"),
    ):
        with pytest.raises(Unsupported, match="the workspace is the folder") as error:
            await refused
        assert "checkpoints" in (error.value.hint or "")
    await plane.upkeep.checkpoint()
    await plane.upkeep.watch_disks()
    await plane.retention.sweep()
    with pytest.raises(Conflict, match="workspace_path"):
        await started(plane, "c", made(root / "other"))
    assert os.listdir(folder) == ["a"], "carrel writes nothing into the folder"


async def test_two_contexts_in_one_folder_are_told_of_each_other(plane: ControlPlane, root: Path) -> None:
    folder = made(root / "project")
    below = made(folder / "part")
    assert (await started(plane, "a", folder)).notice is None
    assert "'a'" in ((await started(plane, "b", below)).notice or "")
    assert "'b'" in ((await plane.sessions.get("a")).notice or "")
    assert (await started(plane, "c", made(root / "project-2"))).notice is None
    await plane.sessions.stop("b")
    assert (await plane.sessions.get("a")).notice is None


async def test_protected_paths_hold_at_both_paths_and_when_they_appear_later(plane: ControlPlane, root: Path) -> None:
    folder = made(root / "project")
    for path in (folder / ".git" / "hooks", folder / "sub"):
        path.mkdir(parents=True)
    (folder / ".git" / "config").write_text("mine")
    (folder / "sub" / ".git").write_text("gitdir: ../.git/modules/sub")  # as in a submodule
    if ROOT:
        for each in folder.rglob("*"):
            os.chown(each, OWNER, OWNER)
    await protect(
        plane, "c", "${WORKSPACE}/.git/hooks", "/workspace/.git/config", f"{folder}/.github/**", "/**/.git/config"
    )
    await started(plane, "c", folder)
    box = plane.sessions.find_live("c")
    assert box is not None
    for place in ("/workspace", str(folder)):
        tried = f"cd {place}; echo x > .git/config; touch .git/hooks/x; mv .git g; echo x > sub/.git; mv sub/.git sub/g"
        said = (await box.connection.run_command(*_body(tried))).stderr
        assert said.count("Read-only") == 3 and said.count("busy") == 2, said
    # admission knows both paths, in rules and in commands
    for command, cwd in (
        (f"echo > {folder}/.github/x", None),
        ("echo > .github/x", str(folder)),
        (f"echo > {folder}/.git/config", None),
    ):
        with pytest.raises(CarrelError, match="denied"):
            await plane.operations.run_command(ADMIN, "c", CommandRequest(command=command, cwd=cwd))
    planted = "mkdir .GitHub; mkdir -p new/x; ln -s x new/.git"
    await box.connection.run_command(*_body(planted))
    gone = (folder / ".GitHub", folder / "new" / ".git")
    await until(lambda: not any(map(os.path.lexists, gone)), what="protected names to be taken away")
    assert (folder / ".GitHub.held-by-carrel").is_dir()
    await until(lambda: "held-by-carrel" in (plane.sessions.live()[0].record.notice or ""), what="a notice")
    await plane.audit.flush()
    recorded = (await plane.audit.search(Filter(chain_of("c"), name="hold_path"), limit=10)).items
    assert len(recorded) == 2
    # a new server goes on with it, and the last look is at the end
    await killed(plane)
    await plane.attachments.protected_folders.close()  # type: ignore[attr-defined]
    other = await ControlPlane.open(plane.settings)
    try:
        box = other.sessions.find_live("c")
        assert box is not None
        await box.connection.run_command(*_body("mkdir -p later/.git; echo '[core] fsmonitor=x' > later/.git/config"))
        await until(lambda: not (folder / "later" / ".git" / "config").exists(), what="a name that appeared later")
        assert (folder / "later" / ".git" / "config.held-by-carrel").exists()
        await other.attachments.protected_folders.close()  # type: ignore[attr-defined]
        await box.connection.run_command(*_body("mkdir -p last/.git; echo '[core] fsmonitor=x' > last/.git/config"))
        info = await other.sessions.stop("c")
        assert info.state is State.STOPPED
        assert "last/.git/config" in (info.notice or "")
        assert (folder / "last" / ".git" / "config.held-by-carrel").exists()
        assert (folder / ".git" / "config").read_text() == "mine"
        assert os.listdir(f"{other.layout.data_dir}/protected") == []
    finally:
        await other.close()


def _body(command: str) -> tuple[bytes, float | None, int]:
    body, timeout = command_body(CommandRequest(command=command), 20)
    return body, timeout, 1 << 20
