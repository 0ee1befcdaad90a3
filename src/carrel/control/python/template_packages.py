"""The packages of a template: an environment that is built once, at first use, and that the Python of its sandboxes
always has.

The operator chose them, so no approval is needed; but the package index of the proxy blocks what the policy of a
context blocks. The supervisor makes them usable inside.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from carrel.control.operations.caller import OWN_WORK, Caller
from carrel.control.operations.operations import OwnOperations
from carrel.control.python.environment_checks import Requester, requirements_of
from carrel.control.python.environments import Environments, Say
from carrel.control.sessions.live import LiveSandbox
from carrel.control.sessions.templates import Templates
from carrel.errors import CarrelError, Conflict, InvalidRequest, NotFound, PlatformError
from carrel.isolation.launchers import PLACE
from carrel.models import CommandRequest, EnvironmentInfo, EnvironmentList, EnvironmentRequest, TemplateList
from carrel.policy.documents.recipes import Recipe
from carrel.providers.base import Capability
from carrel.store.environments import EnvironmentRecord

log = logging.getLogger("carrel.environments")

WAIT_S = 20.0
"""How long a command waits for packages that are being built; callers have deadlines of their own."""
PAUSE_S = 10.0
"""How long after a failure the packages are not tried again."""

DELIVERY_S = 30.0


class TemplatePackages:
    """Gives sandboxes the packages of their templates."""

    def __init__(self, templates: Templates, environments: Environments, operations: OwnOperations):
        self._templates = templates
        self._environments = environments
        self._operations = operations

    async def ready(self, box: LiveSandbox, say: Say | None = None) -> None:
        """Give a sandbox the packages of its template. Waits while they are being built; `PlatformError` with the
        reason on failure.
        """
        if box.packages is not None:
            return
        if box.refused is not None and time.monotonic() < box.refused[1]:
            raise box.refused[0].with_traceback(None)
        await self.attach(box, say)

    async def wait_briefly(self, box: LiveSandbox) -> None:
        """Wait a short time for packages that are being built: a command may be Python too. `Conflict` when they take
        longer; when they cannot be built at all, commands run without them.
        """
        if box.packages is not None:
            return
        said = ""

        def hear(line: str) -> None:
            nonlocal said
            said = f": {line}"

        refused = box.refused
        try:
            async with asyncio.timeout(WAIT_S):
                await self.ready(box, hear)
        except TimeoutError:
            raise Conflict(
                f"the packages of the template '{box.record.template}' are still being built{said[:300]}",
                field="template",
                hint="ask again in a moment",
                retry=True,
            ) from None
        except PlatformError as error:
            if box.refused is not refused:
                log.warning("sandbox %s goes on without the packages of its template: %s", box.record.id, error)

    async def attach(self, box: LiveSandbox, say: Say | None = None) -> EnvironmentRecord | None:
        """Attach the packages even if they are attached already; return the environment, or None when the template has
        none.
        """
        recipe = await self._recipe(box)
        if recipe is None:
            box.packages = ""
            return None
        try:
            return await self._attach(box, recipe, say)
        except CarrelError as error:
            failure = PlatformError(
                f"the packages of the template '{box.record.template}' are not available: {error.detail}",
                field="template",
                hint="ask again in a moment, or let the operator look at the template and the policy",
            )
            box.refused = (failure, time.monotonic() + PAUSE_S)
            raise failure from None

    async def info(self, caller: Caller, box: LiveSandbox, say: Say | None = None) -> EnvironmentInfo:
        """Describe the environment of the template of a sandbox; `NotFound` when there is none."""
        record = await self.attach(box, say)
        if record is None:
            raise NotFound("the template of this sandbox has no packages", field="template", hint="name an environment")
        return self._environments.info(caller, record)

    async def templates(self) -> TemplateList:
        """List every template; one with packages says whether they are built."""
        found = await self._templates.list()
        built = {tuple(each.requirements) for each in self._environments.records()}
        return TemplateList(
            items=[
                each.model_copy(update={"built": _asked(each.packages) in built}) if each.packages else each
                for each in found.items
            ]
        )

    async def environments(self, caller: Caller) -> EnvironmentList:
        """List every environment, with the templates that need exactly its packages."""
        found = await self._environments.list(caller)
        wanted: dict[tuple[str, ...], list[str]] = {}
        for each in (await self._templates.list()).items:
            if each.packages:
                wanted.setdefault(_asked(each.packages), []).append(each.name)
        return EnvironmentList(
            items=[
                each.model_copy(update={"templates": wanted.get(tuple(each.requirements), [])}) for each in found.items
            ]
        )

    async def _recipe(self, box: LiveSandbox) -> Recipe | None:
        record = box.record
        if record.template is None or record.acts_for is not None:  # sandboxes of carrel need no packages
            return None
        await self._templates.layer(record.template)  # raises when the template is gone
        recipe = (await self._templates.get(record.template)).recipe
        return recipe if recipe.packages else None

    async def _attach(self, box: LiveSandbox, recipe: Recipe, say: Say | None) -> EnvironmentRecord:
        box.provider.require(Capability.ENVIRONMENTS)
        record, asker = box.record, Requester.of(box.record)
        wanted = EnvironmentRequest(requirements=recipe.packages, python=recipe.python)
        box.in_flight += 1  # a sandbox that waits for its packages is not idle
        try:
            found = await self._environments.hold(
                lambda: self._environments.ensure(wanted, asker, say, as_before=True), record.owner
            )
            if box.packages != found.name:
                await box.connection.put_packages(
                    found.name, found.imports if recipe.imports is None else recipe.imports
                )
                make = CommandRequest(command=[f"{PLACE}/carrel-venv", "--there"], timeout=DELIVERY_S)
                await self._operations.run_command(OWN_WORK, record.id, make)
                box.packages, box.refused = found.name, None
            return found
        finally:
            box.in_flight -= 1


def _asked(packages: Sequence[str]) -> tuple[str, ...]:
    try:
        return requirements_of(packages)
    except InvalidRequest:
        return ()
