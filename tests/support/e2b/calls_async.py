"""Makes the frequent calls of E2B's asynchronous Python SDK; prints what fails."""

import asyncio

from e2b_code_interpreter import AsyncSandbox


async def main() -> None:
    box = await AsyncSandbox.create(timeout=120)
    seen = []
    result = await box.commands.run("echo a; sleep 0.2; echo b", on_stdout=seen.append)
    assert result.stdout == "a\nb\n" and len(seen) == 2, (result, seen)
    results = await asyncio.gather(*(box.commands.run(f"echo {i}") for i in range(10)))
    assert [each.stdout for each in results] == [f"{i}\n" for i in range(10)]
    handle = await box.commands.run("cat", background=True, stdin=True)
    await box.commands.send_stdin(handle.pid, "typed")
    await box.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout == "typed"

    await box.files.write("d/x", b"bytes")
    assert bytes(await box.files.read("d/x", "bytes")) == b"bytes"
    found, changed = [], asyncio.Event()

    def happened(event) -> None:
        found.append(event)
        changed.set()

    watching = await box.files.watch_dir("d", happened, include_entry=True)
    await box.files.write("d/new", "x")
    await asyncio.wait_for(changed.wait(), 20)
    await watching.stop()
    assert found[0].name == "new" and found[0].entry.size == 1, found

    assert (await box.run_code("import asyncio; await asyncio.sleep(0, 5)")).text == "5"
    pty_out = bytearray()
    pty = await box.pty.create(size=__import__("e2b").PtySize(24, 80), on_data=pty_out.extend)
    await box.pty.send_stdin(pty.pid, b"echo $((20+3)); exit\n")
    await pty.wait()
    assert b"23" in pty_out
    assert await box.kill()


asyncio.run(main())
