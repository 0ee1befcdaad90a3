"""The program of a warm interpreter: it imports modules once and forks hosts; a host forks the process of each call in
advance.

It runs inside the sandbox on the Python of an environment (3.9 or newer) and can import only the standard library.
There are three kinds of process:

- the interpreter imports modules and forks hosts, and never runs code of a caller;
- a host is the reaper of one call at a time: it keeps one spare process ready, and waits for it and its descendants;
- a spare waits for code, runs it as `__main__`, and is never used again.

The processes that they start cannot trace the first two. The supervisor's side is `hosts`.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import gc
import importlib
import io
import json
import linecache
import os
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from importlib.machinery import BuiltinImporter
from typing import Any

NAME = "<code>"
"""The file name of a caller's code in tracebacks."""
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
_prctl = ctypes.PyDLL(None).prctl


def main(script: str, options: dict[str, Any]) -> None:
    """Import modules, report that to the supervisor, and fork hosts until it closes the socket (standard input)."""
    _prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    preload(script, options)
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    hello = {"version": sys.version.split()[0], "watch": site_folders()}
    control.send(json.dumps(hello).encode())
    while True:
        word, fds, _flags, _address = socket.recv_fds(control, 64, 4)
        if not word:
            os._exit(0)
        orders = socket.socket(fileno=fds[0])
        try:
            if os.fork() == 0:
                control.close()
                host(orders, script)
        except OSError as error:
            orders.send(struct.pack("=8sq", b"failed", error.errno or 0))
        orders.close()


def preload(script: str, options: dict[str, Any]) -> None:
    """Import the modules of the environment. Modules that start a thread are skipped: threads do not survive a fork,
    and locks that they held stay locked.
    """
    skipped = options.get("skip", [])
    for name in options.get("imports", []):
        if name in skipped:
            continue
        try:
            importlib.import_module(name)
        except BaseException:  # noqa: S112 - code that imports it gets the error
            continue
        if threading.active_count() > 1:
            again = json.dumps({**options, "skip": [*skipped, name]})
            os.execv(sys.executable, [sys.executable, "-c", RUN % (script, script), script, again])  # noqa: S606


RUN = "exec(compile(open(%r, encoding='utf-8').read(), %r, 'exec'))"
"""The argument of `python -c`, which gives modules the same search path as any `-c`."""


def site_folders() -> list[str]:
    """Return the directories of installed packages. When one of them changes, another interpreter has to start."""
    site = sys.modules.get("site")
    if site is None:
        return []
    found = list(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        found.append(site.getusersitepackages())
    return [folder for folder in found if len(folder) < 1000][:16]


def host(orders: socket.socket, script: str) -> None:
    """Run as a host: one call after the other, each below this process. Never returns."""
    os.setsid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def report(kind: bytes, value: int) -> None:
        orders.send(struct.pack("=8sq", kind, value))

    try:
        report(b"hello", os.getpid())
        while True:
            word, fds, _flags, _address = socket.recv_fds(orders, 64, 8)
            for descriptor in fds:  # work for a spare that was killed before it received it
                os.close(descriptor)
            if not word:
                os._exit(0)
            if word != b"prepare":
                continue
            pid = os.fork()
            if pid == 0:
                spare(orders, script)
            report(b"spare", pid)
            while True:
                try:
                    ended, status = os.waitpid(-1, 0)
                except ChildProcessError:
                    break
                if ended == pid:
                    report(b"ended", status)
            report(b"clean", 0)
    finally:
        os._exit(1)


def spare(orders: socket.socket, script: str) -> None:
    """Run as a spare: wait for work, do it and exit. Never returns."""
    status = 1
    try:
        os.setsid()
        word, fds, _flags, _address = socket.recv_fds(orders, 64, 8)
        if word != b"run":
            os._exit(0)
        orders.close()
        order = json.loads(os.pread(fds[0], os.fstat(fds[0]).st_size, 0))
        os.fchdir(fds[1])
        for target in range(3):
            os.dup2(fds[2 + target], target)
        for descriptor in fds[:5]:
            os.close(descriptor)
        become_new(order)
        _prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        if len(fds) > 5:
            status = serve_cells(script, fds[5], order)
        else:
            status = run(order["code"])
    finally:
        os._exit(status)


def become_new(order: dict[str, Any]) -> None:
    """Make this process like a new interpreter: variables, arguments, random numbers."""
    wanted = order["env"]
    for name in [name for name in os.environ if name not in wanted]:
        del os.environ[name]
    changed = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    os.environ.update(changed)
    if "TZ" in changed:
        import time

        time.tzset()
    for folder in reversed(changed.get("PYTHONPATH", "").split(os.pathsep)):
        if folder:
            sys.path.insert(1, folder)
    sys.argv = ["-c", *order.get("args", [])]
    if order.get("live") and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    importlib.invalidate_caches()
    # The standard library's own generator renews itself after a fork.
    for module, renew in (("numpy.random", "seed"), ("torch", "seed")):
        if module in sys.modules:
            getattr(sys.modules[module], renew)()
    threading.excepthook = _thread_failed


def new_main() -> types.ModuleType:
    """Create a new `__main__`, like that of `python -c`."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __loader__=BuiltinImporter, __annotations__={})
    sys.modules["__main__"] = module
    return module


def remember(name: str, text: str) -> None:
    """Let tracebacks show the lines of this code."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def run(text: str) -> int:
    """Run code as `__main__` until its threads have ended; return the exit code."""
    module = new_main()
    remember(NAME, text)
    status = execute(text, module.__dict__)
    return finish(module, status)


def execute(text: str, namespace: dict[str, Any]) -> int:
    """Run code and return its exit code. Tracebacks do not show frames of this file."""
    try:
        exec(compile(text, NAME, "exec", dont_inherit=True), namespace)  # noqa: S102 - this is what it is for
    except SystemExit as leaving:
        return exit_code(leaving)
    except BaseException as error:
        show(error)
        if isinstance(error, KeyboardInterrupt):
            return -signal.SIGINT
        return 1
    return 0


def exit_code(leaving: SystemExit) -> int:
    """Return the argument of `sys.exit` as an exit code."""
    code = leaving.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    try:
        print(code, file=sys.stderr)  # noqa: T201 - as Python does
    except BaseException:  # noqa: S110 - nowhere to say it
        pass
    return 1


def trimmed(error: BaseException) -> types.TracebackType | None:
    """Return the traceback of an error without the first frames, which are of carrel."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__carrel__"):
        trace = trace.tb_next
    return trace


def show(error: BaseException) -> None:
    """Print an error as Python does, with the lines of the code."""
    trace = trimmed(error)
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except BaseException:  # noqa: S110 - the exit code shows it
        pass
    try:
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, trace)
        else:
            traceback.print_exception(type(error), error, trace)
            sys.stderr.flush()
    except BaseException:  # noqa: S110 - nowhere to say it
        pass


def _thread_failed(args: Any) -> None:
    if args.exc_type is SystemExit or sys.stderr is None:
        return
    name = args.thread.name if args.thread is not None else "?"
    print(f"Exception in thread {name}:", file=sys.stderr)  # noqa: T201 - as Python does
    traceback.print_exception(args.exc_type, args.exc_value, args.exc_traceback)


def finish(module: types.ModuleType, status: int) -> int:
    """Do what an interpreter does at its end, except finalization: end threads, call exit functions, flush files."""
    # Files are flushed first: the collector may close what is below a buffer before the buffer.
    leave = (threading._shutdown, atexit._run_exitfuncs)  # type: ignore[attr-defined]
    for step in (*leave, flush_files, module.__dict__.clear, gc.collect, flush_files):
        try:
            step()
        except SystemExit as leaving:
            status = exit_code(leaving)
        except BaseException as error:
            show(error)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:
            status = status or 120
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def flush_files() -> None:
    """Flush files that were not closed. Objects from before the fork are not visited."""
    for each in gc.get_objects():
        if isinstance(each, (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)) and not each.closed:
            try:
                each.flush()
            except (OSError, ValueError):
                pass


def serve_cells(script: str, descriptor: int, order: dict[str, Any]) -> int:
    """Become a code context, with the program `kernel.py`."""
    path = os.path.join(os.path.dirname(script), "kernel.py")
    kernel = types.ModuleType("carrel_kernel")
    kernel.__dict__["__carrel__"] = True
    with open(path, encoding="utf-8") as file:
        source = file.read()
    exec(compile(source, path, "exec"), kernel.__dict__)  # noqa: S102 - carrel's own file
    module = new_main()
    status = kernel.serve(socket.socket(fileno=descriptor), module.__dict__, order)
    return finish(module, int(status))


if __name__ == "__main__":
    __carrel__ = True
    main(sys.argv[1], json.loads(sys.argv[2]))
