"""Which paths of the host a tool needs, and the options of `carrel here`."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from carrel.cli.here.command import here
from carrel.cli.here.run import context_id
from carrel.cli.here.tools import HOME, FoundTool, find_tool
from carrel.cli.here.words import FLAGS, LISTS, TEXTS, HereOptions, parse


def program(path: Path, text: str = "\x7fELF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    found = tmp_path / "home"
    (found / ".ssh").mkdir(parents=True)
    return found


def find(name: str, home: Path, *path: str) -> FoundTool:
    return find_tool(name, "/nowhere", ":".join([*path, "/usr/bin"]), str(home))


def test_tools_that_are_visible_need_nothing(home: Path) -> None:
    assert find("sh", home) == FoundTool("sh", {}, None)
    assert find("no-such-program", home) == FoundTool("no-such-program", {}, None)
    program(home / "project/run.sh", "#!/bin/sh")
    found = find_tool("./run.sh", str(home / "project"), "/usr/bin", str(home))
    assert found == FoundTool("./run.sh", {}, None)


def test_npm_package_brings_itself_and_its_node(home: Path) -> None:
    cli = program(home / ".npm-global/lib/node_modules/@scope/agent/cli.js", "#!/usr/bin/env node")
    (home / ".npm-global/bin").mkdir()
    (home / ".npm-global/bin/agent").symlink_to("../lib/node_modules/@scope/agent/cli.js")
    node = program(home / ".nvm/versions/node/v20/bin/node")
    (home / ".nvm/versions/node/v20/lib/node_modules").mkdir(parents=True)
    found = find("agent", home, str(home / ".npm-global/bin"), str(node.parent))
    assert found.command == str(cli)
    assert sorted(found.host_paths.values()) == [str(cli.parent), str(home / ".nvm/versions/node/v20")]
    assert found.path is not None
    assert str(node.parent) in found.path.split(":")


def test_python_tool_brings_its_environment_and_its_interpreter(home: Path) -> None:
    share = home / ".local/share/uv"
    base = program(share / "python/cpython-3.12/bin/python3.12")
    (base.parent / "python3").symlink_to("python3.12")
    venv = share / "tools/aider"
    script = program(venv / "bin/aider", f"#!{venv}/bin/python\n")
    (venv / "bin/python").symlink_to(base)
    (venv / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    (home / ".local/bin").mkdir()
    (home / ".local/bin/aider").symlink_to(script)
    found = find("aider", home, str(home / ".local/bin"))
    assert found.command == str(script)
    assert set(found.host_paths) == {str(venv), str(base.parent.parent)}
    pyenv = home / ".pyenv"
    shim = program(pyenv / "shims/python3", f"#!/usr/bin/env bash\nexec {pyenv}/libexec/pyenv")
    (pyenv / "versions").mkdir()
    assert find("python3", home, str(shim.parent))[:2] == (str(shim), {str(pyenv): str(pyenv)})


def test_single_file_is_shown_alone_and_user_packages_with_their_script(home: Path) -> None:
    real = program(home / ".local/share/agent/1.2.3")
    (home / ".local/bin").mkdir()
    (home / ".local/bin/agent").symlink_to(real)
    place = str(home / ".local/bin/agent")
    assert find("agent", home, str(home / ".local/bin"))[:2] == (place, {place: str(real)})
    script = str(program(home / ".local/bin/tool", "#!/usr/bin/python3\n"))
    (home / ".local/lib/python3.11/site-packages").mkdir(parents=True)
    found = find("tool", home, str(home / ".local/bin"))
    packages = {f"{HOME}/.local/lib/python3.11": str(home / ".local/lib/python3.11")}
    assert found.host_paths == {script: script, **packages}


def test_home_directory_and_keys_are_never_shown(home: Path) -> None:
    program(home / "bin/agent")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (home / "lib/node_modules").mkdir(parents=True)
    program(home / ".ssh/lib/node_modules/x/cli.js")
    for name, directory in (("agent", home / "bin"), ("cli.js", home / ".ssh/lib/node_modules/x")):
        shown = find(name, home, str(directory)).host_paths
        assert list(shown) == [str(directory / name)]  # the program alone


def test_quick_reader_knows_the_same_options_as_the_help() -> None:
    declared = set(inspect.signature(here).parameters)
    fields = {name: name for name in HereOptions._fields} | {"allow_hosts": "allow_host", "host_files": "host_file"}
    assert declared == {fields[name] for name in HereOptions._fields}
    assert {*TEXTS.values(), *LISTS.values(), *FLAGS.values(), "command"} == set(HereOptions._fields)


def test_words_after_the_first_program_belong_to_it() -> None:
    given = ["--allow-host=a.example", "--allow-host", "b.example", "--name", "x", "-y", "--", "claude", "--json"]
    wanted = HereOptions(("claude", "--json"), name="x", allow_hosts=("a.example", "b.example"), yes=True)
    assert parse(given) == wanted
    assert parse(["make", "-j4"]) == HereOptions(("make", "-j4"))
    assert parse([]) == HereOptions()
    for words in (["--help"], ["--unknown"], ["--name"], ["--"], ["--yes=1"]):
        assert parse(words) is None


def test_contexts_of_folders_differ(tmp_path: Path) -> None:
    first, second = context_id("/a/project", "claude"), context_id("/b/project", "claude")
    assert first.startswith("here-project-")
    assert first.endswith("-claude")
    assert len({first, second, context_id("/a/project", "codex")}) == 3
    assert context_id(os.fsdecode(b"/a/\xff \n"), "sh").startswith("here-folder-")
