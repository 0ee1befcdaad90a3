"""Makes most calls of E2B's Python SDK. Prints a JSON line for each: the call, and why it failed. Runs with the SDK alone."""

import io
import json
import sys
import time
import urllib.request

from e2b import PtySize, Secret, Template, Volume
from e2b_code_interpreter import Sandbox

failed = 0


def tell(call, check):
    global failed
    try:
        why = None if (found := check()) is True else f"it returned {found!r}"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    failed += why is not None
    print(json.dumps({"call": call, "failed": why}), flush=True)


def refused(act, *words):
    try:
        act()
    except Exception as error:
        return all(word in str(error) for word in words) or str(error)
    return "it was not refused"


def fetched(url, data=None):
    return urllib.request.urlopen(urllib.request.Request(url, data), timeout=20).read()


box = Sandbox.create(metadata={"made-by": "calls"}, envs={"GIVEN": "by create"}, timeout=120)
tell("Sandbox.create", lambda: box.sandbox_id.isalnum() and box.commands.run("echo $GIVEN").stdout == "by create\n")


def run():
    seen = []
    result = box.commands.run(
        "pwd; echo $HOME $A; echo e >&2", envs={"A": "b"}, on_stdout=seen.append, user="user", timeout=20
    )
    assert result.stdout == "/home/user\n/home/user b\n" and result.stderr == "e\n", result
    assert "".join(seen) == result.stdout
    assert box.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    assert refused(lambda: box.commands.run("exit 3"), "3") is True
    assert refused(lambda: box.commands.run("true", user="root"), "root", "template") is True
    return refused(lambda: box.commands.run("sleep 20", timeout=0.5), "timed out")


def background():
    handle = box.commands.run("for i in 1 2 3; do echo $i; sleep 0.1; done", background=True)
    return handle.wait().stdout == "1\n2\n3\n"


def typed(call):
    handle = box.commands.run("cat; echo done", background=True, stdin=True)
    assert handle.pid in [each.pid for each in box.commands.list()]
    box.commands.send_stdin(handle.pid, "typed\n")
    box.commands.close_stdin(handle.pid)
    return handle.wait().stdout == "typed\ndone\n"


def connect():
    handle = box.commands.run("echo early; sleep 0.3; echo late", background=True)
    handle.disconnect()
    return box.commands.connect(handle.pid).wait().stdout == "early\nlate\n"


def kill():
    handle = box.commands.run("sleep 100", background=True)
    assert box.commands.kill(handle.pid) is True
    assert refused(handle.wait, "-1") is True
    return box.commands.kill(handle.pid) is False and box.commands.kill(5) is False


tell("commands.run", run)
tell("commands.run(background)", background)
for name in ("commands.list", "commands.send_stdin", "commands.close_stdin"):
    tell(name, lambda name=name: typed(name))
tell("commands.connect", connect)
tell("commands.kill", kill)


def terminal():
    pty = box.pty.create(PtySize(rows=24, cols=80), timeout=20)
    box.pty.resize(pty.pid, PtySize(rows=30, cols=100))
    box.pty.send_stdin(pty.pid, b"stty size; echo $((40+2)); exit\n")
    shown = b"".join(data for _, _, data in pty if data)
    return (b"30 100" in shown and b"\r\n42" in shown) or shown


tell("pty.create", terminal)
tell("pty.resize", terminal)

# files
files = box.files
text = "línea\n"


def write():
    info = files.write("notes/a.txt", text)
    return info.path == "/home/user/notes/a.txt" and box.commands.run("cat notes/a.txt").stdout == text


def info():
    entry = files.get_info("/home/user/notes/a.txt")
    return (entry.size, entry.permissions, entry.type.value) == (len(text.encode()), "-rw-r--r--", "file") or entry


def remove():
    files.remove("notes/b.txt")
    return files.exists("notes/b.txt") is False and refused(lambda: files.read("notes/b.txt"), "no")


def watch():
    handle = files.watch_dir("notes", recursive=True)
    files.write("notes/deep/new.txt", "x")
    found, until = [], time.monotonic() + 20
    while "deep" not in {each.name for each in found} and time.monotonic() < until:
        found += handle.get_new_events()
    handle.stop()
    return {each.type.value for each in found} >= {"create"} or found


tell("files.write", write)
tell("files.read", lambda: files.read("notes/a.txt") == text and files.read("notes/a.txt", "bytes") == text.encode())
tell("files.exists", lambda: files.exists("notes") is True and files.exists("nothing") is False)
tell("files.get_info", info)
tell("files.rename", lambda: files.rename("notes/a.txt", "notes/b.txt").name == "b.txt")
tell("files.remove", remove)
tell("files.make_dir", lambda: files.make_dir("made/here") is True and files.make_dir("made/here") is False)
tell(
    "files.write_files", lambda: len(files.write_files([{"path": f"many/{i}", "data": str(i)} for i in range(5)])) == 5
)
tell("files.list", lambda: sorted(each.name for each in files.list("many")) == list("01234"))
tell("files.write(gzip)", lambda: files.write("zip.txt", "z" * 9999, gzip=True) and files.read("zip.txt") == "z" * 9999)
large = bytes(range(256)) * 8000
tell(
    "files.read(stream)",
    lambda: files.write("large", io.BytesIO(large)) and b"".join(files.read("large", "stream")) == large,
)
tell("files.write(metadata)", lambda: refused(lambda: files.write("m", "x", metadata={"a": "b"}), "metadata"))
tell("files.watch_dir", watch)
tell("sandbox.download_url", lambda: fetched(box.download_url("zip.txt", use_signature_expiration=60)) == b"z" * 9999)


def upload():
    form = b'--B\r\nContent-Disposition: form-data; name="file"; filename="up.txt"\r\n\r\nsent\r\n--B--\r\n'
    request = urllib.request.Request(box.upload_url("up.txt"), form)
    request.add_header("content-type", "multipart/form-data; boundary=B")
    urllib.request.urlopen(request, timeout=20).read()
    wrong = box.download_url("up.txt").replace("signature=v1_", "signature=v1_x")
    return files.read("up.txt") == "sent" and refused(lambda: fetched(wrong), "401")


tell("sandbox.upload_url", upload)


# code
def code():
    seen = []
    assert box.run_code("x = 20\nprint('said')", on_stdout=lambda line: seen.append(line.line)).logs.stdout == [
        "said\n"
    ]
    assert seen == ["said\n"]
    rich = "class R:\n def _repr_html_(self): return '<b>'\n def _repr_png_(self): return b'p'\ndisplay(R())\nx + 1"
    found = box.run_code(rich, envs={"E": "1"})
    assert found.results[0].formats() == ["text", "html", "png"], found.results[0].formats()
    assert box.run_code("1/0").error.name == "ZeroDivisionError"
    return found.text == "21" or found


tell("run_code", code)


def bash():
    box.run_code("here=1; cd /tmp", language="bash")
    found = box.run_code("echo $here; pwd; exit 2", language="bash")
    return ("".join(found.logs.stdout) == "1\n/tmp\n" and found.error.value == "exit status 2") or found


def javascript():
    if "node" not in box.commands.run("command -v node || echo none").stdout:
        return box.run_code("1", language="javascript").error.value.startswith("there is no Node.js")
    box.run_code("const kept = 6", language="javascript")
    found = box.run_code("console.log('js'); kept * 7", language="js")
    return (found.text, found.logs.stdout) == ("42", ["js\n"]) or found


tell("run_code(bash)", bash)
tell("run_code(javascript)", javascript)
tell("run_code(r)", lambda: refused(lambda: box.run_code("1", language="r"), "'r'", "python"))
context = box.create_code_context(cwd="/home/user/many")
tell("create_code_context", lambda: box.run_code("import os; os.path.exists('4')", context=context).text == "True")
tell("list_code_contexts", lambda: context.id in [each.id for each in box.list_code_contexts()])
tell("restart_code_context", lambda: box.restart_code_context(context) is None)
box.remove_code_context(context)
tell("remove_code_context", lambda: refused(lambda: box.run_code("1", context=context), "not found"))

# sandboxes
tell(
    "sandbox.get_info",
    lambda: box.get_info().metadata == {"made-by": "calls"} and box.get_info().state.value == "running",
)
tell("sandbox.is_running", lambda: box.is_running() is True)


def listed():
    from e2b import SandboxQuery

    page = Sandbox.list(query=SandboxQuery(metadata={"made-by": "calls"}))
    assert [each.sandbox_id for each in page.next_items()] == [box.sandbox_id]
    pages = Sandbox.list(limit=1)
    found = pages.next_items()
    while pages.has_next:
        found += pages.next_items()
    return box.sandbox_id in [each.sandbox_id for each in found]


tell("Sandbox.list", listed)


def timeout():
    box.set_timeout(1000)
    return 900 < (box.get_info().end_at.timestamp() - time.time()) < 1001


tell("sandbox.set_timeout", timeout)
tell("sandbox.get_metrics", lambda: box.get_metrics()[0].cpu_count >= 1)
snapshot = box.create_snapshot()


def from_snapshot():
    twin = Sandbox.create(snapshot.snapshot_id)
    kept = twin.files.read("many/3")
    return twin.kill() and kept == "3"


tell("sandbox.create_snapshot", from_snapshot)
tell(
    "sandbox.list_snapshots", lambda: snapshot.snapshot_id in [e.snapshot_id for e in box.list_snapshots().next_items()]
)
tell("Sandbox.delete_snapshot", lambda: Sandbox.delete_snapshot(snapshot.snapshot_id) is True)


def fork():
    [twin] = box.fork()
    twin.files.write("many/3", "changed")
    return twin.kill() and files.read("many/3") == "3"


tell("sandbox.fork", fork)
tell(
    "sandbox.update_network",
    lambda: box.update_network({"allow_out": ["example.org"], "deny_out": ["0.0.0.0/0"]}) is None,
)


def pause():
    box.pause()
    return box.is_running() is False and refused(lambda: box.commands.run("true"), "was not found")


tell("sandbox.pause", pause)
tell("Sandbox.connect", lambda: Sandbox.connect(box.sandbox_id).files.read("many/4") == "4")
tell("Sandbox.create(mcp)", lambda: refused(lambda: Sandbox.create(mcp={"time": {}}), "mcp"))
tell(
    "Sandbox.create(volume_mounts)",
    lambda: refused(lambda: Sandbox.create(volume_mounts={"/data": "a"}), "volumeMounts"),
)
tell("Volume.create", lambda: refused(lambda: Volume.create("a"), "workspace"))
tell("Secret.create", lambda: refused(lambda: Secret.create("NAME", "value"), "secret"))
tell("Template.build", lambda: refused(lambda: Template.build(Template().from_image("x"), "name"), "image build"))
tell("sandbox.kill", lambda: box.kill() is True and box.kill() is False and box.is_running() is False)
sys.exit(bool(failed))
