"""Builds the root of a sandbox whose kernel is another program, such as gVisor's `runsc`, and becomes that program.

The root is made of mounts in a mount namespace of its own: so they end with the program and its children, however they
end, and the masks are the same as those of every other sandbox. This module is the main program of a process of root,
which may be started before it is needed: it waits for one line, the path of its order.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from carrel.isolation import linux, mask_mounts, masks
from carrel.primitives.kernel_files import write

_READ_ONLY = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
_WRITABLE = linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
_SECRETS = "size=8m,nr_inodes=2048,mode=0700"
FAILED = 97
"""The exit status when the root could not be built. The reason is on standard error."""


@dataclass(frozen=True)
class StagedMount:
    """A directory or file of the host, and where it belongs in the root."""

    source: str
    target: str
    writable: bool = False


@dataclass(frozen=True)
class StageOrder:
    """What to build, and the program to become.

    The root is mounted at the directory `root`: an overlay of the directories `layers`, the first of them on top, or
    the only one of them. `covers` is an empty directory for the files of masks, `secrets` one for a small memory file
    system of the user `owner`, or empty. `masks` is a file with packed masks, empty without any; `path` has further
    directories of programs. `groups` are `tasks` and `cgroup.procs` files of the groups to enter.
    """

    root: str
    layers: Sequence[str]
    mounts: Sequence[StagedMount]
    covers: str
    secrets: str
    owner: int
    program: Sequence[str]
    groups: Sequence[str]
    masks: str = ""
    path: Sequence[str] = ()

    def text(self) -> str:
        return json.dumps(asdict(self))


def read(text: str) -> StageOrder:
    return of(json.loads(text))


def of(fields: Mapping[str, Any]) -> StageOrder:
    """Return the order with these fields."""
    return StageOrder(**{**fields, "mounts": [StagedMount(**each) for each in fields["mounts"]]})


def main() -> None:
    """Carry out the order whose path is read from standard input. Never returns; exits with `FAILED` if it cannot."""
    try:
        path = sys.stdin.readline().rstrip("\n")
        if not path:
            os._exit(0)  # the server is gone, or needs no further sandbox
        with open(path, encoding="utf-8") as file:
            order = read(file.read())
        nothing = _empty_file()
        for descriptor in (0, 1):
            os.dup2(nothing, descriptor)
        os.close(nothing)
        for group in order.groups:
            write(group, "0")
        stage(order)
        os.execv(order.program[0], list(order.program))  # noqa: S606 - the program of the order
    except Exception as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(FAILED)


def _empty_file() -> int:
    """Return a file that has no content and takes none. `runsc` gives its standard files to the user of the sandbox:
    the host's /dev/null would belong to `nobody` from then on.
    """
    file = os.memfd_create("nothing", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
    return file


def stage(order: StageOrder, users: int = -1) -> bool:
    """Move this process into a new mount namespace, with the root built there. Raises `OSError`, or as masks do.

    `users` is a user namespace: what can be written and the image show the users of the host that those on the disk
    are there. Returns whether they do; some file systems cannot.
    """
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    owned = f",uid={order.owner},gid={order.owner}"
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    if order.secrets:
        linux.mount("tmpfs", order.secrets, "tmpfs", flags, _SECRETS + owned)
    trees = [_opened(each) for each in order.mounts]
    written = [tree for tree, each in zip(trees, order.mounts, strict=True) if each.writable]
    mapped = users >= 0 and all(_mapped(tree, users) for tree in written)
    if len(order.layers) == 1:
        _attach(_opened(StagedMount(order.layers[0], "")), order.root)
    else:
        for layer in order.layers if mapped else ():
            _map_layer(layer, users)
        options = f"lowerdir={':'.join(order.layers)}"
        linux.mount("overlay", order.root, "overlay", linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV, options)
    for tree, each in zip(trees, order.mounts, strict=True):
        _attach(tree, order.root + each.target)
    if order.masks:
        _mask(order)
    return mapped


def _opened(each: StagedMount) -> int:
    """Return a detached mount. One that is not attached ends with this process, as every failure here does."""
    tree = linux.open_tree(each.source, recursive=True)
    linux.set_mount_attributes(tree, _WRITABLE if each.writable else _READ_ONLY, recursive=True)
    return tree


def _attach(tree: int, target: str) -> None:
    linux.move_mount(tree, target)
    os.close(tree)


def _mapped(tree: int, users: int) -> bool:
    try:
        linux.set_mount_attributes(tree, linux.MOUNT_ATTR_IDMAP, users)
    except OSError:
        return False
    return True


def _map_layer(layer: str, users: int) -> None:
    """Mount a layer over itself, with its users; where the file system cannot, they are as on the disk."""
    tree = linux.open_tree(layer)
    if _mapped(tree, users):
        linux.move_mount(tree, layer)
    os.close(tree)


def _mask(order: StageOrder) -> None:
    """Apply the masks in a child, which has the same mounts and another root: patterns and links mean that root."""
    with open(order.masks, "rb") as packed:
        content = masks.content(packed.fileno())
    plan = mask_mounts.read(mask_mounts.CoverFiles(order.covers, order.root).plan(content, image=True))
    covers = os.open(order.covers, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        status = FAILED
        try:
            os.chroot(order.root)
            os.chdir("/")
            mask_mounts.cover(plan, covers, order.path)
            status = 0
        except Exception as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    if os.waitpid(child, 0)[1] != 0:
        raise OSError("the masks could not be applied")


if __name__ == "__main__":
    main()
