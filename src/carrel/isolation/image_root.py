"""The root of a sandbox that runs from an image: a read-only overlay of the image and a few directories of ours.

An image may lack everything, also the directories that mounts need, and its own directory is shared by all sandboxes
and never written. So an overlay puts two small trees around it, which the zygote makes once: `TOP` has what must be as
carrel says, `BOTTOM` what an image may replace. The overlay has no writable layer. What is mounted in every sandbox
(`/proc`, `/dev`, secrets, environments, package tools) comes from the base root.
"""

from __future__ import annotations

import os

from carrel.isolation import linux, rootfs

IMAGE, MERGED = "/image", "/merged"
TOP, TRUST, BOTTOM = "/layers/top", "/layers/trust", "/layers/bottom"
CERTIFICATES = f"{rootfs.SECRETS}/carrel-ca.pem"
BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine, Arch
    "/etc/ssl/cert.pem",  # Alpine, OpenSSL's default
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/pki/tls/certs/ca-bundle.crt",  # Red Hat
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
)
"""Where programs of the distributions look for certificates that they trust."""
_SHARED = ("/dev", "/etc/carrel", rootfs.ENVIRONMENTS, "/proc", rootfs.SECRETS)
_DIRECTORIES = ("/etc", "/home", rootfs.HOME, "/run", "/sys", "/tmp", "/var", rootfs.WORKSPACE)

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
_BOTTOM_PLAN: rootfs.Plan = (
    rootfs.EmptyDirectory("/etc"),
    rootfs.TextFile("/etc/passwd", rootfs.PASSWD),
    rootfs.TextFile("/etc/group", rootfs.GROUP),
    rootfs.TextFile("/etc/nsswitch.conf", rootfs.NSSWITCH),
)


def make_layers(stage: str, names: list[str]) -> None:
    """Make what goes around every image, below `stage`. `names` are further directories in the root, for mounts."""
    os.mkdir(stage + IMAGE, 0o755)
    os.mkdir(stage + MERGED, 0o755)
    more = tuple(rootfs.EmptyDirectory(f"/{name}") for name in names)
    for layer, plan in {TOP: (*_TOP_PLAN, *more), TRUST: _TRUST_PLAN, BOTTOM: _BOTTOM_PLAN}.items():
        os.makedirs(stage + layer, 0o755)
        rootfs.apply_plan(plan, stage + layer)


def mount(image: int, base: str, *, trust: bool) -> str:
    """Mount the root of a sandbox from the descriptor of its image; return where. Called in the new sandbox.

    With `trust`, the usual certificate files lead to those of the proxy.
    """
    linux.move_mount(image, IMAGE)
    layers = ":".join((*([TRUST] if trust else []), TOP, IMAGE, BOTTOM))
    flags = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("overlay", MERGED, "overlay", flags, f"lowerdir={layers}")
    for path in _SHARED:
        tree = linux.open_tree(base + path, recursive=True)
        try:
            if path != "/dev":  # the base root, of which this may be a part, has devices
                linux.set_mount_attributes(tree, linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV)
            linux.move_mount(tree, MERGED + path)
        finally:
            os.close(tree)
    return MERGED
