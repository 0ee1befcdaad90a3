"""The command line of `scripts/cluster`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import layout
import programs
from machine import Machine, Started


def main(arguments: list[str]) -> int:
    match arguments:
        case ["build"]:
            print(programs.provide())
            return 0
        case ["run", _, *_]:
            return _run(arguments[1:])
        case ["kubectl", *words]:
            os.execv(_started().programs.kubernetes, ["kubectl", *words])  # acts as the program it is called as
        case ["import", _, *_]:
            return subprocess.call(_started().in_mounts([*layout.IMPORT, *map(os.path.abspath, arguments[1:])]))
        case ["freeze" | "thaw" as what, component]:
            _started().signal(component, signal.SIGSTOP if what == "freeze" else signal.SIGCONT)
            return 0
    print(
        "usage: scripts/cluster build | run COMMAND… | kubectl … | import ARCHIVE… | freeze COMPONENT | thaw COMPONENT",
        file=sys.stderr,
    )
    return 2


def _started() -> Started:
    folder = os.environ.get("CARREL_CLUSTER")
    if not folder:
        raise SystemExit("cluster: this works below `scripts/cluster run`")
    return Started(Path(folder))


def _run(command: list[str]) -> int:
    if why := programs.missing():
        print(f"cluster: {why}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    found = programs.Programs.of(programs.provide())
    with Machine(found) as machine:
        machine.start()
        print(f"cluster: ready after {machine.took_s:.1f} s", file=sys.stderr)
        variables = {**os.environ, "KUBECONFIG": machine.kubeconfig, "CARREL_CLUSTER": str(machine.folder)}
        child = subprocess.Popen(machine.in_network(command), env=variables)
        try:
            return child.wait()
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()


sys.exit(main(sys.argv[1:]))
