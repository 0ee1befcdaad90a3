from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]
EXAMPLES = Path(__file__).parents[1] / "policy" / "examples"
SETTINGS, SOURCES = str(EXAMPLES / "settings.json"), str(EXAMPLES / "sources.json")


def test_check_says_what_a_document_is_and_what_to_look_at(alone: Carrel) -> None:
    done = alone("policy", "check", SETTINGS, SOURCES)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert "settings.json: settings, valid" in text
    assert "sources.json: sources, valid" in text
    assert "shell(bash:*)" in text
    assert alone("policy", "check", "--strict", SETTINGS).returncode == 1
    reports = json.loads(alone("policy", "check", "--json", SETTINGS, SOURCES).stdout)
    assert [each["kind"] for each in reports] == ["settings", "sources"]


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"permisions": {}}', "did you mean 'permissions'"), ("{", "not JSON"), ('{"permissions": {"allow": ["shell(*)"]}}', "too broad"),
     ('{"permissions": {"deny": ["shel(a)"]}}', "permissions.deny[0]")],
)  # fmt: skip
def test_check_names_the_place_of_an_error(alone: Carrel, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "settings.json"
    file.write_text(text)
    done = alone("policy", "check", str(file))
    assert done.returncode == 1
    assert words in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert alone("policy", "check", "--json", str(file)).returncode == 1


def test_check_of_a_missing_file_is_told(alone: Carrel, tmp_path: Path) -> None:
    done = alone("policy", "check", str(tmp_path / "none.json"))
    assert done.returncode == 1
    assert b"No such file" in done.stderr


def test_explain_shows_every_command_and_its_rule(alone: Carrel) -> None:
    done = alone("policy", "explain", "ls | xargs curl", "--settings", SETTINGS, "--sources", SOURCES)
    assert done.returncode == 1
    text = done.stdout.decode()
    for words in ("ls", "xargs curl", "curl … (by xargs)", "shell(curl:*) in settings.json", "deny"):
        assert words in text
    told = json.loads(alone("policy", "explain", "ls", "--settings", SETTINGS, "--json").stdout)
    assert (told["verdict"], told["parts"][0]["rule"]) == ("allow", "shell(ls:*)")


def test_explain_without_a_policy_allows(alone: Carrel) -> None:
    assert alone("policy", "explain", "rm -rf /").returncode == 0


def test_explain_what_holds_in_a_context(carrel: Carrel, alone: Carrel, tmp_path: Path) -> None:
    """It said that everything is allowed, whatever the policy of the context."""
    context, file = f"p-{uuid.uuid4().hex[:12]}", tmp_path / "settings.json"
    file.write_text('{"permissions": {"allow": ["shell(date:*)"], "deny": ["shell(curl:*)"]}}')
    assert carrel("policy", "set", context, "--settings", str(file)).returncode == 0
    denied = carrel("policy", "explain", "date; curl x", "--context", context)
    assert denied.returncode == 1 and b"shell(curl:*) in settings.json" in denied.stdout
    told = json.loads(carrel("policy", "explain", "date", "--context", context, "--json").stdout)
    assert (told["verdict"], told["parts"][0]["rule"]) == ("allow", "shell(date:*)")
    assert b"--shell" in carrel("policy", "explain", "date", "-c", context, "--shell", "sh").stderr
    offline = alone("policy", "explain", "curl x", "--context", context, "--settings", str(file))
    assert offline.returncode == 1 and b"curl is denied" in offline.stdout
    carrel("policy", "rm", context)


def test_explain_as_another_shell(alone: Carrel) -> None:
    words = ("policy", "explain", "[[ a && curl ]]", "--settings", SETTINGS, "--json")
    assert json.loads(alone(*words).stdout)["verdict"] == "allow"
    assert json.loads(alone(*words, "--shell", "sh").stdout)["verdict"] == "ask"
    assert alone(*words, "--shell", "zsh").returncode == 2


def test_explain_wants_the_right_document(alone: Carrel) -> None:
    done = alone("policy", "explain", "ls", "--settings", SOURCES)
    assert done.returncode == 1
    assert b"give it with --sources" in done.stderr


def test_text_cannot_steer_the_terminal(alone: Carrel) -> None:
    done = alone("policy", "explain", "echo 'a\x1b[2J'; $x\x1b[2J", "--settings", SETTINGS)
    assert b"\x1b[2J" not in done.stdout


def test_the_documents_of_a_context(carrel: Carrel, tmp_path: Path) -> None:
    context = f"p-{uuid.uuid4().hex[:12]}"
    done = carrel("policy", "set", context, "--settings", SETTINGS, "--sources", SOURCES)
    assert done.returncode == 0, done.stderr
    assert b"version 1 of" in done.stderr and b"warning: shell(bash:*)" in done.stderr
    assert json.loads(done.stdout)["settings"] == json.loads(Path(SETTINGS).read_text())
    info = json.loads(carrel("policy", "get", context, "--json").stdout)
    assert (info["version"], info["updated_by"]) == (1, "administrator")
    (tmp_path / "s.json").write_text("{}")
    changed = json.loads(carrel("policy", "set", context, "--settings", str(tmp_path / "s.json"), "--json").stdout)
    assert changed["settings"] == {} and changed["sources"] == info["sources"]
    assert carrel("policy", "rm", context).returncode == 0
    assert json.loads(carrel("policy", "get", context).stdout) == {"settings": None, "sources": None}


def test_what_cannot_be_set(carrel: Carrel, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    for text, words in (("[]", b"not a JSON object"), ("{", b"not JSON"), ('{"permisions": {}}', b"permissions")):
        file.write_text(text)
        done = carrel("policy", "set", "p", "--settings", str(file))
        assert done.returncode == 1 and words in done.stderr, done.stderr
    assert carrel("policy", "set", "p").returncode == 2
    assert carrel("policy", "set", "p", "--settings", "/nowhere").returncode == 1
