"""Real servers to attack, as root and as an ordinary user, and things of the host that no attack may reach.

An attack is a function that runs inside a sandbox and returns evidence of a breach, or None. Against the namespace
provider it must bring none. Where an attack can be tried on the process provider without harm it must bring evidence
there: so a test that could never fail is found out. Attacks aim only at what is made here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support import images, microvm
from tests.support.attacks import answer, words
from tests.support.dockerd import DockerDaemon
from tests.support.gvisor import find_runsc
from tests.support.known_gaps import ATTACKED, NEEDED, NEVER, NOT_JUDGED, ON_IMAGE
from tests.support.masks_ground import Hold, holding
from tests.support.nesting import give
from tests.support.servers import ROOT, SOURCE, USER, Server, as_user, readable, serving

from carrel.client import Sandbox
from carrel.errors import Conflict, NotFound
from carrel.models import CommandResult
from carrel.primitives.trees import remove_tree

FOLDERS = {"sandbox.folder_roots": os.path.realpath(tempfile.gettempdir())}
IN_FOLDERS = {"test_host_files": "root in a folder", "test_mounts": "user in a folder"}
"""Modules whose attacks are also made from a sandbox that works on a folder of the host."""
NOT_SHARED = ("test_exhaustion", "test_termination")
"""Modules whose attacks may end the sandbox: each has its own."""
MASKS_ON_IMAGE = ("test_masks", "test_readonly")
"""Modules whose masked sandboxes are also made from an image, as root."""
ON_PODS = ("kubernetes", "kubernetes-gvisor")
PROVIDER = {"root in Docker": "docker", **{name: name for name in ("gvisor", "microvm", *ON_PODS)}}
"""The provider of each setting that has another one than `namespace`. `ATTACKED` lists the modules whose attacks are made
there; with `--on-gvisor` those of all are made in gVisor, with `--on-microvm` in virtual machines, with `--on-kubernetes` and
`--on-kubernetes-gvisor` in pods.
"""
IMAGE = "attacked:1"

# things of the host


@dataclass
class Host:
    """What the host has that a sandbox must not reach: all of it made for the tests, and open to every user."""

    directory: Path
    token: str
    process: int
    tcp: int
    udp: int
    abstract: str
    touched: list[str] = field(default_factory=list)

    @property
    def secret(self) -> str:
        """A file any user of the host can read; it holds the token."""
        return str(self.directory / "secret")

    @property
    def drop(self) -> str:
        """A directory any user of the host can write."""
        return str(self.directory / "drop")

    @property
    def unix(self) -> str:
        """A Unix socket any user of the host can connect to."""
        return str(self.directory / "socket")

    def intact(self) -> bool:
        """Whether the secret is as it was."""
        return Path(self.secret).read_text() == self.token

    def dropped(self) -> list[str]:
        """What has been written where anybody may write; forgotten then."""
        found = sorted(os.listdir(self.drop))
        for name in found:
            os.unlink(f"{self.drop}/{name}")
        return found


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    """Canaries on the host."""
    directory = Path(tempfile.mkdtemp(prefix="carrel-canary-"))
    directory.chmod(0o755)
    token = f"canary-{secrets.token_hex(12)}"
    (directory / "secret").write_text(token)
    (directory / "secret").chmod(0o644)
    (directory / "drop").mkdir()
    (directory / "drop").chmod(0o777)
    code = "import signal; signal.pause()"
    process = subprocess.Popen(
        as_user([sys.executable, "-c", code, token]), env={"CANARY": token, "PATH": os.environ["PATH"]}
    )
    listeners = {
        "tcp": socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        "udp": socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "abstract": socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
        "unix": socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    }
    listeners["tcp"].bind(("127.0.0.1", 0))
    listeners["udp"].bind(("127.0.0.1", 0))
    abstract = f"carrel-canary-{secrets.token_hex(8)}"
    listeners["abstract"].bind(f"\0{abstract}")
    listeners["unix"].bind(str(directory / "socket"))
    (directory / "socket").chmod(0o666)
    canaries = Host(
        directory,
        token,
        process.pid,
        listeners["tcp"].getsockname()[1],
        listeners["udp"].getsockname()[1],
        abstract,
    )
    stop, stopped = socket.socketpair()
    watcher = threading.Thread(target=_listen, args=(listeners, stopped, canaries))
    watcher.start()
    try:
        yield canaries
    finally:
        stop.close()
        watcher.join()
        for one in (*listeners.values(), stopped):
            one.close()
        process.kill()
        process.wait()
        shutil.rmtree(directory)


def _listen(listeners: dict[str, socket.socket], stopped: socket.socket, canaries: Host) -> None:
    import select

    for name in ("tcp", "abstract", "unix"):
        listeners[name].listen(16)
    while True:
        ready, _, _ = select.select([*listeners.values(), stopped], [], [])
        if stopped in ready:
            return
        for name, listener in listeners.items():
            if listener not in ready:
                continue
            if name == "udp":
                __data, sender = listener.recvfrom(1024)
                listener.sendto(canaries.token.encode(), sender)
            else:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(canaries.token.encode())
            canaries.touched.append(name)


# servers

_CONTAINERS: dict[str, Sandbox] = {}
"""By their networks: the containers that attackers in Docker share. Each takes a second to start."""


@pytest.fixture(scope="session")
def serve() -> Callable[..., contextlib.AbstractContextManager[Server]]:
    """Starts further servers, with settings of their own."""
    return serving


@pytest.fixture(scope="session")
def root_server(carrel_forks: None) -> Iterator[Server]:
    if not ROOT:
        pytest.skip("the server as root: the tests do not run as root")
    with serving(user=False, options=FOLDERS, forked=True) as server:
        yield server


@pytest.fixture(scope="session")
def docker_server(docker: DockerDaemon, carrel_forks: None) -> Iterator[Server]:
    """A server as root whose sandboxes are containers."""
    options = {"sandbox.provider": "docker", "docker.socket": docker.socket}
    with serving(user=False, options=options, forked=True) as server:
        for network in ("none", "allowlist"):
            _CONTAINERS[network] = server.client.sandbox(network=network)
        yield server
        _CONTAINERS.clear()


@pytest.fixture(scope="session")
def user_server() -> Iterator[Server]:
    with serving(user=True, options=FOLDERS) as server:
        yield server


@pytest.fixture(scope="session")
def gvisor_server(bundles: Path, carrel_forks: None) -> Iterator[Server]:
    if not ROOT or (runsc := find_runsc()) is None:
        pytest.skip("gVisor: the tests do not run as root, or scripts/build-runsc was not run")
    options = {**FOLDERS, "gvisor.runsc": runsc}

    def share_bundle(data: Path) -> None:
        (data / "bundles").symlink_to(bundles)

    with (
        serving(user=False, options=options, prepare=share_bundle, forked=True) as server,
        server.client.sandbox(trust="low") as box,
    ):
        _KEPT[server.pid] = {None: box}
        yield server


@pytest.fixture(scope="session")
def microvm_server(bundles: Path) -> Iterator[Server]:
    if not ROOT or not microvm.find_kernel():
        pytest.skip("virtual machines: the tests do not run as root, or scripts/fetch-kernel was not run")
    own = {"microvm.enabled": "true", "lease_s": "900"} | {  # emulation leaves little time to the server
        f"microvm.{name}": value for name, value in asdict(microvm.options()).items() if value != ""
    }

    def share_bundle(data: Path) -> None:
        (data / "bundles").symlink_to(bundles)

    with (
        serving(user=False, options={**FOLDERS, **own}, prepare=share_bundle) as server,
        server.client.sandbox(provider="microvm", network="none") as box,
    ):
        _KEPT[server.pid] = {None: box, "none": box}
        yield server


@pytest.fixture(scope="session")
def pods_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server as root whose sandboxes are pods of a real cluster."""
    if "CARREL_CLUSTER" not in os.environ:
        pytest.skip("pods: there is no cluster; run this below `scripts/cluster run`")
    from tests.cluster.ground import Cluster, Ground, add_images

    cluster, place = Cluster(), Path(tempfile.mkdtemp(prefix="k"))
    place.chmod(0o755)
    add_images(cluster, tmp_path_factory.mktemp("images"))
    gvisor = "gvisor" if request.config.getoption("--on-kubernetes-gvisor") else ""
    ground = Ground(cluster, place, gvisor_class=gvisor)
    try:
        options = {**FOLDERS, **ground.settings}
        with serving(user=False, options=options, data=ground.volume / "d") as server, server.client.sandbox() as box:
            _KEPT[server.pid] = {None: box}
            for network in ("none", "allowlist"):
                _KEPT[server.pid][network] = server.client.sandbox(network=network)
            yield server
    finally:
        ground.remove()


@pytest.fixture(scope="session")
def microvm_networks(microvm_server: Server) -> None:
    """One more machine, which attacks on that network share."""
    _KEPT[microvm_server.pid]["allowlist"] = microvm_server.client.sandbox(provider="microvm", network="allowlist")


@pytest.fixture(scope="session")
def microvm_neighbour(microvm_server: Server) -> Sandbox:
    """One more machine, which nobody ends or limits."""
    return microvm_server.client.sandbox(provider="microvm", network="none")


_KEPT: dict[int, dict[str | None, Sandbox]] = {}
"""The sandbox that attackers share where to start one takes longer than an attack, by its server."""
Spawn = Callable[[str, Path], subprocess.Popen[str]]


@pytest.fixture(params=["root", "user"], scope="module")
def spawn(request: pytest.FixtureRequest) -> Iterator[Spawn]:
    """Starts Python code that may import carrel, as root and as an ordinary user, with a directory that is its own."""
    with _spawning(user=request.param == "user") as start:
        yield start


@contextlib.contextmanager
def _spawning(*, user: bool) -> Iterator[Spawn]:
    if not user and not ROOT:
        pytest.skip("as root: the tests do not run as root")
    shared = Path(tempfile.mkdtemp(prefix="carrel-spawn-"))
    shared.chmod(0o755)
    packages = readable(shared) if user else str(SOURCE)

    def start(code: str, directory: Path) -> subprocess.Popen[str]:
        command = [os.path.realpath(sys.executable) if user else sys.executable, "-c", code, str(directory)]
        if user and ROOT:
            give(directory, USER)
        return subprocess.Popen(
            as_user(command) if user else command,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )

    try:
        yield start
    finally:
        shutil.rmtree(shared)


# attacks


class Attacker:
    """Somebody who controls what runs in one sandbox, and what the test knows of the host."""

    def __init__(
        self,
        setting: str,
        server: Server,
        host: Host,
        *,
        sharing: bool,
        own: bool,
        neighbour: Callable[[], Sandbox] | None,
    ):
        self.setting = setting
        self._sharing = sharing
        self._own = own
        self._neighbour = neighbour
        self.sealed = setting != "process"
        self.in_folder = setting.endswith("in a folder")
        self.on_image = setting.endswith("on an image")
        self._folders: list[Path] = []
        self.network: str | None = None
        self.server = server
        self.host = host
        self.own_kernel = setting in ("gvisor", "microvm", "kubernetes-gvisor")
        """Whether its processes can be seen only inside, and its budgets belong to a kernel of its own."""
        self.from_bundle = setting in ("root in Docker", "kubernetes") or self.own_kernel
        """Whether its supervisor is a program in its own root, with a control directory beside it."""
        self._opened: list[Sandbox] = []
        self._shared: list[Sandbox] = []
        self._box: Sandbox | None = None

    @property
    def box(self) -> Sandbox:
        """The attacker's own sandbox, or the one that attackers share."""
        if self._box is None and self._sharing and self.setting == "root in Docker":
            self._box = _CONTAINERS[self.network or "none"]
        elif self._box is None and self._sharing:
            if self.server.pid not in _SHARED:
                _SHARED[self.server.pid] = self.server.client.sandbox(image=IMAGE)
            self._box = _SHARED[self.server.pid]
        elif self._box is None:
            self._box = self._kept() or self.new()
        return self._box

    def _kept(self) -> Sandbox | None:
        """The sandbox that attackers of a slow provider share; of virtual machines, one for each network."""
        if self._own or (self.network is not None and self.setting not in ("microvm", *ON_PODS)):
            return None
        kept = _KEPT.get(self.server.pid, {}).get(self.network)
        if kept is not None:
            self._shared.append(kept)
        return kept

    def another(self, context_id: str | None = None, **options: Any) -> Sandbox:
        """One more sandbox of the same kind on the same server, which lives on: attackers in virtual machines share it,
        if it needs nothing of its own.
        """
        if self._neighbour is None or self.network not in (None, "none") or context_id is not None or options:
            return self.new(context_id, **options)
        found, self._neighbour = self._neighbour(), None
        self._shared.append(found)
        return found

    def new(self, context_id: str | None = None, **options: Any) -> Sandbox:
        """A sandbox that nobody else had or will have."""
        if not self.sealed:
            options |= {"provider": "process", "trust": "high", "network": "host"}
        elif self.network is not None:
            options.setdefault("network", self.network)
        if self.on_image:
            options.setdefault("image", IMAGE)
        if self.setting == "gvisor":
            options.setdefault("trust", "low")
        if self.setting == "microvm":
            options.setdefault("provider", "microvm")
        if self.in_folder:
            context_id = context_id or f"folder-{secrets.token_hex(6)}"
            options["workspace_path"] = str(self.folder())
        opened = self.server.client.sandbox(context_id, **options)
        self._opened.append(opened)
        return opened

    def folder(self) -> Path:
        """A folder of the host that belongs to an ordinary user."""
        path = Path(os.path.realpath(tempfile.mkdtemp(prefix="carrel-folder-")))
        path.chmod(0o755)
        if ROOT:
            os.chown(path, USER, USER)
        self._folders.append(path)
        return path

    def with_limits(self, **limits: float) -> Sandbox:
        """The attacker's own sandbox, with these limits."""
        self._box = self.new(limits=limits)
        return self._box

    def run(
        self, attack: Callable[..., object], *, box: Sandbox | None = None, timeout: float = 30, **arguments: object
    ) -> Any:
        """What an attack brings when it runs inside. A refusal by the kernel is None; a fault in the attack fails."""
        result = self.start(attack, box=box, timeout=timeout, **arguments)
        return self.outcome(result)

    def start(
        self, attack: Callable[..., object], *, box: Sandbox | None = None, timeout: float = 30, **arguments: object
    ) -> CommandResult:
        """Run an attack and give the raw result."""
        return (box or self.box).commands.run(self.words(attack, **arguments), timeout=timeout)

    @staticmethod
    def words(attack: Callable[..., object], **arguments: object) -> list[str]:
        """The command that performs an attack."""
        return words(attack, **arguments)

    @staticmethod
    def outcome(result: CommandResult) -> Any:
        """Evidence, or None when the kernel refused or ended the attack."""
        told = answer(result.stdout)
        if told is None:
            assert result.signal is not None, f"the attack did not run: {result.stdout}{result.stderr}"
            return None
        return told.get("evidence")

    def expect(self, evidence: object) -> None:
        """No breach in a sandbox, and a breach without one."""
        if self.sealed:
            assert not evidence, f"BREACH ({self.setting}): {evidence!r}"
        else:
            assert evidence, "the process provider does not isolate, and this attack did not notice"

    def attempt(self, attack: Callable[..., object], **arguments: Any) -> None:
        """Run an attack and judge it."""
        self.expect(self.run(attack, **arguments))

    def close(self) -> None:
        shared = self._shared
        if self._sharing and self._box is not None and self._box not in self._opened:
            shared = [*shared, self._box]
        for box in shared:
            with contextlib.suppress(NotFound, Conflict):  # the attack has ended it
                for command in box.commands.list():  # the next attacker finds nothing of this one
                    if command.running:
                        box.commands.get(command.id).kill()
        for opened in self._opened:
            opened.terminate(reason="end of the test", delete_files=bool(self._folders))
        for folder in self._folders:
            remove_tree(str(folder))


_STOCKED: set[int] = set()
"""The servers that have the image."""
_SHARED: dict[int, Sandbox] = {}
"""One sandbox from an image for each server, by its process id; it ends with the server."""


@pytest.fixture(scope="session")
def debian_archive(debian_root: Path) -> Iterator[Path]:
    """An image for attackers, whose user is another than that of other sandboxes."""
    path = debian_root.parent / "debian.tar"
    images.archive(debian_root, path, IMAGE)
    yield path
    path.unlink()


def stock(server: Server, request: pytest.FixtureRequest) -> str:
    """Give a server the image, once; return the image's name."""
    if server.pid not in _STOCKED:
        server.client.images.import_archive(request.getfixturevalue("debian_archive"))
        _STOCKED.add(server.pid)
    return IMAGE


_SERVERS = {"root in Docker": "docker_server", "process": "user_server", **dict.fromkeys(ON_PODS, "pods_server")}


def _attacker(setting: str, request: pytest.FixtureRequest, host: Host) -> Iterator[Attacker]:
    server = request.getfixturevalue(_SERVERS.get(setting) or f"{setting.split(' ', 1)[0]}_server")
    on_image = setting.endswith("on an image")
    own = request.config.getoption("--on-image") or request.module.__name__.endswith(NOT_SHARED)
    own = own or request.function.__name__ == "test_bound_sockets"  # other attacks leave ended connections
    sharing = (on_image or setting == "root in Docker") and not own
    neighbour = (lambda: request.getfixturevalue("microvm_neighbour")) if setting == "microvm" else None
    attacker = Attacker(setting, server, host, sharing=sharing, own=own, neighbour=neighbour)
    if on_image:
        stock(server, request)
    try:
        yield attacker
    finally:
        attacker.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """An emulated machine needs many times as long, and there is no figure in these tests."""
    if config.getoption("--on-microvm"):
        for item in items:
            item.add_marker(pytest.mark.timeout(1800))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The settings of attacks: those of a few modules are also made in a folder of the host."""
    more = [
        setting
        for table in (IN_FOLDERS, ON_IMAGE)
        for name, setting in table.items()
        if metafunc.module.__name__.endswith(name)
    ]
    more += [where for where, name in PROVIDER.items() if metafunc.module.__name__.endswith(ATTACKED.get(name, ()))]
    if metafunc.config.getoption("--on-image"):
        more = ["root on an image", "user on an image"]
    if metafunc.config.getoption("--on-gvisor"):
        more = ["gvisor"]
    if metafunc.config.getoption("--on-microvm"):
        more = ["microvm"]
    if metafunc.config.getoption("--on-docker"):
        more = ["root in Docker"]
    for name in ON_PODS:
        if metafunc.config.getoption(f"--on-{name}"):
            more = [name]
    attack = metafunc.function.__name__
    needed = NEEDED.get(metafunc.module.__name__.rpartition(".")[2])
    more = [
        where
        for where in more
        if attack not in NOT_JUDGED[PROVIDER.get(where, "namespace")]
        and needed not in NEVER[PROVIDER.get(where, "namespace")]
    ]
    if "hold" in metafunc.fixturenames:
        kinds = ["root on an image", "user on an image"]
        if not metafunc.config.getoption("--on-image"):
            kinds = ["root", "user", *(kinds[:1] if metafunc.module.__name__.endswith(MASKS_ON_IMAGE) else [])]
        if metafunc.config.getoption("--on-docker"):
            kinds = ["root in Docker"]
        if any(metafunc.config.getoption(f"--on-{place}") for place in ("gvisor", "microvm", *ON_PODS)):
            kinds = []
        metafunc.parametrize("hold", kinds, indirect=True, scope="module")
    for name, settings in {"attacker": ["root", "user"], "compared": ["root", "user", "process"]}.items():
        if name in metafunc.fixturenames:
            places = ("image", "gvisor", "microvm", "docker", *ON_PODS)
            elsewhere = any(metafunc.config.getoption(f"--on-{place}") for place in places)
            own = settings[2:] if elsewhere else settings
            metafunc.parametrize(name, [*own, *more], indirect=True)


@pytest.fixture
def attacker(request: pytest.FixtureRequest, host: Host) -> Iterator[Attacker]:
    """In a sandbox of the namespace provider: every attack must fail."""
    yield from _attacker(request.param, request, host)


@pytest.fixture
def compared(request: pytest.FixtureRequest, host: Host) -> Iterator[Attacker]:
    """As `attacker`, and also with no isolation at all, where the same attack must succeed."""
    yield from _attacker(request.param, request, host)


@pytest.fixture(scope="module")
def hold(request: pytest.FixtureRequest) -> Iterator[Hold]:
    """Makes masked sandboxes, as root and as an ordinary user, on the host's root and from an image; or in Docker."""
    image = request.getfixturevalue("debian_root") if request.param.endswith("image") else None
    socket = request.getfixturevalue("docker").socket if request.param.endswith("Docker") else ""
    with _spawning(user=request.param.startswith("user")) as spawn, holding(spawn, image, socket) as start:
        yield start
