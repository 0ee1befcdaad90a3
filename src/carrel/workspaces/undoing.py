"""Undoing the changes between two recorded trees in a folder that is in use.

Three trees decide: the one before a run, the one after it, and the one of now. An entry that is as the run left it gets
its state from before; one that somebody changed since is left and named. The plan is pure. It is carried out by
directory descriptors and follows no link, because hostile code may work in the folder. Each file is replaced in one
step, so a crash leaves the old or the new one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count, islice

from carrel.errors import LimitExceeded, PlatformError
from carrel.primitives import libc, walk
from carrel.primitives.trees import empty_directory, open_directory
from carrel.workspaces.volumes.base import ChangeKind
from carrel.workspaces.volumes.capture import OWNER, ROOT, Captured, PlainRow, place_of
from carrel.workspaces.volumes.objects import ObjectStore, Reader
from carrel.workspaces.volumes.rebuild import fill_file
from carrel.workspaces.volumes.trees import EntryKind, Node, Tree, unpack_tree

MOST_LISTED = 100_000
SET_IDS = stat.S_ISUID | stat.S_ISGID
"""How many changed entries are listed; more are only counted."""
MOST_STEPS = 2_000_000
ASIDE = ".carrel-undo"
"""The directory at the top of the folder for files on their way. The name belongs to carrel."""
_BATCH = 256
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
Load = Callable[[bytes], Tree]


@dataclass(frozen=True, slots=True)
class Difference:
    """One entry that differs between two trees."""

    path: bytes
    kind: ChangeKind
    before: Node | None
    after: Node | None


@dataclass(slots=True)
class Differences:
    """The entries that differ, by path. `counts` counts all of them, also those that are not listed."""

    items: list[Difference] = field(default_factory=list)
    counts: dict[ChangeKind, int] = field(default_factory=lambda: dict.fromkeys(ChangeKind, 0))
    set_ids: list[bytes] = field(default_factory=list)
    """All new and changed files that have a set-user-ID or set-group-ID bit."""

    def add(self, path: bytes, before: Node | None, after: Node | None) -> None:
        """Add an entry."""
        kind = ChangeKind.ADDED if before is None else ChangeKind.REMOVED if after is None else ChangeKind.CHANGED
        self.counts[kind] += 1
        if len(self.items) < MOST_LISTED:
            self.items.append(Difference(path, kind, before, after))
        if after is not None and after.kind is EntryKind.FILE and after.mode & SET_IDS:
            self.set_ids.append(path)

    @property
    def truncated(self) -> bool:
        """Whether entries are missing in the list."""
        return sum(self.counts.values()) > len(self.items)


def differences(before: bytes, after: bytes, load: Load) -> Differences:
    """Compare two trees. Directories that are nested deeper than paths may be long are not compared."""
    found = Differences()
    pending: list[tuple[bytes, Node | None, Node | None]] = [
        (b"", Node(EntryKind.DIRECTORY, tree=before), Node(EntryKind.DIRECTORY, tree=after))
    ]
    while pending:
        path, old, new = pending.pop()
        trees = [
            load(each.tree) if each is not None and each.kind is EntryKind.DIRECTORY else None for each in (old, new)
        ]
        if path and not (trees[0] and trees[1]):
            if not _same(old, new):
                found.add(path, old, new)
        elif trees[0] and trees[1] and _attributes(trees[0]) != _attributes(trees[1]):
            found.add(path or b".", _with_mode(old, trees[0]), _with_mode(new, trees[1]))
        if len(path) > walk.LONGEST_PATH:
            continue
        entries = [each.entries if each else {} for each in trees]
        for name in sorted(entries[0].keys() | entries[1].keys(), reverse=True):
            one, other = entries[0].get(name), entries[1].get(name)
            if one is not None and other is not None and _equal(one, other):
                continue
            pending.append((path + b"/" + name if path else name, one, other))
    return found


def lookup(tree: bytes, path: bytes, load: Load) -> Node | None:
    """Return the entry at a path of a tree."""
    node: Node | None = Node(EntryKind.DIRECTORY, tree=tree)
    for name in path.split(b"/"):
        if node is None or node.kind is not EntryKind.DIRECTORY:
            return None
        node = load(node.tree).entries.get(name)
    return node


def _is_directory(node: Node | None) -> bool:
    return node is not None and node.kind is EntryKind.DIRECTORY


def _same(one: Node | None, other: Node | None) -> bool:
    """Whether two entries that are not both directories have the same state; times do not count."""
    if one is None or other is None:
        return one is other
    return not _is_directory(one) and not _is_directory(other) and one.same(other)


def _equal(one: Node, other: Node) -> bool:
    """Whether nothing differs, for directories also below."""
    return one.tree == other.tree if _is_directory(one) and _is_directory(other) else _same(one, other)


def _attributes(tree: Tree) -> tuple[int, dict[str, bytes]]:
    return tree.mode, tree.xattrs or {}


def _with_mode(node: Node | None, tree: Tree) -> Node:
    assert node is not None  # only called for directories
    return Node(EntryKind.DIRECTORY, tree.mode, tree.mtime_ns, tree=node.tree, xattrs=tree.xattrs)


class Action(StrEnum):
    """What an undo does with an entry."""

    WRITE = "write"
    REMOVE = "remove"
    MAKE_DIRECTORY = "make_directory"
    REMOVE_DIRECTORY = "remove_directory"
    SET_ATTRIBUTES = "set_attributes"


class Reason(StrEnum):
    """Why an undo leaves an entry as it is."""

    CHANGED_LATER = "changed after the run ended"
    NOT_EMPTY = "the directory holds files that the run did not make, or that are not recorded"
    TOO_DEEP = "directories are nested too deep: delete them by hand"
    FAILED = "the system refused it"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan. `directory` is the number of the entry's directory, `own` that of a directory itself."""

    action: Action
    path: bytes
    directory: int
    wanted: Node | None = None
    facts: PlainRow | None = None
    own: int = 0
    """The path of the folder itself is empty."""

    @property
    def name(self) -> bytes:
        """The name in its directory."""
        return self.path.rpartition(b"/")[2]


@dataclass(frozen=True, slots=True)
class Left:
    """An entry that an undo does not touch."""

    path: bytes
    reason: str


@dataclass(slots=True)
class Undone:
    """The result of an undo, or its plan."""

    steps: list[Step] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)


@dataclass(slots=True)
class _Place:
    """A directory that the plan enters: its parent, its name and its key among the known facts."""

    parent: int
    name: str
    key: bytes


@dataclass(frozen=True, slots=True)
class _Visit:
    path: bytes
    directory: int
    start: Node | None
    end: Node | None
    now: Node | None


class Plan:
    """Decides what to undo, from the trees before and after a run and the folder of now. Pure."""

    def __init__(self, start: bytes, end: bytes, now: Captured, load: Load, paths: Sequence[bytes] | None):
        self._now = now
        self._load = load
        self._paths = paths
        self.places = [_Place(0, "", ROOT)]
        self.times: dict[int, int] = {}
        self.undone = Undone()
        top = [Node(EntryKind.DIRECTORY, tree=each) for each in (start, end, now.tree)]
        pending: list[_Visit | Step] = [_Visit(b"", 0, *top)]
        while pending:
            item = pending.pop()
            if isinstance(item, Step):
                self._add(item)
            else:
                pending += reversed(self._visit(item))

    def _add(self, step: Step) -> None:
        self.undone.steps.append(step)
        if len(self.undone.steps) > MOST_STEPS:
            raise LimitExceeded("too many changes to undo at once", field="paths", hint="undo single paths")

    def _leave(self, path: bytes, reason: Reason) -> list[_Visit | Step]:
        self.undone.left.append(Left(path, reason))
        return []

    def _chosen(self, path: bytes) -> bool | None:
        """Whether a path is to be undone; None if only something below it is."""
        if self._paths is None or any(path == each or path.startswith(each + b"/") for each in self._paths):
            return True
        return None if not path or any(each.startswith(path + b"/") for each in self._paths) else False

    def _visit(self, at: _Visit) -> list[_Visit | Step]:
        chosen = self._chosen(at.path)
        if chosen is False:
            return []
        if not _is_directory(at.start) and not _is_directory(at.end):
            return self._leaf(at) if chosen else []
        if len(at.path) > walk.LONGEST_PATH:
            return self._leave(at.path, Reason.TOO_DEEP)
        if not _is_directory(at.end):
            return self._removed_directory(at)
        if not _is_directory(at.start):
            return self._added_directory(at, whole=chosen is True)
        return self._kept_directory(at, whole=chosen is True)

    def _leaf(self, at: _Visit) -> list[_Visit | Step]:
        if _same(at.start, at.end) or _same(at.now, at.start):
            return []
        if not _same(at.now, at.end):
            return self._leave(at.path, Reason.CHANGED_LATER)
        action = Action.REMOVE if at.start is None else Action.WRITE
        return [Step(action, at.path, at.directory, at.start, self._facts(at) if at.now else None)]

    def _facts(self, at: _Visit) -> PlainRow:
        folder = self._now.known[self.places[at.directory].key]
        return folder.rows[os.fsdecode(at.path.rpartition(b"/")[2])]

    def _removed_directory(self, at: _Visit) -> list[_Visit | Step]:
        steps: list[_Visit | Step] = []
        if at.now is not None and not _is_directory(at.now):
            if at.end is None or not _same(at.now, at.end):
                return self._leave(at.path, Reason.CHANGED_LATER)
            steps.append(Step(Action.REMOVE, at.path, at.directory, None, self._facts(at)))
        below, number, tree = self._below(at)
        if not _is_directory(at.now):
            wanted = Node(EntryKind.DIRECTORY, tree.mode, tree.mtime_ns, xattrs=tree.xattrs)
            steps.append(Step(Action.MAKE_DIRECTORY, at.path, at.directory, wanted, own=number))
            below.append(Step(Action.SET_ATTRIBUTES, at.path, at.directory, wanted, own=number))
        return [*steps, *below]

    def _added_directory(self, at: _Visit, *, whole: bool) -> list[_Visit | Step]:
        if not _is_directory(at.now):
            return [] if _same(at.now, at.start) else self._leave(at.path, Reason.CHANGED_LATER)
        below, number, _ = self._below(at)
        if whole:
            below.append(Step(Action.REMOVE_DIRECTORY, at.path, at.directory, own=number))
            if at.start is not None:
                below.append(Step(Action.WRITE, at.path, at.directory, at.start))
        return below

    def _kept_directory(self, at: _Visit, *, whole: bool) -> list[_Visit | Step]:
        assert at.start is not None and at.end is not None
        if at.start.tree == at.end.tree:
            return []
        if not _is_directory(at.now) or at.now is None:
            return self._leave(at.path, Reason.CHANGED_LATER)
        before, after, now = self._load(at.start.tree), self._load(at.end.tree), self._load(at.now.tree)
        below, number, _ = self._below(at)
        if whole and _attributes(before) != _attributes(after) and _attributes(now) != _attributes(before):
            if _attributes(now) == _attributes(after):
                wanted = Node(EntryKind.DIRECTORY, before.mode, before.mtime_ns, xattrs=before.xattrs)
                below.append(Step(Action.SET_ATTRIBUTES, at.path, at.directory, wanted, own=number))
            else:
                self._leave(at.path, Reason.CHANGED_LATER)
        return below

    def _below(self, at: _Visit) -> tuple[list[_Visit | Step], int, Tree]:
        """Return the visits of the entries of a directory, its number and its tree before the run."""
        number = 0
        if at.path:
            name = os.fsdecode(at.path.rpartition(b"/")[2])
            self.places.append(_Place(at.directory, name, place_of(self.places[at.directory].key, name)))
            number = len(self.places) - 1
        trees = [
            self._load(each.tree) if each is not None and _is_directory(each) else Tree(0o700, 0)
            for each in (at.start, at.end, at.now)
        ]
        if _is_directory(at.start):
            self.times[number] = trees[0].mtime_ns
        before, after, now = (each.entries for each in trees)
        visits: list[_Visit | Step] = []
        for name_ in sorted(before.keys() | after.keys()):
            start, end = before.get(name_), after.get(name_)
            if start is not None and end is not None and _equal(start, end):
                continue
            path = at.path + b"/" + name_ if at.path else name_
            visits.append(_Visit(path, number, start, end, now.get(name_)))
        return visits, number, trees[0]


class Undo:
    """One undo in an open folder. `now` is the capture of the folder that was made just before."""

    def __init__(self, store: ObjectStore, reader: Reader, root: int, start: bytes, end: bytes, now: Captured):
        self._store = store
        self._reader = reader
        self._root = root
        self._start = start
        self._end = end
        self._now = now
        info = os.fstat(root)
        self._owner = info.st_uid, info.st_gid
        self._directories = walk.Directories(root)
        self._aside = -1
        self._drafts = count()
        self._firsts: dict[bytes, tuple[int, bytes]] = {}
        self._members: dict[bytes, list[bytes]] | None = None
        self._changed: dict[int, int | None] = {}

    def _load(self, key: bytes) -> Tree:
        return unpack_tree(self._reader.read(key))

    def run(self, paths: Sequence[bytes] | None, *, dry_run: bool) -> Undone:
        """Undo everything, or what is at and below some paths; with `dry_run` only say what would be done."""
        plan = Plan(self._start, self._end, self._now, self._load, paths)
        if dry_run or not plan.undone.steps:
            return plan.undone
        done = Undone(left=plan.undone.left)
        for place in plan.places[1:]:
            self._directories.add(place.parent, place.name)
        self._open_aside()
        try:
            steps = iter(plan.undone.steps)
            while batch := list(islice(steps, _BATCH)):
                drafts = self._write_drafts(batch)
                for step in batch:
                    problem = self._apply(step, drafts.get(step.path))
                    if problem is None:
                        done.steps.append(step)
                    else:
                        done.left.append(Left(step.path, problem))
            self._finish(plan)
        finally:
            self._directories.close()
            self._close_aside()
        return done

    # files on their way

    def _open_aside(self) -> None:
        for _ in range(2):
            try:
                os.mkdir(ASIDE, 0o700, dir_fd=self._root)
                break
            except FileExistsError:
                self._remove_aside()  # of an undo that was killed
        else:
            raise PlatformError(f"'{ASIDE}' in the folder cannot be removed", hint="remove it and try again")
        self._aside = os.open(ASIDE, walk.DIRECTORY, dir_fd=self._root)

    def _close_aside(self) -> None:
        if self._aside >= 0:
            os.close(self._aside)
            self._aside = -1
        with suppress(OSError, PlatformError):
            self._remove_aside()

    def _remove_aside(self) -> None:
        try:
            os.unlink(ASIDE, dir_fd=self._root)
        except OSError as error:
            if error.errno not in {errno.EISDIR, errno.EPERM}:
                raise
            fd = open_directory(ASIDE, self._root)
            try:
                empty_directory(fd)
            finally:
                os.close(fd)
            os.rmdir(ASIDE, dir_fd=self._root)

    def _write_drafts(self, batch: Sequence[Step]) -> dict[bytes, bytes]:
        """Write the files of some steps aside, and make them durable together: one sync costs less than many."""
        drafts: dict[bytes, bytes] = {}
        for step in batch:
            if step.action is Action.WRITE and step.wanted is not None:
                draft = drafts[step.path] = b"%d" % next(self._drafts)
                self._write_draft(draft, step.wanted, step.path)
        if drafts:
            libc.sync(self._aside)
        return drafts

    def _write_draft(self, draft: bytes, node: Node, path: bytes) -> None:
        if node.kind is EntryKind.LINK:
            os.symlink(node.target, draft, dir_fd=self._aside)
            with suppress(PermissionError):
                os.chown(draft, *self._owner, dir_fd=self._aside, follow_symlinks=False)
            os.utime(draft, ns=(node.mtime_ns, node.mtime_ns), dir_fd=self._aside, follow_symlinks=False)
            return
        if node.group is not None and self._link_draft(draft, node, path):
            return
        fd = os.open(draft, _NEW, 0o600, dir_fd=self._aside)
        try:
            fill_file(self._store, self._reader, fd, node)
            self._set_attributes(fd, node)
        finally:
            os.close(fd)
        if node.group is not None:
            self._firsts[node.group] = -1, draft

    def _link_draft(self, draft: bytes, node: Node, path: bytes) -> bool:
        """Make the draft a hard link to a file that it was linked with, if one of them has its content."""
        assert node.group is not None
        if (first := self._firsts.get(node.group)) is not None:
            number, name = first
            with suppress(OSError):
                source = self._aside if number < 0 else self._directories.get(number)
                os.link(name, draft, src_dir_fd=source, dst_dir_fd=self._aside, follow_symlinks=False)
                return True
        for member in self._linked_with(node.group):
            now = lookup(self._now.tree, member, self._load)
            if member == path or now is None or not now.same(node):
                continue
            with suppress(OSError):
                parent = _open_below(self._root, member.split(b"/")[:-1])
                try:
                    name = member.rpartition(b"/")[2]
                    os.link(name, draft, src_dir_fd=parent, dst_dir_fd=self._aside, follow_symlinks=False)
                finally:
                    os.close(parent)
                return True
        return False

    def _linked_with(self, group: bytes) -> list[bytes]:
        if self._members is None:
            self._members = {}
            for path, node in _files(self._start, self._load):
                if node.group is not None:
                    self._members.setdefault(node.group, []).append(path)
        return self._members.get(group, [])

    def _set_attributes(self, fd: int, node: Node) -> None:
        xattrs = dict(node.xattrs or {})
        owner = xattrs.pop(OWNER, None)
        uid, gid = self._owner if owner is None else map(int, owner.split(b":"))
        with suppress(PermissionError):  # an ordinary user cannot give files away
            os.fchown(fd, uid, gid)
        for name in walk.user_xattrs(fd).keys() - xattrs.keys():
            with suppress(OSError):
                os.removexattr(fd, name)
        walk.set_attributes(fd, node.mode, node.mtime_ns, xattrs)

    # steps

    def _apply(self, step: Step, draft: bytes | None) -> str | None:
        """Carry out a step; return why it was not possible."""
        try:
            if step.action is Action.SET_ATTRIBUTES:
                assert step.wanted is not None
                self._set_attributes(self._directories.get(step.own), step.wanted)
                self._changed[step.own] = None
                return None
            parent = self._writable(step.directory)
            if step.action is Action.MAKE_DIRECTORY:
                os.mkdir(step.name, 0o700, dir_fd=parent)
            elif step.action is Action.REMOVE_DIRECTORY:
                os.rmdir(step.name, dir_fd=parent)
            elif step.action is Action.REMOVE:
                assert step.facts is not None
                return self._remove(parent, step.name, step.facts)
            else:
                assert draft is not None and step.wanted is not None
                return self._place(parent, step, draft)
        except FileExistsError:
            return Reason.CHANGED_LATER
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                return Reason.CHANGED_LATER
            if error.errno == errno.ENOTEMPTY:
                return Reason.NOT_EMPTY
            return f"{Reason.FAILED}: {error.strerror}"
        return None

    def _writable(self, number: int) -> int:
        fd = self._directories.get(number)
        if number not in self._changed:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            locked = os.geteuid() != 0 and mode & 0o700 != 0o700
            if locked:
                os.fchmod(fd, mode | 0o700)
            self._changed[number] = mode if locked else None
        return fd

    def _place(self, parent: int, step: Step, draft: bytes) -> str | None:
        name, facts = step.name, step.facts
        if facts is None:
            libc.rename_new(self._aside, draft, parent, name)
        else:
            seen = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if not _is_known(seen, facts):
                return Reason.CHANGED_LATER
            if not libc.exchange_entries(self._aside, draft, parent, name):
                os.rename(draft, name, src_dir_fd=self._aside, dst_dir_fd=parent)
            elif not _is_same_file(os.stat(draft, dir_fd=self._aside, follow_symlinks=False), seen):
                libc.exchange_entries(self._aside, draft, parent, name)
                return Reason.CHANGED_LATER
            else:
                os.unlink(draft, dir_fd=self._aside)
        if step.wanted is not None and step.wanted.group is not None:
            self._firsts[step.wanted.group] = step.directory, name
        return None

    def _remove(self, parent: int, name: bytes, facts: PlainRow) -> str | None:
        seen = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not _is_known(seen, facts):
            return Reason.CHANGED_LATER
        draft = b"%d" % next(self._drafts)
        libc.rename_new(parent, name, self._aside, draft)
        if not _is_same_file(os.stat(draft, dir_fd=self._aside, follow_symlinks=False), seen):
            libc.rename_new(self._aside, draft, parent, name)
            return Reason.CHANGED_LATER
        os.unlink(draft, dir_fd=self._aside)
        return None

    def _finish(self, plan: Plan) -> None:
        """Give the directories in which something was done their modes and times."""
        for number in sorted(self._changed, reverse=True):
            with suppress(OSError):  # removed since
                fd = self._directories.get(number)
                if (mode := self._changed[number]) is not None:
                    os.fchmod(fd, mode)
                if number in plan.times:
                    os.utime(fd, ns=(plan.times[number], plan.times[number]))


def _is_known(info: os.stat_result, facts: PlainRow) -> bool:
    """Whether a file is the one that was captured. An inode of 0 stands for one that could not be relied on.

    The ctime of a hard link changes when another name of the file is undone, so it does not count.
    """
    _, ctime_ns, size, mtime_ns, *_, group, _ = facts
    same = (size, mtime_ns) == (info.st_size, info.st_mtime_ns) and (bool(group) or ctime_ns == info.st_ctime_ns)
    return same and facts[0] in {0, info.st_ino}


def _is_same_file(one: os.stat_result, other: os.stat_result) -> bool:
    """Whether a file was only renamed meanwhile, which changes its ctime."""
    return (one.st_ino, one.st_size, one.st_mtime_ns) == (other.st_ino, other.st_size, other.st_mtime_ns)


def _files(tree: bytes, load: Load) -> Iterator[tuple[bytes, Node]]:
    pending = [(b"", tree)]
    while pending:
        above, key = pending.pop()
        if len(above) > walk.LONGEST_PATH:
            continue
        for name, node in load(key).entries.items():
            path = above + b"/" + name if above else name
            if node.kind is EntryKind.DIRECTORY:
                pending.append((path, node.tree))
            else:
                yield path, node


def _open_below(root: int, names: Sequence[bytes]) -> int:
    fd = os.dup(root)
    for name in names:
        try:
            below = os.open(name, walk.DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd
