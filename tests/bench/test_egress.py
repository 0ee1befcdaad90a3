from __future__ import annotations

import pytest
from bench.measure import BenchFailed
from bench.tunnels import connect_head, expect, small_request

from bench import egress


def test_an_answer_is_awaited_to_its_end_and_must_be_a_success() -> None:
    assert expect(b"", b"HTTP/1.1 2", b"end") == b"HTTP/1.1 2"
    assert expect(b"HTTP/1.1 2", b"00 OK\r\n\r\nend", b"end") is None
    for kept, data in ((b"", b"HTTP/1.1 403 No"), (b"HTTP/1.1 2", b"")):
        with pytest.raises(BenchFailed):
            expect(kept, data, b"end")


def test_requests_name_their_host() -> None:
    assert connect_head("127.0.0.1", 80).startswith(b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: 127.0.0.1:80\r\n")
    assert b"\r\nhost: 127.0.0.1:80\r\n" in small_request("127.0.0.1", 80)


async def test_a_little_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LARGE": 4 << 20, "TRANSFERS": 1, "CONNECTS": 3, "IDLE": 5, "RATE": 50, "LOAD_S": 0.2}.items():
        monkeypatch.setattr(egress, name, value)
    report = await egress.run(lambda done, total: None)
    assert report.figures["egress_throughput_vs_squid"] > 0
    assert report.figures["egress_p99_ms"] > 0
    assert {"egress_connect_vs_squid", "egress_requests_per_s"} <= report.figures.keys()
