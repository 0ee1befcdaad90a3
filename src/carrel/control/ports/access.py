"""Access to one port of one sandbox: a signed text that expires, made with a token and revoked with it. Pure.

The text names the sandbox, the port, when it expires and the token that made it, and opens nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass

PREFIX = "cp1"
LONGEST = 300
_TEXT = re.compile(
    r"cp1\.([A-Za-z0-9-]{1,64})\.(\d{1,5})\.(\d{1,12})\.([A-Za-z0-9-]{0,64})\.([01])\.([A-Za-z0-9_-]{43})"
)


@dataclass(frozen=True, slots=True)
class PortAccess:
    """What an access allows. `token_id` is the token that made it; empty for the administrator's own."""

    sandbox: str
    port: int
    expires_at: int
    token_id: str
    wake: bool

    def signed(self, key: bytes) -> str:
        """Return the text, which only uses characters that need no quoting in URLs and cookies."""
        said = f"{PREFIX}.{self.sandbox}.{self.port}.{self.expires_at}.{self.token_id}.{int(self.wake)}"
        return f"{said}.{_mac(key, said)}"


def read(text: str, key: bytes) -> PortAccess | None:
    """Return the access of a text; None if it was not signed with this key. The caller checks when it expires."""
    found = _TEXT.fullmatch(text) if len(text) <= LONGEST else None
    if found is None or not hmac.compare_digest(_mac(key, text.rpartition(".")[0]), found[6]):
        return None
    return PortAccess(found[1], int(found[2]), int(found[3]), found[4], found[5] == "1")


def looks_like_one(text: str) -> bool:
    """Whether a text has the form of an access, signed or not."""
    return len(text) <= LONGEST and _TEXT.fullmatch(text) is not None


def _mac(key: bytes, said: str) -> str:
    return base64.urlsafe_b64encode(hmac.new(key, said.encode(), hashlib.sha256).digest()).rstrip(b"=").decode()
