"""Makes the container images of carrel, as OCI layouts in tar files: `make_images.py FOLDER`.

`carrel-server` is Debian's Python and carrel with its locked requirements; `carrel-bundle` is the supervisor for pods.
Debian packages are downloaded and unpacked, never installed. carrel's own builder makes the image, in a server that
runs for that long only. The same packages make the same bytes.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from carrel import Client, __version__

HERE = Path(__file__).resolve().parents[1]
REQUIREMENTS, DOCKERFILE = HERE / "requirements/image.txt", HERE / "deploy/images/server/Dockerfile"
PYTHON = "python3.11"
"""That of Debian 12, which this has to run on too: it compiles the modules."""
FORMAT = 3
"""Changes when the same packages would make another base."""
PACKAGES = (
    *("bash", "ca-certificates", "coreutils", "diffutils", "findutils", "grep", "gzip", "procps", "python3", "sed"),
    *("libstdc++6", "tar", "util-linux"),
)
"""What the server needs, and the programs of sandboxes that have its root."""
PROGRAM = "#!/usr/bin/python3\nimport sys\n\nfrom carrel.cli import main\n\nsys.exit(main())\n"
USERS = (
    "root:x:0:0:root:/root:/bin/bash\n"
    "carrel:x:1000:1000:carrel:/var/lib/carrel:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
)
GROUPS = "root:x:0:\ncarrel:x:1000:\nnogroup:x:65534:\n"
_MERGED = ("bin", "lib", "lib64", "sbin")
_UNWANTED = (
    *("usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/lintian", "usr/share/bash-completion"),
    *(
        "usr/share/debconf",
        "usr/lib/systemd",
        "lib/systemd",
        "etc/init.d",
        "usr/share/i18n",
        "usr/lib/udev",
        "var/cache",
    ),
)
_START_S = 60.0


def debian(root: Path, packages: Iterable[str]) -> list[str]:
    """Unpack packages of Debian and all that they depend on. Returns the names of their files."""
    with tempfile.TemporaryDirectory(prefix="carrel-packages-") as place:
        archives = Path(place, "archives")
        (archives / "partial").mkdir(parents=True)
        Path(place, "status").touch()  # nothing is installed, so every dependency is downloaded
        options = {
            "Dir::State::status": f"{place}/status",
            "Dir::Cache::archives": str(archives),
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "Debug::NoLocking": "true",
        }
        words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        _do("apt-get", "install", "--yes", "-qq", *words, "--download-only", *packages, stdout=subprocess.DEVNULL)
        for name in _MERGED:
            (root / "usr" / name).mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(f"usr/{name}")
        found = sorted(archives.glob("*.deb"))
        for each in found:
            # Not `dpkg --extract`: it would put directories in the place of the links.
            with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", each], stdout=subprocess.PIPE) as content:
                _do("tar", "-xp", "--keep-directory-symlink", "-C", str(root), stdin=content.stdout)
            if content.returncode:
                raise SystemExit(f"images: {each.name} cannot be read")
        return [each.name for each in found]


def clean(root: Path) -> None:
    """Remove what no container needs, and make what the scripts of the packages would have made."""
    for name in _UNWANTED:
        shutil.rmtree(root / name, ignore_errors=True)
    for path in (root / "usr/share/doc").glob("**/*"):
        if not path.is_dir() and path.name != "copyright":
            path.unlink()
    authorities = sorted((root / "usr/share/ca-certificates").glob("**/*.crt"))
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_bytes(b"".join(each.read_bytes() for each in authorities))
    (root / "usr/bin/sh").symlink_to("bash")
    (root / "etc/passwd").write_text(USERS)
    (root / "etc/group").write_text(GROUPS)
    (root / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    for name, mode in {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "usr/local/bin": 0o755}.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)


def add_requirements(root: Path) -> None:
    """Install the locked requirements of carrel."""
    packages = _packages(root)
    uv = _uv(packages)
    _do(*uv, "--only-binary", ":all:", "--require-hashes", "-r", str(REQUIREMENTS), env=_with_index())
    _keep_programs(packages / "bin", root / "usr/local/bin")
    shutil.rmtree(packages / "bin")
    (packages / ".lock").unlink(missing_ok=True)
    _compile(root, packages, root / "usr/lib" / packages.parent.name)


def add_carrel(root: Path) -> None:
    """Install carrel and its program."""
    packages = _packages(root)
    with tempfile.TemporaryDirectory(prefix="carrel-wheel-") as place:
        build = ("--wheel", "--no-build-isolation", "--out-dir", place, str(HERE))
        _do(sys.executable, "-m", "uv", "--quiet", "build", *build, stdout=subprocess.DEVNULL)
        (wheel,) = Path(place).glob("*.whl")
        _do(*_uv(packages), "--no-deps", "--offline", str(wheel))
    shutil.rmtree(packages / "bin")
    (packages / ".lock").unlink(missing_ok=True)
    for path in packages.glob("*.dist-info/*"):  # they name the folder of the wheel, or its time
        if path.name in {"direct_url.json", "uv_cache.json", "RECORD"}:
            path.unlink()
    add_text(root, "usr/local/bin/carrel", PROGRAM)
    (root / "usr/local/bin/carrel").chmod(0o755)
    _compile(root, packages)


def _packages(root: Path) -> Path:
    """Return the folder of Python packages, which may have to be made."""
    found = root / "usr/local/lib" / PYTHON / "dist-packages"
    found.mkdir(parents=True, exist_ok=True)
    return found


def _uv(packages: Path) -> tuple[str, ...]:
    version = PYTHON.removeprefix("python")
    target = ("--target", str(packages), "--python-version", version, "--no-compile")
    return (sys.executable, "-m", "uv", "--quiet", "pip", "install", *target)


def _with_index() -> dict[str, str]:
    """Return the environment of uv, which gets the index that pip is configured with: it does not read that itself."""
    variables = {"UV_SYSTEM_CERTS": "1", **os.environ}
    for name, setting in {"UV_DEFAULT_INDEX": "index-url", "UV_INDEX": "extra-index-url"}.items():
        words = (sys.executable, "-m", "pip", "config", "get", f"global.{setting}")
        found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
        if found and name not in variables:
            variables[name] = " ".join(found)
    return variables


def _compile(root: Path, *folders: Path) -> None:
    """Compile modules, because the root is read-only when it is used. Their times may be anything."""
    words = (f"/usr/bin/{PYTHON}", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash")
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": ""}
    for folder in folders:
        _do(*words, "-s", str(root), "-p", "/", str(folder), env=environment, check=False)


def _keep_programs(source: Path, target: Path) -> None:
    """Keep the programs that are no scripts: uv."""
    for path in source.iterdir():
        if path.is_file() and not path.read_bytes().startswith(b"#!"):
            shutil.copy2(path, target / path.name)


def write_tar(root: Path, path: Path, owned: Iterable[str] = ()) -> None:
    """Write a tree as a tar file: sorted, of root, without times and set-user-ID bits. `owned` are directories of the
    user of the image.
    """
    theirs = frozenset(owned)

    def described(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 1000 if entry.name in theirs else 0
        entry.mtime, entry.uname, entry.gname = 0, "", ""
        entry.mode &= 0o1777
        return entry

    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(str(each.relative_to(root)) for each in root.rglob("*")):
            tar.add(root / name, name, recursive=False, filter=described)


def add_text(root: Path, name: str, text: str) -> None:
    """Write a small file of an image."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@contextmanager
def building() -> Iterator[Client]:
    """Yield a client of a server that runs for this long only."""
    with tempfile.TemporaryDirectory(prefix="carrel-images-") as place:
        data = Path(place, "data")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("CARREL_")}
        words = ("--port", "0", "--data-dir", str(data), "--set", "volumes=directory", "--log-level", "error")
        with (Path(place) / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "carrel", "serve", *words], env=environment, stdout=log, stderr=log
            )
        try:
            until = time.monotonic() + _START_S
            while not (data / "server.json").exists():
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"images: no server to build with:\n{Path(place, 'log').read_text()}")
                time.sleep(0.05)

            url = json.loads((data / "server.json").read_text())["url"]
            with Client(url, (data / "token").read_text().strip()) as client:
                yield client
        finally:
            process.terminate()
            process.wait()


def make_base(target: Path) -> None:
    """Write the layer of the server's image that has Debian's packages and the requirements."""
    with tempfile.TemporaryDirectory(prefix="carrel-base-") as place:
        root = Path(place)
        found = debian(root, PACKAGES)
        clean(root)
        add_requirements(root)
        (root / "var/lib/carrel").mkdir(parents=True)
        add_text(root, "usr/share/carrel/packages.txt", "\n".join(found) + "\n")
        write_tar(root, target, ["var/lib/carrel"])


def make_server(target: Path, client: Client, name: str, *, cached: bool) -> None:
    """Make the image of the server."""
    with tempfile.TemporaryDirectory(prefix="carrel-context-") as place:
        root, context = Path(place, "root"), Path(place, "context")
        root.mkdir()
        context.mkdir()
        if cached:
            shutil.copy(_cached_base(), context / "base.tar")
        else:
            make_base(context / "base.tar")
        add_carrel(root)
        write_tar(root, context / "carrel.tar")
        shutil.copy(DOCKERFILE, context)
        client.images.build(context, name=name)
        client.images.export(name, target)


def _cached_base() -> Path:
    """Return the base in the cache of the user, for tests. It is made anew when what it is made from changes."""
    whole = hashlib.sha256(repr((FORMAT, PACKAGES, _UNWANTED, PYTHON)).encode() + REQUIREMENTS.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "carrel/images"
    found = folder / f"{whole.hexdigest()[:16]}.tar"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            for old in folder.glob("*.tar"):
                old.unlink()
            draft = found.with_suffix(".draft")
            make_base(draft)
            draft.rename(found)
    return found


def make_bundle(target: Path, name: str) -> None:
    """Make the image of the bundle, from this installation."""
    with tempfile.TemporaryDirectory(prefix="carrel-bundle-") as place:
        words = ("bundle", "--data-dir", place, "--image", str(target), "--name", name)
        _do(sys.executable, "-m", "carrel", *words, stdout=subprocess.DEVNULL)


def _do(*words: str, check: bool = True, **more: object) -> None:
    done = subprocess.run(words, check=False, **more)  # type: ignore[call-overload]
    if check and done.returncode:
        raise SystemExit(f"images: {words[0]} ended with {done.returncode}: {' '.join(words)}")


def main() -> None:
    """Make both images in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--registry", default="localhost", help="what their names begin with")
    parser.add_argument("--tag", default=__version__)
    parser.add_argument("--cached", action="store_true", help="take Debian's packages from an earlier run, for tests")
    chosen = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SystemExit("images: only root on Debian can make them: packages are unpacked with their owners")
    chosen.folder.mkdir(parents=True, exist_ok=True)
    names = {each: f"{chosen.registry}/{each}:{chosen.tag}" for each in ("carrel-server", "carrel-bundle")}
    with building() as client:
        make_server(chosen.folder / "carrel-server.tar", client, names["carrel-server"], cached=chosen.cached)
    make_bundle(chosen.folder / "carrel-bundle.tar", names["carrel-bundle"])
    for each, name in names.items():
        path = chosen.folder / f"{each}.tar"
        print(f"{path}  {name}  {path.stat().st_size >> 20} MB")


if __name__ == "__main__":
    main()
