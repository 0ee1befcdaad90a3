"""`box.python` against a real server."""

from __future__ import annotations

import pytest

from carrel.client import AsyncSandbox, Sandbox
from carrel.errors import CommandFailed, InvalidRequest, NotFound
from carrel.models import PythonResult


def test_run(box: Sandbox) -> None:
    result = box.python.run("import sys; print(sys.argv[1:], open('in').read())", args=["a"], files={"in": b"data"})
    assert isinstance(result, PythonResult)
    assert (result.stdout, result.exit_code, result.ok) == ("['a'] data\n", 0, True)
    assert result.files_produced == []
    large = b"x" * 3_000_000
    code = "open('out', 'w').write(str(len(open('big', 'rb').read())))"
    assert box.python.run(code, files={"big": large}).files_produced == ["out"]
    assert box.files.read("out") == b"3000000"


def test_failures(box: Sandbox) -> None:
    with pytest.raises(CommandFailed) as failed:
        box.python.run("raise ValueError('no')", check=True)
    assert "ValueError: no" in str(failed.value)
    assert box.python.run("import time; time.sleep(9)", timeout=0.2).timed_out
    with pytest.raises(InvalidRequest):
        box.python.run("1", timeout=121)
    with pytest.raises(NotFound):
        box.python.run("1", env="no-such-environment")


def test_out_of_memory_is_told(box: Sandbox) -> None:
    result = box.python.run("x = []\nwhile True: x.append(bytearray(1 << 24))")
    assert result.oom_killed or "MemoryError" in result.stderr
    assert box.python.run("print('next')").stdout == "next\n"


def test_streams(box: Sandbox) -> None:
    stream = box.python.stream("print('one')\nprint('two')", variables={"A": "b"})
    assert "".join(chunk.text for chunk in stream) == "one\ntwo\n"
    assert stream.info is not None and stream.info.exit_code == 0
    command = box.python.start("print(input())", interactive=True)
    command.send_input("fed\n", close=True)
    assert command.wait().stdout == "fed\n"


async def test_asynchronously(async_box: AsyncSandbox) -> None:
    assert (await async_box.python.run("print(3)")).stdout == "3\n"


def test_other_doors(box: Sandbox) -> None:
    executed = box.execute("open('made', 'w'); print(1)", language="python")
    assert (executed.output, executed.files_produced) == ("1\n", ["made"])
    with pytest.raises(InvalidRequest):
        box.execute("1", language="python", timeout=121)
    called = box.tool("python_exec", {"code": "print(2)"})
    assert called.result["stdout"] == "2\n"
    with pytest.raises(InvalidRequest) as refused:
        box.tool("python_exec", {"code": "print(2)", "wrong": 1})
    assert refused.value.field == "params.wrong"


def test_contexts(box: Sandbox) -> None:
    context = box.python.context("analysis", variables={"A": "b"})
    assert context.run("import os; x = os.environ['A']").fresh
    result = context.run("print('printed'); x * 2")
    assert (result.stdout, result.text, result.ok, result.number) == ("printed\n", "'bb'", True, 2)
    assert [(each.name, each.state) for each in box.python.contexts()] == [("analysis", "idle")]
    failed = context.run("1 / 0")
    assert failed.status == "error" and failed.error is not None and "<cell 3>" in failed.error.traceback
    with context.stream("import time\nprint('one')\nprint('two')\nx") as stream:
        assert "".join(chunk.text for chunk in stream) == "one\ntwo\n"
        assert stream.result().text == "'b'"
    with context.stream("print('up')\nimport time\ntime.sleep(60)") as stream:
        assert next(iter(stream)).text == "up\n"
        assert context.interrupt().name == "analysis"
        assert stream.result().status == "interrupted"
    assert context.run("x").text == "'b'"
    assert context.restart().cells == 0
    assert context.run("x").status == "error"
    assert context.cell("1").number == 1
    context.delete()
    with pytest.raises(NotFound):
        context.info()
