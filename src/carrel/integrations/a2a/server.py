"""The agent's process: connects graph, stores and routes behind one socket. It holds no token but the approver's."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version

import uvicorn
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes, create_rest_routes
from a2a.utils.constants import AGENT_CARD_WELL_KNOWN_PATH
from langchain_core.language_models import BaseChatModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from carrel.client import AsyncClient
from carrel.integrations.a2a.background import Background
from carrel.integrations.a2a.callers import CallContexts, Callers, TokenGate
from carrel.integrations.a2a.card import REST_PATH, RPC_PATH, agent_card
from carrel.integrations.a2a.conversations import Conversations
from carrel.integrations.a2a.executor import AT_ONCE, Executor, Resume
from carrel.integrations.a2a.handler import Handler
from carrel.integrations.a2a.inbox import Inbox
from carrel.integrations.a2a.push import Destinations, Push
from carrel.integrations.a2a.retention import KEEP_DAYS, TaskRetention
from carrel.integrations.a2a.runs import TaskRuns
from carrel.integrations.a2a.tasks import open_tasks
from carrel.integrations.http import listen, url_of, uvicorn_config
from carrel.integrations.langgraph import ModelMetrics, build_graph, open_checkpointer, resolve_model

GRACE_S = 5
TABLES, TABLES_S = "the tables of tasks", 30.0
HEALTH, METRICS, OLD_CARD = "/healthz", "/metrics", "/.well-known/agent.json"
CARD_CACHE = "public, max-age=300"
"""The card changes only when the agent is restarted."""
OPEN_PATHS = frozenset({AGENT_CARD_WELL_KNOWN_PATH, OLD_CARD, HEALTH})
_CALLERS_MISTAKES = (
    "Failed to parse request params",
    "Failed to validate base JSON-RPC request",
    "Validation failure",
    "Version mismatch",
)
_ANSWERED = "Request Error"  # a warning when the request was wrong, an error when the agent was


@dataclass(frozen=True)
class AgentSettings:
    """The settings of an agent."""

    carrel_url: str
    database: str
    model: str = "shell"
    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 7073
    public_url: str | None = None
    approver_token: str | None = field(default=None, repr=False)
    push_hosts: tuple[str, ...] = ()
    at_once: int = AT_ONCE
    keep_days: float = KEEP_DAYS
    """Tasks are deleted this long after their end."""


@dataclass(frozen=True)
class RunningAgent:
    """The URLs of a running agent."""

    url: str
    card_url: str


class _HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its owner."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield


@asynccontextmanager
async def running(settings: AgentSettings, model: BaseChatModel | None = None) -> AsyncIterator[RunningAgent]:
    """Run an agent during the block. Afterwards another process can continue its tasks.

    A given `model` is used instead of the one that the settings name.
    """
    destinations = Destinations(settings.push_hosts)
    metrics = ModelMetrics()
    if model is None:
        model = resolve_model(settings.model, base_url=settings.base_url, metrics=metrics)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(settings.host, settings.port))
        url = (settings.public_url or url_of(settings.host, listener.getsockname()[1])).rstrip("/")
        card = agent_card(url, model=settings.model, version=version("carrel"))
        checkpoints = await stack.enter_async_context(open_checkpointer(settings.database))
        async with checkpoints.running(TABLES, wait_s=TABLES_S):  # agents that start together create tables once
            kept = await stack.enter_async_context(open_tasks(settings.database))
        callers = Callers(settings.carrel_url)
        stack.push_async_callback(callers.close)
        approver = None
        if settings.approver_token is not None:
            approver = await stack.enter_async_context(AsyncClient(settings.carrel_url, settings.approver_token))
        background = await stack.enter_async_context(Background())
        graph = build_graph(model, checkpointer=checkpoints.saver)
        conversations = Conversations(graph, checkpoints)
        retention = TaskRetention(kept, conversations, checkpoints, keep_days=settings.keep_days)
        background.start(retention.run(), "forget old tasks")
        runs = TaskRuns(graph, conversations, kept, approver=approver, speaks=settings.model != "shell")
        inbox = Inbox(callers, background)

        def make_executor(resume: Resume) -> Executor:
            return Executor(runs, checkpoints, kept, callers, inbox, background, resume, at_once=settings.at_once)

        push = Push(kept.push, destinations, background)
        stack.push_async_callback(push.close)
        handler = Handler(make_executor, kept, card, push, background)
        stack.push_async_callback(handler.aclose)
        routes: list[BaseRoute] = [
            *create_agent_card_routes(card, cache_control=CARD_CACHE),
            *create_agent_card_routes(card, card_url=OLD_CARD, cache_control=CARD_CACHE),
            Route(HEALTH, _healthy),
            Route(METRICS, _metrics(metrics)),
            *create_jsonrpc_routes(handler, RPC_PATH, CallContexts(), enable_v0_3_compat=True),
            *create_rest_routes(handler, CallContexts(), enable_v0_3_compat=True, path_prefix=REST_PATH),
        ]
        gate = TokenGate(Starlette(routes=routes), callers, OPEN_PATHS)
        await stack.enter_async_context(_serving(gate, listener))
        yield RunningAgent(url, url + AGENT_CARD_WELL_KNOWN_PATH)


@asynccontextmanager
async def _serving(app: TokenGate, listener: socket.socket) -> AsyncIterator[None]:
    server = _HttpServer(uvicorn_config(app, grace_s=GRACE_S, loop="none", lifespan="off", log_config=None))
    serving = asyncio.get_running_loop().create_task(server.serve([listener]), name="agent")
    try:
        await server.up.wait()
        yield
    finally:
        server.should_exit = True
        await serving


async def _healthy(_request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _metrics(metrics: ModelMetrics) -> Callable[[Request], Awaitable[Response]]:
    async def show(_request: Request) -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    return show


async def _serve(settings: AgentSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with running(settings) as agent:
        print(_welcome(agent, settings), flush=True)  # noqa: T201 - what a person who starts the agent needs to see
        await stop.wait()


def _welcome(agent: RunningAgent, settings: AgentSettings) -> str:
    decides = "callers' answers decide" if settings.approver_token else "decided with `carrel approve`"
    return (
        f"carrel agent listens on {agent.url}\n"
        f"  card      {agent.card_url}\n"
        f"  model     {settings.model}\n"
        f"  carrel    {settings.carrel_url}\n"
        f"  approvals {decides}"
    )


def serve(settings: AgentSettings, *, log_level: str = "info") -> None:
    """Run an agent until SIGTERM or SIGINT."""
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if log_level != "debug":
        for name in ("a2a", "uvicorn", "httpx"):
            logging.getLogger(name).setLevel(logging.WARNING)
        for handler in logging.getLogger().handlers:
            handler.addFilter(_CallersMistakes())
    with asyncio.Runner(loop_factory=_loop()) as runner:
        runner.run(_serve(settings))


def _loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ModuleNotFoundError:  # it is part of the server's packages, which may not be installed here
        return asyncio.new_event_loop
    return uvloop.new_event_loop


class _CallersMistakes(logging.Filter):
    """Drops the SDK's log records of invalid requests, which often have a traceback. Their callers get an error."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record."""
        words = str(record.msg)
        if not record.name.startswith("a2a."):
            return True
        if words.startswith(_ANSWERED):
            return record.levelno >= logging.ERROR
        return not words.startswith(_CALLERS_MISTAKES)
