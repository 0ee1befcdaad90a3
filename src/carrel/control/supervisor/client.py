"""Requests that the control plane makes to a supervisor on its own account; operations of callers are in
`control.operations` and `control.python`.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence

from carrel.control.supervisor.connection import SupervisorConnection
from carrel.models.operations import SMALL

UPKEEP_S = 30.0
VOID_S = 5.0


class SupervisorClient(SupervisorConnection):
    """The connection to one supervisor, with the routes of its upkeep."""

    async def put_secrets(self, values: Mapping[str, bytes]) -> None:
        """Replace the secrets inside the sandbox."""
        secrets = {name: b64encode(value).decode() for name, value in values.items()}
        await self.request_json("PUT", "/secrets", {"secrets": secrets}, deadline=UPKEEP_S, max_bytes=SMALL)

    async def put_packages(self, environment: str, imports: Sequence[str]) -> None:
        """Say which environment the sandbox's Python has, and what to import ahead."""
        told = {"env": environment, "imports": list(imports)}
        await self.request_json("PUT", "/python/packages", told, deadline=UPKEEP_S, max_bytes=SMALL)

    async def void_run(self, run: str) -> bool | None:
        """Ask whether a run was begun; a supervisor that says no refuses it from now on. None: it does not say."""
        answer = await self.request_json("POST", f"/runs/{run}/void", deadline=VOID_S, max_bytes=1024)
        begun = answer.get("begun")
        return begun if isinstance(begun, bool) else None
