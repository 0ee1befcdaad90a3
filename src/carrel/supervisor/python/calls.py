"""Calls of Python: code runs in a new process of a warm interpreter, and is a command like any other.

Knows the paths of interpreters. The control plane has decided before which one is allowed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from signal import SIGKILL

from carrel.errors import Conflict, InvalidRequest, NotFound, Unsupported
from carrel.supervisor import environment
from carrel.supervisor.answers import result_of
from carrel.supervisor.command import Order, SupervisedCommand
from carrel.supervisor.commands import Commands
from carrel.supervisor.files import Files, Stamp
from carrel.supervisor.http import HttpRequest, HttpResponse, HttpRouter, Json, decode_base64, json_response
from carrel.supervisor.produced import ProducedFiles
from carrel.supervisor.python.hosts import Interpreters, PythonHost, imports_of, modules
from carrel.supervisor.reaper import Stdio, find_program

SCRIPT = "/etc/carrel/warm.py"
"""The program of a warm interpreter in the root of the sandbox."""
ENVIRONMENTS = "/envs"
SYSTEM_PYTHON = "/usr/bin/python3"
OUTPUT_LIMIT = 1024 * 1024
TIMEOUT_S = 30.0
MOST_CODE = 4 * 1024 * 1024
MOST_SHOWN = 4096
_OWN = f"{environment.VENV}/bin/python"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

Orders = Callable[[Json], Order]


class Python:
    """`/python`: code in, output and files out."""

    def __init__(
        self, commands: Commands, files: Files, produced: ProducedFiles, order: Orders, release: Callable[[Order], None]
    ):
        self._commands = commands
        self._files = files
        self._produced = produced
        self._order = order
        self._release = release
        self._isolated = True
        self.interpreters = Interpreters(commands, SCRIPT, self._imports)
        self._env: dict[str, str] = {}
        self._system = SYSTEM_PYTHON
        self._packages: str | None = None
        self._ahead: list[str] = []

    def configure(self, env: dict[str, str], system: str, *, isolated: bool) -> None:
        """Take charge of a sandbox; interpreters start with the variables `env`. `system` is the path of its Python."""
        self._env = env
        self._system = system
        self._isolated = isolated
        if not isolated:
            here = os.path.dirname(os.path.abspath(__file__))
            self.interpreters = Interpreters(self._commands, os.path.join(here, "warm.py"), self._imports)

    @property
    def running(self) -> int:
        return sum(each.running and isinstance(each.runner, PythonHost) for each in self._commands.all())

    def routes(self, router: HttpRouter) -> None:
        router.add("POST", "/python", self._run)
        router.add("PUT", "/python/packages", self._have)

    async def _run(self, request: HttpRequest) -> HttpResponse:
        body = await request.json()
        if isinstance(name := body.get("id"), str):
            self._commands.require_new(name)  # before its files replace those of the call with that id
        given = put_files(self._files, body.get("files"))
        if not request.flag("wait"):
            return json_response((await self.start(body, live=True)).info(), 201)
        async with self._produced.watching(given) as look:
            command = await self.start(body)
            await command.wait()
        return json_response({**result_of(command), "files_produced": look.found, "files_truncated": look.truncated})

    async def _have(self, request: HttpRequest) -> HttpResponse:
        """Make the packages of an environment the default of commands and of calls that name no environment."""
        body = await request.json()
        programs = os.path.dirname(_shared(body.get("env")))
        given = os.path.dirname(programs), modules(body.get("imports"))
        if given != (self._packages, self._ahead):
            kept = [each for each in self._env["PATH"].split(os.pathsep) if each != f"{self._packages}/bin"]
            self._packages, self._ahead = given
            self._env.update(CARREL_ENV=given[0], PATH=os.pathsep.join([*kept, programs]))
            self.interpreters.retire(_OWN, f"{programs}/python")
        return HttpResponse(204)

    async def start(self, body: Json, *, live: bool = False) -> SupervisedCommand:
        code, args = body.get("code"), body.get("args") or []
        if not isinstance(code, str) or len(code) > MOST_CODE:
            raise InvalidRequest(f"'code' must be text of at most {MOST_CODE} characters", field="code")
        if not isinstance(args, list) or not all(isinstance(each, str) for each in args):
            raise InvalidRequest("'args' must be a list of texts", field="args")
        await self._commands.make_room()
        host = await self.host(body.get("env"))
        try:
            order = self.order(body, code)
        except BaseException:
            host.interpreter.give_back(host)
            raise
        work = {"code": code, "args": args, "env": order.env, "live": live}

        def hand_over(stdio: Stdio) -> None:
            host.run(work, order.directory, stdio)

        try:
            command = self._commands.start_on(order, host, hand_over)
        except BaseException:
            host.interpreter.give_back(host)
            raise
        finally:
            self._release(order)
        command.pid = host.spare
        command.begun.set()
        command.finished.add_done_callback(lambda _: self._end_bombs(command))
        return command

    def _end_bombs(self, command: SupervisedCommand) -> None:
        """Kill the leftovers of a call that the kernel killed for lack of memory: it may have been a fork bomb."""
        if command.status is not None and os.WIFSIGNALED(command.status) and os.WTERMSIG(command.status) == SIGKILL:
            self._commands.kill(command)

    def order(self, body: Json, code: str) -> Order:
        """Return the order of a call. The caller releases it."""
        shown = code if len(code) <= MOST_SHOWN else code[:MOST_SHOWN] + "…"
        fields = {name: body[name] for name in ("cwd", "stdin", "interactive", "id") if body.get(name) is not None}
        fields["timeout"] = TIMEOUT_S if body.get("timeout") is None else body["timeout"]
        fields["output_limit"] = OUTPUT_LIMIT if body.get("output_limit") is None else body["output_limit"]
        order = self._order({"command": ["python3"], "env": body.get("variables"), **fields})
        return replace(order, command=["python3", "-c", shown])

    async def host(self, env: object) -> PythonHost:
        """Return a host of the Python of an environment, of the workspace's virtual environment, or of the system."""
        return await self.interpreters.host(self._python(env), self._env)

    def _python(self, env: object) -> str:
        if env is not None:
            return _shared(env)
        if self._isolated and os.access(_OWN, os.X_OK):
            return _OWN
        if self._packages is not None:
            if os.access(f"{self._packages}/bin/python", os.X_OK):
                return f"{self._packages}/bin/python"
            raise Conflict("the packages of this sandbox's template are gone", hint="stop the sandbox, then resume it")
        if os.access(self._system, os.X_OK):
            return self._system
        found = find_program("python3", self._env.get("PATH", ""), -1)
        if found is None:
            raise Unsupported(
                "there is no python3 in this sandbox", hint="use an image or a template that has Python 3.9 or newer"
            )
        return found

    def _imports(self, python: str) -> list[str]:
        """Return the modules to import in advance: those of the template for its packages, else of the environment."""
        seen = self._packages is not None and python in {_OWN, f"{self._packages}/bin/python"}
        return self._ahead if seen else imports_of(python)


def _shared(env: object) -> str:
    return python_in(environment_path(env, "env"), "env")


def environment_path(value: object, field: str) -> str:
    """Return the path of an environment, given by its name or its path."""
    name = value.removeprefix(f"{ENVIRONMENTS}/") if isinstance(value, str) else ""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"'{field}' must be the name of an environment", field=field)
    return f"{ENVIRONMENTS}/{name}"


def python_in(environment: str, field: str) -> str:
    """Return the path of the Python of an attached environment, or raise `NotFound`."""
    python = f"{environment}/bin/python"
    if not os.access(python, os.X_OK):
        if os.path.lexists(python):
            name = os.path.basename(environment)
            raise Unsupported(
                f"environment '{name}' needs {os.path.realpath(python)}, which this sandbox does not have",
                field=field,
                hint="use an image with that Python, or install the packages in the image",
            )
        why = f"there is no environment '{os.path.basename(environment)}' in this sandbox"
        raise NotFound(why, field=field, hint="attach it first")
    return python


def put_files(files: Files, given: object) -> list[Stamp]:
    """Write files that are given as base64 to the workspace; return their stamps for `ProducedFiles.watching`."""
    if given is not None and not isinstance(given, dict):
        raise InvalidRequest("'files' must map paths to base64 text", field="files")
    decoded = {
        path: decode_base64("" if text is None else text, f"the content of {path[:200]!r}", "files")
        for path, text in (given or {}).items()
    }
    return [files.write_bytes(path, data) for path, data in decoded.items()]
