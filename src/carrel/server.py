"""The composition root: starts a control plane with the API on a socket, and stops both.

The one file that may import everything. The control plane and the API are imported while a zygote starts. What only few
requests need (FastAPI, httpx, Alembic, MCP) is imported by the first of them.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import json
import logging
import os
import resource
import secrets
import shutil
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import carrel
from carrel.config import FLEET_DATABASES, Settings, load
from carrel.control.host import HostParts, cluster_options, kubernetes_options, microvm_options
from carrel.errors import CarrelError, Conflict, InvalidRequest, PlatformError
from carrel.models import ClusterReport, HostReport
from carrel.primitives import tasks
from carrel.primitives.atomic import write_file
from carrel.primitives.imports import importing
from carrel.providers import open_providers
from carrel.providers.base import Provider
from carrel.providers.bundle import SupervisorBundle, bundles_of, provide
from carrel.providers.doctor import host_report
from carrel.providers.gvisor.options import GvisorOptions
from carrel.workspaces.layout import Layout
from carrel.workspaces.volumes.doctor import disk_quota, retention

if TYPE_CHECKING:
    from carrel.api.serving import HttpServer, SharedListener
    from carrel.control.nodes.workers import Worker, WorkerTable
    from carrel.control.plane import ControlPlane
    from carrel.control.secrets.rekeying import Rekeyed

log = logging.getLogger("carrel.server")

_LOG_FORMAT = "%(asctime)s %(levelname)s {}%(name)s: %(message)s"
_BEAT_S = 0.1
"""The time between two signs of life of a worker."""
_WRITER_BEAT_S = 1.0
_SWITCH_S = 0.0005
"""How long a thread of a worker may wait for the interpreter: it may have a lock that other workers wait for."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


@dataclass(frozen=True)
class ServerFacts:
    """The facts of a running server that its operator sees."""

    url: str
    """The URL for clients on this machine."""
    listens_on: str
    """The address that it listens on, as a URL; `http://0.0.0.0:7070` for every address of this machine."""
    token: str | None
    token_is_new: bool
    """Whether this start generated the token."""
    data_dir: str
    adopted: int
    """How many running sandboxes of a former server were found."""


@dataclass(frozen=True)
class RunningServer(ServerFacts):
    """A running server that is one process."""

    plane: ControlPlane


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token(settings: Settings) -> tuple[str | None, bool]:
    """Return the administrator's token, and whether it is new."""
    if not settings.auth:
        if not is_loopback(settings.host):
            raise InvalidRequest(
                "a server without authentication must listen on a loopback address",
                field="auth",
                hint="leave auth on, or listen on 127.0.0.1",
            )
        return None, False
    path = _token_file(settings.data_dir)
    token = settings.token
    if token is None:
        token = _stored_token(path)
        if token:
            os.chmod(path, 0o600)
            return token, False
        token = "carrel_" + secrets.token_urlsafe(32)
    write_file(path, f"{token}\n".encode())
    return token, settings.token is None


def _token_file(data_dir: str) -> str:
    return os.path.join(data_dir, "token")


def _stored_token(path: str) -> str | None:
    """Read the token in a file; None if there is none."""
    with suppress(OSError, UnicodeDecodeError), open(path, encoding="ascii") as file:
        return file.read(1024).strip() or None
    return None


async def _store_agent_token(settings: Settings, plane: ControlPlane) -> None:
    """Store the token for programs on this machine beside the administrator's. An invalid one is replaced."""
    from carrel.control.governance.agent_token import agent_token

    path = os.path.join(settings.data_dir, "agent-token")
    stored = _stored_token(path)
    token = await agent_token(plane.tokens, plane.audit, stored, None if settings.database is None else plane.server)
    if token == stored:
        os.chmod(path, 0o600)
    else:
        write_file(path, f"{token}\n".encode())


@contextmanager
def _locked(data_dir: str) -> Iterator[None]:
    fd = os.open(os.path.join(data_dir, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Conflict(
                f"another carrel server uses {data_dir}",
                field="data_dir",
                hint="stop that server, use it, or choose another directory with --data-dir",
            ) from None
        yield
    finally:
        os.close(fd)


def _bind(host: str, port: int, host_field: str, port_field: str) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(
            f"cannot listen on '{host}': {error}",
            field=host_field,
            hint="use an address of this machine",
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        raise PlatformError(
            f"cannot listen on {host}:{port}: {getattr(error, 'strerror', error)}",
            field=port_field,
            hint="another program may use it; --port 0 picks a free one",
        ) from None
    return listener


def _bind_for_nodes(settings: Settings, worker: int = 0) -> socket.socket | None:
    """Listen for other servers; None where they have no SPIFFE IDs, and for a server that is alone on its database.
    Each worker has a port of its own: those after the one of the setting.
    """
    if settings.spiffe.source == "none" or settings.database is None:
        return None
    host, _, port = (settings.spiffe.listen or f"{settings.host}:0").rpartition(":")
    return _bind(host.strip("[]"), int(port) and int(port) + worker, "spiffe.listen", "spiffe.listen")


def _urls(listener: socket.socket) -> tuple[str, str]:
    """Return the URL for clients on this machine, and the address of the listener."""
    host, port = listener.getsockname()[:2]
    near = "127.0.0.1" if host in {"0.0.0.0", "::"} else host
    return _http_url(near, port), _http_url(host, port)


def _hosts(settings: Settings) -> frozenset[str] | None:
    """Return the hosts that requests may name; None for any."""
    if not is_loopback(settings.host):
        return None
    named = urlsplit(settings.node_url or "").hostname  # a proxy in front of it may pass this name on
    return _LOOPBACK | {settings.host.lower()} | (frozenset() if named is None else {named})


def _node_url(listener: socket.socket, for_nodes: socket.socket | None) -> str:
    """Return where other servers reach this one, unless the operator says it."""
    from carrel.control.nodes.registry import SPIFFE_SCHEME, default_url

    host, port = (for_nodes or listener).getsockname()[:2]
    return default_url(host, port, "http" if for_nodes is None else SPIFFE_SCHEME)


@asynccontextmanager
async def _accepting_nodes(
    plane: ControlPlane, server: HttpServer, listener: socket.socket | None
) -> AsyncIterator[None]:
    """Accept connections of other servers, verified by their SPIFFE IDs, while the block runs."""
    if listener is None or plane.identities is None:
        yield
        return
    from carrel.primitives.tls_listener import TlsListener

    async def close_revoked() -> None:
        while True:
            server.close_of(await plane.nodes.next_revocation())

    accepting = TlsListener(listener, plane.identities.node.server_context, server.node_protocol(plane.nodes.accepts))
    running = [asyncio.ensure_future(each) for each in (accepting.run(), close_revoked())]
    try:
        yield
    finally:
        await tasks.cancel(running)


def _bind_https(settings: Settings) -> socket.socket | None:
    """Listen for HTTPS requests, if the operator wants that."""
    ports = settings.ports
    if ports.listen is None:
        return None
    if ports.certificate_file is None or ports.key_file is None:
        raise InvalidRequest(
            "requests over HTTPS need a certificate and its key",
            field="ports.listen",
            hint="set CARREL_PORTS_CERTIFICATE_FILE and CARREL_PORTS_KEY_FILE, or put a proxy in front of carrel",
        )
    host, _, port = ports.listen.rpartition(":")
    return _bind(host.strip("[]") or "0.0.0.0", int(port), "ports.listen", "ports.listen")


@asynccontextmanager
async def _accepting_https(
    settings: Settings, server: HttpServer, listener: socket.socket | None
) -> AsyncIterator[None]:
    """Accept connections with TLS while the block runs."""
    ports = settings.ports
    if listener is None or ports.certificate_file is None or ports.key_file is None:
        yield
        return
    from carrel.api.https import Certificate
    from carrel.primitives.tls_listener import TlsListener

    certificate = await asyncio.to_thread(Certificate, ports.certificate_file, ports.key_file)
    task = asyncio.ensure_future(TlsListener(listener, certificate.context, server.protocol).run())
    try:
        yield
    finally:
        await tasks.cancel((task,))


def _http_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _import_the_rest() -> None:
    """Import everything that serves requests, except what only few requests need (see `tests/test_server.py`)."""
    for name in ("carrel.control.plane", "carrel.api", "carrel.api.serving"):
        import_module(name)


@asynccontextmanager
async def running(
    settings: Settings, *, providers: Mapping[str, Provider] | None = None
) -> AsyncIterator[RunningServer]:
    """Run a server in the current event loop until the block ends. `port=0` picks a free port."""
    await asyncio.to_thread(Layout(settings.data_dir).prepare)
    with ExitStack() as held:
        held.enter_context(_locked(settings.data_dir))
        listener = held.enter_context(closing(_bind(settings.host, settings.port, "host", "port")))
        if (for_nodes := _bind_for_nodes(settings)) is not None:
            held.enter_context(closing(for_nodes))
        if (https := _bind_https(settings)) is not None:
            held.enter_context(closing(https))
        token, token_is_new = _token(settings)
        async with (
            _answering(settings, token, None, [listener], providers) as (plane, server),
            _accepting_nodes(plane, server, for_nodes),
            _accepting_https(settings, server, https),
        ):
            url, listens_on = _urls(listener)
            try:
                await plane.nodes.join(settings.node_url or _node_url(listener, for_nodes), carrel.__version__)
                _write_record(settings, url)
                adopted = plane.recovered.adopted
                yield RunningServer(url, listens_on, token, token_is_new, settings.data_dir, adopted, plane)
            finally:
                _remove_record(settings)


@asynccontextmanager
async def _answering(
    settings: Settings,
    token: str | None,
    worker: Worker | None,
    listeners: list[socket.socket],
    providers: Mapping[str, Provider] | None = None,
) -> AsyncIterator[tuple[ControlPlane, HttpServer]]:
    """Open a control plane, and answer requests on sockets until the block ends. `worker` is None for a server that is
    one process.
    """
    loop = asyncio.get_running_loop()
    first, last = (True, True) if worker is None else (worker.alone, worker.first)
    host = await HostParts.open(settings, providers, first=first, last=last)  # its processes start during the imports
    try:
        await loop.run_in_executor(None, _import_the_rest)
        from carrel.api import create_app
        from carrel.api.serving import HttpServer
        from carrel.connections import Connections, connections_allowed
        from carrel.control.plane import ControlPlane
    except BaseException:
        await host.close()
        raise
    plane = await ControlPlane.open(settings, host=host, token=token, worker=worker)
    try:
        hosts = _hosts(settings)
        app = create_app(plane, authenticated=token is not None, hosts=hosts, version=carrel.__version__)
        server = HttpServer(app, Connections(connections_allowed()))
        if token is not None and plane.worker.first:
            await _store_agent_token(settings, plane)
    except BaseException:
        await plane.close()
        raise
    task = loop.create_task(server.serve(sockets=listeners))
    try:
        while not server.started:
            if task.done():
                await task
                raise PlatformError("the HTTP server did not start")
            await asyncio.sleep(0.005)
        yield plane, server
    finally:
        server.end()
        try:
            # Sandboxes end first: this answers the requests that wait for them.
            await plane.close()
        finally:
            await asyncio.gather(task, return_exceptions=True)


def _record_file(settings: Settings) -> str:
    return os.path.join(settings.data_dir, "server.json")


def _write_record(settings: Settings, url: str) -> None:
    """Let clients on this machine find the server."""
    shown = {"url": url, "pid": os.getpid(), "folder_roots": settings.sandbox.folder_root_paths}
    write_file(_record_file(settings), (json.dumps(shown) + "\n").encode())


def _remove_record(settings: Settings) -> None:
    with suppress(OSError):
        os.unlink(_record_file(settings))


def local_host_report() -> HostReport:
    """Report the capabilities of this host without a server. Nothing is started or written."""
    settings = Settings()
    with suppress(CarrelError):  # `serve` reports invalid settings
        settings = load()
    report = host_report(
        open_providers(
            "/",
            "/",
            allow_process=settings.sandbox.allow_process,
            docker=settings.docker.socket,
            gvisor=GvisorOptions(settings.gvisor.runsc, settings.gvisor.platform),
            microvm=microvm_options(settings.microvm),
            kubernetes=kubernetes_options(settings),
            bundles="/",
            third_party=settings.sandbox.third_party_names,
        ),
        settings.sandbox.third_party_names,
    )
    checks = [*report.checks, disk_quota(), retention(settings.workspace_ttl_days)]
    return report.model_copy(update={"checks": checks})


def local_cluster_report(settings: Settings) -> ClusterReport:
    """Report what the cluster of these settings offers. Nothing is made there."""
    from carrel.providers.kubernetes.access import find_access
    from carrel.providers.kubernetes.api import KubernetesApi
    from carrel.providers.kubernetes.examination import Examination

    options = cluster_options(settings)

    async def examine() -> ClusterReport:
        access = find_access(options.kubeconfig)
        api = KubernetesApi(access)
        try:
            checks = await Examination(api, options).run()
        finally:
            await api.close()
        return ClusterReport(server=access.server, namespace=options.namespace, checks=checks)

    return asyncio.run(examine())


def make_bundle(settings: Settings) -> SupervisorBundle:
    """Make the supervisor's bundle in the data directory, or return the one that is there. Needs no server."""
    return provide(bundles_of(settings.data_dir))


def make_bundle_image(settings: Settings, path: Path, name: str) -> SupervisorBundle:
    """Make the bundle for remote supervisors, and write it to a file as an image for pods. Needs no server."""
    from carrel.providers import bundle_image

    made = provide(bundles_of(settings.data_dir), remote=True)
    bundle_image.write(made, str(path), name)
    return made


def rekey(settings: Settings, *, old_key: str | None = None, new_key: str | None = None) -> Rekeyed:
    """Change the key of the secrets. Raises `Conflict` while a server uses this data directory."""
    from carrel.control.secrets.rekeying import rekey as change

    try:
        with _locked(settings.data_dir):
            return asyncio.run(change(settings, old_key=old_key, new_key=new_key))
    except OSError as error:
        raise PlatformError(
            f"the data directory {settings.data_dir} cannot be used: {error.strerror}",
            field="data_dir",
            hint="name the server's data directory with --data-dir or CARREL_DATA_DIR",
        ) from None


def _welcome(server: ServerFacts, *, at_terminal: bool) -> str:
    """Return the text for the person who starts the server. The output may be a log that others read, so the token is
    shown only at a terminal, and only once.
    """
    lines = [f"carrel {carrel.__version__} listens on {server.listens_on}"]
    if server.listens_on != server.url:
        lines.append(f"here   {server.url}")
    lines.append(f"docs   {server.url}/docs")
    path = _token_file(server.data_dir)
    if server.token is None:
        lines.append("token  not required")
    elif server.token_is_new and at_terminal:
        lines.append(f"token  {server.token}  (shown only this once; stored in {path})")
    else:
        lines.append(f"token  the administrator's token is in {path}")
    if server.adopted:
        lines.append(f"found  {server.adopted} running sandboxes of the previous server")
    command = "carrel" if shutil.which("carrel") else os.path.join(os.path.dirname(sys.executable), "carrel")
    lines.append(f"try    {command} run 'echo hello from $(hostname)'")
    return "\n".join(lines)


def _announce(server: ServerFacts, settings: Settings) -> None:
    print(_welcome(server, at_terminal=sys.stdout.isatty()), flush=True)  # noqa: T201
    if not is_loopback(settings.host):
        log.warning(
            "other machines can connect to this server over plain HTTP, which sends tokens and files unencrypted; "
            "listen on 127.0.0.1 and put a proxy with TLS in front of it"
        )


def _call_when_unused(users: Path, unused: Callable[[], object]) -> None:
    """Call a function in another thread when no process has a shared lock on the file `users` any more.

    The kernel releases the lock of a process that was killed. This server then keeps the lock until it has ended, so
    that a new user waits and starts another server.
    """

    def wait() -> None:
        descriptor = os.open(users, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(RuntimeError):  # the loop has ended already
            unused()

    threading.Thread(target=wait, name="carrel-users", daemon=True).start()


async def _serve(settings: Settings, users: Path | None, starting: Sequence[int]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if users is not None:
        _call_when_unused(users, lambda: loop.call_soon_threadsafe(stop.set))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        with importing():
            server = await stack.enter_async_context(running(settings))
        for each in starting:
            os.close(each)
        _announce(server, settings)
        if users is None:
            from carrel.api.app import resources

            await asyncio.to_thread(resources)  # no request has to wait for it
        await _ended(stop, server.plane)
        log.info("shutting down")


def serve(settings: Settings, users: Path | None = None, starting: Sequence[int] = ()) -> None:
    """Run a server until SIGTERM or SIGINT; then stop every sandbox. Durable workspaces stay.

    With `users` it also ends when no process has a lock on that file. The descriptors `starting` are closed when this
    server is ready: a lock that keeps others from starting a second server, and the pipe that somebody waits for.
    """
    for each in starting:
        os.set_inheritable(each, False)
    logging.basicConfig(level=settings.log_level.upper(), stream=sys.stderr, format=_LOG_FORMAT.format(""))
    if settings.log_level != "debug":
        for name in ("uvicorn", "httpx"):  # the latter writes addresses, and some are signed: they are secrets
            logging.getLogger(name).setLevel(logging.WARNING)
    _raise_file_limit()
    if settings.workers > 1 and users is None:
        _serve_with_workers(settings, settings.workers)
        return
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, users, starting))


# with several workers


def _serve_with_workers(settings: Settings, count: int) -> None:
    """Run a server of several processes: this one leads them."""
    from carrel.control.nodes.workers import Worker, WorkerTable
    from carrel.workers import Leader

    if settings.node_url is not None:
        raise InvalidRequest(
            "a server with several workers has no single address for other servers: each worker has one of its own",
            field="node_url",
            hint="leave CARREL_NODE_URL out, or run one worker",
        )
    if settings.kubernetes.enabled:
        raise InvalidRequest(
            "pods of a cluster need servers of one worker: the slots of pods are kept by one process",
            field="workers",
            hint="run one worker in each server, and more servers",
        )
    layout = Layout(settings.data_dir)
    layout.prepare()
    with (
        _locked(settings.data_dir),
        closing(_bind(settings.host, settings.port, "host", "port")) as listener,
        ExitStack() as held,
    ):
        if (https := _bind_https(settings)) is not None:
            held.enter_context(closing(https))
        token, token_is_new = _token(settings)
        _import_for_workers()
        table, (url, listens_on) = WorkerTable(count), _urls(listener)

        def work(index: int, alone: bool) -> None:
            import uvloop

            for handler in logging.getLogger().handlers:
                handler.setFormatter(logging.Formatter(_LOG_FORMAT.format(f"worker-{index} ")))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_work(settings, token, table, listener, https, index, alone=alone))

        def started() -> None:
            _write_record(settings, url)
            facts = ServerFacts(url, listens_on, token, token_is_new, settings.data_dir, table.adopted())
            _announce(facts, settings)

        def write() -> None:
            import uvloop

            for handler in logging.getLogger().handlers:
                handler.setFormatter(logging.Formatter(_LOG_FORMAT.format("writer ")))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_write(settings, table))

        try:
            Leader(table, work, None if _is_fleet(settings) else write).run(started)
        finally:
            _remove_record(settings)
            for path in (_worker_locks(layout), Worker.turns_of(_worker_locks(layout)), _writer_socket(layout)):
                with suppress(OSError):
                    os.unlink(path)


def _import_for_workers() -> None:
    """Import what workers need before they are forked: they share its memory, and a replacement starts at once."""
    with importing():
        _import_the_rest()
        import uvloop  # noqa: F401

        from carrel.api.app import resources
        from carrel.isolation import probe

        resources()
        probe.host()  # the workers get the findings


def _worker_locks(layout: Layout) -> str:
    return os.path.join(layout.run, "workers.lock")


def _writer_socket(layout: Layout) -> str:
    return os.path.join(layout.run, "writer.sock")


def _is_fleet(settings: Settings) -> bool:
    """Whether several servers share the database, which lets several processes write at the same time."""
    return settings.database_url.startswith(FLEET_DATABASES)


async def _write(settings: Settings, table: WorkerTable) -> None:
    """Write the records of all workers until SIGTERM."""
    from carrel.control.nodes.workers import Worker
    from carrel.store.batch_writer import Writer
    from carrel.store.database import Database, Workers

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    layout = Layout(settings.data_dir)
    turns = Workers(Worker.turns_of(_worker_locks(layout)), table.workers, lambda _tables: None, writer=True)
    async with AsyncExitStack() as stack:
        database = await Database.open(settings.database_url, turns)
        stack.push_async_callback(database.close)
        writer = Writer(database)
        stack.push_async_callback(writer.close)
        await writer.listen(_writer_socket(layout))
        table.beat(table.writer)
        table.set_ready(table.writer, True)
        stack.callback(table.set_ready, table.writer, False)
        while not stop.is_set():
            table.beat(table.writer)
            with suppress(TimeoutError):
                async with asyncio.timeout(_WRITER_BEAT_S):
                    await stop.wait()


async def _work(
    settings: Settings,
    token: str | None,
    table: WorkerTable,
    listener: socket.socket,
    https: socket.socket | None,
    index: int,
    *,
    alone: bool,
) -> None:
    """Run one worker until SIGTERM."""
    from carrel.api.serving import SharedListener
    from carrel.control.nodes.registry import UNIX
    from carrel.control.nodes.workers import SharedChange, Worker

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sys.setswitchinterval(_SWITCH_S)
    layout = Layout(settings.data_dir)
    worker = Worker(
        settings.node or layout.node(),
        index,
        table.workers,
        table,
        socket=os.path.join(layout.run, f"worker-{index}.sock"),
        locks=_worker_locks(layout),
        writer="" if _is_fleet(settings) else _writer_socket(layout),
        alone=alone,
    )
    own: list[socket.socket] = []
    for_nodes: socket.socket | None = None
    # Where several servers share the database, others reach each worker by itself.
    if _is_fleet(settings) and (for_nodes := _bind_for_nodes(settings, index)) is None:
        own.append(_bind(settings.host, 0, "host", "port"))
    async with AsyncExitStack() as stack:
        if for_nodes is not None:
            stack.enter_context(closing(for_nodes))
        plane, server = await stack.enter_async_context(_answering(settings, token, worker, own))
        await stack.enter_async_context(_accepting_nodes(plane, server, for_nodes))
        await stack.enter_async_context(_accepting_https(settings, server, https))
        await server.listen_too(worker.socket)
        stack.callback(os.unlink, worker.socket)
        reached = own[0] if own else for_nodes
        url = UNIX + worker.socket if reached is None else _node_url(reached, for_nodes)
        await plane.nodes.join(url, carrel.__version__)
        table.set_adopted(index, plane.recovered.adopted)
        table.beat(index)
        table.set_ready(index, True)
        stack.callback(table.set_ready, index, False)
        worker.announce(SharedChange.NODES)

        def has_more(connections: int) -> bool:
            table.set_connections(index, connections)
            return connections > table.least_connections()

        port = SharedListener(listener, server, has_more)
        stack.callback(port.close)
        beating = asyncio.get_running_loop().create_task(_beat(table, worker, plane, port))
        stack.push_async_callback(tasks.cancel, [beating])
        await _ended(stop, plane)
        if plane.nodes.expelled.is_set():
            os.kill(os.getppid(), signal.SIGTERM)  # the whole server ends
            await stop.wait()
        log.info("shutting down")


async def _ended(stop: asyncio.Event, plane: ControlPlane) -> None:
    """Wait until this process is told to end, or its SPIFFE ID is revoked."""
    ends = [asyncio.ensure_future(each.wait()) for each in (stop, plane.nodes.expelled)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await tasks.cancel(ends)


async def _beat(table: WorkerTable, worker: Worker, plane: ControlPlane, port: SharedListener) -> None:
    """Give signs of life to the leader, and tell the other workers how busy this one is."""
    while True:
        table.beat(worker.index)
        port.tell()
        plane.nodes.tell()
        await asyncio.sleep(_BEAT_S)
