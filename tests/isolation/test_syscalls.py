"""The number tables against the kernel's own headers, where those are installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from carrel.isolation.syscalls import TABLES


def header_numbers(path: Path) -> dict[str, int]:
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", path.read_text(), re.MULTILINE)
    return {name: int(number) for name, number in found}


def test_x86_64_numbers_are_those_of_the_kernel_header() -> None:
    places = [
        Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        Path("/usr/include/asm/unistd_64.h"),
    ]
    header = next((path for path in places if path.exists()), None)
    if header is None:
        pytest.skip("linux-libc-dev for x86_64 is not installed")
    numbers = header_numbers(header)
    assert len(numbers) > 350
    # A newer header may name calls this table lacks (they are then ENOSYS) but never number one otherwise.
    for name in numbers.keys() & TABLES["x86_64"].keys():
        assert TABLES["x86_64"][name] == numbers[name], name
    assert (
        not {name for name, number in numbers.items() if number < 451}
        - TABLES["x86_64"].keys()
        - {"uretprobe", "uprobe"}
    )


def test_aarch64_numbers_are_those_of_the_generic_header() -> None:
    header = Path("/usr/include/asm-generic/unistd.h")
    if not header.exists():
        pytest.skip("linux-libc-dev is not installed")
    numbers = header_numbers(header)
    numbers["newfstatat"] = numbers.pop("fstatat", numbers.get("newfstatat", -1))
    for name in TABLES["aarch64"].keys() & numbers.keys():
        assert TABLES["aarch64"][name] == numbers[name], name
    only_32_bit = {name for name in numbers if name.endswith(("time64", "time32"))}
    only_32_bit |= {name for name, number in numbers.items() if 403 <= number <= 423}
    not_calls = {"arch_specific_syscall", "syscalls", "sync_file_range2"}
    known = {name for name, number in numbers.items() if number < 451}
    assert not known - TABLES["aarch64"].keys() - only_32_bit - not_calls


@pytest.mark.parametrize("arch", sorted(TABLES))
def test_no_number_is_given_twice(arch: str) -> None:
    assert len(set(TABLES[arch].values())) == len(TABLES[arch])
