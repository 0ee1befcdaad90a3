"""Options that several commands share, and how their values are parsed."""

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
    """Complete context names. Prints no error, as shell completion must not."""
    try:
        from carrel.client import Client
        from carrel.models import State

        with Client(administrator=True, timeout=1) as client:
            live = [info for info in client.sandboxes() if info.state is not State.TERMINATED]
        return [name for info in live if (name := info.context_id or info.id).startswith(incomplete)]
    except Exception:
        return []


def networks(incomplete: str) -> list[str]:
    """Complete network names."""
    from carrel.models import Network as Known

    return [name.value for name in Known if name.value.startswith(incomplete)]


Context = Annotated[
    str, typer.Argument(metavar="CONTEXT", help="A context id or a sandbox id.", autocompletion=contexts)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Provider = Annotated[
    str | None,
    typer.Option(help="What runs the sandbox: auto, namespace, …; process does not isolate and needs --trust high."),
]
Trust = Annotated[str | None, typer.Option(help="How much the code is trusted: high, medium or low.")]
Template = Annotated[
    str | None, typer.Option("--template", metavar="NAME", help="A template; `carrel templates` lists them.")
]
Image = Annotated[
    str | None,
    typer.Option(
        "--image",
        metavar="NAME",
        help="An OCI image that the sandbox runs from, such as debian:12. Pulled if it is missing.",
    ),
]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory limit of the sandbox, such as 512m or 2g.")]
Cpus = Annotated[float | None, typer.Option(help="CPU cores, such as 0.5 or 2.")]
Processes = Annotated[int | None, typer.Option(help="Maximum number of processes and threads.")]
Disk = Annotated[str | None, typer.Option(metavar="SIZE", help="Size limit of the workspace, such as 512m or 2g.")]
Lifetime = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="End the sandbox this long after its start, whatever runs in it."),
]
Network = Annotated[
    str | None,
    typer.Option(help="Network access: none, allowlist, internet, bridge or host.", autocompletion=networks),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Kill the command and its children after this time; 0 means never. Default: the sandbox's.",
    ),
]
Interactive = Annotated[
    bool, typer.Option("--interactive", "-i", help="Send keyboard input to the command. Piped input is always sent.")
]
Tty = Annotated[bool, typer.Option("--tty", "-t", help="Give the command a terminal and send it every key.")]
Approval = Annotated[
    str | None, typer.Option(metavar="ID", help="Use this approval: the same operation as was approved runs once.")
]
Wait = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", min=0, max=600, help="If a person has to approve, wait up to this long for them."),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        "-e",
        metavar="NAME=VALUE",
        help="An environment variable; NAME alone takes its value here. Repeatable.",
    ),
]


def megabytes(text: str | None, option: str) -> int | None:
    """Parse a size such as `512`, `512m` or `2g` into megabytes."""
    if text is None:
        return None
    found = _SIZE.match(text.strip())
    if not found:
        raise typer.BadParameter(f"'{text}' is not a size such as 512m or 2g", param_hint=option)
    return int(found[1]) * (1024 if found[2].lower().startswith("g") else 1)


def environment(given: list[str] | None) -> dict[str, str]:
    """Parse `NAME=VALUE` words; `NAME` alone takes its value from this process."""
    env: dict[str, str] = {}
    for word in given or []:
        name, equals, value = word.partition("=")
        if not name:
            raise typer.BadParameter(f"'{word}' has no name before '='", param_hint="--env")
        if not equals:
            if name not in os.environ:
                raise typer.BadParameter(f"{name} is not set here", param_hint="--env")
            value = os.environ[name]
        env[name] = value
    return env


def confirm(question: str) -> None:
    """Ask the person at the terminal; exit unless the answer is yes."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask on; give --yes to confirm", param_hint="--yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def program_words(words: list[str]) -> list[str]:
    """Remove the `--` in front of a program, which the parser leaves when it comes after a context."""
    if words[0].startswith("-") and words[0] != "--":
        raise typer.BadParameter(f"'{words[0]}' is not a program; options come first", param_hint="COMMAND")
    words = words[1:] if words[0] == "--" else words
    if not words:
        raise typer.BadParameter("there is no command after --", param_hint="COMMAND")
    return words


def program(words: list[str]) -> str | list[str]:
    """Return one word as shell text, several as a program with its arguments."""
    words = program_words(words)
    return words[0] if len(words) == 1 else words


@dataclass(frozen=True)
class SandboxOptions:
    """The options of a sandbox that a command may create."""

    image: str | None = None
    template: str | None = None
    provider: str | None = None
    trust: str | None = None
    network: str | None = None
    limits: dict[str, float] = field(default_factory=dict)
    start_in: str | None = None

    def __bool__(self) -> bool:
        """Whether any option was given."""
        return self != SandboxOptions()

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for `Client.sandbox`."""
        return {**vars(self), "limits": self.limits or None}


def _sandbox_options(
    image: Image = None,
    template: Template = None,
    provider: Provider = None,
    trust: Trust = None,
    network: Network = None,
    memory: Memory = None,
    cpus: Cpus = None,
    processes: Processes = None,
    disk: Disk = None,
    lifetime: Lifetime = None,
) -> SandboxOptions:
    limits: dict[str, float | None] = {
        "memory_mb": megabytes(memory, "--memory"),
        "cpus": cpus,
        "processes": processes,
        "disk_mb": megabytes(disk, "--disk"),
        "lifetime_s": lifetime,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    return SandboxOptions(image, template, provider, trust, network, given)


def takes_sandbox_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a new sandbox to a command, which gets them as `sandbox`."""
    own = inspect.signature(command, eval_str=True)
    added = inspect.signature(_sandbox_options, eval_str=True).parameters

    @functools.wraps(command)
    def called(**given: Any) -> None:
        command(sandbox=_sandbox_options(**{name: given.pop(name) for name in added}), **given)

    kept = [each for each in own.parameters.values() if each.name != "sandbox"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [each.replace(kind=keyword) for each in added.values()]
    called.__signature__ = own.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    return called
