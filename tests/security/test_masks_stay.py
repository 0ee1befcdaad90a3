"""Attacks on what masks lie on: moving a directory above it away, putting another in its place, writing what only a
pattern names. And what must still work beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.masks_ground import Hold, Masked

CANARY = "canary of what is hidden"


@pytest.fixture(scope="module")
def stays(hold: Hold) -> Iterator[Masked]:
    """One sandbox for the attacks, which all must leave as it is."""

    def fill(workspace: Path) -> None:
        for name in ("app/config/deep", "app/src", "free/nested/conf", "docs/part.d", "shut/in", "out"):
            (workspace / name).mkdir(parents=True)
        for name in ("app/config/deep/key", "free/nested/.env", "free/nested/conf/key", "shut/in/key"):
            (workspace / name).write_text(CANARY)
        for name in ("app/settings", "app/src/a.lock", "free/b.lock", "docs/part.d/page", "app/src/code"):
            (workspace / name).write_text("as it was")
        (workspace / "app/src/link.lock").symlink_to("code")
        for name in ("shut/in", "shut"):
            (workspace / name).chmod(0)

    with hold(
        fill,
        hidden=[
            "/workspace/app/config/deep/key", "/workspace/**/.env", "/workspace/**/conf/key", "/workspace/shut/in/key",
        ],
        readonly=["/workspace/app/settings/**", "/workspace/**/*.lock", "/workspace/docs/*.d"],
    ) as box:  # fmt: skip
        yield box


ABOVE = ["app", "app/config", "app/config/deep", "app/src", "free", "free/nested/conf", "docs", "docs/part.d"]


@pytest.mark.parametrize("path", ABOVE)
def test_moving_a_directory_above_what_is_masked(stays: Masked, path: str) -> None:
    """Rename it, up, down and aside, change places with another, put one over it, delete it."""

    def attack(path: str) -> object:
        import os

        import inside

        path = f"/workspace/{path}"
        for name in ("/workspace/out/empty", "/workspace/out/other"):
            os.makedirs(name, exist_ok=True)
        here = os.open(os.path.dirname(path), os.O_RDONLY)
        name = os.path.basename(path)

        def exchange() -> None:
            inside.call("renameat2", -100, path.encode(), -100, b"/workspace/out/other", 2)

        done = inside.those_that_work(
            {
                "rename": lambda: os.rename(path, f"{path}-2"),
                "up": lambda: os.rename(path, "/workspace/up"),
                "down": lambda: os.rename(path, "/workspace/out/down"),
                "by a descriptor": lambda: os.rename(name, "moved", src_dir_fd=here, dst_dir_fd=here),
                "through /proc": lambda: os.rename(f"/proc/self/root{path}", f"{path}-3"),
                "change places": exchange,
                "put one over it": lambda: os.rename("/workspace/out/empty", path),
                "delete": lambda: os.rmdir(path),
                "link": lambda: os.link(path, "/workspace/out/hard"),
            }
        )
        os.close(here)
        return done

    assert not stays.attack(attack, path)
    assert stays.http.post("/files/move", json={"source": path, "destination": "out/moved"}).status_code == 409
    assert (stays.workspace / path).is_dir()


def test_reading_what_is_hidden_below_directories_that_could_not_be_entered(stays: Masked) -> None:
    done = stays.run(
        "chmod 755 shut; chmod 755 shut/in; cat shut/in/key app/config/deep/key free/nested/conf/key; mv shut s"
    )
    assert CANARY not in done["stdout"] and done["exit_code"] != 0
    assert (stays.workspace / "shut/in/key").read_text() == CANARY


def test_writing_what_a_pattern_denies(stays: Masked) -> None:
    def attack() -> object:
        import os

        import inside

        open("/workspace/out/new", "w").close()
        found = {}
        for path in ("/workspace/app/settings", "/workspace/app/src/a.lock", "/workspace/free/b.lock"):
            found |= inside.those_that_work(
                {
                    f"write {path}": lambda path=path: open(path, "a").close(),
                    f"truncate {path}": lambda path=path: os.truncate(path, 0),
                    f"replace {path}": lambda path=path: os.rename("/workspace/out/new", path),
                    f"delete {path}": lambda path=path: os.unlink(path),
                    f"move {path}": lambda path=path: os.rename(path, "/workspace/out/moved"),
                    f"another name for {path}": lambda path=path: os.link(path, "/workspace/out/hard"),
                    f"mode of {path}": lambda path=path: os.chmod(path, 0o777),
                }
            )
        link = "/workspace/app/src/link.lock"
        found |= inside.those_that_work(
            {
                "delete a link": lambda: os.unlink(link),
                "replace a link": lambda: os.rename("/workspace/out/new", link),
                "move a link": lambda: os.rename(link, "/workspace/out/link"),
            }
        )
        return found

    assert not stays.attack(attack)
    for path in ("app/settings", "app/src/a.lock"):
        assert stays.http.put("/files/content", params={"path": path}, content=b"breach").is_error
        assert (stays.workspace / path).read_text() == "as it was"
    assert os.readlink(stays.workspace / "app/src/link.lock") == "code"


def test_what_lies_beside_can_be_moved_linked_and_written(stays: Masked) -> None:
    """No directory is a device of its own: tools rename and link from one to another."""

    def work() -> object:
        import os

        os.chdir("/workspace")
        for path in ("app/config/x", "app/config/deep/x", "docs/part.d/x", "out/x"):
            os.rename("app/src/code", path)
            os.link(path, "app/hard")
            os.unlink("app/hard")
            os.rename(path, "app/src/code")
        os.mkdir("app/src/made")
        os.rename("app/src/made", "app/config/deep/made")
        os.rename("app/config/deep/made", "free/nested/made")
        os.rmdir("free/nested/made")
        with open("docs/part.d/page", "a") as file:
            file.write(", and more")
        return "worked"

    assert stays.attack(work) == "worked"
    assert (stays.workspace / "docs/part.d/page").read_text() == "as it was, and more"


def test_git_works_in_a_directory_that_must_stay(stays: Masked) -> None:
    steps = """
        set -e; mkdir app/repo; cd app/repo; git init -q; git config user.email a@example.org; git config user.name a
        cp ../src/code a; mkdir b c; git add a; git commit -qm one; git mv a b/a; git commit -qm two
        git stash -q || true; git checkout -q HEAD~1; git gc -q; mv a ../config/deep/a; mv ../config/deep/a a
        git status --short; git log --all --oneline | wc -l; cd ..; rm -rf repo
    """
    done = stays.run(steps)
    assert (done["exit_code"], done["stdout"]) == (0, "2\n"), done


def test_a_pattern_hides_wherever_a_directory_is_moved_to(hold: Hold) -> None:
    """What a pattern with `**` at its beginning means keeps its meaning, so that its directories may be moved."""

    def fill(workspace: Path) -> None:
        (workspace / "a/b/conf").mkdir(parents=True)
        (workspace / "a/b/.env").write_text(CANARY)
        (workspace / "a/b/conf/key").write_text(CANARY)

    masks = {"hidden": ["/workspace/**/.env", "/workspace/**/conf/key"]}
    with hold(fill, **masks) as box:
        assert box.run("set -e; mv a/b moved; mkdir c; mv moved c/deep; mv a d")["exit_code"] == 0
        assert box.run("cat c/deep/.env c/deep/conf/key; mv c/deep/conf c/conf")["stdout"] == ""
        assert box.run("ls c/deep/conf")["stdout"] == "key\n"


def test_directories_in_places_that_can_be_written(hold: Hold) -> None:
    """What can be written is a mount of its own; what is masked in it stays all the same."""

    def fill(workspace: Path) -> None:
        for name in ("out/a/b", "kept"):
            (workspace / name).mkdir(parents=True)
        (workspace / "out/a/b/key").write_text(CANARY)
        (workspace / "out/a/fixed").write_text("as it was")

    with hold(
        fill,
        hidden=["/workspace/out/a/b/key"],
        readonly=["/workspace/out/*/fixed/**"],
        writable=["/workspace/out/**"],
    ) as box:
        done = box.run("mv out/a out/z; mv out/a/b out/b; echo x > out/a/fixed; touch kept/x; cat out/a/b/key")
        assert done["exit_code"] != 0
        assert (
            box.run("set -e; touch out/a/b/x out/x; mv out/a/b/x out/a/y; ln out/a/y out/z; ls out")["stdout"]
            == "a\nx\nz\n"
        )
        assert (box.workspace / "out/a/b/key").read_text() == CANARY
        assert (box.workspace / "out/a/fixed").read_text() == "as it was"
        assert os.listdir(box.workspace / "kept") == []


def test_what_is_made_later_is_not_held(hold: Hold) -> None:
    """Not a promise but its limit, which the pages and the warnings of a policy tell."""
    with hold(readonly=["/workspace/*.lock", "/workspace/config/**"]) as box:
        done = box.run("set -e; echo x > new.lock; mkdir config; echo x > config/x; cat new.lock config/x; mv config c")
        assert (done["exit_code"], done["stdout"]) == (0, "x\nx\n")
