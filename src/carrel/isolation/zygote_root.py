"""The zygote's mount namespace, with the base root, workspaces, images, `/proc` and the covers of masks.

Each sandbox starts as a copy of it, so it is small for speed, and has no other files of the host for safety.
"""

from __future__ import annotations

import glob
import os
import socket
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from carrel.isolation import budgets, folder_mounts, folder_opener, image_root, launchers, linux, rootfs
from carrel.isolation.sandbox import BASE, COVERS
from carrel.primitives.kernel_files import write

WORKSPACES = "/workspaces"
IMAGES = "/images"
_STAGE = "/tmp"  # only a mount point, in a namespace of our own


def enter(
    workspaces: str,
    *,
    root: bool,
    shared: Mapping[str, str] = MappingProxyType({}),
    folder_roots: Sequence[str] = (),
    images: str = "",
) -> socket.socket | None:
    """Move this process there for good. An ordinary user's process first becomes root of its own user namespace.

    `shared` maps paths of the base root to directories or files of the host that are mounted there, read-only. What is
    added to such a directory later appears in every sandbox at once.

    Sandboxes may work on folders below `folder_roots`. Then this returns the socket of the process that opens them.
    They may run from images whose roots are below the directory `images`, if it is given; it is made if it is missing.
    """
    opener = None
    links = rootfs.host_links()
    uid, gid = os.geteuid(), os.getegid()
    if root:
        if folder_roots:
            opener = folder_opener.start(lambda: None)
        linux.unshare(linux.CLONE_NEWNS)
    else:
        budgets.enter_user_namespace(linux.CLONE_NEWNS | linux.CLONE_NEWUSER)
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"0 {uid} 1\n")
        write("/proc/self/gid_map", f"0 {gid} 1\n")
        if folder_roots:
            opener = folder_opener.start(lambda: linux.unshare(linux.CLONE_NEWNS))
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    # Opened before `_STAGE` is covered: they may be below it.
    trees = {WORKSPACES: linux.open_tree(workspaces)}
    if images:
        os.makedirs(images, 0o700, exist_ok=True)
        trees[IMAGES] = linux.open_tree(images)
    views = {target: linux.open_tree(source) for target, source in shared.items()}
    linux.mount("tmpfs", _STAGE, "tmpfs", linux.MS_NOSUID, f"size={rootfs.BASE_SIZE},mode=0755")
    for name in (BASE, COVERS, "/proc", *trees):
        os.mkdir(_STAGE + name, 0o755)
    base = _STAGE + BASE
    linux.mount("tmpfs", base, "tmpfs", linux.MS_NOSUID, f"size={rootfs.BASE_SIZE},mode=0755")
    names = folder_mounts.first_names(_top_level(folder_roots))
    rootfs.apply_plan(rootfs.base_plan(links, names=names), base)
    if images:
        image_root.make_layers(_STAGE, names)
    for target, view in views.items():
        linux.set_mount_attributes(view, linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV)
        linux.move_mount(view, base + target)
        os.close(view)
    _cover_pips(base)
    rootfs.make_read_only(base)
    # A complete /proc must stay visible, or the kernel does not let a sandbox mount its own.
    linux.mount("/proc", f"{_STAGE}/proc", None, linux.MS_BIND | linux.MS_REC)
    for target, tree in trees.items():
        linux.move_mount(tree, _STAGE + target)
        os.close(tree)
    linux.pivot_into(_STAGE)
    return opener


def _top_level(roots: Sequence[str]) -> list[str]:
    """Return the roots, or every directory of the host's root where that is one of them."""
    return [f"/{entry.name}" for entry in os.scandir("/") if entry.is_dir()] if "/" in roots else list(roots)


def _cover_pips(base: str) -> None:
    """Make `python3 -m pip` of the host's interpreters run the launcher, in every sandbox."""
    flags = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    for target in (found for pattern in launchers.MAINS for found in glob.glob(base + pattern)):
        linux.mount(base + launchers.MAIN_PLACE, target, None, linux.MS_BIND)
        linux.mount("none", target, None, flags)
