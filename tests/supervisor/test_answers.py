from __future__ import annotations

import json

from tests.support.sandboxes import Supervisor


async def test_result_tells_text_and_exact_bytes(supervisor: Supervisor) -> None:
    result = await supervisor.run(r"printf 'a\377'; printf text >&2")
    assert (result["stdout"], result["stderr"]) == ("a\ufffd", "text")
    assert result["stdout_base64"] == "Yf8=" and "stderr_base64" not in result


async def test_frames_end_with_the_info(supervisor: Supervisor) -> None:
    name = await supervisor.start("printf out; printf err >&2; exit 4")
    frames = [frame async for frame in supervisor.frames(name)]
    assert sorted(frames[:-1]) == [(1, b"out"), (2, b"err")]
    kind, data = frames[-1]
    assert kind == 0 and json.loads(data)["exit_code"] == 4


async def test_a_command_can_be_started_and_followed_in_one_request(supervisor: Supervisor) -> None:
    frames = [frame async for frame in supervisor.followed("printf out", id="kchosen-1")]
    assert frames[0] == (1, b"out") and json.loads(frames[-1][1])["id"] == "kchosen-1"
    assert (await supervisor.result("kchosen-1"))["stdout"] == "out"
