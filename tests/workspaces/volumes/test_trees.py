"""Directories as bytes and back; hostile bytes are refused."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trees_for_tests import pack_tree

from carrel.errors import SnapshotDamaged
from carrel.workspaces.volumes.trees import EntryKind, Node, Tree, unpack_tree

names = st.binary(min_size=1, max_size=20).filter(lambda name: not {0, 47} & set(name) and name not in {b".", b".."})
keys = st.binary(min_size=32, max_size=32)
xattrs = st.none() | st.dictionaries(st.text(min_size=1, max_size=5), st.binary(max_size=5), min_size=1, max_size=2)
extents = st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 2**26), keys), max_size=3).map(tuple)
files = st.builds(
    Node,
    st.just(EntryKind.FILE),
    st.integers(0, 0o7777),
    st.integers(-(2**62), 2**62),
    st.integers(0, 2**50),
    extents,
    xattrs=xattrs,
    group=st.none() | st.binary(min_size=16, max_size=16),
)
folders = st.builds(Node, st.just(EntryKind.DIRECTORY), tree=keys)
links = st.builds(
    Node, st.just(EntryKind.LINK), mtime_ns=st.integers(0, 2**62), target=st.binary(min_size=1, max_size=9)
)
trees = st.builds(
    Tree, st.integers(0, 0o7777), st.integers(-(2**62), 2**62), xattrs, st.dictionaries(names, files | folders | links)
)


@given(trees)
def test_a_directory_comes_back(tree: Tree) -> None:
    assert unpack_tree(pack_tree(tree)) == tree


@given(st.binary())
def test_anything_else_is_refused(raw: bytes) -> None:
    with pytest.raises(SnapshotDamaged):
        unpack_tree(raw)


@pytest.mark.parametrize("name", [b"..", b".", b"", b"a/b", b"a\0", "text"])
def test_a_name_that_leaves_the_directory_is_refused(name: object) -> None:
    with pytest.raises(SnapshotDamaged):
        unpack_tree(msgpack.packb((1, 0o700, 0, [], [(name, 1, b"x" * 32)])))
