"""Applies the masks of a sandbox: mounts over denied paths, done as root of the sandbox before any agent code runs.

A mount covers a name, even if it is a link, and nobody in the sandbox can unmount, rename or delete it. The zygote
has created the mounted files before, and has found the programs. Knows paths, not why they are denied.

Paths that must not move, and the directories above covered paths, become mount points too, but in a second mount of the
workspace below the visible one: the kernel treats such a name as busy in every mount, while a visible mount would also
keep files from being moved across it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from carrel.errors import PlatformError
from carrel.isolation import inside, linux, refusing_program
from carrel.isolation.folder_mounts import mount_point
from carrel.isolation.masks import LONGEST_PATH, Masks, Part, in_memory, split, unpack
from carrel.isolation.programs import ProgramCatalogue, Stamps, is_unchanged
from carrel.primitives.leftovers import remove_leftover

MOST_COVERS = 4096
LARGEST_WALK = 1_000_000
MOST_MADE, MOST_PLANS = 4 * MOST_COVERS, 64
_SIZE = "size=256m,nr_inodes=32768,mode=0755"
_NEEDED = ("/dev", "/proc", inside.SECRETS, "/sys", "/tmp", inside.HOME, inside.BUNDLE, inside.CONTROL)
_FILE, _DIRECTORY = "file", "directory"
_ALL = 4096  # names: more than a path has
Found = TypeVar("Found")


@dataclass(frozen=True)
class MaskPlan:
    """The masks of a new sandbox: programs by path with the name of their cover, the rest as requested.

    The programs of an image are not found yet: `names` has each with its cover.
    """

    programs: dict[str, str]
    names: dict[str, str]
    hidden: list[str]
    writable: list[str] | None
    readonly: list[str]


@dataclass(frozen=True)
class _CachedPlan:
    plan: int
    stamps: Stamps
    covers: frozenset[str]


class CoverFiles:
    """The covers: small files in memory, created once by the zygote for all sandboxes, which see them read-only.

    It also caches the last plans: most sandboxes have the same masks as another one, and finding programs takes longer
    than covering them. A plan is valid as long as no directory has changed that was read for it.
    """

    def __init__(self, place: str, root: str) -> None:
        """`place` is an empty directory, `root` one that has the programs of every sandbox."""
        linux.mount("tmpfs", place, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, _SIZE)
        self._root = root
        self._writable = linux.open_tree(place)
        seen = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            linux.set_mount_attributes(seen, linux.MOUNT_ATTR_RDONLY)
        finally:
            os.close(seen)
        self._uses: Counter[str] = Counter()  # how many plans use each cover
        self._plans: dict[bytes, _CachedPlan] = {}
        self._write(_FILE, b"", 0)
        os.mkdir(_DIRECTORY, 0, dir_fd=self._writable)

    def close(self) -> None:
        """Release the descriptors. The files stay for as long as they are mounted somewhere."""
        for key in list(self._plans):
            self._forget(key)
        os.close(self._writable)

    def plan(self, content: bytes, *, image: bool = False) -> int:
        """Return the plan for packed masks, as a file in memory that the store keeps. Its covers exist.

        The sandbox of an `image` finds programs itself: only there do the links of the image lead where they should.
        """
        key = hashlib.sha256(content).digest() + bytes([image])
        kept = self._plans.get(key)
        if kept is None or not is_unchanged(kept.stamps, self._root):
            kept = self._find(unpack(content), image=image)
            self._forget(key)  # only now: the new plan may use the same covers
        self._plans.pop(key, None)
        self._plans[key] = kept  # the last one now
        while len(self._plans) > 1 and (len(self._plans) > MOST_PLANS or len(self._uses) > MOST_MADE):
            self._forget(next(iter(self._plans)))
        return kept.plan

    def _find(self, masks: Masks, *, image: bool) -> _CachedPlan:
        catalogue = ProgramCatalogue(self._root)
        found = {program: [] if image else catalogue.find(program) for program in masks.programs}
        names = {program: self._cover(masks.text(program)) for program, paths in found.items() if paths or image}
        plan = in_memory(
            {
                "programs": {} if image else _by_path(found, names),
                "names": names if image else {},
                "hidden": masks.hidden,
                "writable": masks.writable,
                "readonly": masks.readonly,
            }
        )
        covers = frozenset(names.values())
        self._uses.update(covers)
        return _CachedPlan(plan, {} if image else catalogue.stamps, covers)

    def _forget(self, key: bytes) -> None:
        """Drop a plan and its unused covers. Sandboxes keep theirs: a mount outlives the name of the mounted file."""
        kept = self._plans.pop(key, None)
        if kept is None:
            return
        os.close(kept.plan)
        for name in kept.covers:
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._uses[name]
                os.unlink(name, dir_fd=self._writable)

    def _cover(self, text: str) -> str:
        content = refusing_program.image(os.fsencode(text))
        name = hashlib.sha256(content).hexdigest()
        if name not in self._uses:
            self._write(name, content, 0o555)
        return name

    def _write(self, name: str, content: bytes, mode: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self._writable)
        try:
            os.write(descriptor, content)
            os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)


def _by_path(found: dict[str, list[str]], names: Mapping[str, str]) -> dict[str, str]:
    """Return the cover of each path; of two programs with the same path, that of the first."""
    return {path: names[program] for program in reversed(found) for path in found[program]}


def read(descriptor: int) -> MaskPlan:
    """Read a plan, in the new sandbox."""
    return MaskPlan(**json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0)))


def pivot_masked(root: str, plan: MaskPlan, store: str, path: Sequence[str] = ()) -> None:
    """Pivot into `root` and cover what is masked. Raises when something cannot be covered: then no sandbox may start.

    `store` is the directory of the covers in the old root, `path` are further directories of an image's programs.
    """
    covers = os.open(store, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        linux.pivot_into(root, lambda: cover(plan, covers, path))
    finally:
        os.close(covers)


def cover(plan: MaskPlan, covers: int, path: Sequence[str] = ()) -> None:
    """Cover what is masked; `covers` is the opened directory of the covers.

    Paths are resolved in the sandbox's own root, where nothing runs yet that could change it.
    """
    programs = plan.programs
    if plan.names:
        catalogue = ProgramCatalogue(more=path)
        programs = _by_path({name: catalogue.find(name) for name in plan.names}, plan.names)
    places = [] if plan.writable is None else _open_places(plan.writable)
    try:
        hidden = _bounded(search(plan.hidden))
        readonly, busy = _unwritable(plan.readonly)
        pins = {above: True for each, count in hidden for above in _above(each, count)}
        pins |= {above: True for each in (*readonly, *busy) for above in _above(each)} | busy
        _bounded((*programs, *hidden, *readonly, *pins))
        _pin(pins, covers)
        if plan.writable is not None:
            _narrow(places)
    finally:
        for tree, _ in places:
            os.close(tree)
    for each in readonly:  # before anything is hidden in them
        _make_read_only(each)
    for each, name in programs.items():
        _attach(covers, name, each)
    for each, _ in hidden:
        try:
            directory = stat.S_ISDIR(os.lstat(each).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            continue  # a directory above it is covered by now
        _attach(covers, _DIRECTORY if directory else _FILE, each)


def _bounded(paths: Iterable[Found]) -> list[Found]:
    """Return them as a list. Raises when there are too many to mount on."""
    found = list(islice(paths, MOST_COVERS + 1))
    if len(found) > MOST_COVERS:
        raise PlatformError(
            f"more than {MOST_COVERS} paths are to be masked; let rules name folders, or allow writing only elsewhere"
        )
    return found


def _attach(covers: int, name: str, path: str) -> None:
    tree = linux.open_tree(name, dir_fd=covers)
    try:
        linux.move_mount(tree, path)
    except FileNotFoundError:
        pass  # removed on the host a moment ago
    finally:
        os.close(tree)


# what is hidden


def expand(patterns: Sequence[str]) -> Iterator[str]:
    """Yield the paths that match now, and files where a pattern has a directory.

    Such a file, like a `.git` that names another directory, would lead programs to what it names instead.
    """
    return (path for path, _ in _matches(patterns, on_way=True))


def search(patterns: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the paths that match now, each with the number of directories above it that must keep their names for the
    pattern to match again.
    """
    return ((path, min(_needed(split(each)) for each in meant)) for path, meant in _matches(patterns))


def _matches(
    patterns: Sequence[str], *, further: Collection[str] = (), on_way: bool = False
) -> Iterator[tuple[str, list[str]]]:
    """Yield the paths that match now, with their patterns. Inside a directory that matches, the search goes on only if
    all of its patterns are in `further`. Paths that the sandbox itself needs are skipped, those beside them are not.

    Links of the workspace are not followed, because they could lead anywhere: a link on the way matches itself. With
    `on_way` a file on the way does so too.
    """
    walks: dict[str, list[str]] = {}
    rests: dict[str, tuple[Part, ...]] = {}
    for pattern in patterns:
        parts = split(pattern)
        fixed = next((index for index, part in enumerate(parts) if not isinstance(part, str)), len(parts))
        top = "/" + "/".join(str(part) for part in parts[:fixed])
        if (link := _link_above(top, files=on_way)) is not None:
            yield link, [pattern]
        elif parts[fixed:] in {(), (None,)} or os.path.islink(top):
            yield from ((path, [pattern]) for path in _maskable(top))
        else:
            walks.setdefault(top, []).append(pattern)
            rests[pattern] = parts[fixed:]
    left = LARGEST_WALK
    for top, found in walks.items():
        ends = frozenset(index for index, each in enumerate(found) if each not in further)
        for path, meant, visited in _walk(top, [rests[each] for each in found], ends, on_way=on_way):
            left -= visited
            if left < 0:
                raise PlatformError(f"more than {LARGEST_WALK} files had to be searched for paths to mask")
            if path is not None:
                yield from ((each, [found[index] for index in meant]) for each in _maskable(path))


def _needed(parts: tuple[Part, ...]) -> int:
    """Return how many directory names above a match a pattern depends on: all, unless it begins with `**`."""
    first = parts.index(None) if None in parts else len(parts)
    rest = parts[first + 1 : -1] if parts[-1] is None else parts[first + 1 :]
    in_workspace = first <= inside.WORKSPACE.count("/")
    return len(rest) - 1 if in_workspace and rest and None not in rest else _ALL


def _above(path: str, count: int = _ALL) -> Iterator[str]:
    """Yield the first `count` directories of the workspace above a path, the nearest first."""
    while count > 0 and (path := os.path.dirname(path)).startswith(f"{inside.WORKSPACE}/"):
        yield path
        count -= 1


def _link_above(path: str, *, files: bool = False) -> str | None:
    """Return the first link on the way to a path of the workspace, with `files` also the first file; or None."""
    if path.startswith(f"{inside.WORKSPACE}/"):
        above = inside.WORKSPACE
        for name in path.removeprefix(above).split("/")[1:-1]:
            above += f"/{name}"
            if os.path.islink(above) or (files and os.path.isfile(above)):
                return above
    return None


def _maskable(path: str) -> Iterator[str]:
    """Yield a path, or its entries where the path itself must stay accessible."""
    if path in _NEEDED or not os.path.lexists(path):
        return
    if not any(place.startswith(f"{path.rstrip('/')}/") for place in (*_NEEDED, f"{inside.WORKSPACE}/")):
        yield path
        return
    for name in os.listdir(path):
        yield from _maskable(f"{path.rstrip('/')}/{name}")


_States = frozenset[tuple[int, int]]
"""The patterns that may match at or below a path: the index of each, and how many of its parts lie behind."""


@dataclass(frozen=True)
class _Step:
    """What the patterns say about the entries of a directory. Most directories of a tree share one."""

    names: frozenset[str] | None
    """The names that lead elsewhere than every other name; None where a test has to decide."""
    others: _States
    """Where every other name leads."""
    only_directories: bool
    """Whether other names mean something only if they are directories."""


def _walk(
    top: str, rests: list[tuple[Part, ...]], ends: frozenset[int], *, on_way: bool
) -> Iterator[tuple[str | None, list[int], int]]:
    """Yield matches beneath a directory, with their patterns and the number of files read since the last one. Links are
    not followed. A directory that a pattern of `ends` matches is not entered.

    Nothing can be mounted at a path that is too long. So a directory matches itself when it contains a match, or may
    contain one, beyond the longest path.
    """
    steps: dict[_States, _Step] = {}
    stack = [(top, _ready(rests, ((index, 0) for index in range(len(rests)))))]
    visited = 0
    while stack:
        path, states = stack.pop()
        if path in _NEEDED:
            continue
        try:
            listing = os.scandir(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # the agent cannot read it either
        if states not in steps:
            steps[states] = _entries_step(rests, states)
        step = steps[states]
        names, only_directories = step.names, step.only_directories
        with listing:
            for entry in listing:  # runs for every file of a workspace, most of which no pattern names
                visited += 1
                name = entry.name
                other = names is not None and name not in names
                if other and only_directories and not entry.is_dir(follow_symlinks=False):
                    continue
                ahead = step.others if other else _ready(rests, _ahead(rests, states, name))
                if not ahead:
                    continue
                child = f"{path.rstrip('/')}/{name}"
                meant = _meant(rests, ahead)
                below = entry.is_dir(follow_symlinks=False)
                if on_way and not meant and not below:
                    meant = _on_way(rests, ahead)
                if (meant or below) and len(os.fsencode(child)) > LONGEST_PATH:
                    yield path, list({index for index, _ in ahead}), visited
                    visited = 0
                    break
                if meant:
                    yield child, meant, visited
                    visited = 0
                if below and ends.isdisjoint(meant):
                    stack.append((child, ahead))
        yield None, [], visited
        visited = 0


def _entries_step(rests: list[tuple[Part, ...]], states: _States) -> _Step:
    ahead = [rests[index][at] for index, at in states if at < len(rests[index])]
    if not all(part is None or isinstance(part, str) for part in ahead):
        return _Step(None, frozenset(), only_directories=False)
    names = frozenset(part for part in ahead if isinstance(part, str))
    others = _ready(rests, _ahead(rests, states, "/"))  # as no name is
    only_directories = not _meant(rests, others) and not _on_way(rests, others)
    return _Step(names, others, only_directories)


def _meant(rests: list[tuple[Part, ...]], states: _States) -> list[int]:
    """Return the patterns that end here."""
    return [index for index, at in states if at == len(rests[index])]


def _on_way(rests: list[tuple[Part, ...]], states: _States) -> list[int]:
    """Return the patterns that lead on from a name of theirs, and so mean what they find in its place."""
    return [index for index, at in states if at and rests[index][at - 1] is not None]


def _ahead(rests: list[tuple[Part, ...]], states: _States, name: str) -> Iterator[tuple[int, int]]:
    for index, at in states:
        part = rests[index][at] if at < len(rests[index]) else ""  # matches nothing, as no name is empty
        if part is None:
            yield index, at
        elif part == name if isinstance(part, str) else part(name):
            yield index, at + 1


def _ready(rests: list[tuple[Part, ...]], states: Iterable[tuple[int, int]]) -> _States:
    """Return these states and those after a part that may match no name at all (`**`)."""
    found = set(states)
    found.update([(index, at + 1) for index, at in found if at < len(rests[index]) and rests[index][at] is None])
    return frozenset(found)


# what can be written


def _open_places(places: Sequence[str]) -> list[tuple[int, str]]:
    """Return detached mounts of the writable paths. A path behind a link, or that cannot be created, is left out."""
    opened: list[tuple[int, str]] = []
    for given in sorted(set(places)):
        place = given.removesuffix("/**")
        if not any(place == above or place.startswith(f"{above}/") for _, above in opened):
            with suppress(OSError):
                tree = _open_place(place, make=place != given)
                if tree is not None:
                    opened.append((tree, place))
    return opened


def _narrow(places: list[tuple[int, str]]) -> None:
    for tree, _ in places:
        remove_leftover(tree)
    if any(place == inside.WORKSPACE for _, place in places):
        return
    workspace = os.open(inside.WORKSPACE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        remove_leftover(workspace)
        linux.set_mount_attributes(workspace, linux.MOUNT_ATTR_RDONLY)
    finally:
        os.close(workspace)
    for tree, place in places:
        linux.move_mount(tree, place)


def _unwritable(patterns: Sequence[str]) -> tuple[list[str], dict[str, bool]]:
    """Return the paths to make read-only, none inside another; and those that must only keep their name, with whether
    each is a directory: links, and directories without `/**`.
    """
    single = {pattern for pattern in patterns if not pattern.endswith("/**")}
    found: dict[str, bool] = {}
    for path, meant in _bounded(_matches(patterns, further=single, on_way=True)):
        found[path] = found.get(path, False) or not single.issuperset(meant)
    busy: dict[str, bool] = {}
    readonly: list[str] = []
    for path, with_all in sorted(found.items(), key=lambda item: item[0].split("/")):
        if not (readonly and path.startswith(f"{readonly[-1]}/")):
            with suppress(FileNotFoundError, NotADirectoryError):
                mode = os.lstat(path).st_mode
                if stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and not with_all):
                    busy[path] = stat.S_ISDIR(mode)
                else:
                    readonly.append(path)
    return readonly, busy


def _pin(paths: dict[str, bool], covers: int) -> None:
    """Make paths of the workspace busy, below a second mount of it that hides these mounts."""
    if not paths:
        return
    seen = linux.open_tree(inside.WORKSPACE)
    try:
        for path in sorted(paths, reverse=True):  # entries come before their directory
            _attach(covers, _DIRECTORY if paths[path] else _FILE, path)
        linux.move_mount(seen, inside.WORKSPACE)
    finally:
        os.close(seen)


def make_read_only_again(paths: Sequence[str], own_path: str) -> None:
    """Mount protected paths of a folder read-only that were replaced on the host: the kernel removes a mount from a
    name that is replaced in another mount namespace. Called in the namespaces of a sandbox that runs.
    """
    for top in dict.fromkeys((inside.WORKSPACE, mount_point(own_path))):
        for path in paths:
            _make_read_only(f"{top}/{path}", top)


def _make_read_only(path: str, top: str = inside.WORKSPACE) -> None:
    try:
        here = _open_path(path, top)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if not stat.S_ISLNK(os.fstat(here).st_mode) and not os.fstatvfs(here).f_flag & os.ST_RDONLY:
            tree = linux.open_tree("", dir_fd=here)
            try:
                linux.set_mount_attributes(tree, linux.MOUNT_ATTR_RDONLY)
                linux.move_mount(tree, here)
            finally:
                os.close(tree)
    finally:
        os.close(here)


def _open_place(place: str, *, make: bool) -> int | None:
    """Return a detached mount of a path of the workspace, or None if it is a link."""
    here = _open_path(place, inside.WORKSPACE, make=make)
    try:
        return None if stat.S_ISLNK(os.fstat(here).st_mode) else linux.open_tree("", dir_fd=here)
    finally:
        os.close(here)


def _open_path(path: str, top: str, *, make: bool = False) -> int:
    """Open a path below a directory. Links are not followed: they could lead anywhere."""
    here = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path.removeprefix(top).split("/")[1:]:
            below = _step(here, name, make=make)
            os.close(here)
            here = below
    except BaseException:
        os.close(here)
        raise
    return here


def _step(directory: int, name: str, *, make: bool) -> int:
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        if not make:
            raise
        os.mkdir(name, 0o755, dir_fd=directory)
        above = os.fstat(directory)  # the agent's, whatever number that has here
        os.chown(name, above.st_uid, above.st_gid, dir_fd=directory, follow_symlinks=False)
        return os.open(name, flags, dir_fd=directory)
