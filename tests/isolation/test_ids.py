from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import PlatformError
from carrel.isolation import ids
from carrel.isolation.ids import FIRST, RANGE, SLOTS, HostIds, maps
from carrel.isolation.rootfs import SANDBOX_UID


@pytest.fixture
def taken() -> Iterator[list[int]]:
    """Descriptors of locks, closed at the end."""
    found: list[int] = []
    yield found
    for descriptor in found:
        os.close(descriptor)


class Host(HostIds):
    """Hands out from a directory of the test, and closes it."""

    def __init__(self, directory: Path, following: int = 0):
        super().__init__(str(directory))
        self._next = following

    def take_into(self, taken: list[int]) -> int:
        slot, lock = self.take()
        taken.append(lock)
        return slot

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._directory)


HOLD = """
import sys
from carrel.isolation.ids import HostIds
host = HostIds(sys.argv[1])
host._next = 0
held = [host.take() for _ in range(3)]
print(*[slot for slot, _lock in held], flush=True)
sys.stdin.read()
"""


def test_two_takers_never_get_the_same_slot(tmp_path: Path, taken: list[int]) -> None:
    with Host(tmp_path) as one, Host(tmp_path) as other:
        slots = [host.take_into(taken) for _ in range(20) for host in (one, other)]
    assert len(set(slots)) == 40
    assert all(0 <= slot < SLOTS for slot in slots)


def test_another_process_holds_its_slots_until_it_dies(tmp_path: Path, taken: list[int]) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "0 1 2\n"
            with Host(tmp_path) as host:
                assert host.take_into(taken) == 3
        finally:
            holder.kill()
    assert holder.returncode == -signal.SIGKILL
    with Host(tmp_path) as host:
        assert [host.take_into(taken) for _ in range(4)] == [0, 1, 2, 4]


def test_the_lock_lives_as_long_as_any_copy_of_its_descriptor(tmp_path: Path, taken: list[int]) -> None:
    with Host(tmp_path) as host:
        slot, lock = host.take()
        copy = os.dup(lock)  # as a fork has one
        os.close(lock)
        with Host(tmp_path, slot) as other:
            assert other.take_into(taken) == slot + 1
        os.close(copy)
        with Host(tmp_path, slot) as other:
            assert other.take_into(taken) == slot


def test_slots_go_round_and_come_to_an_end(tmp_path: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "SLOTS", 3)
    with Host(tmp_path, 2) as host:
        assert [host.take_into(taken) for _ in range(3)] == [2, 0, 1]
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(PlatformError, match="in use"):
            host.take()
        assert len(os.listdir("/proc/self/fd")) == before


def test_the_lock_is_nobody_elses_and_not_passed_on(tmp_path: Path, taken: list[int]) -> None:
    directory = tmp_path / "locks"
    with Host(directory) as host:
        host.take_into(taken)
    assert (directory.stat().st_mode & 0o777, (directory / "ids.lock").stat().st_mode & 0o777) == (0o700, 0o600)
    assert fcntl.fcntl(taken[0], fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_maps() -> None:
    first = FIRST + 5 * RANGE
    assert maps(5, root=False, idmap=False) == f"{SANDBOX_UID} 0 1\n"
    assert maps(5, root=True, idmap=True) == f"0 {first} {RANGE}\n"
    assert maps(5, root=True, idmap=False) == (
        f"0 {first} {SANDBOX_UID}\n"
        f"{SANDBOX_UID} {SANDBOX_UID} 1\n"
        f"{SANDBOX_UID + 1} {first + SANDBOX_UID + 1} {RANGE - SANDBOX_UID - 1}\n"
    )


@given(st.integers(0, SLOTS - 1), st.integers(0, SLOTS - 1), st.booleans())
def test_ranges_of_two_slots_share_no_id_but_the_owner_of_files(one: int, other: int, idmap: bool) -> None:
    def outside(slot: int) -> list[range]:
        lines = [[int(word) for word in line.split()] for line in maps(slot, root=True, idmap=idmap).splitlines()]
        assert [line[0] for line in lines] == [sum(each[2] for each in lines[:place]) for place in range(len(lines))]
        assert sum(line[2] for line in lines) == RANGE, "every id inside is mapped"
        return [range(line[1], line[1] + line[2]) for line in lines if line[1] != SANDBOX_UID]

    for first in outside(one):
        assert first.start >= FIRST and first.stop <= 2**32 - 2
        for second in outside(other):
            if one != other:
                assert first.stop <= second.start or second.stop <= first.start


def _mapped(text: str) -> dict[int, int]:
    rows = (map(int, line.split()) for line in text.splitlines())
    return {inner + n: outer + n for inner, outer, count in rows for n in range(count)}


@pytest.mark.parametrize("wanted", [0, 33, SANDBOX_UID, 5000, RANGE - 1, RANGE, 2**31 - 1])
def test_image_map_has_the_agent_as_the_user_of_the_image_and_each_other_user_once(wanted: int) -> None:
    first = ids.owner(3)
    found = _mapped(ids.image_map(wanted, first))
    assert found[wanted] == ids.agent(3, idmap=True)
    assert len(set(found.values())) == len(found) >= RANGE - 2
    assert set(found.values()) <= set(range(first + 1, first + RANGE)), "nobody is root of the sandbox"
    assert all(found[each] == first + each for each in range(1, RANGE - 1) if each not in {wanted, SANDBOX_UID})
    assert {each: place - first for each, place in found.items()} == _mapped(ids.image_map(wanted))
    assert all(ids.in_image(found[each], wanted) == each for each in (0, 1, wanted, RANGE - 2))
