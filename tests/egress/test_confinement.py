from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, socket, ssl, sys
from carrel.egress.launch import confine
cache, secret, extra = sys.argv[1:]
assert confine([cache], [extra])
def refused(call):
    try:
        call()
    except PermissionError:
        return
    sys.exit(f"{call} was not refused")
refused(lambda: open(secret).read())
refused(lambda: open("/etc/shadow").read())
refused(lambda: os.listdir("/root"))
refused(lambda: open(os.path.join(os.path.dirname(cache), "new"), "w"))
refused(lambda: os.unlink(secret))
refused(lambda: os.chroot("/"))
open(extra).read()
os.makedirs(cache + "/a")
open(cache + "/a/file", "w").write("x")
os.rename(cache + "/a/file", cache + "/file")
ssl.create_default_context().load_default_certs()
socket.getaddrinfo("localhost", 80)
import json.tool, xml.dom.minidom  # what was not loaded before can still be
os.fork() or os._exit(0)
assert os.wait()[1] == 0
assert "CapEff:\\t0000000000000000" in open("/proc/self/status").read()
"""


def test_libraries_elsewhere_can_be_loaded_and_the_directory_it_started_in_is_closed(tmp_path: Path) -> None:
    cache, here, libraries = tmp_path / "cache", tmp_path / "here", tmp_path / "libraries"
    for each in (cache, here, libraries):
        each.mkdir()
    (libraries / "part.py").write_text("value = 1")
    (here / "token").write_text("s")
    script = """
import sys
from carrel.egress.launch import confine
assert confine([sys.argv[1]])
import part
try:
    open("token")
except PermissionError:
    sys.exit(0)
sys.exit("it was not refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(cache)],
        cwd=here,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(libraries), str(here)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_it_reads_and_writes_what_it_needs_and_nothing_else(tmp_path: Path) -> None:
    cache, secret, extra = tmp_path / "cache", tmp_path / "token", tmp_path / "extra"
    cache.mkdir()
    secret.write_text("s")
    extra.write_text("e")
    words = [sys.executable, "-c", SCRIPT, str(cache), str(secret), str(extra)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
