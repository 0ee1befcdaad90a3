"""`image`: pull, import, list, inspect and remove the images that sandboxes run from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.failures import note
from carrel.cli.printing import age, print_done, print_items, print_json, print_table, size
from carrel.cli.progress import copying, pulling, waiting

if TYPE_CHECKING:
    from carrel.models.images import ImageInfo

app = typer.Typer(help="Images: the root file systems of sandboxes.", no_args_is_help=True, add_completion=False)

Name = Annotated[str, typer.Argument(metavar="IMAGE", help="A reference such as debian:12, or a digest.")]


@app.command("pull")
def pull(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="A reference such as debian:12.")],
    json: options.Json = False,
) -> None:
    """Pull an image from its registry, or its newest version. Prints its digest.

    A sandbox pulls its image by itself if it is missing. Credentials come from the Docker configuration of the server.

    \b
    carrel image pull python:3.13-slim
    carrel image pull registry.example.com/team/agent@sha256:…
    """
    with connected() as client, pulling() as progress:
        info = client.images.pull(image, progress=progress)
    _print_digest([info], json)


@app.command("import")
def import_archive(
    archive: Annotated[str, typer.Argument(metavar="FILE", help="A tar file: of `docker save`, or an OCI layout.")],
    name: Annotated[
        str | None, typer.Option("--name", "-n", metavar="NAME", help="Its name. Default: that in the archive.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Import an archive of `docker save`, or an OCI layout in a tar file. Prints the digests. For administrators.

    \b
    docker save my-agent:1 | gzip > agent.tar.gz
    carrel image import agent.tar.gz
    carrel image import layout.tar --name my-agent:2
    """
    total = os.stat(archive).st_size if os.path.exists(archive) else None
    with connected() as client, copying(os.path.basename(archive), total) as progress:
        found = client.images.import_archive(archive, name=name, progress=progress)
    _print_digest(found, json)


@app.command("ls")
def ls(json: options.Json = False) -> None:
    """List the images of the server, the last used first.

    \b
    carrel image ls
    """
    with connected() as client:
        found = client.images.list()
    print_items(found, json, ["NAME", "DIGEST", "PLATFORM", "LAYERS", "SIZE", "USED", "SANDBOXES"], _row)


def _row(info: ImageInfo) -> list[str]:
    used = "-" if not info.in_use else " ".join(info.used_by[:3]) + (" …" if len(info.used_by) > 3 else "")
    names = " ".join(info.names) or "-"
    return [
        names,
        info.digest[7:19],
        info.platform,
        str(info.layers),
        size(info.unpacked),
        age(info.last_used_at),
        used,
    ]


@app.command("inspect")
def inspect(image: Name, json: options.Json = False) -> None:
    """Print an image with its configuration: environment, user, entry point, layers.

    \b
    carrel image inspect debian:12
    """
    with connected() as client:
        found = client.images.get(image)
    if json:
        print_json(found)
        return
    shown: dict[str, object] = found.model_dump(mode="json")
    shown |= {"size": size(found.size), "unpacked": size(found.unpacked)}
    rows = []
    for name, value in shown.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            values = [f"{key}={each}" for key, each in value.items()]
        rows += [[name if number == 0 else "", str(each)] for number, each in enumerate(values)]
    print_table(["FIELD", "VALUE"], rows, wrap=True)


@app.command("rm")
def rm(
    images: Annotated[list[str], typer.Argument(metavar="IMAGE", help="References or digests.")],
    json: options.Json = False,
) -> None:
    """Remove images that no sandbox uses. One with several names loses only the given name. For administrators.

    \b
    carrel image rm debian:12
    """
    with connected() as client:
        for image in images:
            with waiting(f"removing {image}", quiet=json):
                client.images.delete(image)
            if not json:
                note(f"removed {image}")
    if json:
        print_done(removed=images)


def _print_digest(found: list[ImageInfo], json: bool) -> None:
    if json:
        print_json(found if len(found) != 1 else found[0])
        return
    for info in found:
        note(f"{' '.join(info.names) or 'an image without a name'}: {size(info.unpacked)} in {info.layers} layers")
        print(info.digest)
