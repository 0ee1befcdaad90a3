"""Encryption of secrets: values are sealed so that the database alone does not reveal them.

A sealed value is bound to its place (context or template, and name): in another row it does not open. It names the key
that sealed it, so that the key can be changed.
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
from carrel.primitives.atomic import sync_directory, write_file

ScopeKind = Literal["context", "template"]
"""The kind of thing that a secret belongs to."""

SHORTEST, LARGEST = 4, 64 * 1024
"""Size of a value in bytes. Redaction would find a shorter one everywhere in outputs."""

KEY_FILE = "secret.key"
NEXT_KEY_FILE = "secret.key.new"
"""Exists beside `KEY_FILE` while the key is being changed."""
_KEY_BYTES, _NONCE_BYTES = 32, 12
OVERHEAD = _NONCE_BYTES + 16
"""Bytes that sealing adds to a value."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_SCOPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def checked_name(name: str) -> str:
    """Check the name of a secret, which is also the name of a file, and return it."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            "the name of a secret must be letters, digits and _.-, at most 128, a letter or _ first",
            field="name",
            hint="write it like GITHUB_TOKEN",
        )
    return name


def checked_value(value: bytes | str) -> bytes:
    """Return the bytes of a value; `InvalidRequest` when it is too short to redact, `TooLarge` beyond 64 KiB.

    No error quotes it.
    """
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    if len(data) > LARGEST:
        raise TooLarge(f"a secret may have at most {LARGEST} bytes", field="value", hint="keep large files elsewhere")
    if len(data.strip()) < SHORTEST:
        raise InvalidRequest(
            f"a secret needs at least {SHORTEST} bytes: a shorter one cannot be redacted from outputs, "
            "because it would be found everywhere",
            field="value",
            hint="use a longer secret",
        )
    return data


@dataclass(frozen=True, slots=True)
class Sealed:
    """An encrypted value and the id of its key."""

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
        """Identifies the key without revealing it."""

    def __repr__(self) -> str:
        return f"<Vault with key {self.key_id}>"

    @classmethod
    def open(cls, data_dir: str, key: SecretStr | None = None) -> Vault:
        """Open a vault with the key of the settings, or the one in `secret.key` of the data directory, which is made on
        first use. `PlatformError` when that file is unusable or others may read it, `Conflict` while it is changed.
        """
        return cls(decoded_key(key.get_secret_value(), "secret_key") if key else _kept_key(data_dir))

    @classmethod
    def of_file(cls, path: str, field: str) -> Vault:
        """Open a vault with the key in a file; `PlatformError` as for `open`."""
        return cls(_read_key(path, field))

    def derived(self, purpose: str) -> bytes:
        """Derive a key for another purpose, the same on every server with this key."""
        return hmac.new(self._key, f"carrel {purpose}".encode(), hashlib.sha256).digest()

    def seal(self, kind: ScopeKind, scope: str, name: str, value: bytes | str) -> Sealed:
        """Seal a value for its place. Raises what `checked_name` and `checked_value` raise."""
        place = _place(kind, scope, name)
        nonce = os.urandom(_NONCE_BYTES)
        return Sealed(self.key_id, nonce + self._cipher.encrypt(nonce, checked_value(value), place))

    def unseal(self, kind: ScopeKind, scope: str, name: str, sealed: Sealed) -> SecretBytes:
        """Return the value sealed for that place; `PlatformError` when another key sealed it or it was changed."""
        place = _place(kind, scope, name)
        if sealed.key_id != self.key_id:
            raise PlatformError(
                f"the secret {name} was sealed with key {sealed.key_id}, and this server has key {self.key_id}",
                field="secret_key",
                hint="give every server of the database the same secret_key, or set the secret again",
            )
        try:
            return SecretBytes(self._cipher.decrypt(sealed.data[:_NONCE_BYTES], sealed.data[_NONCE_BYTES:], place))
        except (InvalidTag, ValueError):
            raise PlatformError(
                f"the secret {name} was changed in the database, or moved from another place",
                field="name",
                hint="set the secret again",
            ) from None


class SealedRecord(Protocol):
    """The fields of a stored secret that a change of its key needs."""

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
    """A stored former value of a secret."""

    @property
    def id(self) -> int: ...  # noqa: D102


class SealedStore(Protocol):
    """The methods of a store that a change of the key needs."""

    async def sealed_with(self, key_id: str, *, limit: int, skip: int = 0) -> Sequence[SealedRecord]:
        """Return some secrets that this key sealed, without the first `skip`."""

    async def reseal(self, kind: ScopeKind, scope: str, name: str, *, version: int, sealed: bytes, key_id: str) -> bool:
        """Replace the sealed bytes of this version; False when the secret has changed since."""

    async def former_sealed_with(self, key_id: str, *, limit: int, skip: int = 0) -> Sequence[FormerRecord]:
        """Return some former values that this key sealed, without the first `skip`."""

    async def reseal_former(self, id: int, *, sealed: bytes, key_id: str) -> bool:
        """Replace the sealed bytes of a former value; False when it was deleted since."""


class Resealed(NamedTuple):
    """How many values were sealed again."""

    secrets: int
    former: int


async def rewrap(store: SealedStore, old: Vault, new: Vault, *, batch: int = 100) -> Resealed:
    """Seal everything that `old` sealed with `new`, former values too, and return how many. Values and versions stay.
    May be interrupted anywhere and repeated. Damaged values are left as they are.
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
            # If it was changed meanwhile, and sealed with the old key, the next query finds it again.
            place, version = (record.kind, record.scope, record.name), record.version
            done += await store.reseal(*place, version=version, sealed=again.data, key_id=again.key_id)
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
    """Return the key that will replace the current one: that in the file `given`, or a new one. It is stored in a file
    beside the current one. The key of an interrupted change is used again; `Conflict` when `given` is another.
    """
    path = os.path.join(data_dir, NEXT_KEY_FILE)
    wanted = None if given is None else _read_key(given, "new_key")
    with _usable(path, "data_dir"):
        if not os.path.lexists(path):
            _make_key(path, wanted)
    found = Vault.of_file(path, "data_dir")
    if wanted is not None and Vault(wanted).key_id != found.key_id:
        raise Conflict(
            f"a change to another key has begun; {path} holds that key",
            field="new_key",
            hint="finish that one first: carrel secret rekey without --new-key",
        )
    return found


def replace_key(data_dir: str) -> None:
    """Replace the current key by the next one; the former key is gone."""
    path = os.path.join(data_dir, KEY_FILE)
    with _usable(path, "data_dir"):
        for name in os.listdir(data_dir):
            if re.fullmatch(
                rf"{re.escape(NEXT_KEY_FILE)}\.([0-9a-f]{{8}}|[0-9a-f]{{16}}\.new)", name
            ):  # of a killed process
                os.unlink(os.path.join(data_dir, name))
        os.replace(os.path.join(data_dir, NEXT_KEY_FILE), path)
        sync_directory(data_dir)


def decoded_key(text: str, field: str) -> bytes:
    """Decode a key in base64; `InvalidRequest` when it is not one. The error does not quote it."""
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
        raise InvalidRequest("a secret belongs to a context or a template", field="scope", hint="name a valid one")
    return json.dumps([kind, scope, checked_name(name)]).encode()


def _kept_key(data_dir: str) -> bytes:
    path = os.path.join(data_dir, KEY_FILE)
    if os.path.lexists(os.path.join(data_dir, NEXT_KEY_FILE)):
        raise Conflict(
            "the key of the secrets is being changed, and some are already sealed with the new one",
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
            f"{path} does not contain a key",
            field=field,
            hint="restore it from a backup; without it stored secrets cannot be opened"
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
    """Write the file durably; of two processes that do this at once, one wins and both then read the same key."""
    with suppress(FileExistsError):
        text = base64.b64encode(key or os.urandom(_KEY_BYTES)) + b"\n"
        write_file(path, text, durable=True, replace=False)
    sync_directory(os.path.dirname(path) or ".")
