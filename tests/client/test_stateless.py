"""`client.python` against a real server."""

from __future__ import annotations

import base64

import pytest

from carrel.client import AsyncClient, Client
from carrel.errors import NotFound


def test_run(client: Client) -> None:
    done = client.python.run("open('b', 'w').write(open('a').read() * 2); print(1)", files={"a": b"x"})
    assert (done.output, done.exit_code, done.files_produced) == ("1\n", 0, ["b"])
    assert base64.b64decode(done.files["b"]) == b"xx"
    assert client.python.run("while True: pass", timeout=0.2).timed_out
    with pytest.raises(NotFound):
        client.python.run("1", env="no-such-environment")


async def test_asynchronously(async_client: AsyncClient) -> None:
    assert (await async_client.python.run("print(3)")).output == "3\n"
