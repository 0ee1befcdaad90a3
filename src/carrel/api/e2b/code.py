"""E2B's code interpreter, on carrel's code contexts: Python as it is, JavaScript by a Node.js in such a context, and
bash as commands, which policy reads.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from carrel.api.e2b.answers import Failure, as_json, body_of, failure_of
from carrel.api.e2b.inner import Json, Refused
from carrel.api.e2b.languages import bash_text, javascript_cell
from carrel.api.e2b.process import directory_of
from carrel.api.e2b.sandboxes import HOME, Box
from carrel.api.parts import NDJSON, ClosingStream

LANGUAGES = ("python", "javascript", "bash")
_NAMES = {"js": "javascript", "py": "python", "sh": "bash", "shell": "bash", "ipython": "python"}
_FORMS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "application/vnd.carrel.chart+json": "chart",
}
_NAME = re.compile(rf"e2b-({'|'.join(LANGUAGES)})-([0-9a-f]{{16}}|default)")
CHART = "application/vnd.carrel.chart+json"


def language_of(given: object) -> str:
    named = "python" if given is None else str(given).lower()
    language = _NAMES.get(named, named)
    if language not in LANGUAGES:
        raise Failure(400, f"the language '{language[:40]}' is not served here: use {', '.join(LANGUAGES)}")
    return language


def _named(context: str) -> tuple[str, str]:
    """Return the name of a code context and its language; 404 for one that E2B's calls did not make."""
    found = _NAME.fullmatch(context)
    if found is None:
        raise Failure(404, f"Context {context[:100]} not found")
    return context, found[1]


async def execute(request: Request, box: Box) -> Response:
    asked = await body_of(request)
    code = asked.get("code")
    if not isinstance(code, str):
        raise Failure(400, "`code` is missing")
    if asked.get("context_id") in {None, *LANGUAGES}:  # the default contexts are named like their languages too
        language = language_of(asked.get("context_id") or asked.get("language"))
        name = f"e2b-{language}-default"
    else:
        name, language = _named(str(asked["context_id"]))
        await _existing(box, name, language)
    env = asked.get("env_vars") or asked.get("envs") or {}
    lines = _bash(box, name, code, env) if language == "bash" else _cell(box, name, language, code, env)
    first = await anext(lines, None)  # a refusal has a status

    async def whole() -> AsyncIterator[bytes]:
        line = first
        try:
            while line is not None:
                yield json.dumps(line).encode() + b"\n"
                line = await anext(lines, None)
        except Refused as error:
            yield json.dumps({"type": "error", "name": "carrel", "value": error.text, "traceback": ""}).encode() + b"\n"
        finally:
            await lines.aclose()  # type: ignore[attr-defined]
        yield json.dumps({"type": "end_of_execution"}).encode() + b"\n"

    return ClosingStream(whole(), media_type=NDJSON)


async def _existing(box: Box, name: str, language: str) -> None:
    if language == "bash":
        return
    try:
        await box.ask("GET", f"/code-contexts/{name}")
    except Refused as error:
        if error.status == 404:
            raise Failure(404, f"Context {name} not found") from None
        raise


def _printed(stream: str, line: Json) -> Json:
    text = line["text"] if "text" in line else base64.b64decode(line["base64"]).decode("utf-8", "replace")
    return {"type": stream, "text": text, "timestamp": time.time_ns()}


async def _cell(box: Box, name: str, language: str, code: str, env: Json) -> AsyncIterator[Json]:
    text = javascript_cell(code) if language == "javascript" else code
    path = f"/code-contexts/{name}/cells"
    if env:
        await box.ask("POST", path, {"code": _SET.format(env={str(key): str(value) for key, value in env.items()})})
    ended = True
    try:
        async with box.stream("POST", f"{path}/stream", {"code": text, "timeout": 0}) as stream:
            ended = False
            yield {"type": "keepalive"}  # the answer begins, so that its caller is heard when it goes
            async for line in stream.lines():
                if line["stream"] == "end":
                    break
                yield _printed(line["stream"], line)
            cell = stream.headers["carrel-cell-id"]
        result = (await box.ask("GET", f"{path}/{cell}")).json()
        ended = True
    finally:
        if not ended:  # its caller has gone: E2B's server interrupts what runs
            await _interrupt(box, name)
        if env:
            await box.ask("POST", path, {"code": _UNSET})
    yield {"type": "number_of_executions", "execution_count": result["number"]}
    for each in result["results"]:
        yield _result(each)
    if result["error"] is not None:
        error = result["error"]
        if error["name"] == "JavaScriptError" and "\x00" in error["value"]:
            kind, value, trace = error["value"].split("\x00", 2)
            error = {"name": kind, "value": value, "traceback": trace}
        yield {"type": "error", **error}
    elif result["status"] == "died":
        said = "it used too much memory" if result["oom_killed"] else f"its process ended ({result['signal']})"
        yield {"type": "error", "name": "ContextDied", "value": f"the context is lost: {said}", "traceback": ""}


_SET = "import os as _e2b_os; _e2b_env = dict(_e2b_os.environ); _e2b_os.environ.update({env!r})"
_UNSET = "_e2b_os.environ.clear(); _e2b_os.environ.update(_e2b_env)"


async def _interrupt(box: Box, name: str) -> None:
    try:
        await box.ask("POST", f"/code-contexts/{name}/interrupt")
    except (Refused, Failure):
        return


def _result(result: Json) -> Json:
    found: Json = {"type": "result", "is_main_result": result["kind"] == "result", "extra": {}}
    for media, text in result["data"].items():
        name = _FORMS.get(media)
        if name is None:
            found["extra"][media] = text
        elif name in {"json", "chart"}:
            try:
                found[name] = json.loads(text)
            except ValueError:
                found["extra"][media] = text
        else:
            found[name] = text
    table = found.get("json")
    if isinstance(table, dict) and {"columns", "data"} <= table.keys() and "html" in found:  # a data frame
        found["data"] = {str(name): [row[at] for row in table["data"]] for at, name in enumerate(table["columns"])}
        del found["json"]
    return found


async def _bash(box: Box, name: str, code: str, env: Json) -> AsyncIterator[Json]:
    order = {
        "command": ["/bin/bash", "-c", bash_text(name, code)],
        "env": {"HOME": HOME, "PWD": HOME, **env},
        "timeout": 0,
    }
    async with box.stream("POST", "/commands/stream", order) as stream:
        command, ended = stream.headers["carrel-command-id"], False
        yield {"type": "number_of_executions", "execution_count": 1}  # the answer begins
        try:
            async for line in stream.lines():
                if line["stream"] == "end":
                    ended, result = True, line["result"]
                    break
                yield _printed(line["stream"], line)
        finally:
            if not ended:
                await box.ask("DELETE", f"/commands/{command}")
    if ended and (result["exit_code"] or result["signal"]):
        said = result["signal"] or f"exit status {result['exit_code']}"
        yield {"type": "error", "name": "ExecutionError", "value": said, "traceback": ""}


async def create_context(request: Request, box: Box) -> Response:
    asked = await body_of(request)
    language, cwd = language_of(asked.get("language")), asked.get("cwd") or HOME
    name = f"e2b-{language}-{secrets.token_hex(8)}"
    if language == "bash":
        setup = ["/bin/bash", "-c", bash_text(name, f"cd -- {json.dumps(directory_of(cwd))}")]
        result = (await box.ask("POST", "/commands", {"command": setup})).json()
        failed = result["stderr"] if result["exit_code"] else None
    else:
        text = f"import os as _e2b_os; _e2b_os.chdir({directory_of(cwd)!r}); del _e2b_os"
        result = (await box.ask("POST", f"/code-contexts/{name}/cells", {"code": text})).json()
        failed = result["error"]["value"] if result["error"] else None
    if failed is not None:
        await _delete(box, name)
        raise Failure(400, f"the context cannot start in '{cwd[:200]}': {failed[:500]}")
    return as_json({"id": name, "language": language, "cwd": cwd})


async def list_contexts(request: Request, box: Box) -> Response:
    found = (await box.ask("GET", "/code-contexts")).json()["items"]
    names = [named for each in found if (named := _NAME.fullmatch(each["name"])) is not None]
    return as_json([{"id": named[0], "language": named[1], "cwd": HOME} for named in names])


async def restart_context(request: Request, box: Box) -> Response:
    name, language = _named(request.path_params["context"])
    if language == "bash":
        await _delete(box, name)
    else:
        await box.ask("POST", f"/code-contexts/{name}/restart")
    return as_json({})


async def delete_context(request: Request, box: Box) -> Response:
    name, _ = _named(request.path_params["context"])
    await _delete(box, name)
    return as_json({})


async def _delete(box: Box, name: str) -> None:
    try:
        await box.ask("DELETE", f"/code-contexts/{name}")
    except Refused as error:
        if error.status != 404:
            raise


async def health(request: Request, box: Box) -> Response:
    await box.info()
    return PlainTextResponse("OK")


Handler = Callable[[Request, Box], Coroutine[Any, Any, Response]]
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/execute", execute),
    ("POST", "/contexts", create_context),
    ("GET", "/contexts", list_contexts),
    ("POST", "/contexts/{context}/restart", restart_context),
    ("DELETE", "/contexts/{context}", delete_context),
    ("GET", "/health", health),
)


def refusal(error: Exception) -> Response:
    """The SDK shows the text of an answer as it is."""
    failure = failure_of(error)
    return PlainTextResponse(failure.message, failure.status)
