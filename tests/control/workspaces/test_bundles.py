"""Many files at once, in real sandboxes: each is decided and recorded as a file of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from tests.support.calls import ADMIN
from tests.support.sandboxes import until

from carrel.audit import Filter, chain_of
from carrel.control.plane import ControlPlane
from carrel.control.workspaces.bundles import AT_ONCE, SMALL, Incoming
from carrel.errors import Denied, InvalidPath, InvalidRequest, NotRunning
from carrel.models import PolicyDocuments, SandboxRequest, StatelessRequest
from carrel.models.bundles import END, BundlePart, Unbundling
from carrel.models.files import StatRequest
from carrel.models.operations import STAT_FILE

FILES = {f"small/{number}": b"%d" % number for number in range(AT_ONCE * 2 + 1)} | {
    "large": bytes(SMALL * 5 + 1),
    "empty": b"",
    "just": bytes(SMALL),
}


@pytest.fixture
async def box(plane: ControlPlane) -> str:
    return (await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c")))[0].id


async def incoming(files: dict[str, bytes], end: bytes = END, step: int = 50_000) -> AsyncIterator[bytes]:
    stream = b"".join(BundlePart("file", len(data), path, 0o640).head() + data for path, data in files.items()) + end
    for start in range(0, len(stream), step):
        yield stream[start : start + step]


async def read(plane: ControlPlane, box: str, paths: list[str]) -> dict[str, tuple[str, bytes]]:
    parser, found, at = Unbundling(), {}, ""
    async for data in plane.bundles.read(ADMIN, box, paths):
        for item in parser.feed(data):
            if isinstance(item, BundlePart):
                at = item.path
                found[at] = item.kind, b""
            else:
                found[at] = found[at][0], found[at][1] + item
    return found  # type: ignore[return-value]


async def test_in_and_out(plane: ControlPlane, box: str) -> None:
    written = await plane.bundles.write(ADMIN, box, Incoming(incoming(FILES)))
    assert (written.files, written.bytes) == (len(FILES), sum(map(len, FILES.values())))
    assert (await plane.operations.forward(ADMIN, STAT_FILE, box, StatRequest(path="large"))).mode == "640"
    assert await read(plane, box, list(FILES)) == {path: ("file", data) for path, data in FILES.items()}
    twice = {"a": b"1"} | {"b": b"2"}
    again = Incoming(_twice(twice))
    assert (await plane.bundles.write(ADMIN, box, again)).files == 2
    assert (await read(plane, box, ["a"])) == {"a": ("file", b"2")}, "the last one of a name counts"


async def _twice(files: dict[str, bytes]) -> AsyncIterator[bytes]:
    for data in files.values():
        yield BundlePart("file", len(data), "a").head() + data
    yield END


async def test_what_cannot_be_written_or_read(plane: ControlPlane, box: str) -> None:
    with pytest.raises(InvalidPath):
        await plane.bundles.write(ADMIN, box, Incoming(incoming({"good": b"1", "../bad": b"2"})))
    with pytest.raises(InvalidRequest, match="in the middle"):
        await plane.bundles.write(ADMIN, box, Incoming(incoming({"cut": bytes(SMALL * 3)}, b"")))
    with pytest.raises(InvalidRequest, match="only files"):
        await plane.bundles.write(ADMIN, box, Incoming(_request()))
    found = await read(plane, box, ["good", "absent", "..", "cut"])
    assert [kind for kind, _ in found.values()] == ["file", "problem", "problem", "problem"], (
        "what was cut is not there"
    )
    assert json.loads(found["absent"][1])["code"] == "file_not_found"
    await plane.sessions.stop(box)
    with pytest.raises(NotRunning):
        await plane.bundles.write(ADMIN, box, Incoming(incoming({"a": b"1"})))


async def _request() -> AsyncIterator[bytes]:
    yield BundlePart("request", 2).head() + b"{}" + END


async def test_each_file_is_decided_and_recorded(plane: ControlPlane, box: str) -> None:
    allow = ["file(read:${WORKSPACE}/**)", "file(write:${WORKSPACE}/**)"]
    deny = ["file(read:${WORKSPACE}/hidden/**)", "file(write:${WORKSPACE}/sealed/**)"]
    given = PolicyDocuments(settings={"permissions": {"allow": allow, "deny": deny}})
    await plane.policy_changes.put("c", given, "a test")
    with pytest.raises(Denied):
        await plane.bundles.write(ADMIN, box, Incoming(incoming({"a": b"1", "sealed/b": b"2"})))
    await plane.bundles.write(ADMIN, box, Incoming(incoming({"hidden/c": b"3", "large": bytes(SMALL + 1)})))
    found = await read(plane, box, ["a", "hidden/c", "large"])
    assert [kind for kind, _ in found.values()] == ["file", "problem", "file"]

    async def recorded() -> bool:
        records = (await plane.audit.search(Filter(chain_of("c", box)), limit=50)).items
        seen = {(each.name, str(each.arguments.get("path")), each.decision) for each in records}
        return seen >= {
            ("write", "a", "allow"),
            ("write", "sealed/b", "deny"),
            ("write", "large", "allow"),
            ("read", "hidden/c", "deny"),
            ("read", "large", "allow"),
        }

    await until(recorded)


async def test_who_stops_reading_leaves_nothing_open(plane: ControlPlane, box: str) -> None:
    large = {f"large-{number}": bytes(SMALL * 40) for number in range(3)}
    await plane.bundles.write(ADMIN, box, Incoming(incoming(large)))
    [live] = plane.sessions.live()
    async with aclosing(plane.bundles.read(ADMIN, box, list(large))) as stream:  # type: ignore[type-var]
        await anext(stream)
        assert live.in_flight == 3
    assert live.in_flight == 0


async def test_a_bundle_without_a_context(plane: ControlPlane) -> None:
    async def put(sandbox: str) -> None:
        await plane.bundles.write(ADMIN, sandbox, Incoming(incoming({"in": b"abc"})))

    code = "open('out', 'w').write(open('in').read() * 2)"
    async with plane.router.running(ADMIN, StatelessRequest(code=code), put) as (sandbox, result):
        assert result.files_produced == ["out"]
        assert await read(plane, sandbox, ["out"]) == {"out": ("file", b"abcabc")}
