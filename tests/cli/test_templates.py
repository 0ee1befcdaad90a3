from __future__ import annotations

import asyncio
import json
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.environments_ground import sources, stocked

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def template(data_dir: Path) -> Iterator[str]:
    """A template of the running server, of this test alone."""
    name = f"t{uuid.uuid4().hex[:12]}"
    folder = data_dir / "templates" / name
    folder.mkdir(parents=True)
    (folder / "template.toml").write_text(
        'description = "for tests"\nenv = { MODE = "test" }\nlimits.memory_mb = 200\n'
    )
    (folder / "settings.json").write_text('{"permissions": {"allow": ["shell(cat:*)"], "deny": ["shell(curl:*)"]}}')
    yield name
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()


def test_listed_and_run(carrel: Carrel, template: str) -> None:
    shown = carrel("templates").stdout.decode()
    assert template in shown and "memory_mb=200" in shown and "for tests" in shown
    [listed] = [each for each in json.loads(carrel("templates", "--json").stdout) if each["name"] == template]
    assert listed["settings"] is True
    done = carrel("run", "--template", template, "--", "sh", "-c", "echo $MODE")
    assert done.returncode != 0 and b"approv" in done.stderr, "what its rules do not cover asks"
    assert carrel("run", "--template", template, "echo $MODE").stdout == b"test\n"
    unknown = carrel("run", "--template", template[:-1], "echo")
    assert unknown.returncode != 0 and f"did you mean '{template}'".encode() in unknown.stderr


def test_a_context_and_its_secrets(carrel: Carrel, template: str) -> None:
    context = f"c-{uuid.uuid4().hex}"
    assert carrel("secret", "set", "--template", template, "KEY", stdin=b"open-sesame").returncode == 0
    assert b"KEY" in carrel("secret", "ls", "-t", template).stdout
    assert carrel("exec", "--template", template, context, "echo $MODE").stdout == b"test\n"
    assert carrel("exec", context, "cat /run/secrets/KEY").stdout == b"[secret:KEY]"
    assert carrel("exec", "--template", "other", context, "echo").returncode != 0
    assert carrel("secret", "rm", "-t", template, "KEY").returncode == 0
    assert carrel("rm", "--yes", "--files", context).returncode == 0


def test_policy_of_a_template(carrel: Carrel, template: str, data_dir: Path) -> None:
    checked = carrel("policy", "check", "--template", template)
    assert checked.returncode == 0 and b"template.toml: template, valid" in checked.stdout
    folder = data_dir / "templates" / template
    for name in (template, str(folder)):
        explained = carrel("policy", "explain", "curl x", "--template", name, "--json")
        assert explained.returncode == 1
        assert json.loads(explained.stdout)["source"] == f"{template}/settings.json"
    (folder / "template.toml").write_text("netwrok = 'none'")
    wrong = carrel("policy", "check", "-t", template)
    assert wrong.returncode == 1 and b"network" in wrong.stderr
    assert carrel("policy", "check", "-t", "absent").returncode != 0
    assert carrel("policy", "check").returncode != 0


def test_without_a_server(alone: Carrel, tmp_path: Path) -> None:
    folder = tmp_path / "recipes" / "small"
    folder.mkdir(parents=True)
    (folder / "template.toml").write_text('env = { MODE = "alone" }')
    env = {"CARREL_TEMPLATES_DIR": str(folder.parent)}
    assert alone("run", "--template", "small", "echo $MODE", env=env).stdout == b"alone\n"


async def test_packages_of_a_template(carrel: Carrel, template: str, data_dir: Path) -> None:
    context, folder = f"c-{uuid.uuid4().hex}", data_dir / "templates" / template

    async def said(*words: str) -> str:
        done = await asyncio.to_thread(carrel, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    async with stocked() as index:
        (folder / "template.toml").write_text('packages = ["shelf"]\n')
        (folder / "settings.json").unlink()
        (folder / "sources.json").write_text(json.dumps(sources(index)))
        assert "1 on first use" in next(line for line in (await said("templates")).splitlines() if template in line)
        assert (
            await said("exec", "--template", template, context, "python3 -c 'import shelf; print(shelf.version)'")
            == "1.0\n"
        )
        path = (await said("envs", "attach", context)).strip()
        assert path.startswith("/envs/")
        assert "1 ready" in next(line for line in (await said("templates")).splitlines() if template in line)
        assert f"(template {template})" in await said("envs")
        assert await said("python", context, "-c", "import shelf; print(2)") == "2\n"
        await said("rm", "--yes", "--files", context)
        await said("envs", "rm", path.removeprefix("/envs/"))
    checked = await said("policy", "check", "--template", "code-interpreter")
    assert "template.toml: template, valid" in checked
