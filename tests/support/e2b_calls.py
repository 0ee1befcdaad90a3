"""The calls of E2B's SDKs and how carrel answers them. Tests show each of them; `docs/reference/e2b.md` is made from it.

No note: the call works as E2B documents it. `refused` calls fail with words that say what to use instead.
"""

from __future__ import annotations

from dataclasses import dataclass

PYTHON = ("e2b", "2.63.0"), ("e2b-code-interpreter", "2.11.5")
JAVASCRIPT = ("e2b", "2.51.0"), ("@e2b/code-interpreter", "2.8.0")


@dataclass(frozen=True)
class Call:
    """One call. `javascript` is its name there, or None if no test makes it there."""

    python: str
    javascript: str | None
    state: str = "works"
    note: str = ""


PARTLY, REFUSED = "partly", "refused"
CALLS = (
    Call("Sandbox.create", "Sandbox.create", PARTLY, "`allow_internet_access` is at most what the policy allows"),
    Call("Sandbox.connect", "Sandbox.connect"),
    Call("Sandbox.list", "Sandbox.list", PARTLY, "newest first; also contexts that were made without E2B's SDK"),
    Call("sandbox.get_info", "sandbox.getInfo"),
    Call("sandbox.is_running", "sandbox.isRunning"),
    Call("sandbox.set_timeout", "sandbox.setTimeout", PARTLY, "without `on_timeout` files are kept, see the how-to"),
    Call("sandbox.get_metrics", "sandbox.getMetrics", PARTLY, "present values, no history"),
    Call("sandbox.pause", "sandbox.pause", PARTLY, "files are kept; processes end"),
    Call("sandbox.kill", "sandbox.kill"),
    Call("sandbox.create_snapshot", "sandbox.createSnapshot", PARTLY, "files, no memory; no names"),
    Call("sandbox.list_snapshots", None),
    Call("Sandbox.delete_snapshot", None),
    Call("sandbox.fork", "sandbox.fork", PARTLY, "files; processes are not copied"),
    Call("sandbox.update_network", None, PARTLY, "as the context's policy: needs the scope `administer`"),
    Call("sandbox.download_url", "sandbox.downloadUrl"),
    Call("sandbox.upload_url", "sandbox.uploadUrl"),
    Call("commands.run", "commands.run", PARTLY, "one user: `user='root'` is refused"),
    Call("commands.run(background)", "commands.run(background)"),
    Call("commands.list", "commands.list"),
    Call("commands.connect", "commands.connect", note="kept output is replayed, which E2B does not do"),
    Call("commands.kill", "commands.kill"),
    Call("commands.send_stdin", "commands.sendStdin"),
    Call("commands.close_stdin", "commands.closeStdin"),
    Call("pty.create", "pty.create"),
    Call("pty.resize", "pty.resize"),
    Call("files.read", "files.read", PARTLY, "the workspace, which is `/home/user`; use commands for other places"),
    Call("files.read(stream)", None),
    Call("files.write", "files.write"),
    Call("files.write(gzip)", None),
    Call("files.write(metadata)", None, REFUSED),
    Call("files.write_files", "files.writeFiles"),
    Call("files.list", "files.list"),
    Call("files.exists", "files.exists"),
    Call("files.get_info", "files.getInfo"),
    Call("files.rename", "files.rename"),
    Call("files.remove", "files.remove"),
    Call("files.make_dir", "files.makeDir"),
    Call("files.watch_dir", "files.watchDir", PARTLY, "needs Python in the image"),
    Call("run_code", "runCode", PARTLY, "interactive charts (`Result.chart`) are not extracted"),
    Call("run_code(bash)", "runCode(bash)"),
    Call("run_code(javascript)", "runCode(javascript)", PARTLY, "where the image has Node.js"),
    Call("run_code(r)", None, REFUSED),
    Call("create_code_context", "createCodeContext"),
    Call("list_code_contexts", "listCodeContexts"),
    Call("restart_code_context", "restartCodeContext"),
    Call("remove_code_context", "removeCodeContext"),
    Call("Sandbox.create(mcp)", None, REFUSED),
    Call("Sandbox.create(volume_mounts)", None, REFUSED),
    Call("Template.build", None, REFUSED, "`carrel image build`; the image's name is then the template"),
    Call("Volume.create", None, REFUSED),
    Call("Secret.create", None, REFUSED),
)
