"""A real agent CLI from npm, and a model that plays fixed tool calls in place of a real one."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

PACKAGE = "@anthropic-ai/claude-code"
BINARY = "node_modules/@anthropic-ai/claude-code-linux-x64/claude"
INSTALL_S = 300


def claude_code() -> Path:
    """The program of Claude Code, installed once per machine outside of the clone; skips where npm cannot give it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "carrel-tests" / "claude-code"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        program = folder / BINARY
        if not program.exists():
            npm = shutil.which("npm")
            if npm is None or os.uname().machine != "x86_64":
                pytest.skip("Claude Code needs npm and x86_64 here")
            command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder), PACKAGE]
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            if done.returncode != 0 or not program.exists():
                pytest.skip(f"npm gives no {PACKAGE}: {done.stderr[-300:]}")
    return program


class ScriptedModel:
    """Answers requests of Claude Code: the next step for each result of a tool, then a last text.

    A step is the name of a tool and its arguments. `told` are the results, as the agent sends them to the model.
    """

    def __init__(self, steps: Sequence[tuple[str, Mapping[str, object]]]):
        self._steps = steps
        self.told: list[str] = []
        self.keys: set[str] = set()
        self.other: list[str] = []

    def __call__(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[str, Sequence[str], bytes]:
        self.keys.add(headers.get("x-api-key", ""))
        if method != "POST" or path.partition("?")[0] != "/v1/messages":
            self.other.append(f"{method} {path}")
            return "404 Not Found", ["content-type: application/json"], b'{"type":"error"}'
        asked = json.loads(body)
        results = [
            part
            for message in asked["messages"]
            for part in (message["content"] if isinstance(message["content"], list) else [])
            if part.get("type") == "tool_result"
        ]
        self.told = [json.dumps(each["content"]) for each in results]
        if asked.get("tools") and len(results) < len(self._steps):
            name, given = self._steps[len(results)]
            block = {"type": "tool_use", "id": f"toolu_{len(results)}", "name": name, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(given)}
            return _stream(asked["model"], block, delta, "tool_use")
        return _stream(
            asked["model"], {"type": "text", "text": ""}, {"type": "text_delta", "text": "All done."}, "end_turn"
        )


def _stream(
    model: str, block: Mapping[str, object], delta: Mapping[str, object], reason: str
) -> tuple[str, Sequence[str], bytes]:
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": model, "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": usage,
    }  # fmt: skip
    events: list[dict[str, object]] = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]
    text = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events)
    return "200 OK", ["content-type: text/event-stream"], text.encode()
