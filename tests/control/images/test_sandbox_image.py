from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.support.calls import ADMIN
from tests.support.stored_images import layer, small, store

from carrel.audit import Filter
from carrel.config import Settings
from carrel.control.operations.caller import Caller
from carrel.control.plane import ControlPlane
from carrel.errors import Conflict, InvalidRequest, NotFound, Unsupported
from carrel.identity import Identity, OwnerKind, Scope
from carrel.images.reference import ImageReference
from carrel.models import CommandRequest, SandboxRequest
from carrel.models.images import ImagePull

AGENT = Caller(Identity("agent:a", OwnerKind.AGENT, frozenset({Scope.OPERATE})))


@pytest.fixture(scope="module")
def content() -> bytes:
    return layer(small)


@pytest.fixture
async def stocked(plane: ControlPlane, content: bytes) -> AsyncIterator[ControlPlane]:
    """A server with the image `small:1`."""
    if plane.providers["namespace"].missing():
        pytest.skip("images need the namespace provider")
    config = {"environment": {"PATH": "/usr/bin:/bin", "GREETING": "hello"}, "working_directory": "/home"}
    await store(plane._host.images, "small:1", content, **config)
    yield plane


async def said(plane: ControlPlane, name: str, command: str) -> str:
    return (await plane.operations.run_command(ADMIN, name, CommandRequest(command=command))).stdout


async def test_a_session_keeps_its_image_for_its_life(stocked: ControlPlane, content: bytes) -> None:
    plane, storage = stocked, stocked._host.images
    info, _ = await plane.operations.deploy_or_resume(AGENT, SandboxRequest(context_id="c", image="small:1"))
    first = info.image_digest
    assert info.image == "small:1" and first is not None
    assert await said(plane, "c", "cat /etc/os-release; echo $GREETING; pwd") == "ID=copied\nhello\n/workspace\n"
    # The name moves on; the session and its fork do not.
    await store(storage, "small:1", content, environment={"GREETING": "changed"})
    await plane.sessions.stop("c")
    resumed, _ = await plane.operations.deploy_or_resume(AGENT, SandboxRequest(context_id="c", image="small:1"))
    fork = await plane.snapshots.fork(ADMIN, "c", "d")
    assert (resumed.image_digest, fork.image_digest, fork.image) == (first, first, "small:1")
    assert await said(plane, "d", "echo $GREETING") == "hello\n"
    for asked in ("debian:12", "host"):
        with pytest.raises(Conflict) as caught:
            await plane.operations.deploy_or_resume(AGENT, SandboxRequest(context_id="c", image=asked))
        assert caught.value.field == "image"
    await plane.sessions.stop("c")
    with pytest.raises(Conflict, match="runs from small:1"):
        await plane.operations.deploy_or_resume(AGENT, SandboxRequest(context_id="c", image="host"))
    await plane.sessions.terminate(ADMIN, "c")
    anew, _ = await plane.operations.deploy_or_resume(AGENT, SandboxRequest(context_id="c", image="small:1"))
    assert anew.image_digest != first, "a new session has what the name means now"


async def test_an_image_in_use_is_neither_removed_nor_collected(stocked: ControlPlane) -> None:
    plane, storage = stocked, stocked._host.images
    info, _ = await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", image="small:1"))
    for _ in range(2):  # running, then stopped
        with pytest.raises(Conflict, match="is the root of c") as caught:
            await plane.images.remove(ADMIN, "small:1")
        assert "carrel rm" in (caught.value.hint or "")
        await plane.sessions.stop("c")
    storage.remove_name(ImageReference.parse("small:1"))
    assert (await plane.images.collect()).images == ()
    shown = await plane.images.inspect(ADMIN, (info.image_digest or "")[7:20])
    assert (shown.names, shown.used_by, shown.in_use, shown.working_directory) == ([], ["c"], True, "/home")
    assert (await plane.images.list(AGENT)).items[0].used_by == ["c"]
    await plane.sessions.terminate(ADMIN, "c")
    assert (await plane.images.collect()).images == (info.image_digest,)
    assert os.listdir(os.path.join(storage.directory, "roots")) == []
    with pytest.raises(NotFound, match="no image small:1"):
        await plane.images.inspect(ADMIN, "small:1")


async def test_a_failed_start_holds_nothing(stocked: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = stocked.providers["namespace"]

    async def fail(_launch: object) -> None:
        raise Unsupported("not today")

    monkeypatch.setattr(provider, "start", fail)
    with pytest.raises(Unsupported, match="not today"):
        await stocked.operations.deploy_or_resume(ADMIN, SandboxRequest(image="small:1"))
    assert stocked._sandbox_image._held == {}
    await stocked.images.remove(ADMIN, "small:1")
    assert (await stocked.images.list(ADMIN)).items == []


async def test_defaults_and_refusals(stocked: ControlPlane, settings: Settings) -> None:
    plane = stocked
    plane._sandbox_image._default = "small:1"
    info, _ = await plane.operations.deploy_or_resume(AGENT, SandboxRequest(start_in="image"))
    assert (info.image, await said(plane, info.id, "pwd")) == ("small:1", "/home\n")
    host, _ = await plane.operations.deploy_or_resume(AGENT, SandboxRequest(image="host"))
    assert (host.image, host.image_digest) == (None, None)
    for asked, field in (
        (SandboxRequest(image="host", start_in="image"), "start_in"),
        (SandboxRequest(image="UPPER:1"), "image"),
        (SandboxRequest(image="10.0.0.1:5000/x"), "image"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await plane.operations.deploy_or_resume(AGENT, asked)
        assert caught.value.field == field and caught.value.hint
    assert "CARREL_IMAGES_REGISTRIES" in (caught.value.hint or ""), "an agent does not choose where the server connects"
    with pytest.raises(Unsupported, match="images"):
        asked = SandboxRequest(image="small:1", provider="process", trust="high")  # type: ignore[arg-type]
        await plane.operations.deploy_or_resume(ADMIN, asked)
    present = await plane.images.pull(AGENT, ImagePull(image="small:1", only_if_missing=True))
    assert present.digest == info.image_digest


async def test_a_running_sandbox_keeps_its_image_over_a_restart(stocked: ControlPlane) -> None:
    await stocked.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", image="small:1"))
    box = await stocked.sessions.find("c")
    stocked._sandbox_image.close()  # as the end of the process does
    await stocked._sandbox_image.open([box])
    image = stocked._host.images.find(ImageReference.parse("small:1"))
    assert image is not None
    removed = stocked._host.images.collect((), max_bytes=0, unused_s=0)
    assert removed.images == () and os.path.isdir(image.root)
    gone = replace(box.record, image="localhost:1/gone", image_digest="sha256:" + "0" * 64)
    with pytest.raises(NotFound, match="cannot be pulled again"):
        await stocked._sandbox_image._hold(gone)


async def test_removal_is_recorded(stocked: ControlPlane) -> None:
    await stocked.images.remove(ADMIN, "small:1")
    await stocked.audit.flush()
    [record] = (await stocked.audit.search(Filter(name="delete_image"))).items
    assert (record.arguments, record.result, record.context_id) == ({"image": "small:1"}, "ok", None)
