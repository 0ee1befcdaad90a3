"""`envs`: list, build, attach and remove the Python environments that sandboxes share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import attached, connected
from carrel.cli.failures import note
from carrel.cli.printing import age, plain, print_done, print_items, print_json, size

if TYPE_CHECKING:
    from carrel.models import EnvironmentInfo

app = typer.Typer(help="Python environments: built once, shared by sandboxes.", add_completion=False)

Requirements = Annotated[list[str], typer.Argument(metavar="REQUIREMENT", help="Packages, such as 'pandas>=2'.")]
Python = Annotated[str | None, typer.Option("--python", "-p", metavar="VERSION", help="Python version, such as 3.11.")]
Index = Annotated[
    str | None, typer.Option("--index", metavar="NAME", help="The package registry to use, as the policy names it.")
]


@app.callback(invoke_without_command=True)
def envs(context: typer.Context, json: options.Json = False) -> None:
    """List the environments of the server, the last used first.

    \b
    carrel envs
    carrel envs build pandas matplotlib --name data-analysis
    """
    if context.invoked_subcommand is None:
        ls(json)


@app.command("ls")
def ls(json: options.Json = False) -> None:
    """List the environments of the server, the last used first.

    \b
    carrel envs ls
    """
    with connected() as client:
        found = client.envs.list()
    print_items(found, json, ["LABEL", "NAME", "PYTHON", "PACKAGES", "SIZE", "CREATED", "USED"], _row)


def _row(info: EnvironmentInfo) -> list[str]:
    labels = " ".join([*info.labels, *(f"(template {name})" for name in info.templates)]) or "-"
    used = age(info.last_used_at) + (" in use" if info.in_use else "")
    return [labels, info.name, info.python, _packages(info), size(info.size), age(info.created_at), used]


@app.command("build")
def build(
    requirements: Requirements,
    name: Annotated[str | None, typer.Option("--name", "-n", help="A label, such as data-analysis.")] = None,
    python: Python = None,
    index: Index = None,
    json: options.Json = False,
) -> None:
    """Build an environment, unless one with the same packages exists. Prints its path in sandboxes.

    \b
    carrel envs build pandas 'numpy<2' --name data-analysis
    """
    with connected() as client:
        info = client.envs.build(requirements, name=name, python=python, index=index, progress=None if json else _note)
    _print_path(info, json)


@app.command("attach")
def attach(
    context: options.Context,
    env: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ENV|REQUIREMENT", help="A name, a label, or packages. Default: the packages of the template."
        ),
    ] = None,
    requirements: Annotated[
        bool, typer.Option("--packages", "-r", help="The arguments are packages, not the name of an environment.")
    ] = False,
    python: Python = None,
    index: Index = None,
    venv: Annotated[bool, typer.Option("--venv", help="Also create /workspace/.venv on top of it.")] = False,
    json: options.Json = False,
) -> None:
    """Attach an environment to the running sandbox of a context.

    \b
    carrel envs attach conversation-42 data-analysis
    carrel envs attach conversation-42 -r pandas matplotlib
    carrel envs attach conversation-42
    """
    with attached(context) as box:
        chosen = env and (env if requirements or len(env) > 1 else env[0])
        info = box.envs.attach(chosen, python=python, index=index, venv=venv, progress=None if json else _note)
    _print_path(info, json)


@app.command("rm")
def rm(
    name: Annotated[str, typer.Argument(metavar="ENV", help="A name or a label.")], json: options.Json = False
) -> None:
    """Remove an environment that no session uses.

    \b
    carrel envs rm data-analysis
    """
    with connected() as client:
        client.envs.delete(name)
    if json:
        print_done(removed=name)


def _print_path(info: EnvironmentInfo, json: bool) -> None:
    if json:
        print_json(info)
    else:
        print(info.path)


def _note(line: str) -> None:
    note(plain(line))


def _packages(info: EnvironmentInfo) -> str:
    asked = " ".join(info.requirements)
    more = len(info.packages) - len(info.requirements)
    return f"{asked} (+{more})" if more > 0 else asked
