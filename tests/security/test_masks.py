"""Attacks on masks: running a program that is denied, reading what is hidden, writing where nothing may be written.

Every way to a denied program is also tried on one that is allowed, where it must work: so a way that never led anywhere
is found out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.masks_ground import Hold, Masked

DENIED, ALLOWED = "base64", "base32"
REFUSAL = {"code": "denied_by_policy", "operation": "shell", "rule": "shell(base64:*)", "reason": "base64 is denied"}


@pytest.fixture(scope="module")
def masked(hold: Hold) -> Iterator[Masked]:
    """One sandbox for the attacks that leave it as it is."""

    def fill(workspace: Path) -> None:
        for name in ("private/deep", "config", "elsewhere/keys", "out", "given"):
            (workspace / name).mkdir(parents=True)
        for name in ("private/note", "private/deep/note", "elsewhere/keys/a.pem", "top.pem", "exact"):
            (workspace / name).write_text("canary of what is hidden")
        (workspace / "config/settings").write_text("as it was")
        (workspace / "given/file").write_text("as it was")
        (workspace / "linked").symlink_to("config")

    with hold(
        fill,
        programs=[DENIED],
        hidden=["/etc/hosts", "/var/cache/**", "/workspace/private/**", "/workspace/**/*.pem", "/workspace/exact"],
        writable=["/workspace/out/**", "/workspace/new/deep/**", "/workspace/linked/**", "/workspace/given/file"],
        refusal={DENIED: json.dumps(REFUSAL)},
    ) as box:
        yield box


# programs

SCRIPT = "printf '#!/bin/sh\\n{} --version\\n' > out/script; "
WAYS = {
    "by its name": "{} --version",
    "by its path": "/usr/bin/{} --version",
    "by its other path": "/bin/{} --version",
    "in a script": SCRIPT + "sh out/script",
    "in an executable script": SCRIPT + "chmod +x out/script; out/script",
    "exec": "exec {} --version",
    "eval": "eval '{} --version'",
    "env": "env -i /usr/bin/{} --version",
    "xargs": "echo --version | xargs {}",
    "find": "find /usr/bin/{} -exec '{{}}' --version ';'",
    "timeout, nice, nohup, setsid": "timeout 9 nice nohup setsid -w {} --version",
    "make": "printf 'all:\\n\\t@{} --version\\n' > out/Makefile; make -sf out/Makefile",
    "bash": "bash -c 'hash -p /usr/bin/{} other; other --version'",
    "another name": "bash -c 'exec -a other {} --version'",
    "Python": "python3 -c 'import subprocess; print(subprocess.check_output([\"{}\", \"--version\"], text=True))'",
    "execv": "python3 -c 'import os; os.execv(\"/usr/bin/{}\", [\"x\", \"--version\"])'",
    "an open directory": "python3 -c 'import os; os.chdir(\"/usr\"); os.execv(\"bin/{}\", [\"x\", \"--version\"])'",
    "a descriptor": "python3 -c 'import os; os.execve(os.open(\"/usr/bin/{}\", os.O_PATH), [\"x\", \"--version\"], {{}})'",
    "Perl": "perl -e 'exec {{\"/usr/bin/{}\"}} \"x\", \"--version\"'",
    "a symbolic link": "ln -sf /usr/bin/{} out/link; out/link --version",
    "a copy": "cp /usr/bin/{} out/copy; out/copy --version",
    "a copy through cat": "cat /usr/bin/{} > out/cat; chmod +x out/cat; out/cat --version",
    "a copy through tar": "tar -C /usr/bin -cf - {} | tar -C out -xf -; out/{} --version",
    "a copy in memory": (
        "python3 -c 'import os; fd = os.memfd_create(\"x\"); os.write(fd, open(\"/usr/bin/{}\", \"rb\").read());"
        " os.execve(fd, [\"x\", \"--version\"], {{}})'"
    ),
    "the loader": "$(ls /lib64/ld-linux*.so.2 /lib/ld-linux*.so.1 2>/dev/null | head -n 1) /usr/bin/{} --version",
    "its own root in /proc": "/proc/self/root/usr/bin/{} --version",
    "another's root in /proc": "sleep 9 & /proc/$!/root/usr/bin/{} --version",
    "a directory with another name": "ln -sfn /usr out/usr; out/usr/bin/{} --version",
    "dots": "/usr/share/../lib/../bin/./{} --version",
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_denied_program_by_another_way(masked: Masked, way: str) -> None:
    works = masked.run(WAYS[way].format(ALLOWED, ALLOWED))
    assert ALLOWED in works["stdout"], f"this way leads nowhere: {works}"
    masked.run("rm -rf out/*")
    denied = masked.run(WAYS[way].format(DENIED, DENIED))
    masked.run("rm -rf out/*")
    assert denied["stdout"].strip() == "", f"BREACH: {denied}"
    assert json.dumps(REFUSAL) in denied["stderr"], denied


def test_the_refusal_is_a_whole_object_and_the_exit_code_tells(masked: Masked) -> None:
    done = masked.run([DENIED, "-d"])
    assert (done["exit_code"], done["stdout"], json.loads(done["stderr"])) == (126, "", REFUSAL)


def test_a_hard_link(masked: Masked) -> None:
    """Give the file another name, which no mask covers."""

    def attack(name: str) -> object:
        import os
        import subprocess

        found = []
        for place in ("/workspace/out/hard", "/tmp/hard", "/home/agent/hard"):
            try:
                os.link(f"/usr/bin/{name}", place)
                found.append(subprocess.run([place, "--version"], capture_output=True, text=True, check=False).stdout)
            except OSError:
                continue
        return "".join(found)

    assert not masked.attack(attack, DENIED)


def test_the_supervisors_root(masked: Masked) -> None:
    assert masked.run(f"/proc/1/root/usr/bin/{DENIED} --version")["stdout"] == ""


def test_taking_a_mask_off(masked: Masked) -> None:
    """Unmount, move, replace, rename, delete, write or change the mask, also from a namespace of one's own."""

    def attack(name: str) -> object:
        import ctypes
        import os
        import subprocess

        import inside

        path = f"/usr/bin/{name}"
        words = path.encode()

        def works() -> bool:
            return (
                "coreutils" in subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            )

        def as_root() -> None:
            inside.call("unshare", 0x10000000 | 0x00020000)
            inside.call("umount2", words, 2)

        def cloned() -> None:
            if inside.call("clone", 0x10000000 | 0x00020000 | 17, 0, 0, 0, 0) == 0:
                os._exit(0)

        attributes = ctypes.create_string_buffer(b"\0" * 8 + (1).to_bytes(8, "little") + b"\0" * 16)
        for attempt in (
            lambda: inside.call("umount2", words, 0),
            lambda: inside.call("umount2", words, 2),
            lambda: inside.call("mount", b"none", words, 0, 32 | 4096, 0),
            lambda: inside.call("mount", b"/tmp", b"/usr/bin", 0, 4096, 0),
            lambda: inside.call("mount_setattr", -100, words, 0, attributes, 32),
            lambda: inside.call("move_mount", -100, words, -100, b"/tmp", 0),
            lambda: inside.call("open_tree", -100, b"/usr/bin", 1),
            lambda: inside.call("chroot", b"/tmp"),
            as_root,
            cloned,
            lambda: os.unlink(path),
            lambda: os.rename(path, "/tmp/moved"),
            lambda: os.rename("/usr/bin", "/tmp/moved"),
            lambda: os.chmod(path, 0o777),
            lambda: os.truncate(path, 0),
            lambda: os.close(os.open(path, os.O_WRONLY)),
            lambda: os.utime(path),
        ):
            try:
                attempt()
            except OSError:
                continue
            return "something of the mask could be changed"
        return works()

    assert not masked.attack(attack, DENIED)


def test_the_program_beneath_is_not_in_another_namespace_to_enter(masked: Masked) -> None:
    def attack() -> object:
        import os

        import inside

        entered = []
        for process in filter(str.isdigit, os.listdir("/proc")):
            try:
                descriptor = os.open(f"/proc/{process}/ns/mnt", os.O_RDONLY)
                inside.call("setns", descriptor, 0)
                entered.append(process)
            except OSError:
                continue
        return entered

    assert not masked.attack(attack)


def test_the_shell_itself_is_denied(hold: Hold) -> None:
    """The refusal needs no interpreter, so that no interpreter must be left for it."""
    with hold(programs=["sh", "bash", "dash", "perl", "python3"]) as box:
        for words in (
            ["sh", "-c", "echo breach"],
            ["/bin/bash", "-c", "echo breach"],
            ["python3", "-c", "print('breach')"],
        ):
            done = box.run(words)
            assert (done["exit_code"], done["stdout"]) == (126, "")
            assert json.loads(done["stderr"])["code"] == "denied_by_policy"
        assert box.run(["/usr/bin/env", "perl", "-v"])["exit_code"] == 126
        assert box.run(["cat", "/etc/hostname"])["stdout"] == "carrel\n"
        assert box.run("echo breach")["stdout"] == ""


# what is hidden

HIDDEN = [
    "/etc/hosts", "/workspace/private/note", "/workspace/private/deep/note", "/workspace/elsewhere/keys/a.pem",
    "/workspace/top.pem", "/workspace/exact",
]  # fmt: skip


@pytest.mark.parametrize("path", HIDDEN)
def test_reading_what_is_hidden(masked: Masked, path: str) -> None:
    def attack(path: str) -> object:
        import os

        found = []

        def look(name: str) -> None:
            try:
                with open(name, "rb") as file:
                    found.append(file.read().decode())
            except OSError:
                pass

        look(path)
        look(f"/proc/self/root{path}")
        for number, make in enumerate((os.symlink, os.link, os.rename)):
            try:
                make(path, f"/workspace/out/{number}")
            except OSError:
                continue
            look(f"/workspace/out/{number}")
            os.unlink(f"/workspace/out/{number}")
        for folder in (os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
            try:
                os.rename(folder, "/workspace/out/folder")
                found.append("a directory above was moved")
            except OSError:
                continue
        for change in (lambda: os.chmod(path, 0o777), lambda: os.unlink(path), lambda: os.rmdir(os.path.dirname(path))):
            try:
                change()
                found.append("the mask was changed")
            except OSError:
                continue
        look(path)
        return found

    assert not masked.attack(attack, path)
    if path.startswith("/workspace/"):
        for method, arguments in (("GET", {}), ("DELETE", {})):
            answer = masked.http.request(
                method, "/files/content" if method == "GET" else "/files", params={"path": path[11:], **arguments}
            )
            assert answer.is_error
            assert "canary" not in answer.text
        assert (masked.workspace / path[11:]).read_text() == "canary of what is hidden"


def test_a_file_that_is_replaced_from_outside_loses_its_mask(hold: Hold) -> None:
    """Not a promise but its limit, which the pages tell: a mask lies on a file, and who replaces that removes it."""
    with hold(lambda workspace: (workspace / "a").write_text("canary"), hidden=["/workspace/a"]) as box:
        (box.workspace / "a").write_text("changed in place")
        assert box.run("cat a")["stdout"] == ""
        (box.workspace / "b").write_text("new")
        (box.workspace / "b").rename(box.workspace / "a")
        assert box.run("cat a")["stdout"] == "new"


def test_a_hidden_directory_shows_nothing(masked: Masked) -> None:
    for path in ("/workspace/private", "/var/cache"):
        done = masked.run(["ls", "-A", path])
        assert (done["stdout"], done["exit_code"] != 0) == ("", True)
        assert masked.run(["touch", f"{path}/x"])["exit_code"] != 0
    assert masked.run(["cat", "/etc/hostname", "/workspace/config/settings"])["exit_code"] == 0


# what can be written


def test_writing_where_nothing_may_be_written(masked: Masked) -> None:
    def attack() -> object:
        import os

        import inside

        os.makedirs("/workspace/out/d", exist_ok=True)
        os.symlink("../../config/settings", "/workspace/out/d/link")
        done = inside.those_that_work(
            {
                "create": lambda: open("/workspace/x", "w").close(),
                "create below": lambda: open("/workspace/config/x", "w").close(),
                "write": lambda: open("/workspace/config/settings", "a").close(),
                "through a link": lambda: open("/workspace/out/d/link", "a").close(),
                "through a link that was there": lambda: open("/workspace/linked/settings", "a").close(),
                "through /proc": lambda: open("/proc/self/cwd/config/settings", "a").close(),
                "beside a file that is writable": lambda: open("/workspace/given/other", "w").close(),
                "truncate": lambda: os.truncate("/workspace/config/settings", 0),
                "delete": lambda: os.unlink("/workspace/config/settings"),
                "rename": lambda: os.rename("/workspace/config", "/workspace/config2"),
                "rename out": lambda: os.rename("/workspace/config/settings", "/workspace/out/settings"),
                "rename in": lambda: os.rename("/workspace/out/d", "/workspace/config/d"),
                "hard link": lambda: os.link("/workspace/config/settings", "/workspace/out/hard"),
                "mode": lambda: os.chmod("/workspace/config/settings", 0o777),
                "time": lambda: os.utime("/workspace/config/settings"),
                "attribute": lambda: os.setxattr("/workspace/config/settings", "user.x", b"1"),
                "replace the place": lambda: os.rename("/workspace/out", "/workspace/out2"),
                "remove the place": lambda: os.rmdir("/workspace/new/deep"),
            }
        )
        os.unlink("/workspace/out/d/link")
        os.rmdir("/workspace/out/d")
        return done

    assert not masked.attack(attack)
    for path in ("x", "config/settings", "linked/settings"):
        answer = masked.http.put("/files/content", params={"path": path}, content=b"breach")
        assert answer.is_error, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
    assert (masked.workspace / "config/settings").read_text() == "as it was"
    assert sorted(os.listdir(masked.workspace / "config")) == ["settings"]


def test_writing_where_it_is_allowed(masked: Masked) -> None:
    script = "echo x > out/a; mkdir -p new/deep/er; echo x > new/deep/er/b; echo more >> given/file; echo x > /tmp/t; rm /tmp/t"
    done = masked.run(f"set -e; {script}; cat out/a new/deep/er/b; rm -r out/a new/deep/er")
    assert (done["exit_code"], done["stdout"]) == (0, "x\nx\n"), done
    assert masked.http.put("/files/content", params={"path": "out/by-call"}, content=b"x").is_success
    assert masked.http.delete("/files", params={"path": "out/by-call"}).is_success
    assert (masked.workspace / "given/file").read_text() == "as it wasmore\n"
    (masked.workspace / "given/file").write_text("as it was")
    made = (masked.workspace / "new/deep").stat()
    assert made.st_uid == (masked.workspace / "out").stat().st_uid


def test_a_workspace_that_is_all_read_only(hold: Hold) -> None:
    with hold(lambda workspace: (workspace / "a").write_text("a"), writable=[]) as box:
        assert box.run("cat a; touch b 2>/dev/null || echo no; touch /tmp/c ~/c && echo yes")["stdout"] == "ano\nyes\n"


def test_a_file_is_replaced_where_only_a_directory_can_be_written(hold: Hold) -> None:
    """The name that this needs for a moment is at the top of that directory, where the next sandbox removes it."""

    def fill(workspace: Path) -> None:
        (workspace / "out" / "deep").mkdir(parents=True)
        (workspace / "out" / "deep" / "file").write_text("old")
        for left in (workspace, workspace / "out"):
            (left / ".carrel-draft").write_text("left by a supervisor that was killed")

    with hold(fill, writable=["/workspace/out/**"]) as box:
        assert os.listdir(box.workspace) == ["out"] and os.listdir(box.workspace / "out") == ["deep"]
        watching = os.open(box.workspace / "out", os.O_RDONLY)
        before = os.fstat(watching).st_mtime_ns
        answer = box.http.put("/files/content", params={"path": "out/deep/file"}, content=b"new")
        assert answer.is_success, answer.text
        assert os.fstat(watching).st_mtime_ns > before
        os.close(watching)
        assert (box.workspace / "out" / "deep" / "file").read_text() == "new"
        assert os.listdir(box.workspace / "out" / "deep") == ["file"]


def test_a_hostile_workspace_does_not_lead_masks_astray(hold: Hold) -> None:
    """Links to the host's files, loops, odd names and pipes where something is to be hidden or made writable."""

    def fill(workspace: Path) -> None:
        (workspace / "to-etc").symlink_to("/etc")
        (workspace / "loop").symlink_to("loop")
        (workspace / "up").symlink_to("../../../..")
        (workspace / "secret").symlink_to("/usr/bin/python3")
        (workspace / "odd\n\udce9").mkdir()
        (workspace / "odd\n\udce9" / "x.key").write_text("canary")
        os.mkfifo(workspace / "pipe.key")
        (workspace / "file").write_text("")

    with hold(
        fill,
        hidden=[
            "/workspace/**/*.key",
            "/workspace/secret",
            "/workspace/loop/x",
            "/workspace/up/**/y",
            "/workspace/file/x",
        ],
        writable=[
            "/workspace/to-etc/**",
            "/workspace/loop/**",
            "/workspace/up/etc/**",
            "/workspace/file/x/**",
            "/workspace/ok/**",
        ],
    ) as box:
        assert box.run("touch ok/x && echo fine; python3 -c 'print(1)'")["stdout"] == "fine\n1\n"
        assert box.run("cat */x.key pipe.key secret")["stdout"] == ""
        assert box.run("touch to-etc/x up/x loop file")["exit_code"] != 0


DESCEND = """
import os
for _ in range(20):
    os.chdir("n" * 250)
    print(os.listdir()) if "key" in os.listdir() else None
print(open(".env").read())
"""


def test_a_hidden_file_deeper_than_any_path(hold: Hold) -> None:
    """What a rule hides lies where no path reaches: the sandbox starts, and what cannot be covered is out of reach."""

    def fill(workspace: Path) -> None:
        here = os.open(workspace, os.O_RDONLY)
        for _ in range(20):
            os.mkdir("n" * 250, dir_fd=here)
            below = os.open("n" * 250, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        with open(os.open(".env", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=here), "w") as file:
            file.write("canary")
        os.close(here)
        (workspace / "file").write_text("fine")

    with hold(fill, hidden=["/workspace/**/.env"], readonly=["/workspace/**/kept"]) as box:
        assert box.run("cat file")["stdout"] == "fine"
        done = box.run(["python3", "-c", DESCEND])
        assert done["stdout"] == "" and "Permission denied" in done["stderr"]


def test_thousands_of_masks(hold: Hold) -> None:
    names = sorted(name for name in os.listdir("/usr/bin") if name not in {"env", "sh", "dash"})
    chosen = ["whoami", *names, *(f"absent-{number}" for number in range(2000))][:2000]
    with hold(programs=chosen, refusal={name: f"no {name}".ljust(300, ".") for name in chosen}) as box:
        done = box.run(["whoami"])
        assert done["exit_code"] == 126
        assert done["stderr"].startswith("no whoami..")
        assert box.run("echo the shell works")["stdout"] == "the shell works\n"
