from __future__ import annotations

import asyncio
import json
import os
import pty
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from carrel.config import Settings, load
from carrel.errors import Conflict, PlatformError
from carrel.server import is_loopback, local_host_report, running


@pytest.fixture
def settings() -> Iterator[Settings]:
    path = tempfile.mkdtemp(prefix="carrel-t-")
    yield load({"data_dir": path, "port": 0}, environ={})
    shutil.rmtree(path)


async def test_what_it_leaves_and_takes_away(settings: Settings) -> None:
    data = Path(settings.data_dir)
    async with running(settings) as server:
        assert json.loads((data / "server.json").read_text()) == {
            "url": server.url,
            "pid": os.getpid(),
            "folder_roots": [],
        }
        token = (data / "token").read_text().strip()
        assert token == server.token and token.startswith("carrel_")
        assert stat.S_IMODE((data / "token").stat().st_mode) == 0o600
        with pytest.raises(Conflict) as caught:
            async with running(settings):
                pass
        assert caught.value.field == "data_dir"
    assert not (data / "server.json").exists()
    async with running(settings) as server:
        assert server.token == token, "the token is kept"
    async with running(settings.model_copy(update={"token": "my-own-token"})) as server:
        assert server.token == "my-own-token"


async def test_agent_token_is_left_kept_and_made_anew(settings: Settings) -> None:
    file = Path(settings.data_dir) / "agent-token"
    async with running(settings) as server:
        first = file.read_text().strip()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and first != server.token
        token_id = (await server.plane.tokens.identify(first)).token_id
    file.chmod(0o644)
    async with running(settings) as server:
        assert file.read_text().strip() == first and stat.S_IMODE(file.stat().st_mode) == 0o600
        await server.plane.tokens.revoke(token_id)
    async with running(settings) as server:
        second = file.read_text().strip()
        assert second != first
        assert (await server.plane.tokens.identify(second)).subject == "agent:local"


async def test_no_agent_token_where_none_is_asked_for(settings: Settings) -> None:
    async with running(settings.model_copy(update={"auth": False})):
        assert not (Path(settings.data_dir) / "agent-token").exists()


async def test_a_taken_port(settings: Settings) -> None:
    async with running(settings) as server:
        port = int(server.url.rpartition(":")[2])
        other = tempfile.mkdtemp(prefix="carrel-t-")
        try:
            with pytest.raises(PlatformError) as caught:
                async with running(settings.model_copy(update={"port": port, "data_dir": other})):
                    pass
            assert caught.value.field == "port"
        finally:
            shutil.rmtree(other)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example.org", False)],
)
def test_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_the_host_can_be_asked_without_a_server() -> None:
    report = local_host_report()
    assert {"namespace", "process"} <= {provider.name for provider in report.providers}


async def started(data_dir: str, *, stdout: int, **settings: object) -> tuple[str, str]:
    """Start a server, stop it once it takes requests; what it said on stderr, and on stdout if that is a pipe."""
    code = (
        "import json, sys; from carrel.config import load; from carrel.server import serve;"
        "serve(load({'port': 0, 'data_dir': sys.argv[1], **json.loads(sys.argv[2])}, environ={}))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, data_dir, json.dumps(settings), stdout=stdout, stderr=subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            while not (Path(data_dir) / "server.json").exists():
                assert process.returncode is None, "it ended early"
                await asyncio.sleep(0.02)
            process.terminate()
            said, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return errors.decode(), (said or b"").decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_token_is_shown_once_and_only_at_a_terminal(settings: Settings) -> None:
    token_file = Path(settings.data_dir) / "token"
    _, logged = await started(settings.data_dir, stdout=subprocess.PIPE)
    token = token_file.read_text().strip()
    assert token not in logged and str(token_file) in logged
    token_file.unlink()
    shown = []
    for _ in range(2):
        master, slave = pty.openpty()
        try:
            await started(settings.data_dir, stdout=slave)
            shown.append(os.read(master, 65536).decode())
        finally:
            os.close(slave)
            os.close(master)
    token = token_file.read_text().strip()
    assert token in shown[0] and token not in shown[1]
    assert all(str(token_file) in each for each in shown)


async def test_token_of_the_settings_is_never_shown(settings: Settings) -> None:
    master, slave = pty.openpty()
    try:
        await started(settings.data_dir, stdout=slave, token="of-the-operator")
        shown = os.read(master, 65536).decode()
    finally:
        os.close(slave)
        os.close(master)
    assert "of-the-operator" not in shown and "token" in shown


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
async def test_server_for_other_machines_says_so(settings: Settings, host: str, warned: bool) -> None:
    errors, said = await started(settings.data_dir, stdout=subprocess.PIPE, host=host)
    assert said.splitlines()[0].partition("listens on ")[2].startswith(f"http://{host}:")
    assert "http://127.0.0.1:" in said
    assert ("plain HTTP" in errors) is warned


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_end_everything(settings: Settings, number: signal.Signals) -> None:
    code = (
        "import sys; from carrel.config import load; from carrel.server import serve;"
        "serve(load({'port': 0, 'data_dir': sys.argv[1]}, environ={}))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, settings.data_dir, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            said = b""
            while b"try " not in said:
                line = await process.stdout.readline()
                assert line, "it ended early"
                said += line
        place = json.loads((Path(settings.data_dir) / "server.json").read_text())
        token = (Path(settings.data_dir) / "token").read_text().strip()
        assert place["url"].encode() in said and place["pid"] == process.pid
        headers = {"authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=place["url"], headers=headers, timeout=30) as client:
            made = await client.post("/v1/sandboxes", json={})
            if made.status_code == 201:
                path = f"/v1/sandboxes/{made.json()['id']}/commands"
                waiting = asyncio.ensure_future(client.post(path, json={"command": "sleep 1000"}))
                while not (await client.get(path)).json()["items"]:
                    await asyncio.sleep(0.02)
                process.send_signal(number)
                answer = (await asyncio.gather(waiting, return_exceptions=True))[0]
                assert isinstance(answer, httpx.HTTPError) or answer.status_code == 502
            else:
                process.send_signal(number)
        async with asyncio.timeout(20):
            _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        assert b"Traceback" not in errors
        assert not (Path(settings.data_dir) / "server.json").exists()
        kept = Path(settings.data_dir) / "storage"
        assert all(os.listdir(kept / name) == [] for name in ("pool", "volumes") if (kept / name).exists())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_doctor_needs_no_web_server_and_no_database() -> None:
    code = "import sys\nfrom carrel.server import local_host_report\nlocal_host_report()\nprint(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name.partition(".")[0] for name in shown.split()}
    assert "carrel" in loaded and not {"fastapi", "uvicorn", "sqlalchemy", "alembic", "prometheus_client"} & loaded


FIRST_COMMAND = """
import asyncio, json, sys, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor
from carrel.config import load
from carrel.server import running

def post(url, token, body):
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)

def get(url, token):
    try:
        urllib.request.urlopen(urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})).close()
    except urllib.error.HTTPError as error:
        assert error.code in (404, 422), f"{url}: {error.code}"

async def main():
    async with running(load({"data_dir": sys.argv[1], "port": 0}, environ={})) as server:
        await asyncio.to_thread(lambda: urllib.request.urlopen(f"{server.url}/healthz").close())
        sandboxes = f"{server.url}/v1/sandboxes"
        box = await asyncio.to_thread(post, sandboxes, server.token, {})
        done = await asyncio.to_thread(post, f"{sandboxes}/{box['id']}/commands", server.token, {"command": "true"})
        assert done["exit_code"] == 0
        await asyncio.to_thread(get, f"{server.url}/v1/approvals/watch", server.token)
        print(*sys.modules)
        # Routes of the framework, requested at once: each of them imports it.
        pages = ("templates", "approvals", "tokens", "snapshots?limit=1", "secrets", "audit?limit=1") * 2
        loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(len(pages))  # the server needs the usual ones
        urls = (f"{server.url}/v1/{page}" for page in pages)
        await asyncio.gather(*(loop.run_in_executor(threads, get, url, server.token) for url in urls))

asyncio.run(main())
"""
LATER = {
    "a2a", "alembic", "asyncpg", "carrel.images.dockerfile", "cryptography.x509", "fastapi", "http.cookiejar", "httpx",
    "mcp", "obstore", "opentelemetry", "packaging", "rich", "sqlalchemy.dialects.postgresql", "sqlalchemy.orm", "websockets.asyncio",
}  # fmt: skip
"""Takes long to import, and neither a start nor the first command needs it."""


async def test_start_and_first_command_import_nothing_slow(settings: Settings) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-c", FIRST_COMMAND, settings.data_dir, stdout=asyncio.subprocess.PIPE
    )
    loaded = set((await process.communicate())[0].decode().split())
    assert process.returncode == 0 and "uvicorn" in loaded
    assert not LATER & loaded
