"""The root file system of a sandbox: plans that are plain values, and one function that applies them.

There are two plans. The zygote builds the base root once: read-only, the same for every sandbox. The private part is
mounted over its empty mount points for each sandbox. The functions that build plans are pure.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carrel.isolation import launchers, linux
from carrel.isolation.inside import ENVIRONMENTS, HOME, PIP, SECRETS, UV, WORKSPACE

SANDBOX_UID = 1000
NODE_PRELOAD = "/etc/carrel/node.cjs"
PYTHON = "/etc/carrel"
BASE_SIZE = "64m"
LARGEST_COPY = 8 * 1024 * 1024
_SECRET = re.compile(rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY|://[^/\s:@]{1,200}:[^/\s:@]{1,200}@")


@dataclass(frozen=True)
class EmptyDirectory:
    """An empty directory."""

    target: str
    mode: int = 0o755


@dataclass(frozen=True)
class Symlink:
    """A symbolic link."""

    target: str
    points_to: str


@dataclass(frozen=True)
class TextFile:
    """A small file made of text."""

    target: str
    content: str
    mode: int = 0o644


@dataclass(frozen=True)
class Override:
    """A small text file that is mounted over one of the base root."""

    target: str
    content: str


@dataclass(frozen=True)
class Copy:
    """A copy of a file or directory of the host, as far as every user may read it; skipped if missing. Files with a
    private key, or with a URL that has a password, are left out.
    """

    source: str
    target: str


@dataclass(frozen=True)
class Bind:
    """A read-only mount of a host directory."""

    source: str
    target: str


@dataclass(frozen=True)
class Device:
    """A device node of the host."""

    source: str
    target: str


@dataclass(frozen=True)
class Tmpfs:
    """A private memory file system with caps on bytes and inodes."""

    target: str
    size: str
    inodes: int
    mode: int
    executable: bool = True


@dataclass(frozen=True)
class Proc:
    """The process list of the sandbox's own PID namespace."""

    target: str


@dataclass(frozen=True)
class Terminals:
    """A private set of pseudo-terminals."""

    target: str


@dataclass(frozen=True)
class WorkspaceMount:
    """The workspace, given as a detached mount."""

    target: str


Step = EmptyDirectory | Symlink | TextFile | Override | Copy | Bind | Device | Tmpfs | Proc | Terminals | WorkspaceMount
Plan = tuple[Step, ...]

_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
    "ImageMagick-6", "ImageMagick-7", "OpenCL", "R", "X11", "alsa", "alternatives", "bash.bashrc", "ca-certificates",
    "ca-certificates.conf", "chromium", "chromium-browser", "chromium.d", "debian_version",
    "emacs", "enchant", "enchant-2", "firefox", "firefox-esr", "fonts", "gdb", "ghostscript", "glvnd", "gtk-2.0",
    "gtk-3.0", "gtk-4.0", "inputrc", "java-11-openjdk", "java-17-openjdk", "java-21-openjdk", "ld.so.cache",
    "ld.so.conf", "ld.so.conf.d", "libreoffice", "locale.alias", "localtime", "lynx", "magic", "magic.mime", "mailcap",
    "matplotlibrc", "mime.types", "mono", "nanorc", "octave.conf", "openal", "os-release", "papersize", "perl", "php",
    "pki", "profile", "protocols", "pulse", "python3", "python3.10", "python3.11", "python3.12", "python3.13",
    "python3.14", "redhat-release", "rpc", "screenrc", "services", "sgml", "shells", "ssl", "terminfo", "texmf",
    "timezone", "tmux.conf", "vdpau_wrapper.cfg", "vim", "vulkan", "w3m", "xdg", "xml",
)  # fmt: skip
"""Configuration that programs need and that never has secrets. Listed one by one: an unknown directory may have a
password in it, whatever its mode is (`wgetrc`, `npmrc`, `gitconfig`, `maven`, `odbc.ini`).
"""
_ETC_APT = (
    "keyrings", "preferences", "preferences.d", "sources.list", "sources.list.d", "trusted.gpg", "trusted.gpg.d"
)  # fmt: skip
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

PASSWD = f"""\
root:x:0:0:root:/root:/usr/sbin/nologin
agent:x:{SANDBOX_UID}:{SANDBOX_UID}:agent:{HOME}:/bin/sh
nobody:x:65534:65534:nobody:/:/usr/sbin/nologin
"""
GROUP = f"root:x:0:\ntty:x:5:\nagent:x:{SANDBOX_UID}:\nnogroup:x:65534:\n"
HOSTS = "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 carrel\n"
_NODE = Path(__file__).with_name("node.cjs").read_text(encoding="utf-8")
_SUPERVISOR = Path(__file__).parent.parent / "supervisor" / "python"
_PYTHON = {name: (_SUPERVISOR / name).read_text(encoding="utf-8") for name in ("warm.py", "kernel.py")}
CURL_OFFLINE = "/etc/carrel/curl/offline"
CURL_GOVERNED = "/etc/carrel/curl/governed"
"""Directories of `.curlrc` files, whose text `curl` prints to standard error when it fails."""
_CURL_TEXTS = {
    CURL_OFFLINE: "this sandbox has no network, it reaches only itself: to reach hosts outside, start it with "
    "network='allowlist'",
    CURL_GOVERNED: "if the proxy refused this, 'curl http://127.0.0.1:3128/' says why",
}
APT_CONFIG = "/etc/carrel/apt.conf"
_APT = """\
// An agent is no root and /usr is read-only, so that nothing can be installed. Lists and packages can be fetched.
Dir::State "/tmp";
Dir::State::lists "apt-lists/";
Dir::State::status "/dev/null";
Dir::Cache "/tmp";
Dir::Cache::archives "apt-archives/";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Acquire::Retries "0";
"""
BUILD_APT_CONFIG = "/etc/carrel/apt-build.conf"
_BUILD_APT = """\
// A RUN line is isolated already. An ordinary user's server has no second user to download as.
APT::Sandbox::User "root";
Acquire::Retries "0";
"""
NSSWITCH = "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\nprotocols: files\n"


OWN_PLAN: Plan = (
    EmptyDirectory(os.path.dirname(NODE_PRELOAD)),
    TextFile(NODE_PRELOAD, _NODE),
    *(TextFile(f"{PYTHON}/{name}", text) for name, text in _PYTHON.items()),
    TextFile(APT_CONFIG, _APT),
    TextFile(BUILD_APT_CONFIG, _BUILD_APT),
    EmptyDirectory(os.path.dirname(CURL_OFFLINE)),
    *(EmptyDirectory(folder) for folder in _CURL_TEXTS),
    *(
        TextFile(f"{folder}/.curlrc", f'write-out = "%{{onerror}}%{{stderr}}carrel: {text}\\n"\n')
        for folder, text in _CURL_TEXTS.items()
    ),
    EmptyDirectory(launchers.PLACE),
    *(TextFile(f"{launchers.PLACE}/{name}", text, 0o755) for name, text in launchers.TEXTS.items()),
    TextFile(launchers.MAIN_PLACE, launchers.MAIN),
    EmptyDirectory(launchers.SHARED_PIP_PLACE),
    EmptyDirectory(f"{launchers.SHARED_PIP_PLACE}/pip"),
    TextFile(f"{launchers.SHARED_PIP_PLACE}/pip/__init__.py", ""),
    TextFile(f"{launchers.SHARED_PIP_PLACE}/pip/__main__.py", launchers.SHARED_PIP),
    EmptyDirectory(os.path.dirname(UV)),
    TextFile(UV, ""),
    EmptyDirectory(os.path.dirname(PIP)),
    EmptyDirectory(PIP),
)
"""The files of carrel itself in every sandbox, below `/etc/carrel`, and places for the package tools."""


def host_links(host: str = "/") -> dict[str, str | None]:
    """Return how the host lays out `/bin` and similar: the target of a symlink, or None for a real directory."""
    found: dict[str, str | None] = {}
    for name in _MERGED:
        path = os.path.join(host, name)
        if os.path.islink(path):
            found[name] = os.readlink(path)
        elif os.path.isdir(path):
            found[name] = None
    return found


def base_plan(links: Mapping[str, str | None], host: str = "/", names: Sequence[str] = ()) -> Plan:
    """Return the plan of the root that every sandbox shares, with the host's programs and none of its data. `names` are
    further empty directories in it, for mounts.
    """
    at = host.rstrip("/")
    steps: list[Step] = [
        *(
            EmptyDirectory(f"/{name}")
            for name in ("dev", "dev/pts", "dev/shm", "etc", "home", "home/agent", "mnt", "opt")
        ),
        *(
            EmptyDirectory(f"/{name}")
            for name in ("proc", "root", "run", "srv", "sys", "tmp", "usr", "var", "workspace")
        ),
        *(EmptyDirectory(f"/{name}") for name in names),
        Symlink("/home/user", WORKSPACE),  # the home of programs that are written for E2B
        EmptyDirectory(SECRETS),
        EmptyDirectory(ENVIRONMENTS),
        EmptyDirectory("/var/lib"),
        EmptyDirectory("/var/cache"),
        EmptyDirectory("/var/log"),
        Symlink("/var/tmp", "/tmp"),
        Symlink("/var/run", "/run"),
        Bind(f"{at}/usr", "/usr"),
    ]
    for name, points_to in links.items():
        if points_to is not None:
            steps.append(Symlink(f"/{name}", points_to))
        else:
            steps += [EmptyDirectory(f"/{name}"), Bind(f"{at}/{name}", f"/{name}")]
    steps += [Copy(f"{at}/etc/{name}", f"/etc/{name}") for name in _ETC]
    steps += [EmptyDirectory(f"/etc/{name}") for name in ("apt", "apt/apt.conf.d", "apt/auth.conf.d")]
    steps += [Copy(f"{at}/etc/apt/{name}", f"/etc/apt/{name}") for name in _ETC_APT]
    steps += [
        TextFile("/etc/passwd", PASSWD),
        TextFile("/etc/group", GROUP),
        TextFile("/etc/hosts", HOSTS),
        TextFile("/etc/hostname", "carrel\n"),
        TextFile("/etc/nsswitch.conf", NSSWITCH),
        TextFile("/etc/resolv.conf", ""),
        *OWN_PLAN,
        Symlink("/etc/mtab", "/proc/self/mounts"),
    ]
    steps += [Device(f"/dev/{name}", f"/dev/{name}") for name in _DEVICES]
    steps += [
        Symlink("/dev/fd", "/proc/self/fd"),
        Symlink("/dev/stdin", "/proc/self/fd/0"),
        Symlink("/dev/stdout", "/proc/self/fd/1"),
        Symlink("/dev/stderr", "/proc/self/fd/2"),
        Symlink("/dev/ptmx", "pts/ptmx"),
    ]
    return tuple(steps)


COMMON_PLAN: Plan = (
    Proc("/proc"),
    Terminals("/dev/pts"),
    Tmpfs(SECRETS, "8m", 2048, 0o700, executable=False),
)
"""The private part that is the same for every sandbox."""


def private_plan(memory_mb: int | None, resolver: str = "", *, kept_home: bool = False, own_tmp: bool = True) -> Plan:
    """Return the private part that depends on the request. Memory file systems get much less than the sandbox's memory.

    `resolver` is the text of `/etc/resolv.conf`; without it there is no name server. A home that is kept is mounted
    separately. Without `own_tmp`, `/tmp` is that of an image whose root can be changed.
    """
    scratch = max(16, min(512, (memory_mb or 1024) // 4))
    return (
        Tmpfs("/dev/shm", f"{max(8, scratch // 4)}m", 4096, 0o1777, executable=False),
        *((Tmpfs("/tmp", f"{scratch}m", 65536, 0o1777),) if own_tmp else ()),
        *(() if kept_home else (Tmpfs(HOME, f"{scratch}m", 65536, 0o755),)),
        WorkspaceMount(WORKSPACE),
        *((Override("/etc/resolv.conf", resolver),) if resolver else ()),
    )


WRITABLE = ("/dev", "/proc", "/tmp", HOME, WORKSPACE)
"""Paths that Landlock lets a sandbox write, as far as their mounts allow it."""


def apply_plan(plan: Sequence[Step], root: str, *, workspace_fd: int = -1, owner: int | None = None) -> None:
    """Carry out the plan under `root`. Raises `OSError` at the first step that fails."""
    for step in plan:
        _STEPS[type(step)](step, root + step.target, workspace_fd, owner)


def protect_secrets(root: str) -> int:
    """Make the mount of the secrets read-only; return a descriptor through which they can still be written."""
    target = root + SECRETS
    writable = linux.open_tree(target)
    flags = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("none", target, None, flags)
    return writable


def make_read_only(root: str) -> None:
    """Make the mount at `root` itself read-only."""
    linux.mount("none", root, None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID)


def _directory(step: EmptyDirectory, target: str, _fd: int, _owner: int | None) -> None:
    os.makedirs(target, exist_ok=True)
    os.chmod(target, step.mode)


def _symlink(step: Symlink, target: str, _fd: int, _owner: int | None) -> None:
    os.symlink(step.points_to, target)


def _text(step: TextFile, target: str, _fd: int, _owner: int | None) -> None:
    with open(target, "w", encoding="utf-8") as file:
        file.write(step.content)
    os.chmod(target, step.mode)


def _override(step: Override, target: str, _fd: int, _owner: int | None) -> None:
    # The file is in a memory file system of the sandbox, and its name is removed before anything runs there.
    draft = target.removesuffix(step.target) + "/dev/shm/override"
    _text(TextFile(draft, step.content), draft, -1, None)
    linux.mount(draft, target, None, linux.MS_BIND)
    flags = linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("none", target, None, flags)
    os.unlink(draft)


def _copy(step: Copy, target: str, _fd: int, _owner: int | None) -> None:
    _copy_public(step.source, target)


def _copy_public(source: str, target: str) -> None:
    try:
        found = os.lstat(source)
    except OSError:
        return
    if stat.S_ISLNK(found.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISDIR(found.st_mode):
        if found.st_mode & 0o005 == 0o005:
            os.mkdir(target, 0o755)
            for name in os.listdir(source):
                _copy_public(f"{source}/{name}", f"{target}/{name}")
    elif stat.S_ISREG(found.st_mode) and found.st_mode & 0o004 and found.st_size <= LARGEST_COPY:
        with open(source, "rb") as file:
            content = file.read()
        if _SECRET.search(content):
            return
        with open(target, "wb") as copy:
            copy.write(content)
        os.chmod(target, 0o755 if found.st_mode & 0o001 else 0o644)


def _bind(step: Bind, target: str, _fd: int, _owner: int | None) -> None:
    # Recursive, because an ordinary user may not reveal what is below a mount.
    tree = linux.open_tree(step.source, recursive=True)
    attributes = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV
    try:
        linux.set_mount_attributes(tree, attributes, recursive=True)
        linux.move_mount(tree, target)
    finally:
        os.close(tree)


def _device(step: Device, target: str, _fd: int, _owner: int | None) -> None:
    found = os.stat(step.source)
    try:
        os.mknod(target, stat.S_IFCHR | 0o666, found.st_rdev)
        os.chmod(target, 0o666)  # noqa: S103 - as on every host
        return
    except PermissionError:  # an ordinary user's: the host's own node is bound
        with open(target, "w", encoding="utf-8"):
            pass
    linux.mount(step.source, target, None, linux.MS_BIND)
    linux.mount("none", target, None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_NOSUID | linux.MS_NOEXEC)


def _tmpfs(step: Tmpfs, target: str, _fd: int, owner: int | None) -> None:
    flags = linux.MS_NOSUID | linux.MS_NODEV | (0 if step.executable else linux.MS_NOEXEC)
    options = f"size={step.size},nr_inodes={step.inodes},mode={step.mode:o}"
    if owner is not None:
        options += f",uid={owner},gid={owner}"
    linux.mount("tmpfs", target, "tmpfs", flags, options)


def _proc(_step: Proc, target: str, _fd: int, _owner: int | None) -> None:
    linux.mount("proc", target, "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)


def _terminals(_step: Terminals, target: str, _fd: int, _owner: int | None) -> None:
    linux.mount(
        "devpts",
        target,
        "devpts",
        linux.MS_NOSUID | linux.MS_NOEXEC,
        "newinstance,ptmxmode=0666,mode=620,max=64",
    )


def _workspace(_step: WorkspaceMount, target: str, fd: int, _owner: int | None) -> None:
    linux.move_mount(fd, target)


_STEPS: dict[type[Step], Callable[..., None]] = {
    EmptyDirectory: _directory, Symlink: _symlink, TextFile: _text, Override: _override, Copy: _copy, Bind: _bind,
    Device: _device, Tmpfs: _tmpfs, Proc: _proc, Terminals: _terminals, WorkspaceMount: _workspace,
}  # fmt: skip
