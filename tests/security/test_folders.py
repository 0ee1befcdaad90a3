"""Attacks from a sandbox that works on a folder of the host: out of the folder, and on its owner, who will use it later.

The owner uses the folder outside of the sandbox afterwards. So nothing may be left in it that a tool runs by itself.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.nesting import give
from tests.support.servers import ROOT, USER

from carrel.client import Sandbox
from carrel.errors import PlatformError

PROTECTED = (
    ".git/hooks", ".git/config", ".git/commondir", ".git/config.worktree", ".git/modules/**/config",
    ".git/modules/**/hooks", ".vscode", ".idea", ".github/workflows", ".gitlab-ci.yml", ".husky", ".envrc",
)  # fmt: skip


class Ground:
    """A folder with a repository, and a sandbox in it that may change everything but what is protected."""

    def __init__(self, attacker, folder: Path):
        self.folder = folder
        self.context = f"folder-{folder.name}"
        self._attacker = attacker
        deny = [f"file(write:${{WORKSPACE}}/{path})" for path in PROTECTED]
        deny += [f"file(write:/**/.git/{name})" for name in ("hooks", "config", "commondir")]
        allow = [
            "file(write:/workspace/**)",
            "file(delete:/workspace/**)",
            "file(read:/**)",
            "shell(/usr/bin/python3:*)",
        ]
        policy = attacker.server.client.policy(self.context)
        policy.put(settings={"permissions": {"allow": allow, "deny": deny}})
        self.box: Sandbox = attacker.another(self.context, workspace_path=str(folder))

    def run(self, attack: Callable[..., object], **arguments: object) -> object:
        return self._attacker.run(attack, box=self.box, folder=str(self.folder), **arguments)

    def end(self) -> None:
        self.box.stop()

    def modes(self) -> dict[str, int]:
        """The files of the folder that have a set-id bit."""
        found = {path.relative_to(self.folder).as_posix(): path.lstat().st_mode for path in self.folder.rglob("*")}
        return {path: mode & 0o7777 for path, mode in found.items() if mode & 0o6000}

    def used_by_the_owner(self, marker: Path, below: str = "") -> bool:
        """Whether anything of the agent's ran when the owner worked in the folder, or in one below it."""
        commands = (["git", "status"], ["git", "submodule", "status"], ["git", "commit", "--allow-empty", "-m", "x"])
        for command in commands:
            environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "GIT_CONFIG_NOSYSTEM": "1"}
            name = ["-c", "user.name=o", "-c", "user.email=o@example.org", "-c", "safe.directory=*"]
            done = [command[0], *name, *command[1:]]
            subprocess.run(done, cwd=self.folder / below, env=environment, capture_output=True, check=False)
        return marker.exists()


@pytest.fixture
def ground(attacker) -> Iterator[Callable[..., Ground]]:
    def start(
        fill: Callable[[Path], object] = lambda folder: None, then: Callable[[Path], object] = lambda folder: None
    ) -> Ground:
        folder = attacker.folder()
        fill(folder)
        if ROOT:
            give(folder, USER)
        then(folder)  # as the owner of the files: a change of the owner clears set-id bits
        return Ground(attacker, folder)

    yield start


def repository(folder: Path) -> None:
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / ".git" / "hooks").mkdir(exist_ok=True)
    (folder / ".vscode").mkdir()
    (folder / ".vscode" / "tasks.json").write_text("{}")


def test_links_out_of_the_folder_lead_nowhere(ground, attacker):
    """Links that the owner has in the folder, and links that the agent makes, show nothing of the host."""

    def fill(folder):
        os.symlink(attacker.host.secret, folder / "owners")
        os.symlink(os.path.dirname(attacker.host.secret), folder / "directory")

    def attack(folder, secret, token):
        import os

        up = "../" * 20
        os.symlink(up + secret, "agents")
        for path in (
            "owners",
            "directory/secret",
            "agents",
            f"{folder}/owners",
            f"{folder}/{up}{secret}",
            "/proc/1/cwd/owners",
        ):
            try:
                if token in open(path).read():
                    return path
            except OSError:
                continue
        return None

    here = ground(fill)
    attacker.expect(here.run(attack, secret=attacker.host.secret, token=attacker.host.token))
    for path in ("owners", "directory/secret"):
        with pytest.raises(Exception, match=r"leaves the workspace|symlink"):
            here.box.files.read(path)


def test_protected_paths_of_a_repository(ground, attacker, tmp_path):
    """Plant a hook, a setting or a task for later in a repository that exists: at both paths, by links, renames, other
    names and forms of names.
    """

    def attack(folder, marker):
        import contextlib
        import os
        import shutil

        script, config = f"#!/bin/sh\ntouch {marker}\n", f"[core]\n\tfsmonitor = touch {marker}\n\thooksPath = evil\n"
        os.makedirs("evil/hooks", exist_ok=True)
        for name in ("evil/pre-commit", "evil/hooks/pre-commit", "evil/config"):
            with open(name, "w") as file:
                file.write(config if name.endswith("config") else script)
            os.chmod(name, 0o755)

        def tries(top):
            yield lambda: open(f"{top}/.git/hooks/pre-commit", "w").write(script)
            yield lambda: open(f"{top}/.git/config", "a").write(config)
            yield lambda: os.rename("evil/config", f"{top}/.git/config")
            yield lambda: os.link("evil/config", f"{top}/.git/hooks/x")
            yield lambda: os.rename(f"{top}/.git", f"{top}/git2")
            yield lambda: os.rename(f"{top}/.git/hooks", f"{top}/.git/h")
            yield lambda: shutil.rmtree(f"{top}/.git/hooks")
            yield lambda: os.symlink("../evil", f"{top}/.git/hooks2")
            yield lambda: os.rename(f"{top}/.git/hooks2", f"{top}/.git/hooks")
            yield lambda: open(f"{top}/.git/commondir", "w").write("../evil")
            yield lambda: open(f"{top}/.git/COMMONDIR", "w").write("../evil")
            yield lambda: os.makedirs(f"{top}/.\uff47it/hooks")  # a wide g
            yield lambda: os.makedirs(f"{top}/.g\u200cit/Hooks")  # with a character that is not shown
            yield lambda: open(f"{top}/.vscode/tasks.json", "w").write("evil")
            yield lambda: os.rename(f"{top}/.vscode", f"{top}/vs")
            yield lambda: os.chmod(f"{top}/.git/config", 0o777)
            yield lambda: os.truncate(f"{top}/.git/config", 0)

        for top in ("/workspace", folder):
            for attempt in tries(top):
                with contextlib.suppress(OSError):
                    attempt()

    here = ground(repository)
    before = (here.folder / ".git" / "config").read_bytes()
    marker = here.folder / "ran"
    here.run(attack, marker=str(marker))
    here.end()
    assert (here.folder / ".git" / "config").read_bytes() == before
    assert (here.folder / ".vscode" / "tasks.json").read_text() == "{}"
    assert not (here.folder / ".git" / "hooks" / "pre-commit").exists()
    assert not (here.folder / ".git" / "commondir").exists()
    assert not here.used_by_the_owner(marker), "BREACH: the owner's git ran what the agent left"


def test_what_is_planted_for_later_is_taken_away(ground):
    """Make repositories and settings of tools that would run something when the owner works in the folder: a `.git`
    directory, one that is moved in, a `.git` file, a link, a submodule, and names in other forms.
    """

    def attack(folder, marker):
        import contextlib
        import mmap
        import os
        import subprocess

        def repository(path):
            subprocess.run(["git", "init", "-q", path], check=True)
            with open(f"{path}/.git/config", "a") as file:
                file.write(f"[core]\n\tfsmonitor = touch {marker}\n")
            os.makedirs(f"{path}/.git/hooks", exist_ok=True)
            with open(f"{path}/.git/hooks/pre-commit", "w") as file:
                file.write(f"#!/bin/sh\ntouch {marker}\n")
            os.chmod(f"{path}/.git/hooks/pre-commit", 0o755)

        def copied(target):
            subprocess.run(["cp", "-r", "/tmp/made/.git", target], check=True)

        def moved():
            os.makedirs("moved")
            copied("moved/copy")
            os.rename("moved/copy", "moved/.git")

        def by_file():
            os.makedirs("file")
            copied("file/store")
            open("file/.git", "w").write("gitdir: store\n")

        def by_link():
            os.makedirs("link")
            copied("link/store")
            os.symlink("store", "link/.git")

        def elsewhere():
            subprocess.run(["git", "init", "-q", "common"], check=True)
            copied("common/store")
            open("common/.git/commondir", "w").write("../store\n")

        def by_mapping():
            subprocess.run(["git", "init", "-q", "mapped"], check=True)
            with open("mapped/.git/config", "a") as file:
                file.write(f"# {'x' * 200} {marker}\n")
            with open("mapped/.git/config", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                evil = f"[core]\n\tfsmonitor = touch {marker}\n".encode()
                memory[: len(evil)] = evil

        def by_second_name():
            subprocess.run(["git", "init", "-q", "linked"], check=True)
            os.link("linked/.git/config", "linked/other")
            with open("linked/other", "a") as file:
                file.write(f"[core]\n\tfsmonitor = touch {marker}\n")

        def settings():
            os.makedirs(".github/workflows")
            open(".github/workflows/evil.yml", "w").write("on: push\n")
            os.makedirs(".Vscode")
            open(".Vscode/tasks.json", "w").write("{}")
            open(".envrc", "w").write("evil")

        repository("/tmp/made")
        plants = (moved, by_file, by_link, elsewhere, by_mapping, by_second_name, settings)
        for plant in (lambda: repository("."), lambda: repository("below"), *plants):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):  # it is taken away while it is made
                plant()

    here = ground()
    marker = here.folder / "ran"
    here.run(attack, marker=str(marker))
    here.end()
    for name in ("", "below", "moved", "file", "link", "common", "mapped", "linked"):
        assert not here.used_by_the_owner(marker, name), f"BREACH: the owner's git in {name!r} ran what the agent left"
    left = {path.relative_to(here.folder).as_posix().lower() for path in here.folder.rglob("*")}
    protected = {f"{place}.git/{name}" for place in ("", "below/", "moved/") for name in ("config", "hooks")}
    protected |= {"common/.git/commondir", "mapped/.git/config", "linked/.git/config", "file/.git", "link/.git"}
    assert not left & {".envrc", ".vscode", ".github/workflows", *protected}
    assert any("held-by-carrel" in name for name in left), "what the agent made is kept, under another name"


def test_protected_paths_that_the_owner_replaces(ground):
    """Write to a protected file while its owner replaces it, which removes the mount that protects it."""

    def attack(folder):
        import errno
        import os
        import time

        def refused(path):
            try:
                with open(path, "a"):
                    return False
            except OSError as error:
                return error.errno == errno.EROFS

        paths = [f"{top}/{name}" for top in ("/workspace", folder) for name in (".git/config", ".vscode/tasks.json")]
        assert all(map(refused, paths))
        for number in range(3):
            os.mkdir(f"ready{number}")
            deadline = time.monotonic() + 20
            while not (os.path.exists(f"replaced{number}") and all(map(refused, paths))):
                if time.monotonic() > deadline:
                    return number, list(map(refused, paths))
        return None

    def replace(number):
        deadline = time.monotonic() + 20
        while not (here.folder / f"ready{number}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        (here.folder / "draft").write_text("[core]\n\tbare = false\n")
        (here.folder / "settings").mkdir()
        (here.folder / "settings" / "tasks.json").write_text("{}")
        if ROOT:
            give(here.folder / "settings", USER)
            os.chown(here.folder / "draft", USER, USER)
        os.rename(here.folder / "draft", here.folder / ".git" / "config")
        os.rename(here.folder / ".vscode", here.folder / f"old{number}")
        os.rename(here.folder / "settings", here.folder / ".vscode")
        (here.folder / f"replaced{number}").touch()

    here = ground(repository)
    with ThreadPoolExecutor() as threads:
        done = threads.submit(here.run, attack)
        for number in range(3):
            replace(number)
        assert done.result() is None
    here.end()
    assert not list(here.folder.rglob("*held-by-carrel*"))


def test_a_new_repository_that_can_run_nothing_stays(ground):
    """Clone and make repositories, as an agent does in its work, and configure them."""

    def work(folder):
        import subprocess

        script = """
        set -e
        export GIT_CONFIG_GLOBAL=/dev/null
        git init -q first && cd first && git config user.name a && git config user.email a@example.org
        echo x > x && git add x && git commit -qm x && cd ..
        git clone -q first second && cd second && git remote add other https://example.org/x.git
        git checkout -q -b topic --track origin/HEAD && git status
        """
        return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False).stderr

    here = ground()
    assert here.run(work) == ""
    here.end()
    assert not list(here.folder.rglob("*held-by-carrel*"))
    config = (here.folder / "second" / ".git" / "config").read_text()
    assert "https://example.org/x.git" in config and "topic" in config


def test_set_id_bits(ground, attacker):
    """Leave a program with a set-user-ID or set-group-ID bit, which other users of the host would run as the owner."""

    def attack(folder):
        import contextlib
        import ctypes
        import io
        import mmap
        import os
        import platform
        import stat
        import struct
        import subprocess
        import tarfile

        numbers = {"x86_64": (133, 2), "aarch64": (None, None)}[platform.machine()]
        libc, here, bits = ctypes.CDLL(None, use_errno=True), -100, (0o4755, 0o2755, 0o6777)
        names = iter(f"made{number}" for number in range(1000))
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for mode in bits:
                entry = tarfile.TarInfo(f"unpacked{mode}")
                entry.mode = mode
                tar.addfile(entry)

        def system(number, *args):
            if number is not None:
                libc.syscall(*[ctypes.c_long(each) if isinstance(each, int) else each for each in (number, *args)])

        def file():
            name = next(names)
            open(name, "w").close()
            return name

        def by_descriptor(mode):
            with open(file()) as opened:
                os.fchmod(opened.fileno(), mode)

        def linked(mode):
            opened = os.open(".", os.O_TMPFILE | os.O_RDWR, mode)
            os.link(f"/proc/self/fd/{opened}", next(names), follow_symlinks=True)

        def renamed(mode):
            name = file()
            os.rename(name, f"{name}-moved")
            os.link(f"{name}-moved", name)
            os.chmod(name, mode)

        def tries(mode):
            yield lambda: os.chmod(file(), mode)
            yield lambda: os.chmod(f"{folder}/{file()}", mode)
            yield lambda: by_descriptor(mode)
            yield lambda: os.chmod(f"/proc/self/fd/{os.open(file(), os.O_PATH)}", mode)
            yield lambda: system(452, here, file().encode(), mode, 0)  # fchmodat2
            yield lambda: os.open(next(names), os.O_CREAT | os.O_WRONLY, mode)
            yield lambda: os.open(next(names), os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)
            yield lambda: linked(mode)
            yield lambda: system(437, here, next(names).encode(), struct.pack("QQQ", os.O_CREAT | 1, mode, 0), 24)
            yield lambda: system(437, here, next(names).encode(), struct.pack("QQQ", os.O_CREAT | 1, mode, 0), 24, 1, 1)
            yield lambda: os.mknod(next(names), stat.S_IFREG | mode)
            yield lambda: system(numbers[0], next(names).encode(), stat.S_IFREG | mode, 0)  # mknod
            yield lambda: system(numbers[1], next(names).encode(), os.O_CREAT | 1, mode)  # open
            yield lambda: os.mkdir(next(names), mode)
            yield lambda: renamed(mode)
            yield lambda: subprocess.run(["install", "-m", f"{mode:o}", "/bin/true", next(names)], check=False)
            yield lambda: subprocess.run(["cp", "--preserve=mode", "owners", next(names)], check=False)

        os.umask(0)
        for mode in bits:
            for attempt in tries(mode):
                with contextlib.suppress(OSError):
                    attempt()
        subprocess.run(["tar", "-xpf", "-"], input=archive.getvalue(), check=False)
        subprocess.run(["tar", "-xpf", "-", "-C", folder], input=archive.getvalue(), check=False)
        # The kernel takes the bits away when a file is written, but not when it is changed by a mapping.
        with open("owners", "r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
            mapped[:4] = b"evil"
        made = [os.path.join(top, name) for top, folders, files in os.walk(".") for name in (*folders, *files)]
        return [path for path in made if os.lstat(path).st_mode & 0o6000 and path not in ("./owners", "./kept")]

    def fill(folder):
        for name in ("owners", "kept"):
            (folder / name).write_text("text")

    def bits(folder):
        for name in ("owners", "kept"):
            (folder / name).chmod(0o6755)

    here = ground(fill, bits)
    assert here.run(attack) == [], "BREACH: a set-id file was made"
    here.end()
    assert (here.folder / "owners").read_text() == "evil"
    assert here.modes() == {"kept": 0o6755}


@pytest.mark.skipif(not ROOT, reason="mounts file systems")
def test_a_folder_with_mounts_shows_what_is_mounted(ground, attacker, mounted):
    """A folder that is a mount point, with another one in it: what the mounts hide stays hidden."""

    def attack(folder):
        import os

        names = sorted(name for _, folders, files in os.walk(folder) for name in (*folders, *files))
        open("made", "w").close()
        open("inner/made", "w").close()
        return names

    def fill(folder):
        (folder / "hidden").write_text("x")
        mounted(folder)
        (folder / "outer").write_text("x")
        (folder / "inner").mkdir()
        (folder / "inner" / "hidden").write_text("x")
        mounted(folder / "inner")
        (folder / "inner" / "seen").write_text("x")

    try:
        here = ground(fill)
    except PlatformError as error:  # an ordinary user's server does not see mounts that a host does not pass on
        assert attacker.setting.startswith("user")
        assert "mounted there after the server started" in error.detail
        return
    assert here.run(attack) == ["inner", "outer", "seen"]
    assert (here.folder / "made").stat().st_uid == (here.folder / "inner" / "made").stat().st_uid == USER
    here.end()  # or the mounts are busy


@pytest.fixture
def mounted() -> Iterator[Callable[[Path], None]]:
    points: list[Path] = []

    def mount(point: Path) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(point)], check=True)
        points.append(point)

    yield mount
    for point in reversed(points):
        deadline = time.monotonic() + 20
        while subprocess.run(["umount", str(point)], capture_output=True, check=False).returncode:
            assert time.monotonic() < deadline, f"{point} is busy"
            time.sleep(0.02)


def test_a_mount_inside_is_not_seen_outside(ground):
    """The masks of a sandbox are its own: they do not appear on the host."""
    here = ground(repository)
    mounts = Path("/proc/self/mountinfo").read_text()
    assert str(here.folder) not in mounts
    (here.folder / ".git" / "config").write_text("the owner may change it")


def test_homes_of_other_contexts(ground, attacker):
    """Reach the kept home of another context, or its folder."""

    def attack(folder, other, token):
        import os

        for path in (other, "../" + os.path.basename(other), f"/proc/1/root{other}", "/home/agent/../../homes", "/tmp"):
            try:
                for top, _folders, files in os.walk(path):
                    for name in files:
                        if token in open(f"{top}/{name}", errors="replace").read():
                            return f"{top}/{name}"
            except OSError:
                continue
        return None

    neighbour, here = ground(lambda folder: (folder / "secret").write_text(attacker.host.token)), ground()
    neighbour.box.commands.run(["/usr/bin/python3", "-c", f"open('/home/agent/s','w').write({attacker.host.token!r})"])
    attacker.expect(here.run(attack, other=str(neighbour.folder), token=attacker.host.token))
