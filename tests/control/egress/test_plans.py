from __future__ import annotations

import os
import stat
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.records import SESSION

from carrel.control.egress.plans import CA_FILE, Plans, inspects, read_upstreams, withheld
from carrel.egress.plan import Upstream
from carrel.errors import InvalidRequest, PlatformError
from carrel.models import Network
from carrel.policy.documents import sources
from carrel.policy.rules.layers import Layer, Policy
from carrel.store import SessionRecord

RECORD = replace(SESSION, network=Network.ALLOWLIST)
CREDENTIAL = '{"host": "api.example", "secret": "key", "methods": ["get"], "paths": ["/v1"]}'
UPSTREAMS = (Upstream("eu", "http://h:1"), Upstream("us", "socks5://h:2"))


def policy(*webs: str) -> Policy:
    layers = [Layer("settings.json", None, sources.load(f'{{"web_access": {web}}}')) for web in webs]
    return Policy.of(layers, context_id="c", workspace="/workspace")


def plans(tmp_path: Path, by: Policy, **values: bytes) -> Plans:
    async def policy_of(_record: SessionRecord) -> Policy:
        return by

    async def values_of(_record: SessionRecord) -> Mapping[str, bytes]:
        return values

    return Plans(str(tmp_path), UPSTREAMS, policy_of, values_of)


async def test_a_plain_plan_has_the_policy_and_all_proxies(tmp_path: Path) -> None:
    by = policy('{"allowed_domains": ["a.example"]}')
    plan = await plans(tmp_path, by).of(RECORD)
    assert (plan.sandbox, plan.context, plan.layers) == ("sbx-1", "c", by.layers)
    assert plan.upstreams == UPSTREAMS and plan.injected == () and plan.authority is None
    assert plan.indexes, "the host's own pip uses some index"
    assert os.listdir(tmp_path) == []


async def test_a_credential_is_for_the_proxy_alone(tmp_path: Path) -> None:
    by = policy(f'{{"credentials": [{CREDENTIAL}]}}')
    assert inspects(by) and withheld(by) == {"key"}
    made = plans(tmp_path, by, key=b"hush-1234\n", other=b"seen")
    plan = await made.of(RECORD)
    [injected] = plan.injected
    assert (injected.value, injected.secret, injected.methods) == ("Bearer hush-1234", "hush-1234", ("GET",))
    files = await made.sandbox_secrets(RECORD, {"key": b"hush-1234\n", "other": b"seen"})
    assert files["other"] == b"seen" and b"hush" not in files["key"]
    authority = tmp_path / "ca-sbx-1.pem"
    assert stat.S_IMODE(authority.stat().st_mode) == 0o600
    assert plan.authority == authority.read_text() and "PRIVATE KEY" in plan.authority
    assert b"BEGIN CERTIFICATE" in files[CA_FILE] and b"PRIVATE KEY" not in files[CA_FILE]
    assert plan.authority.split("-----BEGIN CERTIFICATE-----")[1].strip() in files[CA_FILE].decode()
    assert (await made.of(RECORD)).authority == plan.authority
    assert (await made.of(replace(RECORD, id="sbx-2"))).authority != plan.authority
    made.forget("sbx-1")
    made.forget("sbx-1")
    assert os.listdir(tmp_path) == ["ca-sbx-2.pem"]


def test_a_sandbox_trusts_the_authority_that_the_proxy_has_however_many_ask_for_it_first(tmp_path: Path) -> None:
    made = plans(tmp_path, policy())
    together = threading.Barrier(8)

    def first(name: str) -> str:
        together.wait(20)
        return made._authority(name)

    with ThreadPoolExecutor(8) as pool:
        for name in map(str, range(10)):
            assert set(pool.map(first, [name] * 8)) == {(tmp_path / f"ca-{name}.pem").read_text()}
    assert len(os.listdir(tmp_path)) == 10


async def test_an_authority_that_was_begun_is_used_once_and_forgotten_with_the_sandbox(tmp_path: Path) -> None:
    made = plans(tmp_path, policy(f'{{"credentials": [{CREDENTIAL}]}}'), key=b"hush-1234")
    made.prepare("sbx-1")
    begun = made._making["sbx-1"]
    assert (await made.of(RECORD)).authority == begun.result() == (tmp_path / "ca-sbx-1.pem").read_text()
    made.prepare("sbx-2")  # its start fails
    made.forget("sbx-2")
    assert made._making == {} and os.listdir(tmp_path) == ["ca-sbx-1.pem"]


async def test_a_secret_that_is_not_there_yet_is_left_out(tmp_path: Path) -> None:
    assert (await plans(tmp_path, policy(f'{{"credentials": [{CREDENTIAL}]}}')).of(RECORD)).injected == ()


@pytest.mark.parametrize("value", [b"", b"two\r\nlines", b"\xff", "später".encode()])
async def test_a_value_that_no_header_takes_is_refused(tmp_path: Path, value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot be put into a header"):
        await plans(tmp_path, policy(f'{{"credentials": [{CREDENTIAL}]}}'), key=value).of(RECORD)


@pytest.mark.parametrize(
    ("webs", "names"),
    [
        (['{"upstreams": ["us"]}'], ["us"]),
        (['{"upstreams": ["us", "eu"]}', '{"upstreams": ["eu"]}'], ["eu"]),
        (["{}", '{"upstreams": ["us", "eu"]}'], ["us", "eu"]),
    ],
)
async def test_a_policy_chooses_among_the_proxies(tmp_path: Path, webs: list[str], names: list[str]) -> None:
    plan = await plans(tmp_path, policy(*webs)).of(RECORD)
    assert [each.name for each in plan.upstreams] == names


@pytest.mark.parametrize("webs", [['{"upstreams": ["mars"]}'], ['{"upstreams": ["us"]}', '{"upstreams": ["eu"]}']])
async def test_nobody_goes_directly_because_a_proxy_is_missing(tmp_path: Path, webs: list[str]) -> None:
    with pytest.raises(PlatformError, match="does not have"):
        await plans(tmp_path, policy(*webs)).of(RECORD)


def test_the_file_of_proxies(tmp_path: Path) -> None:
    assert read_upstreams(None) == ()
    file = tmp_path / "upstreams.json"
    file.write_text(
        '[{"name": "eu", "url": "http://u:p@h:1"}, {"name": "us", "url": "socks5://h:2", "remote_names": true}]'
    )
    assert read_upstreams(str(file)) == (Upstream("eu", "http://u:p@h:1"), Upstream("us", "socks5://h:2", True))
    unfit = ["https://h:443", "http://h", "socks5://h:2/path", "http://u%zz:p@h:1/x"]
    odd = [f'[{{"name": "a", "url": "{url}"}}]' for url in ("ftp://h", *unfit)]
    for text in ("{}", '[{"name": "eu"}]', "nonsense", *odd):
        file.write_text(text)
        with pytest.raises(InvalidRequest):
            read_upstreams(str(file))
    file.write_text('[{"name": "eu", "url": "http://hush@h"}, {"name": "eu", "url": "http://h"}]')
    with pytest.raises(InvalidRequest, match="twice") as refused:
        read_upstreams(str(file))
    assert "hush" not in str(refused.value)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_upstreams(str(tmp_path / "absent"))


async def test_internet_is_refused_where_an_upstream_looks_names_up(tmp_path: Path) -> None:
    async def policy_of(_record: SessionRecord) -> Policy:
        return Policy.open()

    async def values_of(_record: SessionRecord) -> dict[str, bytes]:
        return {}

    record = replace(RECORD, network=Network.INTERNET)
    here = Plans(str(tmp_path), [Upstream("eu", "http://proxy.example:3128")], policy_of, values_of)
    assert (await here.of(record)).internet and not (await here.of(RECORD)).internet
    there = Plans(str(tmp_path), [Upstream("eu", "http://proxy.example:3128", remote_names=True)], policy_of, values_of)
    with pytest.raises(InvalidRequest, match="look names up"):
        await there.of(record)
