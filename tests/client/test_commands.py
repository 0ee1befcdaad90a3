from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from carrel.client import AsyncSandbox, Client, Sandbox
from carrel.errors import AlreadyExists, CommandFailed, InvalidRequest, NotFound
from carrel.models import CommandResult


def test_run_gives_both_streams_and_the_exit_code(box: Sandbox) -> None:
    result = box.commands.run("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("out\n", "err\n", 3, False)
    assert box.commands.run(["printf", "%s", "a b; c"]).stdout == "a b; c"
    assert box.commands.run("cat", stdin="typed").stdout == "typed"
    assert box.commands.run('echo "$COLOUR"', env={"COLOUR": "blue"}).stdout == "blue\n"


def test_an_interactive_command_has_a_terminal(box: Sandbox) -> None:
    result = box.commands.run("stty size; cat", stdin="typed\n", interactive=True, terminal=(7, 50))
    assert result.stdout.startswith("7 50\r\n") or result.stdout.startswith("typed\r\n7 50\r\n")
    assert result.stdout.endswith("typed\r\n") and result.ok and not result.stderr
    assert "not a tty" in box.commands.run("tty").stdout


def test_bytes_that_are_not_text_are_exact(box: Sandbox) -> None:
    result = box.commands.run(r"printf '\377\000\nz'")
    assert result.stdout_bytes == b"\xff\x00\nz"
    assert box.commands.run("printf é").stdout_bytes == "é".encode()
    assert box.commands.run(r"printf '\377' >&2").stderr_bytes == b"\xff"


def test_check_raises_with_the_result(box: Sandbox) -> None:
    with pytest.raises(CommandFailed, match="exited with 7: no luck") as raised:
        box.commands.run("echo no luck >&2; exit 7", check=True)
    assert isinstance(raised.value.result, CommandResult)
    assert raised.value.result.exit_code == 7
    with pytest.raises(CommandFailed, match="KILL"):
        box.commands.run("kill -9 $$", check=True)
    assert box.commands.run("true", check=True).ok


def test_a_deadline_keeps_what_was_written(box: Sandbox) -> None:
    result = box.commands.run("echo before; sleep 60", timeout=2)
    assert result.timed_out
    assert result.stdout == "before\n"


def test_stream_arrives_while_the_command_runs(box: Sandbox) -> None:
    stream = box.commands.stream("echo one; while ! [ -e go ]; do sleep 0.01; done; echo two >&2")
    first = next(stream)
    box.files.write("go", b"")
    assert (first.stream, first.text, str(first)) == ("stdout", "one\n", "one\n")
    rest = list(stream)
    assert [(chunk.stream, chunk.text) for chunk in rest] == [("stderr", "two\n")]
    assert stream.info is not None
    assert stream.info.exit_code == 0
    late = box.commands.stream("sleep 30", timeout=0.3)
    assert list(late) == []
    assert late.info is not None
    assert late.info.timed_out


def test_line_separators_inside_the_text_do_not_cut_it(box: Sandbox) -> None:
    text = "a\u2028b\x0bc\x85d\n\u2029"
    joined = "".join(chunk.text for chunk in box.commands.stream(["printf", "%s", text]))
    assert joined == text


def test_a_stream_can_be_left(box: Sandbox) -> None:
    with box.commands.stream("while :; do echo y; sleep 0.01; done", timeout=5) as stream:
        for _ in stream:
            break
    assert stream.info is None
    assert box.commands.run("echo still here").ok


def test_background_handle(box: Sandbox) -> None:
    handle = box.commands.start("read line; echo got $line; read other; echo $other >&2; exit 5", interactive=True)
    assert handle.info().running
    assert handle.id in [info.id for info in box.commands.list()]
    handle.send_input("first\n")
    for chunk in handle.stream():
        assert chunk.text == "got first\n"
        offset = chunk.offset
        break
    handle.send_input(b"second\n")
    handle.close_input()
    result = box.commands.get(handle.id).wait()
    assert (result.exit_code, result.stdout, result.stderr) == (5, "got first\n", "second\n")
    later = handle.output(offset)
    assert (later.stdout, later.stderr, later.data, later.text) == ("", "second\n", b"second\n", "second\n")
    assert later.info is not None
    assert later.info.exit_code == 5
    assert handle.output(later.offset).data == b""
    with pytest.raises(CommandFailed):
        handle.wait(check=True)
    handle.forget()
    with pytest.raises(NotFound):
        handle.info()


def test_kill_and_signal(box: Sandbox) -> None:
    sleeper = box.commands.start("echo up; sleep 60")
    next(sleeper.stream())
    sleeper.kill()
    result = sleeper.wait()
    assert result.signal in {"SIGKILL", "KILL"}
    assert result.stdout == "up\n"
    sleeper.kill()
    trapped = box.commands.start("trap 'echo caught; exit 4' USR1; echo up; while :; do sleep 0.05; done")
    next(trapped.stream())
    trapped.signal("USR1")
    assert trapped.wait().exit_code == 4


def test_an_abandoned_stream_is_closed_at_once(box: Sandbox) -> None:
    """Left to the garbage collector it could be closed inside the connection pool's lock, which never ends."""
    sleeper = box.commands.start("echo up; sleep 60")
    stream = sleeper.stream()
    assert str(next(stream)) == "up\n"
    response = weakref.ref(stream)
    gc.disable()
    try:
        del stream
        assert response() is None, "something still knows the stream"
    finally:
        gc.enable()
    sleeper.kill()


def test_bad_requests_name_the_field(box: Sandbox) -> None:
    with pytest.raises(InvalidRequest) as raised:
        box.commands.run("true", timeout=-1)
    assert "timeout" in str(raised.value.field)
    with pytest.raises(InvalidRequest):
        box.commands.run("true", env={"A": object()})  # type: ignore[dict-item]


async def test_async_commands(async_box: AsyncSandbox) -> None:
    assert (await async_box.commands.run("echo hi")).stdout == "hi\n"
    stream = async_box.commands.stream("echo one; echo two")
    assert "".join([chunk.text async for chunk in stream]) == "one\ntwo\n"
    assert stream.info is not None
    assert stream.info.exit_code == 0
    handle = await async_box.commands.start("cat", interactive=True)
    await handle.send_input("x", close=True)
    assert (await handle.wait(check=True)).stdout == "x"
    assert (await handle.output()).stdout == "x"
    with pytest.raises(CommandFailed):
        await async_box.commands.run("false", check=True)


def test_a_stream_can_be_opened_before_anything_is_written(box: Sandbox) -> None:
    with box.commands.stream("cat; echo end", stdin="") as stream:
        id = stream.open()
        assert id is not None and stream.open() == id
        assert [info.id for info in box.commands.list()] == [id]
        assert "".join(map(str, stream)) == "end\n"
    assert box.commands.get(id).wait().ok
    assert box.commands.get(id).stream().open() is None


def test_an_id_of_ones_own_runs_once_and_finds_it_again(box: Sandbox) -> None:
    first = box.commands.start("echo ran >> ran; cat ran", id="k-my-own-1")
    with pytest.raises(AlreadyExists):
        box.commands.start("echo ran >> ran; cat ran", id="k-my-own-1")
    assert first.id == "k-my-own-1" and box.commands.get("k-my-own-1").wait().stdout == "ran\n"
    assert box.python.start("print(6 * 7)", id="k-my-own-2").wait().stdout == "42\n"
    with pytest.raises(AlreadyExists):
        box.python.start("print(6 * 7)", id="k-my-own-2")
    box.files.write("f", "a")
    for _ in range(2):
        assert box.files.edit("f", "a", "aa", id="k-my-own-3").replaced == 1
    assert box.files.read("f") == b"aa"
    with pytest.raises(InvalidRequest) as refused:
        box.commands.start("true", id="c1")
    assert refused.value.field == "id"


def test_start_has_no_deadline_and_run_has_that_of_the_sandbox(client: Client) -> None:
    with client.sandbox(limits={"timeout_s": 1}) as box:
        waits = "while ! [ -e go ]; do sleep 0.05; done; echo went"
        started = [box.commands.start(waits), box.commands.start(waits, timeout=0)]
        bounded = box.commands.start(waits, timeout="default")
        assert box.commands.run("sleep 60").timed_out
        assert bounded.wait().timed_out
        assert all(each.info().running for each in started), "they were started before what has timed out"
        box.files.write("go", b"")
        assert [each.wait().stdout for each in started] == ["went\n", "went\n"]


@pytest.mark.parametrize("timeout", [None, 0, math.inf])
def test_run_and_stream_without_a_deadline(client: Client, timeout: float | None) -> None:
    with client.sandbox(limits={"timeout_s": 0.5}) as box:
        assert box.commands.run("sleep 1; echo after", timeout=timeout).stdout == "after\n"
        assert "".join(chunk.text for chunk in box.commands.stream("sleep 1; echo s", timeout=timeout)) == "s\n"
        assert box.execute("sleep 1; echo e", timeout=timeout).output == "e\n"


@pytest.mark.parametrize("timeout", [math.nan, -1, -math.inf, True, "soon"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(box: Sandbox, timeout: Any) -> None:
    context = box.python.context("main")
    calls: list[Callable[[], object]] = [
        lambda: box.commands.run("true", timeout=timeout),
        lambda: box.commands.start("true", timeout=timeout),
        lambda: list(box.commands.stream("true", timeout=timeout)),
        lambda: box.execute("true", timeout=timeout),
        lambda: box.python.run("1", timeout=timeout),
        lambda: box.python.start("1", timeout=timeout),
        lambda: context.run("1", timeout=timeout),
        lambda: box.mcp.request("server", "tool", timeout=timeout),
        lambda: Client(timeout=timeout),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest) as raised:
            call()
        assert raised.value.field == "timeout" and raised.value.hint


def test_code_with_an_infinite_timeout_is_refused_in_words(box: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="at most 120 seconds"):
        box.python.run("1", timeout=math.inf)
    with Client(timeout=math.inf) as patient:
        assert patient.sandbox(box.id).commands.run("echo hi").stdout == "hi\n"
