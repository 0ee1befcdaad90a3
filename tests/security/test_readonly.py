"""Attacks on what must stay as it is in the midst of what may be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.masks_ground import Hold


def _fill(workspace: Path) -> None:
    for name in ("config/deep", "config/private", "out"):
        (workspace / name).mkdir(parents=True)
    for name in ("config/settings", "config/deep/more", "config/private/key", "pinned", "hard"):
        (workspace / name).write_text("as it was")
    (workspace / "linked").symlink_to("out")


READONLY = [
    "/workspace/config/**",
    "/workspace/config/deep",
    "/workspace/pinned",
    "/workspace/linked/x",
    "/workspace/absent",
]


@pytest.mark.parametrize("writable", [None, ["/workspace/config/**", "/workspace/out/**", "/workspace/pinned"]])
def test_writing_what_is_to_stay(hold: Hold, writable: list[str] | None) -> None:
    def attack() -> object:
        import os

        import inside

        os.symlink("../config/settings", "/workspace/out/link")
        open("/workspace/out/mine", "w").close()
        done = inside.those_that_work(
            {
                "write": lambda: open("/workspace/config/settings", "a").close(),
                "write the file": lambda: open("/workspace/pinned", "a").close(),
                "write below": lambda: open("/workspace/config/deep/more", "r+").close(),
                "create": lambda: open("/workspace/config/x", "w").close(),
                "through a link": lambda: open("/workspace/out/link", "a").close(),
                "through /proc": lambda: open("/proc/self/root/workspace/pinned", "a").close(),
                "truncate": lambda: os.truncate("/workspace/pinned", 0),
                "delete": lambda: os.unlink("/workspace/pinned"),
                "delete below": lambda: os.unlink("/workspace/config/settings"),
                "rename": lambda: os.rename("/workspace/config", "/workspace/config2"),
                "rename the file": lambda: os.rename("/workspace/pinned", "/workspace/out/p"),
                "rename over": lambda: os.rename("/workspace/out/mine", "/workspace/pinned"),
                "hard link": lambda: os.link("/workspace/pinned", "/workspace/out/p"),
                "hard link below": lambda: os.link("/workspace/config/settings", "/workspace/out/p"),
                "mode": lambda: os.chmod("/workspace/pinned", 0o777),
                "what is hidden there": lambda: open("/workspace/config/private/key").close(),
            }
        )
        os.unlink("/workspace/out/link")
        return done

    with hold(_fill, hidden=["/workspace/config/private"], readonly=READONLY, writable=writable) as box:
        assert box.attack(attack) == []
        for path in ("pinned", "config/settings", "config/new"):
            assert box.http.put("/files/content", params={"path": path}, content=b"breach").is_error
        assert box.run("cat pinned config/settings config/deep/more")["stdout"] == "as it was" * 3
        assert box.run("echo x > out/free && cat out/free")["stdout"] == "x\n"
        assert sorted(os.listdir(box.workspace / "config")) == ["deep", "private", "settings"]
