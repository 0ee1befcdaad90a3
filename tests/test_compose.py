"""The compose file: its variables are settings, and its server is an ordinary user. `tests/cluster/test_compose.py` runs it."""

from __future__ import annotations

from pathlib import Path

import yaml

import carrel
from carrel import config

FILE = Path(__file__).parent.parent / "deploy/compose/compose.yaml"


def test_the_server_is_an_ordinary_user_with_known_settings() -> None:
    server = yaml.safe_load(FILE.read_text())["services"]["server"]
    assert server["image"] == f"localhost/carrel-server:{carrel.__version__}"
    assert (server["user"], server["read_only"], server["cap_drop"]) == ("1000:1000", True, ["ALL"])
    assert "privileged" not in server
    assert all(port.startswith("127.0.0.1:") for port in server["ports"])
    known = {each.env for each in config.declarations()}
    assert set(server["environment"]) <= known


def test_what_is_named_is_there() -> None:
    whole = yaml.safe_load(FILE.read_text())
    for service in whole["services"].values():
        for volume in service["volumes"]:
            assert volume.partition(":")[0] in whole["volumes"]
        assert set(service.get("depends_on", ())) <= set(whole["services"])
