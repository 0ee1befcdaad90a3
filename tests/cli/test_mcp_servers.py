from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable

from tests.support.mcp_hosted import GOOD

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_a_server_by_the_command_line(carrel: Carrel) -> None:
    context = f"c-{uuid.uuid4().hex}"

    def said(*words: str, ok: bool = True, stdin: bytes | None = None) -> str:
        done = carrel(*words, stdin=stdin)
        assert (done.returncode == 0) is ok, (words, done.stdout, done.stderr)
        return (done.stdout if ok or done.stdout else done.stderr).decode()

    said("exec", context, "--", "sh", "-c", "cat > good.py", stdin=GOOD.encode())
    said("secret", "set", context, "KEY", stdin=b"very-secret-value")
    added = said("mcp-servers", "add", "-e", "CONTEXT=mine", "-s", "KEY", context, "good", "python3", "good.py", "told")
    assert added.startswith("good: 9 tools, http://127.0.0.1:"), "an address that a client can be given"
    assert added.endswith(f"/v1/sandboxes/{context}/mcp-servers/good/mcp\n")
    assert said("mcp-servers", "call", context, "good", "whoami").startswith("told mine ")
    assert said("mcp-servers", "call", context, "good", "variable", '{"name": "KEY"}') == "[secret:KEY]\n"
    assert said("mcp-servers", "call", context, "good", "fail", ok=False) == "it went wrong\n"
    told = json.loads(said("mcp-servers", "call", "--json", context, "good", "echo", '{"text": "x"}'))
    assert told["structured_content"] == {"text": "x"}
    assert "must be a JSON object" in said("mcp-servers", "call", context, "good", "echo", "[1]", ok=False)
    assert "running" in said("mcp-servers", "ls", context)
    assert json.loads(said("mcp-servers", "ls", "--json", context))[0]["command"] == ["python3", "good.py", "told"]
    shown = said("mcp-servers", "tools", context)
    assert "good:echo" in shown and "says it again" in shown
    assert len(json.loads(said("mcp-servers", "tools", "--refresh", "--json", context, "good"))) == 9
    assert "listening\n" in said("mcp-servers", "log", context, "good")
    said("mcp-servers", "stop", context, "good")
    assert "disabled" in said("mcp-servers", "ls", context)
    assert said("mcp-servers", "start", context, "good") == "running\n"
    said("mcp-servers", "rm", context, "good")
    assert said("mcp-servers", "ls", context) == ""
    dashes = said("mcp-servers", "add", context, "good", "--", "python3", "good.py")
    assert dashes.startswith("good: 9 tools, "), "as other programs that add MCP servers have it"
    assert "no command after --" in said("mcp-servers", "add", context, "none", "--", ok=False)
    wrong = said("mcp-servers", "add", "-e", "NOVALUE", context, "good", "true", ok=False)
    assert "NAME=VALUE" in wrong
    broken = carrel("mcp-servers", "add", context, "bad", "false")
    assert broken.returncode == 0 and b"its tools could not be listed" in broken.stderr
    said("rm", "--yes", "--files", context)
