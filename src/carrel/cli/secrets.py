"""`secret`: set, list and delete secrets of a context or a template. `rekey` changes the key, without a server."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.failures import note
from carrel.cli.printing import age, print_done, print_items, print_json
from carrel.errors import InvalidRequest

if TYPE_CHECKING:
    from carrel.client import Client, Secrets

app = typer.Typer(
    help="Secrets: files in /run/secrets of the sandbox of a context, or of all sandboxes of a template.",
    no_args_is_help=True,
)

Owner = Annotated[
    str,
    typer.Argument(
        metavar="OWNER", help="A context id, or with --template a template.", autocompletion=options.contexts
    ),
]
OfTemplate = Annotated[bool, typer.Option("--template", "-t", help="OWNER is a template, not a context.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the secret and of its file.")]


@app.command("set")
def put(
    owner: Owner,
    name: Name,
    template: OfTemplate = False,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file with the value; - is standard input.")] = "-",
    json: options.Json = False,
) -> None:
    """Set a secret. The value is read from a file or standard input, never from the command line.

    \b
    carrel secret set conversation-42 API_KEY < key.txt
    carrel secret set conversation-42 API_KEY key.txt
    carrel secret set --template data-science API_KEY key.txt
    """
    if file == "-":
        value = typer.prompt("value", hide_input=True).encode() if sys.stdin.isatty() else sys.stdin.buffer.read()
    else:
        try:
            with open(file, "rb") as source:
                value = source.read()
        except OSError as error:
            raise InvalidRequest(f"cannot read {file}: {error.strerror}", field="FILE") from None
    with connected() as client:
        kept = _of(client, owner, template).put(name, value.rstrip(b"\r\n"))
    if json:
        print_json(kept)
        return
    note(f"set {kept.name}, version {kept.version}: /run/secrets/{kept.name}")


@app.command("ls")
def ls(owner: Owner, template: OfTemplate = False, json: options.Json = False) -> None:
    """List the secrets of a context or a template: names and versions, never values.

    \b
    carrel secret ls conversation-42
    """
    with connected() as client:
        found = _of(client, owner, template).list()
    columns = ["NAME", "VERSION", "CHANGED"]
    print_items(found, json, columns, lambda each: [each.name, str(each.version), age(each.updated_at)])


@app.command("rm")
def remove(owner: Owner, name: Name, template: OfTemplate = False, json: options.Json = False) -> None:
    """Delete a secret, also from running sandboxes.

    \b
    carrel secret rm conversation-42 API_KEY
    """
    with connected() as client:
        _of(client, owner, template).delete(name)
    if json:
        print_done(removed=name)


@app.command("rekey")
def rekey(
    *,
    old_key: Annotated[Path | None, typer.Option(help="A file with an older key that some secrets need.")] = None,
    new_key: Annotated[Path | None, typer.Option(help="A file with the new key. Default: a new key is made.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="The data directory of the server.")] = None,
    config: Annotated[Path | None, typer.Option(help="A settings file.", show_default="carrel.toml")] = None,
    json: options.Json = False,
) -> None:
    """Encrypt all secrets with a new key. Stop every server on the database first.

    If it is interrupted, run it again: it continues. A server starts only when it has finished.

    \b
    carrel secret rekey
    carrel secret rekey --new-key new.key
    """
    from carrel import config as settings
    from carrel.extras import using

    with using("server"):
        from carrel.server import rekey as change

    loaded = settings.load({"data_dir": None if data_dir is None else str(data_dir)}, config=config)
    files = {"old_key": old_key, "new_key": new_key}
    done = change(loaded, **{name: None if path is None else str(path) for name, path in files.items()})
    if json:
        print_json(asdict(done))
    else:
        print(f"encrypted again: {done.secrets} secrets, {done.former} former values; the key is in {done.key_file}")
    if done.left:
        note(f"{done.left} values need a key that was not given: give it with --old-key, or set the secrets again")
    if loaded.secret_key is not None:
        note(f"now set CARREL_SECRET_KEY (secret_key) of every server to the key in {done.key_file}, then start them")
    else:
        note(f"other servers on the database need the same {done.key_file}")


def _of(client: Client, owner: str, template: bool) -> Secrets:
    return client.secrets(template=owner) if template else client.secrets(owner)
