"""The key of a server's audit log, which signs heads and exports and keys the hashes of arguments; and signed heads.

The key is one file, made at the first start. Its owner can forge records; the public key is enough to verify them.
"""

from __future__ import annotations

import json
import os
import re
import stat
from contextlib import suppress
from typing import NamedTuple

from blake3 import blake3
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from carrel.errors import InvalidRequest, PlatformError
from carrel.primitives.atomic import write_file

FILE = "audit.key"
_ARGUMENTS = "carrel 2026 audit log: hashes of arguments"
_PUBLIC = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_MAX = 4096
_HEAD_DOMAIN = b"carrel audit head v1\n"

Headlike = tuple[str, int, str, int, float, str, str]
"""The fields of a `SignedHead` as the store returns them."""


class SigningKey:
    """An Ed25519 key. `public` is its public half in hexadecimal, `arguments` the key of argument hashes."""

    def __init__(self, key: Ed25519PrivateKey):
        self._key = key
        self.public = key.public_key().public_bytes_raw().hex()
        self.arguments = blake3(key.private_bytes_raw(), derive_key_context=_ARGUMENTS).digest()

    def __repr__(self) -> str:
        return f"SigningKey({self.public})"

    @classmethod
    def load(cls, data_dir: str) -> SigningKey:
        """Load the key of a data directory; makes one if it is missing.

        `PlatformError` when the file is not a key, or other users could have read or changed it.
        """
        path = os.path.join(data_dir, FILE)
        try:
            try:
                return cls._read(path)
            except FileNotFoundError:
                _make(path)
                return cls._read(path)
        except OSError as error:
            raise PlatformError(
                f"the key of the audit log {path} cannot be used: {error.strerror}",
                field="data_dir",
                hint="check the owner and the mode of the data directory",
            ) from None

    @classmethod
    def _read(cls, path: str) -> SigningKey:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
                raise PlatformError(
                    f"the key of the audit log {path} may be known to others",
                    field="data_dir",
                    hint="if nobody had it: chmod 600 and chown to the server's user; else move it away, "
                    "and a new one is made",
                )
            text = os.read(fd, _MAX)
        finally:
            os.close(fd)
        with suppress(ValueError, TypeError, UnsupportedAlgorithm):
            key = serialization.load_pem_private_key(text, password=None)
            if isinstance(key, Ed25519PrivateKey):
                return cls(key)
        raise PlatformError(
            f"{path} is not an Ed25519 key",
            field="data_dir",
            hint="put the right file back, or move it away: then a new one is made",
        )

    def sign(self, message: bytes) -> str:
        """Return the signature of a message, in hexadecimal."""
        return self._key.sign(message).hex()


def _make(path: str) -> None:
    text = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with suppress(FileExistsError):  # another process was quicker; its key stays
        write_file(path, text, durable=True, replace=False)


def public_key(text: str) -> str:
    """Normalize a public key that a person typed; `InvalidRequest` when it is not valid."""
    key = text.strip().lower()
    if not _PUBLIC.fullmatch(key):
        raise InvalidRequest(
            "a public key is 64 hexadecimal digits", field="key", hint="`carrel audit key` shows the server's"
        )
    return key


def signed(public: str, signature: str, message: bytes) -> bool:
    """Return whether the owner of a public key signed exactly this message; both in lower-case hexadecimal."""
    if not _PUBLIC.fullmatch(public) or not _SIGNATURE.fullmatch(signature):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True


class SignedHead(NamedTuple):
    """A signature over a position in a chain. `records` counts the records since the head before, so a missing head
    leaves a gap.
    """

    chain: str
    seq: int
    hash: str
    records: int
    at: float
    key: str
    signature: str

    @classmethod
    def signed(cls, key: SigningKey, chain: str, seq: int, hash: str, records: int, at: float) -> SignedHead:
        """Make a head signed by this key."""
        at = round(at, 6)
        return cls(chain, seq, hash, records, at, key.public, key.sign(_message(chain, seq, hash, records, at)))

    def genuine(self) -> bool:
        """Return whether its key signed it. Whether to trust that key is up to the caller."""
        return signed(self.key, self.signature, _message(self.chain, self.seq, self.hash, self.records, self.at))


def _message(chain: str, seq: int, hash: str, records: int, at: float) -> bytes:
    return _HEAD_DOMAIN + json.dumps([chain, seq, hash, records, at], separators=(",", ":")).encode()
