"""Roots of images, made from nothing or from files of this host."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

from carrel.isolation import refusing_program
from carrel.providers.base import RootImage

HELLO = "/bin/hello"
PROGRAMS = (  # noqa: SIM905
    "awk base32 base64 bash cat chmod chown cp curl cut date dd df echo env false find git git-upload-pack grep head id "
    "install kill ln ls make mkdir mkfifo mknod mount mv nice nohup perl printf ps readlink rm rmdir sed seq setsid sh "
    "sleep sort stat stty tail tar tee test timeout touch tr true umount uname unshare wc which whoami xargs"
).split()
_LIBRARY = re.compile(r"(/\S+) \(0x")


def image(root: Path, **more: object) -> RootImage:
    """The image of a root."""
    status = root.stat()
    return RootImage(str(root), (status.st_dev, status.st_ino), **more)  # type: ignore[arg-type]


def archive(root: Path, path: Path, name: str, user: str = "agent") -> None:
    """Write an archive as `docker save` does, with one layer."""
    layer = path.with_suffix(".layer")
    with tarfile.open(layer, "w") as file:
        file.add(root, ".")
    digest = hashlib.sha256(layer.read_bytes()).hexdigest()
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
        "os": "linux",
        "config": {"User": user, "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    documents = {
        "config.json": config,
        "manifest.json": [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}],
    }
    with tarfile.open(path, "w") as file:
        file.add(layer, "layer.tar")
        for document, value in documents.items():
            data = json.dumps(value).encode()
            info = tarfile.TarInfo(document)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    layer.unlink()


def empty(root: Path) -> None:
    """A root without anything."""
    root.mkdir(parents=True)


def static(root: Path) -> None:
    """A root with one program that needs no library: it writes `hello` to standard error and ends with 126."""
    place = root / HELLO[1:]
    place.parent.mkdir(parents=True)
    place.write_bytes(refusing_program.image(b"hello\n"))
    place.chmod(0o755)


def musl(root: Path) -> None:
    """A root with another C library: its loader, and one program that prints `musl` and its own user."""
    (root / "bin").mkdir(parents=True)
    (root / "lib").mkdir()
    source = '#include <stdio.h>\n#include <unistd.h>\nint main() { printf("musl %d\\n", getuid()); return 0; }\n'
    command = ["musl-gcc", "-x", "c", "-o", str(root / "bin/who"), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    loader = next(Path("/lib").glob("ld-musl-*.so.1"))
    shutil.copy(loader, root / "lib" / loader.name)


def debian(root: Path, *, python: bool = True, programs: Iterable[str] = PROGRAMS) -> None:
    """A small Debian, copied from this host: a shell, programs, Python with its standard library."""
    for name in ("etc", "usr/bin", "usr/lib", "usr/share/git-core/templates", "root", "var/tmp", "home"):
        (root / name).mkdir(parents=True)
    (root / "root").chmod(0o700)
    for name in ("bin", "lib"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nagent:x:1234:55:a:/home/agent:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nstaff:x:50:\nworkers:x:55:\n")
    (root / "etc/os-release").write_text("ID=copied\n")
    files = [os.path.realpath(found) for name in programs if (found := shutil.which(name))]
    links = {found: os.path.realpath(found) for name in programs if (found := shutil.which(name))}
    if python:
        links |= {"/usr/bin/python3": os.path.realpath("/usr/bin/python3")}
        files.append(os.path.realpath("/usr/bin/python3"))
        version = os.path.basename(os.path.realpath("/usr/bin/python3"))
        unwanted = shutil.ignore_patterns("test", "__pycache__", "idlelib", "tkinter", "ensurepip", "config-*")
        shutil.copytree(f"/usr/lib/{version}", root / f"usr/lib/{version}", ignore=unwanted, symlinks=True)
        files += [str(path) for path in Path(f"/usr/lib/{version}/lib-dynload").glob("*.so")]
        for library in ("libstdc++.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"):  # packages need them
            files += [str(path) for path in Path("/usr/lib").glob(f"*-linux-gnu/{library}")]
    for file in files:
        _copy(root, file)
    for link, target in links.items():
        place = root / "usr/bin" / os.path.basename(link)
        if not place.exists():
            place.symlink_to(target)
    for library in _libraries(files):
        _copy(root, library)


def _libraries(files: list[str]) -> set[str]:
    done = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False)
    return set(_LIBRARY.findall(done.stdout))


def _copy(root: Path, file: str) -> None:
    place = root / file[1:]
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        shutil.copy(file, place)
