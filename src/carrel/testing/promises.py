"""The checks. The docstring of each is the promise that it checks."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable

from carrel.errors import CarrelError
from carrel.models import CommandResult
from carrel.providers import Capability, Masks
from carrel.providers.base import FolderMounts, HostMount, RootImage
from carrel.testing.checks import check
from carrel.testing.harness import Harness


async def _until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


def _said(result: CommandResult, text: str) -> None:
    assert result.exit_code == 0, f"exit {result.exit_code}, signal {result.signal}: {result.stderr}"
    assert result.stdout == text, f"{result.stdout!r} is not {text!r}"


# the life of a sandbox


@check()
async def describes_itself(harness: Harness) -> None:
    """A provider has a name and an isolation level, and the weakest level is called unsafe."""
    provider = harness.provider
    assert provider.name and provider.name == provider.name.strip().lower()
    assert 0 <= provider.isolation_level <= 3
    assert provider.unsafe == (provider.isolation_level == 0), "level 0 is unsafe, and only level 0"
    assert provider.status().capabilities == sorted(provider.capabilities())


@check()
async def starts_and_is_alive(harness: Harness) -> None:
    """A started sandbox is alive and its supervisor answers at once."""
    async with harness.sandbox() as box:
        assert await harness.provider.alive(box.handle)
        assert (await box.connection.request_json("GET", "/health"))["status"] == "ok"


@check()
async def removal_ends_it(harness: Harness) -> None:
    """After removal the sandbox is not alive and its supervisor cannot be reached."""
    async with harness.sandbox() as box:
        await harness.provider.remove(box.handle)
        assert not await harness.provider.alive(box.handle)
        try:
            await box.connection.request_json("GET", "/health", deadline=5)
        except CarrelError:
            return
        raise AssertionError("the supervisor still answers")


@check()
async def removal_may_be_repeated(harness: Harness) -> None:
    """Removing a sandbox twice is fine, and so is removing one that died by itself."""
    async with harness.sandbox() as box:
        await harness.provider.remove(box.handle)
        await harness.provider.remove(box.handle)
        later = harness.make_provider()
        try:
            await later.remove(box.handle)
        finally:
            await later.close()


@check()
async def handle_is_json(harness: Harness) -> None:
    """A handle is a flat JSON object that names its provider, its id and its socket."""
    async with harness.sandbox() as box:
        assert json.loads(json.dumps(box.handle)) == box.handle
        assert {"provider", "id", "socket"} <= box.handle.keys()
        assert box.handle["provider"] == harness.provider.name
        assert all(value is None or isinstance(value, str | int | float | bool) for value in box.handle.values())


@check(Capability.SURVIVES_RESTART)
async def found_by_another_provider_object(harness: Harness) -> None:
    """A provider object that is created later can find, use and remove a sandbox by its handle alone."""
    async with harness.sandbox() as box:
        later = harness.make_provider()
        try:
            handle = json.loads(json.dumps(box.handle))
            assert await later.alive(handle)
            _said(await box.run("echo found"), "found\n")
            await later.remove(handle)
            assert not await harness.provider.alive(box.handle)
        finally:
            await later.close()


@check()
async def stranger_is_not_alive(harness: Harness) -> None:
    """The handle of a sandbox that never existed is not alive, and removing it does nothing."""
    async with harness.sandbox() as box:
        strange = {
            **box.handle,
            "id": "never-was",
            "pid": 0x3FFFFF,
            "start_time": 1,
            "socket": f"{box.handle['socket']}x",
        }
        assert not await harness.provider.alive(strange)
        await harness.provider.remove(strange)
        assert await harness.provider.alive(box.handle), "removing a stranger removed another"


@check()
async def failed_start_leaves_nothing(harness: Harness) -> None:
    """A start that fails raises an error of carrel and leaves no sandbox."""
    workspace = harness.workspace()
    os.rmdir(workspace)
    try:
        handle = await harness.provider.start(harness.launch(workspace))
    except CarrelError as error:
        assert error.status >= 500, "a platform failure is not the caller's"
        return
    await harness.provider.remove(handle)
    raise AssertionError("a sandbox started without a workspace")


@check()
async def workspace_outlives_the_sandbox(harness: Harness) -> None:
    """Files stay when a sandbox is removed, and the next one on the same workspace has them."""
    workspace = harness.workspace()
    async with harness.sandbox(workspace) as box:
        await box.run("echo kept > file; mkdir -p a/b; chmod 700 a; echo deep > a/b/c")
    async with harness.sandbox(workspace) as box:
        _said(await box.run("cat file a/b/c; echo more >> file"), "kept\ndeep\n")
        assert await box.read("file") == b"kept\nmore\n"


@check()
async def many_at_once(harness: Harness) -> None:
    """Sandboxes started at the same time all work, and none sees the others' files."""

    async def one(number: int) -> None:
        async with harness.sandbox() as box:
            await box.write("mine", str(number).encode())
            _said(await box.run("cat mine; ls -A | grep -v '^\\.' | wc -l"), f"{number}1\n")

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(one(number))


# commands


@check()
async def command_result(harness: Harness) -> None:
    """A command's two streams and its exit code come back; a failing command is a result, not an error."""
    async with harness.sandbox() as box:
        result = await box.run("echo out; echo err >&2; exit 7")
        assert (result.stdout, result.stderr, result.exit_code, result.signal) == ("out\n", "err\n", 7, None)
        assert not result.timed_out and not result.truncated


@check()
async def command_not_found(harness: Harness) -> None:
    """A program that does not exist gives exit code 127, as in a shell."""
    async with harness.sandbox() as box:
        assert (await box.run(["no-such-program"])).exit_code == 127


@check()
async def command_ended_by_a_signal(harness: Harness) -> None:
    """The result of a command that was killed by a signal has the signal and no exit code."""
    async with harness.sandbox() as box:
        result = await box.run("kill -SEGV $$")
        assert result.exit_code is None and result.signal == "SIGSEGV", result


@check()
async def command_environment(harness: Harness) -> None:
    """A command gets the sandbox's environment and its own, nothing of the host's, and starts in the workspace."""
    os.environ["CARREL_CONFORMANCE"] = "of the host"
    try:
        async with harness.sandbox(env={"OF_THE_SANDBOX": "one"}) as box:
            await box.write("here", b"")
            result = await box.run(
                "ls here; echo $OF_THE_SANDBOX $OF_THE_COMMAND $CARREL_CONFORMANCE",
                env={"OF_THE_COMMAND": "two"},
            )
            _said(result, "here\none two\n")
    finally:
        del os.environ["CARREL_CONFORMANCE"]


@check()
async def command_input(harness: Harness) -> None:
    """A command gets its whole standard input."""
    async with harness.sandbox() as box:
        _said(await box.run("wc -c", stdin="x" * 300_000), "300000\n")


@check()
async def binary_output(harness: Harness) -> None:
    """Output that is not text comes back byte for byte."""
    async with harness.sandbox() as box:
        result = await box.run(r"printf '\000\377\200ok'")
        assert result.stdout_bytes == b"\x00\xff\x80ok"


@check()
async def output_cap(harness: Harness) -> None:
    """Output beyond the limit is dropped, counted and reported, and does not block the command."""
    async with harness.sandbox() as box:
        result = await box.run("head -c 5000000 /dev/zero", output_limit=1000)
        assert result.truncated and len(result.stdout_bytes) == 1000
        assert result.dropped_bytes == 5_000_000 - 1000 and result.exit_code == 0


@check()
async def deadline_ends_the_tree(harness: Harness) -> None:
    """At its deadline a command is killed with all its processes, whatever they ignore; its output is kept."""
    async with harness.sandbox() as box:
        script = "trap '' TERM HUP INT; echo started; setsid sh -c 'while :; do echo >> beat; sleep 0.02; done' & wait"
        result = await box.run(script, timeout=1)
        assert result.timed_out and result.stdout == "started\n", result

        async def quiet() -> bool:
            before = await box.read("beat")
            await asyncio.sleep(0.15)
            return await box.read("beat") == before

        await _until(quiet, "a process of the command still writes")


@check()
async def background_and_signal(harness: Harness) -> None:
    """A command can run in the background and take a signal; its result is kept for later."""
    async with harness.sandbox() as box:
        info = await box.start("trap 'echo told; exit 3' USR1; echo > ready; while :; do sleep 0.02; done")

        async def ready() -> bool:
            return (await box.run("test -e ready")).exit_code == 0

        await _until(ready, "the command did not start")
        await box.connection.request_json("POST", f"/commands/{info.id}/signal", {"signal": "USR1", "tree": False})
        result = await box.result(info.id)
        assert (result.exit_code, result.stdout) == (3, "told\n"), result


@check()
async def commands_side_by_side(harness: Harness) -> None:
    """Commands of one sandbox run at the same time."""
    async with harness.sandbox() as box:
        waiting = asyncio.gather(*(box.run("until test -e go; do sleep 0.02; done; echo gone") for _ in range(4)))
        await box.write("go", b"")
        for result in await waiting:
            _said(result, "gone\n")


@check(Capability.TERMINAL)
async def terminal(harness: Harness) -> None:
    """A program in a terminal has a real one, of the requested size."""
    async with harness.sandbox() as box:
        info = await box.start(
            "test -t 0 && test -t 1 && stty size; read line; echo got $line", terminal={"rows": 33, "cols": 77}
        )
        await box.connection.request("POST", f"/commands/{info.id}/stdin", b"typed\n")
        shown = (await box.result(info.id)).stdout
        assert "33 77" in shown and "got typed" in shown, shown


# files


@check()
async def files_round_trip(harness: Harness) -> None:
    """Files that the API writes can be read back unchanged, and commands see the same files."""
    data = bytes(range(256)) * 4096
    async with harness.sandbox() as box:
        await box.write("a/b/data.bin", data)
        assert await box.read("a/b/data.bin") == data
        _said(await box.run("wc -c < a/b/data.bin; test -w a/b/data.bin && echo mine"), f"{len(data)}\nmine\n")


@check()
async def files_stay_inside(harness: Harness) -> None:
    """A path that leaves the workspace is refused: by `..`, as an absolute path, or through a link."""
    async with harness.sandbox() as box:
        await box.run("ln -s /etc link")
        for path in ("../x", "/etc/hostname", "link/hostname", "a/../../x"):
            try:
                await box.read(path)
            except CarrelError as error:
                assert error.status in {400, 404}, f"{path}: {error}"
            else:
                raise AssertionError(f"{path} was read")


# isolation and limits


@check(Capability.FILE_ISOLATION)
async def files_are_isolated(harness: Harness) -> None:
    """A file of the host outside the workspace cannot be read, whatever its permissions."""
    neighbour = harness.workspace()
    os.chmod(neighbour, 0o755)  # noqa: S103 - open on purpose
    path = os.path.join(neighbour, "open-to-all")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    os.write(descriptor, b"of the host")
    os.close(descriptor)
    async with harness.sandbox() as box:
        result = await box.run(["cat", path])
        assert result.exit_code != 0 and "of the host" not in result.stdout


@check(Capability.PROCESS_ISOLATION)
async def processes_are_isolated(harness: Harness) -> None:
    """Processes of the host and of other sandboxes are not visible."""
    async with harness.sandbox() as one, harness.sandbox() as other:
        await one.start(["sleep", "61.5"])
        result = await other.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "61.5" not in result.stdout and "python" not in result.stdout, result.stdout


@check(Capability.PROCESS_ISOLATION)
async def removal_ends_daemons(harness: Harness) -> None:
    """A daemon that left its session and its parent ends with the sandbox."""
    workspace = harness.workspace()
    async with harness.sandbox(workspace) as box:
        await box.run("setsid sh -c 'while :; do echo >> beat; sleep 0.02; done' >/dev/null 2>&1 &")

        async def beats() -> bool:
            return os.path.exists(os.path.join(workspace, "beat"))

        await _until(beats, "the daemon does not run")
    async with harness.sandbox(workspace) as box:
        before = await box.read("beat")
        await asyncio.sleep(0.2)
        assert await box.read("beat") == before


@check(Capability.LIMIT_PROCESSES)
async def processes_are_limited(harness: Harness) -> None:
    """The number of processes is limited, and the sandbox works again after they have ended."""
    async with harness.sandbox(processes=24) as box:
        result = await box.run(
            "for i in $(seq 100); do sleep 30 & done 2>/dev/null; ls -d /proc/[0-9]* | wc -l", timeout=5
        )
        counted = [int(word) for word in result.stdout.split()]
        assert result.exit_code != 0 or all(count <= 32 for count in counted), result
        for command in (await box.connection.request_json("GET", "/commands"))["items"]:
            await box.connection.request("DELETE", f"/commands/{command['id']}")

        async def works() -> bool:
            return (await box.run("/bin/true")).exit_code == 0

        await _until(works, "the sandbox does not recover")


@check(Capability.LIMIT_MEMORY)
async def memory_is_limited(harness: Harness) -> None:
    """A program that exceeds the memory limit is killed, and the sandbox keeps running."""
    async with harness.sandbox(memory_mb=96) as box:
        result = await box.run("head -c 300M /dev/zero | tail -n 1 | wc -c")
        assert result.stdout.strip() != str(300 * 1024 * 1024), "it was held in memory all the same"
        _said(await box.run("echo fine"), "fine\n")


@check()
async def resources_are_counted(harness: Harness) -> None:
    """If the provider says what a sandbox uses, work adds to its processor time, and memory to its peak."""
    memory_mb = 256 if Capability.LIMIT_MEMORY in harness.provider.capabilities() else None
    async with harness.sandbox(memory_mb=memory_mb) as box:
        handles, id = [box.handle], str(box.handle["id"])
        before = (await harness.provider.resources(handles)).get(id)
        if before is None:
            return
        await box.run(["python3", "-c", "import time\nx = bytearray(64 << 20)\nwhile time.process_time() < 0.5: pass"])

        async def told() -> bool:
            used = (await harness.provider.resources(handles))[id]
            assert used.memory_bytes is None or used.memory_bytes <= (used.memory_peak_bytes or used.memory_bytes)
            worked = used.cpu_s is None or used.cpu_s - (before.cpu_s or 0.0) >= 0.4
            return worked and (used.memory_peak_bytes is None or used.memory_peak_bytes > 64 << 20)

        await _until(told, "the work of a command is not counted")
    assert id not in await harness.provider.resources(handles), "it has ended"


@check(Capability.LIMIT_DISK)
async def file_size_is_limited(harness: Harness) -> None:
    """No single file can exceed the disk limit; the control plane checks the sum."""
    async with harness.sandbox(disk_mb=4) as box:
        await box.run("head -c 20M /dev/zero > big")
        assert os.path.getsize(os.path.join(box.workspace, "big")) <= 4 * 1024 * 1024


_GAPS = """
import time
lost, last = 0.0, time.monotonic()
end = last + 2
while last < end:
    now = time.monotonic()
    if now - last > 0.005:
        lost += now - last
    last = now
print(lost)
"""


@check(Capability.LIMIT_CPUS)
async def processors_are_limited(harness: Harness) -> None:
    """A limit of half a processor is enforced."""
    async with harness.sandbox(cpus=0.5) as box:
        # The kernel of a sandbox may count the time that a process waits for a processor; a process notices the gaps.
        result = await box.run(["python3", "-c", _GAPS])
        assert float(result.stdout) > 0.4, f"a process did not run for {result.stdout.strip()} s of 2 s"


@check(Capability.MASKS)
async def masks_hold(harness: Harness) -> None:
    """A masked program prints the refusal and exits with 126, however it is called; hidden files cannot be read."""
    masks = Masks(("base64",), ("/etc/hosts",), ("/workspace/out/**",), {"base64": '{"code": "denied_by_policy"}'})
    async with harness.sandbox(masks=masks) as box:
        for command in ("base64 --version", "/usr/bin/base64 --version", "cp /usr/bin/base64 /tmp/b; /tmp/b --version"):
            result = await box.run(command)
            assert result.exit_code == 126 and not result.stdout, f"{command}: {result}"
            assert json.loads(result.stderr)["code"] == "denied_by_policy"
        assert (await box.run("cat /etc/hosts")).exit_code != 0
        assert (await box.run("touch here")).exit_code != 0
        _said(await box.run("echo kept > out/here; cat out/here"), "kept\n")


@check(Capability.MASKS)
async def readonly_paths_stay(harness: Harness) -> None:
    """Read-only paths and patterns cannot be written, moved or deleted; other paths can."""
    workspace = harness.workspace()
    kept = ("settings", "src/deep/a.lock", "docs/part/page")
    async with harness.sandbox(workspace) as box:
        for path in kept:
            await box.write(path, b"as it was")
    masks = Masks(readonly=("/workspace/settings", "/workspace/**/*.lock", "/workspace/docs/**"))
    async with harness.sandbox(workspace, masks=masks) as box:
        for path in kept:
            for attempt in ("echo x >> {0}", "rm -f {0}", "mv {0} moved", "cp /dev/null x && mv -f x {0}"):
                assert (await box.run(attempt.format(path))).exit_code != 0, attempt.format(path)
        for attempt in ("mv src other", "mv src/deep deep", "mv docs other", "touch docs/new"):
            assert (await box.run(attempt)).exit_code != 0, attempt
        for path in kept:
            assert await box.read(path) == b"as it was", path
        _said(await box.run("echo a > src/new; mv src/new src/deep/b; cat src/deep/b"), "a\n")


@check(Capability.SECRETS)
async def secrets_are_files(harness: Harness) -> None:
    """A secret is a file that the agent can read but not change; it is in no environment; the next set replaces it."""
    async with harness.sandbox() as box:
        for value in ("first-value", "second-value"):
            given = {"secrets": {"KEY": base64.b64encode(value.encode()).decode()}}
            await box.connection.request_json("PUT", "/secrets", given)
            _said(await box.run("cat /run/secrets/KEY"), value)
            assert value not in (await box.run("env; cat /proc/*/environ")).stdout
            assert (await box.run("echo more >> /run/secrets/KEY")).exit_code != 0
            assert (await box.run("rm -f /run/secrets/KEY")).exit_code != 0
        await box.connection.request_json("PUT", "/secrets", {"secrets": {}})
        assert (await box.run("cat /run/secrets/KEY")).exit_code != 0


@check(Capability.ENVIRONMENTS)
async def environments_are_shared(harness: Harness) -> None:
    """The environments are below one directory that can be entered, but neither listed nor written."""
    async with harness.sandbox() as box:
        _said(await box.run("test -d /envs && echo there"), "there\n")
        for attempt in ("ls /envs", "touch /envs/x", "mkdir /envs/x", "chmod 777 /envs"):
            assert (await box.run(attempt)).exit_code != 0, attempt


# folders


def _mount(source: str, target: str) -> HostMount:
    found = os.stat(source)
    return HostMount(source, target, (found.st_dev, found.st_ino))


@check(Capability.FOLDERS)
async def works_on_a_folder_in_place(harness: Harness) -> None:
    """A folder is the workspace, at its own path too; the home is kept; what is read-only cannot be written."""
    path, home, extra = (os.path.realpath(harness.workspace()) for _ in range(3))
    folder = FolderMounts(_mount(path, path), _mount(home, "/home/agent"), (_mount(extra, "/home/agent/extra"),))
    async with harness.sandbox(path, folder=folder) as box:
        _said(await box.run("pwd; touch here /workspace/there ~/kept; ls"), f"{path}\nhere\nthere\n")
        _said(
            await box.run("touch ~/extra/x 2>/dev/null || echo no; ls -A ..", cwd=path),
            f"no\n{os.path.basename(path)}\n",
        )
    assert sorted(os.listdir(path)) == ["here", "there"]
    assert sorted(os.listdir(home)) == ["extra", "kept"] and not os.listdir(extra)
    owners = {os.stat(os.path.join(path, name)).st_uid for name in ("here", "there")}
    assert owners == {os.stat(path).st_uid}, "files that are made in the folder belong to its owner"


@check(Capability.IMAGE_BUILDS)
async def root_can_be_changed(harness: Harness) -> None:
    """The root of a sandbox that builds an image can be changed; the changes are kept beside its files."""
    root = os.path.join(harness.images, f"check-{secrets.token_hex(6)}")
    os.makedirs(root, 0o755)
    found = os.stat(root)
    try:
        image = RootImage(root, (found.st_dev, found.st_ino), writable=True)
        async with harness.sandbox(image=image) as box:
            await box.write("made", b"text")
            assert sorted(os.listdir(box.workspace)) == ["files", "upper", "work"]
        assert os.listdir(root) == [], "the image was changed"
    finally:
        os.rmdir(root)


@check(Capability.IMAGES)
async def runs_from_an_empty_image(harness: Harness) -> None:
    """A sandbox needs nothing of its image: files work, and a command is told what the image lacks."""
    root = os.path.join(harness.images, f"check-{secrets.token_hex(6)}")
    os.makedirs(root, 0o755)
    found = os.stat(root)
    try:
        async with harness.sandbox(image=RootImage(root, (found.st_dev, found.st_ino))) as box:
            await box.write("made/file", b"text")
            assert await box.read("made/file") == b"text"
            result = await box.run("true")
            assert result.exit_code == 127 and "no shell" in result.stderr, result.stderr
        assert os.listdir(root) == [], "the image was changed"
    finally:
        os.rmdir(root)
