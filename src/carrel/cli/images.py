"""`image`: pull, import, build, push, export, list, inspect and remove the images that sandboxes run from."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from carrel.cli import options
from carrel.cli.connecting import connected
from carrel.cli.failures import note
from carrel.cli.printing import age, print_done, print_items, print_json, print_table, size
from carrel.cli.progress import copying, pulling, pushing, waiting

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


@app.command("build")
def build(
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="The build context.")] = ".",
    name: Annotated[str | None, typer.Option("--tag", "-t", metavar="NAME", help="The name of the image.")] = None,
    file: Annotated[
        str, typer.Option("--file", "-f", metavar="PATH", help="Its Dockerfile, in the context.")
    ] = "Dockerfile",
    target: Annotated[
        str, typer.Option("--target", metavar="STAGE", help="The stage to build. Default: the last.")
    ] = "",
    build_arg: Annotated[
        list[str] | None, typer.Option("--build-arg", metavar="NAME=VALUE", help="The value of an ARG line.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Run every RUN line again.")] = False,
    json: options.Json = False,
) -> None:
    """Build an image from a Dockerfile, without Docker. Shows the log, and prints the digest. For administrators.

    Each RUN line runs in a sandbox of its own, with the network that the server's policy allows.

    \b
    carrel image build -t service:1 .
    carrel image build -t service:1 -f deploy/Dockerfile --build-arg VERSION=3 .
    """
    given: dict[str, str] = {}
    for each in build_arg or []:
        key, sign, value = each.partition("=")
        if not sign:
            raise typer.BadParameter(f"'{each}' is not NAME=VALUE", param_hint="--build-arg")
        given[key] = value
    path = (
        os.path.relpath(file, directory)
        if os.path.exists(file) and not os.path.exists(os.path.join(directory, file))
        else file
    )
    with connected() as client:
        info = client.images.build(
            directory, name=name, dockerfile=path, target=target, build_args=given, no_cache=no_cache, log=note
        )
    _print_digest([info], json)


@app.command("push")
def push(
    image: Name,
    to: Annotated[
        str | None,
        typer.Argument(metavar="TO", help="Where: registry.example.com/team/service:1. Default: its own reference."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Push an image to a registry. Prints its digest. For administrators.

    Layers that the registry has already are not sent. Credentials come from the Docker configuration of the server.

    \b
    carrel image push service:1 registry.example.com/team/service:1
    """
    with connected() as client, pushing() as progress:
        info = client.images.push(image, to, progress=progress)
    if not json:
        note(f"pushed {image} to {to or 'its registry'}")
    _print_digest([info], json)


@app.command("export")
def export(
    image: Name,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A new tar file; - is standard output.")],
    json: options.Json = False,
) -> None:
    """Write an image as an OCI layout in a tar file, for `docker load`, `skopeo` or `carrel image import`.

    For administrators.

    \b
    carrel image export service:1 service.tar
    carrel image export service:1 - | docker load
    """
    if file == "-" and json:
        raise typer.BadParameter("standard output is used for the image", param_hint="--json")
    if file == "-" and sys.stdout.isatty():
        raise typer.BadParameter("an image cannot be shown on a terminal", param_hint="FILE")
    with connected() as client:
        if file == "-":
            client.images.export(image, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return
        with copying(os.path.basename(file), client.images.get(image).size) as progress:
            client.images.export(image, file, progress=progress)
    if json:
        print_done(image=image, file=file)
    else:
        note(f"{image} is in {file}")


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
