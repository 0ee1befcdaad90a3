"""`ps`, `usage`, `stop`, `resume`, `rm` and `forget`: list, measure, stop, start and delete sandboxes."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from carrel.cli import options
from carrel.cli.connecting import attached, connected
from carrel.cli.failures import note, print_error
from carrel.cli.printing import age, coloured, plain, print_json, print_table, size
from carrel.cli.progress import waiting
from carrel.errors import CarrelError, Denied, NotFound

if TYPE_CHECKING:
    from rich.text import Text

    from carrel.client import Client
    from carrel.models import SandboxInfo, WorkspaceUsage

_AT_ONCE = 16
Chosen = TypeVar("Chosen")
Result = TypeVar("Result")


def ps(
    context: Annotated[
        str | None,
        typer.Argument(
            metavar="CONTEXT", help="List the commands of this one instead.", autocompletion=options.contexts
        ),
    ] = None,
    all_states: Annotated[bool, typer.Option("--all", "-a", help="Also list terminated sandboxes.")] = False,
    json: options.Json = False,
) -> None:
    """List sandboxes, or the commands of one sandbox.

    \b
    carrel ps
    carrel ps conversation-42
    carrel ps --json | jq -r '.[].id'
    """
    if context is not None:
        _commands(context, json=json)
        return
    import asyncio

    found = asyncio.run(_sandboxes(all_states=all_states))
    if json:
        print_json([{**info.model_dump(mode="json"), "commands": count} for info, count in found])
    else:
        _show(found, files=all_states)


def _show(found: Sequence[tuple[SandboxInfo, int | None]], *, files: bool = False) -> None:
    """Print sandboxes as a table with notices below. `files` adds a column that says whether their files exist."""
    colours = {"running": "green", "error": "red", "terminated": "dim", "stopped": "dim"}
    rows: list[list[str | Text]] = []
    for info, count in found:
        where = coloured(f"{info.provider} UNSAFE", "bold red") if info.unsafe else info.provider
        state = coloured(info.state.value, colours.get(info.state.value, "yellow"))
        commands = "-" if count is None else str(count)
        rows.append(
            [
                info.context_id or "-",
                info.id,
                state,
                where,
                info.network.value,
                age(info.created_at),
                commands,
                *_resources(info),
            ]
        )
        if files:
            rows[-1].append({True: "kept", False: "-", None: "yes" if info.context_id else "-"}[info.files_kept])
    more = ["FILES"] if files else []
    used = ["COMMANDS", "CPU", "MEMORY", "PEAK"]
    print_table(["CONTEXT", "ID", "STATE", "PROVIDER", "NETWORK", "AGE", *used, *more], rows)
    for info, _ in found:
        if info.notice is not None:
            note(f"{plain(info.context_id or info.id)}: {plain(info.notice)}")


def _resources(info: SandboxInfo) -> list[str]:
    """Return the seconds of processor time, and the memory now and at its peak."""
    used = info.resources
    if used is None:
        return ["-", "-", "-"]
    cpu = "-" if used.cpu_seconds is None else f"{used.cpu_seconds:.1f}s"
    memory = ["-" if each is None else size(each) for each in (used.memory_bytes, used.memory_peak_bytes)]
    return [cpu, *memory]


async def _sandboxes(*, all_states: bool) -> list[tuple[SandboxInfo, int | None]]:
    from carrel.client import AsyncClient
    from carrel.models import State

    async with AsyncClient(administrator=True) as client:
        known = {info.id: info async for info in client.sandboxes()}
        if all_states:  # after the live ones, so that a sandbox that ends meanwhile is not missed
            known |= {info.id: info async for info in client.sandboxes(state=State.TERMINATED)}

        async def count(info: SandboxInfo) -> int | None:
            return (await client.attach(info).health()).commands_running if info.state is State.RUNNING else None

        return await _ask_each(list(known.values()), count)


async def _ask_each(
    found: list[SandboxInfo], ask: Callable[[SandboxInfo], Awaitable[Result]]
) -> list[tuple[SandboxInfo, Result | None]]:
    """Ask each sandbox, several at a time. One that does not answer gets None and does not hide the others."""
    import asyncio

    at_once = asyncio.Semaphore(_AT_ONCE)

    async def answer(info: SandboxInfo) -> Result | None:
        async with at_once:
            try:
                return await ask(info)
            except CarrelError:
                return None

    return list(zip(found, await asyncio.gather(*map(answer, found)), strict=True))


def _commands(context: str, *, json: bool) -> None:
    with attached(context) as box:
        items = box.commands.list()
    if json:
        print_json(items)
        return
    rows = []
    for item in items:
        words = item.command if isinstance(item.command, str) else " ".join(item.command)
        ended = "timed out" if item.timed_out else item.signal or f"exit {item.exit_code}"
        state = "running" if item.running else ended
        rows.append([item.id, state, age(item.started_at), size(item.output_bytes), words])
    print_table(["ID", "STATE", "AGE", "OUTPUT", "COMMAND"], rows)


def stop(
    contexts: Annotated[
        list[str],
        typer.Argument(metavar="CONTEXT", help="Context or sandbox ids.", autocompletion=options.contexts),
    ],
    json: options.Json = False,
) -> None:
    """Stop sandboxes and keep their files. The next use, or `carrel resume`, starts them again.

    \b
    carrel stop conversation-42
    carrel exec conversation-42 -- ls
    """
    with connected() as client:
        stopped = _to_each(
            ((name, name) for name in dict.fromkeys(contexts)),
            lambda name: client.attach(client.find(name)).stop(),
            ("stopping", "stopped"),
            json=json,
        )
    if json:
        print_json(stopped)
    raise typer.Exit(0 if len(stopped) == len(set(contexts)) else 1)


def resume(context: options.Context, json: options.Json = False) -> None:
    """Start a stopped sandbox again, with its files. Does nothing if it runs.

    \b
    carrel resume conversation-42
    """
    with waiting(f"resuming {context}", quiet=json), attached(context) as box:
        info = box.resume()
    if json:
        print_json(info)
    else:
        _show([(info, None)])


def usage(
    context: Annotated[
        str | None,
        typer.Argument(metavar="CONTEXT", help="Only this context.", autocompletion=options.contexts),
    ] = None,
    disk: Annotated[bool, typer.Option("--disk", help="Only the disk usage of the server.")] = False,
    json: options.Json = False,
) -> None:
    """Show size and limit of each workspace, also of terminated contexts, and the disk usage of the server.

    \b
    carrel usage
    carrel usage conversation-42 --json
    carrel usage --disk --json
    """
    import asyncio

    if disk:
        _disk(json=json)
        return
    found = asyncio.run(_usages(context))
    if json:
        known = [(info, usage.model_dump(mode="json")) for info, usage in found]
        print_json([{"id": info.id, "state": info.state.value, **shown} for info, shown in known])
        return
    rows: list[list[str | Text]] = []
    for info, usage in found:
        limit = usage.limit_bytes
        share: str | Text = "-"
        if limit:
            used = 100 * usage.bytes / limit
            share = coloured(f"{used:.0f}%", "red" if used >= 90 else "yellow" if used >= 75 else "green")
        most = "-" if limit is None else size(limit)
        state = info.state.value
        rows.append([info.context_id or "-", info.id, state, size(usage.bytes), most, share, usage.enforced_by])
    print_table(["CONTEXT", "ID", "STATE", "USED", "LIMIT", "SHARE", "ENFORCED BY"], rows)
    if context is None:
        with contextlib.suppress(Denied):  # only a token for every context may see the disk
            _disk(json=False)


def _disk(*, json: bool) -> None:
    with connected() as client:
        found = client.disk()
    if json:
        print_json(found)
        return
    rows = [[part.name, f"{'' if part.complete else 'more than '}{size(part.bytes)}"] for part in found.parts]
    print_table(["ON DISK", "SIZE"], [*rows, ["free", f"{size(found.free_bytes)} of {size(found.capacity_bytes)}"]])


async def _usages(context: str | None) -> list[tuple[SandboxInfo, WorkspaceUsage]]:
    from carrel.client import AsyncClient
    from carrel.models import State

    async with AsyncClient(administrator=True) as client:
        if context is not None:
            info = await client.find(context)
            return [(info, await client.attach(info).usage())]
        found = [info async for info in client.sandboxes()]
        found += [info async for info in client.sandboxes(state=State.TERMINATED) if info.files_kept]
        answers = await _ask_each(found, lambda info: client.attach(info).usage())
        return [(info, usage) for info, usage in answers if usage is not None]


def rm(
    contexts: Annotated[
        list[str] | None,
        typer.Argument(metavar="CONTEXT", help="Context or sandbox ids.", autocompletion=options.contexts),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Terminate every sandbox.")] = False,
    files: Annotated[bool, typer.Option("--files", help="Also delete the files.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    snapshot: Annotated[
        bool | None,
        typer.Option("--snapshot/--no-snapshot", help="Take a last snapshot. Default: yes, unless --files."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Written to the record of the sandbox.")] = "carrel rm",
    json: options.Json = False,
) -> None:
    """Terminate sandboxes and everything that runs in them. The files stay unless --files is given.

    --files also works for a context that is already terminated; `carrel ps --all` lists those.

    \b
    carrel rm conversation-42
    carrel rm --files conversation-42
    carrel rm --all --yes
    """
    if bool(contexts) == everything:
        raise typer.BadParameter("name one or more contexts, or give --all", param_hint="CONTEXT")
    from carrel.models import State

    failed = False
    with connected() as client:
        chosen = [info for info in client.sandboxes() if info.state is not State.TERMINATED] if everything else []
        for name in dict.fromkeys(contexts or []):
            try:
                chosen.append(_named(client, name, files=files))
            except CarrelError as error:
                print_error(error.detail, error.hint)
                failed = True
        if chosen and not yes:
            names = [info.context_id or info.id for info in chosen]
            options.confirm(f"Terminate {_few(names)}{' and delete the files' if files else ''}?")
        removed = _to_each(
            ((info.context_id or info.id, info) for info in chosen),
            lambda info: client.attach(info).terminate(reason=reason, delete_files=files, snapshot=snapshot),
            ("removing", "removed"),
            json=json,
        )
    if json:
        print_json(removed)
    raise typer.Exit(1 if failed or len(removed) < len(chosen) else 0)


def forget(
    contexts: Annotated[
        list[str], typer.Argument(metavar="CONTEXT", help="Context ids.", autocompletion=options.contexts)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    json: options.Json = False,
) -> None:
    """Delete contexts with all their data. Only the audit log remains. For administrators.

    Deletes files, snapshots, filespace, secrets, MCP servers, template and policy. `carrel rm --files` keeps policies.

    \b
    carrel forget conversation-42
    carrel forget --yes conversation-42 conversation-43
    """
    names = list(dict.fromkeys(contexts))
    if not yes:
        options.confirm(f"Delete all data of {_few(names)}, also the policy?")

    def forget_one(name: str) -> str:
        client.forget(name)
        return name

    with connected() as client:
        forgotten = _to_each(((name, name) for name in names), forget_one, ("forgetting", "forgot"), json=json)
    if json:
        print_json(forgotten)
    raise typer.Exit(0 if len(forgotten) == len(names) else 1)


def _to_each(
    chosen: Iterable[tuple[str, Chosen]], act: Callable[[Chosen], Result], words: tuple[str, str], *, json: bool
) -> list[Result]:
    """Do the same to each, one after the other, and return the results. Failures are printed and stop no other."""
    doing, done = words
    results = []
    for name, each in chosen:
        try:
            with waiting(f"{doing} {name}", quiet=json):
                results.append(act(each))
        except CarrelError as error:
            print_error(f"{name}: {error.detail}", error.hint)
            continue
        if not json:
            note(f"{done} {plain(name)}")
    return results


def _named(client: Client, name: str, *, files: bool) -> SandboxInfo:
    """Find the sandbox to remove; to delete its files also a terminated one."""
    from carrel.models import State

    try:
        return client.find(name)
    except NotFound:
        ended = client.sandboxes(state=State.TERMINATED, context_id=name) if files else iter(())
        if (newest := next(ended, None)) is None:
            raise
        return newest


def _few(names: list[str]) -> str:
    return ", ".join(plain(name) for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
