"""A real coding agent (Claude Code from npm) in `carrel here`, with a scripted model; and programs that publish."""

from __future__ import annotations

import json
import secrets
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.agent_cli import ScriptedModel, claude_code
from tests.support.egress_ground import HOST, Outside
from tests.support.here_ground import COMMAND, Screen, here, sharing

CARREL = COMMAND[:-1]
AGENT = ["claude", "-p", "do it", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    found = Outside()
    yield found
    found.close()


@pytest.fixture(scope="module")
def env(outside: Outside, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    base = tmp_path_factory.mktemp("agents")
    (base / "roots.pem").write_text(outside.certificate)
    egress = {
        "CARREL_EGRESS_ASK_WAIT_S": "5",
        "CARREL_EGRESS_NAMESERVERS": f"{HOST}:{outside.names.port}",
        "CARREL_EGRESS_ROOTS_FILE": str(base / "roots.pem"),
    }
    with sharing(base, **egress) as found:
        yield found


def configure(env: dict[str, str], text: str) -> None:
    Path(env["XDG_CONFIG_HOME"], "carrel/here.toml").write_text(text)


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its mode and content."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, b"" if path.is_dir() else path.read_bytes())
        for path in folder.rglob("*")
    }


def test_an_agent_edits_is_refused_asks_and_is_undone(outside: Outside, env: dict[str, str], tmp_path: Path) -> None:
    program = claude_code()
    asked = outside.site(lambda *_: b"the page behind the question", tls=True)
    key = f"sk-ant-{secrets.token_hex(16)}"
    look = "env; cat /run/secrets/ANTHROPIC_API_KEY; curl -sS https://refused.test/x; curl -s $HTTP_PROXY"
    model = ScriptedModel(
        [
            ("Write", {"file_path": f"{tmp_path}/made.txt", "content": "made by the agent\n"}),
            (
                "Bash",
                {"command": "rm -r old; chmod 600 script; echo changed > script; echo '{}' > .vscode/settings.json"},
            ),
            ("Bash", {"command": look}),
            ("Bash", {"command": f"curl -sS https://ask.test:{asked.port}/"}),
        ]
    )
    api = outside.site(model, tls=True)
    configure(env, f'allow_hosts = ["ask.test:{asked.port}", "{HOST}"]\nrequests = [{{ host = "ask.test" }}]\n')
    for name in (".vscode/settings.json", "old/file", "script"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = tree(tmp_path)
    given = {
        **env,
        "PATH": f"{program.parent}:{env['PATH']}",
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_BASE_URL": f"https://api.test:{api.port}",
    }
    screen = Screen([*COMMAND, "--", *AGENT], given, tmp_path)
    said = screen.wait(b"may the program do this?")
    assert b"ask.test" in screen.wait(b"[d] deny")
    screen.answer(b"a")
    assert screen.end() == 0, screen.seen
    said += screen.seen
    assert b'"result":"All done."' in said and b"1 approved, 0 denied" in said
    assert model.keys == {key}
    assert "Read-only file system" in model.told[1]
    assert "refused.test is not one of this agent's domains" in model.told[2]
    assert "the page behind the question" in model.told[3]
    assert key.encode() not in said and key not in "".join(model.told)
    assert (tmp_path / "made.txt").read_text() == "made by the agent\n" and not (tmp_path / "old").exists()
    assert here(env, tmp_path, "undo", "--yes", command=CARREL).returncode == 0
    assert tree(tmp_path) == before


def test_publishing_asks_and_the_key_stays_outside(outside: Outside, env: dict[str, str], tmp_path: Path) -> None:
    npm = outside.site(lambda method, *_: b"{}" if method == "PUT" else ("404 Not Found", (), b"{}"), tls=True)
    index = outside.site(lambda *_: b"", tls=True)
    configure(
        env,
        f"""
        allow_hosts = ["npm.test:{npm.port}", "files.test:{index.port}", "{HOST}"]
        registries = ["npm.test", "files.test"]
        [[credentials]]
        variable = "NPM_TOKEN"
        host = "npm.test"
        [[credentials]]
        variable = "INDEX_LOGIN"
        host = "files.test"
        format = "Basic {{secret}}"
        """,
    )
    given = {**env, "NPM_TOKEN": secrets.token_hex(16), "INDEX_LOGIN": secrets.token_hex(16)}
    (tmp_path / "package.json").write_text('{"name": "thing", "version": "1.0.0"}')
    registry = f"//npm.test:{npm.port}/"
    (tmp_path / ".npmrc").write_text(f"registry=https:{registry}\n{registry}:_authToken=${{NPM_TOKEN}}\n")
    # Nobody answers.
    refused = here(given, tmp_path, "--", "npm", "publish")
    [waiting] = json.loads(here(env, tmp_path, "approvals", "--json", command=CARREL).stdout)
    assert refused.returncode != 0
    assert f"carrel approve {waiting['id']}".encode() in refused.stderr
    assert f"npm error 403 403 Forbidden (npm.test:{npm.port} waits for approval".encode() in refused.stderr
    assert {method for method, *_ in npm.requests} == {"GET"}
    # Somebody answers in a second terminal.
    assert here(env, tmp_path, "approve", waiting["id"], command=CARREL).returncode == 0
    published = here(given, tmp_path, "--", "npm", "publish")
    assert published.returncode == 0, published.stderr
    assert [path for method, path, _ in npm.requests if method == "PUT"] == ["/thing"]
    assert npm.requests[-1][2]["authorization"] == f"Bearer {given['NPM_TOKEN']}"
    # The person at the terminal answers.
    with zipfile.ZipFile(tmp_path / "thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        wheel.writestr("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    upload = ["uv", "publish", "--publish-url", f"https://files.test:{index.port}/legacy/", "-t", "placeholder"]
    screen = Screen([*COMMAND, "--", *upload, "thing-1.0-py3-none-any.whl"], given, tmp_path)
    assert b"POST /legacy/" in screen.wait(b"[d] deny")
    screen.answer(b"a")
    assert screen.end() == 0, screen.seen
    [(method, path, headers)] = index.requests
    assert (method, path, headers["authorization"]) == ("POST", "/legacy/", f"Basic {given['INDEX_LOGIN']}")
    inside = here(given, tmp_path, "--", "sh", "-c", "env; cat /run/secrets/* .npmrc ~/.npmrc").stdout.decode()
    assert "NPM_TOKEN=carrel-placeholder-NPM_TOKEN" in inside
    assert given["NPM_TOKEN"] not in inside and given["INDEX_LOGIN"] not in inside
