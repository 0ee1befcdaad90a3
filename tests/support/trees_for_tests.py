"""Deep pictures of trees, and random work on them, for the tests of volumes."""

from __future__ import annotations

import os
import random
import stat
from typing import Any, BinaryIO

from carrel.primitives import walk
from carrel.workspaces.volumes.trees import EntryKind, Tree, pack_entries


def picture(path: str) -> dict[str, Any]:
    """Everything a volume promises to preserve, by path."""
    found: dict[str, Any] = {}
    groups: dict[int, str] = {}
    root = os.open(path, walk.DIRECTORY)
    try:
        for here in walk.visit(root):
            attributes = walk.user_xattrs(here.fd)
            found[here.path + "/"] = ("dir", stat.S_IMODE(here.info.st_mode), here.info.st_mtime_ns, attributes)
            for name, info in sorted(here.entries):
                full = f"{here.path}/{name}"
                if stat.S_ISLNK(info.st_mode):
                    found[full] = ("link", os.readlink(name, dir_fd=here.fd), info.st_mtime_ns)
                elif stat.S_ISREG(info.st_mode):
                    fd = os.open(name, walk.FILE, dir_fd=here.fd)
                    try:
                        data = os.pread(fd, info.st_size, 0)
                        found[full] = (
                            "file", stat.S_IMODE(info.st_mode), info.st_mtime_ns, data, walk.user_xattrs(fd),
                            info.st_ino if info.st_nlink > 1 else 0,
                        )  # fmt: skip
                    finally:
                        os.close(fd)
    finally:
        os.close(root)
    for full in sorted(found):
        if found[full][0] == "file":
            inode = found[full][5]
            found[full] = (*found[full][:5], groups.setdefault(inode, full) if inode else None)
    return found


NAMES = ["a", "b", "c d", "new\nline", os.fsdecode(b"\xff\xfe"), "ünï", "-x", ".hidden", "a" * 200]


def mutate(path: str, rng: random.Random, steps: int) -> None:
    """Random operations an agent could do."""
    for _ in range(steps):
        folders, files = [""], []
        for base, dirs, names in os.walk(path):
            inside = os.path.relpath(base, path)
            inside = "" if inside == "." else inside + "/"
            folders += [inside + d + "/" for d in dirs if not os.path.islink(os.path.join(base, d))]
            files += [inside + n for n in names if not os.path.islink(os.path.join(base, n))]
        fresh = os.path.join(path, rng.choice(folders) + rng.choice(NAMES) + str(rng.randrange(4)))
        some = os.path.join(path, rng.choice(files)) if files else None
        try:
            _step(rng, fresh, some, os.path.join(path, rng.choice(folders)))
        except OSError:  # a name that is taken, a directory that is not empty
            continue


def _written(path: str) -> BinaryIO:
    """The file opened to be written anew, never what a link of that name leads to."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), "wb")


def _step(rng: random.Random, fresh: str, some: str | None, folder: str) -> None:
    action = rng.randrange(13)
    if action <= 2:
        with _written(fresh) as file:
            file.write(rng.randbytes(rng.choice([0, 1, 100, 5000])) * rng.choice([1, 1, 300]))
    elif action == 3:
        os.mkdir(fresh)
    elif action == 4:
        os.symlink(rng.choice(["/nowhere/at/all", "nowhere", "a", os.fsdecode(b"\xfd")]), fresh)
    elif action == 5:
        with _written(fresh) as file:
            file.seek(rng.choice([0, 1 << 20]))
            file.write(b"data")
            file.truncate(3 << 20)
    elif some is not None and action == 6:
        with open(some, "ab") as file:
            file.write(b"more")
    elif some is not None and action == 7:
        os.unlink(some)
    elif some is not None and action == 8:
        os.link(some, fresh)
    elif some is not None and action == 9:
        os.chmod(some, rng.choice([0o600, 0o755, 0o640, 0o4711]))
    elif some is not None and action == 10:
        os.utime(some, ns=(1, rng.randrange(-(10**9), 2**60)))
    elif some is not None and action == 11:
        os.setxattr(some, "user.note", rng.randbytes(5))
    elif some is not None:
        os.rename(some, fresh)
        os.chmod(folder, rng.choice([0o700, 0o755]))


def pack_tree(tree: Tree) -> bytes:
    """Encode a directory; equal directories give equal bytes."""
    parts: dict[bytes, tuple[object, ...]] = {}
    for name, node in tree.entries.items():
        if node.kind is EntryKind.DIRECTORY:
            parts[name] = (1, node.tree)
        elif node.kind is EntryKind.LINK:
            parts[name] = (2, node.mtime_ns, node.target)
        else:
            attributes = sorted((node.xattrs or {}).items())
            parts[name] = (0, node.mode, node.mtime_ns, node.size, node.extents, attributes, node.group or b"")
    return pack_entries(tree.mode, tree.mtime_ns, tree.xattrs, parts)
