"""The registries that the host's own package managers are configured with: npm, Go, cargo and apt.

Configuration files and variables are read as the tools read them. Where a tool has a default of its own, it is read
from the tool's files; cargo's is inside its program, so that without configuration nothing is known of it. Blocking;
nothing is run and nothing is fetched. What cannot be read counts as not configured: then a person is asked.
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from carrel.egress.plan import HostRegistry

_PORTS = {"http": 80, "https": 443}
_NPM_DEFAULT = re.compile(r"registry: new Definition\('registry', \{\s*default: '(https?://[^']+)'")
_MOST = 1024 * 1024


def host_registries(environment: Mapping[str, str] | None = None, *, root: str = "/") -> tuple[HostRegistry, ...]:
    """All that are known, each once."""
    given = os.environ if environment is None else environment
    home = given.get("HOME") or os.path.expanduser("~")
    found = {
        "npm": _npm(given, home, root),
        "go": _go(given, home),
        "cargo": _cargo(given, home),
        "apt": _apt(root),
    }
    known = (_registry(manager, url) for manager, urls in found.items() for url in urls)
    return tuple(dict.fromkeys(each for each in known if each is not None))


def _registry(manager: str, url: str) -> HostRegistry | None:
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        return None
    host = (parts.hostname or "").rstrip(".").lower()
    return HostRegistry(manager, host, port) if host and port and parts.scheme in _PORTS else None


def _npm(given: Mapping[str, str], home: str, root: str) -> Iterator[str]:
    """The registry and those of scopes."""
    program = shutil.which("npm", path=given.get("PATH"))
    package = None if program is None else Path(os.path.realpath(program)).parent.parent
    prefix = None if package is None else package.parent.parent.parent
    options: dict[str, str] = {}
    if package is not None:
        default = _NPM_DEFAULT.search(
            _read(package / "node_modules/@npmcli/config/lib/definitions/definitions.js")
            or _read(package / "../@npmcli/config/lib/definitions/definitions.js")
        )
        options |= {} if default is None else {"registry": default[1]}
    files = [*([prefix / "etc/npmrc"] if prefix else []), Path(root, "etc/npmrc"), Path(home, ".npmrc")]
    for path in files:
        for line in _read(path).splitlines():
            name, separator, value = line.partition("=")
            if separator and (name.strip() == "registry" or name.strip().endswith(":registry")):
                options[name.strip()] = value.strip().strip("\"'")
    for name, value in given.items():
        if name.lower() == "npm_config_registry" and value:
            options["registry"] = value
    yield from options.values()


def _go(given: Mapping[str, str], home: str) -> Iterator[str]:
    """The proxies of modules; `direct` and `off` are none."""
    program = shutil.which("go", path=given.get("PATH"))
    files = [] if program is None else [Path(os.path.realpath(program)).parent.parent / "go.env"]
    files.append(Path(given.get("GOENV") or os.path.join(given.get("XDG_CONFIG_HOME") or f"{home}/.config", "go/env")))
    value = ""
    for path in files:
        for line in _read(path).splitlines():
            if line.startswith("GOPROXY="):
                value = line.removeprefix("GOPROXY=")
    yield from re.split(r"[,|]", given.get("GOPROXY") or value)


def _cargo(given: Mapping[str, str], home: str) -> Iterator[str]:
    """The registries and the sources that stand for the default one."""
    folder = Path(given.get("CARGO_HOME") or f"{home}/.cargo")
    for path in (folder / "config.toml", folder / "config"):
        try:
            found = tomllib.loads(_read(path))
        except tomllib.TOMLDecodeError:
            continue
        for table, key in (("registries", "index"), ("source", "registry")):
            entries = found.get(table)
            for each in entries.values() if isinstance(entries, dict) else ():
                if isinstance(each, dict) and isinstance(url := each.get(key), str):
                    yield url.removeprefix("sparse+")
    for name, url in given.items():
        if re.fullmatch(r"CARGO_REGISTRIES_\w+_INDEX", name):
            yield url.removeprefix("sparse+")


def _apt(root: str) -> Iterator[str]:
    """The places of packages in both kinds of files."""
    folder = Path(root, "etc/apt/sources.list.d")
    for path in (Path(root, "etc/apt/sources.list"), *sorted(folder.glob("*.list")), *sorted(folder.glob("*.sources"))):
        for line in _read(path).splitlines():
            if path.suffix == ".sources" and line.lower().startswith("uris:"):
                yield from line.partition(":")[2].split()
            elif re.match(r"\s*deb(-src)?\s", line):
                yield from (each for each in line.split() if "://" in each)


def _read(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST)
    except OSError:
        return ""
