"""The root of a sandbox that runs from an image: a read-only overlay of the image and a few directories of ours.

An image may lack everything, also the directories that mounts need, and its own directory is shared by all sandboxes
and never written. So an overlay puts two small trees around it, which the zygote makes once: `TOP` has what must be as
carrel says, `BOTTOM` what an image may replace. The overlay has no writable layer. What is mounted in every sandbox
(`/proc`, `/dev`, secrets, environments, package tools) comes from the base root.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from carrel.isolation import inside, linux, rootfs

IMAGE, MERGED, CHANGES = "/image", "/merged", "/changes"
UPPER = "upper"
"""The directory of a writable root's changes, in the volume of the sandbox."""
_WORK, _FILES = "work", "files"
LAYERS = "/layers"
TOP, TRUST, BOTTOM = f"{LAYERS}/top", f"{LAYERS}/trust", f"{LAYERS}/bottom"
CERTIFICATES = f"{inside.SECRETS}/carrel-ca.pem"
BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine, Arch
    "/etc/ssl/cert.pem",  # Alpine, OpenSSL's default
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/pki/tls/certs/ca-bundle.crt",  # Red Hat
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
)
"""Where programs of the distributions look for certificates that they trust."""
_SHARED = ("/dev", "/etc/carrel", inside.ENVIRONMENTS, "/proc", inside.SECRETS)
_DIRECTORIES = ("/etc", "/home", inside.HOME, "/run", "/sys", "/tmp", "/var", inside.WORKSPACE)

COMMON = ("etc", "etc/pki", "etc/pki/ca-trust", "etc/ssl", "etc/ssl/certs", "home", "run", "tmp", "var")
"""Directories that the layers around an image share with it. In a writable root they are as in the image."""

_TOP_PLAN: rootfs.Plan = (
    *(rootfs.EmptyDirectory(path) for path in sorted((*_SHARED, *_DIRECTORIES))),
    rootfs.TextFile("/etc/hosts", rootfs.HOSTS),
    rootfs.TextFile("/etc/hostname", "carrel\n"),
    rootfs.TextFile("/etc/resolv.conf", ""),
    rootfs.Symlink("/etc/mtab", "/proc/self/mounts"),
    rootfs.Symlink("/var/tmp", "/tmp"),
    rootfs.Symlink("/var/run", "/run"),
)
_TRUST_PLAN: rootfs.Plan = (
    *(rootfs.EmptyDirectory(os.path.dirname(path)) for path in BUNDLES),
    *(rootfs.Symlink(path, CERTIFICATES) for path in BUNDLES),
)
FALLBACKS = {"/etc/passwd": rootfs.PASSWD, "/etc/group": rootfs.GROUP, "/etc/nsswitch.conf": rootfs.NSSWITCH}
"""Files that a root has even if its image lacks them."""
_BOTTOM_PLAN: rootfs.Plan = (
    rootfs.EmptyDirectory("/etc"),
    rootfs.EmptyDirectory("/home"),
    rootfs.Symlink("/home/user", inside.WORKSPACE),  # the home of programs that are written for E2B
    *(rootfs.TextFile(path, text) for path, text in FALLBACKS.items()),
)


def make_layers(stage: str, names: list[str]) -> None:
    """Make the layers above and below every image, in the directory `stage`. `names` are further places for mounts."""
    os.mkdir(stage + IMAGE, 0o755)
    os.mkdir(stage + MERGED, 0o755)
    os.mkdir(stage + CHANGES, 0o755)
    more = tuple(rootfs.EmptyDirectory(f"/{name}") for name in names)
    for layer, plan in {TOP: (*_TOP_PLAN, *more), TRUST: _TRUST_PLAN, BOTTOM: _BOTTOM_PLAN}.items():
        os.makedirs(stage + layer, 0o755)
        rootfs.apply_plan(plan, stage + layer)


def keep_changes(volume: int, root: tuple[int, int] | None) -> int:
    """Divide the volume of a sandbox whose root is writable: one part for the changes of the root, one for its files.

    Returns a mount of the files. `root` are the ids that root of the image has in the sandbox; None if all files have
    one owner anyway.
    """
    linux.move_mount(volume, CHANGES)
    for name in (UPPER, _WORK, _FILES):
        os.mkdir(f"{CHANGES}/{name}", 0o755)
    if root is not None:
        os.chown(f"{CHANGES}/{UPPER}", *root)
        os.chown(f"{CHANGES}/{_FILES}", rootfs.SANDBOX_UID, rootfs.SANDBOX_UID)
    return linux.open_tree(f"{CHANGES}/{_FILES}")


def _share_directories() -> None:
    """Give directories that the image and the layers above it share the owner and mode that they have in the image.

    Those that it lacks belong to its root.
    """
    seen = {""}
    root = os.stat(f"{CHANGES}/{UPPER}")
    for path in COMMON:
        with suppress(OSError):
            info = os.lstat(f"{IMAGE}/{path}")
            if os.path.dirname(path) in seen and stat.S_ISDIR(info.st_mode):
                place = f"{CHANGES}/{UPPER}/{path}"
                os.mkdir(place, 0o700)
                os.chown(place, info.st_uid, info.st_gid)
                os.chmod(place, stat.S_IMODE(info.st_mode))
                seen.add(path)
    for path in COMMON:
        if "/" not in path and path not in seen:
            place = f"{CHANGES}/{UPPER}/{path}"
            os.mkdir(place)
            os.chown(place, root.st_uid, root.st_gid)
            os.chmod(place, 0o1777 if path == "tmp" else 0o755)


def mount(image: int, around: int, base: str, *, trust: bool, writable: bool = False) -> str:
    """Mount the root of a sandbox from the descriptors of its image and of the layers around it; return where. Called
    in the new sandbox.

    With `trust`, the usual certificate files lead to those of the proxy. The changes of a `writable` root go where
    `keep_changes` made room for them.
    """
    linux.move_mount(image, IMAGE)
    linux.move_mount(around, LAYERS)
    layers = ":".join((*([TRUST] if trust else []), TOP, IMAGE, BOTTOM))
    flags, options = linux.MS_NOSUID | linux.MS_NODEV, f"lowerdir={layers}"
    if writable:
        _share_directories()
        options += f",upperdir={CHANGES}/{UPPER},workdir={CHANGES}/{_WORK},userxattr"
    else:
        flags |= linux.MS_RDONLY
    linux.mount("overlay", MERGED, "overlay", flags, options)
    if writable:  # the kernel closes it to everybody, and the disk watch of an ordinary user could not look into it
        os.chmod(f"{CHANGES}/{_WORK}/work", 0o700)
    for path in _SHARED:
        tree = linux.open_tree(base + path, recursive=True)
        try:
            if path != "/dev":  # the base root, of which this may be a part, has devices
                linux.set_mount_attributes(tree, linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV)
            linux.move_mount(tree, MERGED + path)
        finally:
            os.close(tree)
    return MERGED
