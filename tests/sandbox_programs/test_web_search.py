from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from carrel.sandbox_programs import web_search

ANSWER = (
    b'{"web": {"results": [{"title": "<b>Krill</b>", "url": "https://a.example/", "description": "small &amp; many"}]}}'
)


@pytest.fixture
def engine() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            page = self.path.startswith("/page")
            found = b"<html><script>no()</script><p>One</p><p>Two</p></html>" if page else ANSWER
            self.send_response(403 if self.path == "/refused" else 200)
            self.send_header("Content-Type", "text/html" if page else "application/json")
            self.send_header("Content-Length", str(len(found)))
            self.end_headers()
            self.wfile.write(found)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def search(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], **({"WEB_SEARCH_URL": url} if url else {})}
    program = [sys.executable, "-I", web_search.__file__, *words]
    return subprocess.run(program, capture_output=True, text=True, check=False, env=env)


def test_results_and_pages_are_text(engine: tuple[str, list[str]]) -> None:
    url, asked = engine
    done = search(f"{url}/search?q={{query}}&format=json", "krill", "& whales")
    assert done.stdout == "1. Krill\n   https://a.example/\n   small & many\n"
    assert asked == ["/search?q=krill%20%26%20whales&format=json"]
    assert search("", "--page", f"{url}/page").stdout == "One\nTwo\n"


def test_failures_are_told(engine: tuple[str, list[str]]) -> None:
    url, _ = engine
    assert "CARREL_SEARCH_URL" in search("", "krill").stderr
    refused = search("", "--page", f"{url}/refused")
    assert (refused.returncode, "403" in refused.stderr) == (2, True)
    assert "not a URL" in search("", "--page", "file:///etc/passwd").stderr
    assert search(f"{url}/{{query}}", "x", "-n", "0").returncode == 1
