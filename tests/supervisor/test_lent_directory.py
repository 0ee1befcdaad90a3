"""A directory is lent by one process and used by another."""

from __future__ import annotations

import os
import threading

import pytest

from carrel.supervisor import lent_directory


@pytest.fixture(autouse=True)
def own_name(monkeypatch):
    monkeypatch.setattr(lent_directory, "ADDRESS", b"\0carrel-test-" + os.urandom(8).hex().encode())


def test_a_directory_is_lent(tmp_path):
    lender = threading.Thread(target=lent_directory.lend, args=(str(tmp_path),))
    lender.start()
    lent_directory.borrow()
    lender.join()
    directory = os.open(lent_directory.PATH, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.close(lent_directory.DESCRIPTOR)
    os.symlink("somewhere", "link", dir_fd=directory)
    os.close(directory)
    assert os.readlink(tmp_path / "link") == "somewhere"


def test_whoever_waits_in_vain_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(lent_directory, "PATIENCE_S", 0.05)
    with pytest.raises(TimeoutError):
        lent_directory.borrow()
    with pytest.raises(TimeoutError, match="does not wait"):
        lent_directory.lend(str(tmp_path))
