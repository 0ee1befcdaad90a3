from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.calls import ADMIN
from tests.support.environments_ground import attach, context, source_package, stocked

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.control.python.environment_builds import LineSplitter, described, modules
from carrel.control.python.environment_checks import ResolvableRequest
from carrel.errors import CarrelError, InvalidRequest, LimitExceeded
from carrel.models import CommandRequest, State
from carrel.workspaces.environments import EnvironmentDraft

WANTED = ResolvableRequest(("scikit-learn>1", "six"), "3.11", "/usr/bin/python3.11", (), "[]")


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"envs": settings.envs.model_copy(update={"largest_mb": 16})})


def test_modules_of_a_package() -> None:
    record = (
        "sklearn/__init__.py,,\nsklearn/tests/x.py,,\n_private.py,,\ntests/a.py,,\nx-1.dist-info/RECORD,,\nnotes,,\n"
    )
    assert modules(record, "scikit-learn") == ["sklearn"]
    assert modules("six.py,sha256=x,1\n", "six") == ["six"]
    assert modules("matplotlib/__init__.py,,\npylab.py,,\n", "matplotlib") == ["matplotlib"]
    assert modules("cv2.cpython-311-x86_64-linux-gnu.so,,\n", "opencv") == ["cv2"]
    assert modules("../../bin/x,,\n/etc/passwd,,\n;import os/x.py,,\n", "x") == []


def test_what_a_draft_says_of_itself(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "; rm -rf-1.dist-info").mkdir(parents=True)
    for name, record in (("six-1.17.dist-info", "six.py,,\n"), ("Numpy-2.dist-info", "numpy/__init__.py,,\n")):
        (packages / name).mkdir(parents=True)
        (packages / name / "RECORD").write_text(record)
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nversion_info = 3.11.2\n")
    built = described(EnvironmentDraft(str(tmp_path)), WANTED)
    assert (built.python, built.imports) == ("3.11.2", ["six"])
    assert built.packages == [{"name": "numpy", "version": "2"}, {"name": "six", "version": "1.17"}]
    (tmp_path / "pyvenv.cfg").unlink()
    (tmp_path / "pyvenv.cfg").symlink_to("/etc/passwd")
    assert described(EnvironmentDraft(str(tmp_path)), WANTED).python == "3.11"
    with pytest.raises(InvalidRequest, match="no packages"):
        described(EnvironmentDraft(str(packages)), WANTED)


def test_lines_as_they_come() -> None:
    said: list[str] = []
    lines = LineSplitter(said.append)
    for piece in (b"Res", "olved ½".encode()[:-1], "½".encode()[-1:] + b"\n\n  + a\nrest"):
        lines.feed(piece)
    lines.feed(b"\xff" * 5000)
    lines.flush()
    assert said[:2] == ["Resolved ½", "+ a"] and len(said[2]) <= 500


async def left(plane: ControlPlane) -> None:
    """Nothing is left of a build but what is on the shelf."""
    assert [box.record.context_id for box in plane.sessions.live()] == ["c"]
    ended = (await plane.sessions.page(states=[State.TERMINATED])).items
    assert ended and all(each.ephemeral for each in ended)
    assert not list(Path(plane.layout.data_dir, "envs", "drafts").iterdir())


async def test_a_source_package_cannot_leave_its_sandbox(plane: ControlPlane) -> None:
    code = """
import socket
for path in ("/etc/x", "/usr/x", "/envs/x", "/etc/carrel/x", "/run/secrets/x", "/root/x"):
    try:
        open(path, "w")
        said.append(path)
    except OSError:
        pass
for name in ("/run/secrets", "/envs"):
    try:
        said.extend(os.listdir(name))
    except OSError:
        pass
try:
    socket.create_connection(("192.0.2.1", 80), 1)
    said.append("network")
except OSError:
    pass
try:
    os.mknod(SITE + "/null", 0o20666, os.makedev(1, 3))
    said.append("device")
except OSError:
    pass
said.append(os.environ.get("TOKEN", "no token"))
open(SITE + "/left.py", "w").close()
os.chmod(SITE + "/left.py", 0o6777)
"""
    async with stocked() as index:
        index.add(source_package("curious", code), "curious")
        name = await context(plane, index, env={"TOKEN": "mine"})
        await plane.secrets.put(name, "KEY", b"open-sesame")
        info = await attach(plane, name, "curious")
        assert info.imports == ["curious"]
        look = (
            f"{info.path}/bin/python -c 'import curious; print(curious.said)'; stat -c %a {info.path}/lib/*/*/left.py"
        )
        result = await plane.operations.run_command(ADMIN, name, CommandRequest(command=look))
        assert result.stdout == "['no token']\n755\n", result.stderr
        await left(plane)


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ('os.symlink("/etc", SITE + "/out")', InvalidRequest, "link that leads out"),
        ('os.mkfifo(SITE + "/pipe")', InvalidRequest, "not a file"),
        ('open(SITE + "/huge", "wb").truncate(17 << 20)', LimitExceeded, "more than 16 MB"),
        ('raise ValueError("there is no compiler here")', InvalidRequest, "there is no compiler here"),
    ],
)
async def test_what_a_source_package_must_not_leave(
    plane: ControlPlane, code: str, kind: type[CarrelError], words: str
) -> None:
    async with stocked() as index:
        index.add(source_package("hostile", code), "hostile")
        name = await context(plane, index)
        with pytest.raises(kind, match=words):
            await attach(plane, name, "hostile")
        assert (await plane.environments.list(ADMIN)).items == []
        await left(plane)


async def test_the_manifest(plane: ControlPlane) -> None:
    async with stocked() as index:
        name = await context(plane, index)
        info = await attach(plane, name, "Shelf==1.0")
        text = await plane.operations.run_command(
            ADMIN, name, CommandRequest(command=f"cat {info.path}/carrel-env.json")
        )
        manifest = json.loads(text.stdout)
        assert manifest["imports"] == ["shelf"] and manifest["python"] == info.python
        assert [each["name"] for each in manifest["packages"]] == ["plank", "shelf"]
