"""Layers of builds: what COPY copies and where to, and what a RUN has changed."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from carrel.errors import InvalidRequest, LimitExceeded
from carrel.images.build_layers import changes_layer, copy_layer, directory_layer
from carrel.images.build_steps import CopyStep
from carrel.primitives.build_context import is_ignored, pack_context, read_rules

LARGEST = 1 << 20


def filled(root: Path, **files: str) -> Path:
    root.mkdir(exist_ok=True)
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def copied(tmp_path, sources, target, *, owner=(0, 0), mode=None, most=LARGEST):
    step = CopyStep(3, "COPY", "", tuple(sources), target, "", mode, False)
    path = tmp_path / "layer.tar"
    path.unlink(missing_ok=True)
    copy_layer(step, str(tmp_path / "context"), str(tmp_path / "root"), owner, str(path), most)
    with tarfile.open(path) as found:
        return {each.name: each for each in found}


@pytest.fixture
def places(tmp_path):
    context = filled(tmp_path / "context", a="A", b__c="C", b__d__e="E", x1="1", x2="2")
    os.symlink("../../../etc/passwd", context / "b/out")
    os.symlink("/a", context / "linked")
    os.symlink("/../../../../etc", context / "leaves")
    root = filled(tmp_path / "root", usr__bin__sh="", etc__x="")
    os.symlink("usr/bin", root / "bin")
    os.symlink("/nowhere", root / "dangling")
    return tmp_path


def test_where_it_goes(places):
    assert list(copied(places, ["a"], "/new/name")) == ["new", "new/name"]
    assert list(copied(places, ["a"], "/bin/")) == ["usr/bin/a"], "through the link of the image"
    assert list(copied(places, ["a"], "/etc")) == ["etc/a"], "a directory that is there"
    assert list(copied(places, ["b"], "/etc/")) == ["etc/c", "etc/d", "etc/out", "etc/d/e"], "what is in it"
    assert list(copied(places, ["x*", "a"], "/t/")) == ["t", "t/x1", "t/x2", "t/a"]
    assert sorted(copied(places, ["."], "/")) == [
        "a",
        "b",
        "b/c",
        "b/d",
        "b/d/e",
        "b/out",
        "leaves",
        "linked",
        "x1",
        "x2",
    ]


def test_links_stay_in_the_context(places):
    assert copied(places, ["linked"], "/l")["l"].isfile(), "the file that it names in the context"
    assert copied(places, ["b"], "/b/")["b/out"].linkname == "../../../etc/passwd", "kept as a link"
    for source in ("leaves/passwd", "../../../etc/passwd", "b/out", "nothing*"):
        with pytest.raises(InvalidRequest, match=r"line 3: .* is not in the build context"):
            copied(places, [source], "/l")


def test_owner_mode_time_and_size(places):
    found = copied(places, ["b"], "/b/", owner=(7, 8), mode=0o640)
    assert {(each.uid, each.gid, each.mode) for name, each in found.items() if each.isfile()} == {(7, 8, 0o640)}
    assert len({each.mtime for each in found.values()}) == 1
    (places / "context/large").write_bytes(b"x" * LARGEST)
    with pytest.raises(LimitExceeded, match="larger than"):
        copied(places, ["large"], "/l")


def test_directories(places):
    layer = places / "dir.tar"
    assert directory_layer("/usr/bin", str(places / "root"), (0, 0), str(layer)) is None
    directory_layer("/bin/x/y", str(places / "root"), (5, 5), str(layer))
    with tarfile.open(layer) as found:
        assert found.getnames() == ["usr/bin/x", "usr/bin/x/y"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may set the attributes of overlays")
def test_changes_of_a_run(tmp_path):
    upper = filled(tmp_path / "upper", etc__new="N", etc__same="S", gone__x="")
    os.link(upper / "etc/new", upper / "etc/second")
    os.mknod(upper / "etc/removed", 0o20000, os.makedev(0, 0))
    os.setxattr(upper / "gone", "user.overlay.opaque", b"y")
    os.mkfifo(upper / "pipe")
    os.chown(upper / "etc/same", 1000, 1000)
    changes_layer(str(upper), lambda info: (info.st_uid // 10, 3), str(tmp_path / "layer"), LARGEST)
    with tarfile.open(tmp_path / "layer") as tar:
        found = {each.name: each for each in tar}
    assert sorted(found) == [
        "etc",
        "etc/.wh.removed",
        "etc/new",
        "etc/same",
        "etc/second",
        "gone",
        "gone/.wh..wh..opq",
        "gone/x",
    ]
    assert found["etc/second"].islnk() and found["etc/second"].linkname == "etc/new"
    assert (found["etc/same"].uid, found["etc/same"].gid) == (100, 3)


def test_dockerignore(tmp_path):
    rules = read_rules("# x\n*.log\n**/node_modules\n/build\n!build/keep\ntemp?\n")
    for path in ("a.log", "node_modules/x", "deep/er/node_modules", "build", "build/x", "temp1"):
        assert is_ignored(path, rules), path
    for path in ("b/a.log", "build/keep", "build/keep/x", "temp", "builds"):
        assert not is_ignored(path, rules), path
    context = filled(tmp_path / "c", Dockerfile="FROM x", a="", b__keep="", b__not="")
    (context / ".dockerignore").write_text("Dockerfile\nb\n!b/keep\n")
    with open(tmp_path / "one", "w+b") as one, open(tmp_path / "two", "w+b") as two:
        for each in (one, two):
            pack_context(str(context), "Dockerfile", each)
            each.seek(0)
        assert one.read() == two.read()
    with tarfile.open(tmp_path / "one") as tar:
        assert sorted(tar.getnames()) == [".dockerignore", "Dockerfile", "a", "b/keep"]
