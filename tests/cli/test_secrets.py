from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

from carrel.secrets import Vault
from carrel.store import Database, SecretStore

Carrel = Callable[..., subprocess.CompletedProcess[bytes]]


def test_a_secret_comes_from_a_file_or_from_stdin(carrel: Carrel, tmp_path: Path) -> None:
    context = f"sec-{uuid.uuid4().hex}"
    done = carrel("secret", "set", context, "KEY", stdin=b"open-sesame\n")
    assert done.returncode == 0 and b"version 1" in done.stderr
    (tmp_path / "value").write_bytes(b"open-sesame-2\n")
    assert carrel("secret", "set", context, "KEY", str(tmp_path / "value")).returncode == 0
    assert b"KEY" in carrel("secret", "ls", context).stdout
    [listed] = json.loads(carrel("secret", "ls", context, "--json").stdout)
    assert (listed["name"], listed["version"]) == ("KEY", 2)
    assert carrel("secret", "set", context, "KEY", str(tmp_path / "absent")).returncode != 0
    assert carrel("secret", "rm", context, "KEY").returncode == 0
    assert carrel("secret", "rm", context, "KEY").returncode != 0


def test_the_key_is_not_changed_under_a_server(carrel: Carrel, data_dir: Path) -> None:
    before = (data_dir / "secret.key").read_bytes()
    done = carrel("secret", "rekey")
    assert done.returncode == 1 and done.stderr.startswith(b"error: another carrel server uses")
    assert b"hint: " in done.stderr
    assert (data_dir / "secret.key").read_bytes() == before and not (data_dir / "secret.key.new").exists()


def test_the_key_is_changed_where_no_server_runs(alone: Carrel, tmp_path: Path) -> None:
    done = alone("secret", "rekey")
    assert done.returncode == 1 and b"cannot be used: No such file" in done.stderr and b"--data-dir" in done.stderr
    data = tmp_path / "nothing"
    data.mkdir()
    done = alone("secret", "rekey")
    assert done.returncode == 1 and b"no key to change" in done.stderr and b"hint: " in done.stderr
    first = Vault.open(str(data))

    async def fill() -> None:
        database, sealed = await Database.open(str(data / "carrel.db")), first.seal("context", "c", "A", "open-sesame")
        for _ in range(2):
            await SecretStore(database).put(
                "context", "c", "A", sealed=sealed.data, key_id=sealed.key_id, sandboxes=(), check=lambda _sizes: None
            )
        await database.close()

    asyncio.run(fill())
    done = alone("secret", "rekey")
    assert done.returncode == 0, done.stderr
    assert b"1 secrets, 1 former values" in done.stdout and str(data / "secret.key").encode() in done.stdout
    second = Vault.open(str(data))
    assert second.key_id != first.key_id
    shown = json.loads(alone("secret", "rekey", "--json").stdout)
    assert shown == {
        "secrets": 1,
        "former": 1,
        "left": 0,
        "key_id": Vault.open(str(data)).key_id,
        "key_file": str(data / "secret.key"),
    }
    setting = {"CARREL_SECRET_KEY": (data / "secret.key").read_text().strip()}
    done = alone("secret", "rekey", env=setting)
    assert done.returncode == 1 and b"in a file" in done.stderr and b"--new-key" in done.stderr
    new = tmp_path / "new.key"
    new.touch(0o600)
    new.write_bytes(base64.b64encode(bytes(range(32))))
    done = alone("secret", "rekey", "--new-key", str(new), env=setting)
    assert done.returncode == 0 and b"now set CARREL_SECRET_KEY" in done.stderr and str(new).encode() in done.stderr
    done = alone("secret", "rekey", "--data-dir", str(data))
    assert b"2 values need a key" in done.stderr and done.returncode == 0
    assert b"1 secrets, 1 former" in alone("secret", "rekey", "--old-key", str(new)).stdout
