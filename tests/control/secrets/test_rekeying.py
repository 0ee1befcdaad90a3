from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
import stat
import sys
import tempfile
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

import carrel.secrets
from carrel.config import Settings
from carrel.control.secrets import rekeying
from carrel.control.secrets.rekeying import rekey
from carrel.errors import Conflict, InvalidRequest, NotFound, PlatformError
from carrel.secrets import KEY_FILE, NEXT_KEY_FILE, Sealed, Vault
from carrel.server import running
from carrel.store import Database, SecretStore

NAMES = ("A", "B", "C")
Values = list[tuple[str, int, bytes]]


def key_file(path: Path) -> Path:
    path.touch(0o600)
    path.write_bytes(base64.b64encode(os.urandom(32)))
    return path


async def fill(data: Path, key: SecretStr | None = None, names: tuple[str, ...] = NAMES) -> None:
    """Secrets with a former value each."""
    database, vault = await Database.open(str(data / "carrel.db")), Vault.open(str(data), key)
    for name in names:
        for time in ("former", "now"):
            sealed = vault.seal("context", "c", name, f"{time} {name}")
            await SecretStore(database).put(
                "context", "c", name, sealed=sealed.data, key_id=sealed.key_id, sandboxes=(), check=lambda _sizes: None
            )
    await database.close()


async def opened(data: Path, *vaults: Vault) -> Values:
    """What these keys open: it must be everything there is."""
    database, by = await Database.open(str(data / "carrel.db")), {vault.key_id: vault for vault in vaults}
    try:
        store = SecretStore(database)
        return [
            (
                each.name,
                each.version,
                by[each.key_id]
                .unseal(each.kind, each.scope, each.name, Sealed(each.key_id, each.sealed))
                .get_secret_value(),
            )
            for each in (*await store.of_scope("c"), *reversed(await store.former("c")))
        ]
    finally:
        await database.close()


def at_hand(data: Path) -> list[Vault]:
    return [Vault.of_file(str(data / name), name) for name in (KEY_FILE, NEXT_KEY_FILE) if (data / name).exists()]


EVERYTHING: Values = [
    *((name, 2, f"now {name}".encode()) for name in NAMES),
    *((name, 1, f"former {name}".encode()) for name in NAMES),
]
TRACED = {rekeying.__file__, carrel.secrets.__file__}


def killed_at(point: int, chosen: Settings) -> bool:
    """Change the key in a process that is killed before the line of that number; whether it was."""
    pid = os.fork()
    if pid == 0:
        left = point

        def trace(frame: FrameType, event: str, _: object) -> object:
            nonlocal left
            if frame.f_code.co_filename not in TRACED:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            sys.settrace(trace)  # type: ignore[arg-type]
            asyncio.run(rekey(chosen))
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in {0, -signal.SIGKILL}
    return code != 0


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("filled")
    asyncio.run(fill(data))
    return data


@settings(deadline=None, max_examples=12)
@given(st.lists(st.integers(0, 320), min_size=1, max_size=3))
def test_killed_anywhere_nothing_is_lost_and_the_next_run_finishes(filled: Path, points: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        shutil.copytree(filled, data)
        chosen, first = Settings(data_dir=str(data)), Vault.open(str(data)).key_id
        for point in points:
            killed_at(point, chosen)
            assert asyncio.run(opened(data, *at_hand(data))) == EVERYTHING
            assert {stat.S_IMODE(path.stat().st_mode) for path in data.glob("secret.key*")} == {0o600}
            if (data / NEXT_KEY_FILE).exists():
                with pytest.raises(Conflict, match="being changed"):
                    Vault.open(str(data))
        done = asyncio.run(rekey(chosen))
        kept = Vault.open(str(data))
        assert done.left == 0 and kept.key_id == done.key_id != first
        assert asyncio.run(opened(data, kept)) == EVERYTHING
        assert [path.name for path in data.glob("secret.key*")] == [KEY_FILE]


def test_the_points_reach_from_the_first_line_to_the_last(filled: Path, tmp_path: Path) -> None:
    shutil.copytree(filled, tmp_path / "data")
    chosen = Settings(data_dir=str(tmp_path / "data"))
    assert killed_at(0, chosen) and not (tmp_path / "data" / NEXT_KEY_FILE).exists()
    assert killed_at(160, chosen)
    assert not killed_at(320, chosen)


async def test_a_key_that_is_given_is_kept(tmp_path: Path) -> None:
    data, new = tmp_path / "data", key_file(tmp_path / "new")
    data.mkdir()
    await fill(data)
    done = await rekey(Settings(data_dir=str(data)), new_key=str(new))
    assert (done.secrets, done.former, done.left) == (3, 3, 0)
    assert done.key_file == str(data / KEY_FILE)
    assert Vault.open(str(data)).key_id == Vault.of_file(str(new), "new").key_id == done.key_id
    again = await rekey(Settings(data_dir=str(data)), new_key=str(new))
    assert (again.secrets, again.former, again.left, again.key_id) == (0, 0, 0, done.key_id)


async def test_a_change_that_was_begun_is_finished_before_another(tmp_path: Path) -> None:
    await fill(tmp_path)
    begun = key_file(tmp_path / NEXT_KEY_FILE)
    chosen, wanted = Settings(data_dir=str(tmp_path)), Vault.of_file(str(begun), "begun").key_id
    with pytest.raises(Conflict) as caught:
        await rekey(chosen, new_key=str(key_file(tmp_path / "other")))
    assert caught.value.field == "new_key" and "rekey" in (caught.value.hint or "")
    with pytest.raises(Conflict, match="being changed"):
        async with running(Settings(data_dir=str(tmp_path), port=0)):
            pass
    assert (await rekey(chosen)).key_id == wanted


async def test_a_key_of_the_settings_comes_by_file(tmp_path: Path) -> None:
    old, new = key_file(tmp_path / "old"), key_file(tmp_path / "new")
    setting = SecretStr(old.read_text())
    await fill(tmp_path, setting)
    chosen = Settings(data_dir=str(tmp_path), secret_key=setting)
    with pytest.raises(InvalidRequest, match="in a file") as caught:
        await rekey(chosen)
    assert caught.value.field == "new_key"
    done = await rekey(chosen, new_key=str(new))
    assert (done.secrets, done.former, done.left, done.key_file) == (3, 3, 0, str(new))
    assert await opened(tmp_path, Vault.open(str(tmp_path), SecretStr(new.read_text()))) == EVERYTHING
    assert not (tmp_path / KEY_FILE).exists() and not (tmp_path / NEXT_KEY_FILE).exists()


async def test_what_several_keys_sealed_is_sealed_with_one(tmp_path: Path) -> None:
    old, lost = key_file(tmp_path / "old"), key_file(tmp_path / "lost")
    await fill(tmp_path, SecretStr(old.read_text()), ("A",))
    await fill(tmp_path, SecretStr(lost.read_text()), ("B",))
    await fill(tmp_path, None, ("C",))
    done = await rekey(Settings(data_dir=str(tmp_path)), old_key=str(old))
    assert (done.secrets, done.former, done.left) == (2, 2, 2)
    assert len(await opened(tmp_path, Vault.open(str(tmp_path)), Vault.of_file(str(lost), "lost"))) == 6


async def test_without_a_key_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no key to change"):
        await rekey(Settings(data_dir=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
    await fill(tmp_path)
    for name, mode, content in (("open", 0o644, base64.b64encode(bytes(32))), ("none", 0o600, b"no key")):
        path = tmp_path / name
        path.write_bytes(content)
        path.chmod(mode)
        with pytest.raises(PlatformError) as caught:
            await rekey(Settings(data_dir=str(tmp_path)), new_key=str(path))
        assert caught.value.field == "new_key" and caught.value.hint
    with pytest.raises(PlatformError):
        await rekey(Settings(data_dir=str(tmp_path)), old_key=str(tmp_path / "absent"))
    assert not (tmp_path / NEXT_KEY_FILE).exists()
    assert await opened(tmp_path, Vault.open(str(tmp_path))) == EVERYTHING
