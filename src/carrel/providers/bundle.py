"""The supervisor's bundle: a directory with an interpreter, its loader and libraries, and the supervisor.

A container, a gVisor sandbox and a virtual machine cannot be forked from the zygote, so the supervisor starts there as
a program. Their root may have another libc, another Python or nothing at all. So the bundle needs nothing of it: it is
mounted read-only at one path, and its interpreter is started through its own loader. It is made from this very
installation. The same installation makes the same bytes, and the bundle is stored under their hash. Blocking.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import secrets
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from carrel.errors import PlatformError
from carrel.isolation import rootfs
from carrel.isolation.inside import BUNDLE
from carrel.primitives.atomic import write_file
from carrel.primitives.trees import remove_tree

FORMAT = 2
"""Changes when a bundle of the same files would be made in another way."""
DEADLINE_S = 300.0
_ROOT, _SOURCES, _LOCK, _DRAFT = "root", "sources.json", ".lock", "draft-"
_START = "__import__('bundle_modules').run('{}')"
"""Has no space: in a virtual machine it is a word of the kernel's command line."""
_INTERPRETER, _LIBRARIES, _LOADER = "bin/python3", "lib", "lib/ld.so"
_PRELOADED = b"/etc/ld.so.preload\0"
_NOT_PRELOADED = f"{BUNDLE}/none".encode().ljust(len(_PRELOADED), b"\0")
NAMES = {"/etc/hosts": rootfs.HOSTS, "/etc/hostname": "carrel\n", "/etc/resolv.conf": ""}
"""Files of the bundle that belong at these paths in a sandbox, whatever its image has. There is no name server."""
_PLAN = (
    rootfs.EmptyDirectory("/etc"),
    *rootfs.OWN_PLAN,
    *(rootfs.TextFile(path, text) for path, text in NAMES.items()),
)
_PROGRAM = Path(__file__).with_name("bundle_parts.py")

Source = tuple[str, int, int]
"""A file that a bundle was made from: its path, size and time of change."""


@dataclass(frozen=True)
class BundleParts:
    """The files that a bundle is made from: paths on this host, by their names in the bundle where they have some."""

    interpreter: str
    loader: list[str]
    libraries: dict[str, str]
    extensions: dict[str, str]
    sources: list[str]

    @property
    def paths(self) -> list[str]:
        """All of them, once each."""
        copied = (self.interpreter, *self.libraries.values(), *self.extensions.values())
        return sorted({*copied, *self.sources})


@dataclass(frozen=True)
class SupervisorBundle:
    """A complete bundle that was checked: its directory on the host, the hash of its content, and its size."""

    path: str
    digest: str
    size: int
    files: int

    @property
    def own_files(self) -> str:
        """The directory on the host that belongs at `/etc/carrel` in a sandbox."""
        return os.path.join(self.path, rootfs.PYTHON.lstrip("/"))


def command(report: str) -> list[str]:
    """Return the command of PID 1 in a sandbox that has the bundle. `report` is the path there of the socket that it
    connects to for its facts.
    """
    return [*_run("carrel.supervisor.program"), report]


def remote_command(host: str, port: int, credentials: str, *, lent: bool = False) -> list[str]:
    """Return the command of PID 1 in a sandbox on another machine that has the bundle for remote supervisors. See
    `carrel.supervisor.remote` for the arguments.
    """
    return [*_run("carrel.supervisor.remote"), host, str(port), credentials, *(["lent"] if lent else [])]


def lend_command(directory: str) -> list[str]:
    """Return the command of a container that lends a directory to such a supervisor in its pod."""
    return [*_run("carrel.supervisor.lent_directory"), directory]


def unpack_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of the init container of a pod, whose image has the bundle for remote supervisors. See
    `carrel.supervisor.unpack` for the arguments.
    """
    return [*_run("carrel.supervisor.unpack"), *arguments]


def machine_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of PID 1 of a virtual machine, whose first file system has the bundle."""
    return [*_run("carrel.isolation.machine.guest"), *arguments]


def _run(module: str) -> list[str]:
    return [
        *(f"{BUNDLE}/{_LOADER}", "--inhibit-cache", "--library-path", f"{BUNDLE}/{_LIBRARIES}"),
        *(f"{BUNDLE}/{_INTERPRETER}", "-I", "-S", "-X", "utf8", "-c", _START.format(module)),
    ]


def bundles_of(data_dir: str) -> str:
    """Return the directory of bundles in a data directory."""
    return os.path.join(data_dir, "bundles")


def provide(directory: str, *, remote: bool = False) -> SupervisorBundle:
    """Return the bundle of this installation from a directory of bundles, and make it if it is not there. One for
    `remote` supervisors has TLS too.

    Several processes may do this at once: one makes it, the others wait for it. Raises `PlatformError`.
    """
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        with _locked(directory):
            for name in sorted(os.listdir(directory)):
                place = os.path.join(directory, name)
                if name.startswith(_DRAFT):  # of a process that was killed
                    remove_tree(place)
                elif name != _LOCK and _is_current(place, remote):
                    digest, size, files = _measure(os.path.join(place, _ROOT))
                    if digest == name:
                        return SupervisorBundle(os.path.join(place, _ROOT), digest, size, files)
                    remove_tree(place)
            return _build(directory, remote)
    except OSError as error:
        raise PlatformError(f"the supervisor's bundle cannot be made in {directory}: {error}") from error


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    lock = os.open(os.path.join(directory, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _build(directory: str, remote: bool) -> SupervisorBundle:
    draft = os.path.join(directory, f"{_DRAFT}{secrets.token_hex(8)}")
    root = os.path.join(draft, _ROOT)
    os.makedirs(root)
    try:
        parts = _make_parts(root, remote)
        _copy(parts.interpreter, f"{root}/{_INTERPRETER}")
        for name, path in parts.libraries.items():
            _copy(path, f"{root}/{_LIBRARIES}/{name}")
        for name, path in parts.extensions.items():
            _copy(path, f"{root}/{name}")
        _take_loader(root, parts.loader[0])
        rootfs.apply_plan(_PLAN, root)
        _make_read_only(root)
        digest, size, files = _measure(root)
        made_from = {"format": _format(remote), "files": [_source(path) for path in parts.paths]}
        write_file(os.path.join(draft, _SOURCES), json.dumps(made_from).encode())
        place = os.path.join(directory, digest)
        remove_tree(place)  # it was made from the same files, which have other times now
        os.rename(draft, place)
    except BaseException:
        remove_tree(draft)
        raise
    return SupervisorBundle(os.path.join(place, _ROOT), digest, size, files)


def _make_parts(root: str, remote: bool) -> BundleParts:
    """Run the program that compiles the modules into the bundle and finds what else it needs."""
    interpreter = os.path.realpath(sys.executable)
    arguments = [interpreter, "-I", "-S", str(_PROGRAM), "remote" if remote else "local", root, BUNDLE, *_search()]
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8"}
    try:
        done = subprocess.run(arguments, capture_output=True, env=environment, cwd="/", timeout=DEADLINE_S, check=True)
        parts = BundleParts(**json.loads(done.stdout))
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise PlatformError(f"the supervisor's bundle cannot be made: {' '.join(last)[:500]}") from error
    except (subprocess.TimeoutExpired, ValueError, TypeError) as error:
        raise PlatformError(f"the supervisor's bundle cannot be made: {error}") from error
    if len(parts.loader) != 1:
        raise PlatformError(
            f"the supervisor's bundle cannot be made: {interpreter} does not use a dynamic loader",
            hint="run carrel on an interpreter that is linked dynamically, such as that of the distribution",
        )
    return parts


def _search() -> list[str]:
    """Return the directories of the packages that the supervisor is made of."""
    found = set()
    for name in ("carrel", "httptools"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise PlatformError(f"the supervisor's bundle cannot be made: the package {name} is not installed")
        found.add(os.path.dirname(os.path.dirname(os.path.abspath(spec.origin))))
    return sorted(found)


def _copy(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copyfile(source, target)
    os.chmod(target, 0o755)  # noqa: S103 - programs and libraries


def _take_loader(root: str, name: str) -> None:
    """Give the loader one name, and keep it from loading what an image lists for its own programs: that may be made
    for another libc, and is not ours.
    """
    path = f"{root}/{_LIBRARIES}/{name}"
    content = Path(path).read_bytes()
    Path(path).write_bytes(content.replace(_PRELOADED, _NOT_PRELOADED))
    os.symlink(name, f"{root}/{_LOADER}")


def _make_read_only(root: str) -> None:
    """Set modes and times that do not depend on who made the bundle, and when."""
    for folder, names, files in os.walk(root, topdown=False):
        for name in (*names, *files):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            if not stat.S_ISLNK(mode):
                os.chmod(path, 0o555 if mode & 0o100 else 0o444)
            os.utime(path, (0, 0), follow_symlinks=False)
    os.chmod(root, 0o555)  # noqa: S103 - nobody may write it
    os.utime(root, (0, 0))


def _measure(root: str) -> tuple[str, int, int]:
    """Return the hash of a bundle's content, its size and the number of its files."""
    whole, size, count = hashlib.sha256(), 0, 0
    for folder, names, files in os.walk(root):
        names.sort()
        for name in sorted((*files, *names)):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            content = b""
            if stat.S_ISLNK(status.st_mode):
                content = os.fsencode(os.readlink(path))
            elif stat.S_ISREG(status.st_mode):
                content = Path(path).read_bytes()
                size, count = size + len(content), count + 1
            line = f"{os.path.relpath(path, root)}\0{status.st_mode:o}\0{hashlib.sha256(content).hexdigest()}\n"
            whole.update(os.fsencode(line))
    return whole.hexdigest(), size, count


def _is_current(place: str, remote: bool) -> bool:
    """Whether a bundle was made from the files that this installation has now."""
    try:
        made_from = json.loads(Path(place, _SOURCES).read_bytes())
        if made_from["format"] != _format(remote):
            return False
        return all(_source(path) == (path, size, changed) for path, size, changed in made_from["files"])
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _source(path: str) -> Source:
    status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns


def _format(remote: bool) -> str:
    """Return a hash of what a bundle depends on besides the files that it lists."""
    facts = (FORMAT, remote, os.path.realpath(sys.executable), _search(), repr(_PLAN), _PROGRAM.read_bytes())
    return hashlib.sha256(repr(facts).encode()).hexdigest()
