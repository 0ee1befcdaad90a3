"""Servers of root and of an ordinary user build images, run from them, push them and export them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import images
from tests.support.registry import RegistryServer
from tests.support.sandboxes import KINDS
from tests.support.servers import ROOT, Server, serving

from carrel.errors import InvalidRequest, NotFound
from carrel.images.documents import ImagePlatform
from carrel.images.layer_reading import LayerLimits
from carrel.images.pulling import pull_image
from carrel.images.reference import ImageReference
from carrel.images.registry import RegistryAccess, RegistryClient
from carrel.images.storage import ImageStorage, StoredImage

DOCKERFILE = """\
FROM scratch
ADD rootfs.tar /
WORKDIR /app
COPY demo.deb /tmp/
RUN dpkg -i /tmp/demo.deb && rm /tmp/demo.deb
COPY <<EOF /etc/demo.conf
home=$HOME
EOF
RUN <<EOF
echo built > made
rm /etc/os-release
ls -a / > /opt/listed
sleep 2.5
EOF
USER service
RUN id -u > /srv/mine
"""
SERVICE = 990
SCRIPT = f"""\
#!/bin/sh
set -e
useradd --system --uid {SERVICE} --no-create-home --home-dir /srv service
"""
OWNERS = "chown service:staff /srv/theirs\nchown service /srv\nsetpriv --reuid=service --regid=55 --clear-groups touch /srv/own\n"
CONTROL = "Package: demo\nVersion: 1\nArchitecture: all\nMaintainer: nobody <n@example.org>\nDescription: none\n"
PROGRAMS = (  # noqa: SIM905
    "sh cat rm mkdir id ls stat chown touch tar setpriv useradd dpkg dpkg-deb dpkg-split dpkg-query ldconfig "
    "start-stop-daemon diff sleep"
).split()

pytestmark = pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")


@pytest.fixture(scope="module", params=["root", "user"])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[Server, RegistryServer]]:
    """A server, and a registry; that of root has a password and TLS."""
    secured = request.param == "root"
    if secured and not ROOT:
        pytest.skip("as root: the tests do not run as root")
    registry = RegistryServer(password=secured, tls=secured)
    options = {"images.plain_http": registry.host}
    if secured:
        options = {"images.ca_file": str(registry.certificate), "images.docker_config": str(registry.docker_config)}
    try:
        with serving(user=not secured, build=True, options=options) as server:
            yield server, registry
    finally:
        registry.close()


def make_context(context: Path, *, as_root: bool) -> None:
    """A small Debian in an archive, and a package with a script; in that of root, files have several owners."""
    rootfs, package = context / "rootfs", context / "package"
    images.debian(rootfs, python=False, programs=PROGRAMS)
    for name in ("opt", "var/lib/dpkg/info", "var/lib/dpkg/updates"):
        (rootfs / name).mkdir(parents=True)
    for name in ("var/lib/dpkg/status", "var/lib/dpkg/available", "etc/shadow", "etc/gshadow", "etc/login.defs"):
        (rootfs / name).touch()
    (rootfs / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\n")
    (package / "DEBIAN").mkdir(parents=True)
    (package / "DEBIAN/control").write_text(CONTROL)
    (package / "DEBIAN/postinst").write_text(SCRIPT + OWNERS * as_root)
    (package / "DEBIAN/postinst").chmod(0o755)
    (package / "srv").mkdir()
    for name in ("theirs", "first"):
        (package / "srv" / name).write_text(name)
    if as_root:
        os.chown(package / "srv/first", 33, 1000)
        (package / "srv/first").chmod(0o4755)
    else:
        (package / "srv").chmod(0o777)
    words = [] if as_root else ["--root-owner-group"]
    subprocess.run(["dpkg-deb", *words, "-Znone", "-b", str(package), str(context / "demo.deb")], check=True)
    owners = ["--numeric-owner"] if as_root else ["--owner=0", "--group=0"]
    subprocess.run(["tar", *owners, "-C", str(rootfs), "-cf", str(context / "rootfs.tar"), "."], check=True)
    shutil.rmtree(rootfs)
    shutil.rmtree(package)


def test_build_run_push_and_export(place: tuple[Server, RegistryServer], tmp_path: Path) -> None:
    server, registry = place
    as_root = registry.certificate.exists()
    context, said = tmp_path / "context", list[str]()
    make_context(context, as_root=as_root)
    (context / "Dockerfile").write_text(DOCKERFILE)
    client = server.client
    built = client.images.build(context, name="made:1", log=said.append)
    box = client.sandbox("c", image="made:1")
    done = box.commands.run(
        "cat /app/made /srv/mine /etc/demo.conf; ls /etc/os-release /opt; stat -c %u:%g:%a:%n /srv/*"
    )
    box.terminate(delete_files=True)
    assert done.stdout.split()[:3] == ["built", str(SERVICE), "home="] and "listed" in done.stdout, said
    assert "cannot access '/etc/os-release'" in done.stderr
    if as_root:
        for owner in ("33:1000:4755:/srv/first", f"{SERVICE}:50:644:/srv/theirs", f"{SERVICE}:55:644:/srv/own"):
            assert owner in done.stdout.split()

    # The second build finds every step again.
    said.clear()
    assert client.images.build(context, name="made:1", log=said.append).digest == built.digest
    steps = [line for line in said if line.split()[1] in {"ADD", "COPY", "RUN"}]
    assert said.count("  as in an earlier build") == len(steps) == 6

    last = DOCKERFILE.replace("USER service\n", "") + "RUN touch /x && chown 33:33 /x && echo wrong >&2 && exit 3\n"
    (context / "Dockerfile").write_text(last)
    with pytest.raises(InvalidRequest, match=r"line 16: RUN failed: it ended with") as refused:
        client.images.build(context, log=said.append)
    assert "3: wrong" in refused.value.detail if as_root else "has one user id" in (refused.value.hint or "")
    assert [each.names for each in client.images.list()] == [["made:1"]]

    target = f"{registry.host}/team/made:2"
    assert _carrel(server, "push", "made:1", target)["digest"] == built.digest
    assert asyncio.run(_pulled(registry, target, tmp_path)).digest == built.digest
    with pytest.raises(InvalidRequest, match="under a tag"):
        client.images.push(built.digest)
    with pytest.raises(NotFound, match="no image missing:1"):
        client.images.push("missing:1", target)

    file = tmp_path / "made.tar"
    assert _carrel(server, "export", "made:1", str(file)) == {"image": "made:1", "file": str(file)}
    client.images.delete("made:1")
    [again] = client.images.import_archive(file)
    assert (again.digest, again.names) == (built.digest, ["made:1"])


def _carrel(server: Server, *words: str) -> dict[str, object]:
    """What a command of `carrel image` prints."""
    token = (server.data_dir / "token").read_text().strip()
    url = json.loads((server.data_dir / "server.json").read_text())["url"]
    done = subprocess.run(
        [sys.executable, "-m", "carrel", "image", *words, "--json"],
        capture_output=True,
        env={**os.environ, "CARREL_URL": url, "CARREL_TOKEN": token},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


async def _pulled(registry: RegistryServer, name: str, place: Path) -> StoredImage:
    """The image in another storage, pulled from the registry."""
    storage = ImageStorage(str(place / "elsewhere"), LayerLimits(1 << 30, 100_000, 200))
    storage.prepare()
    secured = registry.certificate.exists()
    access = RegistryAccess(
        plain_http=frozenset() if secured else frozenset({registry.host}),
        ca_file=str(registry.certificate) if secured else None,
        docker_config=str(registry.docker_config),
    )
    client = RegistryClient(access)
    try:
        reference = ImageReference.parse(name)
        return await pull_image(client, storage, reference, ImagePlatform.of_host(), lambda _each: None)
    finally:
        await client.close()
