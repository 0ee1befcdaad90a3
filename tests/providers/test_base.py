from __future__ import annotations

import json

import pytest
from tests.support.sandboxes import House

from carrel.errors import Unsupported
from carrel.models import Network
from carrel.providers.base import NETWORK_CAPABILITY, Capability


def test_every_network_has_a_capability() -> None:
    assert set(NETWORK_CAPABILITY) == set(Network)


def test_what_is_promised_is_not_refused(house: House) -> None:
    house.provider.require(*house.provider.capabilities())


def test_what_is_not_promised_is_refused(houses: dict[str, House]) -> None:
    provider = houses["process"].provider
    lacking = sorted(set(Capability) - provider.capabilities())
    assert lacking
    with pytest.raises(Unsupported) as caught:
        provider.require(*Capability)
    assert caught.value.extra["capabilities"] == lacking
    assert all(name in caught.value.detail for name in lacking)


def test_status_tells_what_the_provider_is(house: House) -> None:
    status = house.provider.status()
    assert (status.name, status.available, status.reason) == (house.kind, True, None)
    assert status.capabilities == sorted(house.provider.capabilities())
    assert status.unsafe is (house.kind == "process")
    json.dumps(status.model_dump(mode="json"))
