from __future__ import annotations

import socket
import threading
import uuid
from pathlib import Path

import pytest
from tests.support.ports import nobody

from carrel.client import AsyncClient, Client
from carrel.errors import (
    ApprovalNeeded,
    CarrelError,
    Denied,
    InvalidRequest,
    NotFound,
    ServerUnreachable,
    Unauthorized,
)
from carrel.models import State


def name() -> str:
    return f"test-{uuid.uuid4().hex}"


def test_a_context_keeps_its_sandbox_and_an_ephemeral_one_ends_with_its_block(client: Client) -> None:
    context = name()
    box = client.sandbox(context)
    try:
        with client.sandbox(context) as again:
            assert again.id == box.id
            assert not again.ephemeral
        assert box.info().state is State.RUNNING
        with client.sandbox() as passing:
            assert passing.ephemeral
            assert passing.context_id is None
        with pytest.raises(NotFound):
            client.find(passing.id)
    finally:
        assert box.terminate(reason="end of the test").state is State.TERMINATED
    with pytest.raises(NotFound):
        client.find(context)
    assert list(client.sandboxes(context_id=context)) == []
    [ended] = client.sandboxes(state="terminated", context_id=context)
    assert (ended.id, ended.state) == (box.id, State.TERMINATED)
    assert all(info.state is State.RUNNING for info in client.sandboxes(state=State.RUNNING))


def test_an_error_inside_the_block_is_the_one_that_is_seen(client: Client) -> None:
    with pytest.raises(ZeroDivisionError), client.sandbox() as box:
        box.terminate()
        raise ZeroDivisionError


def test_every_page_is_walked(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carrel.client._sync.connection.PAGE", 2)
    boxes = [client.sandbox() for _ in range(5)]
    try:
        listed = [info.id for info in client.sandboxes()]
        assert {box.id for box in boxes} <= set(listed)
        assert len(listed) == len(set(listed))
    finally:
        for box in boxes:
            box.terminate()


def test_the_same_idempotency_key_makes_one_sandbox(client: Client) -> None:
    key = uuid.uuid4().hex
    with client.sandbox(idempotency_key=key) as one:
        assert client.sandbox(idempotency_key=key).id == one.id


def test_host_report(client: Client) -> None:
    report = client.host()
    assert "process" in {provider.name for provider in report.providers}


def test_unknown_provider_is_refused_with_its_field(client: Client) -> None:
    with pytest.raises(InvalidRequest) as raised:
        client.sandbox(provider="nowhere")
    assert raised.value.field == "provider"
    assert raised.value.hint


def test_a_wrong_token_is_unauthorized(address: str) -> None:
    with Client(address, "carrel_wrong") as client, pytest.raises(Unauthorized):
        client.host()


def test_programs_on_the_servers_machine_work_as_an_agent(address: str, client: Client) -> None:
    context = f"agent-{uuid.uuid4().hex[:8]}"
    client.policy(context).put(settings={"permissions": {"allow": ["shell(echo:*)"]}})
    with Client() as agent:
        box = agent.sandbox(context)
        try:
            with pytest.raises(ApprovalNeeded) as asked:
                box.commands.run("uname -s")
            handle = asked.value.approval or ""
            assert agent.approvals.get(handle).requested_by == "agent:local"
            for refused in (
                lambda: agent.approvals.approve(handle),
                lambda: agent.policy(context).put(settings={}),
                lambda: agent.secrets(context).put("A", "value"),
                lambda: agent.tokens.create("more", kind="person", scopes=["approve"]),
            ):
                with pytest.raises(Denied) as denied:
                    refused()
                assert "Client(administrator=True)" in (denied.value.hint or "")
            client.approvals.approve(handle)
            assert box.with_approval(handle).commands.run("uname -s").stdout == "Linux\n"
        finally:
            box.terminate(delete_files=True)


def test_a_token_of_ones_own_gets_the_usual_hint(address: str, client: Client) -> None:
    made = client.tokens.create("reader", kind="agent", scopes=["read"])
    with Client(token=made.token) as reader, pytest.raises(Denied) as denied:
        reader.policy("any").put(settings={})
    assert "administrator=True" not in (denied.value.hint or "")
    client.tokens.revoke(made.id)


def test_the_local_token_is_not_sent_to_another_server(address: str) -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                heard.append(peer.recv(65536))
                peer.sendall(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with Client(f"http://127.0.0.1:{listener.getsockname()[1]}") as client, pytest.raises(CarrelError):
            client.host()
        thread.join()
    assert heard
    assert b"authorization" not in heard[0].lower()


def test_no_server_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CARREL_URL", raising=False)
    monkeypatch.setenv("CARREL_DATA_DIR", str(tmp_path))
    with pytest.raises(ServerUnreachable, match="carrel serve"):
        Client()
    refused = pytest.raises(ServerUnreachable, match="carrel serve")
    with nobody() as port, Client(f"http://127.0.0.1:{port}") as client, refused:
        client.host()


async def test_no_server_async(monkeypatch: pytest.MonkeyPatch) -> None:
    with nobody() as port:
        async with AsyncClient(f"http://127.0.0.1:{port}", "t") as client:
            with pytest.raises(ServerUnreachable):
                await client.sandbox()


async def test_async_client_does_the_same(async_client: AsyncClient) -> None:
    async with await async_client.sandbox(labels={"purpose": "test"}) as box:
        assert box.id in [info.id async for info in async_client.sandboxes()]
        assert (await async_client.find(box.id)).id == box.id
        assert (await box.health()).status == "ok"
    with pytest.raises(NotFound):
        await async_client.find(box.id)
