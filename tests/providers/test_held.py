"""Files of a workspace that have no name any more: what processes hold of them is counted, however they hold it, and
counting it holds up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.support.sandboxes import KINDS, House, until

pytestmark = pytest.mark.skipif("namespace" not in KINDS, reason="this host cannot make such sandboxes")
MB = 1024 * 1024
DELETED = """
import ctypes, mmap, os, threading, time
libc = ctypes.CDLL(None)
EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]

def deleted():
    held = os.open("deleted", os.O_RDWR | os.O_CREAT)
    os.write(held, os.urandom(4 << 20))
    os.unlink("deleted")
    return held

"""
HOLDERS = {
    "a process": "deleted()\nprint('holds', flush=True)\ntime.sleep(7777)",
    "its memory": "m = mmap.mmap(deleted(), 4 << 20)\nos.closerange(3, 99)\nprint('holds', flush=True)\ntime.sleep(7777)",
    "a thread that outlives the first": """
def hold():
    deleted()
    print('holds', flush=True)
    time.sleep(7777)
threading.Thread(target=hold).start()
libc.syscall(EXIT, 0)
""",
    "a thread with descriptors of its own": """
held, stack = deleted(), ctypes.create_string_buffer(1 << 16)
OF_THE_SAME_PROCESS = 0x100 | 0x800 | 0x10000  # CLONE_VM, CLONE_SIGHAND, CLONE_THREAD, but not CLONE_FILES
top = ctypes.c_void_p((ctypes.addressof(stack) + (1 << 16)) & ~63)
assert libc.clone(libc.pause, top, OF_THE_SAME_PROCESS, None) > 0
os.close(held)
print('holds', flush=True)
time.sleep(7777)
""",
}
MANY = """
import os, resource, time
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
for _ in range(most - 50):
    os.open("/dev/null", os.O_RDONLY)
for _ in range(16):
    if os.fork() == 0:
        time.sleep(7777)
print("holds", flush=True)
time.sleep(7777)
"""


@pytest.fixture
async def house(houses: dict[str, House]) -> AsyncIterator[House]:
    house = House("namespace", houses["namespace"].directory)
    yield house
    await house.provider.close()


@pytest.mark.parametrize("holder", HOLDERS)
async def test_what_is_held_is_counted(house: House, holder: str) -> None:
    async with house.box() as box:
        assert await house.provider.held_bytes(box.handle) == 0
        name = await box.supervisor.start(["python3", "-c", DELETED + HOLDERS[holder]])
        await box.supervisor.shows(name, "holds")
        assert 4 * MB <= await house.provider.held_bytes(box.handle) < 6 * MB
        await box.supervisor.ask("DELETE", f"/commands/{name}")

        async def let_go() -> bool:
            return await house.provider.held_bytes(box.handle) == 0

        await until(let_go, what="nothing held")


async def test_a_look_at_many_files_holds_up_nobody(house: House) -> None:
    async with house.box(processes=64) as box:
        name = await box.supervisor.start(["python3", "-c", MANY])
        await box.supervisor.shows(name, "holds")
        look = asyncio.create_task(house.provider.held_bytes(box.handle))
        await asyncio.sleep(0)  # it has been asked for
        assert box.handle["id"] in await house.provider.running()
        assert not look.done(), "others were answered first"
        assert await look == 0
