"""Roots that are built for another kernel: what is mapped belongs to one user of the host, and to nobody else there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.children import in_child

from carrel.isolation import ids, linux, staging
from carrel.isolation.staging import StagedMount, StageOrder

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can map users of the host")
AGENT = 1000


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    for name in ("root", "covers", "above/workspace", "image/home", "volume"):
        (tmp_path / name).mkdir(parents=True)
    for path in ("image/home", "volume"):
        file = tmp_path / path / "private"
        file.write_text(path)
        file.chmod(0o600)
        os.chown(file, AGENT, AGENT)
        os.chown(file.parent, AGENT, AGENT)
    (tmp_path / "image/of-root").write_text("public")
    return tmp_path


def staged_for(slot: int, place: Path, work: Callable[[], object], *, by: int) -> object:
    """What `work` brings in a root that is built with the users of one slot, done by the file server's user of `by`."""

    def build_and_work() -> object:
        users = linux.user_namespace(*(2 * [f"0 0 1\n{AGENT} {ids.agent(slot, idmap=True)} 1\n"]))
        order = StageOrder(
            root=str(place / "root"),
            layers=[str(place / "above"), str(place / "image")],
            mounts=[StagedMount(str(place / "volume"), "/workspace", writable=True)],
            covers=str(place / "covers"),
            secrets="",
            owner=AGENT,
            program=(),
            groups=(),
        )
        assert staging.stage(order, users)
        os.chdir(place / "root")
        user = ids.agent(by, idmap=True)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        return work()

    return in_child(build_and_work)


def test_files_belong_to_its_user_there_and_to_the_agent_on_the_disk(place: Path) -> None:
    def work() -> object:
        Path("workspace/new").write_text("mine")
        said = [Path(name).read_text() for name in ("workspace/private", "home/private", "of-root")]
        return said, Path("workspace/new").stat().st_uid, Path("of-root").stat().st_uid

    said, owner, root = staged_for(7, place, work, by=7)  # type: ignore[misc]
    assert said == ["volume", "image/home", "public"] and owner == ids.agent(7, idmap=True)
    assert root not in (owner, AGENT)
    assert (place / "volume/new").stat().st_uid == AGENT


def test_a_file_server_that_gets_into_the_root_of_another_is_nobody_there(place: Path) -> None:
    def work() -> object:
        found = {}
        for name in ("workspace/private", "home/private", str(place / "volume/private"), "of-root"):
            try:
                found[name] = Path(name).read_text()
            except PermissionError:
                found[name] = "refused"
        try:
            Path("workspace/new").write_text("theirs")
        except OSError:
            found["new"] = "refused"
        return list(found.values())

    assert staged_for(7, place, work, by=8) == ["refused", "refused", "refused", "public", "refused"]
