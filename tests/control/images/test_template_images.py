"""A template with a Dockerfile: its image is built before the first sandbox starts, and again when its files change."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support import images
from tests.support.calls import ADMIN
from tests.support.sandboxes import KINDS

from carrel.config import Settings
from carrel.control.plane import ControlPlane
from carrel.control.sessions import templates
from carrel.errors import Conflict, InvalidRequest
from carrel.models import CommandRequest, SandboxRequest

pytestmark = pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")


async def says(plane: ControlPlane, context: str) -> str:
    info, _ = await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id=context, template="made"))
    return (await plane.operations.run_command(ADMIN, info.id, CommandRequest(command="cat /word"))).stdout


async def test_template_with_a_dockerfile(
    plane: ControlPlane, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "FRESH_S", 0.0)
    folder = Path(settings.data_dir) / "templates" / "made"
    build = folder / "image"
    images.debian(build / "rootfs", python=False, programs=["sh", "cat"])
    (folder / "template.toml").write_text('build = "image"\n')
    with pytest.raises(InvalidRequest, match="has no image/Dockerfile"):
        await says(plane, "a")
    (build / "word").write_text("one\n")
    (build / "Dockerfile").write_text("FROM scratch\nCOPY rootfs /\nCOPY word /word\nRUN cat /word\n")
    assert await asyncio.gather(says(plane, "a"), says(plane, "b")) == ["one\n", "one\n"]
    [before] = (await plane.images.list(ADMIN)).items
    assert before.used_by == ["a", "b"], "both run from one image"

    (build / "word").write_text("another\n")
    assert [await says(plane, "a"), await says(plane, "c")] == ["one\n", "another\n"], "a session keeps its image"
    with pytest.raises(Conflict):
        await plane.operations.deploy_or_resume(ADMIN, SandboxRequest(context_id="a", image="other:1"))

    (build / "Dockerfile").write_text("FROM scratch\nCOPY none /\n")
    with pytest.raises(InvalidRequest, match=r"image of the template 'made' cannot be built: Dockerfile, line 2"):
        await says(plane, "d")
    (folder / "template.toml").write_text('build = "image"\nimage = "debian:12"\n')
    with pytest.raises(InvalidRequest, match="has `image` and `build`"):
        await says(plane, "e")
