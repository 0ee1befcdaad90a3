from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.control.governance.webhooks import SIGNATURE, Webhook, genuine, sign
from carrel.errors import InvalidRequest
from carrel.models import ApprovalInfo, ApprovalState

NOW = datetime.now(UTC)
INFO = ApprovalInfo(
    id="apr-1", context_id="c", sandbox_id="sbx-1", kind="shell", operation="run_command", summary="git push",
    arguments={}, reason="no rule", requested_by="agent:a", created_at=NOW, expires_at=NOW, state=ApprovalState.PENDING,
)  # fmt: skip


class Receiver(BaseHTTPRequestHandler):
    answers: ClassVar[list[int]] = []
    heard: ClassVar[list[tuple[bytes, str]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.heard.append((body, self.headers[SIGNATURE]))
        self.send_response(self.answers.pop(0) if self.answers else 204)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    Receiver.answers, Receiver.heard = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook"
    server.shutdown()
    thread.join()
    server.server_close()


async def _until(heard: int) -> None:
    async with asyncio.timeout(20):
        while len(Receiver.heard) < heard:
            await asyncio.sleep(0.01)


async def test_it_is_told_signed_and_again_when_it_fails(url: str) -> None:
    Receiver.answers = [500, 503]
    hook = Webhook(url, b"key", pause_s=0.01)
    hook.start()
    hook.send(INFO)
    await _until(3)
    hook.send(INFO.model_copy(update={"id": "apr-2"}))
    await _until(4)
    await hook.close()
    body, signature = Receiver.heard[2]
    assert json.loads(body)["approval"]["id"] == "apr-1"
    assert genuine(b"key", body, signature, time.time())
    assert not genuine(b"other", body, signature, time.time())
    assert not genuine(b"key", body + b" ", signature, time.time())
    assert not genuine(b"key", body, signature, time.time() + 3600)


async def test_one_that_never_answers_keeps_nobody_waiting(url: str, caplog: pytest.LogCaptureFixture) -> None:
    Receiver.answers = [500] * 5
    hook = Webhook(url, b"key", pause_s=0.001)
    hook.start()
    hook.send(INFO)
    hook.send(INFO.model_copy(update={"id": "apr-2"}))
    await _until(6)
    assert json.loads(Receiver.heard[5][0])["approval"]["id"] == "apr-2"
    assert "apr-1" in caplog.text and "status 500" in caplog.text
    await hook.close()


@given(st.binary(max_size=64), st.text(max_size=40))
def test_nonsense_is_not_genuine(body: bytes, signature: str) -> None:
    assert not genuine(b"key", body, signature, 1000.0)
    assert genuine(b"key", body, sign(b"key", body, 1000), 1000.0)


@pytest.mark.parametrize(("url_text", "secret"), [("ftp://x", b"k"), ("nothing", b"k"), ("http://x", b"")])
def test_what_cannot_be_a_webhook(url_text: str, secret: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Webhook(url_text, secret)
