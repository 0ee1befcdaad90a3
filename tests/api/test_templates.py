from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from tests.support.governed import POLICY, Known
from tests.support.refusals import refused

from carrel.config import Settings


@pytest.fixture
def settings(settings: Settings) -> Settings:
    folder = Path(settings.data_dir) / "templates" / "tools"
    folder.mkdir(parents=True)
    (folder / "template.toml").write_text('description = "for tools"\nenv = { KEY = "value-of-it" }\n')
    (folder / "settings.json").write_text(json.dumps(POLICY))
    return settings


async def test_listed_and_used(http: httpx.AsyncClient, known: Known) -> None:
    items = (await http.get("/v1/templates")).json()["items"]
    shipped, listed = items[0], next(each for each in items if not each["shipped"])
    assert (shipped["name"], shipped["shipped"], shipped["built"]) == ("code-interpreter", True, False)
    assert "pandas" in shipped["packages"]
    assert (listed["name"], listed["description"], listed["env"]) == ("tools", "for tools", ["KEY"])
    assert "value-of-it" not in json.dumps(listed)
    agent = await known("coder", "agent", "operate", namespace="team")
    assert (await agent.get("/v1/templates")).json()["items"] == items
    made = await agent.post("/v1/sandboxes", json={"context_id": "team:a", "template": "tools"})
    assert (made.status_code, made.json()["template"]) == (201, "tools")
    assert (await agent.get("/v1/sandboxes/team:a")).json()["template"] == "tools"
    assert (await agent.post("/v1/sandboxes/team:a/commands", json={"command": "curl x"})).status_code == 403
    explained = await agent.post("/v1/contexts/team:a/policy/explain", json={"command": "curl x"})
    assert explained.json()["parts"][0]["source"] == "tools/settings.json"
    problem = refused(
        await agent.post("/v1/sandboxes", json={"context_id": "team:b", "template": "tool"}), 400, "template"
    )
    assert problem["hint"] == "did you mean 'tools'?"
    refused(await agent.post("/v1/sandboxes", json={"context_id": "team:a", "template": "x"}), 409, "template")
    refused(await agent.post("/v1/sandboxes", json={"template": "../x"}), 400, "template")


async def test_its_secrets_are_for_who_administers_all(http: httpx.AsyncClient, known: Known) -> None:
    at = "/v1/templates/tools/secrets"
    kept = await http.put(f"{at}/KEY", json={"value": "open-sesame"})
    assert (kept.status_code, kept.json()["version"]) == (200, 1)
    listed = await http.get(at)
    assert [each["name"] for each in listed.json()["items"]] == ["KEY"] and "sesame" not in listed.text
    refused(await http.put("/v1/templates/tolls/secrets/KEY", json={"value": "open-sesame"}), 400, "template")
    for who in (await known("op", "service", "operate"), await known("part", "person", "administer", namespace="team")):
        refused(await who.get(at), 403, None)
        refused(await who.put(f"{at}/KEY", json={"value": "open-sesame"}), 403, None)
        refused(await who.delete(f"{at}/KEY"), 403, None)
    assert (await http.delete(f"{at}/KEY")).status_code == 204
    refused(await http.delete(f"{at}/KEY"), 404, "name")
    done = (await http.get("/v1/audit", params={"text": "tools"})).json()["items"]
    names = {(each["name"], each["chain"].partition(":")[0]) for each in done}
    assert {("put_template_secret", "server"), ("delete_template_secret", "server")} <= names
