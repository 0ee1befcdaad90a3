"""Finds the kernel of the machines: that of the host's distribution, with the modules that they need. Blocking."""

from __future__ import annotations

import glob
import gzip
import lzma
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from carrel.errors import PlatformError

WANTED = ("virtio_pci", "virtio_console", "virtiofs")
"""The modules that a machine needs, unless its kernel has them built in."""
_LARGEST = 16 * 1024 * 1024
_DEADLINE_S = 20
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")
_NAMES = ("/boot/vmlinuz-*", "/usr/lib/modules/*/vmlinuz", "/lib/modules/*/vmlinuz")
_MODULES = ("/lib/modules", "/usr/lib/modules")


@dataclass(frozen=True)
class GuestKernel:
    """A kernel, its release, and the directory of its modules."""

    path: str
    release: str
    modules: str

    def needed(self) -> list[tuple[str, bytes]]:
        """Return the modules to load, in order, each with its content. Raises `PlatformError`."""
        files = _files(self.modules)
        built_in = {_name(line) for line in _built_in(self.modules)}
        found: dict[str, bytes] = {}

        def add(name: str) -> None:
            if name in found or name in built_in:
                return
            path = files.get(name)
            if path is None:
                raise PlatformError(
                    f"the kernel {self.release} has no module {name} in {self.modules}",
                    hint="install another kernel of the distribution, or set CARREL_MICROVM_KERNEL to one",
                )
            content = _content(path)
            match = _DEPENDS.search(content)
            for each in match[1].decode().split(",") if match is not None else ():
                if each:
                    add(_name(each))
            found[name] = content

        for name in WANTED:
            add(name)
        return list(found.items())


def find(kernel: str, modules: str) -> GuestKernel | None:
    """Return the configured kernel, or the newest of this host that has its modules; None if there is none."""
    paths = [kernel] if kernel else sorted((path for name in _NAMES for path in glob.glob(name)), key=_age)
    for path in paths:
        release = _release(path)
        if release is None:
            continue
        for directory in [modules] if modules else [f"{each}/{release}" for each in (*_beside(path), *_MODULES)]:
            if os.path.isdir(directory):
                return GuestKernel(path, release, directory)
    return None


def _age(path: str) -> tuple[list[int], str]:
    """Sort by version, the newest first."""
    return [-int(each) for each in re.findall(r"\d+", path)], path


def _beside(path: str) -> Iterator[str]:
    """Return where the modules of an unpacked package are."""
    yield os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(path))), "lib", "modules")


def _release(path: str) -> str | None:
    """Return the release of a kernel image, which it names in its header."""
    try:
        with open(path, "rb") as file:
            head = file.read(65536)
    except OSError:
        return None
    if head[0x202:0x206] == b"HdrS" or head[0x202:0x206] == b"":
        offset = int.from_bytes(head[0x20E:0x210], "little") + 0x200
        name = head[offset : offset + 256].partition(b"\0")[0].split(b" ")[0].decode(errors="replace")
        return name if re.fullmatch(r"[\w.+~-]{1,128}", name) else None
    return None


def _files(directory: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            if ".ko" in name:
                found.setdefault(_name(name), os.path.join(folder, name))
    return found


def _built_in(directory: str) -> list[str]:
    try:
        return Path(directory, "modules.builtin").read_text().splitlines()
    except OSError:
        return []


def _name(path: str) -> str:
    return os.path.basename(path).partition(".ko")[0].replace("-", "_")


def _content(path: str) -> bytes:
    """Return a module, which distributions compress in different ways. Raises `PlatformError`."""
    try:
        data = Path(path).read_bytes()
        if path.endswith(".xz"):
            data = lzma.decompress(data)
        elif path.endswith(".gz"):
            data = gzip.decompress(data)
        elif path.endswith(".zst"):
            if shutil.which("zstd") is None:
                raise PlatformError(f"{path} cannot be unpacked: there is no zstd", hint="install zstd")
            data = subprocess.run(
                ("zstd", "-dc", "--", path), capture_output=True, timeout=_DEADLINE_S, check=True
            ).stdout
    except (OSError, EOFError, lzma.LZMAError, subprocess.SubprocessError) as error:
        raise PlatformError(f"the module {path} cannot be read: {error}") from error
    if len(data) > _LARGEST or not data.startswith(b"\x7fELF"):
        raise PlatformError(f"{path} is not a kernel module")
    return data
