"""Connects commands to the server: the SDK's client, sandboxes by name, approvals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeVar

from carrel.cli.failures import note
from carrel.cli.progress import pulling
from carrel.errors import ApprovalNeeded, NotFound

if TYPE_CHECKING:
    from carrel.cli.options import SandboxOptions
    from carrel.client import AsyncSandbox, Client, Sandbox

Box = TypeVar("Box", "AsyncSandbox", "Sandbox")


@contextmanager
def connected() -> Iterator[Client]:
    """Open a client of the server, with the administrator's token if this user can read it."""
    from carrel.client import Client

    with Client(administrator=True) as client:
        yield client


@contextmanager
def connected_to_each() -> Iterator[list[Client]]:
    """Open a client of every server of this user: the usual one, and that of `carrel here`. A variable names one."""
    from carrel.client import Client
    from carrel.client.locate import local_servers

    named = os.environ.get("CARREL_URL") or os.environ.get("CARREL_TOKEN")
    found = [] if named else local_servers(administrator=True)
    with ExitStack() as stack:
        clients = [Client(each.url, each.token) for each in found] or [Client(administrator=True)]
        yield [stack.enter_context(each) for each in clients]


@contextmanager
def attached(name: str) -> Iterator[Sandbox]:
    """Find a sandbox by context id or sandbox id. A stopped one is not resumed."""
    with connected() as client:
        yield client.attach(client.find(name))


def find_or_resume(client: Client, name: str) -> Sandbox:
    """Find a sandbox by name and resume it if it is stopped. Raises `NotFound`."""
    from carrel.models import State

    info = client.find(name)
    if info.state is State.RUNNING or info.context_id is None:
        return client.attach(info)
    return client.sandbox(info.context_id)


def find_or_create(client: Client, name: str, sandbox: SandboxOptions) -> Sandbox:
    """Find a sandbox by name, or create it. A running one must match the options."""
    try:
        info = client.find(name)
    except NotFound:
        with pulling() as progress:
            box = client.sandbox(name, **sandbox.arguments(), progress=progress)
        note_created(name)
        return box
    if info.context_id is None or (info.state == "running" and not sandbox):
        return client.attach(info)
    with pulling() as progress:
        return client.sandbox(info.context_id, **sandbox.arguments(), progress=progress)


def note_created(name: str) -> None:
    """Tell the user that a sandbox was created: the name may be a typing error."""
    note(f"carrel: created a sandbox for '{name}'; there was none")


def with_approval(box: Box, approval: str | None, wait: float | None) -> Box:
    """Return a view of a sandbox that uses an approval, or that waits so long for one."""
    view: Box = box if approval is None else box.with_approval(approval)
    return view if wait is None else view.waiting(wait)


@contextmanager
def explaining_approval() -> Iterator[None]:
    """Add to `ApprovalNeeded` how to continue with the command's --approval option."""
    try:
        yield
    except ApprovalNeeded as error:
        if error.approval is not None:
            error.hint = (
                f"another person allows it with `carrel approve {error.approval}`; "
                f"then repeat this command with `--approval {error.approval}`"
            )
        raise
