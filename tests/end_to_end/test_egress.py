"""Real tools in a real sandbox find the way out by themselves, as far as its policy lets them."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import random
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests.support.egress_ground import HOST, Carrel, Outside, Site, ground, outbound, run, until

from carrel.client import Sandbox

NPM_PACKAGE = "left-shelf"
ASKED = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
"""Where a server may have port 80 while other tests run."""
SEARCH_URL = "http://search.test/find?q={query}"


LOGIN = base64.b64encode(b"ann:a-password-that-stays-outside").decode()


class Place:
    """A server, the sites around it, and a sandbox that may reach them."""

    def __init__(self, outside: Outside, carrel: Carrel, tmp_path: Path):
        self.outside, self.carrel = outside, carrel
        self.plain = outside.site(lambda _method, path, _headers, body: b"plain " + path.encode() + body)
        self.safe = outside.site(lambda _method, path, _headers, body: b"safe " + path.encode() + body, tls=True)
        self.backend = GitBackend(tmp_path)
        self.git = outside.site(self.backend, tls=True)
        self.npm = outside.site(NpmRegistry())
        registry = {"name": "shelf", "url": f"http://npm.test:{self.npm.port}/"}
        sources = {
            "web_access": {"inspected_domains": ["api.test", "git.test"]},
            "package_managers": {"npm": {"registries": [registry]}},
        }
        rules = [
            *outbound("files.test", port=self.plain.port),
            *outbound("api.test", port=self.safe.port),
            *outbound("git.test", port=self.git.port),
            *outbound("npm.test", port=self.npm.port),
            f"network(outbound:{ASKED})",
        ]
        self.box: Sandbox = carrel.context("tools", *rules, sources=sources)

    @property
    def urls(self) -> tuple[str, str]:
        return f"http://files.test:{self.plain.port}/x", f"https://api.test:{self.safe.port}/y"


class GitBackend:
    """A repository behind the program that git ships for web servers."""

    def __init__(self, directory: Path):
        self.root = directory / "repositories"
        work = directory / "work"
        for words in (
            ["init", "-q", "--bare", str(self.root / "project.git")],
            ["clone", "-q", str(self.root / "project.git"), str(work)],
            [
                "-C",
                str(work),
                "-c",
                "user.name=a",
                "-c",
                "user.email=a@b.test",
                "commit",
                "-q",
                "--allow-empty",
                "-m",
                "one",
            ],
            ["-C", str(work), "push", "-q", "origin", "HEAD:refs/heads/main"],
            ["-C", str(self.root / "project.git"), "symbolic-ref", "HEAD", "refs/heads/main"],
        ):
            subprocess.run(["git", *words], check=True, capture_output=True)

    def __call__(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[str, Sequence[str], bytes]:
        where, _, query = path.partition("?")
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
            "REQUEST_METHOD": method,
            "PATH_INFO": where,
            "QUERY_STRING": query,
            "CONTENT_TYPE": headers.get("content-type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": headers.get("content-encoding", ""),
            "HTTP_GIT_PROTOCOL": headers.get("git-protocol", ""),
        }
        if headers.get("authorization") == f"Basic {LOGIN}":
            environment["REMOTE_USER"] = "ann"  # only then it takes a push
        done = subprocess.run(["git", "http-backend"], input=body, env=environment, capture_output=True, check=True)
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        status = next((line.partition(": ")[2] for line in lines if line.startswith("Status: ")), "200 OK")
        return status, [line for line in lines if not line.startswith("Status: ")], content


class NpmRegistry:
    """A registry with one package."""

    def __init__(self) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, text in {
                "package/package.json": json.dumps({"name": NPM_PACKAGE, "version": "1.0.0", "main": "i.js"}),
                "package/i.js": "module.exports = 'on the shelf'",
            }.items():
                member = tarfile.TarInfo(name)
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
        self.tarball = packed.getvalue()

    def __call__(
        self, _method: str, path: str, headers: Mapping[str, str], _body: bytes
    ) -> bytes | tuple[str, Sequence[str], bytes]:
        if path == f"/{NPM_PACKAGE}":
            digest = base64.b64encode(hashlib.sha512(self.tarball).digest()).decode()
            where = f"http://{headers['host']}/{NPM_PACKAGE}/-/{NPM_PACKAGE}-1.0.0.tgz"
            version = {
                "name": NPM_PACKAGE,
                "version": "1.0.0",
                "dist": {"tarball": where, "integrity": f"sha512-{digest}"},
            }
            page = {"name": NPM_PACKAGE, "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
            return "200 OK", ["content-type: application/json"], json.dumps(page).encode()
        if path.endswith(".tgz"):
            return self.tarball
        return "404 Not Found", [], b"{}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with ground(CARREL_SEARCH_URL=SEARCH_URL) as (outside, carrel):
        yield Place(outside, carrel, tmp_path_factory.mktemp("outside"))


def test_curl_over_every_protocol(place: Place) -> None:
    plain, safe = place.urls
    assert run(place.box, ["curl", "-sS", plain]) == "plain /x"
    assert run(place.box, ["curl", "-sS", safe]) == "safe /y"
    assert run(place.box, ["curl", "-sS", "-d", "body", safe]) == "safe /ybody"
    socks = ["-x", "socks5h://127.0.0.1:3128"]
    assert run(place.box, ["curl", "-sS", *socks, plain]) == "plain /x"
    assert run(place.box, ["curl", "-sS", *socks, safe]) == "safe /y"


def test_pythons_own_client(place: Place) -> None:
    code = "import sys, urllib.request as u\nfor each in sys.argv[1:]: print(u.urlopen(each).read().decode())"
    assert run(place.box, ["python3", "-c", code, *place.urls]) == "plain /x\nsafe /y\n"


def test_requests_as_pip_has_it(place: Place) -> None:
    code = "import sys\nfrom pip._vendor import requests\nfor each in sys.argv[1:]: print(requests.get(each).text)"
    assert run(place.box, ["python3", "-c", code, *place.urls]) == "plain /x\nsafe /y\n"


def test_fetch_of_node(place: Place) -> None:
    code = "(async () => { for (const u of process.argv.slice(1)) console.log(await (await fetch(u)).text()) })()"
    assert run(place.box, ["node", "-e", code, *place.urls]) == "plain /x\nsafe /y\n"


def test_git_clones_and_is_refused_elsewhere(place: Place) -> None:
    url = f"https://git.test:{place.git.port}/project.git"
    run(place.box, ["git", "clone", "-q", url, "cloned"])
    assert run(place.box, ["git", "-C", "cloned", "log", "--format=%s"]) == "one\n"
    said = run(place.box, ["git", "clone", "-q", f"https://other.test:{place.git.port}/project.git", "no"], ok=False)
    assert "403" in said
    paths = until(lambda: [path for path in _paths(place.carrel, "tools") if "git-upload-pack" in path], "the log")
    assert all(path.startswith("/project.git/") for path in paths)


def test_git_push_asks_a_person_and_uses_a_credential_that_is_never_inside(place: Place) -> None:
    port, carrel = place.git.port, place.carrel
    push = {"host": "git.test", "methods": ["POST"], "paths": ["*/git-receive-pack"], "reason": "git push"}
    login = {"host": "git.test", "secret": "git-login", "format": "Basic {secret}", "paths": ["/project.git"]}
    web = {"requests": [push], "credentials": [login]}
    box = carrel.context("pushes", *outbound("git.test", port=port), sources={"web_access": web})
    carrel.client.secrets("pushes").put("git-login", LOGIN)
    run(box, ["git", "clone", "-q", f"https://git.test:{port}/project.git", "cloned"])
    commit = "git -C cloned -c user.name=a -c user.email=a@b.test commit -q --allow-empty -m two"
    box.files.write("push.sh", f"{commit}; git -C cloned push -q origin HEAD:refs/heads/two; env".encode())

    def answer(*, approve: bool) -> None:
        waiting = until(
            lambda: list(carrel.client.approvals.list(context_id="pushes", state="pending")), "the question"
        )
        assert "POST /project.git/git-receive-pack" in waiting[0].summary and "git push" in waiting[0].reason
        (carrel.client.approvals.approve if approve else carrel.client.approvals.deny)(waiting[0].id)

    for approve, words in ((False, "remote: carrel refused the push: "), (True, "")):
        person = threading.Thread(target=answer, kwargs={"approve": approve})
        person.start()
        said = run(box, ["sh", "push.sh"], ok=False)
        person.join()
        assert words in said and LOGIN not in said and "a-password" not in said
        pushed = ["git", "-C", str(place.backend.root / "project.git"), "rev-parse", "-q", "--verify", "two"]
        assert (subprocess.run(pushed, capture_output=True, check=False).returncode == 0) is approve


def _paths(carrel: Carrel, context: str) -> list[str]:
    return [str(each.arguments.get("path")) for each in carrel.records(context)]


def test_git_with_its_own_trust_when_nothing_is_inspected(place: Place) -> None:
    box = place.carrel.context("opaque", *outbound("git.test", port=place.git.port))
    box.files.write("ca.pem", place.outside.certificate.encode())
    url = f"https://git.test:{place.git.port}/project.git"
    box.files.write("clone.sh", f"GIT_SSL_CAINFO=/workspace/ca.pem git clone -q {url} x".encode())
    run(box, ["sh", "clone.sh"])
    [*_, record] = place.carrel.records("opaque")
    assert record.name == "connect" and "path" not in record.arguments and record.bytes_in


def test_npm_installs(place: Place) -> None:
    registry = f"http://npm.test:{place.npm.port}/"
    place.box.files.write("app/package.json", b'{"name": "app", "version": "1.0.0"}')
    place.box.files.write("app/.npmrc", f"registry={registry}\naudit=false\nfund=false\n".encode())
    run(place.box, ["npm", "--prefix", "app", "install", NPM_PACKAGE], timeout=100)
    assert run(place.box, ["node", "-p", f"require('/workspace/app/node_modules/{NPM_PACKAGE}')"]) == "on the shelf\n"


def test_what_is_refused_says_so_to_each_tool(place: Place) -> None:
    url = f"http://other.test:{place.plain.port}/"
    refusal = json.loads(run(place.box, ["curl", "-sS", url]))
    assert refusal["code"] == "denied_by_policy" and "other.test" in refusal["reason"]
    code = f"fetch('{url}').then(() => 0, e => console.log(String(e.cause ?? e)))"
    assert "403" in run(place.box, ["node", "-e", code])
    assert not [each for each in place.plain.requests if "other" in each[2]["host"]]
    assert "other.test" not in place.outside.names.asked  # nobody looks up what is not allowed


def test_what_goes_around_the_proxy_goes_nowhere(place: Place) -> None:
    before = len(place.plain.requests)
    for url in (f"http://{HOST}:{place.plain.port}/", place.urls[0]):
        assert run(place.box, ["curl", "-sS", "--noproxy", "*", "-m", "5", url], ok=False).startswith("curl: ")
    assert len(place.plain.requests) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can serve port 80")
def test_web_search_asks_the_endpoint_of_the_operator(place: Place) -> None:
    address = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
    found = {"results": [{"title": "<b>Krill</b>", "url": "https://krill.example/", "content": "small &amp; many"}]}
    engine = place.outside.site(lambda *_: json.dumps(found).encode(), host=address, port=80)
    place.outside.names.table["search.test"] = address
    allowed = [f"network(outbound:{address})", "shell(web-search:*)"]
    place.carrel.client.policy("searches").put(settings={"permissions": {"allow": allowed}})
    box = place.carrel.client.sandbox("searches", template="web-search")
    assert run(box, ["web-search", "krill", "& whales"]) == "1. Krill\n   https://krill.example/\n   small & many\n"
    assert [path for _method, path, _headers in engine.requests] == ["/find?q=krill%20%26%20whales"]
    [record] = place.carrel.records("searches")
    assert (record.arguments["host"], record.decision, record.agent) == ("search.test", "allow", "web-search")


def test_a_person_lets_a_waiting_request_through(place: Place) -> None:
    # Nobody is asked for odd ports. Who is not root cannot serve port 80: then it is let out, and nothing is there.
    place.outside.names.table["ask.test"] = ASKED
    if os.geteuid() == 0:
        place.outside.site(lambda *_: b'{"code": "served"}', host=ASKED, port=80)
    code = "served" if os.geteuid() == 0 else "unreachable"
    token = json.loads(place.carrel.cli("token", "create", "ann", "--kind", "person", "--scope", "approve", "--json"))[
        "token"
    ]
    told: list[str] = []
    asking = threading.Thread(
        target=lambda: told.append(run(place.box, ["curl", "-sS", "-m", "60", "http://ask.test/"], timeout=90))
    )
    asking.start()
    [waiting] = until(lambda: _pending(place.carrel, "ask.test"), "an approval")
    assert (waiting["kind"], waiting["summary"]) == ("network", "connect ask.test 80")
    assert place.carrel.cli("approve", "--for-context", waiting["id"], token=token).startswith("approved")
    asking.join(90)
    assert json.loads(told[0])["code"] == code
    assert json.loads(run(place.box, ["curl", "-sS", "http://ask.test/"]))["code"] == code
    told.clear()
    asking = threading.Thread(
        target=lambda: told.append(run(place.box, ["curl", "-sS", "-m", "60", "http://no.test/"], timeout=90))
    )
    asking.start()
    [waiting] = until(lambda: _pending(place.carrel, "no.test"), "an approval")
    place.carrel.cli("deny", waiting["id"], "-m", "use the mirror", token=token)
    asking.join(90)
    refusal = json.loads(told[0])
    assert (refusal["reason"], refusal["approval"]) == ("use the mirror", waiting["id"])


def _pending(carrel: Carrel, host: str) -> list[dict[str, str]]:
    return [each for each in json.loads(carrel.cli("approvals", "--json")) if host in each["summary"]]


def test_the_network_is_shown_and_chosen(place: Place) -> None:
    listed = {each["context_id"]: each["network"] for each in json.loads(place.carrel.cli("ps", "--json"))}
    assert listed["tools"] == "allowlist"
    header, *rows = place.carrel.cli("ps").splitlines()
    assert "NETWORK" in header and any("tools" in row and "allowlist" in row for row in rows)
    ask = "python3 -c 'import os; print(os.environ.get(\"HTTPS_PROXY\"))'"
    assert place.carrel.cli("run", "--network", "allowlist", "--", ask) == "http://127.0.0.1:3128\n"
    assert "this sandbox has no network" in place.carrel.cli("run", "--", "curl -sS http://files.test/")
    with place.carrel.client.sandbox(network="allowlist") as box:
        assert box.info().network == "allowlist"
    run(place.box, ["curl", "-sS", place.urls[0]])
    run(place.box, ["curl", "-sS", f"http://other.test:{place.plain.port}/"])
    until(lambda: {"ok", "denied_by_policy"} <= {each.result for each in place.carrel.records("tools")}, "both records")
    tail = place.carrel.cli("egress", "tail", "--context", "tools", "-n", "1000")
    assert "files.test" in tail and "denied_by_policy" in tail


def test_an_ordinary_user_has_the_same_way_out() -> None:
    with ground(user=True) as (outside, carrel):
        site: Site = outside.site(lambda _method, path, _headers, _body: path.encode())
        box = carrel.context("c", *outbound("files.test", port=site.port))
        assert run(box, ["curl", "-sS", f"http://files.test:{site.port}/one"]) == "/one"
        code = f"import urllib.request as u; print(u.urlopen('http://files.test:{site.port}/two').read().decode())"
        assert run(box, ["python3", "-c", code]) == "/two\n"
        refused = json.loads(run(box, ["curl", "-sS", f"http://other.test:{site.port}/"]))
        assert refused["code"] == "denied_by_policy"
        assert [each.result for each in carrel.records("c", 3)] == ["ok", "ok", "denied_by_policy"]
