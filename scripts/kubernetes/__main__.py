"""The command line of `scripts/cluster`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import programs
from machine import Machine


def main(arguments: list[str]) -> int:
    match arguments:
        case ["build"]:
            print(programs.provide())
            return 0
        case ["run", _, *_]:
            return _run(arguments[1:])
        case ["kubectl", *words]:
            folder = os.environ.get("CARREL_CLUSTER")
            if not folder:
                raise SystemExit("cluster: kubectl works below `scripts/cluster run`")
            program = str(programs.Programs.of(programs.provide()).kubernetes)
            os.execv(program, ["kubectl", *words])  # acts as the program it is called as
    print("usage: scripts/cluster build | run COMMAND… | kubectl …", file=sys.stderr)
    return 2


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
