"""Headers and content as other programs read them."""

from __future__ import annotations

import io
import tarfile

from carrel.workspaces.volumes import tarball
from carrel.workspaces.volumes.trees import EntryKind, Node


def test_holes_become_zeros_and_times_keep_their_nanoseconds() -> None:
    node = Node(EntryKind.FILE, 0o4711, 1_700_000_000_123_456_789, 1000, xattrs={"user.a": b"\xff"})
    name = b"odd\n\xff"
    raw = tarball.header(name, node) + b"".join(tarball.content(1000, [(10, b"abc"), (990, b"z" * 5)]))
    raw += tarball.header(b"hard", node, hard_link_to=name) + tarball.END
    assert len(raw) % 512 == 0
    with tarfile.open(fileobj=io.BytesIO(raw), encoding="utf-8", errors="surrogateescape") as tar:
        first, second = tar.getmembers()
        content = tar.extractfile(first)
        assert content is not None
        data = content.read()
    assert data == bytes(10) + b"abc" + bytes(977) + b"z" * 5 + bytes(5)
    assert first.name.encode("utf-8", "surrogateescape") == name
    assert (first.mode, first.pax_headers["mtime"]) == (0o4711, "1700000000.123456789")
    assert second.islnk()
    assert second.linkname == first.name
