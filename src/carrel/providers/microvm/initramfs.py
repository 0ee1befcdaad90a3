"""Makes the first file system of a machine: the supervisor's bundle and the kernel modules, as a cpio archive.

The same bundle and modules make the same bytes. Blocking.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from carrel.errors import PlatformError
from carrel.isolation.inside import BUNDLE
from carrel.isolation.machine.guest import MODULE_ORDER, MODULES
from carrel.primitives.atomic import write_file

_DIRECTORIES = ("/dev", "/proc", "/sys", "/root", "/cgroup", MODULES)
_CONSOLE = (5, 1)


def write(path: str, bundle: str, modules: Sequence[tuple[str, bytes]]) -> None:
    """Write the archive to a file that is not there. Raises `PlatformError`."""
    try:
        write_file(path, archive(bundle, modules))
        os.chmod(path, 0o444)
    except OSError as error:
        raise PlatformError(f"the first file system of virtual machines cannot be made: {error}") from error


def archive(bundle: str, modules: Sequence[tuple[str, bytes]]) -> bytes:
    """Return the archive. Owners and times are not those of the host."""
    entries: list[tuple[str, int, bytes, tuple[int, int]]] = []

    def add(path: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        entries.append((path.lstrip("/"), mode, data, device))

    for directory in (*_DIRECTORIES, os.path.dirname(BUNDLE), BUNDLE):
        add(directory, stat.S_IFDIR | 0o755)
    add("/dev/console", stat.S_IFCHR | 0o600, device=_CONSOLE)
    for folder, names, files in os.walk(bundle):
        names.sort()
        for name in sorted((*names, *files)):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            inside = f"{BUNDLE}/{os.path.relpath(path, bundle)}"
            if stat.S_ISLNK(mode):
                add(inside, mode, os.fsencode(os.readlink(path)))
            elif stat.S_ISDIR(mode):
                add(inside, mode)
            else:
                with open(path, "rb") as file:
                    add(inside, mode, file.read())
    for name, content in modules:
        add(f"{MODULES}/{name}", stat.S_IFREG | 0o400, content)
    add(MODULE_ORDER, stat.S_IFREG | 0o400, "\n".join(name for name, _ in modules).encode())
    add("/TRAILER!!!", 0)
    return b"".join(_entry(number, *entry) for number, entry in enumerate(entries, start=1))


def _entry(number: int, path: str, mode: int, data: bytes, device: tuple[int, int]) -> bytes:
    name = path.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name), 0)
    head = b"070701" + b"".join(b"%08X" % each for each in fields) + name
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
