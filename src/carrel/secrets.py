"""Secrets at rest: seals values so that whoever has only the database has nothing. Knows keys and names, not where
sealed values are kept nor who may have them.

A sealed value is bound to its place, the context or template and the name it was sealed for: moved to another row it
does not open. Each one says which key sealed it, so that a key can be changed while the old one is still at hand.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import SecretBytes, SecretStr

from carrel.errors import InvalidRequest, PlatformError, TooLarge

ScopeKind = Literal["context", "template"]
"""What a secret belongs to."""

SHORTEST, LARGEST = 4, 64 * 1024
"""Bytes of a value. What is shorter would be found everywhere when it is taken out of outputs."""

KEY_FILE = "secret.key"
_KEY_BYTES, _NONCE_BYTES = 32, 12
OVERHEAD = _NONCE_BYTES + 16
"""Bytes that sealing adds to a value."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_SCOPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def checked_name(name: str) -> str:
    """The name of a secret, which is also the name of a file; `InvalidRequest` when it cannot be one."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            "the name of a secret must be letters, digits and _.-, at most 128, a letter or _ first",
            field="name",
            hint="write it like GITHUB_TOKEN",
        )
    return name


def checked_value(value: bytes | str) -> bytes:
    """The bytes of a value; `InvalidRequest` when it is too short to be kept out of outputs, `TooLarge` beyond 64 KiB.

    No error quotes it.
    """
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    if len(data) > LARGEST:
        raise TooLarge(f"a secret may have at most {LARGEST} bytes", field="value", hint="keep large files elsewhere")
    if len(data.strip()) < SHORTEST:
        raise InvalidRequest(
            f"a secret needs at least {SHORTEST} bytes: a shorter one cannot be taken out of outputs, "
            "because it would be found everywhere",
            field="value",
            hint="use a longer secret",
        )
    return data


@dataclass(frozen=True, slots=True)
class Sealed:
    """A value that only the key it names opens."""

    key_id: str
    data: bytes = field(repr=False)


class Vault:
    """Seals and opens values with one key (AES-256-GCM)."""

    def __init__(self, key: bytes):
        if len(key) != _KEY_BYTES:
            raise InvalidRequest(f"the key of the secrets must have {_KEY_BYTES} bytes", field="secret_key")
        self._cipher = AESGCM(key)
        self._key = key
        self.key_id = hashlib.sha256(b"carrel secret key\0" + key).hexdigest()[:16]
        """Names the key and tells nothing of it."""

    def __repr__(self) -> str:
        return f"<Vault with key {self.key_id}>"

    @classmethod
    def open(cls, data_dir: str, key: SecretStr | None = None) -> Vault:
        """A vault with the key of the settings, or the one kept in `secret.key` of the data directory, made on first
        use. `PlatformError` when that file cannot be used or others may read it.
        """
        return cls(decoded_key(key.get_secret_value(), "secret_key") if key else _kept_key(data_dir))

    def derived(self, purpose: str) -> bytes:
        """A key for another purpose, the same on every server that has this one."""
        return hmac.new(self._key, f"carrel {purpose}".encode(), hashlib.sha256).digest()

    def seal(self, kind: ScopeKind, scope: str, name: str, value: bytes | str) -> Sealed:
        """Seal a value for its place. Refuses what `checked_name` and `checked_value` do."""
        place = _place(kind, scope, name)
        nonce = os.urandom(_NONCE_BYTES)
        return Sealed(self.key_id, nonce + self._cipher.encrypt(nonce, checked_value(value), place))

    def unseal(self, kind: ScopeKind, scope: str, name: str, sealed: Sealed) -> SecretBytes:
        """The value sealed for that place; `PlatformError` when another key sealed it or it is not what was sealed."""
        place = _place(kind, scope, name)
        if sealed.key_id != self.key_id:
            raise PlatformError(
                f"the secret {name} was sealed with key {sealed.key_id}, and this server has key {self.key_id}",
                field="secret_key",
                hint="give every server on the database the same secret_key, or put the secret again",
            )
        try:
            return SecretBytes(self._cipher.decrypt(sealed.data[:_NONCE_BYTES], sealed.data[_NONCE_BYTES:], place))
        except (InvalidTag, ValueError):
            raise PlatformError(
                f"the secret {name} was changed where it is stored, or moved from another place",
                field="name",
                hint="put the secret again",
            ) from None


class SealedRecord(Protocol):
    """A stored secret, as far as changing its key has to know it."""

    @property
    def kind(self) -> ScopeKind: ...  # noqa: D102
    @property
    def scope(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def sealed(self) -> bytes: ...  # noqa: D102
    @property
    def key_id(self) -> str: ...  # noqa: D102
    @property
    def version(self) -> int: ...  # noqa: D102


class SealedStore(Protocol):
    """Where sealed values are kept, as far as changing their key has to know it."""

    async def sealed_with(self, key_id: str, *, limit: int) -> Sequence[SealedRecord]:
        """Some secrets that this key sealed."""

    async def reseal(self, kind: ScopeKind, scope: str, name: str, *, version: int, sealed: bytes, key_id: str) -> bool:
        """Replace the sealed bytes of that version; False when it has changed since."""


async def rewrap(store: SealedStore, old: Vault, new: Vault, *, batch: int = 100) -> int:
    """Seal with `new` everything that `old` sealed, and say how many. Values and versions stay; may be done twice."""
    if old.key_id == new.key_id:
        return 0
    done = 0
    while records := await store.sealed_with(old.key_id, limit=batch):
        for record in records:
            kind, scope, name = record.kind, record.scope, record.name
            value = old.unseal(kind, scope, name, Sealed(record.key_id, record.sealed))
            again = new.seal(kind, scope, name, value.get_secret_value())
            # One that was put anew meanwhile is found again if the old key sealed it.
            done += await store.reseal(
                kind, scope, name, version=record.version, sealed=again.data, key_id=again.key_id
            )
    return done


def decoded_key(text: str, field: str) -> bytes:
    """The bytes of a key written in base64; `InvalidRequest` when it is not one. The error does not quote it."""
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise InvalidRequest(
            f"the key of the secrets must be {_KEY_BYTES} bytes in base64",
            field=field,
            hint="make one with: head -c 32 /dev/urandom | base64",
        )
    return key


def _place(kind: ScopeKind, scope: str, name: str) -> bytes:
    if kind not in {"context", "template"} or not _SCOPE.fullmatch(scope):
        raise InvalidRequest(
            "a secret belongs to a context or a template", field="scope", hint="name one that can exist"
        )
    return json.dumps([kind, scope, checked_name(name)]).encode()


def _kept_key(data_dir: str) -> bytes:
    path = os.path.join(data_dir, KEY_FILE)
    try:
        if not os.path.lexists(path):
            _make_key(path)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in {0, os.geteuid()}:
                raise PlatformError(
                    f"{path} must be a file that only the user who runs carrel may read",
                    field="data_dir",
                    hint=f"chmod 600 {path}, and find out who has read it",
                )
            text = os.read(fd, 200)
        finally:
            os.close(fd)
    except OSError as error:
        raise PlatformError(
            f"the key of the secrets, {path}, cannot be used: {error.strerror}",
            field="data_dir",
            hint="check its mode and owner; without it stored secrets cannot be opened",
        ) from None
    try:
        return decoded_key(text.decode("ascii", "replace"), "data_dir")
    except InvalidRequest:
        raise PlatformError(
            f"{path} holds no key",
            field="data_dir",
            hint="bring it back from a backup; without it stored secrets cannot be opened",
        ) from None


def _make_key(path: str) -> None:
    """Make the file whole or not at all; of two that make it at once, one wins."""
    temporary = f"{path}.{os.urandom(4).hex()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(base64.b64encode(os.urandom(_KEY_BYTES)) + b"\n")
            file.flush()
            os.fsync(fd)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
