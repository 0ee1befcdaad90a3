"""Packages as agents install them: through the index that the way out itself is."""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping
from importlib.metadata import distribution

import pytest
from tests.support.egress_ground import Carrel, Outside, ground, outbound, run
from tests.support.indexes import IndexServer, wheel

from carrel.client import Sandbox
from carrel.egress.index.front import IndexAnswer
from carrel.errors import Denied

LARGE = 2 * 1024 * 1024


class Index(IndexServer):
    """An index that keeps no connection open."""

    async def answer(self, method: str, target: str, headers: Mapping[str, str]) -> IndexAnswer:
        answer = await super().answer(method, target, headers)
        answer.headers.append(("connection", "close"))
        return answer


class Place:
    """A server, an index and a site with a file beside it."""

    def __init__(self, outside: Outside, carrel: Carrel):
        self.outside, self.carrel = outside, carrel
        self.index = Index()
        outside.run(self.index.web.open())
        self.index.add(wheel("shelf", requires=("plank",)))
        self.index.add(wheel("plank"))
        self.index.add(wheel("drawer", requires=("handle",)))
        self.index.add(wheel("handle"))
        self.index.add(wheel("nail"))
        self.index.add(wheel("blocked-thing"))
        self.index.add(wheel("heavy", payload=secrets.token_bytes(LARGE)))
        self.direct = wheel("direct")
        self.files = outside.site(lambda *_: self.direct[1])

    def context(self, name: str, **more: object) -> Sandbox:
        registry = {"name": "main", "url": f"{self.index.web.url}/simple/"}
        pip = {"registries": [registry], "blocked_packages": ["Blocked_Thing"], **more}
        return self.carrel.context(
            name, *outbound("files.test", port=self.files.port), sources={"package_managers": {"pip": pip}}
        )


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with ground() as (outside, carrel):
        place = Place(outside, carrel)
        yield place
        outside.run(place.index.web.close())


def repacked(name: str) -> tuple[str, bytes]:
    """A package of this interpreter as a wheel again."""
    found = distribution(name)
    packed, lines = io.BytesIO(), []
    record = next(str(each) for each in found.files or () if each.name == "RECORD")
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for each in found.files or ():
            if not str(each).startswith("..") and each.suffix != ".pyc" and str(each) != record:
                archive.writestr(str(each), each.read_binary())
                lines.append(f"{each},,\n")
        archive.writestr(record, "".join([*lines, f"{record},,\n"]))
    return f"{name.replace('-', '_')}-{found.version}-py3-none-any.whl", packed.getvalue()


def test_real_clients_are_installed_and_find_the_way(place: Place) -> None:
    for name in ("httpx", "httpcore", "h11", "anyio", "idna", "certifi", "typing-extensions"):
        place.index.add(repacked(name), name)
    box = place.context("httpx")
    run(box, ["pip", "install", "-q", "--target", "lib", "httpx"])
    url = f"http://files.test:{place.files.port}/"
    code = f"import sys; sys.path.insert(0, 'lib'); import httpx; print(len(httpx.get({url!r}).content))"
    assert run(box, ["python3", "-c", code]) == f"{len(place.direct[1])}\n"


def test_the_hosts_own_index_and_a_client_from_it(place: Place) -> None:
    """As a server is without a word about packages. Needs what this host itself installs packages from."""
    box = place.carrel.context("default", *outbound("files.test", port=place.files.port))
    script(box, "pip install -q --target lib aiohttp requests")
    code = f"""
import asyncio, sys
sys.path.insert(0, "lib")
import aiohttp, requests
url = "http://files.test:{place.files.port}/"
async def main():
    async with aiohttp.ClientSession(trust_env=True) as client, client.get(url) as answer:
        print(len(await answer.read()), len(requests.get(url).content))
asyncio.run(main())
"""
    size = len(place.direct[1])
    assert run(box, ["python3", "-c", code]) == f"{size} {size}\n"


def script(box: Sandbox, text: str, *, ok: bool = True) -> str:
    """What a script says: what it does is not decided by reading it."""
    box.files.write("script.sh", f"exec 2>&1\n{text}\n".encode())
    return run(box, ["sh", "script.sh"], ok=ok)


def version(box: Sandbox, package: str, where: str = "lib") -> str:
    code = f"import sys; sys.path.insert(0, '/workspace/{where}'); import {package}; print({package}.version)"
    return run(box, ["python3", "-c", code])


def test_pip_installs_with_what_it_needs_and_the_next_sandbox_asks_nobody(place: Place) -> None:
    # Packages of its own: what another test has asked for is kept.
    one, two = place.context("one"), place.context("two")
    before = len(place.index.asked)
    run(one, ["pip", "install", "-q", "--target", "lib", "drawer"])
    assert (version(one, "drawer"), version(one, "handle")) == ("1.0\n", "1.0\n")
    asked = list(place.index.asked)
    assert {path.split("/")[2] for path in asked[before:]} == {"drawer", "handle"}
    run(two, ["python3", "-m", "pip", "install", "-q", "--target", "lib", "drawer"])
    assert version(two, "drawer") == "1.0\n"
    assert place.index.asked == asked
    records = [each for each in place.carrel.records("two") if each.name == "package"]
    assert records and {each.result for each in records} == {"ok"}


def test_uv_installs(place: Place) -> None:
    found = shutil.which("uv", path=os.path.dirname(sys.executable)) or shutil.which("uv")
    assert found
    box = place.context("uv")
    with open(found, "rb") as file:
        box.files.write("uv", file.read())
    script(box, "chmod +x uv && ./uv pip install -q --no-cache --target lib shelf")
    assert version(box, "plank") == "1.0\n"
    said = script(box, "./uv pip install --no-cache --target lib blocked-thing", ok=False)
    assert "403" in said and "blocked" in said


def test_a_blocked_package_is_refused_before_and_behind_the_shell(place: Place) -> None:
    box = place.context("blocked")
    with pytest.raises(Denied, match="blocked-thing"):
        box.commands.run("pip install blocked-thing")
    before = list(place.index.asked)
    for spelling in ("blocked-thing", "Blocked.Thing", "blocked_thing==1.0"):
        said = script(box, f"pip install --target lib {spelling}", ok=False)
        assert "denied.by.policy" in said, said
        said = script(box, f"python3 -m pip download --no-deps {spelling}", ok=False)
        assert "denied.by.policy" in said, said
    assert place.index.asked == before


def test_a_requirements_file_and_its_hashes(place: Place) -> None:
    box = place.context("hashes")
    right = hashlib.sha256(place.index.projects["nail"]["nail-1.0-py3-none-any.whl"]).hexdigest()
    box.files.write("good.txt", f"nail==1.0 --hash=sha256:{right}\n".encode())
    script(box, "pip install -q --target lib -r good.txt")
    assert version(box, "nail") == "1.0\n"
    box.files.write("bad.txt", f"nail==1.0 --hash=sha256:{'0' * 64}\n".encode())
    said = script(box, "pip install --target other -r bad.txt", ok=False)
    assert "DO NOT MATCH" in said
    box.files.write("blocked.txt", b"nail\nblocked-thing\n")
    assert "denied.by.policy" in script(box, "pip install --target other -r blocked.txt", ok=False)


def test_an_install_that_is_too_large(place: Place) -> None:
    box = place.context("small", max_install_size_mb=1)
    said = script(box, "pip install --target lib heavy", ok=False)
    assert "403" in said or "denied.by.policy" in said, said
    assert not [path for path in place.index.files_asked() if path.endswith("heavy-1.0-py3-none-any.whl")]
    script(place.context("roomy", max_install_size_mb=10), "pip install -q --target lib heavy")


def test_what_is_named_by_its_address_is_decided_by_its_host(place: Place) -> None:
    box = place.context("direct")
    script(box, f"pip install -q --target lib http://files.test:{place.files.port}/{place.direct[0]}")
    assert version(box, "direct") == "1.0\n"
    said = script(box, f"pip install --target no http://other.test:{place.files.port}/{place.direct[0]}", ok=False)
    assert "403" in said
    said = script(box, f"pip install --target no git+http://other.test:{place.files.port}/x.git", ok=False)
    assert "403" in said
    # Nor is the index reached as a host: that would go around what is blocked.
    where = f"{place.index.web.url}/pool/blocked-thing/blocked_thing-1.0-py3-none-any.whl"
    assert script(box, f"curl -sS -o /dev/null -w '%{{http_code}}' --noproxy '' {where}") == "403"
