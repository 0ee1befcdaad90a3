"""Which registries the host's own package managers are configured with."""

from __future__ import annotations

from pathlib import Path

import pytest

from carrel.egress.index.host import host_registries
from carrel.egress.plan import HostRegistry


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def found(tmp_path: Path, **environment: str) -> set[tuple[str, str, int]]:
    given = {"HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "bin"), **environment}
    return {(each.manager, each.host, each.port) for each in host_registries(given, root=str(tmp_path / "root"))}


def test_nothing_is_known_of_tools_that_are_not_there(tmp_path: Path) -> None:
    assert found(tmp_path) == set()


def test_defaults_are_read_from_the_tools_own_files(tmp_path: Path) -> None:
    npm = tmp_path / "lib/node_modules/npm"
    definition = "  registry: new Definition('registry', {\n    default: 'https://npm.example/',\n"
    put(npm / "node_modules/@npmcli/config/lib/definitions/definitions.js", definition)
    put(tmp_path / "go/go.env", "# defaults\nGOPROXY=https://go.example,direct\n")
    (tmp_path / "bin").mkdir()
    for name, program in (("npm", npm / "bin/npm-cli.js"), ("go", tmp_path / "go/bin/go")):
        put(program, "#!/bin/sh\n").chmod(0o755)
        (tmp_path / "bin" / name).symlink_to(program)
    assert found(tmp_path) == {("npm", "npm.example", 443), ("go", "go.example", 443)}
    put(tmp_path / "home/.npmrc", "//npm.ours.example/:_authToken=secret\nregistry = http://npm.ours.example:4873/\n")
    assert found(tmp_path, GOPROXY="https://go.ours.example|off") == {
        ("npm", "npm.ours.example", 4873),
        ("go", "go.ours.example", 443),
    }
    assert ("npm", "by.variable.example", 443) in found(tmp_path, npm_config_registry="https://by.variable.example/")


def test_scopes_of_npm_are_known_too(tmp_path: Path) -> None:
    put(tmp_path / "root/etc/npmrc", "@ours:registry=https://scope.example/npm/\n")
    assert found(tmp_path) == {("npm", "scope.example", 443)}


def test_cargo_is_known_where_it_is_configured(tmp_path: Path) -> None:
    config = '[registries.ours]\nindex = "sparse+https://cargo.example/index/"\n[source.mirror]\nregistry = "https://m.example"\n'
    put(tmp_path / "home/.cargo/config.toml", config)
    assert found(tmp_path) == {("cargo", "cargo.example", 443), ("cargo", "m.example", 443)}
    put(tmp_path / "home/.cargo/config.toml", "not [ toml")
    variable = {"CARGO_REGISTRIES_OURS_INDEX": "https://v.example/"}
    assert found(tmp_path, **variable) == {("cargo", "v.example", 443)}


def test_both_kinds_of_apt_sources_are_read(tmp_path: Path) -> None:
    apt = tmp_path / "root/etc/apt"
    put(apt / "sources.list", "# deb http://old.example/ a\ndeb [signed-by=/x] http://deb.example/debian stable main\n")
    put(apt / "sources.list.d/a.sources", "Types: deb\nURIs: https://a.example/x https://b.example:8443/\n")
    put(apt / "sources.list.d/off.sources.disabled", "URIs: https://off.example/\n")
    assert found(tmp_path) == {("apt", "deb.example", 80), ("apt", "a.example", 443), ("apt", "b.example", 8443)}


@pytest.mark.parametrize("url", ["file:///srv/npm", "https://", "https://a:99999999/", "nonsense", ""])
def test_what_is_no_url_of_the_web_is_left_out(tmp_path: Path, url: str) -> None:
    put(tmp_path / "home/.npmrc", f"registry={url}\n")
    assert found(tmp_path) == set()


def test_a_registry_is_named_once(tmp_path: Path) -> None:
    put(tmp_path / "root/etc/npmrc", "@a:registry=https://a.example/\n@b:registry=https://a.example/b\n")
    given = {"HOME": str(tmp_path), "PATH": ""}
    assert host_registries(given, root=str(tmp_path / "root")) == (HostRegistry("npm", "a.example", 443),)
