"""The program of a code context, run in this process."""

from __future__ import annotations

import builtins
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.supervisor.python import kernel
from carrel.supervisor.python.kernel import Finder, Kernel, forms_of


@pytest.fixture
def made() -> Iterator[Kernel]:
    before = list(sys.meta_path)
    made = Kernel({}, 1000)
    yield made
    if made.loop is not None:
        made.loop.close()
    sys.meta_path[:] = before
    for descriptor in made.streams.values():
        os.close(descriptor)
    del builtins.display  # type: ignore[attr-defined]


def run(made: Kernel, code: str, number: int = 1) -> dict[str, Any]:
    return made.run({"code": code, "number": number, "figures": ["png"]})


def test_values_errors_and_state(made: Kernel) -> None:
    assert run(made, "x = 2") == {"status": "ok", "error": None, "results": [], "dropped": 0}
    assert run(made, "x ** 5")["results"] == [{"kind": "result", "data": {"text/plain": "32"}}]
    assert run(made, "_ + 1")["results"][0]["data"]["text/plain"] == "33"
    assert run(made, "None")["results"] == []
    failed = run(made, "display(x)\nx.y", 7)
    assert failed["status"] == "error" and failed["results"][0]["kind"] == "display"
    assert failed["error"]["name"] == "AttributeError" and '"<cell 7>", line 2' in failed["error"]["traceback"]
    assert run(made, "raise KeyboardInterrupt")["status"] == "interrupted"


def test_an_interrupt_counts_only_while_a_cell_runs(made: Kernel) -> None:
    made.on_interrupt(2, None)
    made.running = True
    with pytest.raises(KeyboardInterrupt):
        made.on_interrupt(2, None)


def test_room_is_kept(made: Kernel) -> None:
    told = run(made, "display('a' * 600)\ndisplay('b' * 600)\ndisplay('c' * 600)")
    shown = "".join(each["data"]["text/plain"] for each in told["results"])
    assert len(shown) < 1010 and told["dropped"] > 0


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.binary(), st.lists))
def test_every_value_has_a_text(value: object) -> None:
    forms = forms_of(value)
    assert forms == {"text/plain": repr(value)}
    json.dumps(forms)


def test_forms_that_lie_are_left_out() -> None:
    class Liar:
        def _repr_mimebundle_(self) -> object:
            return ({"text/html": "<i>", 5: "x", "application/x": object()}, {})

        def _repr_png_(self) -> object:
            return (b"png", {})

        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    forms = forms_of(Liar())
    assert forms.pop("text/plain").startswith("<")
    assert forms == {"text/html": "<i>", "image/png": "cG5n"}
    assert list(forms_of(Liar)) == ["text/plain"]


def test_serves_over_a_socket(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = "import socket, sys; from carrel.supervisor.python import kernel; "
    program += "kernel.serve(socket.socket(fileno=int(sys.argv[1])), {}, {'limit': 1 << 20})"
    command = [sys.executable, "-c", program, str(theirs.fileno())]
    with ours, theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        ours.send(json.dumps({"code": "6 * 7", "number": 1, "figures": []}).encode())
        assert json.loads(ours.recv(1 << 17))["results"][0]["data"]["text/plain"] == "42"
        ours.send(json.dumps({"code": "'x' * 100_000", "number": 2, "figures": []}).encode())
        word, fds, _, _ = socket.recv_fds(ours, 10, 1)
        assert word == b"@"
        told = json.loads(os.pread(fds[0], 1 << 20, 0))
        os.close(fds[0])
        assert len(told["results"][0]["data"]["text/plain"]) == 100_002
        ours.close()
        assert process.wait(20) == 0


def test_matplotlib_is_not_imported_by_us(made: Kernel) -> None:
    assert run(made, "1")["status"] == "ok"
    assert "matplotlib" not in sys.modules
    finder = next(each for each in sys.meta_path if isinstance(each, Finder))
    assert finder.find_spec("json") is None
    assert finder.find_spec(kernel.FIGURES) is not None
    assert threading.active_count() >= 1
