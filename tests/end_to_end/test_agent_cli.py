"""A real coding agent (Claude Code from npm) in a sandbox, with the setup of its profile and a scripted model."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Iterator

import pytest
from tests.support.agent_cli import ScriptedModel, claude_code, put_program
from tests.support.egress_ground import HOST, Carrel, Outside, ground, until

from carrel.policy.documents.sources import RequestRule
from carrel.profiles.documents import UserConfig
from carrel.profiles.files import prepare

COMMAND = ["/workspace/.vscode/claude", "-p", "do it", "--output-format", "stream-json", "--verbose"]


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[Outside, Carrel]]:
    with ground() as found:
        yield found


def test_an_agent_edits_is_refused_asks_and_never_has_the_key(place: tuple[Outside, Carrel], tmp_path: object) -> None:
    program = claude_code()
    outside, carrel = place
    asked = outside.site(lambda *_: b"the page behind the question", tls=True)
    key = f"sk-ant-{secrets.token_hex(16)}"
    model = ScriptedModel(
        [
            ("Write", {"file_path": "/workspace/made.txt", "content": "made by the agent\n"}),
            ("Bash", {"command": "echo '{}' > .vscode/settings.json"}),
            (
                "Bash",
                {
                    "command": "env; cat /run/secrets/ANTHROPIC_API_KEY; curl -sS https://refused.test/x; curl -s $HTTP_PROXY"
                },
            ),
            ("Bash", {"command": f"curl -sS https://ask.test:{asked.port}/"}),
        ]
    )
    api = outside.site(model, tls=True)
    setup = prepare(
        [*COMMAND, "--dangerously-skip-permissions"],
        str(tmp_path),
        profile="claude",
        options=UserConfig(
            allow_hosts=(f"ask.test:{asked.port}", HOST), requests=(RequestRule(host="ask.test", reason="ask.test"),)
        ),
        environ={"ANTHROPIC_API_KEY": key, "ANTHROPIC_BASE_URL": f"https://api.test:{api.port}"},
        home=str(tmp_path),
    )
    context, client = "claude", carrel.client
    box = client.sandbox(context)
    box.files.write(".vscode/settings.json", b"mine")
    put_program(program, carrel.data, "settings.json")
    box.stop()
    client.policy(context).put(settings=setup.settings, sources=setup.sources)
    for name, value in setup.secrets.items():
        client.secrets(context).put(name, value)
    box = client.sandbox(context, network=setup.network)

    def answer() -> None:
        waiting = until(lambda: list(client.approvals.list(context_id=context, state="pending")), "the question", 100)
        assert "ask.test" in waiting[0].summary
        client.approvals.approve(waiting[0].id)

    person = threading.Thread(target=answer)
    person.start()
    result = box.commands.run(list(setup.command), env=setup.env, timeout=150)
    person.join()
    assert result.exit_code == 0, result.stdout[-3000:] + result.stderr[-2000:]
    assert json.loads(result.stdout.splitlines()[-1])["result"] == "All done."
    assert box.files.read("made.txt") == b"made by the agent\n"
    assert model.keys == {key}
    assert box.files.read(".vscode/settings.json") == b"mine" and "Read-only file system" in model.told[1]
    assert "refused.test is not one of this agent's domains" in model.told[2]
    assert "the page behind the question" in model.told[3]
    assert key not in result.stdout + result.stderr + "".join(model.told)
