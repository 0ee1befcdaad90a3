"""Images are built from Dockerfiles, without Docker: as root and as an ordinary user."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from tests.support import images
from tests.support.calls import ADMIN
from tests.support.sandboxes import KINDS

from carrel.control.plane import ControlPlane
from carrel.errors import InvalidRequest
from carrel.models import CommandRequest, SandboxRequest
from carrel.models.images import ImageBuild, ImageInfo
from carrel.primitives.build_context import pack_context

pytestmark = pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")

DOCKERFILE = """\
FROM scratch AS base
COPY rootfs /
FROM base AS build
ARG WORD=hello
ENV FROM_ENV="an env"
WORKDIR /src
COPY a.txt .
RUN echo "$WORD $FROM_ENV $(pwd) $(id -u)" > made && rm a.txt /etc/os-release && echo changed >> /etc/group && date +%N > /now
FROM base AS other
RUN exit 9
FROM base
COPY --from=build /src/made /etc/group /copied/
COPY --from=build /now /now
ADD archive.tar.gz /unpacked
USER worker
RUN id -u > /home/other/uid && mkdir /home/other/dir && echo x > /home/other/dir/x
WORKDIR /home/other
ENTRYPOINT ["cat"]
CMD ["/copied/made"]
"""


def packed(directory: Path) -> str:
    with open(f"{directory}.tar", "wb") as file:
        pack_context(str(directory), "Dockerfile", file)
    return file.name


@pytest.fixture
def context(tmp_path: Path) -> Path:
    directory = tmp_path / "context"
    images.debian(directory / "rootfs", python=False, programs=["sh", "cat", "rm", "mkdir", "id", "date", "ls", "stat"])
    with (directory / "rootfs/etc/passwd").open("a") as users:
        users.write("worker:x:1235:56:w:/home/other:/bin/sh\n")
    (directory / "rootfs/home/other").mkdir()
    (directory / "rootfs/home/other").chmod(0o777)
    (directory / "a.txt").write_text("a")
    (directory / "Dockerfile").write_text(DOCKERFILE)
    with tarfile.open(directory / "archive.tar.gz", "w:gz") as archive:
        archive.add(directory / "a.txt", "inside/a")
    return directory


async def built(plane: ControlPlane, context: Path, **more: object) -> tuple[ImageInfo, list[str]]:
    said: list[str] = []
    request = ImageBuild.model_validate({"image": "service:1", **more})
    return await plane.image_builds.build(ADMIN, request, packed(context), said.append), said


async def test_a_dockerfile_of_several_stages(plane: ControlPlane, context: Path) -> None:
    info, said = await built(plane, context, build_args={"WORD": "bye"})
    assert info.names == ["service:1"] and "[3/4] RUN exit 9" not in said, "a stage that nothing needs is not built"
    assert [each.names for each in (await plane.images.list(ADMIN)).items] == [["service:1"]]
    details = await plane.images.inspect(ADMIN, "service:1")
    assert (details.entry_point, details.command, details.user) == (["cat"], ["/copied/made"], "worker")

    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c", image="service:1"))
    look = "cat /copied/made /unpacked/inside/a /home/other/uid; ls /etc/os-release /copied; stat -c %U /home/other/dir /made"
    done = await plane.operations.run_command(ADMIN, "c", CommandRequest(command=look))
    assert done.stdout.split() == [
        "bye", "an", "env", "/src", "0", "a1235", "/etc/os-release", "/copied:", "group", "made", "worker"
    ]  # fmt: skip
    now = (await plane.operations.run_command(ADMIN, "c", CommandRequest(command="cat /now"))).stdout

    # again: nothing runs, and the image is the same; another argument runs its line again, and what follows
    again, said = await built(plane, context, build_args={"WORD": "bye"})
    assert again.digest == info.digest and said.count("  as in an earlier build") == 7
    other, _ = await built(plane, context, image="service:2")
    assert other.digest != info.digest
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="d", image="service:2"))
    later = await plane.operations.run_command(ADMIN, "d", CommandRequest(command="cat /now /copied/made"))
    assert later.stdout != now and later.stdout.endswith("hello an env /src 0\n")


async def test_what_fails_names_its_line_and_leaves_no_image(plane: ControlPlane, context: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"line 10: RUN failed: it ended with 9"):
        await built(plane, context, target="other")
    with pytest.raises(InvalidRequest, match=r"no stage 'none'"):
        await built(plane, context, target="none")
    (context / "Dockerfile").write_text("FROM scratch\nCOPY none /\n")
    with pytest.raises(InvalidRequest, match=r"line 2: 'none' is not in the build context"):
        await built(plane, context)
    assert (await plane.images.list(ADMIN)).items == []
    assert [each for each in (await plane.sessions.page()).items if each.state != "terminated"] == []
