"""The program in the place of a masked one, run for real."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.errors import Unsupported
from carrel.isolation import refusing_program

TEXT = '{"code": "denied_by_policy", "reason": "é"}\n'.encode()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    path.write_bytes(refusing_program.image(TEXT))
    path.chmod(0o555)
    return path


@pytest.mark.parametrize("arguments", [[], ["--version"], ["x" * 1000] * 20])
def test_it_says_its_text_and_exits(program: Path, arguments: list[str]) -> None:
    done = subprocess.run([program, *arguments], capture_output=True, check=False, env={})
    assert (done.returncode, done.stdout, done.stderr) == (126, b"", TEXT)


def test_it_takes_nobody_down_when_nobody_listens(program: Path) -> None:
    code = subprocess.run(["bash", "-c", f"{program} 2>&-; exit $?"], check=False).returncode
    assert code == 126


def test_the_dynamic_loader_brings_the_same_text(program: Path) -> None:
    [loader] = {
        os.path.realpath(path) for place in ("/lib64", "/lib") for path in Path(place).glob("ld-linux-*.so.[12]")
    }
    done = subprocess.run([loader, program], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (126, b"", TEXT)


def test_a_program_of_this_machine_as_the_tools_see_it(program: Path) -> None:
    assert shutil.which("readelf")
    shown = subprocess.run(["readelf", "-hlW", program], capture_output=True, text=True, check=True)
    assert shown.stderr == ""
    assert "EXEC (Executable file)" in shown.stdout
    assert "INTERP" not in shown.stdout


@given(st.binary(max_size=4097))
def test_the_text_lies_where_the_code_looks_for_it(text: bytes) -> None:
    for machine in ("x86_64", "aarch64"):
        image = refusing_program.image(text, machine)
        assert image.endswith(text)
        assert struct.unpack_from("<Q", image, 24) == (0x400000 + 120,)
        code = image[120 : len(image) - len(text)]
        if machine == "x86_64":
            (distance,) = struct.unpack_from("<I", code, 3)
            assert 7 + distance == len(code)
        else:
            adr, _fd, length, *_ = struct.unpack("<8I", code)
            assert (adr >> 5 & 0x7FFFF) * 4 == len(code)
            assert length >> 5 & 0xFFFF == len(text)


def test_the_instructions_of_the_other_machine() -> None:
    code = struct.unpack("<8I", refusing_program.image(b"text\n", "aarch64")[120:-5])
    # adr x1, text; mov x0, 2; mov x2, 5; mov x8, write; svc 0; mov x0, 126; mov x8, exit_group; svc 0
    words = (0x10000101, 0xD2800040, 0xD28000A2, 0xD2800808, 0xD4000001, 0xD2800FC0, 0xD2800BC8, 0xD4000001)
    assert code == words


def test_a_machine_it_is_not_written_for() -> None:
    with pytest.raises(Unsupported):
        refusing_program.image(b"", "riscv64")
