"""Push notifications: who is told, and where they may lead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from a2a.server.context import ServerCallContext
from a2a.types.a2a_pb2 import (
    AuthenticationInfo,
    DeleteTaskPushNotificationConfigRequest,
    ListTaskPushNotificationConfigsRequest,
    Task,
    TaskPushNotificationConfig,
)
from a2a.utils.errors import A2AError
from starlette.requests import Request
from starlette.responses import Response
from tests.support.a2a_ground import Ground, said, until

from carrel.errors import Denied, InvalidRequest, LimitExceeded
from carrel.integrations.a2a.background import Background
from carrel.integrations.a2a.callers import A2aCaller
from carrel.integrations.a2a.push import MOST_CONFIGS, TRIES, Destinations, Push, is_public
from carrel.integrations.a2a.tasks import open_tasks


class Receiver:
    """Keeps what it is told; its first answers may be refusals."""

    def __init__(self, refuses: int):
        self.refuses = refuses
        self.told: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body = json.loads(await request.body())
        if self.refuses:
            self.refuses -= 1
            await Response(status_code=503)(scope, receive, send)
            return
        self.told.append(body)
        self.headers.append(dict(request.headers))
        await Response(status_code=204)(scope, receive, send)

    def states(self) -> list[str]:
        found = [each.get("statusUpdate") or each.get("task") or {} for each in self.told]
        return [each["status"]["state"].removeprefix("TASK_STATE_").lower() for each in found if each]


@asynccontextmanager
async def receiver(*, refuses: int = 0) -> AsyncIterator[Receiver]:
    made = Receiver(refuses)
    server = uvicorn.Server(uvicorn.Config(made, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    [listener] = server.servers
    made.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/told?x=1"
    try:
        yield made
    finally:
        server.should_exit = True
        await serving


async def test_a_task_is_told_from_its_beginning_to_its_end(ground: Ground) -> None:
    async with receiver(refuses=1) as other, ground.talk(push_hosts=("127.0.0.1",)) as one:
        config = TaskPushNotificationConfig(
            url=other.url, token="shared", authentication=AuthenticationInfo(scheme="Bearer", credentials="abc")
        )
        await one.events(said("echo hello", context=ground.context), task_push_notification_config=config)

        async def ended() -> bool:
            return "completed" in other.states()

        await until(ended)
        assert other.states()[0] == "working"
        assert other.states()[-1] == "completed"
        assert [
            each["artifactUpdate"]["artifact"]["parts"][0]["text"] for each in other.told if "artifactUpdate" in each
        ] == ["hello"]
        assert {each["x-a2a-notification-token"] for each in other.headers} == {"shared"}
        assert {each["authorization"] for each in other.headers} == {"Bearer abc"}
        assert ground.token not in json.dumps(other.headers)


async def test_a_task_that_waits_tells_it_and_that_it_goes_on(ground: Ground) -> None:
    async with receiver() as other, ground.talk(push_hosts=("127.0.0.1",)) as one:
        task = await one.send("uname -s", context=ground.context)
        made = await one.client.create_task_push_notification_config(
            TaskPushNotificationConfig(task_id=task.id, id="mine", url=other.url)
        )
        assert (made.id, made.url) == ("mine", other.url)
        await ground.person.approvals.approve(await ground.pending())

        async def ended() -> bool:
            return "completed" in other.states()

        await until(ended)
        assert other.states()[0] == "working"
        listed = await one.client.list_task_push_notification_configs(
            ListTaskPushNotificationConfigsRequest(task_id=task.id)
        )
        assert [each.id for each in listed.configs] == ["mine"]
        await one.client.delete_task_push_notification_config(
            DeleteTaskPushNotificationConfigRequest(task_id=task.id, id="mine")
        )


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def test_a_slow_receiver_keeps_no_task_waiting(ground: Ground) -> None:
    came, left = 0, 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came, left
        came += 1
        with suppress(ConnectionError):
            await reader.read()
        await closed(writer)
        left += 1

    async def all_left() -> bool:
        return left == came

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
    async with ground.talk(push_hosts=("127.0.0.1",)) as one:
        config = TaskPushNotificationConfig(url=url)
        async with asyncio.timeout(9):  # one try alone takes longer
            [event] = await one.events(said("true", context=ground.context), task_push_notification_config=config)
        assert event.task.artifacts
    await until(all_left)
    listener.close()


async def test_a_receiver_that_never_comes_to_an_end_is_given_up(tmp_path: Path) -> None:
    """It sends a byte now and then, so that no single read takes too long."""
    calls, left = 0, 0
    ended = asyncio.Event()

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls, left
        calls += 1
        with suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\nx: ")
            while not reader.at_eof() and not ended.is_set():
                writer.write(b"y")
                await writer.drain()
                await asyncio.sleep(0.02)
        await closed(writer)
        left += 1

    listener = await asyncio.start_server(trickle, "127.0.0.1", 0)
    config = TaskPushNotificationConfig(id="1", url=f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/")
    async with open_tasks(str(tmp_path / "agent.db")) as kept, Background() as background:
        push = Push(kept.push, Destinations(["127.0.0.1"]), background, pause_s=0, timeout_s=0.3)
        await kept.push.set_info("task", config, ServerCallContext(user=A2aCaller("carrel_x", "x")))
        await push.send_notification("task", Task(id="task"))

        async def given_up() -> bool:
            return calls == TRIES and not push._waiting

        await until(given_up)
        await push.close()

    async def all_left() -> bool:
        return left == calls

    ended.set()
    await until(all_left)
    listener.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1/", "http://localhost/", "http://[::1]/", "http://169.254.169.254/latest", "http://10.0.0.1/",
        "http://[::ffff:10.0.0.1]/", "http://2130706433/", "http://0x7f.1/", "http://0/", "ftp://example.org/",
        "file:///etc/passwd", "gopher://127.0.0.1/", "http://user:secret@example.org/", "nonsense", "http://", "",
        "http://[::1", "http://example.org:99999/", "http://a b/",
    ],
)  # fmt: skip
async def test_urls_that_lead_inside_are_refused(url: str) -> None:
    with pytest.raises((Denied, InvalidRequest)):
        await Destinations().resolve(url)


async def test_a_refused_url_is_refused_when_it_is_given(ground: Ground) -> None:
    async with ground.talk() as one:
        config = TaskPushNotificationConfig(url="http://127.0.0.1:9/")
        with pytest.raises(A2AError, match="push notification"):
            await one.events(said("true", context=ground.context), task_push_notification_config=config)


async def test_hosts_of_the_configuration_are_right() -> None:
    known = Destinations(["127.0.0.1", "LOCALHOST", "*.example.org"])
    target = await known.resolve("http://localhost:8080/a?b#c")
    assert target.url.split("//")[1] in {"127.0.0.1:8080/a?b", "[::1]:8080/a?b"}
    assert (target.host, target.name) == ("localhost:8080", "localhost")
    with pytest.raises(Denied):
        await known.resolve("http://127.0.0.2/")


@pytest.mark.parametrize("host", ["*", "", "*.", "a/b", "a*.org", "http://x"])
def test_hosts_that_are_none_are_refused(host: str) -> None:
    with pytest.raises(InvalidRequest):
        Destinations([host])


@pytest.mark.parametrize(
    "text",
    ["64:ff9b::a00:1", "64:ff9b:1::1", "2002:a00:1::1", "2001::1", "fe80::1", "fd00::1", "::10.0.0.1", "100.64.0.1",
     "192.0.2.1", "224.0.0.1", "255.255.255.255", "0.0.0.0", "2a00::5efe:a00:1", "ff02::1"],
)  # fmt: skip
def test_what_may_mean_an_address_inside_is_not_public(text: str) -> None:
    assert not is_public(text)


@pytest.mark.parametrize("text", ["93.184.216.34", "8.8.8.8", "2606:2800:220:1::1", "::ffff:8.8.8.8"])
def test_what_is_public(text: str) -> None:
    assert is_public(text)


def test_room_for_so_many_urls() -> None:
    Push.room(MOST_CONFIGS - 1)
    with pytest.raises(LimitExceeded):
        Push.room(MOST_CONFIGS)
