"""Secrets as files that the agent can read and nobody in the sandbox can change.

They are in a memory file system, which the agent sees through a read-only mount. The supervisor writes through the
descriptor of a second mount that is nowhere in the tree. A set of secrets is one directory; programs open links into
the current set, and one rename replaces the whole set.
"""

from __future__ import annotations

import os
import re

from carrel.errors import InvalidRequest, LimitExceeded, NotFound, Unsupported
from carrel.supervisor.http import HttpRequest, HttpResponse, HttpRouter, Json, decode_base64, json_response

MOST, LARGEST, ALTOGETHER = 512, 512 * 1024, 1536 * 1024
"""Limits of a set: number of secrets, bytes of one, bytes of all, including the certificates that a sandbox trusts. The
file system has room for two sets, the old and the new.
"""

CURRENT = ".current"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")


class SandboxSecrets:
    """The secrets of one sandbox. Without a descriptor there is no safe place for secrets, so they are refused."""

    def __init__(self) -> None:
        self._directory = -1

    def configure(self, directory: int) -> None:
        """Set the descriptor of the memory file system; -1 means there is none."""
        self._directory = directory

    def routes(self, router: HttpRouter) -> None:
        router.add("PUT", "/secrets", self._put)

    async def _put(self, request: HttpRequest) -> HttpResponse:
        if self._directory < 0:
            raise Unsupported(
                "this provider has no place for secrets that other processes of the host cannot reach",
                field="secrets",
                hint="choose a provider that isolates",
            )
        return json_response({"names": self.replace(_checked(await request.json()))})

    def replace(self, values: dict[str, bytes]) -> list[str]:
        """Replace all secrets at once and return their names. A process that has an old one open can still read it."""
        fresh = f".set-{os.urandom(8).hex()}"
        try:
            self._write(fresh, values)
            os.symlink(fresh, f"{fresh}.link", dir_fd=self._directory)
            os.rename(f"{fresh}.link", CURRENT, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except BaseException:
            self._sweep(keep=self._target())
            raise
        shown = {name for name in self._names() if not name.startswith(".")}
        for name in values.keys() - shown:
            os.symlink(f"{CURRENT}/{name}", name, dir_fd=self._directory)
        for name in shown - values.keys():
            os.unlink(name, dir_fd=self._directory)
        self._sweep(keep=fresh)
        return sorted(values)

    def variable(self, name: str) -> str:
        """Return the value of a secret for a variable: text, without the end of its last line."""
        hint = "set the secret, or change the declaration"
        try:
            if self._directory < 0 or not _NAME.fullmatch(name):
                raise FileNotFoundError
            with open(os.open(f"{CURRENT}/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory), "rb") as file:
                text = file.read().decode().rstrip("\r\n")
        except FileNotFoundError:
            why = f"the secret {name[:128]} cannot be used: it is not there"
            raise NotFound(why, field="secrets", hint=hint) from None
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            why = f"the secret {name} cannot be used as a variable: it is not UTF-8 text, or has a null character"
            raise InvalidRequest(why, field="secrets", hint=hint)
        return text

    def _write(self, fresh: str, values: dict[str, bytes]) -> None:
        os.mkdir(fresh, 0o700, dir_fd=self._directory)
        folder = self._open(fresh)
        try:
            for name, value in values.items():
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with open(os.open(name, flags, 0o400, dir_fd=folder), "wb", buffering=0) as file:
                    file.write(value)
        finally:
            os.close(folder)

    def _open(self, name: str) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=self._directory)

    def _names(self) -> list[str]:
        here = self._open(".")  # the descriptor itself is of `O_PATH` and cannot be listed
        try:
            return os.listdir(here)
        finally:
            os.close(here)

    def _target(self) -> str | None:
        try:
            return os.readlink(CURRENT, dir_fd=self._directory)
        except FileNotFoundError:
            return None

    def _sweep(self, keep: str | None) -> None:
        """Remove every set but one."""
        for name in self._names():
            if not name.startswith(".set-") or name == keep:
                continue
            if name.endswith(".link"):
                os.unlink(name, dir_fd=self._directory)
                continue
            folder = self._open(name)
            try:
                for each in os.listdir(folder):
                    os.unlink(each, dir_fd=folder)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=self._directory)


def _checked(body: Json) -> dict[str, bytes]:
    given = body.get("secrets")
    if not isinstance(given, dict):
        raise InvalidRequest("'secrets' must map names to base64 text", field="secrets")
    if len(given) > MOST:
        raise LimitExceeded(f"a sandbox may have at most {MOST} secrets", field="secrets")
    values: dict[str, bytes] = {}
    for name, text in given.items():
        if not _NAME.fullmatch(name):
            raise InvalidRequest("a secret's name must be letters, digits and _.-, at most 128", field="secrets")
        values[name] = decode_base64(text, f"the value of the secret {name}", "secrets")
        if len(values[name]) > LARGEST:
            raise LimitExceeded(f"the secret {name} is larger than {LARGEST} bytes", field="secrets")
    if sum(map(len, values.values())) > ALTOGETHER:
        raise LimitExceeded(f"the secrets have more than {ALTOGETHER} bytes together", field="secrets")
    return values
