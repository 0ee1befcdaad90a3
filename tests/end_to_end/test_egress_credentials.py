"""Credentials that agents use and never have, and the proxies that a server itself goes through."""

from __future__ import annotations

import json
import os
import secrets
import tarfile
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.support.egress_ground import Carrel, Outside, Site, ground, outbound, processes, run, until
from tests.support.squid import Squid

from carrel.client import Sandbox


def echo(_method: str, path: str, headers: Mapping[str, str], _body: bytes) -> bytes:
    """What a careless server does: it says back what it was told."""
    told = headers.get("authorization", "nothing")
    return json.dumps({"path": path, "told": told, "quoted": urllib.parse.quote(told, safe="")}).encode()


class Place:
    """A server, and a site that wants a credential."""

    def __init__(self, outside: Outside, carrel: Carrel):
        self.outside, self.carrel = outside, carrel
        self.api = outside.site(echo, tls=True)

    @property
    def url(self) -> str:
        return f"https://api.test:{self.api.port}"

    def context(self, name: str, **more: object) -> Sandbox:
        credential = {"host": "api.test", "secret": "API_KEY", **more}
        return self.carrel.context(
            name,
            *outbound("api.test", "other.test", port=self.api.port),
            sources={"web_access": {"credentials": [credential], "inspected_domains": ["other.test"]}},
        )

    def put(self, context: str, value: str) -> None:
        self.carrel.cli("secret", "set", context, "API_KEY", stdin=value)

    def told(self) -> str | None:
        """The credential of the last request."""
        return self.api.requests[-1][2].get("authorization")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with ground() as (outside, carrel):
        yield Place(outside, carrel)


def test_a_credential_is_used_changed_and_taken_away_and_is_never_inside(place: Place) -> None:
    first, second = (f"key-{secrets.token_hex(16)}" for _ in range(2))
    box = place.context("c")
    place.put("c", first)
    shown = run(box, ["cat", "/run/secrets/API_KEY"])
    assert first not in shown and shown
    run(box, ["curl", "-sS", "-o", "answer.json", f"{place.url}/a"])
    answer = json.loads(box.files.read("answer.json"))
    assert place.told() == f"Bearer {first}"
    assert first not in json.dumps(answer) and answer["path"] == "/a"
    # Another host of the same server gets none, and a placeholder that is sent there stays one.
    run(box, ["curl", "-sS", "-H", f"Authorization: Bearer {shown}", f"https://other.test:{place.api.port}/"])
    assert place.told() == f"Bearer {shown}"

    place.put("c", second)
    run(box, ["curl", "-sS", f"{place.url}/b"])
    assert place.told() == f"Bearer {second}"

    seen = run(box, "env; cat /proc/self/environ /run/secrets/*; find /run -type f", ok=False)
    assert first not in seen and second not in seen
    snapshot = box.snapshot()
    target = place.carrel.directory / "snapshot.tar"
    box.download_snapshot(snapshot, target)
    with tarfile.open(target) as archive:
        assert "answer.json" in {name.removeprefix("./") for name in archive.getnames()}
    place.carrel.records("c", 3)
    exported = b"".join(place.carrel.client.audit.export(context_id="c")).decode()
    assert "api.test" in exported
    tail = place.carrel.cli("egress", "tail", "--context", "c")
    assert "api.test" in tail
    for value in (first, second):
        assert value not in exported and value not in tail
        assert not [words for _, words in processes().values() if value in words]
        assert not _holding(place.carrel.directory, value.encode())

    place.carrel.cli("secret", "rm", "c", "API_KEY")
    run(box, ["curl", "-sS", f"{place.url}/c"], ok=False)
    assert place.told() is None


def _holding(directory: Path, value: bytes) -> list[str]:
    """The files below a directory that hold a value: the database, logs, the volumes and everything else."""
    found = []
    for top, _directories, names in os.walk(directory):
        for name in names:
            path = Path(top) / name
            if (
                path.is_file()
                and not path.is_symlink()
                and path.stat().st_size < 1 << 26
                and value in path.read_bytes()
            ):
                found.append(str(path))
    return found


def test_a_credential_is_only_for_its_methods_and_paths(place: Place) -> None:
    value = f"key-{secrets.token_hex(16)}"
    box = place.context("narrow", methods=["GET"], paths=["/v1"], header="X-Key", format="{secret}")
    place.put("narrow", value)
    for words, told in {
        ("/v1/x",): value,
        ("/v1",): value,
        ("/v2",): None,
        ("/v1/../v2", "--path-as-is"): None,
        ("/v1%2f..%2fv2",): None,
        ("/v1/x", "-XPOST"): None,
    }.items():
        run(box, ["curl", "-sS", *words[1:], place.url + words[0]])
        assert place.api.requests[-1][2].get("x-key") == told, words
    used = [each for each in place.carrel.records("narrow", 6) if each.arguments.get("credential")]
    assert len(used) == 2 and {each.arguments["credential"] for each in used} == {"API_KEY"}


def test_what_the_agent_sends_does_not_stand_beside_the_credential(place: Place) -> None:
    value = f"key-{secrets.token_hex(16)}"
    box = place.context("own")
    place.put("own", value)
    run(box, ["curl", "-sS", "-H", "Authorization: Bearer mine", place.url])
    assert place.told() == f"Bearer {value}"


def test_other_tools_trust_the_way_out_too(place: Place) -> None:
    value = f"key-{secrets.token_hex(16)}"
    box = place.context("tools")
    place.put("tools", value)
    code = f"import urllib.request as u; print(u.urlopen('{place.url}/p').read().decode())"
    assert value not in run(box, ["python3", "-c", code])
    assert place.told() == f"Bearer {value}"
    before = len(place.api.requests)
    code = f"fetch('{place.url}/n').then(r => r.text()).then(console.log)"
    assert value not in run(box, ["node", "-e", code])
    assert len(place.api.requests) == before + 1 and place.told() == f"Bearer {value}"


# through proxies


@pytest.fixture
def squids() -> Iterator[list[Squid]]:
    made: list[Squid] = []
    try:
        made += [Squid("one", "word-1"), Squid("two", "wörd 2:@/")]
        yield made
    finally:
        for each in made:
            each.close()


def test_everything_goes_through_the_first_proxy_that_works(squids: list[Squid], tmp_path: Path) -> None:
    first, second = squids
    password = urllib.parse.quote("wörd 2:@/", safe="")
    upstreams = [
        {"name": "north", "url": f"http://one:word-1@127.0.0.1:{first.port}"},
        {"name": "south", "url": f"http://two:{password}@127.0.0.1:{second.port}"},
    ]
    file = tmp_path / "upstreams.json"
    file.write_text(json.dumps(upstreams))
    with ground(CARREL_EGRESS_UPSTREAMS_FILE=str(file)) as (outside, carrel):
        plain: Site = outside.site(lambda *_: b"plain")
        safe: Site = outside.site(lambda *_: b"safe", tls=True)
        rules = [*outbound("files.test", port=plain.port), *outbound("api.test", port=safe.port)]
        box = carrel.context("c", *rules, sources={"web_access": {"inspected_domains": ["api.test"]}})
        south = carrel.context("s", *rules, sources={"web_access": {"upstreams": ["south"]}})
        assert run(box, ["curl", "-sS", f"http://files.test:{plain.port}/"]) == "plain"
        assert run(box, ["curl", "-sS", f"https://api.test:{safe.port}/"]) == "safe"
        assert run(south, ["curl", "-sS", f"http://files.test:{plain.port}/"]) == "plain"
        assert {each.arguments.get("upstream") for each in carrel.records("c", 2)} == {"north"}
        assert {each.arguments.get("upstream") for each in carrel.records("s", 1)} == {"south"}
        first.kill()
        done = len(carrel.records("c"))
        assert run(box, ["curl", "-sS", f"http://files.test:{plain.port}/"]) == "plain"
        assert carrel.records("c", done + 1)[-1].arguments["upstream"] == "south"
        second.kill()
        refusal = json.loads(run(box, ["curl", "-sS", f"http://files.test:{plain.port}/"]))
        assert refusal["code"] == "upstream_unavailable" and "word" not in json.dumps(refusal)
        assert len(plain.requests) == 3  # nothing goes around a proxy that is down
        assert "word-1" not in until(lambda: carrel.cli("egress", "tail"), "the log")
        assert "word-1" not in carrel.log.read_text()
        assert not [words for _, words in processes().values() if "word-1" in words]
