from __future__ import annotations

import base64
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.client.output import Output, OutputDecoder, checked
from carrel.errors import CarrelError, CommandFailed, PlatformError, SandboxLost
from carrel.models import CommandResult

END = {"stream": "end", "offset": 0}


def events(pieces: list[tuple[str, bytes]]) -> bytes:
    lines = []
    offset = 0
    for stream, data in pieces:
        offset += len(data)
        event: dict[str, object] = {"stream": stream, "offset": offset}
        try:
            event["text"] = data.decode()
        except UnicodeDecodeError:
            event["base64"] = base64.b64encode(data).decode()
        lines.append(json.dumps(event, ensure_ascii=False))
    return "".join(f"{line}\n" for line in [*lines, json.dumps({**END, "offset": offset})]).encode()


pieces = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=12)), max_size=12)


@given(pieces=pieces, cuts=st.lists(st.integers(0, 400), max_size=8))
def test_chunks_are_the_bytes_however_they_travel(pieces: list[tuple[str, bytes]], cuts: list[int]) -> None:
    wire = events(pieces)
    edges = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    decoder = OutputDecoder()
    chunks = [c for a, b in pairwise(edges) for c in decoder.feed(wire[a:b])]
    assert decoder.ended
    for name in ("stdout", "stderr"):
        data = b"".join(each for stream, each in pieces if stream == name)
        assert b"".join(c.data for c in chunks if c.stream == name) == data
        assert "".join(c.text for c in chunks if c.stream == name) == data.decode("utf-8", "replace")
    assert Output.of(chunks, 0, None).data == b"".join(data for _, data in pieces)


@given(st.binary(max_size=200))
def test_nonsense_is_a_carrel_error(line: bytes) -> None:
    try:
        list(OutputDecoder().feed(line + b"\n"))
    except CarrelError:
        pass


def test_a_problem_at_the_end_of_a_stream_is_raised_as_itself() -> None:
    line = json.dumps(SandboxLost("it died").problem()).encode() + b"\n"
    with pytest.raises(SandboxLost, match="it died"):
        list(OutputDecoder().feed(line))
    with pytest.raises(PlatformError, match="cannot be read"):
        list(OutputDecoder().feed(b"<html>\n"))


def test_what_failed_is_said() -> None:
    def result(**changes: object) -> CommandResult:
        base = {"id": "c", "stdout": "", "stderr": "", "exit_code": None, "duration_ms": 1}
        return CommandResult.model_validate({**base, **changes})

    assert checked(result(exit_code=0)).ok
    for wrong, words in (
        (result(exit_code=2, stderr="a\nlast\n"), "exited with 2: last"),
        (result(signal="SIGSEGV"), "SIGSEGV"),
        (result(signal="SIGKILL", timed_out=True), "timed out"),
    ):
        with pytest.raises(CommandFailed, match=words):
            checked(wrong)
