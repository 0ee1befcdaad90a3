"""The key of a server's audit log: it signs heads and exports, and keys the hashes of arguments. Knows no record.

One file, made at the first start. Whoever has it can forge; whoever has only the public key can check.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress

from blake3 import blake3
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from carrel.errors import InvalidRequest, PlatformError

FILE = "audit.key"
_ARGUMENTS = "carrel 2026 audit log: hashes of arguments"
_PUBLIC = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_MAX = 4096


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
        """The key in a data directory, made when there is none.

        `PlatformError` when the file is not a key, or others could have read or changed it.
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
        """The signature of a message, in hexadecimal."""
        return self._key.sign(message).hex()


def _make(path: str) -> None:
    text = Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    temporary = f"{path}.{os.getpid()}.{os.urandom(4).hex()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        with suppress(FileExistsError):
            os.link(temporary, path)  # unlike a rename it never replaces the key of one who was quicker
    finally:
        os.unlink(temporary)


def public_key(text: str) -> str:
    """A public key as given by a person, in the one form it is compared in; `InvalidRequest` when it is none."""
    key = text.strip().lower()
    if not _PUBLIC.fullmatch(key):
        raise InvalidRequest(
            "a public key is 64 hexadecimal digits", field="key", hint="`carrel audit key` shows the server's"
        )
    return key


def signed(public: str, signature: str, message: bytes) -> bool:
    """Whether the owner of a public key signed exactly this message; both in lower-case hexadecimal."""
    if not _PUBLIC.fullmatch(public) or not _SIGNATURE.fullmatch(signature):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True
