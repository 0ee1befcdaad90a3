"""The service `filesystem.Filesystem` of E2B: files of the workspace."""

from __future__ import annotations

import posixpath
import stat
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.e2b.answers import Failure, as_json, body_of
from carrel.api.e2b.inner import Json, Refused
from carrel.api.e2b.process import directory_of
from carrel.api.e2b.sandboxes import HOME, WORKSPACE, Box
from carrel.api.e2b.users import USER, require_user, user_of
from carrel.models.files import MOST_LISTED

_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}
_LETTERS = {"directory": "d", "symlink": "l"}


def inside(path: object) -> str:
    """Return a path of E2B as one relative to the workspace."""
    if not isinstance(path, str) or not path:
        raise Failure(400, "the path is missing")
    found = directory_of(posixpath.normpath(path))
    if found == WORKSPACE or found.startswith(WORKSPACE + "/"):
        found = found[len(WORKSPACE) + 1 :] or "."
    if found.startswith("/"):
        raise Failure(
            400,
            f"'{path[:200]}' is not in the workspace: files are read and written below {HOME}, which is {WORKSPACE}; "
            "use a command for others",
        )
    return found


def entry(info: Json) -> Json:
    """Return a file as E2B describes it."""
    path = "" if info["path"] == "." else info["path"]
    mode = int(info["mode"], 8)
    found: Json = {
        "name": posixpath.basename(path) or posixpath.basename(HOME),
        "type": _TYPES.get(info["kind"], "FILE_TYPE_UNSPECIFIED"),
        "path": posixpath.join(HOME, path).rstrip("/"),
        "size": str(info["size"]),
        "mode": mode,
        "permissions": _LETTERS.get(info["kind"], "-") + stat.filemode(mode)[1:],
        "owner": USER,
        "group": USER,
        "modifiedTime": info["modified_at"].replace("+00:00", "Z"),
    }
    if info.get("target"):
        found["symlinkTarget"] = info["target"]
    return found


async def asked(request: Request) -> Json:
    require_user(user_of(request))
    return await body_of(request)


async def stat_file(request: Request, box: Box) -> Response:
    message = await asked(request)
    found = await box.ask("GET", "/files/stat", query={"path": inside(message.get("path"))})
    return as_json({"entry": entry(found.json())})


async def make_directory(request: Request, box: Box) -> Response:
    path = inside((await asked(request)).get("path"))
    try:
        found = (await box.ask("GET", "/files/stat", query={"path": path})).json()
    except Refused as error:
        if error.status != 404:
            raise
    else:
        raise (
            Failure(409, f"'{path}' exists already", "already_exists")
            if found["kind"] == "directory"
            else Failure(400, f"'{path}' is a file")
        )
    return as_json({"entry": entry((await box.ask("POST", "/files/mkdir", {"path": path})).json())})


async def move(request: Request, box: Box) -> Response:
    message = await asked(request)
    source, destination = inside(message.get("source")), inside(message.get("destination"))
    wanted = {"source": source, "destination": destination, "overwrite": True}
    try:
        found = await box.ask("POST", "/files/move", wanted)
    except Refused as error:
        if error.status != 404 or error.problem.get("field") != "destination":
            raise
        await box.ask("POST", "/files/mkdir", {"path": posixpath.dirname(destination)})
        found = await box.ask("POST", "/files/move", wanted)
    return as_json({"entry": entry(found.json())})


async def list_directory(request: Request, box: Box) -> Response:
    message = await asked(request)
    path, depth = inside(message.get("path")), message.get("depth") or 1
    found = (await box.ask("GET", "/files/stat", query={"path": path})).json()
    if found["kind"] != "directory":
        raise Failure(400, f"'{path}' is not a directory")
    return as_json({"entries": [entry(each) for each in await listed(box, path, depth)]})


async def listed(box: Box, path: str, depth: int) -> list[Any]:
    """Return what is below a directory, at most `depth` levels deep."""
    query = {"path": path, "limit": MOST_LISTED, **({"recursive": "true"} if depth > 1 else {})}
    found = (await box.ask("GET", "/files", query=query)).json()
    if found["truncated"]:
        raise Failure(400, f"there are more than {MOST_LISTED} files below '{path}': list a smaller directory")
    above = 0 if path == "." else path.count("/") + 1
    return [each for each in found["items"] if each["path"].count("/") + 1 - above <= depth]


async def remove(request: Request, box: Box) -> Response:
    path = inside((await asked(request)).get("path"))
    try:
        await box.ask("DELETE", "/files", query={"path": path, "recursive": "true"})
    except Refused as error:
        if error.code != "file_not_found":
            raise
    return as_json({})


CALLS = {
    "Stat": stat_file,
    "MakeDir": make_directory,
    "Move": move,
    "ListDir": list_directory,
    "Remove": remove,
}
