"""Layers: random ones against a model, and hostile ones, which are refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.children import in_child
from tests.support.registry import tar_entry, tar_of

from carrel.errors import ImageRefused
from carrel.images.assembly import assemble
from carrel.images.layer_reading import LayerLimits
from carrel.images.unpack import unpack
from carrel.primitives.trees import remove_tree

LIMITS = LayerLimits(max_bytes=64 << 20, max_entries=1000, max_ratio=50)
ROOT = os.geteuid() == 0


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def digest(tar: bytes) -> str:
    return f"sha256:{hashlib.sha256(tar).hexdigest()}"


def unpack_bytes(tmp_path: Path, blob: bytes, diff_id: str = "", limits: LayerLimits = LIMITS) -> Path:
    (tmp_path / "blob").write_bytes(blob)
    target = tmp_path / "layer"
    target.mkdir()
    unpack(str(target), str(tmp_path / "blob"), diff_id, limits)
    return target / "tree"


# The model


@dataclass
class Node:
    """What a path is. Nodes that are one inode are one object."""

    kind: str
    mode: int = 0o755
    owner: tuple[int, int] = (0, 0)
    mtime: int = 0
    data: bytes = b""
    xattrs: dict[str, bytes] = field(default_factory=dict)


Tree = dict[str, Node]
NAMES = ("a", "b", "c", "long" * 30, "ü")


def parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def beneath(tree: Tree, path: str) -> list[str]:
    return [each for each in tree if each.startswith(path + "/")]


def random_layer(rng: random.Random, lower: Tree) -> tuple[bytes, Tree]:
    """A layer, and what the tree beneath it becomes with it."""
    own: Tree = {}
    hidden, opaque = set(), set()
    entries = []
    named: set[str] = set()
    for _ in range(rng.randrange(1, 12)):
        known = [each for each, node in own.items() if node.kind == "dir"] + [
            e for e, n in lower.items() if n.kind == "dir"
        ]
        folder = rng.choice(["", *known])
        path = f"{folder}/{rng.choice(NAMES)}".lstrip("/")
        if path in own or any(above in own and own[above].kind != "dir" for above in parents(path)):
            continue
        kind = rng.choice(["dir", "dir", "file", "file", "file", "link", "hard", "fifo", "whiteout", "opaque"])
        values: dict[str, Any] = {
            "mode": rng.choice([0o755, 0o640, 0o000, 0o4711, 0o1777]),
            "mtime": rng.randrange(1 << 31),
        }
        owner = (rng.choice([0, 1234, 3_000_000]), rng.choice([0, 77]))
        values |= {"uid": owner[0], "gid": owner[1]}
        node = Node(kind, values["mode"], owner, values["mtime"])
        if kind == "whiteout":
            hidden.add(path)
            entries.append(tar_entry(os.path.join(folder, ".wh." + path.rpartition("/")[2])))
            continue
        if kind == "opaque":
            opaque.add(folder)
            entries.append(tar_entry(os.path.join(folder, ".wh..wh..opq")))
            continue
        prefix = rng.choice(["", "./"])
        if kind == "dir":
            entries.append(tar_entry(f"{prefix}{path}/", kind=tarfile.DIRTYPE, **values))
        elif kind == "file":
            node.data = rng.randbytes(rng.choice([0, 10, 600, 400_000]))
            node.xattrs = {"user.note": rng.randbytes(4)} if rng.random() < 0.3 else {}
            headers = {f"SCHILY.xattr.{key}": value.decode("latin-1") for key, value in node.xattrs.items()}
            node.xattrs = {key: value.decode("latin-1").encode() for key, value in node.xattrs.items()}
            entries.append(tar_entry(prefix + path, node.data, pax_headers=headers, **values))
        elif kind == "link":
            node.data, node.mode = rng.choice([b"/etc/x", b"../..", b"x" * 150]), 0o777
            entries.append(tar_entry(prefix + path, kind=tarfile.SYMTYPE, linkname=node.data.decode(), **values))
        elif kind == "fifo":
            node.mode = values["mode"] = 0o644
            entries.append(tar_entry(prefix + path, kind=tarfile.FIFOTYPE, **values))
        else:
            targets = [e for e, n in own.items() if n.kind == "file"] or [
                e for e, n in lower.items() if n.kind == "file" and e not in own and e != path
            ]
            if not targets:
                continue
            target = rng.choice(targets)
            node = (own if target in own else lower)[target]
            entries.append(tar_entry(prefix + path, kind=tarfile.LNKTYPE, linkname=target))
        own[path] = node
        named.add(path)
        for above in parents(path):
            own.setdefault(above, Node("dir"))
    return tar_of(entries), merged(lower, own, named, hidden, opaque)


def merged(lower: Tree, own: Tree, named: set[str], hidden: set[str], opaque: set[str]) -> Tree:
    tree = dict(lower)
    gone = {each for path in hidden for each in [path, *beneath(tree, path)]}
    gone |= {each for path in opaque for each in (beneath(tree, path) if path else tree)}
    for each in gone:
        tree.pop(each, None)
    for path, node in sorted(own.items()):
        there = tree.get(path)
        if there is not None and (node.kind != "dir" or there.kind != "dir"):
            for each in [path, *beneath(tree, path)]:
                del tree[each]
            there = None
        if there is None or path in named:
            tree[path] = node
    return tree


def on_disk(root: Path) -> tuple[Tree, set[frozenset[str]]]:
    found: Tree = {}
    inodes: dict[int, set[str]] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            info = os.lstat(path)
            relative = os.path.relpath(path, root)
            kind = {stat.S_IFDIR: "dir", stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFIFO: "fifo"}[
                stat.S_IFMT(info.st_mode)
            ]
            data = os.readlink(path).encode() if kind == "link" else Path(path).read_bytes() if kind == "file" else b""
            xattrs = {key: os.getxattr(path, key) for key in os.listxattr(path)} if kind == "file" else {}
            found[relative] = Node(
                kind, stat.S_IMODE(info.st_mode), (info.st_uid, info.st_gid), int(info.st_mtime), data, xattrs
            )
            if kind != "dir":
                inodes.setdefault(info.st_ino, set()).add(relative)
    return found, {frozenset(each) for each in inodes.values()}


@pytest.mark.skipif(not ROOT, reason="only root can give files to others and read what forbids it")
@settings(max_examples=40)
@given(st.integers(min_value=0, max_value=2**32))
def test_layers_become_what_the_model_says(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    rng = random.Random(seed)
    place = tmp_path_factory.mktemp("layers")
    tree: Tree = {}
    layers = []
    for number in range(rng.randrange(1, 5)):
        tar, tree = random_layer(rng, tree)
        squeeze = rng.choice(
            [
                bytes,
                gzip.compress,
                zstandard.compress,
                lambda data: gzip.compress(data[:700]) + gzip.compress(data[700:]),
            ]
        )
        layer = place / str(number)
        layer.mkdir()
        (place / "blob").write_bytes(squeeze(tar))
        unpack(str(layer), str(place / "blob"), digest(tar), LIMITS)
        layers.append(str(layer))
    root = place / "root"
    root.mkdir()
    assemble(str(root), layers)
    found, inodes = on_disk(root)
    groups: dict[int, set[str]] = {}
    for path, node in tree.items():
        if node.kind != "dir":
            groups.setdefault(id(node), set()).add(path)
    remove_tree(str(place))
    assert found == tree
    assert inodes == {frozenset(each) for each in groups.values()}


def device(name: str) -> tuple[tarfile.TarInfo, bytes]:
    return tar_entry(name, kind=tarfile.CHRTYPE, devmajor=1, devminor=3)


SYMLINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE
HOSTILE = {
    "absolute": ([tar_entry("/etc/passwd", b"x")], "is absolute"),
    "leads up": ([tar_entry("a/../../b", b"x")], "leads out"),
    "only up": ([tar_entry("..", kind=tarfile.DIRTYPE)], "leads out"),
    "through a link": ([tar_entry("a", kind=SYMLINK, linkname="/etc"), tar_entry("a/passwd", b"x")], "leads through it"),
    "through a relative link": ([tar_entry("b/c", b""), tar_entry("a", kind=SYMLINK, linkname="b"), tar_entry("a/c", b"x")], "leads through it"),
    "folder through a link": ([tar_entry("a", kind=SYMLINK, linkname="/tmp"), tar_entry("a/b/", kind=tarfile.DIRTYPE)], "leads through it"),
    "hard link up": ([tar_entry("a", kind=HARD, linkname="../../etc/passwd")], "leads out"),
    "hard link absolute": ([tar_entry("a", kind=HARD, linkname="/etc/passwd")], "is absolute"),
    "hard link to a folder": ([tar_entry("d/", kind=tarfile.DIRTYPE), tar_entry("a", kind=HARD, linkname="d")], "to a directory"),
    "device": ([device("etc/null")], "is a device"),
    "whiteout up": ([tar_entry(".wh...")], "not a valid whiteout"),
    "whiteout with entries": ([tar_entry(".wh.a/b", b"x")], "is a whiteout"),
    "too many": ([tar_entry(f"f{number}") for number in range(5000)], "more than 1000 entries"),
    "too long": ([tar_entry("x" * 300, b"")], "cannot be created"),
    "too deep": ([tar_entry("d/" * 2100 + "f", b"")], "can exist"),
    "folders of one entry": ([tar_entry(f"{number}/d/f", b"") for number in range(600)], "more than 1000 directories"),
    "long paths of folders": ([tar_entry("d/" * 1500 + "f", b"")], "are too long"),
    "long targets": ([tar_entry(f"l{number}", kind=SYMLINK, linkname="t" * 4000) for number in range(70)], "are too long"),
    "file as root": ([tar_entry(".", b"x")], "is the root"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_layers_are_refused(tmp_path: Path, name: str) -> None:
    entries, words = HOSTILE[name]
    with pytest.raises(ImageRefused, match=words):
        unpack_bytes(tmp_path, gzip.compress(tar_of(entries)))
    assert sum(len(files) for _folder, _folders, files in os.walk(tmp_path / "layer")) <= LIMITS.max_entries
    remove_tree(str(tmp_path / "layer"))


def test_bombs_and_lies_are_refused(tmp_path: Path) -> None:
    zeros = tar_of([tar_entry("zeros", bytes(72 << 20))])
    small = tar_of([tar_entry("a", b"x")])
    claims = bytearray(small)
    claims[124:136] = b"77777777777\0"
    claims[148:156] = b"%06o\0 " % (sum(claims[:148]) + sum(claims[156:512]) + 256)
    tight = LayerLimits(1 << 40, 1000, 50)
    for blob, diff_id, limits, words in (
        (gzip.compress(zeros, 1), "", LIMITS, "claims|more than 64 MiB"),
        (gzip.compress(zeros), "", tight, "may be a bomb"),
        (zstandard.compress(zeros), "", tight, "may be a bomb"),
        (bytes(claims), "", LIMITS, "claims 8589934591 bytes"),
        (bytes(claims), "", LayerLimits(1 << 40, 1000, 50), "in the middle"),
        (small, digest(b"other"), LIMITS, "does not have the digest"),
        (gzip.compress(small)[:-20], "", LIMITS, "ends too early|damaged"),
        (b"\x1f\x8b" + b"x" * 100, "", LIMITS, "damaged"),
        (b"\x28\xb5\x2f\xfd" + b"x" * 100, "", LIMITS, "damaged"),
        (small[:700], "", LIMITS, "in the middle"),
        (b"x" * 1024, "", LIMITS, "damaged"),
    ):
        with pytest.raises(ImageRefused, match=words):
            unpack_bytes(tmp_path, blob, diff_id, limits)
        remove_tree(str(tmp_path / "layer"))


def test_gnu_names_repeated_entries_and_devices_of_dev(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        long = "/".join(["n" * 90] * 3)
        for info, data in (
            tar_entry(long, b"long"), tar_entry("l", kind=SYMLINK, linkname="t" * 150), device("dev/null"),
            tar_entry("a", b"old"), tar_entry("a", b"new"), tar_entry("b/", kind=tarfile.DIRTYPE), tar_entry("b", b"file"),
            tar_entry("c", b"file"), tar_entry("c/", kind=tarfile.DIRTYPE), tar_entry("c/d", b"d", mtime=1 << 40, uid=0),
        ):  # fmt: skip
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    tree = unpack_bytes(tmp_path, buffer.getvalue())
    assert (tree / long).read_bytes() == b"long" and os.readlink(tree / "l") == "t" * 150
    assert (
        (tree / "a").read_bytes() == b"new"
        and (tree / "b").read_bytes() == b"file"
        and (tree / "c/d").read_bytes() == b"d"
    )
    assert not (tree / "dev").exists()


@pytest.mark.parametrize("target", ["gone", "a"])
def test_hard_link_to_nothing_is_refused(tmp_path: Path, target: str) -> None:
    entries = [tar_entry("a", kind=HARD, linkname="b"), tar_entry("b", kind=HARD, linkname=target)]
    unpack_bytes(tmp_path, tar_of(entries))
    (tmp_path / "root").mkdir()
    with pytest.raises(ImageRefused, match=r"hard link to '(gone|b)'"):
        assemble(str(tmp_path / "root"), [str(tmp_path / "layer")])


def test_a_deep_layer(tmp_path: Path) -> None:
    deep = "d/" * 1100  # deeper than Python recurses
    unpack_bytes(
        tmp_path,
        tar_of([tar_entry(f"{deep}f", b"x"), tar_entry(f"{deep}g", b"y")]),
        "",
        replace(LIMITS, max_entries=10_000),
    )
    root = tmp_path / "root"
    root.mkdir()
    assemble(str(root), [str(tmp_path / "layer")])
    assert sorted(os.listdir(root / deep)) == ["f", "g"]
    remove_tree(str(root))
    remove_tree(str(tmp_path / "layer"))


def test_as_an_ordinary_user(tmp_path: Path) -> None:
    """Files belong to that user; modes that forbid everything stop nothing."""
    tmp_path.chmod(0o755)
    place = tmp_path / "own"
    place.mkdir()
    entries = [
        tar_entry("d/", kind=tarfile.DIRTYPE, mode=0o000, uid=0),
        tar_entry("d/f", b"x", mode=0o000, uid=5),
        tar_entry("s", b"x", mode=0o4755, uid=0, pax_headers={"SCHILY.xattr.security.capability": "x"}),
    ]
    if ROOT:
        os.chown(place, 64_321, 64_321)

    def work() -> None:
        if ROOT:
            os.setgroups([])
            os.setresgid(64_321, 64_321, 64_321)
            os.setresuid(64_321, 64_321, 64_321)
        unpack_bytes(place, tar_of(entries))
        (place / "root").mkdir()
        assemble(str(place / "root"), [str(place / "layer")])
        remove_tree(str(place / "layer"))

    for parent in place.parents:
        if ROOT and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o001)  # pytest closes its directories to others
    assert in_child(work) is None
    info = (place / "root" / "d").stat()
    assert stat.S_IMODE(info.st_mode) == 0 and (not ROOT or info.st_uid == 64_321)
    assert not (place / "layer").exists()
    if ROOT:
        assert stat.S_IMODE((place / "root" / "s").stat().st_mode) == 0o4755
    remove_tree(str(place / "root"))
