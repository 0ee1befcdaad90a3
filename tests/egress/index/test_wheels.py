import io
import os
import struct
import zipfile
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.indexes import metadata_of, wheel

from carrel.egress.index import downloads


@contextmanager
def opened(content):
    descriptor = os.memfd_create("wheel")
    try:
        os.write(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)


def unpacked(content):
    with opened(content) as descriptor:
        return downloads.unpacked_size(descriptor)


def metadata(content):
    with opened(content) as descriptor:
        return downloads.wheel_metadata(descriptor)


def test_a_wheel_counts_what_it_holds():
    _name, content = wheel("demo", payload=b"\0" * 1_000_000)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        inside = sum(each.file_size for each in archive.infolist())
    assert len(content) < 10_000
    assert inside > 1_000_000
    assert unpacked(content) == inside


def test_what_is_no_zip_counts_its_size():
    assert unpacked(b"") == 0
    assert unpacked(b"x" * 1000) == 1000
    _name, content = wheel("demo")
    assert unpacked(content[:-10]) == len(content) - 10


def test_metadata():
    _name, content = wheel("demo", requires=("other",))
    assert metadata(content) == metadata_of(content)
    assert metadata(b"") is None
    assert metadata(b"PK" * 500) is None
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as archive:
        archive.writestr("a.dist-info/METADATA", "a")
        archive.writestr("b.dist-info/METADATA", "b")
    assert metadata(twice.getvalue()) is None


def test_metadata_that_unpacks_to_too_much(monkeypatch):
    monkeypatch.setattr(downloads, "MOST_METADATA", 1000)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.dist-info/METADATA", "a" * 1001)
    assert metadata(packed.getvalue()) is None


@pytest.mark.parametrize("comment", [b"", b"x" * 65_535])
@pytest.mark.parametrize("longer", [False, True])
def test_a_directory_that_is_too_long_is_not_read(comment, longer, monkeypatch):
    monkeypatch.setattr(downloads, "MOST_DIRECTORY", 10_000)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        if longer:
            monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 10)  # writes the longer records
        for at in range(400):
            archive.writestr(str(at), b"")
        archive.comment = comment
    content = packed.getvalue()
    assert unpacked(content) is None
    assert metadata(content) is None
    at = content.rindex(b"PK\5\6")
    hidden = content[: at + 12] + struct.pack("<L", 100) + content[at + 16 :]
    if longer:  # the short record lies: the longer one is the one that is read
        assert unpacked(hidden) is None


@given(st.data())
def test_a_damaged_wheel_is_no_trouble(data):
    _name, content = wheel("demo", requires=("other",))
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    found = unpacked(bytes(damaged))
    assert found is None or found >= len(content)
    metadata(bytes(damaged))
