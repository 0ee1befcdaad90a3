"""The program that is mounted over a masked one: it writes a text to standard error and exits with 126.

It is a complete executable of some hundred bytes, written here by hand: it needs no shell, interpreter or library,
which may be masked themselves, and it can do nothing else.
"""

from __future__ import annotations

import struct

from carrel.errors import Unsupported
from carrel.isolation import linux

EXIT = 126
_AT = 0x400000
_PAGE = 0x10000  # the largest there is
_HEADER, _SEGMENT = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQQQ")
_EXECUTABLE, _LOAD, _READ_EXECUTE = 2, 1, 5
_MACHINE = {"x86_64": 62, "aarch64": 183}


def image(text: bytes, machine: str = linux.ARCH) -> bytes:
    """Return the executable that writes `text`, for this architecture or another."""
    start = _HEADER.size + _SEGMENT.size
    if machine == "x86_64":
        code = _x86_64(len(text))
    elif machine == "aarch64":
        code = _aarch64(len(text))
    else:
        raise Unsupported(f"programs cannot be masked on {machine}", field="masks.programs")
    size = start + len(code) + len(text)
    header = _HEADER.pack(
        b"\x7fELF\x02\x01\x01", _EXECUTABLE, _MACHINE[machine], 1, _AT + start, _HEADER.size, 0, 0,
        _HEADER.size, _SEGMENT.size, 1, 0, 0, 0,
    )  # fmt: skip
    segment = _SEGMENT.pack(_LOAD, _READ_EXECUTE, 0, _AT, _AT, size, size, _PAGE)
    return header + segment + code + text


def _x86_64(length: int) -> bytes:
    exit_call = b"\xbf" + struct.pack("<I", EXIT)  # mov edi, 126
    exit_call += b"\xb8\xe7\0\0\0\x0f\x05"  # mov eax, exit_group; syscall
    write = b"\xba" + struct.pack("<I", length)  # mov edx, length
    write += b"\xbf\x02\0\0\0\xb8\x01\0\0\0\x0f\x05"  # mov edi, 2; mov eax, write; syscall
    return b"\x48\x8d\x35" + struct.pack("<I", len(write) + len(exit_call)) + write + exit_call  # lea rsi, [rip + …]


def _aarch64(length: int) -> bytes:
    words = 8

    def load(register: int, value: int) -> int:
        return 0xD2800000 | value << 5 | register  # movz, up to 16 bits

    call = 0xD4000001  # svc 0
    after = words * 4  # from the adr, the first instruction, to the text
    text_address = 0x10000000 | (after & 3) << 29 | (after >> 2) << 5 | 1  # adr x1
    write = (text_address, load(0, 2), load(2, length), load(8, 64), call)
    return struct.pack(f"<{words}I", *write, load(0, EXIT), load(8, 94), call)
