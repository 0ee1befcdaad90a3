"""The access tokens that E2B's SDKs get with a sandbox: made from the caller's token, and stored nowhere.

Such a token names the token that it was made for, and works only as long as that one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time

from carrel.errors import CarrelError, Unauthorized
from carrel.identity import PREFIX, ROOT, Identity, Tokens

_ADMINISTRATOR = "root"
_E2B = "e2b_"
_MOST = 512


def api_key(given: str) -> str:
    """Return the token in an API key. Older SDKs accept only `e2b_` and digits: the token in hexadecimal."""
    if given.startswith(_E2B) and len(given) <= 2 * _MOST:
        try:
            text = bytes.fromhex(given[len(_E2B) :]).decode("ascii")
        except (ValueError, UnicodeDecodeError):
            return given
        return text if text.startswith(PREFIX) else given
    return given


class SandboxAccess:
    """Makes and checks access tokens. `tokens` None: this server needs no token."""

    def __init__(self, key: bytes, tokens: Tokens | None):
        self._key = key
        self._tokens = tokens

    async def caller(self, key: str | None) -> Identity:
        """Return the identity of an API key; `Unauthorized`."""
        if self._tokens is None:
            return ROOT
        return await self._tokens.identify(api_key(key or ""))

    def token(self, identity: Identity, sandbox: str) -> str:
        """Return the access token of a caller for a sandbox."""
        return self.token_of(identity.token_id or _ADMINISTRATOR, sandbox)

    def token_of(self, who: str, sandbox: str) -> str:
        """Return the access token that belongs to the token with an id."""
        return f"{who}.{hmac.new(self._key, f'{who} {sandbox}'.encode(), hashlib.sha256).hexdigest()}"

    async def holder(self, given: str | None, sandbox: str) -> Identity:
        """Return the identity behind an access token; `Unauthorized`."""
        if self._tokens is None:
            return ROOT
        who = (given or "").rpartition(".")[0][:_MOST]
        if not who or not hmac.compare_digest(self.token_of(who, sandbox).encode(), (given or "").encode()):
            raise Unauthorized(
                "the access token of this sandbox is missing or wrong",
                field="X-SandboxAccess-Token",
                hint="connect to the sandbox with its id and your API key",
            )
        return ROOT if who == _ADMINISTRATOR else await self._tokens.of_id(who)

    async def signer(self, who: str, sandbox: str, signed: Signed) -> Identity | None:
        """Return the identity whose access token made a signature, if it is the token with the id `who`."""
        if not signed.made_with(self.token_of(who, sandbox)):
            return None
        try:
            return await self.holder(self.token_of(who, sandbox), sandbox)
        except CarrelError:
            return None


class Signed:
    """The signature of a URL of a file."""

    def __init__(self, path: str, operation: str, user: str, signature: str, expires: str):
        self._signature = signature
        self._text = f"{path}:{operation}:{user}:"
        self._expires = expires

    def made_with(self, token: str) -> bool:
        """Whether an access token made it."""
        raw = f"{self._text}{token}" + (f":{self._expires}" if self._expires else "")
        text = base64.b64encode(hashlib.sha256(raw.encode("utf-8", "surrogatepass")).digest()).rstrip(b"=").decode()
        # A `+` of the digest comes as a space from clients that do not encode it.
        return hmac.compare_digest(f"v1_{text}".encode(), self._signature.replace(" ", "+").encode())

    @property
    def expired(self) -> bool:
        """Whether its time is over."""
        return bool(self._expires) and not (self._expires.isdigit() and int(self._expires[:15]) > time.time())
