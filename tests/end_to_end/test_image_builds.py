"""An ordinary user's server builds an image, and runs from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support import images
from tests.support.sandboxes import KINDS
from tests.support.servers import serving

from carrel.errors import InvalidRequest

DOCKERFILE = """\
FROM scratch
COPY rootfs /
WORKDIR /app
RUN echo built > made && rm /etc/os-release && mkdir /opt && ls -a / > /opt/listed && sleep 2.5
USER worker
RUN id -u > mine || id -u > /home/other/mine
"""


@pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")
def test_an_ordinary_user_builds_an_image(tmp_path: Path) -> None:
    context = tmp_path / "context"
    images.debian(context / "rootfs", python=False, programs=["sh", "cat", "rm", "mkdir", "id", "ls", "sleep"])
    with (context / "rootfs/etc/passwd").open("a") as users:
        users.write("worker:x:1235:56:w:/home/other:/bin/sh\n")
    (context / "rootfs/home/other").mkdir()
    (context / "rootfs/home/other").chmod(0o777)
    (context / "Dockerfile").write_text(DOCKERFILE)
    said: list[str] = []  # the first RUN lasts so long that the disk watch looks at its files
    with serving(user=True, build=True) as server:
        server.client.images.build(context, name="made:1", log=said.append)
        box = server.client.sandbox("c", image="made:1")
        done = box.commands.run("cat /app/made /home/other/mine /app/mine; ls /etc/os-release /opt")
        assert done.stdout.split()[:2] == ["built", "1235"] and "listed" in done.stdout
        assert "cannot access '/etc/os-release'" in done.stderr
        box.terminate(delete_files=True)
        (context / "Dockerfile").write_text(DOCKERFILE + "RUN echo wrong >&2 && exit 3\n")
        with pytest.raises(InvalidRequest, match="line 7: RUN failed: it ended with 3: wrong"):
            server.client.images.build(context, log=said.append)
        assert [each.names for each in server.client.images.list()] == [["made:1"]]
