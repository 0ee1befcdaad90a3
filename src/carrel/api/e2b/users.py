"""The users that E2B's SDKs name. Every program of a sandbox runs as one user here."""

from __future__ import annotations

import base64
import binascii

from starlette.requests import Request

from carrel.api.e2b.answers import Failure

USER = "user"
_SAME = frozenset({"", USER, "agent"})


def user_of(request: Request) -> str | None:
    """Return the user that a call names; None if it names none."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(given, validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError, ValueError):
        raise Failure(401, "the user in `Authorization` is not readable") from None


def require_user(user: str | None) -> None:
    """Refuse a user that this sandbox does not have."""
    if user is None or user in _SAME:
        return
    if user == "root":
        raise Failure(
            403,
            "no program of a sandbox of this server is root: leave `user` out, and put packages into a template",
        )
    raise Failure(401, f"the sandbox has no user '{user[:64]}': leave `user` out")
