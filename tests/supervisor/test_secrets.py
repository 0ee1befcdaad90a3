"""Secrets given to a sandbox: files of a memory file system, read-only for the agent, replaced all at once."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.sandboxes import Box, Supervisor

from carrel.errors import CarrelError
from carrel.supervisor.secrets import ALTOGETHER, CURRENT, LARGEST, MOST, SandboxSecrets, _checked


def body(values: dict[str, bytes]) -> dict[str, object]:
    return {"secrets": {name: base64.b64encode(value).decode() for name, value in values.items()}}


async def put(supervisor: Supervisor, **values: bytes) -> list[str]:
    return list((await supervisor.ask("PUT", "/secrets", body(values)))["names"])


async def show(supervisor: Supervisor, command: str) -> str:
    return str((await supervisor.run(command))["stdout"])


async def test_the_agent_reads_them_as_files(box: Box) -> None:
    if not box.isolated():
        problem = await box.supervisor.refused("PUT", "/secrets", body({"TOKEN": b"hush-hush"}))
        assert (problem["code"], problem["field"]) == ("unsupported", "secrets")
        assert "hush" not in str(problem)
        return
    binary = bytes(range(256))
    assert await put(box.supervisor, TOKEN=b"hush-hush", key_1=binary) == ["TOKEN", "key_1"]
    assert await show(box.supervisor, "ls /run/secrets") == "TOKEN\nkey_1\n"
    assert await show(box.supervisor, "cat /run/secrets/TOKEN") == "hush-hush"
    assert await show(box.supervisor, "od -An -v -tx1 /run/secrets/key_1 | tr -d ' \\n'") == binary.hex()
    assert await show(box.supervisor, "stat -L -c '%a %U %F' /run/secrets/TOKEN") == "400 agent regular file\n"


async def test_a_set_is_replaced_whole(box: Box) -> None:
    if not box.isolated():
        return
    supervisor = box.supervisor
    await put(supervisor, A=b"first a", B=b"first b")
    # Reads both again and again until the second set is there; a mix of the two sets is never seen.
    loop = """
    import os
    last = None
    while last != (b"second", b"second"):
        here = os.open(os.path.realpath("/run/secrets/.current"), os.O_RDONLY)
        last = tuple(open(os.open(n, os.O_RDONLY, dir_fd=here), "rb").read().split()[0] for n in "AB")
        os.close(here)
        assert last[0] == last[1], last
        print("seen", flush=True)
    print("done")
    """
    script = "\n".join(line[4:] for line in loop.splitlines())
    name = await supervisor.start(["python3", "-c", script])
    await supervisor.shows(name, "seen")
    held = await supervisor.start("exec 3</run/secrets/A; echo open; read line; cat <&3", interactive=True)
    await supervisor.shows(held, "open")
    assert await put(supervisor, A=b"second a", B=b"second b", C=b"second c") == ["A", "B", "C"]
    result = await supervisor.result(name)
    assert result["stdout"].endswith("done\n") or "FileNotFoundError" in result["stderr"]  # it may vanish under us
    await supervisor.call("POST", f"/commands/{held}/stdin", b"\n")
    assert (await supervisor.result(held))["stdout"] == "open\nfirst a"
    assert await put(supervisor, C=b"third c") == ["C"]
    assert await show(supervisor, "cd /run/secrets; ls; cat C; ls -A | wc -l") == "C\nthird c3\n"
    assert await put(supervisor) == []
    assert await show(supervisor, "ls /run/secrets") == ""


@pytest.mark.parametrize(
    "secrets",
    [
        None,
        [],
        {"a/b": "YWJjZA=="},
        {"..": "YWJjZA=="},
        {".current": "YWJjZA=="},
        {"": "YWJjZA=="},
        {"a" * 129: "YWJjZA=="},
        {"A\n": "YWJjZA=="},
        {"A": 1},
        {"A": "hush!"},
        {"A": "é"},
        {"A": base64.b64encode(bytes(LARGEST + 1)).decode()},
        {f"A{n}": "YWJjZA==" for n in range(MOST + 1)},
        {f"A{n}": base64.b64encode(bytes(LARGEST)).decode() for n in range(ALTOGETHER // LARGEST + 1)},
    ],
    ids=range(14),
)
def test_what_is_refused(secrets: object) -> None:
    with pytest.raises(CarrelError) as caught:
        _checked({"secrets": secrets})
    assert caught.value.field == "secrets"
    assert caught.value.status < 500
    assert "hush" not in str(caught.value)


async def test_the_largest_sets_fit_twice(box: Box) -> None:
    if not box.isolated():
        return
    supervisor = box.supervisor
    size = ALTOGETHER // MOST
    for letter in (b"a", b"b", b"c"):
        many = {f"N{number}": letter * size for number in range(MOST)}
        assert len((await supervisor.ask("PUT", "/secrets", body(many)))["names"]) == MOST
        assert await show(supervisor, "cat /run/secrets/* | wc -c") == f"{ALTOGETHER}\n"
        large = {f"L{number}": letter * LARGEST for number in range(ALTOGETHER // LARGEST)}
        assert len((await supervisor.ask("PUT", "/secrets", body(large)))["names"]) == ALTOGETHER // LARGEST


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[tuple[Path, SandboxSecrets]]:
    directory = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    secrets = SandboxSecrets()
    secrets.configure(directory)
    yield tmp_path, secrets
    os.close(directory)


SETS = st.dictionaries(st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_.-]{0,8}\Z"), st.binary(max_size=20), max_size=5)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SETS, min_size=1, max_size=5))
def test_there_is_always_exactly_the_last_set(
    folder: tuple[Path, SandboxSecrets], sets: list[dict[str, bytes]]
) -> None:
    path, secrets = folder
    for values in sets:
        assert secrets.replace(values) == sorted(values)
        shown = {each.name: each.read_bytes() for each in path.iterdir() if not each.name.startswith(".")}
        assert shown == values
        assert len([each for each in path.iterdir() if each.name.startswith(".")]) == 2
        assert all((path / CURRENT / name).stat().st_mode & 0o777 == 0o400 for name in values)


def test_a_set_that_cannot_be_written_leaves_the_one_before(folder: tuple[Path, SandboxSecrets]) -> None:
    path, secrets = folder
    secrets.replace({"A": b"good"})
    with pytest.raises(OSError):
        secrets.replace({"B": b"x", "no/such": b"y"})
    assert (path / "A").read_bytes() == b"good"
    assert len(list(path.iterdir())) == 3
