"""`job`: work that the server keeps and brings to an end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.failures import TIMED_OUT, note
from carrel.cli.printing import age, plain, print_items, print_json, print_line, size
from carrel.errors import InvalidRequest

if TYPE_CHECKING:
    from carrel.client import Job
    from carrel.models import JobInfo

app = typer.Typer(
    no_args_is_help=True, help="Jobs: work that goes on without you, and reaches an end that you can see."
)

Id = Annotated[str, typer.Argument(metavar="JOB", help="The id of a job; `carrel job ls` shows them.")]
_WIDTH = 48


@options.takes_sandbox_options
def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="One word is run by a shell; several are a program and its arguments."),
    ],
    *,
    sandbox: options.SandboxOptions,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            "-c",
            help="Run in the workspace of this context. Default: a new one.",
            autocompletion=options.contexts,
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Print the output, and exit with the exit code of the job.")
    ] = False,
    cwd: Annotated[str | None, typer.Option("--cwd", help="Directory to run in, relative to the workspace.")] = None,
    env: options.Env = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=SECRET]", help="A variable with a secret of the context or template. Repeatable."),
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH[=LOCAL]", help="A file that is written to the workspace first. Repeatable."),
    ] = None,
    artifact: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Files that are the result, such as 'out/*'. Repeatable."),
    ] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="How long an attempt may run.")] = None,
    heartbeat: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End it when it says nothing for so long.")
    ] = None,
    retries: Annotated[int | None, typer.Option(min=0, help="Run it again after a failure, so often.")] = None,
    priority: Annotated[int | None, typer.Option(min=-100, max=100, help="Higher starts first.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Repeatable.")] = None,
    snapshot: Annotated[bool, typer.Option("--snapshot", help="Take a snapshot of the workspace at the end.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the new workspace at the end.")] = False,
    json: options.Json = False,
) -> None:
    """Submit a job. It goes on when you log out, and when the server is restarted.

    Options come before the command: everything after its first word belongs to it.

    \b
    carrel job run -- make report
    carrel job run --wait --context conversation-42 'pytest -q'
    carrel job run --artifact 'out/*' --file data.csv -- python3 report.py data.csv
    """
    timeouts = {name: value for name, value in (("run_s", timeout), ("heartbeat_s", heartbeat)) if value is not None}
    if sandbox.start_in is not None:
        raise typer.BadParameter("a job starts in its workspace")
    with connected() as client:
        job = client.jobs.submit(
            options.program(command),
            context=context,
            cwd=cwd,
            env=options.environment(env) or None,
            secret_variables=_pairs([each if "=" in each else f"{each}={each}" for each in secret or ()], "--secret")
            or None,
            files=dict(map(_file, file or [])) or None,
            artifacts=artifact,
            image=sandbox.image,
            template=sandbox.template,
            provider=sandbox.provider,
            trust=sandbox.trust,
            network=sandbox.network,
            limits=sandbox.limits or None,
            timeouts=timeouts or None,
            retries=retries,
            priority=priority,
            labels=_pairs(label, "--label") or None,
            snapshot=snapshot or None,
            workspace="remove" if remove else None,
        )
        if not wait:
            print_json(job.seen) if json else typer.echo(job.id)
            return
        note(f"carrel: job {job.id}")
        raise typer.Exit(_attend(job, json=json))


def ls(
    context: Annotated[
        str | None, typer.Argument(help="Only of this context.", autocompletion=options.contexts)
    ] = None,
    state: Annotated[str | None, typer.Option(help="Only in this state, such as running.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many, newest first.")] = 50,
    json: options.Json = False,
) -> None:
    """List jobs, newest first.

    \b
    carrel job ls
    carrel job ls --state running
    """
    with connected() as client:
        found: list[JobInfo] = []
        for info in client.jobs.list(state=state, context=context):
            found.append(info)
            if len(found) == limit:
                break
    print_items(found, json, ["ID", "STATE", "AGE", "CONTEXT", "ATTEMPT", "EXIT", "WORK", "SAYS"], _row)
    if not found and not json:
        note("there are no jobs")


def show(job: Id, json: options.Json = False) -> None:
    """Show one job: its state, why it is in it, and what it produced.

    \b
    carrel job show JOB
    """
    with connected() as client:
        handle = client.jobs.get(job)
        artifacts = handle.artifacts() if handle.seen.artifacts else None
    if json:
        print_json(handle.seen)
        return
    info = handle.seen
    for name, value in info.model_dump(mode="json", exclude_none=True).items():
        if value not in ("", False, {}, 0) or name in {"exit_code", "attempt"}:
            typer.echo(f"{name + ':':<18} {plain(str(value))}")
    for each in artifacts.items if artifacts else ():
        typer.echo(f"{'artifact:':<18} {plain(each.path)}  {size(each.size)}")


def logs(
    job: Id,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    offset: Annotated[int, typer.Option(min=0, help="Start at this byte of the output.")] = 0,
    json: options.Json = False,
) -> None:
    """Print the output of a job. It is kept when the sandbox is gone.

    \b
    carrel job logs JOB
    carrel job logs -f JOB
    """
    with connected() as client:
        _print_output(client.jobs.get(job), follow=follow, offset=offset, json=json)


def cancel(job: Id, json: options.Json = False) -> None:
    """End a job with all its processes, and wait until it has ended.

    \b
    carrel job cancel JOB
    """
    with connected() as client:
        handle = client.jobs.get(job)
        handle.cancel()
        info = handle.wait()
    print_json(info) if json else typer.echo(info.state)


def retry(job: Id, json: options.Json = False) -> None:
    """Submit a job again that has ended, and print the id of the new one.

    \b
    carrel job retry JOB
    """
    with connected() as client:
        new = client.jobs.get(job).retry()
    print_json(new.seen) if json else typer.echo(new.id)


def wait(
    job: Id,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", min=0, help="At most so long.")] = None,
    json: options.Json = False,
) -> None:
    """Wait until a job has ended, and exit with its exit code; with 124 if the time is over before.

    \b
    carrel job wait JOB
    """
    with connected() as client:
        info = client.jobs.get(job).wait(timeout)
    print_json(info) if json else typer.echo(_said(info))
    raise typer.Exit(_code(info))


def _attend(job: Job, *, json: bool) -> int:
    """Print the output of a job until its end, and return its exit code. Ctrl-C leaves it running."""
    try:
        if not json:
            _print_output(job, follow=True, offset=0, json=False)
        info = job.wait()
    except KeyboardInterrupt:
        note(f"carrel: job {job.id} goes on; `carrel job logs -f {job.id}` follows it")
        raise
    if json:
        print_json(info)
    elif info.exit_code != 0:
        note(f"carrel: {_said(info)}")
    return _code(info)


def _print_output(job: Job, *, follow: bool, offset: int, json: bool) -> None:
    from carrel.cli.streams import write_out

    for chunk in job.logs(follow=follow, offset=offset):
        if json:
            print_line({"stream": chunk.stream, "text": chunk.text, "offset": chunk.offset})
        else:
            write_out(chunk.stream, chunk.data)


def _said(info: JobInfo) -> str:
    return plain(f"{info.state}: {info.reason}" if info.reason else info.state)


def _code(info: JobInfo) -> int:
    from carrel.cli.streams import signal_code

    if info.state == "succeeded":
        return 0
    if info.state == "timed_out" or not info.state.terminal:
        return TIMED_OUT
    if info.signal is not None:
        return signal_code(info.signal)
    return info.exit_code or 1


def _row(info: JobInfo) -> list[str]:
    work = info.summary if len(info.summary) <= _WIDTH else f"{info.summary[: _WIDTH - 1]}…"
    says = info.progress if info.progress and not info.state.terminal else info.reason
    exit = info.signal or ("-" if info.exit_code is None else str(info.exit_code))
    return [
        info.id,
        f"{info.state} ({info.phase})" if info.phase and info.phase != "running" else info.state,
        age(info.created_at),
        "(own)" if info.own_workspace else info.context_id,
        f"{info.attempt}/{info.retries + 1}",
        exit,
        work,
        says or "",
    ]


def _file(word: str) -> tuple[str, bytes]:
    """Parse `PATH=LOCAL`; `PATH` alone is the same path here."""
    path, equals, local = word.partition("=")
    try:
        return path, Path(local if equals else path).read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{local or path} cannot be read: {error.strerror}", field="--file") from None


def _pairs(given: list[str] | None, option: str) -> dict[str, str]:
    for word in given or []:
        if "=" not in word:
            raise typer.BadParameter(f"'{word}' is not NAME=VALUE", param_hint=option)
    return {word.partition("=")[0]: word.partition("=")[2] for word in given or []}


app.command("run", context_settings={"allow_interspersed_args": False})(run)
for _function in (ls, show, logs, cancel, retry, wait):
    app.command()(_function)
