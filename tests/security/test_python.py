"""Attacks on Python calls: on each other, on the warm interpreter they come from, on the packages they share."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.security.conftest import stock
from tests.support.servers import SCIENCE, Server

from carrel.client import Sandbox

LOOK = """
import atexit, builtins, gc, json, os, resource, signal, socket, sys, threading
def look():
    own = lambda module: sorted(name for name in vars(module) if "evil" in name)
    return {
        "names": sorted(name for name in globals() if "evil" in name),
        "modules": {name: own(module) for name, module in list(sys.modules.items()) if own(module)},
        "fake": sorted(name for name in sys.modules if "evil" in name),
        "changed": [str(each) for each in (len, open, json.dumps, os.getpid, socket.socket) if "evil" in repr(each)],
        "env": sorted(name for name in os.environ if "EVIL" in name or "PYTHON" in name),
        "path": [each for each in sys.path if "evil" in each],
        "finders": sum("evil" in repr(each) for each in sys.meta_path + sys.path_hooks),
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        "trace": [sys.gettrace() is None, sys.getprofile() is None, threading.gettrace() is None],
        "recursion": sys.getrecursionlimit(),
        "cwd": os.getcwd(),
        "umask": os.umask(0o22),
        "limits": [resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_AS)],
        "handlers": [str(signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGALRM)],
        "masked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "nice": os.nice(0),
        "processors": sorted(os.sched_getaffinity(0)),
        "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
        "threads": threading.active_count(),
        "collected": gc.isenabled(),
        "buffers": [sys.stdout.encoding, sys.stdout.line_buffering],
        "exits": atexit._ncallbacks(),
        "dumpable": os.access("/proc/self/mem", os.R_OK),
    }
print(json.dumps(look()))
"""
"""Everything of a process that a call before it could have changed."""

POISONS = {
    "variables": "evil = 1; import builtins; builtins.evil = 1; len.__self__.evil_too = 1",
    "patches": """
        import builtins, json, os, socket, sys
        class evil:
            def __call__(self, *a, **k): return "evil"
        json.dumps = os.getpid = socket.socket = builtins.open = evil()
        builtins.len = evil()
        """,
    "modules": "import sys, types; sys.modules['evil'] = types.ModuleType('evil'); sys.modules['json'].evil = 1",
    "finders": """
        import sys
        class evil:
            def find_spec(self, *a): return None
        sys.meta_path.insert(0, evil()); sys.path_hooks.append(evil()); sys.path.insert(0, '/evil')
        """,
    "hooks": """
        import sys, threading
        sys.excepthook = sys.displayhook = print
        sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None); threading.settrace(lambda *a: None)
        sys.setrecursionlimit(50)
        """,
    "process": """
        import os, resource, signal
        os.environ["EVIL"] = "1"; os.environ["PYTHONPATH"] = "/evil"; os.putenv("EVIL_TOO", "1")
        os.chdir("/tmp"); os.umask(0o777); os.nice(5)
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)); resource.setrlimit(resource.RLIMIT_CPU, (50, 50))
        signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGUSR1, lambda *a: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); signal.setitimer(signal.ITIMER_REAL, 100)
        """,
    "processes above": """
        import os, resource
        above = [os.getppid(), int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])]
        for pid in (*above, *filter(lambda each: each > 2, map(int, filter(str.isdigit, os.listdir("/proc"))))):
            try:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (20, 20))
                os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + 5)
                os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
            except ProcessLookupError:
                pass
        """,
    "descriptors": """
        import os
        kept = [os.dup(0) for _ in range(5)]
        for each in kept: os.set_inheritable(each, True)
        os.dup2(os.open("/tmp", os.O_RDONLY), 100)
        """,
    "threads and exits": """
        import atexit, gc, sys, threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        atexit.register(print, "evil"); gc.disable(); sys.stdout.reconfigure(line_buffering=True)
        """,
    "children": """
        import os, subprocess, sys
        if os.fork() == 0:
            os.setsid()
            os.execv(sys.executable, [sys.executable, "-c", "import time; evil = 1; time.sleep(30)"])
        """,
}


@pytest.fixture
def box(scientific: Server, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    image = stock(scientific, request) if request.config.getoption("--on-image") else None
    with scientific.client.sandbox(template=SCIENCE, image=image) as box:
        yield box


def imported(box: Sandbox) -> str:
    """The package of the environment that is imported before any code comes."""
    code = "import sys; print(next(name for name in ('pandas', 'pyparsing') if name in sys.modules))"
    return box.python.run(code).stdout.strip()


def looked(box: Sandbox) -> Any:
    result = box.python.run(LOOK)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_poisoning_the_calls_that_follow(box: Sandbox) -> None:
    """Change whatever a call can change of its own process, and see whether a later one has it."""
    before = looked(box)
    for name, poison in POISONS.items():
        for _ in range(2):
            done = box.python.run(textwrap.dedent(poison))
            assert done.exit_code == 0, f"{name}: {done.stderr}"
        for _ in range(3):  # some of the processes were forked before, some after
            assert looked(box) == before, f"BREACH: {name}"
    cell = json.loads(box.python.context("other").run(LOOK).stdout)
    assert cell["names"] == [] and cell["modules"] == {} and cell["fake"] == []


def test_poisoning_what_an_interpreter_reads_when_it_starts(box: Sandbox) -> None:
    """Leave files where Python looks for code at its start, then make the warm interpreter start anew."""
    before = looked(box)
    evil = b"import os; open('/tmp/evil-' + str(os.getpid()), 'w').write(open('/proc/self/cmdline').read()); evil = 1\n"
    names = ["sitecustomize", "usercustomize", "json", "socket", "ctypes", "threading", "carrel_figures"]
    for name in [*names, imported(box)]:
        box.files.write(f"{name}.py", evil)
    plant = """
    import os, site
    home = os.path.expanduser("~/.local/lib/python3.11/site-packages")
    os.makedirs(home, exist_ok=True)
    open(f"{home}/evil.pth", "w").write("import os; open('/tmp/evil-pth', 'w')\\n")
    open(f"{home}/usercustomize.py", "w").write("import os; open('/tmp/evil-user', 'w')\\n")
    open(f"{home}/sitecustomize.py", "w").write("import os; open('/tmp/evil-site', 'w')\\n")
    open("pyvenv.cfg", "w").write("home = /workspace\\n")
    open(".env", "w").write("PYTHONSTARTUP=/workspace/json.py\\n")
    """
    variables = {"PYTHONSTARTUP": "/workspace/json.py", "PYTHONHOME": "/workspace", "PYTHONINSPECT": "1"}
    planted = box.python.run(textwrap.dedent(plant), variables={"PYTHONSTARTUP": "/workspace/json.py"})
    assert planted.exit_code == 0, planted.stderr
    box.python.run("import os; os.kill(-1, 9)", variables=variables)
    calm = "import sys; sys.path.remove(''); " + LOOK.lstrip()
    result = box.python.run(calm)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == before
    found = box.commands.run("ls /tmp | grep evil; cat /tmp/evil-* 2>/dev/null").stdout
    assert "evil" not in found, f"BREACH: something ran when an interpreter started: {found!r}"


def test_reaching_into_the_warm_interpreter(box: Sandbox) -> None:
    """Trace, read, write or borrow from the processes above a call: its host, the interpreter, the supervisor."""
    code = """
    import ctypes, json, os
    libc = ctypes.CDLL(None, use_errno=True)
    above, pid = [], os.getppid()
    while pid > 0 and len(above) < 5:
        above.append(pid)
        try:
            pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
        except OSError:
            break
    found = []
    def attempt(name, act):
        try:
            if act():
                found.append(name)
        except OSError:
            pass
    for pid in above:
        attempt(f"attach {pid}", lambda: libc.ptrace(16, pid, 0, 0) == 0)
        attempt(f"seize {pid}", lambda: libc.ptrace(0x4206, pid, 0, 0) == 0)
        for name in ("mem", "environ", "maps", "auxv", "stack", "syscall", "io"):
            attempt(f"{name} {pid}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1) or name == "mem")
        attempt(f"write {pid}", lambda: open(f"/proc/{pid}/mem", "r+b"))
        for name in ("fd", "map_files", "fdinfo"):
            attempt(f"{name} {pid}", lambda: os.listdir(f"/proc/{pid}/{name}"))
        for name in ("root", "cwd", "exe"):
            attempt(f"{name} {pid}", lambda: os.readlink(f"/proc/{pid}/{name}"))
        attempt(f"oom {pid}", lambda: open(f"/proc/{pid}/oom_score_adj", "w").write("1000"))
        def borrowed():
            handle = os.pidfd_open(pid)
            return any(libc.syscall(438, handle, each, 0) >= 0 for each in range(20))
        attempt(f"descriptor {pid}", borrowed)
        class Piece(ctypes.Structure):
            _fields_ = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]
        buffer = ctypes.create_string_buffer(8)
        here, there = Piece(ctypes.addressof(buffer), 8), Piece(id(None), 8)
        attempt(f"vm read {pid}", lambda: libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0)
        attempt(f"vm write {pid}", lambda: libc.process_vm_writev(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0)
    print(json.dumps([len(above), found]))
    """
    result = box.python.run(textwrap.dedent(code))
    assert result.exit_code == 0, result.stderr
    depth, found = json.loads(result.stdout)
    assert depth >= 3 and found == [], f"BREACH: {found}"


def test_seeing_an_earlier_call(box: Sandbox) -> None:
    """Find a secret of an earlier call in what is left of it: memory, variables, arguments, output, descriptors.

    Whoever looks for it must not have it: it is given with every byte changed, and so is what is looked through.
    """
    secret = "correct-horse-battery-staple"
    hidden = bytes(each ^ 0x55 for each in secret.encode()).hex()
    first = box.python.run(
        "import sys; held = [sys.argv[1] + str(n) for n in range(1000)]; print(held[0]); print(held[1], file=sys.stderr)",
        variables={"TOKEN": secret},
        args=[secret],
        stdin=secret,
        files={"in.txt": secret.encode()},
    )
    assert first.stdout == f"{secret}0\n"
    box.files.delete("in.txt")
    code = """
    import json, os, sys
    table = bytes(each ^ 0x55 for each in range(256))
    hidden, found = bytes.fromhex(sys.argv[1]), []
    def search(name, read):
        try:
            if hidden in read().translate(table):
                found.append(name)
        except OSError:
            pass
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline", "comm"):
            search(f"{pid} {name}", open(f"/proc/{pid}/{name}", "rb").read if os.access(f"/proc/{pid}/{name}", 4) else bytes)
        for each in os.listdir(f"/proc/{pid}/fd") if os.access(f"/proc/{pid}/fd", 4) else ():
            if os.path.isfile(f"/proc/{pid}/fd/{each}"):
                search(f"{pid} descriptor {each}", lambda: open(f"/proc/{pid}/fd/{each}", "rb").read(1 << 20))
    with open("/proc/self/maps") as maps:
        spans = [line.split() for line in maps]
    searched = 0
    with open("/proc/self/mem", "rb", 0) as memory:
        for span, modes, *_ in spans:
            start, end = (int(each, 16) for each in span.split("-"))
            if "rw" in modes:
                memory.seek(start)
                search(f"memory {span}", lambda: memory.read(end - start))
                searched += end - start
    held = "".join(chr(each ^ 0x55) for each in hidden)
    before = len(found)
    with open("/proc/self/mem", "rb", 0) as memory:
        memory.seek(id(held))
        search("its own", lambda: memory.read(200))
    print(json.dumps([found[:before], searched > 1 << 20, len(found) > before]))
    """
    seen = box.python.run(textwrap.dedent(code), args=[hidden])
    assert seen.exit_code == 0, seen.stderr
    assert json.loads(seen.stdout) == [[], True, True], f"BREACH: {seen.stdout}"


def test_stateless_calls_leave_nothing_to_each_other(scientific: Server) -> None:
    """Hide something in every place a call may write, and a process that waits, for the call that comes next."""
    hide = """
    import os, subprocess, sys
    for place in ("/workspace", "/tmp", os.path.expanduser("~"), "/dev/shm", "/var/tmp"):
        for name in ("evil", ".evil", "evil dir/evil"):
            path = os.path.join(place, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            open(path, "w").write("evil")
    home = os.path.expanduser("~/.local/lib/python3.11/site-packages")
    os.makedirs(home, exist_ok=True)
    open(home + "/evil.pth", "w").write("import builtins; builtins.evil = 1")
    os.environ["EVIL"] = "1"
    subprocess.Popen(["sleep", "30"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        import time; time.sleep(30)
    """
    seek = """
    import builtins, os
    found = []
    for place in ("/workspace", "/tmp", os.path.expanduser("~"), "/dev/shm", "/var/tmp"):
        for top, dirs, files in os.walk(place):
            found += [os.path.join(top, each) for each in [*dirs, *files] if "evil" in each]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline").read()
        except OSError:
            continue
        if "sleep" in words:
            found.append(words)
    print(found, hasattr(builtins, "evil"), "EVIL" in os.environ)
    """
    for _ in range(2):
        scientific.client.python.run(textwrap.dedent(hide))
        seen = scientific.client.python.run(textwrap.dedent(seek))
        assert seen.output == "[] False False\n", f"BREACH: {seen.output}{seen.stderr}"


def test_writing_to_shared_packages(scientific: Server, box: Sandbox) -> None:
    """Change an environment that others use: through every way to its files that a process may try."""
    env = box.envs.attach()
    shelf = scientific.data_dir / "envs" / "shelf" / env.name
    before = _fingerprint(shelf)
    package = imported(box)
    code = """
    import ctypes, json, mmap, os, shutil, subprocess, sys
    top = sys.prefix
    target = os.path.join(top, f"lib/python3.11/site-packages/{package}/__init__.py")
    folder = os.path.dirname(target)
    inner = os.path.relpath(target, "/")
    libc = ctypes.CDLL(None, use_errno=True)
    found = []
    def attempt(name, act):
        try:
            if act() is not False:
                found.append(name)
        except OSError:
            pass
    def written(path, flags=os.O_WRONLY):
        os.write(os.open(path, flags), b"evil")
    here, there = os.open(folder, os.O_RDONLY), os.open(target, os.O_RDONLY)
    places = [target, f"/proc/self/root/{inner}", f"/proc/1/root/{inner}", f"/proc/{os.getppid()}/root/{inner}",
              f"/proc/self/fd/{here}/__init__.py", f"/proc/self/fd/{there}", f"/proc/self/cwd/../{inner}"]
    for each in places:
        attempt(f"write {each}", lambda: written(each))
        attempt(f"both {each}", lambda: written(each, os.O_RDWR))
        attempt(f"append {each}", lambda: written(each, os.O_WRONLY | os.O_APPEND))
        attempt(f"truncate {each}", lambda: os.truncate(each, 0))
        attempt(f"mode {each}", lambda: os.chmod(each, 0o777))
        attempt(f"owner {each}", lambda: os.chown(each, os.getuid(), os.getgid()))
        attempt(f"time {each}", lambda: os.utime(each, (1, 1)))
        attempt(f"mark {each}", lambda: os.setxattr(each, "user.evil", b"1"))
    attempt("fchmod", lambda: os.fchmod(there, 0o777))
    attempt("ftruncate", lambda: os.ftruncate(there, 0))
    attempt("create", lambda: os.close(os.open("evil.py", os.O_WRONLY | os.O_CREAT, dir_fd=here)))
    attempt("nameless", lambda: os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)))
    attempt("directory", lambda: os.mkdir(os.path.join(folder, "evil")))
    attempt("unlink", lambda: os.unlink(target))
    attempt("rename", lambda: os.rename(target, target + ".evil"))
    attempt("replace", lambda: os.replace("/workspace/evil", target))
    attempt("symlink", lambda: os.symlink("/workspace/evil", os.path.join(folder, "evil")))
    for place in ("/workspace", "/tmp", folder):
        attempt(f"hard link {place}", lambda: os.link(target, os.path.join(place, "evil-link")))
        attempt(f"hard link by descriptor {place}",
                lambda: libc.linkat(there, b"", -100, os.path.join(place, "evil-link").encode(), 0x1000) == 0)
        attempt(f"hard link by proc {place}",
                lambda: os.link(f"/proc/self/fd/{there}", os.path.join(place, "evil-link"), follow_symlinks=True))
    def mapped():
        page = mmap.mmap(there, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        page[0:4] = b"evil"
    attempt("map", mapped)
    def protected():
        libc.mmap.restype = ctypes.c_void_p
        page = libc.mmap(None, ctypes.c_size_t(4096), 1, 1, there, ctypes.c_long(0))
        return libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(4096), 3) == 0
    attempt("protect", protected)
    os.makedirs("/workspace/evil-place", exist_ok=True)
    for flags in (4096, 4096 | 16384, 32 | 4096):
        attempt(f"mount {flags}", lambda: libc.mount(top.encode(), b"/workspace/evil-place", None, flags, None) == 0)
        attempt(f"remount {flags}", lambda: libc.mount(b"none", b"/envs", None, flags, None) == 0)
    attempt("unmount", lambda: libc.umount2(b"/envs", 2) == 0)
    attempt("tree", lambda: libc.syscall(428, -100, top.encode(), 1) >= 0)
    attempt("unshare", lambda: libc.unshare(0x10000000 | 0x00020000) == 0)
    attempt("overlay", lambda: libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, None) == 0)
    for program in ("cp", "tee", "sed"):
        words = {"cp": ["cp", "-f", "/etc/hostname", target], "tee": ["tee", target], "sed": ["sed", "-i", "s/a/b/", target]}
        attempt(program, lambda: subprocess.run(words[program], input=b"", capture_output=True).returncode == 0)
    cache = os.path.join(folder, "__pycache__")
    attempt("bytecode", lambda: open(os.path.join(cache, "evil.pyc"), "wb"))
    attempt("retarget the interpreter", lambda: os.replace("/usr/bin/true", os.path.join(top, "bin/python")))
    print(json.dumps(found))
    """
    box.files.write("evil", b"evil")
    attack = f"package = {package!r}\n{textwrap.dedent(code)}"
    for number, result in enumerate([box.python.run(attack), box.python.run(attack, cwd="data")]):
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout) == [], f"BREACH ({number}): {result.stdout}"
    assert _fingerprint(shelf) == before, "BREACH: the packages are not what they were"
    with scientific.client.sandbox(template=SCIENCE) as other:
        assert other.python.run(f"import {package}; print({package}.__name__)").stdout == f"{package}\n"


def _fingerprint(top: Path) -> str:
    """Names, modes and contents of all that is below a directory."""
    digest = hashlib.sha256()
    for folder, dirs, files in os.walk(top):
        dirs.sort()
        for name in sorted([*dirs, *files]):
            path = os.path.join(folder, name)
            info = os.lstat(path)
            digest.update(f"{os.path.relpath(path, top)} {info.st_mode:o} {info.st_uid} {info.st_mtime_ns}".encode())
            if stat.S_ISREG(info.st_mode):
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
