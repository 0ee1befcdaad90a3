"""A server that runs a coding agent for each of its users and streams the agent's JSON output, line by line.

    carrel serve &
    python examples/agent_cli_server.py --port 8100 -- claude -p --output-format stream-json --verbose &
    curl -d 'Fix the failing test' http://127.0.0.1:8100/users/ann/runs
    curl -N http://127.0.0.1:8100/users/ann/runs/RUN/events

Each user has a context, so one user's agent sees nothing of another's. With `--folders DIR` the agent of a user works
on the folder DIR/USER of this machine, in place; the carrel server must allow that (CARREL_SANDBOX_FOLDER_ROOTS=DIR).
Then `carrel undo` in such a folder takes back what the agent did there. The profile of the program (`carrel.profiles`)
says what it may reach; keys in the environment of this server are put into requests and are never in a sandbox.

The server keeps no state. A run is found by the id of its command, and the id of an event says where its line ends. So
a browser's `EventSource`, or a client that sends `Last-Event-ID`, goes on after a restart of this server without a line
lost or repeated. The extra `server` or `mcp` of carrel has what it needs (docs/how-to/install.md).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from carrel import AsyncClient, NotFound
from carrel.client import AsyncSandbox
from carrel.errors import CarrelError
from carrel.profiles.files import prepare

MOST_PROMPT = 100_000


@dataclass(frozen=True)
class Mark:
    """A place in the output: a number of lines after an offset that carrel understands. Written as `offset-lines`."""

    offset: int = 0
    lines: int = 0

    @classmethod
    def read(cls, text: str) -> Mark:
        """Read a mark that a client sends back."""
        found = re.fullmatch(r"(\d{1,18})-(\d{1,9})", text)
        return cls(int(found[1]), int(found[2])) if found else cls()

    def __str__(self) -> str:
        return f"{self.offset}-{self.lines}"


class Agents:
    """Runs the agents of all users."""

    def __init__(self, carrel: AsyncClient, command: Sequence[str], folders: Path | None):
        self._carrel = carrel
        self._command = command
        self._folders = folders

    async def start(self, user: str, prompt: str) -> str:
        """Start the agent of a user with a prompt, and return the id of the run."""
        context = f"agent-of-{user}"
        command = [*self._command, prompt]
        folder = None if self._folders is None else str(self._folders / user)
        if folder is not None:
            os.makedirs(folder, exist_ok=True)
        setup = prepare(command, folder, environ=os.environ, home=str(Path.home()))
        await self._carrel.policy(context).put(settings=setup.settings, sources=setup.sources)
        for name, value in setup.secrets.items():
            await self._carrel.secrets(context).put(name, value)
        box = await self._carrel.sandbox(context, network=setup.network, workspace_path=folder)
        run = f"k{secrets.token_hex(12)}"
        await box.commands.start(list(setup.command), cwd=folder, env=setup.env, id=run)
        return run

    async def events(self, user: str, run: str, mark: Mark) -> AsyncIterator[str]:
        """Yield the lines of a run after a mark, as server-sent events, until the agent ends."""
        box = await self._box(user)
        stream = box.commands.get(run).stream(mark.offset)
        rest, skip, mark = b"", mark.lines, Mark(mark.offset)
        async for chunk in stream:
            if chunk.stream != "stdout":
                continue
            *lines, rest = (rest + chunk.data).split(b"\n")
            for line in lines:
                mark = Mark(mark.offset, mark.lines + 1)
                if mark.lines > skip:
                    yield f"id: {mark}\ndata: {line.decode(errors='replace')}\n\n"
            if not rest and mark.lines >= skip:
                mark, skip = Mark(chunk.offset), 0
        ended = None if stream.info is None else stream.info.exit_code
        yield f"event: end\nid: {mark}\ndata: {json.dumps({'exit_code': ended})}\n\n"

    async def _box(self, user: str) -> AsyncSandbox:
        return self._carrel.attach(await self._carrel.find(f"agent-of-{user}"))


def application(command: Sequence[str], folders: Path | None) -> Starlette:
    """Return the web application."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncClient(administrator=True) as carrel:
            app.state.agents = Agents(carrel, command, folders)
            yield

    async def start(request: Request) -> Response:
        prompt = (await request.body()).decode(errors="replace")
        if not 0 < len(prompt) <= MOST_PROMPT:
            raise HTTPException(400, f"send a prompt of 1 to {MOST_PROMPT} characters")
        run = await request.app.state.agents.start(_user(request), prompt)
        return JSONResponse({"run": run}, 201)

    async def events(request: Request) -> Response:
        mark = Mark.read(request.headers.get("last-event-id", ""))
        lines = request.app.state.agents.events(_user(request), request.path_params["run"], mark)
        try:
            first = await anext(lines)  # so that a run that does not exist is an error and not an empty stream
        except StopAsyncIteration:
            raise HTTPException(404, "there is no such run") from None

        async def body() -> AsyncIterator[str]:
            yield first
            async for each in lines:
                yield each

        return StreamingResponse(body(), media_type="text/event-stream")

    async def failed(_request: Request, error: Exception) -> Response:
        status = 404 if isinstance(error, NotFound) else 502
        return JSONResponse({"error": str(error)}, status)

    return Starlette(
        routes=[
            Route("/users/{user}/runs", start, methods=["POST"]),
            Route("/users/{user}/runs/{run}/events", events),
        ],
        exception_handlers={CarrelError: failed},
        lifespan=lifespan,
    )


def _user(request: Request) -> str:
    """Return the user. A real server takes it from its own login, never from the address."""
    user = str(request.path_params["user"])
    if not re.fullmatch(r"[a-z0-9-]{1,40}", user):
        raise HTTPException(400, "a user's name is made of lower-case letters, digits and hyphens")
    return user


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--folders", type=Path, metavar="DIR", help="users work on DIR/USER; else in stored workspaces")
    parser.add_argument("command", nargs="+", help="the agent's CLI and its arguments; the prompt is added at the end")
    given = parser.parse_args()
    folders = None if given.folders is None else given.folders.resolve()
    try:
        uvicorn.run(application(given.command, folders), host="127.0.0.1", port=given.port, log_level="warning")
    except CarrelError as problem:
        sys.exit(f"{problem}\n{problem.hint or ''}")
