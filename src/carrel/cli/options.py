"""Options that several commands share, and the reading of their values."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

_SIZE = re.compile(r"^(\d+)\s*(|m|mb|mib|g|gb|gib)$", re.IGNORECASE)


def contexts(incomplete: str) -> list[str]:
    """Names for shell completion; silent about every failure, as completion must be."""
    try:
        from carrel.client import Client
        from carrel.models import State

        with Client(administrator=True, timeout=1) as client:
            live = [info for info in client.sandboxes() if info.state is not State.TERMINATED]
        return [name for info in live if (name := info.context_id or info.id).startswith(incomplete)]
    except Exception:
        return []


def networks(incomplete: str) -> list[str]:
    """The networks there are, for shell completion."""
    from carrel.models import Network as Known

    return [name.value for name in Known if name.value.startswith(incomplete)]


Context = Annotated[
    str, typer.Argument(metavar="CONTEXT", help="A context id, or a sandbox id.", autocompletion=contexts)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Provider = Annotated[
    str | None,
    typer.Option(help="Where it runs: auto, namespace, …; process isolates nothing and needs --trust high."),
]
Trust = Annotated[str | None, typer.Option(help="How far the code is trusted: high, medium or low.")]
Template = Annotated[
    str | None, typer.Option("--template", metavar="NAME", help="A recipe that `carrel templates` lists.")
]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of all its processes: 512m, 2g.")]
Cpus = Annotated[float | None, typer.Option(help="CPU cores.")]
Processes = Annotated[int | None, typer.Option(help="Processes and threads.")]
Disk = Annotated[str | None, typer.Option(metavar="SIZE", help="Size of its workspace: 512m, 2g.")]
Network = Annotated[
    str | None,
    typer.Option(help="What it can reach: none, allowlist, internet, bridge or host.", autocompletion=networks),
]
Timeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Everything it started dies then; 0: never. Without, as the sandbox has it."),
]
Interactive = Annotated[
    bool, typer.Option("--interactive", "-i", help="Pass on what is typed; input that is no terminal always is.")
]
Tty = Annotated[bool, typer.Option("--tty", "-t", help="Give the command a terminal, and every key to it.")]
Approval = Annotated[
    str | None, typer.Option(metavar="ID", help="Run what was approved; it runs once, exactly as it was asked for.")
]
Wait = Annotated[
    float | None, typer.Option(metavar="SECONDS", min=0, max=600, help="Wait so long if a person has to decide.")
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="NAME=VALUE", help="Repeatable; NAME alone is passed on."),
]


def megabytes(text: str | None, option: str) -> int | None:
    """`512`, `512m`, `2g` in megabytes."""
    if text is None:
        return None
    found = _SIZE.match(text.strip())
    if not found:
        raise typer.BadParameter(f"'{text}' is not a size such as 512m or 2g", param_hint=option)
    return int(found[1]) * (1024 if found[2].lower().startswith("g") else 1)


def environment(given: list[str] | None) -> dict[str, str]:
    """`NAME=VALUE` words as a mapping; `NAME` alone takes the value it has here."""
    env: dict[str, str] = {}
    for word in given or []:
        name, equals, value = word.partition("=")
        if not name:
            raise typer.BadParameter(f"'{word}' has no name before the equals sign", param_hint="--env")
        if not equals:
            if name not in os.environ:
                raise typer.BadParameter(f"{name} is not set here", param_hint="--env")
            value = os.environ[name]
        env[name] = value
    return env


def confirm(question: str) -> None:
    """Ask the person at the terminal; exit unless the answer is yes."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("nobody is here to confirm it; give --yes if it is meant", param_hint="--yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def apart(words: list[str]) -> list[str]:
    """A program and its arguments, without the dashes that set them apart from our own options: the parser leaves those
    that come after a context.
    """
    if words[0].startswith("-") and words[0] != "--":
        raise typer.BadParameter(f"there is no program '{words[0]}'; options come first", param_hint="COMMAND")
    words = words[1:] if words[0] == "--" else words
    if not words:
        raise typer.BadParameter("there is no command after --", param_hint="COMMAND")
    return words


def program(words: list[str]) -> str | list[str]:
    """One word is shell text, several are a program with its arguments."""
    words = apart(words)
    return words[0] if len(words) == 1 else words


@dataclass(frozen=True)
class Wanted:
    """What a sandbox is asked to be, should one be made."""

    template: str | None = None
    provider: str | None = None
    trust: str | None = None
    network: str | None = None
    limits: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether anything is asked for."""
        return self != Wanted()

    def arguments(self) -> dict[str, Any]:
        """The arguments of `Client.sandbox`."""
        return {**vars(self), "limits": self.limits or None}


def _wanted(
    template: Template = None,
    provider: Provider = None,
    trust: Trust = None,
    network: Network = None,
    memory: Memory = None,
    cpus: Cpus = None,
    processes: Processes = None,
    disk: Disk = None,
) -> Wanted:
    """The options of every command that may make a sandbox."""
    limits: dict[str, float | None] = {
        "memory_mb": megabytes(memory, "--memory"),
        "cpus": cpus,
        "processes": processes,
        "disk_mb": megabytes(disk, "--disk"),
    }
    given = {name: value for name, value in limits.items() if value is not None}
    return Wanted(template, provider, trust, network, given)


def makes_sandbox(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of the sandbox that it may make; it gets what was chosen as `wanted`."""
    own = inspect.signature(command, eval_str=True)
    added = inspect.signature(_wanted, eval_str=True).parameters

    @functools.wraps(command)
    def called(**given: Any) -> None:
        command(wanted=_wanted(**{name: given.pop(name) for name in added}), **given)

    kept = [each for each in own.parameters.values() if each.name != "wanted"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [each.replace(kind=keyword) for each in added.values()]
    called.__signature__ = own.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    return called
