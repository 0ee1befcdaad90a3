"""`here`: a coding agent, or any program, on the current folder. This module declares the options; see `start`."""

from __future__ import annotations

from typing import Annotated

import typer

from carrel.cli.here.words import HereOptions


def here(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="PROGRAM", help="A program and its arguments. Default: a shell.")
    ] = None,
    *,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What the program may reach, by name. Default: the profile of the program."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="Allow one more host. Repeatable.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the agent: it has a home directory of its own. Default: PROGRAM."),
    ] = None,
    unprotect: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="Let the program change a protected path. Repeatable.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="NAME[=VALUE]", help="Pass a variable to the program. Repeatable."),
    ] = None,
    host_file: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Show a file or directory of this machine, read-only. Repeatable."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Use also a folder that holds the home directory.")] = False,
    no_questions: Annotated[
        bool, typer.Option("--no-questions", help="Ask nothing here: questions wait for `carrel approve`.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, to stderr.")] = False,
    image: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run a program of this OCI image, with its tools, not this machine's."),
    ] = None,
) -> None:
    """Run a program on the current folder, in a sandbox that shows nothing else of this machine but its tools.

    Needs no server: one is started if none runs, and ends with the last user. Terminal, signals, pipes and exit code
    pass through. `carrel diff` shows what has changed, `carrel undo` takes it back, `carrel log` lists the runs.

    \b
    carrel here -- claude
    carrel here --allow-host example.com -- npm test
    carrel here
    git diff | carrel here -- codex exec 'review this'
    """
    from carrel.cli.here.start import start

    raise typer.Exit(
        start(
            HereOptions(
                command=tuple(command or ()),
                profile=profile,
                name=name,
                allow_hosts=tuple(allow_host or ()),
                unprotect=tuple(unprotect or ()),
                env=tuple(env or ()),
                host_files=tuple(host_file or ()),
                yes=yes,
                no_questions=no_questions,
                json=json,
                image=image,
            )
        )
    )
