"""Reads how this host's package managers are configured: the indexes of pip, the registries of npm, Go, cargo and apt.

Reads configuration files and variables as the tools do, and a tool's defaults from its own files. Cargo's default is
compiled in, so without configuration it is unknown. Unreadable registries count as not configured; then a person is
asked. Blocking; runs nothing and fetches nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from configparser import Error as ConfigError
from configparser import RawConfigParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from carrel.egress.plan import HostRegistry, PackageIndex
from carrel.errors import InvalidRequest, PlatformError

_NAME = "pip.conf"
_FIRST_INDEX = re.compile(r"""^\w+ *= *\w+\(\s*(["'])([^"'\\\n]+)\1""", re.MULTILINE)
_MODULE = "pip/_internal/models/index.py"
_WHEELS = "/usr/share/python-wheels"
_PORTS = {"http": 80, "https": 443}
_NPM_DEFAULT = re.compile(r"registry: new Definition\('registry', \{\s*default: '(https?://[^']+)'")
_MOST = 1024 * 1024


# pip


def host_index(
    environment: Mapping[str, str] | None = None, *, root: str = "/", prefix: str = sys.prefix
) -> list[PackageIndex]:
    """Return the indexes of the host's `pip`, the extra ones first: these hold the operator's own packages, which a
    package of the same name elsewhere must not replace. Empty when `pip` may use none.
    """
    options = _PipOptions(os.environ if environment is None else environment, root, prefix)
    if options.truth("no-index"):
        return []
    extra = (options.get("extra-index-url") or "").split()
    main = options.get("index-url") or options.get("pypi-url") or default_index()
    trusted = {each.lower() for each in (options.get("trusted-host") or "").split()}
    cert = options.get("cert")
    named = [
        *((f"extra-{at}" if len(extra) > 1 else "extra", url) for at, url in enumerate(extra, 1)),
        ("default", main),
    ]
    return [
        PackageIndex(name, _checked(url), _is_trusted(url, trusted), os.path.expanduser(cert) if cert else None)
        for name, url in named
    ]


def host_proxy(
    environment: Mapping[str, str] | None = None, *, root: str = "/", prefix: str = sys.prefix
) -> str | None:
    """Return the proxy of the host's `pip`, or None."""
    proxy = _PipOptions(os.environ if environment is None else environment, root, prefix).get("proxy")
    if proxy:
        return proxy if "://" in proxy else f"http://{proxy}"
    if environment is None:
        found = {}
        if any(name.lower().endswith("_proxy") for name in os.environ):
            from urllib.request import getproxies_environment  # not at the top: it takes long

            found = getproxies_environment()
    else:
        found = {name.lower().removesuffix("_proxy"): value for name, value in environment.items()}
    return found.get("https") or found.get("all") or None


def default_index() -> str:
    """Return the default index of `pip`."""
    for source in _sources():
        if url := _default_of(source):
            return url
    raise PlatformError(
        "no package index is configured, and there is no pip to say which it uses by itself",
        hint="set index-url in pip.conf, or name registries in sources.json",
    )


def _sources() -> Iterator[str]:
    """Yield the source texts in which a `pip` of this host defines its index."""
    spec = find_spec("pip")
    places = list(spec.submodule_search_locations or ()) if spec else []
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    places += [os.path.join(sys.base_prefix, "lib", version, "site-packages", "pip")]
    for place in places:
        path = Path(place).parent / _MODULE
        if path.is_file():
            yield path.read_text()
    ensure = find_spec("ensurepip")
    bundled = Path(ensure.origin).parent / "_bundled" if ensure and ensure.origin else Path(_WHEELS)
    for wheel in sorted([*bundled.glob("pip-*.whl"), *Path(_WHEELS).glob("pip-*.whl")]):
        with zipfile.ZipFile(wheel) as archive:
            yield archive.read(_MODULE).decode()


def _default_of(source: str) -> str | None:
    """Return the URL of the first index in the source. It is not run: importing `pip` changes logging."""
    # Without `ast`: used by two threads at once, it fails in CPython 3.11 ("AST constructor recursion depth mismatch").
    found = _FIRST_INDEX.search(source)
    return urljoin(found[2], "simple") if found else None


class _PipOptions:
    """The options of `pip install`: later files override earlier ones, and variables override files."""

    def __init__(self, environment: Mapping[str, str], root: str, prefix: str):
        self._environment = environment
        self._found: dict[tuple[str, str], str] = {}
        for path in _files(environment, root, prefix):
            self._read(path)

    def get(self, name: str) -> str | None:
        """Return the value of an option; None if it is empty."""
        return (
            self._environment.get(f"PIP_{name.replace('-', '_').upper()}")
            or self._found.get(("install", name))
            or self._found.get(("global", name))
            or None
        )

    def truth(self, name: str) -> bool:
        """Return the value of a boolean option."""
        return (self.get(name) or "").strip().lower() in {"1", "y", "yes", "t", "true", "on"}

    def _read(self, path: str) -> None:
        parser = RawConfigParser()
        try:
            parser.read(path)
        except (ConfigError, UnicodeDecodeError):
            raise InvalidRequest(
                f"{path} cannot be read, so the package index of this host is not known",
                field="pip.conf",
                hint="mend the file; `pip config debug` shows what is wrong",
            ) from None
        for section in parser.sections():
            for name, value in parser.items(section):
                if value:
                    self._found[section, name.lower().replace("_", "-").removeprefix("--")] = value


def _files(environment: Mapping[str, str], root: str, prefix: str) -> Iterator[str]:
    """Yield the files that `pip` reads, the weakest first."""
    chosen = environment.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return
    for directory in (environment.get("XDG_CONFIG_DIRS") or f"{root}etc/xdg").split(os.pathsep):
        yield os.path.join(directory, "pip", _NAME)
    yield os.path.join(root, "etc", _NAME)
    if not (chosen and os.path.exists(chosen)):
        home = environment.get("HOME") or os.path.expanduser("~")
        yield os.path.join(home, ".pip", _NAME)
        yield os.path.join(environment.get("XDG_CONFIG_HOME") or os.path.join(home, ".config"), "pip", _NAME)
    yield os.path.join(prefix, _NAME)
    if chosen:
        yield chosen


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise InvalidRequest(
            "an index in the configuration of pip is not an http or https URL",
            field="index-url",
            hint="`pip config list` shows it",
        )
    return url


def _is_trusted(url: str, trusted: set[str]) -> bool:
    """Whether `trusted-host` names the host, or the host with this port."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    bracketed = f"[{host}]" if ":" in host else host
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return bool(trusted & {host, bracketed, f"{bracketed}:{port}"})


# other package managers


def host_registries(environment: Mapping[str, str] | None = None, *, root: str = "/") -> tuple[HostRegistry, ...]:
    """Return all registries that are known, each once."""
    given = os.environ if environment is None else environment
    home = given.get("HOME") or os.path.expanduser("~")
    found = {"npm": _npm(given, home, root), "go": _go(given, home), "cargo": _cargo(given, home), "apt": _apt(root)}
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
    """Yield the default registry and those of scopes."""
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
    """Yield the module proxies; `direct` and `off` are dropped by the caller."""
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
    """Yield the registries and the replacements of the default one."""
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
    """Yield the URLs in both formats of source lists."""
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
