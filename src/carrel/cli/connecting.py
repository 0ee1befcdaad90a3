"""Opens the client of the SDK for the commands, finds sandboxes by name, and says how to go on after an approval."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from carrel.cli.failures import note
from carrel.errors import ApprovalNeeded, NotFound

if TYPE_CHECKING:
    from carrel.cli.options import Wanted
    from carrel.client import AsyncSandbox, Client, Sandbox

Box = TypeVar("Box", "AsyncSandbox", "Sandbox")


@contextmanager
def connected() -> Iterator[Client]:
    """A client of the server, with the administrator's token where that can be read."""
    from carrel.client import Client

    with Client(administrator=True) as client:
        yield client


@contextmanager
def attached(name: str) -> Iterator[Sandbox]:
    """The sandbox of a context, or the one with this id, as it is: a stopped one is not resumed."""
    with connected() as client:
        yield client.attach(client.find(name))


def existing(client: Client, name: str) -> Sandbox:
    """The sandbox of that name; a stopped one is resumed, a missing one is not made."""
    from carrel.models import State

    info = client.find(name)
    if info.state is State.RUNNING or info.context_id is None:
        return client.attach(info)
    return client.sandbox(info.context_id)


def made(client: Client, name: str, wanted: Wanted) -> Sandbox:
    """The sandbox of that name, made when there is none. What runs must be as it is wanted."""
    try:
        info = client.find(name)
    except NotFound:
        box = client.sandbox(name, **wanted.arguments())
        tell_new(name)
        return box
    if info.context_id is None or (info.state == "running" and not wanted):
        return client.attach(info)
    return client.sandbox(info.context_id, **wanted.arguments())


def tell_new(name: str) -> None:
    """Say that a sandbox was made for a context that had none: the name may be a slip."""
    note(f"carrel: made a sandbox for '{name}'; there was none")


def attempt(box: Box, approval: str | None, wait: float | None) -> Box:
    """The same sandbox for what was approved, or for what waits so long for a person."""
    view: Box = box if approval is None else box.with_approval(approval)
    return view if wait is None else view.waiting(wait)


@contextmanager
def once_approved() -> Iterator[None]:
    """Say how to go on from `ApprovalNeeded` with the option of the command."""
    try:
        yield
    except ApprovalNeeded as error:
        if error.approval is not None:
            error.hint = (
                f"somebody else lets it with `carrel approve {error.approval}`; "
                f"then the same again with `--approval {error.approval}`"
            )
        raise
