"""The example runs as it is."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from tests.support.langgraph_ground import Ground, lines_of, runs, says, scripted

from carrel.models import ApprovalInfo

EXAMPLE = Path(__file__).parents[3] / "examples" / "langgraph_agent.py"


async def start(ground: Ground, directory: Path, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", str(EXAMPLE), "--thread", ground.context, *words,
        cwd=directory,
        env={**os.environ, "CARREL_URL": ground.url, "CARREL_TOKEN": ground.token},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def ended(process: asyncio.subprocess.Process) -> str:
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return (out + err).decode()


async def graph_call(ground: Ground) -> ApprovalInfo:
    async for info in ground.person.approvals.watch():
        if info.context_id == ground.context and info.state == "pending":
            return info
    raise AssertionError


async def test_it_says_waits_is_killed_and_goes_on(ground: Ground, tmp_path: Path) -> None:
    assert (await ended(await start(ground, tmp_path, "echo $((6*7))"))).endswith("\n42\n")
    process = await start(ground, tmp_path, "touch x; echo done >> ran; cat ran")
    info = await asyncio.wait_for(graph_call(ground), 60)
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    process = await start(ground, tmp_path, "echo and then")
    assert process.stdout is not None
    assert (await process.stdout.readline()).decode() == "? touch x; echo done >> ran; cat ran\n"
    await ground.person.approvals.approve(info.id)
    told = await ended(process)
    assert "\ndone\n" in told and told.endswith("\nand then\n")
    assert await lines_of(ground.owner, ground.context, "ran") == ["done"]


async def test_it_speaks_with_a_model_and_counts(ground: Ground, tmp_path: Path) -> None:
    async with scripted(runs("echo from the model"), says("that was it")) as model:
        words = ("--model", "tiny", "--base-url", model.url, "--metrics", "hello")
        told = await ended(await start(ground, tmp_path, *words))
    assert "> run_command {'command': 'echo from the model'}\nthat was it\n" in told
    assert 'carrel_llm_tokens_total{direction="output",model="tiny"} 14.0' in told


async def test_it_fails_in_words(ground: Ground, tmp_path: Path) -> None:
    process = await start(ground, tmp_path, "--model", "nobody:x", "hello")
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1 and err.decode().startswith("error: there is no model 'nobody:x'"), err
