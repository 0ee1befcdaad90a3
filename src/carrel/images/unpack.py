"""Unpacks one layer into a directory, in a process of its own (`python -m carrel.images.unpack`).

The layer stands alone: its files, and a record of its directories' attributes and of what it does to the layers below
(whiteouts, hard links to their files). `assembly.py` makes a root file system of several. Devices
beneath `dev/` are left out, because a sandbox has a /dev of its own; elsewhere they are refused.

The input is hostile. No path of it is ever resolved by the kernel through a link: the parent of every entry must be a
directory that this process made, and is opened without following links.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from carrel.errors import CarrelError, ImageRefused, LimitExceeded, PlatformError
from carrel.images.assembly import LAYER_RECORD, assemble
from carrel.images.layer_reading import (
    BLOCK,
    CHARACTER,
    FIFO,
    FILE,
    FOLDER,
    HARD_LINK,
    SYMLINK,
    Entry,
    LayerLimits,
    LayerReader,
)
from carrel.primitives import libc
from carrel.primitives.atomic import write_all
from carrel.primitives.walk import DIRECTORY, LONGEST_PATH

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_WHITEOUT, _OPAQUE, _AUFS = b".wh.", b".wh..wh..opq", b".wh..wh."
_OPEN = 200
_BLOCK_BYTES = 4096
_NAME_BYTES = 256
"""The average length of names beyond which a layer is refused: those of directories and links are kept in memory."""
_MEMORY = 4 << 30
_REPORT_S = 0.1
_PR_SET_PDEATHSIG = 1
_XATTRS_OF_ROOT = frozenset(("security.capability", "system.posix_acl_access", "system.posix_acl_default"))
_REFUSED_PATHS = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EILSEQ, errno.EINVAL}


class _Unpacking:
    """One layer on its way into the open directory `root`."""

    def __init__(self, root: int, reader: LayerReader, max_entries: int):
        self._root = root
        self._reader = reader
        self._max_folders = max_entries
        self._text_left = max_entries * _NAME_BYTES
        self._owners = os.geteuid() == 0
        self._folders: dict[bytes, Entry | None] = {b"": None}
        """The directories made so far. None for those that the layer only passes through."""
        self._open: dict[bytes, int] = {b"": root}
        self._whiteouts: dict[str, list[str]] = {}
        self._opaque: list[str] = []
        self._borrowed: dict[bytes, bytes] = {}
        self._bytes = 0

    def run(self) -> dict[str, object]:
        """Unpack everything and return the record of the layer."""
        told = time.monotonic()
        for entry in self._reader:
            name = _clean(entry.name)
            self._remember(len(name) + len(entry.target))
            for key, value in entry.xattrs.items():
                self._remember(len(key) + len(value))
            try:
                self._add(entry, name)
            except OSError as error:
                if error.errno in _REFUSED_PATHS:
                    raise _refused(name, f"cannot be created: {error.strerror}") from None
                raise
            if time.monotonic() - told > _REPORT_S:
                told = time.monotonic()
                _say({"bytes": self._reader.consumed})
        self._reader.finish()
        return {
            "bytes": self._bytes,
            "folders": {os.fsdecode(path): self._attributes(entry) for path, entry in self._folders.items() if entry},
            "whiteouts": self._whiteouts,
            "opaque": self._opaque,
            "borrowed": {os.fsdecode(path): os.fsdecode(target) for path, target in self._borrowed.items()},
        }

    def _remember(self, size: int) -> None:
        """Count text that is kept in memory until the end."""
        self._text_left -= size
        if self._text_left < 0:
            raise ImageRefused("the paths and attributes in the layer are too long", field="image")

    def _attributes(self, entry: Entry) -> list[object]:
        """Return the attributes of a directory for the record: here, its mode might forbid to look into it."""
        xattrs = {key: value.hex() for key, value in entry.xattrs.items() if self._takes_xattr(key)}
        return [entry.mode, entry.uid, entry.gid, entry.mtime_ns, xattrs]

    def _add(self, entry: Entry, name: bytes) -> None:
        kind = entry.kind
        parent, _, base = name.rpartition(b"/")
        if base.startswith(_WHITEOUT):
            self._hide(name, parent, base)
        elif kind == FOLDER:
            self._folder(entry, name, parent, base)
        elif not base:
            raise _refused(name, "is the root and no directory")
        elif kind == FILE:
            self._file(entry, name, parent, base)
        elif kind == SYMLINK:
            self._symlink(entry, name, parent, base)
        elif kind == HARD_LINK:
            self._hard_link(entry, name, parent, base)
        elif kind == FIFO:
            folder = self._clear(name, parent, base)
            os.mkfifo(base, entry.mode & 0o777, dir_fd=folder)
            self._finish_entry(entry, folder, base)
        elif kind in {CHARACTER, BLOCK}:
            if not name.startswith(b"dev/"):
                raise _refused(name, "is a device")
        elif kind == b"S":
            raise _refused(name, "is a sparse file, which carrel does not read")
        else:
            raise _refused(name, f"is of the unknown kind {kind!r}")

    # Directories

    def _directory(self, path: bytes) -> int:
        """Return the open directory at `path`. Makes it, and those above it, if the layer has not named them."""
        found = self._open.get(path)
        if found is not None:
            return found
        if path not in self._folders:
            return self._make_folders(path)
        return self._keep_open(path, libc.open_without_links(os.fsdecode(path), self._root, DIRECTORY))

    def _make_folders(self, path: bytes) -> int:
        """Make a directory and those above it that are missing, from the top. A short entry may ask for thousands."""
        missing = [path]
        while (above := missing[-1].rpartition(b"/")[0]) not in self._folders:
            missing.append(above)
        folder = self._directory(above)
        for each in reversed(missing):
            base = each.rpartition(b"/")[2]
            if base.startswith(_WHITEOUT):
                raise _refused(each, "is a whiteout and has entries")
            try:
                os.mkdir(base, 0o700, dir_fd=folder)
            except FileExistsError:
                raise _refused(each, "is a link or a file, and an entry leads through it") from None
            self._borrowed.pop(each, None)
            self._count_folder(each)
            folder = self._keep_open(each, os.open(base, DIRECTORY, dir_fd=folder))
        return folder

    def _keep_open(self, path: bytes, descriptor: int) -> int:
        if len(self._open) >= _OPEN:
            self.close_folders()
        self._open[path] = descriptor
        return descriptor

    def _count_folder(self, path: bytes) -> None:
        self._folders[path] = None
        self._bytes += _BLOCK_BYTES
        self._remember(len(path))
        if len(self._folders) > self._max_folders:
            raise ImageRefused(f"the layer has more than {self._max_folders} directories", field="image")

    def close_folders(self) -> None:
        """Close all directories but the root."""
        for path, descriptor in self._open.items():
            if path:
                os.close(descriptor)
        self._open = {b"": self._root}

    def _folder(self, entry: Entry, name: bytes, parent: bytes, base: bytes) -> None:
        if name not in self._folders:
            above = self._directory(parent)
            try:
                os.mkdir(base, 0o700, dir_fd=above)
            except FileExistsError:
                os.unlink(base, dir_fd=above)
                os.mkdir(base, 0o700, dir_fd=above)
            self._borrowed.pop(name, None)
            self._count_folder(name)
        self._folders[name] = entry

    # Other entries

    def _file(self, entry: Entry, name: bytes, parent: bytes, base: bytes) -> None:
        folder = self._open.get(parent)
        if folder is None:
            folder = self._directory(parent)
        mode, size = entry.mode, entry.size
        try:
            descriptor = os.open(base, _NEW, mode & 0o777, dir_fd=folder)
        except FileExistsError:
            self._clear(name, parent, base)
            descriptor = os.open(base, _NEW, mode & 0o777, dir_fd=folder)
        try:
            if size:
                self._reader.copy(size, descriptor)
                self._bytes += size + -size % _BLOCK_BYTES
            if self._owners and (entry.uid or entry.gid):
                os.fchown(descriptor, entry.uid, entry.gid)
            if entry.xattrs:
                self._set_xattrs(descriptor, entry.xattrs)
            if mode & 0o7000:  # after the owner, whose change clears them
                os.fchmod(descriptor, mode)
            os.utime(descriptor, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(descriptor)
        if self._borrowed:
            self._borrowed.pop(name, None)

    def _symlink(self, entry: Entry, name: bytes, parent: bytes, base: bytes) -> None:
        if not entry.target:
            raise _refused(name, "is a symbolic link to nothing")
        folder = self._directory(parent)
        try:
            os.symlink(entry.target, base, dir_fd=folder)
        except FileExistsError:
            self._clear(name, parent, base)
            os.symlink(entry.target, base, dir_fd=folder)
        self._finish_entry(entry, folder, base)

    def _finish_entry(self, entry: Entry, folder: int, base: bytes) -> None:
        """Set owner and times of an entry that cannot be opened."""
        if self._owners and (entry.uid or entry.gid):
            os.chown(base, entry.uid, entry.gid, dir_fd=folder, follow_symlinks=False)
        os.utime(base, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=folder, follow_symlinks=False)

    def _hard_link(self, entry: Entry, name: bytes, parent: bytes, base: bytes) -> None:
        target = _clean(entry.target)
        if target == name:
            return
        above, _, last = target.rpartition(b"/")
        folder = self._clear(name, parent, base)
        if target in self._folders:
            raise _refused(name, "is a hard link to a directory")
        if above in self._folders:
            with suppress(FileNotFoundError):
                os.link(last, base, src_dir_fd=self._directory(above), dst_dir_fd=folder, follow_symlinks=False)
                return
        # The file is of a lower layer, or of none: then the assembly refuses it.
        self._borrowed[name] = self._borrowed.get(target, target)

    def _clear(self, name: bytes, parent: bytes, base: bytes) -> int:
        """Remove what an earlier entry of the layer made at this path, and return the open parent."""
        folder = self._directory(parent)
        self._borrowed.pop(name, None)
        try:
            if name in self._folders:
                open_folder = self._open.pop(name, None)
                if open_folder is not None:
                    os.close(open_folder)
                os.rmdir(base, dir_fd=folder)
                del self._folders[name]
            else:
                os.unlink(base, dir_fd=folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            raise _refused(name, "replaces a directory of the same layer that has entries") from None
        return folder

    def _hide(self, name: bytes, parent: bytes, base: bytes) -> None:
        if base == _OPAQUE:
            self._opaque.append(os.fsdecode(parent))
        elif not base.startswith(_AUFS):  # else bookkeeping of an old storage driver
            hidden = base[len(_WHITEOUT) :]
            if hidden in {b"", b".", b".."}:
                raise _refused(name, "is not a valid whiteout")
            self._whiteouts.setdefault(os.fsdecode(parent), []).append(os.fsdecode(hidden))

    def _set_xattrs(self, descriptor: int, xattrs: dict[str, bytes]) -> None:
        for key, value in xattrs.items():
            if self._takes_xattr(key):
                with suppress(OSError):  # a file system may not have them
                    os.setxattr(descriptor, key, value)

    def _takes_xattr(self, key: str) -> bool:
        """Attributes that programs may set and, as root, capabilities and access lists. Others belong to the host
        where the image was made.
        """
        return key.startswith("user.") or (self._owners and key in _XATTRS_OF_ROOT)


def _clean(name: bytes) -> bytes:
    """Return a path relative to the root. Raises `ImageRefused` for one that is absolute or leads up."""
    if name[:2] == b"./":
        name = name[2:]
    if name[-1:] == b"/" and name != b"/":
        name = name[:-1]
    if name[:1] in {b"/", b".", b""} or b"//" in name or b"/." in name:
        if name[:1] == b"/":
            raise _refused(name, "is absolute")
        parts = [part for part in name.split(b"/") if part not in {b"", b"."}]
        if b".." in parts:
            raise _refused(name, "leads out of the image")
        name = b"/".join(parts)
    if len(name) >= LONGEST_PATH or b"\0" in name:
        raise _refused(name, "is not a path that can exist")
    return name


def _refused(name: bytes, why: str) -> ImageRefused:
    shown = os.fsdecode(name)[:200].encode(errors="backslashreplace").decode()
    return ImageRefused(
        f"the layer is refused: the entry {shown!r} {why}", field="image", hint="nothing of this layer was kept"
    )


def disk_problem(error: OSError) -> CarrelError:
    """Return the error for users when files of images cannot be written."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return LimitExceeded(
            "the disk of the images is full: nothing of this image was kept",
            field="image",
            hint="remove images that are not needed (`carrel image rm`), or free disk space, then try again",
        )
    where = os.fsdecode(error.filename or "")[:200]
    return PlatformError(
        f"cannot store an image: {error.strerror or error}: {where}", hint="look at the disk of the images"
    )


def _say(message: dict[str, object]) -> None:
    write_all(1, json.dumps(message).encode() + b"\n")


def unpack(target: str, source: str, diff_id: str, limits: LayerLimits) -> None:
    """Unpack the layer at `source` into the empty directory `target`: its files in `tree`, and its record."""
    tree = os.path.join(target, "tree")
    os.mkdir(tree, 0o700)
    root = os.open(tree, DIRECTORY)
    try:
        reader = LayerReader(source, limits, diff_id)
        unpacking = _Unpacking(root, reader, limits.max_entries)
        try:
            record = unpacking.run()
        finally:
            unpacking.close_folders()
            reader.close()
    finally:
        os.close(root)
    with open(os.path.join(target, LAYER_RECORD), "w", encoding="ascii") as file:
        json.dump(record, file)


def main(words: Sequence[str]) -> int:
    """Run as a child of the process `words[0]`, and end with it. The last line of output is a problem, if any."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(words[0]):
        return 1
    os.umask(0)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    problem: CarrelError
    try:
        if words[1] == "unpack":
            unpack(words[2], words[3], words[4], LayerLimits(*map(int, words[5:8])))
        else:
            assemble(words[2], words[3:])
        return 0
    except CarrelError as error:
        problem = error
    except MemoryError:
        problem = ImageRefused("the layer needs too much memory to unpack", field="image")
    except OSError as error:
        problem = disk_problem(error)
    _say({"problem": problem.problem()})
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
