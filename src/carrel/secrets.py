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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import SecretBytes, SecretStr

from carrel.errors import Conflict, InvalidRequest, PlatformError, TooLarge

ScopeKind = Literal["context", "template"]
"""What a secret belongs to."""

SHORTEST, LARGEST = 4, 64 * 1024
"""Bytes of a value. What is shorter would be found everywhere when it is taken out of outputs."""

KEY_FILE = "secret.key"
NEXT_KEY_FILE = "secret.key.new"
"""Beside `KEY_FILE` while the key is being changed."""
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
        use. `PlatformError` when that file cannot be used or others may read it, `Conflict` while it is being changed.
        """
        return cls(decoded_key(key.get_secret_value(), "secret_key") if key else _kept_key(data_dir))

    @classmethod
    def of_file(cls, path: str, field: str) -> Vault:
        """A vault with the key that a file holds. `PlatformError` as for the kept one."""
        return cls(_read_key(path, field))

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


class FormerRecord(SealedRecord, Protocol):
    """A stored value that a secret had."""

    @property
    def id(self) -> int: ...  # noqa: D102


class SealedStore(Protocol):
    """Where sealed values are kept, as far as changing their key has to know it."""

    async def sealed_with(self, key_id: str, *, limit: int, skip: int = 0) -> Sequence[SealedRecord]:
        """Some secrets that this key sealed, without the first `skip`."""

    async def reseal(self, kind: ScopeKind, scope: str, name: str, *, version: int, sealed: bytes, key_id: str) -> bool:
        """Replace the sealed bytes of that version; False when it has changed since."""

    async def former_sealed_with(self, key_id: str, *, limit: int, skip: int = 0) -> Sequence[FormerRecord]:
        """Some former values that this key sealed, without the first `skip`."""

    async def reseal_former(self, id: int, *, sealed: bytes, key_id: str) -> bool:
        """Replace the sealed bytes of a former value; False when it is forgotten since."""


class Resealed(NamedTuple):
    """How many were sealed again."""

    secrets: int
    former: int


async def rewrap(store: SealedStore, old: Vault, new: Vault, *, batch: int = 100) -> Resealed:
    """Seal with `new` everything that `old` sealed, former values too, and say how many. Values and versions stay; may
    be done twice, and ended anywhere. What was damaged and does not open is left as it is.
    """
    done, former = 0, 0
    if old.key_id == new.key_id:
        return Resealed(done, former)
    skip = 0
    while records := await store.sealed_with(old.key_id, limit=batch, skip=skip):
        for record in records:
            if (again := _again(record, old, new)) is None:
                skip += 1
                continue
            # One that was put anew meanwhile is found again if the old key sealed it.
            done += await store.reseal(
                record.kind,
                record.scope,
                record.name,
                version=record.version,
                sealed=again.data,
                key_id=again.key_id,
            )
    skip = 0
    while remembered := await store.former_sealed_with(old.key_id, limit=batch, skip=skip):
        for each in remembered:
            if (again := _again(each, old, new)) is None:
                skip += 1
                continue
            former += await store.reseal_former(each.id, sealed=again.data, key_id=again.key_id)
    return Resealed(done, former)


def _again(record: SealedRecord, old: Vault, new: Vault) -> Sealed | None:
    kind, scope, name = record.kind, record.scope, record.name
    try:
        value = old.unseal(kind, scope, name, Sealed(record.key_id, record.sealed))
    except PlatformError:
        return None
    return new.seal(kind, scope, name, value.get_secret_value())


def next_key(data_dir: str, given: str | None = None) -> Vault:
    """The key that is to replace the kept one: the one in the file `given`, or a new one. It is in a file beside the
    kept one before this returns; what an interrupted change has left there is taken, and `Conflict` when another is
    given.
    """
    path = os.path.join(data_dir, NEXT_KEY_FILE)
    wanted = None if given is None else _read_key(given, "new_key")
    with _usable(path, "data_dir"):
        if not os.path.lexists(path):
            _make_key(path, wanted)
    found = Vault.of_file(path, "data_dir")
    if wanted is not None and Vault(wanted).key_id != found.key_id:
        raise Conflict(
            f"a change to another key was begun: {path} holds it",
            field="new_key",
            hint="finish that one first: carrel secret rekey without --new-key",
        )
    return found


def replace_key(data_dir: str) -> None:
    """Make the next key the kept one. The one before is gone."""
    path = os.path.join(data_dir, KEY_FILE)
    with _usable(path, "data_dir"):
        for name in os.listdir(data_dir):
            if re.fullmatch(rf"{re.escape(NEXT_KEY_FILE)}\.[0-9a-f]{{8}}", name):  # somebody was killed who made it
                os.unlink(os.path.join(data_dir, name))
        os.replace(os.path.join(data_dir, NEXT_KEY_FILE), path)
        _sync_directory(path)


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
    if os.path.lexists(os.path.join(data_dir, NEXT_KEY_FILE)):
        raise Conflict(
            "the key of the secrets is being changed, and some may be sealed with the new one already",
            field="data_dir",
            hint="finish it: carrel secret rekey",
        )
    with _usable(path, "data_dir"):
        if not os.path.lexists(path):
            _make_key(path)
    return _read_key(path, "data_dir")


def _read_key(path: str, field: str) -> bytes:
    with _usable(path, field):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in {0, os.geteuid()}:
                raise PlatformError(
                    f"{path} must be a file that only the user who runs carrel may read",
                    field=field,
                    hint=f"chmod 600 {path}, and find out who has read it"
                    if found.st_uid in {0, os.geteuid()}
                    else "run carrel as the user it belongs to",
                )
            text = os.read(fd, 200)
        finally:
            os.close(fd)
    try:
        return decoded_key(text.decode("ascii", "replace"), field)
    except InvalidRequest:
        raise PlatformError(
            f"{path} holds no key",
            field=field,
            hint="bring it back from a backup; without it stored secrets cannot be opened"
            if field == "data_dir"
            else "it must be 32 bytes in base64, as `head -c 32 /dev/urandom | base64` makes them",
        ) from None


@contextmanager
def _usable(path: str, field: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PlatformError(
            f"the key of the secrets, {path}, cannot be used: {error.strerror}",
            field=field,
            hint="check its mode and owner; without it stored secrets cannot be opened",
        ) from None


def _make_key(path: str, key: bytes | None = None) -> None:
    """Make the file whole or not at all; of two that make it at once, one wins."""
    temporary = f"{path}.{os.urandom(4).hex()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(base64.b64encode(key or os.urandom(_KEY_BYTES)) + b"\n")
            file.flush()
            os.fsync(fd)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    _sync_directory(path)


def _sync_directory(path: str) -> None:
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
