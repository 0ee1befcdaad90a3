"""Sandboxes that run from an image: an empty one, one with a single program, a small Debian."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support import images
from tests.support.sandboxes import KINDS, ROOT, Box, House

from carrel.errors import PlatformError, Unsupported
from carrel.providers import Masks
from carrel.providers.base import RootImage

pytestmark = pytest.mark.skipif("namespace" not in KINDS, reason="no namespaces on this host")
OWNERS = (0, 33, 1000, 65534, 70000)
PATH = "/opt/tools:/usr/bin:/bin:/workspace/bin:relative"


@pytest.fixture(scope="module")
def roots(houses: dict[str, House]) -> Iterator[Path]:
    """Roots of images, made once."""
    place = houses["namespace"].directory / "images" / f"of-{os.getpid()}"
    for name, make in {"empty": images.empty, "static": images.static, "debian": images.debian}.items():
        make(place / name)
    tools = place / "debian/opt/tools"
    tools.mkdir(parents=True)
    (tools / "tool").write_text("#!/bin/sh\necho ran\n")
    (tools / "tool").chmod(0o755)
    (tools / "broken").write_text("#!/no/such/program\n")
    (tools / "broken").chmod(0o755)
    for owner in OWNERS:
        (tools / f"of-{owner}").touch()
        if ROOT:
            os.chown(tools / f"of-{owner}", owner, owner)
    (place / "debian/srv").symlink_to("/usr")  # absolute: it must lead to the image's own
    yield place
    shutil.rmtree(place)


@pytest.fixture
async def home(houses: dict[str, House]) -> AsyncIterator[House]:
    house = House("namespace", houses["namespace"].directory)
    yield house
    await house.provider.close()


async def test_supervisor_needs_nothing_of_an_empty_image(home: House, roots: Path) -> None:
    async with home.box(image=images.image(roots / "empty")) as box:
        inside, http = box.supervisor, box.supervisor.http
        assert (await inside.ask("GET", "/health"))["status"] == "ok"
        assert (await http.put("/files/content?path=a/b&parents=1", content=b"text")).is_success
        assert (await http.get("/files/content?path=a/b")).text == "text"
        assert (box.workspace / "a/b").read_text() == "text"
        assert [each["path"] for each in (await http.get("/files/list?path=.&recursive=1")).json()["items"]] == [
            "a",
            "a/b",
        ]
        await inside.ask("POST", "/files/edit", {"path": "a/b", "old": "text", "new": "more"})
        await inside.ask("PUT", "/secrets", {"secrets": {"key": "dmFsdWU="}})
        assert (await http.get("/files/stat?path=none")).status_code == 404
        # As long as one command waits for its input, the next is started by another process.
        texts = [
            await inside.run("echo"),
            await inside.run(["tool"]),
            await inside.run("echo", terminal={"rows": 2, "cols": 9}),
        ]
        assert [each["exit_code"] for each in texts] == [127] * 3
        assert texts[0]["stderr"] == (
            "carrel: this sandbox has no shell (/bin/sh): give the command as a list of words, not as one text\n"
        )
        assert texts[1]["stderr"] == "carrel: tool: command not found\n"
        problem = await inside.refused("POST", "/python", {"code": "1"})
        assert problem["code"] == "unsupported" and "no python3" in problem["detail"]
        await inside.ask("PUT", "/mcp/server", {"command": ["server"], "generation": "1"})
        assert (await http.post("/mcp/server/connect")).is_error
        await inside.ask("POST", "/empty")
        assert (await inside.ask("GET", "/health"))["state"] == "idle"
    assert os.listdir(roots / "empty") == []


async def test_program_without_libraries(home: House, roots: Path) -> None:
    (roots / "static/bin/true").write_bytes(Path("/bin/true").read_bytes())
    (roots / "static/bin/true").chmod(0o755)
    async with home.box(image=images.image(roots / "static")) as box:
        said = await box.supervisor.run([images.HELLO])
        assert (said["exit_code"], said["stderr"]) == (126, "hello\n")
        said = await box.supervisor.run(["true"])
        assert said["exit_code"] == 127
        assert said["stderr"] == (
            "carrel: true: it is there, but the loader or interpreter that it needs is not in this sandbox\n"
        )
        assert (await box.supervisor.run(["/bin/hello/"]))["exit_code"] in {126, 127}


async def _says(box: Box, command: str) -> str:
    result = await box.supervisor.run(command)
    return str(result["stdout"] + result["stderr"]).strip()


async def test_user_variables_and_directory_of_the_image(home: House, roots: Path) -> None:
    own = {"PATH": PATH, "LANG": "C", "A": "of the image", "HOME": "/nowhere", "WORKSPACE": "x"}
    image = images.image(roots / "debian", user="agent", environment=own, working_directory="/opt/tools")
    async with home.box(image=image, env={"B": "asked"}) as box:
        shown = "id; pwd; echo $A $B $HOME $LANG $WORKSPACE $USER; echo $PATH; tool; stat -c %u:%g /workspace /tmp ~"
        assert (await _says(box, shown)).splitlines() == [
            "uid=1234(agent) gid=55(workers) groups=55(workers)",
            "/opt/tools",
            "of the image asked /home/agent C /workspace agent",
            "/etc/carrel/bin:/opt/tools:/usr/bin:/bin:/workspace/bin:/workspace/.venv/bin",
            "ran",
            *["1234:55"] * 3,
        ]
        assert (await box.supervisor.run(["broken"]))["exit_code"] == 127
        await _says(box, "touch /workspace/mine")
        assert (box.workspace / "mine").stat().st_uid == box.workspace.stat().st_uid


async def test_root_of_the_image_has_no_power(home: House, roots: Path) -> None:
    async with home.box(image=images.image(roots / "debian")) as box:
        assert (await _says(box, "id -u; ls -d /root/ && stat -c %U /root /usr/bin/env; cat /etc/os-release")).split() == [
            "0", "/root/", "root", "root", "ID=copied"
        ]  # fmt: skip
        refused = {
            "touch /etc/x /root/x /usr/bin/x": "Read-only",
            "chown 5 /workspace": "chown",
            "mount -t tmpfs none /tmp": "mount",
            "echo 1 >/proc/sys/kernel/shmmax": "denied",
            "echo 1 >/proc/sys/net/ipv4/ip_forward": "denied",
            "echo 1 >/proc/sys/user/max_user_namespaces": "denied",
            "cat /proc/1/environ": "denied",
            "unshare -U true": "unshare",
            "python3 -c 'import os; os.setuid(33)'": "not permitted" if ROOT else "Invalid",
            "python3 -c 'import os; os.setgroups([33])'": "not permitted",
        }
        for command, reason in refused.items():
            said = await _says(box, command)
            assert reason in said, f"{command}: {said}"
        assert "CapBnd:\t0000000000000000" in await _says(box, "grep Cap /proc/self/status")
        assert (await _says(box, "cat /proc/self/mounts | grep -c ' /usr\\| / ext4'")) == "0"


async def test_python_of_the_image(home: House, roots: Path) -> None:
    async with home.box(image=images.image(roots / "debian")) as box:
        call = {"code": "import sys, os; print(sys.executable, os.getuid())"}
        ran = (await box.supervisor.http.post("/python?wait=1", json=call)).json()
        assert ran["stdout"] == "/usr/bin/python3 0\n", ran
        made = await box.supervisor.run("carrel-venv && python3 -c 'import sys; print(sys.prefix)'")
        assert made["stdout"] == "/workspace/.venv\n", made
        cell = await box.supervisor.http.post("/contexts/a/cells?wait=1", json={"code": "print(1 + 1)"})
        assert "2" in cell.text, cell.text


async def test_masks_of_an_image(home: House, roots: Path) -> None:
    (roots / "debian/opt/tools/cat-2").unlink(missing_ok=True)
    os.link(roots / "debian/usr/bin/cat", roots / "debian/opt/tools/cat-2")
    masks = Masks(
        programs=("cat", "tool", "no-such"), hidden=("/etc/os-release", "/srv/bin/env"), refusal={"cat": "denied"}
    )
    image = images.image(roots / "debian", environment={"PATH": PATH})
    async with home.box(image=image, masks=masks) as box:
        for command in (
            "cat /etc/passwd",
            "/usr/bin/cat /etc/passwd",
            "/opt/tools/cat-2 /etc/passwd",
            "/srv/bin/cat x",
        ):
            said = await box.supervisor.run(command)
            assert (said["exit_code"], said["stderr"]) == (126, "denied\n"), command
        assert "tool is denied" in await _says(box, "tool")
        assert "Permission denied" in await _says(box, "head /etc/os-release")
    async with home.box(image=image) as box:  # the image itself is as it was
        assert await _says(box, "cat /etc/os-release; tool") == "ID=copied\nran"


async def test_certificates_are_where_distributions_look(home: House, roots: Path) -> None:
    async with home.box(image=images.image(roots / "debian"), trust=True) as box:
        await box.supervisor.ask("PUT", "/secrets", {"secrets": {"carrel-ca.pem": "Y2VydA=="}})
        places = "/etc/ssl/certs/ca-certificates.crt /etc/ssl/cert.pem /etc/pki/tls/certs/ca-bundle.crt $SSL_CERT_FILE"
        assert await _says(box, f"cat {places}") == "cert" * 4
    async with home.box(image=images.image(roots / "debian")) as box:
        assert "No such file" in await _says(box, "cat /etc/ssl/cert.pem")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"user": "nobody-there"}, Unsupported, "user 'nobody-there', which its /etc/passwd does not have"),
        ({"user": "root:gone"}, Unsupported, "group 'gone', which its /etc/group does not have"),
        ({"working_directory": "/none"}, PlatformError, "working directory /none is not a directory in it"),
        ({"identity": (1, 2)}, PlatformError, "was replaced"),
        ({"directory": "/"}, PlatformError, "is not below"),
    ],
)
async def test_what_cannot_be_run(
    home: House, roots: Path, change: dict[str, object], error: type[Exception], words: str
) -> None:
    given = {name: getattr(images.image(roots / "debian"), name) for name in ("directory", "identity")}
    launch = home.launch(image=RootImage(**(given | change)))  # type: ignore[arg-type]
    with pytest.raises(error, match=words):
        await home.provider.start(launch)
    assert launch.id not in await home.provider.running()
    shutil.rmtree(launch.workspace)


async def test_refused_without_isolation(houses: dict[str, House], roots: Path) -> None:
    house = House("process", houses["process"].directory)
    launch = house.launch(image=images.image(roots / "empty"))
    try:
        with pytest.raises(Unsupported, match="images"):
            await house.provider.start(launch)
    finally:
        await house.provider.close()
        shutil.rmtree(launch.workspace)


async def test_many_users_and_images_at_once(home: House, roots: Path) -> None:
    """Spares are made ahead for the user of the last image; others must work too."""

    async def one(user: str) -> str:
        async with home.box(image=images.image(roots / "debian", user=user)) as box:
            return (await _says(box, f"id -u; stat -c %u /workspace {files}")).replace("\n", " ")

    files = f"/ /etc /etc/hosts /root {' '.join(f'/opt/tools/of-{each}' for each in OWNERS)}"
    users = ["", "1000:1000", "70000", "0:0", "5", ""]
    for _ in range(2):  # the second time from spares
        answers = await asyncio.gather(*map(one, users))
        for user, answer in zip(users, answers, strict=True):
            uid = user.partition(":")[0] or "0"
            large = "70000" if uid == "70000" else "65534"
            owners = f"0 0 0 0 0 33 1000 65534 {large}" if ROOT else " ".join([uid] * 9)
            if uid == "70000" and ROOT:  # it has the place of the agent's own number
                owners = owners.replace(" 1000 ", " 65534 ")
            assert answer == f"{uid} {uid} {owners}", user
