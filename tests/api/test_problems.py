from __future__ import annotations

import json
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from tests.support.refusals import Contract

from carrel.api.problems import MEDIA_TYPE, answer, invalid, problems
from carrel.errors import BY_CODE, InvalidRequest
from carrel.models import ApprovalBatch, CommandRequest, SandboxRequest
from carrel.server import RunningServer


def finding(model: type[BaseModel], body: str) -> InvalidRequest:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(body)
    return invalid(caught.value.errors(), model)


@pytest.mark.parametrize(
    ("model", "body", "field", "words"),
    [
        (SandboxRequest, "{", "body", "JSON"),
        (SandboxRequest, "[]", "body", "JSON object"),
        (SandboxRequest, '{"limits": {"memroy_mb": 1}}', "limits.memroy_mb", "'memory_mb'"),
        (SandboxRequest, '{"xyzzy": 1}', "xyzzy", "leave it out"),
        (SandboxRequest, '{"tool_name": 1}', "tool_name", "leave it out"),
        (SandboxRequest, '{"limits": {"labels": 1}}', "limits.labels", "leave it out"),
        (ApprovalBatch, '{"ids": ["a"], "decision": {"approve": true, "scop": "once"}}', "decision.scop", "'scope'"),
        (SandboxRequest, '{"limits": {"cpus": 0}}', "limits.cpus", "greater than 0"),
        (SandboxRequest, '{"context_id": "a b"}', "context_id", "a context has letters"),
        (SandboxRequest, '{"env": {"A B": ""}}', "env.A B", "pattern"),
        (CommandRequest, "{}", "command", "add it"),
        (CommandRequest, '{"command": []}', "command", "/docs"),
        (CommandRequest, '{"command": ["a", 1]}', "command", "/docs"),
    ],
)
def test_a_finding_names_field_and_remedy(model: type[BaseModel], body: str, field: str, words: str) -> None:
    error = finding(model, body)
    assert error.field == field
    assert words in f"{error.detail} {error.hint}"


@given(st.text(max_size=60))
def test_any_unknown_field_is_refused_by_its_name(name: str) -> None:
    if name in SandboxRequest.model_fields:
        return
    with pytest.raises(ValidationError) as caught:
        SandboxRequest.model_validate({name: 1})
    error = invalid(caught.value.errors(), SandboxRequest)
    assert error.hint and len(error.field or "") <= 200


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_every_error_has_an_answer(code: str) -> None:
    response = answer(BY_CODE[code]("x", field="f", hint="h"))
    problem = json.loads(bytes(response.body))
    assert response.media_type == MEDIA_TYPE
    assert (response.status_code, problem["code"], problem["field"], problem["hint"]) == (
        BY_CODE[code].status,
        code,
        "f",
        "h",
    )


def test_every_route_can_be_refused_at_the_door() -> None:
    assert set(problems()) == {400, 401, 403, 429, "default"}
    assert list(problems(409, 404)) == [400, 401, 403, 404, 409, 429, "default"]


async def test_hint_for_an_unknown_field_names_one_of_the_same_request(http: httpx.AsyncClient, box: str) -> None:
    for path, body, hint in (
        ("/v1/sandboxes", {"tool_name": "x"}, "leave it out; /docs lists the fields"),
        ("/v1/sandboxes", {"limits": {"memory": 5}}, "did you mean 'memory_mb'?"),
        ("/v1/tokens", {"nam": "x"}, "did you mean 'name'?"),
        (f"{box}/commands", {"command": "a", "comand": "b"}, "did you mean 'command'?"),
    ):
        answer = await http.post(path, json=body)
        assert (answer.status_code, answer.json()["hint"]) == (400, hint), path


async def test_allow_names_every_method_of_a_path(http: httpx.AsyncClient, contract: Contract, box: str) -> None:
    several = 0
    known = [(re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), ways) for path, ways in contract.document["paths"].items()]
    for path in contract.document["paths"]:
        asked = re.sub(r"\{\w+\}", "x", path)
        methods = {name.upper() for pattern, ways in known if pattern.fullmatch(asked) for name in ways}
        several += len(methods) > 1
        answer = await http.patch(asked)
        assert answer.status_code == 405, path
        assert set(answer.headers["allow"].split(", ")) == methods, path
        assert answer.json()["hint"] == f"use {answer.headers['allow']}"
    assert several >= 16
    assert (await http.post("/docs")).headers["allow"] == "GET, HEAD"


async def test_what_nobody_expected(
    http: httpx.AsyncClient, server: RunningServer, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("/root/secret.py is broken")

    monkeypatch.setattr(server.plane.operations, "run_command", broken)
    monkeypatch.setattr(server.plane.operations, "forward", broken)
    for each in (
        await http.post(f"{box}/commands", json={"command": "x"}),
        await http.get(f"{box}/files/stat", params={"path": "x"}),
    ):
        assert each.status_code == 500
        assert each.json()["code"] == "platform_error"
        assert "secret" not in each.text
