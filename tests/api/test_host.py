from __future__ import annotations

import httpx
import pytest
from tests.support.refusals import refused

from carrel.models import HostReport
from carrel.server import RunningServer


async def test_the_report(http: httpx.AsyncClient) -> None:
    report = HostReport.model_validate((await http.get("/v1/host")).json())
    assert {"namespace", "process"} <= {provider.name for provider in report.providers}
    assert [provider.unsafe for provider in report.providers if provider.name == "process"] == [True]
    assert all(check.why for check in report.checks)


async def test_ready_only_while_some_provider_can_be_used(
    http: httpx.AsyncClient, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("/healthz", "/readyz"):
        assert (await http.get(path)).json() == {"status": "ok"}
    for provider in server.plane.providers.values():
        monkeypatch.setattr(provider, "missing", lambda: "a test took it away")
    refused(await http.get("/readyz"), 503, None, "provider_unavailable")
    assert (await http.get("/healthz")).status_code == 200
