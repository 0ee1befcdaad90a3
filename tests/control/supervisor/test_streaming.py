from __future__ import annotations

import json
from functools import partial

from tests.support.calls import ADMIN

from carrel.control.operations.call import Traffic
from carrel.control.plane import ControlPlane
from carrel.control.supervisor.streaming import stream_output
from carrel.models import CommandRequest, SandboxRequest
from carrel.redaction.redact import Redactor


async def test_from_an_offset_without_secrets(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    info = await plane.operations.start_command(ADMIN, "c", CommandRequest(command="printf before-hidden-value-after"))
    box, traffic = await plane.sessions.find("c"), Traffic()
    redactor = Redactor({"K": "hidden-value"})
    open_at = partial(box.connection.command_output, info.id, follow=True)
    await plane.operations.command_result(ADMIN, "c", info.id)

    async def current() -> Redactor:
        return redactor

    chunks = [chunk async for chunk in stream_output(box, traffic, current, open_at, 10)]
    assert (chunks[0].stream, chunks[-1].stream) == ("open", "end")
    assert b"hidden" not in b"".join(chunk.data for chunk in chunks)
    assert json.loads(chunks[-1].data)["exit_code"] == 0
    assert traffic.bytes_out == len("before-hidden-value-after") - 10
