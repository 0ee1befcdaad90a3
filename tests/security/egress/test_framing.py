"""Attempts to hide a request behind another: two readings of where a body ends, or of where a line does.

The hidden request is for `/smuggled`. What arrives is read by a server that minds everything that is not plain.
"""

# ruff: noqa: F821 — what an attempt calls is of `within`, beside which it runs

import pytest
from tests.security.egress.test_requests import filled

HIDDEN = "GET http://forbidden.test:{http}/smuggled HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n"
BEHIND = "GET /smuggled HTTP/1.1\r\nHost: forbidden.test\r\n\r\n"


def post(headers, body=""):
    return "POST http://allowed.test:{http}/control HTTP/1.1\r\nHost: allowed.test:{http}\r\n" + headers + "\r\n" + body


CHUNKED = "Transfer-Encoding: chunked\r\n"
REFUSED = {
    "length-and-chunks": post(f"Content-Length: 5\r\n{CHUNKED}", "0\r\n\r\n" + BEHIND),
    "chunks-and-length": post(f"{CHUNKED}Content-Length: 60\r\n", "0\r\n\r\n" + BEHIND),
    "length-0-and-chunks": post(f"Content-Length: 0\r\n{CHUNKED}", "5\r\nhello\r\n0\r\n\r\n" + BEHIND),
    "chunks-twice": post(CHUNKED * 2, "0\r\n\r\n" + BEHIND),
    "chunks-and-identity": post(f"{CHUNKED}Transfer-Encoding: identity\r\n", "0\r\n\r\n" + BEHIND),
    "identity": post("Transfer-Encoding: identity\r\nContent-Length: 5\r\n", "hello" + BEHIND),
    "chunks-in-a-list": post("Transfer-Encoding: identity, chunked\r\n", "0\r\n\r\n" + BEHIND),
    "chunks-not-last": post("Transfer-Encoding: chunked, gzip\r\n", "0\r\n\r\n" + BEHIND),
    "chunks-misspelt": post("Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n", "hello" + BEHIND),
    "chunks-in-quotes": post('Transfer-Encoding: "chunked"\r\n', "0\r\n\r\n" + BEHIND),
    "chunks-after-a-vertical-tab": post("Transfer-Encoding: \x0bchunked\r\nContent-Length: 5\r\n", "hello" + BEHIND),
    "chunks-before-a-nul": post("Transfer-Encoding: chunked\0\r\nContent-Length: 5\r\n", "hello" + BEHIND),
    "chunks-with-space-before-the-colon": post("Transfer-Encoding : chunked\r\nContent-Length: 5\r\n", "hello" + BEHIND),
    "chunks-after-a-fold": post("Transfer-Encoding:\r\n chunked\r\n", "0\r\n\r\n" + BEHIND),
    "chunks-hidden-in-a-header": post("X: y\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n", "hello" + BEHIND),
    "chunks-in-http-1.0": post(CHUNKED, "0\r\n\r\n" + BEHIND).replace("HTTP/1.1", "HTTP/1.0", 1),
    "two-lengths": post("Content-Length: 5\r\nContent-Length: 60\r\n", "hello" + BEHIND),
    "the-same-length-twice": post("Content-Length: 5\r\nContent-Length: 5\r\n", "hello" + BEHIND),
    "length-as-a-list": post("Content-Length: 5, 60\r\n", "hello" + BEHIND),
    "length-with-a-plus": post("Content-Length: +5\r\n", "hello" + BEHIND),
    "length-below-zero": post("Content-Length: -5\r\n", "hello" + BEHIND),
    "length-in-hexadecimal": post("Content-Length: 0x5\r\n", "hello" + BEHIND),
    "length-that-overflows": post(f"Content-Length: {2**64 + 5}\r\n", "hello" + BEHIND),
    "length-with-a-space": post("Content-Length: 5 0\r\n", "hello" + BEHIND),
    "length-after-a-fold": post("Content-Length:\r\n 5\r\n", "hello" + BEHIND),
    "empty-length": post("Content-Length:\r\n", BEHIND),
}  # fmt: skip


def spoken(text):
    """Say it, all at once."""
    return say(text)


@pytest.fixture(scope="module")
def made(evader, far):
    """The three series of this family."""
    return [
        evader.series(spoken, {name: {"text": filled(text, far)} for name, text in texts.items()})
        for texts in (REFUSED, BROKEN, CLEANED)
    ]


@pytest.mark.parametrize("attempt", REFUSED)
def test_unclear_ends(made, attempt):
    """Not even the first request arrives where it is not clear where it ends."""
    outcome = made[0].judged(attempt)
    assert outcome.evidence.startswith("HTTP/1.1 4"), outcome.evidence
    assert outcome.evidence.count("HTTP/1.1 ") == 1


BROKEN = {
    "chunk-size-with-a-line-feed": post(CHUNKED, "5\nhello\r\n0\r\n\r\n" + BEHIND),
    "chunk-size-with-a-plus": post(CHUNKED, "+5\r\nhello\r\n0\r\n\r\n" + BEHIND),
    "chunk-size-below-zero": post(CHUNKED, "-1\r\nhello\r\n0\r\n\r\n" + BEHIND),
    "chunk-size-with-0x": post(CHUNKED, "0x5\r\nhello\r\n0\r\n\r\n" + BEHIND),
    "chunk-size-that-overflows": post(CHUNKED, "10000000000000005\r\nhello\r\n0\r\n\r\n" + BEHIND),
    "chunk-size-with-an-underscore": post(CHUNKED, "0_5\r\nhello\r\n0\r\n\r\n" + BEHIND),
    "chunk-longer-than-said": post(CHUNKED, "3\r\nhello\r\n0\r\n\r\n" + BEHIND),
    "chunk-ended-by-a-line-feed": post(CHUNKED, "5\r\nhello\n0\r\n\r\n" + BEHIND),
    "chunk-without-an-end": post(CHUNKED, "5\r\nhello0\r\n\r\n" + BEHIND),
    "line-feed-in-an-extension": post(CHUNKED, "5;x\nhello\r\n0\r\n\r\n" + BEHIND),
    "carriage-return-in-an-extension": post(CHUNKED, "5;x\rhello\r\n0\r\n\r\n" + BEHIND),
    "extensions-of-a-megabyte": post(CHUNKED, ("1;" + "x" * 1000 + "\r\na\r\n") * 1000 + "0\r\n\r\n" + BEHIND),
    "trailer-that-is-a-request": post(CHUNKED, "0\r\n" + BEHIND),
    "trailer-with-a-line-feed": post(CHUNKED, "0\r\nX: y\nHost: forbidden.test\r\n\r\n" + BEHIND),
}  # fmt: skip


@pytest.mark.parametrize("attempt", BROKEN)
def test_broken_chunks(made, attempt):
    """The head has been sent on by then; the body is never finished, and nothing comes after it."""
    outcome = made[1].judged(attempt, passes=True)
    assert outcome.targets == []
    assert not any(b"smuggled" in visit.raw for visit in outcome.visits)
    assert "HTTP/1.1 200" not in outcome.evidence


CLEANED = {
    "request-in-the-body": post(f"Content-Length: {len(BEHIND)}\r\n", BEHIND),
    "request-in-a-chunk": post(CHUNKED, f"{len(BEHIND):x}\r\n{BEHIND}\r\n0\r\n\r\n"),
    "extension": post(CHUNKED, '5;a=b;c="smuggled"\r\nhello\r\n0;x\r\n\r\n'),
    "trailers": post(CHUNKED, "5\r\nhello\r\n0\r\nHost: forbidden.test\r\nContent-Length: 60\r\n\r\n"),
    "size-with-zeros": post(CHUNKED, "00005\r\nhello\r\n000\r\n\r\n"),
    "upper-case": post("TRANSFER-ENCODING: Chunked\r\n", "5\r\nhello\r\n0\r\n\r\n"),
    "body-of-a-get": post(f"Content-Length: {len(BEHIND)}\r\n", BEHIND).replace("POST", "GET", 1),
    "connection-names-the-length": post(f"Connection: close, Content-Length\r\nContent-Length: {len(BEHIND)}\r\n", BEHIND),
    "connection-names-the-chunks": post(f"Connection: close, Transfer-Encoding\r\n{CHUNKED}", "5\r\nhello\r\n0\r\n\r\n"),
    "upgrade-with-a-body": post(f"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: {len(BEHIND)}\r\n", BEHIND),
}  # fmt: skip


@pytest.mark.parametrize("attempt", CLEANED)
def test_bodies_stay_bodies(made, attempt):
    """One request arrives, with its body, and nothing of how it was sent. The control of this family."""
    outcome = made[2].judged(attempt, passes=True)
    (visit,) = outcome.visits
    (request,) = visit.requests
    assert request.body in {BEHIND.encode(), b"hello"}
    assert b"forbidden" not in bytes(visit.raw).partition(b"\r\n\r\n")[0]
    assert outcome.evidence.count("HTTP/1.1 200 ") == 1


def test_refusals_are_in_the_log(made):
    """Each once."""
    assert [len(series.refusals) for series in made] == [len(REFUSED), len(BROKEN), 0]


@pytest.mark.parametrize("first", ["GET", "POST", "HEAD"])
def test_second_request_of_a_connection(evader, far, first):
    """Each request is decided by itself: the first is allowed, the one behind it is not."""
    request = filled(post("Content-Length: 0\r\n").replace("POST", first, 1), far)
    outcome = evader.attempt(spoken, text=request + filled(HIDDEN, far), passes=True)
    assert outcome.targets == ["/control"]
    (record,) = outcome.refusals
    assert record.arguments["host"] == "forbidden.test"
    assert "HTTP/1.1 403 " in outcome.evidence


def test_third_request_after_a_pause(evader, far):
    """The connection to the allowed server is kept; it is not used for another host's request."""

    def attack(one, two):
        with dial() as connection:
            found = b""
            for text in (one, one, two):
                connection.sendall(text.encode())
                found += head_of(connection) if text is not two else b""
                if text is not two:
                    connection.recv(len("welcome to /control"))
            send(connection, [])
            return (found + rest_of(connection)).decode("latin-1")

    one = filled("GET http://allowed.test:{http}/control HTTP/1.1\r\nHost: allowed.test:{http}\r\n\r\n", far)
    outcome = evader.attempt(attack, one=one, two=filled(HIDDEN, far), passes=True)
    assert outcome.targets == ["/control"] * 2
    assert len(outcome.visits) == 1
    assert "HTTP/1.1 403 " in outcome.evidence


def test_body_that_waits_for_leave(evader, far):
    """A request that asks first whether its body is wanted, and sends another request in its place."""
    request = filled(post(f"Expect: 100-continue\r\nContent-Length: {len(BEHIND)}\r\n", BEHIND + HIDDEN), far)
    outcome = evader.attempt(spoken, text=request, passes=True)
    assert outcome.targets == ["/control"]
    assert [record.arguments["host"] for record in outcome.refusals] == ["forbidden.test"]


@pytest.mark.parametrize("expectation", ["100-continue, smuggled", "200-ok"])
def test_odd_expectations(evader, far, expectation):
    outcome = evader.attempt(spoken, text=filled(post(f"Expect: {expectation}\r\nContent-Length: 0\r\n"), far))
    assert outcome.evidence.startswith("HTTP/1.1 417 ")


@pytest.mark.parametrize("at", [1, 20, 70])
def test_urgent_byte(evader, far, at):
    """A byte in the middle of a head that one reader sees and another does not."""

    def attack(text, at):
        with dial() as one:
            one.sendall(text[:at].encode())
            one.send(b"x", socket.MSG_OOB)
            send(one, [text[at:]])
            return rest_of(one).decode("latin-1")

    text = filled("GET http://forbidden.test:{http}/smuggled HTTP/1.1\r\nHost: forbidden.test:{http}\r\n\r\n", far)
    evader.attempt(attack, text=text, at=at, decided=False)
