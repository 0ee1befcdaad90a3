"""E2B's control API: sandboxes, their times, snapshots and networks, and the templates that they are made of."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import Response

from carrel.api.e2b.access import SandboxAccess
from carrel.api.e2b.answers import Failure, SandboxGone, as_json, body_of, failure_of, plain
from carrel.api.e2b.inner import Inner, Json, Refused
from carrel.api.e2b.sandboxes import (
    CLIENT_ID,
    DEFAULT_TIMEOUT_S,
    ENVD_VERSION,
    Box,
    Kept,
    checked_metadata,
    checked_timeout,
    described,
    moment,
    new_id,
)

_DEFAULTS = frozenset({"base", "code-interpreter-v1", "code-interpreter", "code-interpreter-beta"})
_SNAPSHOT = "snap-"
_MOST_FORKS = 20
_V1_TIMEOUT_S = 15
_PAGES = 50


@dataclass(frozen=True, slots=True)
class Control:
    """The control API for one caller."""

    inner: Inner
    access: SandboxAccess
    domain: str | None

    def box(self, request: Request) -> Box:
        return Box(self.inner, request.path_params["id"])

    async def found(self, box: Box) -> Json:
        """Return what carrel knows of a sandbox; 404 as E2B's API says it."""
        try:
            return await box.info()
        except SandboxGone:
            raise _missing(box) from None

    def made(self, sandbox: str, kept: Kept) -> Json:
        """Return a sandbox as its maker gets it."""
        token = self.access.token(self.inner.identity, sandbox)
        return {
            "templateID": kept.template,
            "alias": kept.template,
            "sandboxID": sandbox,
            "clientID": CLIENT_ID,
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": token,
            "trafficAccessToken": token,
            "domain": self.domain,
        }


def _missing(box: Box) -> Failure:
    return Failure(404, f"Sandbox \"{box.id[:128]}\" doesn't exist or you don't have access to it")


async def create(control: Control, request: Request) -> Response:
    return await _create(control, request, DEFAULT_TIMEOUT_S)


async def create_v1(control: Control, request: Request) -> Response:
    return await _create(control, request, _V1_TIMEOUT_S)


async def _create(control: Control, request: Request, default: float) -> Response:
    asked = await body_of(request)
    for name, why in _UNSERVED.items():
        if asked.get(name):
            raise Failure(501, f"`{name}` is not served by carrel: {why}")
    template = str(asked.get("templateID") or "base")
    paused = asked.get("autoPause")
    kept = Kept(
        template=template,
        by=control.inner.identity.token_id or "root",
        on_timeout="keep" if paused is None else "pause" if paused else "kill",
        metadata=checked_metadata(asked.get("metadata")),
    ).extended(checked_timeout(asked.get("timeout"), default))
    given = _network(asked)
    if env := asked.get("envVars"):
        given["env"] = env
    key = request.headers.get("idempotency-key")
    sandbox = new_id() if key is None else _id_of(control.inner, key)
    box = Box(control.inner, sandbox)
    if template.startswith(_SNAPSHOT):
        await _fork(control, template, box)
    elif template not in _DEFAULTS:
        given |= await _recipe(control.inner, template)
    await box.deploy(kept, **given)
    return as_json(control.made(sandbox, kept), 201)


_UNSERVED = {
    "mcp": "add MCP servers with carrel's own API",
    "iam": "identities of sandboxes are given by the operator",
    "volumeMounts": "a sandbox has the one workspace of its context",
}


def _id_of(inner: Inner, key: str) -> str:
    """Return the id that a key of a caller stands for: the same key gives the same sandbox."""
    import hashlib

    said = json.dumps([inner.identity.subject, inner.identity.namespace, key])
    return "i" + hashlib.sha256(said.encode()).hexdigest()[:20]


def _network(asked: Json) -> Json:
    network = asked.get("network") or {}
    for name in ("egressProxy", "rules", "maskRequestHost", "dnsServers", "httpsPorts", "iam"):
        if network.get(name):
            raise Failure(501, f"`network.{name}` is not served by carrel: the policy of the server has such rules")
    if network.get("allowOut") or network.get("denyOut"):
        if network.get("denyOut") in (["0.0.0.0/0"], ["0.0.0.0/0", "::/0"]) and not network.get("allowOut"):
            return {"network": "none"}
        raise Failure(
            501, "rules of a new sandbox are not served: create it, then call its update of the network with them"
        )
    # What may be reached is the policy's word: access to the internet is at most what it allows.
    return {"network": "none"} if asked.get("allow_internet_access") is False else {}


async def _recipe(inner: Inner, template: str) -> Json:
    """Return what makes a sandbox like a template: one of carrel's, or an image that was built for E2B's SDK."""
    known = (await inner.ask("GET", "/v1/templates")).json()["items"]
    if template in {each["name"] for each in known}:
        return {"template": template}
    if ":" in template or "/" in template:
        return {"image": template}
    names = ", ".join(sorted({*_DEFAULTS, *(each["name"] for each in known)}))
    raise Failure(
        404, f"template '{template[:128]}' not found: this server has {names}; an image is named with its tag"
    )


async def _fork(control: Control, template: str, box: Box) -> None:
    """Make the context of a new sandbox from a snapshot."""
    origin, _, snapshot = template.removeprefix(_SNAPSHOT).partition("-at-")
    source = Box(control.inner, origin)
    try:
        await control.inner.ask(
            "POST", f"{source.path}/fork", {"context_id": box.context, "snapshot_id": snapshot or None}
        )
    except Refused as error:
        if error.status == 404:
            raise Failure(404, f"snapshot '{template[:128]}' not found") from None
        raise


async def connect(control: Control, request: Request) -> Response:
    box, asked = control.box(request), await body_of(request)
    info = await control.found(box)
    kept = Kept.of(info)
    timeout = checked_timeout(asked.get("timeout"), DEFAULT_TIMEOUT_S)
    later = replace(kept, resumes=True).extended(timeout)
    if info["state"] == "running" and later.end < kept.end:
        later = replace(kept, resumes=True)  # a running sandbox is not ended earlier than promised
    _, started = await box.deploy(later)
    return as_json(control.made(box.id, later), 201 if started else 200)


async def kill(control: Control, request: Request) -> Response:
    box = control.box(request)
    await control.found(box)
    await control.inner.ask("POST", f"{box.path}/terminate", {"delete_files": True, "reason": "killed"})
    return Response(status_code=204)


async def get(control: Control, request: Request) -> Response:
    box = control.box(request)
    info = await control.found(box)
    kept = Kept.of(info)
    token = control.access.token(control.inner.identity, box.id)
    return as_json(
        {
            **described(control.inner.identity, info),
            "envdAccessToken": token,
            "domain": control.domain,
            "allowInternetAccess": info["network"] != "none",
            "lifecycle": {
                "autoResume": kept.resumes,
                "onTimeout": "kill" if kept.on_timeout == "kill" else "pause",
            },
        }
    )


async def list_sandboxes(control: Control, request: Request) -> Response:
    query = request.query_params
    wanted = {name.strip('"'): value.strip('"') for name, value in parse_qsl(query.get("metadata", ""))}
    states = {each for text in query.getlist("state") for each in text.split(",") if each} or {"running", "paused"}
    after = query.get("startedAfter")
    limit = query.get("limit", "100")
    if not limit.isdigit() or not 1 <= int(limit[:6]) <= 1000:
        raise Failure(400, "`limit` is a number from 1 to 100")
    if query.get("order") == "asc":
        raise Failure(501, "sandboxes are listed newest first: leave `order` out")
    cursor: str | None = query.get("nextToken") or None
    found: list[Json] = []
    for _ in range(_PAGES):
        page = (
            await control.inner.ask("GET", "/v1/sandboxes", query={"limit": int(limit) - len(found), "cursor": cursor})
        ).json()
        for info in page["items"]:
            if info["context_id"] is None:
                continue
            each = described(control.inner.identity, info)
            if (
                each["state"] in states
                and wanted.items() <= each["metadata"].items()
                and query.get("template") in {None, each["templateID"]}
                and (after is None or datetime.fromisoformat(each["startedAt"]) >= datetime.fromisoformat(after))
            ):
                found.append(each)
        cursor = page["next"]
        if cursor is None or len(found) >= int(limit):
            break
    return as_json(found, 200, {"x-next-token": cursor} if cursor else {})


async def set_timeout(control: Control, request: Request) -> Response:
    timeout = checked_timeout((await body_of(request)).get("timeout"), DEFAULT_TIMEOUT_S)
    return await _prolong(control, request, timeout)


async def refresh(control: Control, request: Request) -> Response:
    return await _prolong(control, request, checked_timeout((await body_of(request)).get("duration"), _V1_TIMEOUT_S))


async def _prolong(control: Control, request: Request, timeout: float) -> Response:
    box = control.box(request)
    info = await control.found(box)
    if info["state"] != "running":
        raise _missing(box)
    await box.deploy(Kept.of(info).extended(timeout))
    return Response(status_code=204)


async def pause(control: Control, request: Request) -> Response:
    """Stops the sandbox: its files are kept, its processes end."""
    box = control.box(request)
    info = await control.found(box)
    if info["state"] not in {"running", "creating"}:
        raise Failure(409, f"Error pausing sandbox - sandbox '{box.id}' is already paused")
    await box.deploy(replace(Kept.of(info), resumes=False))
    await control.inner.ask("POST", f"{box.path}/stop")
    return Response(status_code=204)


async def fork(control: Control, request: Request) -> Response:
    box, asked = control.box(request), await body_of(request)
    kept = Kept.of(await control.found(box)).extended(checked_timeout(asked.get("timeout"), DEFAULT_TIMEOUT_S))
    count = asked.get("count") or 1
    if not isinstance(count, int) or not 1 <= count <= _MOST_FORKS:
        raise Failure(400, f"`count` is 1 to {_MOST_FORKS}")
    snapshot = (await control.inner.ask("POST", f"{box.path}/snapshots")).json()["id"]

    async def one() -> Json:
        twin = Box(control.inner, new_id())
        try:
            await control.inner.ask("POST", f"{box.path}/fork", {"context_id": twin.context, "snapshot_id": snapshot})
            await twin.deploy(kept)
        except (Failure, Refused) as error:
            failure = failure_of(error)
            return {"error": {"code": failure.status, "message": failure.message}}
        return {"sandbox": control.made(twin.id, kept)}

    try:
        found = list(await asyncio.gather(*(one() for _ in range(count))))
    finally:
        await control.inner.ask("DELETE", f"{box.path}/snapshots/{snapshot}")
    return as_json(found, 201)


async def take_snapshot(control: Control, request: Request) -> Response:
    box, asked = control.box(request), await body_of(request)
    await control.found(box)
    if asked.get("name"):
        raise Failure(501, "snapshots have no names here: leave `name` out, and keep the id")
    found = (await control.inner.ask("POST", f"{box.path}/snapshots")).json()
    return as_json(_snapshot(box.id, found), 201)


def _snapshot(sandbox: str, found: Json) -> Json:
    return {"snapshotID": f"{_SNAPSHOT}{sandbox}-at-{found['id']}", "names": []}


async def list_snapshots(control: Control, request: Request) -> Response:
    sandbox = request.query_params.get("sandboxID")
    if not sandbox:
        raise Failure(501, "snapshots are listed by sandbox: name one")
    box = Box(control.inner, sandbox)
    await control.found(box)
    items = (await control.inner.ask("GET", f"{box.path}/snapshots")).json()["items"]
    return as_json([_snapshot(sandbox, each) for each in items])


async def delete_template(control: Control, request: Request) -> Response:
    name = request.path_params["id"]
    if not name.startswith(_SNAPSHOT):
        raise Failure(501, "templates are files of the server: only snapshots are deleted here")
    sandbox, _, snapshot = name.removeprefix(_SNAPSHOT).partition("-at-")
    await control.inner.ask("DELETE", f"{Box(control.inner, sandbox).path}/snapshots/{snapshot}")
    return Response(status_code=204)


async def metrics(control: Control, request: Request) -> Response:
    """The present values: carrel keeps no history of them."""
    box = control.box(request)
    info = await control.found(box)
    if info["state"] != "running":
        return as_json([])
    usage = (await control.inner.ask("GET", f"{box.path}/usage")).json()
    used, shown, now = info.get("resources") or {}, described(control.inner.identity, info), time.time()
    began = datetime.fromisoformat(info["created_at"]).timestamp()
    busy = (used.get("cpu_seconds") or 0.0) / max(1.0, now - began)
    return as_json(
        [
            {
                "timestamp": moment(now),
                "timestampUnix": int(now),
                "cpuCount": shown["cpuCount"],
                "cpuUsedPct": round(100 * busy, 2),
                "memUsed": used.get("memory_bytes") or 0,
                "memTotal": shown["memoryMB"] * 1024 * 1024,
                "memCache": 0,
                "diskUsed": usage["bytes"],
                "diskTotal": usage["limit_bytes"] or 0,
            }
        ]
    )


async def update_network(control: Control, request: Request) -> Response:
    """The hosts that a sandbox may reach, as the policy of its context. Only an administrator may change a policy."""
    box, asked = control.box(request), await body_of(request)
    await control.found(box)
    for name in ("egressProxy", "rules"):
        if asked.get(name):
            raise Failure(501, f"`{name}` is not served by carrel: the policy of the server has such rules")
    path = f"/v1/contexts/{box.context}/policy"
    policy = (await control.inner.ask("GET", path)).json()
    sources = dict(policy["sources"] or {})
    sources["web_access"] = {**(sources.get("web_access") or {}), **_web_access(asked)}
    await control.inner.ask("PUT", path, {"sources": sources, "version": policy["version"]})
    return Response(status_code=204)


def _web_access(asked: Json) -> Json:
    """Return the rules of E2B as carrel's: what is allowed wins, and everything may be denied."""
    allow, deny = asked.get("allowOut") or [], asked.get("denyOut") or []
    if not all(isinstance(each, list) and all(isinstance(one, str) for one in each) for each in (allow, deny)):
        raise Failure(400, "`allowOut` and `denyOut` are lists of hosts")
    closed = asked.get("allow_internet_access") is False or bool({"0.0.0.0/0", "::/0"} & set(deny))
    blocked = [each for each in deny if each not in {"0.0.0.0/0", "::/0"}]
    if blocked:
        raise Failure(501, "only everything can be denied (`0.0.0.0/0`), and hosts can be allowed by their names")
    if closed and not allow:
        return {"enabled": False, "allowed_domains": None}
    return {"enabled": True, "allowed_domains": allow or None, "unknown_domains": "deny" if closed else "ask"}


async def get_alias(control: Control, request: Request) -> Response:
    name = request.path_params["id"]
    known = (await control.inner.ask("GET", "/v1/templates")).json()["items"]
    if name not in _DEFAULTS and name not in {each["name"] for each in known}:
        raise Failure(404, f"template '{name[:128]}' not found")
    return as_json({"templateID": name, "public": True})


async def list_templates(control: Control, request: Request) -> Response:
    known = (await control.inner.ask("GET", "/v1/templates")).json()["items"]
    names = ["base", "code-interpreter-v1", *(each["name"] for each in known)]
    epoch = moment(datetime(1970, 1, 1, tzinfo=UTC).timestamp())
    return as_json(
        [
            {
                "templateID": name,
                "buildID": name,
                "cpuCount": 1,
                "memoryMB": 512,
                "diskSizeMB": 0,
                "public": True,
                "aliases": [name],
                "names": [name],
                "createdAt": epoch,
                "updatedAt": epoch,
                "createdBy": None,
                "lastSpawnedAt": None,
                "spawnCount": 0,
                "buildCount": 1,
                "buildStatus": "ready",
                "envdVersion": ENVD_VERSION,
            }
            for name in names
        ]
    )


def unserved(why: str) -> Callable[[Control, Request], Awaitable[Response]]:
    """Return the handler of a call that is not served."""

    async def handle(control: Control, request: Request) -> Response:
        return plain(Failure(501, f"{request.method} {request.url.path[:200]} is not served by carrel: {why}"))

    return handle


_BUILDS = "build an image with `carrel image build`, and create sandboxes with its name as the template"
_SECRETS = "secrets belong to a context: `carrel secret`"
_VOLUMES = "a sandbox has the one workspace of its context"
_LOGS = "the events of a context are at /v1/events"

Handler = Callable[[Control, Request], Awaitable[Any]]
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v2/sandboxes", create),
    ("POST", "/sandboxes", create_v1),
    ("GET", "/v2/sandboxes", list_sandboxes),
    ("GET", "/sandboxes", list_sandboxes),
    ("GET", "/sandboxes/{id}", get),
    ("DELETE", "/sandboxes/{id}", kill),
    ("POST", "/v2/sandboxes/{id}/connect", connect),
    ("POST", "/sandboxes/{id}/connect", connect),
    ("POST", "/sandboxes/{id}/resume", connect),
    ("POST", "/sandboxes/{id}/timeout", set_timeout),
    ("POST", "/sandboxes/{id}/refreshes", refresh),
    ("POST", "/sandboxes/{id}/pause", pause),
    ("POST", "/sandboxes/{id}/fork", fork),
    ("POST", "/sandboxes/{id}/snapshots", take_snapshot),
    ("GET", "/snapshots", list_snapshots),
    ("GET", "/sandboxes/{id}/metrics", metrics),
    ("PUT", "/sandboxes/{id}/network", update_network),
    ("GET", "/sandboxes/{id}/logs", unserved(_LOGS)),
    ("GET", "/v2/sandboxes/{id}/logs", unserved(_LOGS)),
    ("GET", "/templates/aliases/{id}", get_alias),
    ("GET", "/templates", list_templates),
    ("GET", "/v2/templates", list_templates),
    ("DELETE", "/templates/{id}", delete_template),
)
UNSERVED: tuple[tuple[str, str], ...] = (
    ("/templates", _BUILDS),
    ("/v2/templates", _BUILDS),
    ("/v3/templates", _BUILDS),
    ("/secrets", _SECRETS),
    ("/volumes", _VOLUMES),
    ("/volumecontent", _VOLUMES),
    ("/teams", "tokens have no teams here"),
)
"""What is refused whatever follows, each with its reason."""
