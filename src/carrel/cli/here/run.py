"""Runs a program on a folder with a server: starts the sandbox, passes the streams on, sums up.

Imports little, because `carrel here` must start quickly; see `wire`.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from carrel.cli.failures import note
from carrel.cli.here.questions import ApprovalQuestions
from carrel.cli.here.server import FolderServer, client_directory, found_or_started
from carrel.cli.here.setup import HereSetup, setup_for
from carrel.cli.here.streams import Attached, exit_code, has_terminal, terminal_size
from carrel.cli.here.tools import HOME, FoundTool, find_tool
from carrel.cli.here.waiting import explained
from carrel.cli.here.wire import LocalWire
from carrel.cli.here.words import TYPED, HereOptions
from carrel.errors import ApprovalNeeded, CarrelError, InvalidRequest, NotFound, NotRunning, ServerUnreachable

BROKEN_PIPE = 141
"""What a shell shows for a program whose reader has gone: 128 + SIGPIPE."""
PASSED_VARIABLES = (
    "TERM",
    "COLORTERM",
    "TERM_PROGRAM",
    "TERM_PROGRAM_VERSION",
    "NO_COLOR",
    "FORCE_COLOR",
    "CLICOLOR",
    "LANG",
    "LANGUAGE",
    "TZ",
    "EDITOR",
    "VISUAL",
    "PAGER",
    "CI",
)
"""Variables of the user that a program gets. Others may hold secrets, so the user names them with `--env`."""


def prepare(options: HereOptions, folder: str) -> Callable[[FolderServer], int]:
    """Read the setup of the program; return the function that runs it with a server and returns its exit code."""
    began = time.time()
    command = list(options.command) or [_shell() if options.image is None else "/bin/sh"]
    agent = _agent_name(options, command)
    context = context_id(folder, agent)
    setup = setup_for(options, folder, command, context)
    return lambda server: _run(server, options, setup, folder, context, began)


def _run(server: FolderServer, options: HereOptions, setup: HereSetup, folder: str, context: str, began: float) -> int:
    with _using(context) as alone:
        wire = LocalWire(server.url, server.agent_token or server.token)
        for sentence in setup.notes:
            note(f"carrel: {sentence}")
        _apply(setup, LocalWire(server.url, server.token), context)
        sandbox, request = _prepare(options, setup, wire, folder, context)
        if sandbox.get("notice"):
            note(f"carrel: {sandbox['notice']}")
        path = f"/v1/sandboxes/{sandbox['id']}"
        asks = "terminal" in request and not options.no_questions
        decisions = LocalWire(server.url, server.token)
        questions = ApprovalQuestions(decisions, context, asks=asks, answer_with=_carrel())
        try:
            code = exit_code(_attach(wire, decisions, path, request, questions))
        except BrokenPipeError:
            code = BROKEN_PIPE
        finally:
            questions.close()
            if alone():
                with explained("ending; the changes of the folder are recorded", after_output=True):
                    _stop(server, wire, path)
        _summarise(options, server, context, began, code, questions)
        return code


def _stop(server: FolderServer, wire: LocalWire, path: str) -> None:
    """Stop the sandbox. If the server was killed, another one is started that finds the sandbox and stops it."""
    with suppress(NotFound, NotRunning):
        try:
            wire.request("POST", f"{path}/stop", timeout=None)
        except ServerUnreachable:
            if server.directory is None:
                raise
            found = found_or_started(server.directory)
            LocalWire(found.url, found.token).request("POST", f"{path}/stop", timeout=None)


def _attach(
    wire: LocalWire, decisions: LocalWire, path: str, request: dict[str, Any], questions: ApprovalQuestions
) -> dict[str, Any]:
    """Run the program until it ends. If a person has to allow the command itself, the user has: by typing it."""
    try:
        return Attached(wire, path, request, questions).run()
    except ApprovalNeeded as error:
        if error.approval is None:
            raise
        decisions.request("POST", f"/v1/approvals/{error.approval}/decide", {"approve": True, "message": TYPED})
        return Attached(wire, path, request, questions).run(error.approval)


def context_id(folder: str, agent: str) -> str:
    """Return the context of a folder and an agent. The folder's name is only for people; the hash tells it apart."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(folder)).strip("-.")[:40] or "folder"
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
    return f"here-{name}-{digest}-{agent}"


def _agent_name(options: HereOptions, command: list[str]) -> str:
    name = options.name or os.path.basename(command[0])
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40]
    if not plain or (options.name is not None and plain != options.name):
        raise InvalidRequest(
            f"'{name}' cannot name an agent",
            field="--name",
            hint="use up to 40 letters, digits, '.', '_' and '-'",
        )
    if options.image is None:
        return plain
    return f"{plain}-{hashlib.sha256(options.image.encode()).hexdigest()[:8]}"  # a session keeps its image


def _shell() -> str:
    wanted = os.environ.get("SHELL", "")
    return wanted if wanted.startswith(("/bin/", "/usr/")) and os.access(wanted, os.X_OK) else "/bin/sh"


@contextmanager
def _using(context: str) -> Iterator[Any]:
    """Hold a lock as a user of the context; yield a function that says whether nobody else is one.

    So the last of several programs in one sandbox stops it. The kernel releases the lock of a process that is killed.
    """
    directory = os.path.join(client_directory(), "contexts")
    os.makedirs(directory, 0o700, exist_ok=True)
    descriptor = os.open(os.path.join(directory, context), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def alone() -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        if not alone():
            note("carrel: the same agent runs in this folder already; both share one sandbox. --name starts another")
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield alone
    finally:
        os.close(descriptor)


def _apply(setup: HereSetup, wire: LocalWire, context: str) -> None:
    """Give the context its policy and its secrets. Rules that a person has added for the context since then stay."""
    base = f"/v1/contexts/{context}"
    place = os.path.join(client_directory(), "setups", f"{context}.applied")
    try:
        with open(place, "rb") as file:
            last = json.load(file)
    except (OSError, ValueError):
        last = {}
    same = (setup.settings, setup.sources) == (last.get("settings"), last.get("sources"))
    current = wire.request("GET", f"{base}/policy", unless=last.get("version") if same else None)
    if current is not None:
        known = _rules(last.get("settings"))
        added = [rule for rule in _rules(current["settings"]) if known and rule not in known]
        settings = json.loads(json.dumps(setup.settings))
        settings["permissions"]["allow"] += added
        put = wire.request("PUT", f"{base}/policy", {"settings": settings, "sources": setup.sources})
        _write(place, {"version": put["version"], "settings": setup.settings, "sources": setup.sources})
    for name, value in setup.secrets.items():
        body = {"value_base64": base64.b64encode(value.encode()).decode()}
        wire.request("PUT", f"{base}/secrets/{name}", body)
    if setup.git_logins:
        import threading

        threading.Thread(target=_put_logins, args=(setup, wire, base), daemon=True).start()


def _rules(settings: Any) -> list[str]:
    return [*settings["permissions"]["allow"]] if settings else []


def _put_logins(setup: HereSetup, wire: LocalWire, base: str) -> None:
    """Ask the user's git for credentials, which may take a while, and give them to the server."""
    from carrel.profiles.files import ask_credential_helper
    from carrel.profiles.resolve import GitLogin

    for login in setup.git_logins:
        found = ask_credential_helper(GitLogin(*login))
        with suppress(CarrelError):
            if found is not None:
                body = {"value_base64": base64.b64encode(found.encode()).decode()}
                wire.request("PUT", f"{base}/secrets/{login[0]}", body)


def _write(path: str, value: object) -> None:
    from carrel.primitives.atomic import write_file

    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    write_file(path, json.dumps(value).encode())


def _prepare(
    options: HereOptions, setup: HereSetup, wire: LocalWire, folder: str, context: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Start the sandbox; return its info and the request for the program."""
    home = os.path.expanduser("~")
    command = setup.command
    if options.image is None:
        tool = find_tool(command[0], folder, os.environ.get("PATH", ""), home)
    else:
        tool = FoundTool(command[0], {}, None)
    env = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    env |= {name: value for name, value in os.environ.items() if name.startswith("LC_")}
    if tool.path is not None:
        env["PATH"] = tool.path
    shown = dict(tool.host_paths) | _texts(setup, context)
    for source, target, optional in setup.shown:
        if os.path.exists(source) or not optional:
            shown[target] = source
    for given in options.host_files:
        source = os.path.abspath(os.path.expanduser(given))
        if not os.path.exists(source):
            raise InvalidRequest(f"there is no file {source}", field="--host-file")
        shown[_place_of(source, home)] = source
    env |= setup.env | _named_variables(options)
    body: dict[str, Any] = {
        "context_id": context,
        "workspace_path": folder,
        "host_paths": [{"source": os.path.realpath(source), "target": target} for target, source in shown.items()],
        "network": setup.network,
        "limits": _limits(),
        "labels": {"here": os.path.basename(command[0])[:64]},
    }
    if options.image is not None:
        body["image"] = options.image
    with explained("starting; the folder is recorded first, so that changes can be undone"):
        sandbox = wire.request("POST", "/v1/sandboxes", body, timeout=None)
    request: dict[str, Any] = {
        "command": [tool.command, *command[1:]],
        "cwd": folder,
        "env": env,
        "interactive": True,
        "timeout": 0,
    }
    if has_terminal():
        rows, columns = terminal_size()
        request["terminal"] = {"rows": rows, "cols": columns}
    return sandbox, request


def _limits() -> dict[str, int]:
    """Return limits for the tools of a developer: most of this machine, where those of a server are for many agents."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (1024 * 1024)
    return {"memory_mb": max(512, memory * 3 // 4), "processes": 8192}


def _texts(setup: HereSetup, context: str) -> dict[str, str]:
    """Write the small files for the home directory inside; return the place of each, and its file here."""
    directory = os.path.join(client_directory(), "texts", context)
    found = {}
    for number, (name, text) in enumerate(sorted(setup.home_texts.items())):
        path = os.path.join(directory, str(number))
        if _read(path) != text.encode():
            from carrel.primitives.atomic import write_file

            os.makedirs(directory, 0o700, exist_ok=True)
            write_file(path, text.encode())
        found[f"{HOME}/{name}"] = path
    return found


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def _carrel() -> str:
    """Return the words that call `carrel` for the same servers in another terminal."""
    import shlex

    named = os.environ.get("CARREL_DATA_DIR")
    return f"CARREL_DATA_DIR={shlex.quote(named)} carrel" if named else "carrel"


def _place_of(source: str, home: str) -> str:
    """Return where a file of the user is shown: below the home directory inside if it is below the user's."""
    return HOME + source[len(home) :] if source.startswith(home.rstrip("/") + "/") else source


def _named_variables(options: HereOptions) -> dict[str, str]:
    env = {}
    for word in options.env:
        name, equals, value = word.partition("=")
        if not equals and name not in os.environ:
            raise InvalidRequest(f"the variable {name} is not set here", field="--env")
        env[name] = value if equals else os.environ[name]
    return env


def _summarise(
    options: HereOptions, server: FolderServer, context: str, began: float, code: int, questions: ApprovalQuestions
) -> None:
    """Say on stderr what the run has done. Nothing that fails here changes the exit code."""
    if not options.json and not os.isatty(2):
        return
    wire = LocalWire(server.url, server.token)
    since = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(began)) + f".{int(began % 1 * 1000):03}Z"
    facts: dict[str, Any] = {"context": context, "exit_code": code, "seconds": round(time.time() - began, 1)}
    with suppress(CarrelError):
        query = f"/v1/audit?context_id={context}&limit=1000&since={since}"
        records = wire.request("GET", f"{query}&kind=network")["items"]
        for key, wanted in (("hosts_reached", True), ("hosts_refused", False)):
            found = {str(each["arguments"].get("host")) for each in records if (each["decision"] == "allow") == wanted}
            facts[key] = sorted(found - {"None"})
        held = wire.request("GET", f"{query}&kind=file&name=hold_path")["items"]
        facts["held_back"] = {str(each["arguments"]["path"]): each["arguments"]["renamed_to"] for each in held[::-1]}
        cleared = wire.request("GET", f"{query}&kind=file&name=clear_set_ids")["items"]
        facts["set_ids_removed"] = sorted(str(each["arguments"]["path"]) for each in cleared)
    with suppress(CarrelError, StopIteration):
        base = f"/v1/contexts/{context}/checkpoints"
        end = next(each for each in wire.request("GET", base)["items"] if each["kind"] == "end")
        if end["created_at"][:19] >= since[:19] and end["begin"] is not None:
            changes = wire.request("GET", f"{base}/{end['begin']}/changes?after={end['id']}")
            facts["files"] = {kind: changes[kind] for kind in ("added", "changed", "removed")}
    facts["approved"] = sum(questions.answers.values())
    facts["denied"] = len(questions.answers) - facts["approved"]
    wire.close()
    if options.json:
        note(json.dumps(facts))
    else:
        note(_sentence(facts))


def _sentence(facts: dict[str, Any]) -> str:
    parts = [f"{facts['seconds']:.0f} s"]
    if files := facts.get("files"):
        parts.append(", ".join(f"{count} files {kind}" for kind, count in files.items() if count) or "no file changed")
    if reached := facts.get("hosts_reached"):
        parts.append(f"reached {_few(reached)}")
    if refused := facts.get("hosts_refused"):
        parts.append(f"refused {_few(refused)}")
    if held := facts.get("held_back"):
        parts.append(f"protected, so renamed: {_few([f'{path} to {now}' for path, now in held.items()])}")
    if cleared := facts.get("set_ids_removed"):
        parts.append(f"changed, so without their set-id bits: {_few(cleared)}")
    if facts.get("approved") or facts.get("denied"):
        parts.append(f"{facts['approved']} approved, {facts['denied']} denied")
    return "carrel: " + "; ".join(parts) + ". `carrel diff` shows the changes, `carrel undo` takes them back"


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
