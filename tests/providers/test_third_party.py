"""Providers of other packages: which are loaded, which are refused and why. Packages are real, but tiny."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.records import Promising

from carrel.errors import ProviderUnavailable
from carrel.models import Trust
from carrel.providers import Provider, ProviderContext, choose, open_providers
from carrel.providers.doctor import host_report

GOOD = """
from carrel.providers import Provider

class Jail(Provider):
    name, isolation_level = "jail", 1
    def __init__(self, context): self.context = context
    def capabilities(self): return frozenset()
    def missing(self): return None
    async def start(self, launch): raise NotImplementedError
    async def alive(self, handle): return False
    async def remove(self, handle): return None
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package with an entry point, as an installer would leave it."""

    def installed(code: str, name: str = "jail", factory: str = "Jail", package: str = "foreign") -> None:
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, package, raising=False)
        (tmp_path / f"{package}.py").write_text(textwrap.dedent(code))
        info = tmp_path / f"{package}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[carrel.providers]\n{name} = {package}:{factory}\n")

    return installed


def opened(*listed: str, run: str = "/run") -> dict[str, Provider]:
    return open_providers(run, "/ws", allow_process=False, shared={"/envs": "/e"}, bundles="/b", third_party=listed)


def test_a_factory_gets_its_context(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(GOOD)
    monkeypatch.setenv("CARREL_PROVIDER_JAIL_PROGRAM", "/opt/jail")
    assert list(opened("jail")) == ["namespace", "jail"]
    jail = opened("jail")["jail"]
    assert jail.context == ProviderContext(  # type: ignore[attr-defined]
        "/run/provider-jail", {"/envs": "/e"}, images="", bundles="/b", settings={"program": "/opt/jail"}
    )
    [status] = [each for each in host_report(opened("jail"), ["jail"]).providers if each.name == "jail"]
    assert (status.available, status.isolation_level, status.package) == (True, 1, "foreign 1.5")
    assert list(open_providers("/run", "/ws", allow_process=False)) == ["namespace"], "only a server looks for them"


@pytest.mark.parametrize(
    ("code", "factory", "reason"),
    [
        ("import no_such_module", "Jail", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise OSError('x' * 9999)", "Jail", "cannot be imported: OSError: xxx"),
        (GOOD, "Missing", "cannot be imported: AttributeError"),
        (GOOD.replace("def missing(self): return None", ""), "Jail", "made no provider: TypeError: Can't instantiate"),
        ("def Jail(context): return 7", "Jail", "returned a int, which does not derive from carrel.providers.Provider"),
        (GOOD.replace('"jail", 1', '"other", 1'), "Jail", "it calls itself 'other', and its entry point 'jail'"),
        (GOOD.replace('"jail", 1', '"jail", 9'), "Jail", "isolation_level is 9, not one of 0, 1, 2, 3"),
        (GOOD.replace('"jail", 1', '"jail", 0'), "Jail", "`unsafe` is true for level 0 and for no other"),
        (GOOD.replace("frozenset()", 'frozenset({"magic"})'), "Jail", "it promises 'magic', which is no capability"),
        (GOOD.replace("missing(self): return None", "missing(self): return 3"), "Jail", "missing() returns 3"),
        (GOOD.replace("missing(self): return None", "missing(self): 1 / 0"), "Jail", "ZeroDivisionError"),
    ],
)
def test_one_that_does_not_fit_is_refused_with_the_reason(
    install: Install, code: str, factory: str, reason: str
) -> None:
    install(code, factory=factory)
    providers = opened("jail")
    with pytest.raises(ProviderUnavailable) as caught:
        choose(providers, "jail", Trust.MEDIUM, listed=["jail"])
    assert reason in caught.value.detail and len(caught.value.detail) < 700
    assert choose({"jail": providers["jail"], "namespace": Promising()}, "auto", Trust.MEDIUM).name == "namespace"
    report = host_report(providers, ["jail"])
    [status] = [each for each in report.providers if each.name == "jail"]
    assert not status.available and reason in (status.reason or "") and status.package == "foreign 1.5"


@pytest.mark.parametrize("name", ["docker", "namespace", "auto", "Jail", "a b", "x" * 40])
def test_a_name_of_carrel_or_a_strange_one_is_refused(install: Install, name: str) -> None:
    install(GOOD, name=name)
    providers = opened(name)
    assert providers["namespace"].__module__.startswith("carrel.")
    missing = providers[f"{name}@foreign 1.5"].missing()
    assert missing is not None and ("is a name of carrel" in missing or "lower-case letters" in missing)


def test_two_packages_with_one_name_are_both_refused(install: Install) -> None:
    install(GOOD)
    install(GOOD, package="second")
    missing = {name: provider.missing() for name, provider in opened("jail").items() if "@" in name}
    assert set(missing) == {"jail@foreign 1.5", "jail@second 1.5"}
    assert all("several installed packages" in (text or "") for text in missing.values())


def test_a_listed_provider_that_is_not_installed_says_so() -> None:
    with pytest.raises(ProviderUnavailable, match="no installed package has it"):
        choose(opened("typo"), "typo", Trust.HIGH, listed=["typo"])
