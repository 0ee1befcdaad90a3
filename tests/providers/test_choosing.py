"""Which provider is right for what is asked: every combination of trust, name and what the host has."""

from __future__ import annotations

import itertools

import pytest

from carrel.errors import CarrelError, InvalidRequest, ProviderUnavailable, Unsupported
from carrel.models import Trust
from carrel.providers import Capability, Handle, Launch, Provider, choose, open_providers
from carrel.providers.choosing import believed_level
from carrel.providers.gvisor.options import GvisorOptions


class Known(Provider):
    """A provider as the choice sees it."""

    def __init__(self, name: str, level: int, there: bool = True):
        self.name, self.isolation_level, self.unsafe = name, level, level == 0
        self._missing = None if there else "something is not there"

    def capabilities(self) -> frozenset[Capability]:
        return frozenset()

    def missing(self) -> str | None:
        return self._missing

    async def start(self, launch: Launch) -> Handle:
        raise NotImplementedError

    async def alive(self, handle: Handle) -> bool:
        raise NotImplementedError

    async def remove(self, handle: Handle) -> None:
        raise NotImplementedError


def host(*providers: Known) -> dict[str, Provider]:
    return {provider.name: provider for provider in providers}


PROCESS, NAMESPACE, GVISOR = Known("process", 0), Known("namespace", 1), Known("gvisor", 2)
BROKEN = Known("namespace", 1, there=False)


@pytest.mark.parametrize(
    ("providers", "name", "trust", "expected"),
    [
        (host(PROCESS, NAMESPACE), "auto", Trust.HIGH, "namespace"),
        (host(PROCESS, NAMESPACE), "auto", Trust.MEDIUM, "namespace"),
        (host(PROCESS, NAMESPACE), "auto", Trust.LOW, ProviderUnavailable),
        (host(PROCESS, NAMESPACE, GVISOR), "auto", Trust.LOW, "gvisor"),
        (host(PROCESS, NAMESPACE, GVISOR), "auto", Trust.HIGH, "gvisor"),
        (host(PROCESS, BROKEN), "auto", Trust.HIGH, "process"),
        (host(PROCESS, BROKEN), "auto", Trust.MEDIUM, ProviderUnavailable),
        (host(PROCESS, BROKEN), "auto", Trust.LOW, ProviderUnavailable),
        (host(BROKEN), "auto", Trust.HIGH, ProviderUnavailable),
        (host(), "auto", Trust.HIGH, ProviderUnavailable),
        (host(PROCESS, NAMESPACE), "process", Trust.HIGH, "process"),
        (host(PROCESS, NAMESPACE), "process", Trust.MEDIUM, Unsupported),
        (host(PROCESS, NAMESPACE), "process", Trust.LOW, Unsupported),
        (host(NAMESPACE), "process", Trust.HIGH, Unsupported),
        (host(PROCESS, NAMESPACE), "namespace", Trust.HIGH, "namespace"),
        (host(PROCESS, NAMESPACE), "namespace", Trust.MEDIUM, "namespace"),
        (host(PROCESS, NAMESPACE), "namespace", Trust.LOW, Unsupported),
        (host(BROKEN), "namespace", Trust.MEDIUM, ProviderUnavailable),
        (host(NAMESPACE), "docker", Trust.MEDIUM, InvalidRequest),
        (host(NAMESPACE), "", Trust.MEDIUM, InvalidRequest),
    ],
)
def test_choose(providers: dict[str, Provider], name: str, trust: Trust, expected: str | type[CarrelError]) -> None:
    if isinstance(expected, str):
        assert choose(providers, name, trust).name == expected
        return
    with pytest.raises(expected) as caught:
        choose(providers, name, trust)
    assert type(caught.value) is expected
    assert caught.value.field in {"provider", "trust"}
    assert caught.value.hint


class Able(Known):
    """A provider with capabilities."""

    def __init__(self, name: str, level: int, *able: Capability):
        super().__init__(name, level)
        self._able = frozenset(able)

    def capabilities(self) -> frozenset[Capability]:
        return self._able


def test_auto_takes_the_strongest_that_can_do_what_is_needed() -> None:
    strong, weak = Able("gvisor", 2, Capability.MASKS), Able("namespace", 1, Capability.MASKS, Capability.FOLDERS)
    both = host(strong, weak)

    def chosen(trust: Trust, *needs: Capability, least: int = 0, name: str = "auto") -> str:
        return choose(both, name, trust, lambda _: needs, least).name

    assert chosen(Trust.MEDIUM, Capability.MASKS) == "gvisor"
    assert chosen(Trust.MEDIUM, Capability.FOLDERS) == "namespace"
    for trust, least, needs in (
        (Trust.LOW, 0, Capability.FOLDERS),
        (Trust.MEDIUM, 2, Capability.FOLDERS),  # a session that has run on level 2
        (Trust.MEDIUM, 0, Capability.IMAGES),
    ):
        with pytest.raises(Unsupported, match=f"provider 'gvisor' on this host cannot enforce: {needs}"):
            chosen(trust, needs, least=least)
    assert chosen(Trust.MEDIUM, least=2, name="namespace") == "namespace", "the caller names it"
    with pytest.raises(ProviderUnavailable):
        choose(host(weak), "auto", Trust.MEDIUM, least=2)


def test_nothing_weaker_than_the_trust_allows_is_ever_chosen() -> None:
    least = {Trust.HIGH: 0, Trust.MEDIUM: 1, Trust.LOW: 2}
    every = [Known(f"p{level}{there}", level, there) for level in range(4) for there in (True, False)]
    for size in range(4):
        for some in itertools.combinations(every, size):
            for trust in Trust:
                usable = [p.isolation_level for p in some if p.missing() is None and p.isolation_level >= least[trust]]
                try:
                    got = choose(host(*some), "auto", trust, listed=[each.name for each in some])
                except ProviderUnavailable:
                    assert usable == []
                else:
                    assert got.isolation_level == max(usable)
                    assert got.missing() is None


def test_a_third_party_provider_counts_as_no_isolation_until_the_operator_lists_it() -> None:
    foreign, listed = Known("jail", 3), {"jail"}
    both = host(NAMESPACE, foreign)
    assert (believed_level(foreign, ()), believed_level(foreign, listed)) == (0, 3)
    assert choose(both, "auto", Trust.MEDIUM).name == "namespace"
    assert choose(both, "auto", Trust.LOW, listed=listed).name == "jail"
    assert choose(both, "jail", Trust.HIGH).name == "jail"
    for trust in (Trust.MEDIUM, Trust.LOW):
        with pytest.raises(Unsupported, match="carrel does not check the isolation") as caught:
            choose(both, "jail", trust)
        assert "CARREL_SANDBOX_THIRD_PARTY" in (caught.value.hint or "")
        assert choose(both, "jail", trust, listed=listed).name == "jail"
    with pytest.raises(ProviderUnavailable, match="jail is a third-party provider that the operator does not list"):
        choose(host(foreign), "auto", Trust.HIGH)
    with pytest.raises(ProviderUnavailable, match="something is not there"):
        choose(host(Known("jail", 0, there=False)), "jail", Trust.MEDIUM)


def test_the_process_provider_is_there_only_when_allowed() -> None:
    assert list(open_providers("/run", "/ws", allow_process=False)) == ["namespace"]
    assert list(open_providers("/run", "/ws", allow_process=True)) == ["namespace", "process"]
    every = open_providers("/run", "/ws", allow_process=True, gvisor=GvisorOptions())
    assert list(every) == ["gvisor", "namespace", "process"]


def test_docker_is_taken_by_name_and_by_auto_only_where_there_are_no_namespaces(tmp_path):
    known = open_providers(
        str(tmp_path), str(tmp_path), allow_process=True, docker=str(tmp_path / "none.sock"), bundles=str(tmp_path)
    )
    assert list(known) == ["namespace", "docker", "process"]
    with pytest.raises(ProviderUnavailable, match="CARREL_DOCKER_SOCKET"):
        choose(known, "docker", Trust.MEDIUM)
    both = host(Known("namespace", 1), Known("docker", 1))
    assert choose(both, "auto", Trust.MEDIUM).name == "namespace"
    assert choose(host(Known("namespace", 1, there=False), Known("docker", 1)), "auto", Trust.MEDIUM).name == "docker"
    with pytest.raises(Unsupported):
        choose(both, "docker", Trust.LOW)
