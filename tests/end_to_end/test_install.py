"""The wheel, installed with each extra into an empty environment and used: as root and as an ordinary user, on every
Python that carrel supports and this machine has.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.servers import ROOT as AS_ROOT
from tests.support.servers import USER, as_user

from carrel.extras import PARTS

ROOT = Path(__file__).parents[2]
UV = [sys.executable, "-m", "uv"]
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
VERSIONS = ["3.11", "3.12", "3.13"]
SNIPPET = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]

USE_ASYNC = """
import asyncio
from carrel import AsyncClient
async def main():
    async with AsyncClient() as carrel:
        box = await carrel.sandbox("from-asyncio")
        assert (await box.commands.run("echo hello")).stdout == "hello\\n"
        await box.terminate(delete_files=True)
asyncio.run(main())
"""
USE_LANGGRAPH = """
import asyncio, os
from carrel import AsyncClient
from carrel.integrations.langgraph import Workspace, build_graph, open_checkpointer
async def main():
    async with AsyncClient() as client, open_checkpointer(os.environ["CARREL_DATA_DIR"] + "/graph.db") as checkpoints:
        graph = build_graph("shell", checkpointer=checkpoints.saver)
        thread = {"configurable": {"thread_id": "from-langgraph"}}
        async with checkpoints.running("from-langgraph"):
            state = await graph.ainvoke({"messages": [("user", "echo hello")]}, thread, context=Workspace(client))
        assert state["messages"][-1].text == "hello", state
        await (await client.sandbox("from-langgraph")).terminate(delete_files=True)
asyncio.run(main())
"""
USE_DEEPAGENTS = """
from deepagents import create_deep_agent
from carrel.integrations.deepagents import CarrelBackend
from carrel.integrations.langgraph import ShellModel, Workspace
create_deep_agent(ShellModel(), backend=CarrelBackend(), context_schema=Workspace)
"""
IMPORT_ALL = """
import importlib, pkgutil
for name in {names}:
    part = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(part, "__path__", []), name + "."):
        if not found.name.endswith("__main__") and ".migrations." not in found.name:
            importlib.import_module(found.name)
"""
SERVER = ["api", "audit", "cli", "control", "egress", "server", "store", "supervisor", "testing", "workspaces"]


def importing(*names: str) -> str:
    """Code that imports every module of these parts of carrel."""
    return IMPORT_ALL.format(names=[f"carrel.{name}" for name in names])


def clean(**variables: str) -> dict[str, str]:
    """The environment without anything that is set for carrel or that changes Python."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("CARREL_", "PYTHON", "VIRTUAL_ENV", "COVERAGE"))
    } | variables


def interpreter(version: str) -> str | None:
    """A Python of this version that runs here."""
    found = [shutil.which(f"python{version}"), f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found += sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python")))
    for path in [sys.executable, *found]:
        if path is not None and os.path.exists(path):
            look = [path, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
            said = subprocess.run(look, capture_output=True, text=True, check=False)
            if said.stdout.strip() == version:
                return path
    return None


class Environment:
    """A virtual environment that has the wheel and one extra."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.python = str(directory / "bin" / "python")
        self.carrel = str(directory / "bin" / "carrel")

    def run(self, code: str, *, data: Path) -> None:
        """Run Python code, warnings as errors; it must end well and be silent on stderr."""
        done = subprocess.run(
            [self.python, "-W", "error", "-c", code],
            env=clean(CARREL_DATA_DIR=str(data)),
            cwd="/",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr

    def call(self, *words: str, data: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run the `carrel` script."""
        return subprocess.run(
            [self.carrel, *words],
            env=clean(CARREL_DATA_DIR=str(data)),
            cwd="/",
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


Install = Callable[..., Environment]


@pytest.fixture(scope="session")
def wheel() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="wheel-"))
    subprocess.run([*UV, "build", "-q", "--wheel", "--no-build-isolation", "-o", str(directory), str(ROOT)], check=True)
    [built] = directory.glob("*.whl")
    yield built
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def install(wheel: Path) -> Iterator[Install]:
    """Gives the environment with one extra on one Python; each is made once."""
    directory = Path(tempfile.mkdtemp(prefix="installed-"))
    directory.chmod(0o755)
    made: dict[tuple[str, str], Environment] = {}

    def make(extra: str, version: str = OWN) -> Environment:
        if (extra, version) not in made:
            python = interpreter(version)
            if python is None:
                pytest.skip(f"there is no Python {version} on this machine")
            place = directory / f"{extra or 'bare'}-{version}"
            wanted = f"{wheel}[{extra}]" if extra else str(wheel)
            variables = clean(UV_SYSTEM_CERTS="1")  # as pip: the certificates that this host trusts
            subprocess.run([*UV, "venv", "-q", "-p", python, str(place)], env=variables, check=True)
            subprocess.run([*UV, "pip", "install", "-q", "-p", str(place), wanted], env=variables, check=True)
            alike = [each.directory for (_extra, other), each in made.items() if other == version]
            share_bytecode([*alike, Path(sys.prefix)] if version == OWN else alike, place, version)
            made[extra, version] = Environment(place)
        return made[extra, version]

    yield make
    shutil.rmtree(directory)


def share_bytecode(sources: list[Path], target: Path, version: str) -> None:
    """Spare an environment the compilation of modules that one of the same Python has compiled.

    Only of the same files: uv links them from its cache. Python itself still compares their time and size.
    """
    site, ending = f"lib/python{version}/site-packages", f".cpython-{version.replace('.', '')}.pyc"
    for module in (target / site).rglob("*.py"):
        link = module.parent / "__pycache__" / (module.stem + ending)
        for source in sources:
            compiled = source / link.relative_to(target)
            other = source / module.relative_to(target)
            if compiled.exists() and other.exists() and other.samefile(module):
                link.parent.mkdir(exist_ok=True)
                os.link(compiled, link)
                break


@contextlib.contextmanager
def served(environment: Environment, *, user: bool = False) -> Iterator[Path]:
    """The data directory of `carrel serve` of this environment. It must start and end without a warning."""
    directory = Path(tempfile.mkdtemp(prefix="served-"))
    directory.chmod(0o755)
    data = directory / "data"
    data.mkdir()
    command = [environment.carrel, "serve", "--port", "0"]
    if user:
        command = as_user(command)
        if AS_ROOT:
            os.chown(data, USER, USER)
    variables = clean(CARREL_DATA_DIR=str(data), HOME=str(data))
    with (directory / "errors").open("wb") as errors, (directory / "output").open("wb") as output:
        server = subprocess.Popen(command, env=variables, cwd="/", stdout=output, stderr=errors)
    try:
        deadline = time.monotonic() + 90
        while not (data / "server.json").exists():
            assert server.poll() is None and time.monotonic() < deadline, (directory / "errors").read_text()
            time.sleep(0.02)
        yield data
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        finally:
            server.kill()
            server.wait()
            told = (directory / "errors").read_text()
            shutil.rmtree(directory)
    said = [line for line in told.splitlines() if " INFO " not in line]
    assert (server.returncode, said) == (0, [])


@pytest.fixture(scope="module")
def data(install: Install) -> Iterator[Path]:
    """The data directory of a server that was installed from the wheel."""
    with served(install("server")) as directory:
        yield directory


def test_client_works_without_extras(install: Install, data: Path) -> None:
    install("").run(importing("client", "models") + SNIPPET, data=data)
    install("").run(USE_ASYNC, data=data)


def test_every_module_of_the_server_imports(install: Install, tmp_path: Path) -> None:
    install("server").run(importing(*SERVER), data=tmp_path)


def test_every_module_of_the_supervisor_imports(install: Install, tmp_path: Path) -> None:
    install("supervisor").run(importing("supervisor"), data=tmp_path)


@pytest.mark.parametrize(
    ("installed", "words", "part", "missing"),
    [
        ("", ["ps"], "the command line", "cli"),
        ("", [], "the command line", "cli"),
        ("", ["--version"], "the command line", "cli"),
        ("", ["serve"], "the server", "server"),
        ("", ["--trace", "run", "true"], "the server", "server"),
        ("", ["mcp"], "the MCP server", "mcp"),
        ("cli", ["serve", "--port", "0"], "the server", "server"),
        ("cli", ["run", "--", "true"], "the server", "server"),
        ("cli", ["doctor"], "the server", "server"),
        ("cli", ["policy", "explain", "echo $(date)", "--template", "coding"], "the server", "server"),
        ("cli", ["audit", "verify", "/dev/null"], "the server", "server"),
        ("cli", ["secret", "rekey"], "the server", "server"),
        ("cli", ["mcp"], "the MCP server", "mcp"),
        ("cli", ["agent"], "the A2A agent", "a2a"),
        ("server", ["agent"], "the A2A agent", "a2a"),
    ],
)
def test_command_without_its_extra_names_it(
    install: Install, tmp_path: Path, installed: str, words: list[str], part: str, missing: str
) -> None:
    done = install(installed).call(*words, data=tmp_path)
    told = [line for line in done.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert done.returncode == 1
    assert told[0] == f"error: {part} is not installed: pip install 'carrel[{missing}]'", done.stderr
    assert told[1].startswith("hint: ") and "defect" not in done.stderr
    assert "--trace" in words or len(done.stderr.splitlines()) == 2


def test_every_extra_is_used_here() -> None:
    used = set(re.findall(r'install\("(\w+)"', Path(__file__).read_text()))
    assert used == set(PARTS)


@pytest.mark.parametrize("extra", ["a2a", "langgraph", "deepagents"])
def test_import_without_its_extra_names_it(install: Install, tmp_path: Path, extra: str) -> None:
    code = f"""
try:
    import carrel.integrations.{extra}
except ImportError as error:
    assert str(error).startswith("{PARTS[extra]} is not installed: pip install 'carrel[{extra}]'"), error
else:
    raise AssertionError("it is installed")
"""
    install("").run(code, data=tmp_path)


def test_cli_extra_runs_commands_on_a_server(install: Install, data: Path) -> None:
    cli = install("cli")
    cli.run(importing("cli"), data=data)
    ran = cli.call("exec", "from-cli", "--", "echo", "hello", data=data)
    assert (ran.returncode, ran.stdout) == (0, "hello\n"), ran.stderr
    shown = cli.call("ps", data=data)
    assert shown.returncode == 0 and "from-cli" in shown.stdout, shown.stderr
    ran = cli.call("run", "--", "echo", "hello", data=data)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "hello\n", "")


def test_mcp_extra_serves_tools(install: Install, data: Path) -> None:
    about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    call = {"name": "run_command", "arguments": {"command": "echo hello"}}
    messages = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call},
    ]
    command = [install("mcp").carrel, "mcp", "--context", "from-mcp"]
    variables = clean(CARREL_DATA_DIR=str(data))
    with subprocess.Popen(
        command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None and server.stderr is not None
        for message in messages:
            server.stdin.write(json.dumps(message) + "\n")
            server.stdin.flush()
            if "id" in message:
                answer = json.loads(server.stdout.readline())
                assert answer["id"] == message["id"] and "result" in answer, answer
        server.stdin.close()
        assert server.wait(30) == 0 and server.stderr.read() == ""
    assert "hello" in json.dumps(answer["result"])
    install("mcp").run(importing("integrations.mcp"), data=data)


def test_a2a_extra_serves_its_card(install: Install, data: Path, tmp_path: Path) -> None:
    command = [install("a2a").carrel, "agent", "--port", "0", "--database", str(tmp_path / "agent.db")]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=clean(CARREL_DATA_DIR=str(data)), text=True, **piped) as agent:
        assert agent.stdout is not None and agent.stderr is not None
        try:
            url = agent.stdout.readline().split()[-1]
            card = httpx.get(f"{url}/.well-known/agent-card.json")
            assert card.status_code == 200 and card.json()["name"]
        finally:
            agent.terminate()
            told = agent.stderr.read()
    assert agent.returncode == 0, told


def test_langgraph_extra_runs_a_graph(install: Install, data: Path) -> None:
    install("langgraph").run(importing("integrations.langgraph") + USE_LANGGRAPH, data=data)


def test_deepagents_extra_makes_an_agent(install: Install, tmp_path: Path) -> None:
    install("deepagents").run(USE_DEEPAGENTS, data=tmp_path)


def test_extras_of_a_server_have_what_they_import(install: Install, tmp_path: Path) -> None:
    install("nats").run("import nats.js", data=tmp_path)
    install("otel").run(
        "import opentelemetry.exporter.otlp.proto.http.trace_exporter, opentelemetry.sdk.trace", data=tmp_path
    )
    install("spiffe").run("import spiffe", data=tmp_path)
    install("kubernetes").run("import yaml", data=tmp_path)


@pytest.mark.parametrize("version", [version for version in VERSIONS if version != OWN])
def test_server_and_client_on_another_python(install: Install, version: str) -> None:
    with served(install("server", version)) as data:
        install("server", version).run(SNIPPET, data=data)
        install("", version).run(USE_ASYNC, data=data)


def test_server_as_ordinary_user(install: Install) -> None:
    with served(install("server"), user=True) as data:
        install("server").run(SNIPPET, data=data)


def test_server_requirements_pin_the_versions_of_the_development_ones() -> None:
    pins = {
        name: {line for line in (ROOT / "requirements" / name).read_text().splitlines() if re.match(r"[\w.-]+==", line)}
        for name in ("dev.txt", "server.txt")
    }
    assert len(pins["server.txt"]) > 40
    assert pins["server.txt"] <= pins["dev.txt"]
