#!/usr/bin/env python3
"""Watches a directory and writes its changes to standard output, a JSON object a line: first `{}`, when it watches,
then `{"event": "CREATE", "name": "a/b"}`; the names are relative to the directory.

It runs in sandboxes, and needs only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import sys

MODIFY, ATTRIB, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200
DIRECTORY, GONE, OVERFLOW = 0x40000000, 0x8000, 0x4000
NAMES = {MODIFY: "WRITE", ATTRIB: "CHMOD", MOVED_FROM: "RENAME", MOVED_TO: "CREATE", CREATE: "CREATE", DELETE: "REMOVE"}
MOST_DIRECTORIES = 8192
UNNAMED = re.compile(r"#\d+")
"""The name of a file that has none yet: carrel writes files so that they appear when they are complete."""


class Watcher:
    """The directories that are watched, by the number that the kernel gave them."""

    def __init__(self, root: str, *, recursive: bool):
        self.root = root
        self.recursive = recursive
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.handle = self.libc.inotify_init1(os.O_CLOEXEC)
        self.names: dict[int, str] = {}
        self.add("")

    def add(self, name: str) -> None:
        """Watch a directory and, if asked for, those below it."""
        path = os.path.join(self.root, name) if name else self.root
        number = self.libc.inotify_add_watch(self.handle, os.fsencode(path), sum(NAMES))
        if number < 0:
            if not name:
                sys.exit(f"{path}: {os.strerror(ctypes.get_errno())}")
            return
        self.names[number] = name
        if len(self.names) > MOST_DIRECTORIES:
            sys.exit(f"there are more than {MOST_DIRECTORIES} directories to watch")
        if self.recursive:
            for entry in os.scandir(path):
                if entry.is_dir(follow_symlinks=False):
                    self.add(os.path.join(name, entry.name))

    def run(self) -> None:
        """Write the changes until the reader has gone."""
        say({})
        while True:
            data, at = os.read(self.handle, 65536), 0
            while at < len(data):
                number, mask, _, size = struct.unpack_from("iIII", data, at)
                text = data[at + 16 : at + 16 + size].rstrip(b"\0").decode("utf-8", "replace")
                at += 16 + size
                if mask & OVERFLOW:
                    sys.exit("there were more changes than could be kept")
                if mask & GONE:
                    self.names.pop(number, None)
                    continue
                if UNNAMED.fullmatch(text):
                    continue
                name = os.path.join(self.names.get(number, ""), text)
                if self.recursive and mask & DIRECTORY and mask & (CREATE | MOVED_TO):
                    self.add(name)
                for bit, event in NAMES.items():
                    if mask & bit:
                        say({"event": event, "name": name})


def say(value: dict[str, str]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    Watcher(sys.argv[-1], recursive="--recursive" in sys.argv[1:-1]).run()
