"""`policy`: check documents and explain decisions, also without a server; get and set the policy of a context."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.failures import note, print_error
from carrel.cli.printing import coloured, plain, print_done, print_json, print_table

if TYPE_CHECKING:
    from rich.text import Text

    from carrel.models import Explanation, PolicyInfo
    from carrel.policy.documents.settings import SettingsDocument
    from carrel.policy.documents.sources import Sources
    from carrel.policy.rules.layers import Policy
    from carrel.policy.verdict import Verdict

app = typer.Typer(help="Check policy documents, explain decisions, set the policy of a context.", no_args_is_help=True)

Template = Annotated[
    str | None, typer.Option("--template", "-t", metavar="NAME", help="A template of this machine, or its directory.")
]
_COLOURS = {"allow": "green", "ask": "yellow", "deny": "red"}
_EXAMPLE = "example"
"""The value of ${CONTEXT_ID} when no context is given."""


@app.command("check")
def check(
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="settings.json or sources.json.")] = None,
    template: Template = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 on warnings too.")] = False,
    json: options.Json = False,
) -> None:
    """Check settings.json and sources.json: print errors with their place, and warnings about misleading rules.

    Exits with 1 when a document is not valid.

    \b
    carrel policy check settings.json sources.json
    carrel policy check --template data-science
    """
    from carrel.errors import CarrelError

    reports: list[dict[str, object]] = []
    failed = False
    chosen = [*(files or []), *_of_template(template)]
    if not chosen:
        raise typer.BadParameter("name a file, or give --template", param_hint="FILE…")
    for file in chosen:
        try:
            kind, warnings = _checked(file)
        except CarrelError as error:
            failed = True
            reports.append({"file": str(file), "valid": False, "error": error.problem()})
            if not json:
                print_error(error.detail, error.hint)
            continue
        failed = failed or (strict and bool(warnings))
        reports.append({"file": str(file), "valid": True, "kind": kind, "warnings": warnings})
        if not json:
            _tell_warnings(str(file), kind, warnings)
    if json:
        print_json(reports)
    raise typer.Exit(1 if failed else 0)


@app.command("explain")
def explain(
    command: Annotated[str, typer.Argument(metavar="COMMAND", help="Shell text, in quotes.")],
    settings: Annotated[
        list[Path] | None,
        typer.Option("--settings", metavar="FILE", help="A settings.json; repeatable, the highest layer first."),
    ] = None,
    sources: Annotated[
        list[Path] | None, typer.Option("--sources", metavar="FILE", help="A sources.json; repeatable.")
    ] = None,
    template: Template = None,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            "-c",
            metavar="CONTEXT",
            help="Use the server's policy of this context. With documents or --template: the value of ${CONTEXT_ID}.",
            autocompletion=options.contexts,
        ),
    ] = None,
    shell: Annotated[
        str | None, typer.Option(metavar="SHELL", help="The shell that runs it: bash or sh.", show_default="bash")
    ] = None,
    json: options.Json = False,
) -> None:
    """Show every command that a shell text would run, and how the policy decides on each, with rule and reason.

    Runs nothing. Exits with 0 when all is allowed, with 1 when something needs approval or is denied.

    \b
    carrel policy explain "git push" --context conversation-42
    carrel policy explain "pip install pandas | tee log" --settings settings.json --sources sources.json
    """
    if shell not in {None, "bash", "sh"}:
        raise typer.BadParameter("the shell is bash or sh", param_hint="--shell")
    if context is not None and not settings and not sources and template is None:
        if shell is not None:
            raise typer.BadParameter("not with --context: the server knows its shell", param_hint="--shell")
        with connected() as client:
            explanation = client.policy(context).explain(command)
        shape: object = explanation
    else:
        from carrel.policy.verdict import explained

        verdict = _decided(command, _policy(settings or [], sources or [], context or _EXAMPLE, template), shell)
        explanation, shape = explained(verdict), _as_json(verdict)
    if json:
        print_json(shape)
    else:
        _show(explanation)
    raise typer.Exit(0 if explanation.verdict == "allow" else 1)


@app.command("get")
def get(context: options.Context, json: options.Json = False) -> None:
    """Show the policy documents of a context.

    \b
    carrel policy get conversation-42
    """
    with connected() as client:
        info = client.policy(context).get()
    _print_documents(info, json)


@app.command("set")
def set_(
    context: options.Context,
    settings: Annotated[Path | None, typer.Option("--settings", metavar="FILE", help="The new settings.json.")] = None,
    sources: Annotated[Path | None, typer.Option("--sources", metavar="FILE", help="The new sources.json.")] = None,
    template: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Take the documents of a template, such as research, coding or data."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Restart a running sandbox if the new policy needs that.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Set the policy documents of a context. A document that is not given stays as it is.

    \b
    carrel policy set conversation-42 --settings settings.json --sources sources.json
    carrel policy set conversation-42 --template research
    """
    from carrel.client.requests import UNCHANGED

    for file in _of_template(template):
        settings = settings or (file if file.name == "settings.json" else None)
        sources = sources or (file if file.name == "sources.json" else None)
    if settings is None and sources is None:
        raise typer.BadParameter("give --settings, --sources, or a --template with rules", param_hint="--settings")
    with connected() as client:
        info = client.policy(context).put(
            settings=UNCHANGED if settings is None else _given(settings),
            sources=UNCHANGED if sources is None else _given(sources),
            restart=restart,
        )
    _print_documents(info, json)


@app.command("rm")
def rm(context: options.Context, json: options.Json = False) -> None:
    """Delete the policy documents of a context: from then on the server's own policy applies.

    \b
    carrel policy rm conversation-42
    """
    with connected() as client:
        client.policy(context).delete()
    if json:
        print_done(removed=context)


def _decided(command: str, policy: Policy, shell: str | None) -> Verdict:
    from carrel.policy.rules.decide import decide_shell

    if not policy.layers:
        note("no rules are given, so everything is allowed; --context CONTEXT uses the policy of the server")
    return decide_shell(policy, command, dialect="sh" if shell == "sh" else "bash", read_file=_read_here)


def _as_json(verdict: Verdict) -> dict[str, object]:
    """Return all of a verdict, with the source and the hint that the API leaves out."""

    def fields(each: Verdict) -> dict[str, object]:
        return {name: getattr(each, name) for name in ("verdict", "reason", "rule", "source", "hint")}

    parts = [{"kind": part.kind, "text": part.text, **fields(part.verdict), "via": part.via} for part in verdict.parts]
    return {**fields(verdict), "parts": parts}


def _given(file: Path) -> dict[str, object]:
    from carrel.errors import InvalidRequest
    from carrel.policy.documents import documents

    value = documents.parse(_bytes(file), file.name)
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"{file} is not a JSON object", field=str(file), hint="`carrel policy check` shows details"
        )
    return value


def _print_documents(info: PolicyInfo, json: bool) -> None:
    if json:
        print_json(info)
        return
    print_json({"settings": info.settings, "sources": info.sources})
    if info.updated_at is not None:
        note(
            f"version {info.version} of {info.updated_at.astimezone():%Y-%m-%d %H:%M} by {plain(info.updated_by or '')}"
        )
    for each in info.warnings:
        note(f"warning: {plain(each.rule)}: {plain(each.text)}")
    if info.restart_needed:
        note("some rules apply only after a restart of the sandbox: give --restart")


def _checked(file: Path) -> tuple[str, list[dict[str, str]]]:
    from carrel.policy.rules.layers import Layer, Policy

    if file.suffix == ".toml":
        from carrel.policy.documents import recipes

        recipes.load(_bytes(file), file.name)
        return "template", []
    document = _document(file)
    if document[0] == "sources":
        return "sources", []
    policy = Policy.of([Layer(file.name, document[1])], context_id=_EXAMPLE)
    return "settings", [{"rule": each.rule, "text": each.text} for each in policy.warnings]


def _bytes(file: Path) -> bytes:
    from carrel.errors import InvalidRequest

    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"cannot read {file}: {error.strerror}", field=str(file), hint="check the path and its mode"
        ) from None


def _document(file: Path) -> tuple[str, SettingsDocument | None, Sources | None]:
    from carrel.policy.documents import documents, settings, sources

    value = documents.parse(_bytes(file), file.name)
    keys = set(value) if isinstance(value, dict) else set()
    if keys & set(sources.Sources.model_fields) or (not keys and "sources" in file.name):
        return "sources", None, documents.build(value, sources.Sources, file.name)
    return "settings", documents.build(value, settings.SettingsDocument, file.name), None


def _of_template(template: str | None) -> list[Path]:
    """Find the files of a template: in a directory, in the data directory of this machine, or shipped with carrel."""
    from carrel.errors import NotFound

    if template is None:
        return []
    from carrel.client import data_dir

    shipped = Path(__file__).parent.parent / "templates"
    folders = [Path(template), Path(data_dir()) / "templates" / template, shipped / template]
    folder = next((each for each in folders if each.is_dir()), None)
    if folder is None:
        raise NotFound(
            f"there is no template '{template}' here", hint=f"give a directory, or a name in {folders[1].parent}"
        )
    return [each for name in ("template.toml", "settings.json", "sources.json") if (each := folder / name).exists()]


def _policy(settings: list[Path], sources: list[Path], context: str, template: str | None) -> Policy:
    from carrel.errors import InvalidRequest
    from carrel.policy.rules.layers import Layer, Policy

    layers = []
    for file, wanted in [*((each, "settings") for each in settings), *((each, "sources") for each in sources)]:
        kind, rules, resources = _document(file)
        if kind != wanted:
            raise InvalidRequest(f"{file} is a {kind} document", field=wanted, hint=f"give it with --{kind}")
        layers.append(Layer(file.name, rules, resources, file.name))
    for file in _of_template(template):
        if file.suffix == ".json":
            _, rules, resources = _document(file)
            name = f"{file.parent.name}/{file.name}"
            layers.append(Layer(name, rules, resources, name))
    return Policy.of(layers, context_id=context)


def _read_here(path: str) -> str | None:
    """Read a requirements file of the current directory."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError, ValueError):
        return None


def _tell_warnings(file: str, kind: str, warnings: list[dict[str, str]]) -> None:
    typer.echo(f"{plain(file)}: {kind}, valid" + (f", {len(warnings)} warnings" if warnings else ""))
    for each in warnings:
        typer.echo(f"  {plain(each['rule'])}: {plain(each['text'])}")


def _show(verdict: Explanation) -> None:
    rows: list[list[str | Text]] = []
    for part in verdict.parts:
        text = f"{part.text} (by {' > '.join(part.via)})" if part.via else part.text
        rule = f"{part.rule} in {part.source}" if part.rule and part.source else part.rule or ""
        rows.append([part.kind, text, coloured(part.verdict, _COLOURS[part.verdict]), rule, part.reason])
    if rows:
        print_table(["KIND", "WHAT", "VERDICT", "RULE", "WHY"], rows, wrap=True)
        print()
    print_table(["VERDICT", "WHY"], [[coloured(verdict.verdict, _COLOURS[verdict.verdict]), verdict.reason]], wrap=True)
