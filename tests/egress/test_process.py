from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from tests.support.fork_server import EGRESS, start
from tests.support.outside import Origin, serving
from tests.support.sandboxes import until

from carrel.egress.launch import certificates
from carrel.egress.plan import VERSION, EgressPlan
from carrel.policy.documents import settings
from carrel.policy.rules.layers import Layer
from carrel.primitives.channel import Channel, Message


class Control:
    """A control plane as the process knows one."""

    def __init__(self, path: str):
        self._path = path
        self._numbers = itertools.count(1)
        self.said: list[Message] = []
        self.gone = asyncio.Event()
        self.connect()

    def connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self._path)
        self.gone.clear()
        self.channel = Channel(connection, lambda message, _fds: self.said.append(message), self.gone.set)

    async def ask(self, op: str, *fds: int, **body: object) -> Message:
        number = next(self._numbers)
        self.channel.send({"op": op, "seq": number, **body}, fds)
        return await until(lambda: next((m for m in self.said if m.get("seq") == number), None), what=op)  # type: ignore[no-any-return]

    def told(self, op: str) -> list[Message]:
        return [message for message in self.said if message["op"] == op]

    def items(self) -> list[dict[str, object]]:
        return [item for message in self.told("log") for item in message["items"]]


@pytest.fixture
async def control(tmp_path: Path, planes_fork: None) -> AsyncIterator[Control]:
    path = str(tmp_path / "c.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        words = [
            "--listen-fd",
            str(listener.fileno()),
            "--cache",
            str(tmp_path / "cache"),
            "--state",
            str(tmp_path / "state"),
        ]
        process = start(
            [sys.executable, "-m", "carrel.egress", *words],
            program=EGRESS,
            env=os.environ,
            stdout=sys.__stdout__,
            stderr=sys.__stderr__,
            pass_fds=[listener.fileno()],
        )
    control = Control(path)
    try:
        yield control
        control.channel.close()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0
    finally:
        process.kill()
        process.wait()


def plan(name: str, *allowed: str) -> EgressPlan:
    rules = ", ".join(f'"{each}"' for each in allowed)
    given = settings.load(f'{{"permissions": {{"allow": [{rules}]}}}}')
    return EgressPlan(name, None, (Layer("settings.json", given),))


@asynccontextmanager
async def attached(control: Control, given: EgressPlan) -> AsyncIterator[httpx.AsyncClient]:
    """A sandbox's way out: a socket on loopback stands for the one in its namespace."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        file = given.to_memory_file()
        assert (await control.ask("attach", file, listener.fileno()))["op"] == "done"
        os.close(file)
        port = listener.getsockname()[1]
        async with httpx.AsyncClient(proxy=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as client:
            yield client


async def test_a_sandbox_is_let_out_told_of_and_taken_away(control: Control) -> None:
    async with (
        serving() as origin,
        attached(control, plan("a", f"network(outbound:127.0.0.2:{origin.port})")) as client,
    ):
        described = await control.ask("describe")
        assert (described["version"], described["sandboxes"]) == (VERSION, ["a"])
        assert (await client.get(origin.url)).text == "hello\n"
        await until(lambda: any(item["ended"] for item in control.items()), what="the log")
        assert {item["sandbox"] for item in control.items()} == {"a"}
        await control.ask("detach", sandbox="a")
        await control.ask("detach", sandbox="a")
        assert (await control.ask("describe"))["sandboxes"] == []


async def test_plans_change(control: Control) -> None:
    async with serving() as origin, attached(control, plan("a", "network(outbound:192.0.2.1)")) as client:
        assert (await client.get(origin.url)).status_code == 403
        file = plan("a", f"network(outbound:127.0.0.2:{origin.port})").to_memory_file()
        await control.ask("change", file)
        assert (await client.get(origin.url)).text == "hello\n"
        stranger = plan("b").to_memory_file()
        assert (await control.ask("change", stranger))["op"] == "failed"
        os.close(stranger)
        assert (await control.ask("attach", file))["op"] == "done"  # one that is known only gets its plan
        os.close(file)


async def test_what_it_does_not_understand_harms_nobody(control: Control) -> None:
    assert (await control.ask("dance"))["op"] == "failed"
    assert (await control.ask("attach"))["op"] == "failed"
    garbage = os.memfd_create("garbage")
    os.write(garbage, b"{}")
    assert (await control.ask("attach", garbage))["op"] == "failed"
    os.close(garbage)
    assert (await control.ask("describe"))["sandboxes"] == []


async def test_questions_are_passed_on_and_answers_taken(control: Control) -> None:
    async with attached(control, plan("a", "network(outbound:192.0.2.1)")) as client:
        asking = asyncio.create_task(client.get("http://unknown.invalid/"))
        [question] = await until(lambda: control.told("ask"), what="a question")
        assert (question["sandbox"], question["host"], question["port"]) == ("a", "unknown.invalid", 80)
        said = {"verdict": "deny", "reason": "not today", "approval": "apr-1"}
        control.channel.send({"op": "answer", "ask": question["ask"], "verdict": said})
        answer = (await asking).json()
        assert (answer["reason"], answer["approval"]) == ("not today", "apr-1")


async def test_an_answer_that_comes_too_late_for_a_killed_process_is_none_to_the_next(control: Control) -> None:
    """A person who allowed one host has not allowed another because its question has the same number."""
    async with attached(control, plan("a")) as client:
        asking = asyncio.create_task(client.get("http://one.invalid/"))
        [earlier] = await until(lambda: control.told("ask"), what="a question")
        os.kill((await control.ask("describe"))["pid"], signal.SIGKILL)
        await control.gone.wait()
        with pytest.raises(httpx.HTTPError):
            await asking
    control.said.clear()
    control.connect()
    async with attached(control, plan("b")) as client:
        asking = asyncio.create_task(client.get("http://two.invalid/"))
        [question] = await until(lambda: control.told("ask"), what="a question")
        control.channel.send({"op": "answer", "ask": earlier["ask"], "verdict": {"verdict": "allow"}})
        said = {"verdict": "deny", "reason": "not that one"}
        control.channel.send({"op": "answer", "ask": question["ask"], "verdict": said})
        assert (await asking).json()["reason"] == "not that one"


async def test_who_asked_is_told_when_the_first_of_two_control_planes_leaves(control: Control) -> None:
    async with attached(control, plan("a")) as client:
        asking = asyncio.create_task(client.get("http://unknown.invalid/"))
        await until(lambda: control.told("ask"), what="a question")
        first = control.channel
        control.connect()
        await control.ask("describe")
        assert not asking.done(), "the first can still answer"
        first.close()
        assert "nobody can be asked" in (await asking).json()["reason"]


async def test_it_goes_on_without_a_control_plane_and_tells_the_next(control: Control) -> None:
    origin: Origin
    async with (
        serving() as origin,
        attached(control, plan("a", f"network(outbound:127.0.0.2:{origin.port})")) as client,
    ):
        asking = asyncio.create_task(client.get("http://unknown.invalid/"))
        await until(lambda: control.told("ask"), what="a question")
        control.channel.close()
        assert "nobody can be asked" in (await asking).json()["reason"]
        for number in range(5):
            assert (await client.get(f"{origin.url}/{number}")).text == "hello\n"
        control.said.clear()
        control.connect()
        paths = await until(lambda: [i["path"] for i in control.items() if i["ended"]][-5:] or None, what="the log")
        assert paths == [f"/{number}" for number in range(5)]
        control.channel.send({"op": "ack", "upto": max(message["upto"] for message in control.told("log"))})
        await control.ask("describe")
        control.channel.close()
        control.said.clear()
        control.connect()
        await control.ask("describe")
        assert control.items() == []


@pytest.mark.parametrize("left", [False, True], ids=["with a control plane", "without one"])
async def test_it_drains(control: Control, left: bool) -> None:
    origin = Origin(hold=asyncio.Event())
    async with serving(origin), attached(control, plan("a", "network(outbound:127.0.0.0/8)")) as client:
        file = plan("a", f"network(outbound:127.0.0.2:{origin.port})").to_memory_file()
        await control.ask("change", file)
        os.close(file)
        running = asyncio.create_task(client.get(origin.url))
        await until(lambda: origin.requests, what="a request")
        asking = asyncio.create_task(client.get("http://unknown.invalid/"))
        await until(lambda: control.told("ask"), what="a question")
        await control.ask("drain", seconds=20)
        if left:
            control.channel.close()
        else:
            said = {"verdict": "deny", "reason": "nobody can be asked"}
            control.channel.send({"op": "answer", "ask": control.told("ask")[0]["ask"], "verdict": said})
        assert "nobody can be asked" in (await asking).json()["reason"]
        if left:
            control.connect()
            await control.ask("describe")
        assert origin.hold is not None
        origin.hold.set()
        assert (await running).text == "hello\n"
        await client.aclose()  # else its connections could be used again
        await control.gone.wait()


def test_certificates_of_the_host_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text(f"[global]\ncert = {tmp_path}/a.pem\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.delenv("PIP_CERT", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", f"{tmp_path}/b.pem")
    assert {f"{tmp_path}/a.pem", f"{tmp_path}/b.pem"} <= set(certificates())
