from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from carrel.api.problems import MEDIA_TYPE, answer, invalid, problems
from carrel.errors import BY_CODE, InvalidRequest
from carrel.models import CommandRequest, SandboxRequest
from carrel.server import Running


def finding(model: type[BaseModel], body: str) -> InvalidRequest:
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(body)
    return invalid(caught.value.errors())


@pytest.mark.parametrize(
    ("model", "body", "field", "words"),
    [
        (SandboxRequest, "{", "body", "JSON"),
        (SandboxRequest, "[]", "body", "JSON object"),
        (SandboxRequest, '{"limits": {"memroy_mb": 1}}', "limits.memroy_mb", "'memory_mb'"),
        (SandboxRequest, '{"xyzzy": 1}', "xyzzy", "leave it out"),
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
    error = invalid(caught.value.errors())
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


async def test_what_nobody_expected(
    http: httpx.AsyncClient, server: Running, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("/root/secret.py is broken")

    monkeypatch.setattr(server.plane.operations, "run_command", broken)
    monkeypatch.setattr(server.plane.operations, "stat_file", broken)
    for each in (
        await http.post(f"{box}/commands", json={"command": "x"}),
        await http.get(f"{box}/files/stat", params={"path": "x"}),
    ):
        assert each.status_code == 500
        assert each.json()["code"] == "platform_error"
        assert "secret" not in each.text
