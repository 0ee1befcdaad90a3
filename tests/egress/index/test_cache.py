import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from carrel.egress.index.cache import CacheDraft, PackageCache, key

KEYS = [key(str(number)) for number in range(6)]
MOST = 3000


def keep(cache, name, content):
    draft = cache.draft()
    draft.write(content)
    cache.finish(draft, name)
    os.close(draft.descriptor)


def content_of(cache, name):
    kept = cache.file(name)
    if kept is None:
        return None
    try:
        found = os.pread(kept.descriptor, 1 << 20, 0)
        assert len(found) == kept.size
        assert hashlib.sha256(found).hexdigest() == kept.digest
        return found
    finally:
        os.close(kept.descriptor)


def on_disk(directory):
    return [path for name in ("files", "pages") for path in Path(directory, name).iterdir()]


class Machine(RuleBasedStateMachine):
    """Any order of work, kills and damage: what comes out is what went in under that key, or nothing."""

    def __init__(self):
        super().__init__()
        self.directory = tempfile.mkdtemp()
        self.cache = PackageCache(self.directory, MOST)
        self.files, self.pages = {}, {}

    @rule(name=st.sampled_from(KEYS), content=st.binary(max_size=1200))
    def keep(self, name, content):
        keep(self.cache, name, content)
        self.files[name] = content
        assert content_of(self.cache, name) == content

    @rule(content=st.binary(max_size=1200), renamed=st.booleans(), name=st.sampled_from(KEYS))
    def killed_while_writing(self, content, renamed, name):
        draft = self.cache.draft()
        draft.write(content)
        if renamed:  # killed between the name and the next line
            os.rename(draft.path, os.path.join(self.directory, "files", f"{name}-{draft.digest}"))
            for path in on_disk(self.directory):
                if path.name.startswith(name) and path.name != f"{name}-{draft.digest}":
                    path.unlink()
            self.files[name] = content
        os.close(draft.descriptor)
        self.reopen()

    @rule()
    def reopen(self):
        self.cache = PackageCache(self.directory, MOST)
        assert not os.listdir(os.path.join(self.directory, "drafts"))

    @rule()
    def dropped(self):
        draft = self.cache.draft()
        draft.write(b"x")
        draft.drop()
        os.close(draft.descriptor)

    @rule(name=st.sampled_from(KEYS), content=st.binary(max_size=600), now=st.integers(1, 1 << 31))
    def page(self, name, content, now):
        self.cache.put_page(name, content, float(now))
        self.pages[name] = (content, float(now))

    @rule(name=st.sampled_from(KEYS), now=st.integers(1, 1 << 31))
    def asked(self, name, now):
        self.cache.confirm_page(name, float(now))
        if name in self.pages:
            self.pages[name] = (self.pages[name][0], float(now))

    @rule(name=st.sampled_from(KEYS))
    def drop_page(self, name):
        self.cache.drop_page(name)
        assert self.cache.page(name) is None

    @rule(name=st.sampled_from(KEYS))
    def look(self, name):
        assert content_of(self.cache, name) in (None, self.files.get(name))
        assert self.cache.page(name) in (None, self.pages.get(name))

    @rule(name=st.sampled_from(KEYS))
    def damage(self, name):
        for path in on_disk(self.directory):
            if path.parent.name == "files" and path.name.startswith(name) and path.stat().st_size:
                path.write_bytes(b"damaged")
                self.reopen()
                assert content_of(self.cache, name) is None

    @rule(name=st.sampled_from(KEYS))
    def taken_away(self, name):
        for path in on_disk(self.directory):
            if path.name.startswith(name):
                path.unlink()
        assert content_of(self.cache, name) is None
        assert self.cache.page(name) is None

    @invariant()
    def within_the_cap(self):
        assert self.cache.total <= MOST
        assert sum(path.stat().st_size for path in on_disk(self.directory)) <= MOST

    def teardown(self):
        shutil.rmtree(self.directory)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_the_least_used_goes_first(tmp_path):
    cache = PackageCache(str(tmp_path), 30)
    for name in KEYS[:3]:
        keep(cache, name, name[:10].encode())
    content_of(cache, KEYS[0])
    keep(cache, KEYS[3], b"0123456789")
    assert content_of(cache, KEYS[1]) is None
    assert all(content_of(cache, name) for name in (KEYS[0], KEYS[2], KEYS[3]))
    assert cache.total == 30


def test_many_small_ones_are_too_many_too(tmp_path, monkeypatch):
    monkeypatch.setattr("carrel.egress.index.cache.MOST_ENTRIES", 3)
    cache = PackageCache(str(tmp_path), 1000)
    for name in KEYS:
        cache.put_page(name, b"", 1.0)
    assert len(on_disk(tmp_path)) == 3
    assert cache.page(KEYS[-1]) == (b"", 1.0)


def test_the_order_outlives_the_process(tmp_path):
    cache = PackageCache(str(tmp_path), 30)
    for at, name in enumerate(KEYS[:3]):
        keep(cache, name, name[:10].encode())
        path = next(path for path in on_disk(tmp_path) if path.name.startswith(name))
        os.utime(path, (at, at))
    content_of(cache, KEYS[0])
    cache = PackageCache(str(tmp_path), 20)
    assert [bool(content_of(cache, name)) for name in KEYS[:3]] == [True, False, True]


def test_an_open_file_outlives_its_place(tmp_path):
    cache = PackageCache(str(tmp_path), 10)
    keep(cache, KEYS[0], b"0123456789")
    kept = cache.file(KEYS[0])
    keep(cache, KEYS[1], b"abcdefghij")
    assert cache.file(KEYS[0]) is None
    assert os.pread(kept.descriptor, 100, 0) == b"0123456789"
    os.close(kept.descriptor)


def test_the_drafts_of_a_living_process_are_left_alone(tmp_path):
    cache = PackageCache(str(tmp_path), 100)
    draft = cache.draft()
    draft.write(b"one ")
    other = PackageCache(str(tmp_path), 100)
    draft.write(b"two")
    cache.finish(draft, KEYS[0])
    os.close(draft.descriptor)
    assert content_of(cache, KEYS[0]) == b"one two"
    assert content_of(other, KEYS[0]) is None
    assert content_of(PackageCache(str(tmp_path), 100), KEYS[0]) == b"one two"


def test_strange_things_in_the_directory_are_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    cache = PackageCache(str(tmp_path / "c"), 100)
    digest = hashlib.sha256(b"secret").hexdigest()
    (tmp_path / "c/files" / f"{KEYS[0]}-{digest}").symlink_to(outside)
    (tmp_path / "c/drafts/link").symlink_to(outside)
    (tmp_path / "c/files/other").write_bytes(b"x")
    cache = PackageCache(str(tmp_path / "c"), 100)
    assert content_of(cache, KEYS[0]) is None
    assert outside.read_bytes() == b"secret"
    assert cache.total == 0


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "a" * 63, "A" * 64, "a" * 64 + "\n"])
def test_only_keys_are_names(tmp_path, name):
    cache = PackageCache(str(tmp_path), 100)
    for use in (cache.file, cache.page, cache.drop_page):
        with pytest.raises(AssertionError):
            use(name)


def test_keys_tell_parts_apart():
    assert len({key("a", "b"), key("ab"), key("a", None), key("a", ""), key("a"), key("a", "b", None)}) == 6


def test_a_draft_is_of_its_owner_only(tmp_path):
    draft = CacheDraft(str(tmp_path))
    assert os.stat(draft.path).st_mode & 0o777 == 0o600
    os.close(draft.descriptor)


WRITER = """
import itertools, os, sys
from carrel.egress.index.cache import PackageCache, key
cache = PackageCache(sys.argv[1], 2_000_000)
for number in itertools.count():
    draft = cache.draft()
    for _ in range(4):
        draft.write(os.urandom(20_000))
    cache.finish(draft, key(str(number % 50)))
    os.close(draft.descriptor)
    cache.put_page(key("page", str(number % 50)), b"x" * 1000 + b"end", 1.0)
    if number == 20:
        print("ready", flush=True)
"""


def test_killed_at_any_time(tmp_path):
    for _round in range(3):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            os.kill(process.pid, signal.SIGKILL)
        cache = PackageCache(str(tmp_path), 2_000_000)
        assert not os.listdir(tmp_path / "drafts")
        kept = [content_of(cache, key(str(number))) for number in range(50)]
        assert len([each for each in kept if each is not None]) >= 10
        assert all(len(each) == 80_000 for each in kept if each is not None)
        for number in range(50):
            page = cache.page(key("page", str(number)))
            assert page is None or page[0].endswith(b"end")
        assert cache.total == sum(path.stat().st_size for path in on_disk(tmp_path)) <= 2_000_000
