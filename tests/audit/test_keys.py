from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from carrel.audit.keys import SigningKey, public_key, signed
from carrel.errors import InvalidRequest, PlatformError


def test_it_is_made_once_and_private(tmp_path: Path) -> None:
    key = SigningKey.load(str(tmp_path))
    assert stat.S_IMODE((tmp_path / "audit.key").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["audit.key"]
    again = SigningKey.load(str(tmp_path))
    assert (again.public, again.arguments) == (key.public, key.arguments)
    assert key.public in repr(key) and key.arguments.hex() not in repr(key)


def test_many_make_it_at_once_and_have_the_same(tmp_path: Path) -> None:
    program = "import sys; from carrel.audit.keys import SigningKey; print(SigningKey.load(sys.argv[1]).public)"
    command = [sys.executable, "-c", program, str(tmp_path)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    assert len({each.communicate()[0] for each in started}) == 1
    assert os.listdir(tmp_path) == ["audit.key"]


@pytest.mark.parametrize("spoiled", ["mode", "link", "directory", "text", "other"])
def test_a_file_that_cannot_be_trusted_is_refused(tmp_path: Path, spoiled: str) -> None:
    path = tmp_path / "audit.key"
    SigningKey.load(str(tmp_path))
    if spoiled == "mode":
        path.chmod(0o640)
    elif spoiled == "link":
        path.rename(tmp_path / "real")
        path.symlink_to("real")
    elif spoiled == "directory":
        path.unlink()
        path.mkdir(mode=0o700)
    elif spoiled == "text":
        path.write_bytes(b"\0nothing")
    else:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        kind = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        path.write_bytes(X25519PrivateKey.generate().private_bytes(*kind))
    with pytest.raises(PlatformError) as caught:
        SigningKey.load(str(tmp_path))
    assert caught.value.field == "data_dir" and caught.value.hint


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlatformError):
        SigningKey.load(str(tmp_path / "absent"))


def test_only_its_own_signature_counts(key: SigningKey, tmp_path: Path) -> None:
    signature = key.sign(b"message")
    assert signed(key.public, signature, b"message")
    assert not signed(key.public, signature, b"massage")
    assert not signed(SigningKey.load(str(tmp_path)).public, signature, b"message")
    for wrong in ("", signature.upper(), signature[:-1], signature + "00", "zz" * 64):
        assert not signed(key.public, wrong, b"message")
    assert not signed("00" * 31, signature, b"message")


def test_public_keys_of_people(key: SigningKey) -> None:
    assert public_key(f" {key.public.upper()}\n") == key.public
    with pytest.raises(InvalidRequest) as caught:
        public_key("secret")
    assert caught.value.field == "key"
