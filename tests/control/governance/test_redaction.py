from __future__ import annotations

from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from carrel.control.governance.redaction import OutputRedactor, clean_error, clean_info, clean_output, clean_result
from carrel.control.supervisor.frames import StreamChunk, TextCutter
from carrel.errors import Denied, NotFound
from carrel.models import CommandInfo, CommandResult
from carrel.redaction.redact import Redactor

SECRET = b"hunter2-hunter2"
REDACTOR = Redactor({"PASSWORD": SECRET}, shapes=False)
PIECES = st.lists(
    st.tuples(st.sampled_from(["stdout", "stderr"]), st.sampled_from([SECRET, SECRET[:7], SECRET[7:], b"a", b"hun", b"\n"])),
    max_size=12,
)  # fmt: skip


def _cut(pieces: list[tuple[str, bytes]], sizes: list[int]) -> list[StreamChunk]:
    """The pieces in chunks of other sizes; order and streams as they are."""
    chunks = []
    for stream, data in pieces:
        while data:
            size = sizes[len(chunks) % len(sizes)]
            chunks.append(StreamChunk(stream, data[:size]))
            data = data[size:]
    return chunks


def _read(chunks: list[StreamChunk], skip: int = 0) -> list[StreamChunk]:
    cleaned = OutputRedactor(REDACTOR, skip)
    given = [each for chunk in chunks for each in cleaned.feed(chunk)]
    return given + cleaned.finish()


def _text(chunks: list[StreamChunk], stream: str) -> bytes:
    return b"".join(chunk.data for chunk in chunks if chunk.stream == stream)


@given(PIECES, st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_however_it_is_cut_no_secret_passes_and_nothing_else_is_lost(
    pieces: list[tuple[str, bytes]], sizes: list[int]
) -> None:
    given = _read(_cut(pieces, sizes))
    for stream in ("stdout", "stderr"):
        raw = b"".join(data for name, data in pieces if name == stream)
        shown = _text(given, stream)
        assert SECRET not in shown
        assert shown == REDACTOR.data(raw)
    assert sum(chunk.raw or 0 for chunk in given) == sum(len(data) for _, data in pieces)


@given(PIECES, st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 200))
def test_who_goes_on_from_an_offset_gets_the_rest_and_no_secret(
    pieces: list[tuple[str, bytes]], sizes: list[int], stop: int
) -> None:
    chunks = _cut(pieces, sizes)
    whole = _read(chunks)
    cutter = TextCutter()
    seen: list[StreamChunk] = []
    for chunk in whole[:stop]:
        seen.append(chunk)
        cutter.feed(chunk)
    if len({name for name, _ in pieces}) > 1:
        return  # streams that interleave inside a secret are given together, and may be repeated
    offset = cutter.offset
    skip = min(offset, REDACTOR.lookbehind)
    flat = b"".join(chunk.data for chunk in chunks)
    rest = _read([StreamChunk("stdout", flat[offset - skip :])] if flat else [], skip)
    shown = b"".join(chunk.data for chunk in seen) + b"".join(chunk.data for chunk in rest)
    assert SECRET not in shown
    assert shown == REDACTOR.data(flat)


def test_one_stream_waits_while_the_other_may_be_in_a_secret_but_not_for_ever() -> None:
    cleaned = OutputRedactor(REDACTOR)
    assert cleaned.feed(StreamChunk("stdout", b"x" + SECRET[:8])) == [StreamChunk("stdout", b"x", 1)]
    assert cleaned.feed(StreamChunk("stderr", b"warning")) == []
    given = cleaned.feed(StreamChunk("stdout", SECRET[8:])) + cleaned.feed(StreamChunk("stdout", b"\n"))
    assert [chunk.data for chunk in given if chunk.data] == [b"[secret:PASSWORD]", b"\n", b"warning"]
    assert sum(chunk.raw or 0 for chunk in given) == len(SECRET) + 8
    assert not cleaned.holds
    cleaned.feed(StreamChunk("stdout", SECRET[:8]))
    given = cleaned.feed(StreamChunk("stderr", b"y" * 70_000))
    assert _text(given, "stderr") == b"y" * 70_000


def test_an_echoed_key_is_shown_when_nothing_follows() -> None:
    cleaned = OutputRedactor(REDACTOR)
    assert cleaned.feed(StreamChunk("stdout", b"h")) == []
    assert cleaned.quiet() == [StreamChunk("stdout", b"h", 1)]
    assert cleaned.quiet() == []
    shown = b"".join(chunk.data for chunk in cleaned.feed(StreamChunk("stdout", SECRET[1:] + b"!")))
    assert SECRET[1:] not in shown and shown.endswith(b"!")


async def test_frames_in_frames_out() -> None:
    def frame(kind: int, data: bytes) -> bytes:
        return bytes([kind]) + len(data).to_bytes(4, "big") + data

    async def stream() -> AsyncIterator[bytes]:
        for byte in frame(1, b"key " + SECRET) + frame(2, b"done") + frame(0, b"{}"):
            yield bytes([byte])

    async def current() -> Redactor:
        return REDACTOR

    chunks = [chunk async for chunk in clean_output(stream(), current, 0)]
    assert _text(chunks, "stdout") == b"key [secret:PASSWORD]" and _text(chunks, "stderr") == b"done"
    assert chunks[-1] == StreamChunk("end", b"{}")


def test_results() -> None:
    result = CommandResult(id="c", stdout=f"a {SECRET.decode()}", stderr="", exit_code=0, duration_ms=1)
    assert clean_result(REDACTOR, result).stdout == "a [secret:PASSWORD]"
    exact = result.model_copy(update={"stdout_base64": "/2h1bnRlcjItaHVudGVyMg=="})
    assert clean_result(REDACTOR, exact).stdout_bytes == b"\xff[secret:PASSWORD]"


def test_an_error_is_told_without_secrets() -> None:
    text = SECRET.decode()
    error = NotFound(f"no {text}", field=text, hint=f"not {text}", rule=text, more=[{"a": text}])
    clean_error(REDACTOR, error)
    assert text not in str(error.problem()) + repr(error) + str(error)
    assert error.detail == "no [secret:PASSWORD]" and error.extra["more"] == [{"a": "[secret:PASSWORD]"}]
    unknown = Denied(f"no {text}", hint=text, reason=text, retry=True, retry_after=3)
    clean_error(None, unknown)
    assert text not in str(unknown.problem()) + repr(unknown) and unknown.code == "denied_by_policy"
    assert unknown.extra == {"retry": True, "retry_after": 3}


def test_what_is_told_of_a_command() -> None:
    told = {"id": "c", "running": False, "pid": None, "terminal": False, "output_bytes": 0, "duration_ms": 1.0}
    for command in (f"echo {SECRET.decode()}", ["echo", SECRET.decode()]):
        given = {**told, "command": command, "started_at": "2030-01-01T00:00:00Z"}
        assert "hunter2" not in str(clean_info(REDACTOR, CommandInfo.model_validate(given)).command)
