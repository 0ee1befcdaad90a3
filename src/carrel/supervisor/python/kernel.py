"""The program of a code context: runs cells one after the other in one namespace, and reports their results.

It is loaded into a process of `warm`, so it too can import only the standard library (Python 3.9 or newer). A cell
comes as JSON over a socket, and its results go back the same way; printed text goes to standard output. Large messages
are sent as an anonymous file.
"""

from __future__ import annotations

import ast
import base64
import builtins
import fcntl
import inspect
import io
import json
import linecache
import os
import signal
import socket
import sys
import traceback
import types
from typing import Any

INLINE = 60_000
MOST_TEXT = 1024 * 1024
MOST_ROWS = 1000
FIRST_KEPT = 64
"""Copies of the standard streams get numbers from here on, which cells are unlikely to close."""
FIGURES = "carrel_figures"
_ALLOW_AWAIT = getattr(ast, "PyCF_ALLOW_TOP_LEVEL_AWAIT", 0)
_FORMS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "application/json": "_repr_json_",
}


def serve(control: socket.socket, namespace: dict[str, Any], order: dict[str, Any]) -> int:
    """Run cells until the socket is closed; return the exit code of the process."""
    return Kernel(namespace, int(order["limit"])).serve(control)


class Kernel:
    """One namespace, and the results of the current cell."""

    def __init__(self, namespace: dict[str, Any], limit: int):
        self.namespace = namespace
        self.limit = limit
        self.pid = os.getpid()
        self.running = False
        self.figures: list[str] = ["png"]
        self.results: list[dict[str, Any]] = []
        self.room = 0
        self.dropped = 0
        self.loop: Any = None
        self.streams = {number: fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, FIRST_KEPT) for number in (1, 2)}
        builtins.display = self.display  # type: ignore[attr-defined]
        sys.meta_path.insert(0, Finder(self))
        choose_backend()

    def serve(self, control: socket.socket) -> int:
        while True:
            signal.signal(signal.SIGINT, self.on_interrupt)
            message, fds, _flags, _address = socket.recv_fds(control, 1 << 17, 1)
            if not message:
                return 0
            if fds:
                message = os.pread(fds[0], os.fstat(fds[0]).st_size, 0)
                os.close(fds[0])
            self.running = True
            try:
                report = self.run(json.loads(message))
            except KeyboardInterrupt as raised:  # it came when the cell had just ended
                self.running = False
                report = {"status": "interrupted", "error": self.describe(raised), "results": [], "dropped": 0}
            if os.getpid() != self.pid:  # a cell has forked and this is the child
                return 0
            answer = json.dumps(report).encode()
            if len(answer) <= INLINE:
                control.send(answer)
                continue
            memory = os.memfd_create("answer", os.MFD_CLOEXEC)
            with open(memory, "wb") as file:
                file.write(answer)
                file.flush()
                socket.send_fds(control, [b"@"], [memory])

    def on_interrupt(self, _number: int, _frame: Any) -> None:
        """Handle SIGINT, which has an effect only while a cell runs."""
        if self.running:
            raise KeyboardInterrupt

    def run(self, cell: dict[str, Any]) -> dict[str, Any]:
        """Run one cell and return its results and its end."""
        self.figures, self.results, self.room, self.dropped = cell["figures"], [], self.limit, 0
        status, error = "ok", None
        try:
            reopen(self.streams)
            self.execute(cell["code"], f"<cell {cell['number']}>")
            self.running = False
            self.show_figures()
        except KeyboardInterrupt as raised:
            self.running = False
            status, error = "interrupted", self.describe(raised)
        except BaseException as raised:
            self.running = False
            status, error = "error", self.describe(raised)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # noqa: S110 - it is the cell's own stream
                pass
        return {"status": status, "error": error, "results": self.results, "dropped": self.dropped}

    def execute(self, text: str, name: str) -> None:
        """Run the code of a cell. The value of its last expression is a result."""
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        tree = ast.parse(text, name)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not text.rstrip().endswith(";"):
            last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
        if tree.body:
            self.evaluate(compile(tree, name, "exec", _ALLOW_AWAIT, dont_inherit=True))
        if last is not None:
            value = self.evaluate(compile(last, name, "eval", _ALLOW_AWAIT, dont_inherit=True))
            if value is not None:
                self.namespace["_"] = value
                self.show(value, "result")

    def evaluate(self, code: types.CodeType) -> Any:
        value = eval(code, self.namespace)  # noqa: S307 - this is what it is for
        if not code.co_flags & inspect.CO_COROUTINE:
            return value
        if self.loop is None:
            import asyncio

            self.loop = asyncio.new_event_loop()
        return self.loop.run_until_complete(value)

    def describe(self, error: BaseException) -> dict[str, str]:
        """Describe an exception of a cell, without frames of this file."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__carrel__"):
            trace = trace.tb_next
        lines = "".join(traceback.format_exception(type(error), error, trace))
        try:
            value = str(error)
        except Exception:
            value = "?"
        return {"name": type(error).__name__, "value": value[:MOST_TEXT], "traceback": lines[:MOST_TEXT]}

    # showing

    def display(self, *values: Any) -> None:
        """Add values to the results; the builtin `display` of every cell."""
        for value in values:
            self.show(value, "display")

    def show(self, value: Any, kind: str) -> None:
        """Add a value to the results, in all its formats."""
        if is_figure(value):
            self.show_figure(value, kind)
            return
        self.keep(kind, forms_of(value))

    def keep(self, kind: str, forms: dict[str, str]) -> None:
        """Add a result, as far as the limit of the cell allows."""
        kept = {}
        for name, text in forms.items():
            most = max(0, min(MOST_TEXT, self.room))
            if name == "text/plain" and most and len(text) > most:
                self.dropped += len(text) - most
                kept[name] = text[:most] + "…"
            elif len(text) <= self.room:
                kept[name] = text
            else:
                self.dropped += len(text)
                continue
            self.room -= len(kept[name])
        if kept:
            self.results.append({"kind": kind, "data": kept})

    def show_figures(self) -> None:
        """Show and close the open figures of matplotlib, if it is loaded."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        for number in pyplot.get_fignums() if pyplot is not None else ():
            self.show_figure(pyplot.figure(number), "figure")  # type: ignore[union-attr]

    def show_figure(self, figure: Any, kind: str) -> None:
        """Draw a figure and close it, so that it is shown only once."""
        forms = {}
        for form in self.figures:
            drawn = io.BytesIO()
            figure.savefig(drawn, format=form, bbox_inches="tight")
            if form == "svg":
                forms["image/svg+xml"] = drawn.getvalue().decode()
            else:
                forms[f"image/{form}"] = base64.b64encode(drawn.getvalue()).decode()
        forms["text/plain"] = repr(figure)
        self.keep(kind, forms)
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:
            pyplot.close(figure)


def reopen(kept: dict[int, int]) -> None:
    """Reopen the standard streams if an earlier cell has closed them or their descriptors."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if not is_open(number):
            setattr(sys, name, None)  # its buffered text cannot be written any more
            if is_open(kept[number]):
                os.dup2(kept[number], number)
            else:
                null = os.open(os.devnull, os.O_WRONLY)
                if null != number:
                    os.dup2(null, number)
                    os.close(null)
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            raw = io.FileIO(number, "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "replace", line_buffering=True))


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def forms_of(value: Any) -> dict[str, str]:
    """Return a value as text and in every other format that it supports. Formats that fail are left out."""
    forms: dict[str, str] = {}
    if not isinstance(value, type):
        bundle = offered(value, "_repr_mimebundle_")
        bundle = bundle[0] if isinstance(bundle, tuple) and bundle else bundle
        for name, form in bundle.items() if isinstance(bundle, dict) else ():
            take(forms, name, form)
        for name, method in _FORMS.items():
            if name not in forms:
                take(forms, name, offered(value, method))
        if "application/json" not in forms:
            take(forms, "application/json", table_of(value))
    if "text/plain" not in forms:
        try:
            forms["text/plain"] = repr(value)
        except Exception as error:
            forms["text/plain"] = f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return forms


def offered(value: Any, method: str) -> Any:
    """Return the result of a method of a value, or None if there is no such method or it fails."""
    try:
        found = getattr(value, method, None)
        return found() if callable(found) else None
    except Exception:
        return None


def take(forms: dict[str, str], name: Any, form: Any) -> None:
    """Add a format as text: bytes as base64, other values as JSON."""
    if form is None or not isinstance(name, str):
        return
    if isinstance(form, tuple):
        form = form[0]
    try:
        if isinstance(form, bytes):
            forms[name] = base64.b64encode(form).decode()
        else:
            forms[name] = form if isinstance(form, str) else json.dumps(form)
    except (TypeError, ValueError):
        pass


def table_of(value: Any) -> Any:
    """Return a data frame or series as JSON: columns, index and data of its first rows."""
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return None
    try:
        if isinstance(value, (pandas.DataFrame, pandas.Series)):
            return value.iloc[:MOST_ROWS].to_json(orient="split", date_format="iso")
    except Exception:
        return None
    return None


def is_figure(value: Any) -> bool:
    """Whether a value is a figure of matplotlib, without importing matplotlib."""
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, getattr(module, "Figure", ()))


class Finder:
    """An import hook that sets the backend of matplotlib when a cell imports it, unless the cell has chosen another.

    An environment variable would also affect every program that a cell starts.
    """

    def __init__(self, kernel: Kernel):
        self.kernel = kernel

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Any:
        """Called for every import."""
        if name == "matplotlib.pyplot":
            choose_backend()
        elif name == FIGURES:
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, self)  # type: ignore[arg-type]
        return None

    def create_module(self, _spec: Any) -> None:
        """Use the default module."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Fill the module of the backend, which draws without a display and adds figures to the results."""
        from matplotlib.backends.backend_agg import (  # type: ignore[import-not-found]
            FigureCanvasAgg,
            new_figure_manager,
        )

        module.__dict__.update(
            FigureCanvas=FigureCanvasAgg,
            new_figure_manager=new_figure_manager,
            show=lambda *_, **__: self.kernel.show_figures(),
        )


def choose_backend() -> None:
    """Set the backend of matplotlib, if it is loaded."""
    matplotlib = sys.modules.get("matplotlib")
    try:
        if matplotlib is not None and not isinstance(dict.__getitem__(matplotlib.rcParams, "backend"), str):
            matplotlib.rcParams["backend"] = f"module://{FIGURES}"
    except Exception:  # noqa: S110 - then it uses its own default
        pass
