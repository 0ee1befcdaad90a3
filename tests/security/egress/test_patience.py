"""Attempts to wear the proxy out: slowly, by many, by breaking off. Others are served meanwhile, and so is who tried."""

# ruff: noqa: F821 — what an attempt calls is of `within`, beside which it runs

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest


def held(opening, count, host, first):
    """Begin many things and finish none, until the one request is answered that is whole."""
    kept = dial()
    kept.sendall(bytes_of(first))
    many = []
    for _ in range(count):
        one = dial()
        many.append(one)
        one.sendall(bytes_of(opening))
    kept.sendall(bytes_of(f"Host: {host}\r\nConnection: close\r\n\r\n"))
    answer = rest_of(kept).decode("latin-1")
    for one in many:
        one.close()
    return answer


OPENINGS = {
    "heads": ("GET http://allowed.test:{http}/smuggled HTTP/1.1\r\n", 200),
    "more-heads-than-are-heard": ("G", 500),
    "greetings": ("\x05", 200),
    "orders": ("\x05\x01\x00\x05\x01", 200),
    "tunnels-without-a-word": ("CONNECT allowed.test:{tls} HTTP/1.1\r\n\r\n", 200),
    "tunnels-with-half-a-hello": ("CONNECT allowed.test:{tls} HTTP/1.1\r\n\r\n\x16\x03\x01\x02\0\x01", 200),
    "bodies": ("POST http://allowed.test:{http}/smuggled HTTP/1.1\r\nHost: allowed.test:{http}\r\nContent-Length: 9999\r\n\r\nx", 100),
    "chunks": ("POST http://allowed.test:{http}/smuggled HTTP/1.1\r\nHost: allowed.test:{http}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe", 100),
}  # fmt: skip


def wait_for(far, mark, target, running):
    """Until a request has come, and no longer than somebody is there who will make it."""
    deadline = time.monotonic() + 30
    while not any(one.target == target for visit in far.since(mark) for one in visit.requests):
        assert time.monotonic() < deadline, f"{target} was not asked for"
        assert running()
        time.sleep(0.01)


def control():
    """Nothing: what is asked for afterwards is what counts."""
    return "done"


@pytest.mark.parametrize("attempt", OPENINGS)
def test_beginning_much_and_finishing_nothing(evader, neighbour, far, attempt):
    """While all of it is open, the neighbour is served, and a request of the evader's own that came before."""
    text, count = OPENINGS[attempt]
    text = text.replace("{http}", str(far.http)).replace("{tls}", str(far.tls))
    host = f"allowed.test:{far.http}"
    mark, outcome = far.mark(), []
    given = {"opening": text, "count": count, "host": host, "first": f"GET http://{host}/held HTTP/1.1\r\n"}
    running = threading.Thread(target=lambda: outcome.append(evader.run(held, **given)))
    running.start()
    try:
        wait_for(far, mark, "/held", running.is_alive)
        assert neighbour.run(control) == "done"
    finally:
        far.release()
        running.join()
    assert "welcome to /held" in outcome[0]
    assert not [one for visit in far.since(mark) for one in visit.requests if "smuggled" in one.target]


def test_breaking_off(evader, far):
    """Hundreds of connections that are reset in the middle of everything."""

    def attack(texts):
        import struct

        for text in texts * 50:
            for size in (1, len(text) // 2, len(text)):
                with dial() as one:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    one.sendall(bytes_of(text[:size]))
        return "done"

    texts = [
        opening.replace("{http}", str(far.http)).replace("{tls}", str(far.tls)) for opening, _ in OPENINGS.values()
    ]
    assert evader.run(attack, texts=texts[:1] + texts[3:6]) == "done"


def test_more_connections_than_are_allowed(evader, far):
    """Tunnels beyond the limit are refused with words, and those that are open stay open."""

    def attack(where):
        opened = [connect(where) for _ in range(300)]
        refused = [answer for one, answer in opened if one is None]
        for one, _ in opened:
            if one is not None:
                one.close()
        # The proxy notices one by one that they were closed: one that can be opened does not mean that all are.
        ends = time.monotonic() + PATIENCE_S
        while any(one is None for one, _ in [connect(where) for _ in range(64)]) and time.monotonic() < ends:
            time.sleep(0.01)
        return [len(refused), refused[0][:13], "limit_exceeded" in refused[0]]

    outcome = evader.attempt(attack, where=f"opaque.test:{far.http}")
    assert outcome.evidence == [300 - 256, "HTTP/1.1 429 ", True]
    results = [record.result for record in outcome.refusals]
    assert len(results) >= 44
    assert set(results) == {"limit_exceeded"}


def dribbled(host):
    """Send heads and greetings that never end, a byte now and then, and count how many are ended by the proxy."""
    import select

    heads = {dial(): b"GET http://allowed.test/ HTTP/1.1\r\nX: " + b"x" * 1000 for _ in range(5)}
    heads |= {dial(): b"\x05\xff" + b"\x01" * 200 for _ in range(5)}
    say(f"GET http://{host}/dribbling HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
    ends = time.monotonic() + 40
    ended = 0
    while heads and time.monotonic() < ends:
        for one in select.select(list(heads), [], [], 0.2)[0]:
            heads.pop(one)
            one.close()
            ended += 1
        for one, text in heads.items():
            try:
                one.send(text[:1])
            except OSError:
                pass
            heads[one] = text[1:]
    return ended


@pytest.fixture(scope="module", autouse=True)
def slow(evader, neighbour, far):
    """Takes as long as the proxy is patient, so it runs beside the other tests."""
    mark = far.mark()
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(neighbour.run, dribbled, host=f"allowed.test:{far.http}")
        wait_for(far, mark, "/dribbling", lambda: not running.done())
        # The connections to the server that two tests at once will need are opened here, and kept.
        for each in [pool.submit(one.run, control) for one in (evader, neighbour)]:
            each.result()
        yield running


def test_heads_that_never_end(slow):
    """Who sends a byte now and then is ended all the same: it is the whole head that must come in time."""
    assert slow.result(60) == 10
