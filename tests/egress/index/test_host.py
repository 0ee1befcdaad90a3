import ast
import gc
import os
import subprocess
import sys

import pytest

from carrel.egress.index import host
from carrel.egress.index.host import default_index, host_index, host_proxy
from carrel.errors import InvalidRequest, PlatformError


@pytest.fixture
def place(tmp_path):
    """A host of its own: nothing of the real one is read."""

    def write(path, text):
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        return str(target)

    return write


def look(tmp_path, **environment):
    given = {"HOME": str(tmp_path / "home"), **environment}
    return host_index(given, root=f"{tmp_path}/", prefix=str(tmp_path / "venv"))


def urls(found):
    return [index.url for index in found]


def test_the_default_is_the_one_pip_has(tmp_path):
    known = subprocess.run(
        [sys.executable, "-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert default_index() == known
    (index,) = look(tmp_path)
    assert (index.name, index.url, index.trusted, index.cert) == ("default", known, False, None)


def test_without_pip_in_this_environment(monkeypatch):
    found = list(host._sources())
    assert len({host._default_of(text) for text in found}) == 1
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    monkeypatch.setattr(host.sys, "base_prefix", "/nowhere")
    if list(host._sources()):
        assert default_index()
    monkeypatch.setattr(host, "_sources", lambda: iter(()))
    with pytest.raises(PlatformError, match="no package index is configured"):
        default_index()


def test_pip_is_not_imported():
    code = "import sys; from carrel.egress.index.host import host_index; host_index({}); print('pip' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_later_files_win_and_variables_win_over_all(place, tmp_path):
    def expect(url, **environment):
        assert urls(look(tmp_path, **environment)) == [url]

    place("etc/xdg/pip/pip.conf", "[global]\nindex-url = http://one/simple\n")
    expect("http://one/simple")
    place("etc/pip.conf", "[global]\nindex_url: http://two/simple\n")
    expect("http://two/simple")
    place("home/.pip/pip.conf", "[global]\n--index-url = http://three/simple\n")
    expect("http://three/simple")
    place("home/.config/pip/pip.conf", "[global]\nINDEX-URL = http://four/simple\n")
    expect("http://four/simple")
    place("venv/pip.conf", "[global]\nindex-url = http://five/simple\n")
    expect("http://five/simple")
    chosen = place("chosen.conf", "[global]\nindex-url = http://six/simple\n")
    expect("http://six/simple", PIP_CONFIG_FILE=chosen)
    expect("http://seven/simple", PIP_CONFIG_FILE=chosen, PIP_INDEX_URL="http://seven/simple")
    expect("http://five/simple", PIP_INDEX_URL="")
    assert urls(look(tmp_path, PIP_CONFIG_FILE=os.devnull)) == [default_index()]
    place("xdg/pip/pip.conf", "[global]\nindex-url = http://eight/simple\n")
    os.unlink(tmp_path / "venv/pip.conf")
    expect("http://eight/simple", XDG_CONFIG_HOME=str(tmp_path / "xdg"))


def test_a_chosen_file_takes_the_place_of_the_users(place, tmp_path):
    place("home/.config/pip/pip.conf", "[global]\nextra-index-url = http://users/simple\n")
    chosen = place("chosen.conf", "[global]\nindex-url = http://chosen/simple\n")
    assert urls(look(tmp_path, PIP_CONFIG_FILE=chosen)) == ["http://chosen/simple"]
    assert urls(look(tmp_path, PIP_CONFIG_FILE=chosen + ".missing"))[0] == "http://users/simple"


def test_the_section_of_install_wins(place, tmp_path):
    place("etc/pip.conf", "[install]\nindex-url = http://install/simple\n[download]\nindex-url = http://no/\n")
    place("venv/pip.conf", "[global]\nindex-url = http://global/simple\n")
    assert urls(look(tmp_path)) == ["http://install/simple"]


def test_extra_indexes_come_first(place, tmp_path):
    place(
        "etc/pip.conf",
        "[global]\nindex-url = http://main/simple\nextra-index-url =\n    http://a/simple\n    http://b/simple\n",
    )
    found = look(tmp_path)
    assert [(index.name, index.url) for index in found] == [
        ("extra-1", "http://a/simple"),
        ("extra-2", "http://b/simple"),
        ("default", "http://main/simple"),
    ]
    assert [index.name for index in look(tmp_path, PIP_EXTRA_INDEX_URL="http://c/simple")] == ["extra", "default"]


def test_trust_and_certificates(place, tmp_path):
    place(
        "etc/pip.conf",
        "[global]\nindex-url = https://main/simple\nextra-index-url = https://a:8443/x https://b:1/x http://u:p@c/x\n"
        "trusted-host = A:8443\n  b:2\n  c\ncert = /certs.pem\nfind-links = http://elsewhere/\n",
    )
    found = look(tmp_path)
    assert [index.trusted for index in found] == [True, False, True, False]
    assert {index.cert for index in found} == {"/certs.pem"}
    assert "u:p" not in repr(found)


def test_no_index(tmp_path):
    assert look(tmp_path, PIP_NO_INDEX="1") == []
    assert look(tmp_path, PIP_NO_INDEX="off") != []


@pytest.mark.parametrize(
    "text", ["index-url = http://x\n", "[global\n", "[global]\n[global]\n", "[global]\nx = 1\nx = 2\n"]
)
def test_a_file_that_cannot_be_read_is_no_reason_to_use_another_index(place, tmp_path, text):
    path = place("etc/pip.conf", text)
    with pytest.raises(InvalidRequest, match="cannot be read") as error:
        look(tmp_path)
    assert path in error.value.detail


@pytest.mark.parametrize("url", ["ftp://x/simple", "/simple", "http://", "http://h:x/", "http://[/", "file:///x"])
def test_an_index_that_is_none(tmp_path, url):
    with pytest.raises(InvalidRequest, match="not an http or https URL") as error:
        look(tmp_path, PIP_INDEX_URL=url)
    assert url not in str(error.value)


def test_the_proxy_of_the_host(place, tmp_path):
    def proxy(**environment):
        return host_proxy({"HOME": str(tmp_path), **environment}, root=f"{tmp_path}/", prefix=str(tmp_path))

    assert proxy() is None
    assert proxy(https_proxy="http://a:1") == "http://a:1"
    assert proxy(HTTPS_PROXY="http://a:1", ALL_PROXY="http://b:1") == "http://a:1"
    assert proxy(ALL_PROXY="http://b:1") == "http://b:1"
    assert proxy(HTTPS_PROXY="http://a:1", PIP_PROXY="u:p@c:1") == "http://u:p@c:1"
    place("etc/pip.conf", "[global]\nproxy = http://d:1\n")
    assert proxy() == "http://d:1"


def test_this_host():
    assert isinstance(host_index(), list)
    host_proxy()


def test_the_default_is_found_while_other_code_parses_python() -> None:
    """In CPython 3.11 one use of `ast` in the middle of another breaks the other: a second thread is enough."""
    (text, *_) = host._sources()
    wanted = host._default_of(text)

    def parse(*_: object) -> None:
        ast.parse("f(g(h(1)))")

    thresholds = gc.get_threshold()
    gc.callbacks.append(parse)
    try:
        gc.set_threshold(1)
        assert host._default_of(text) == wanted
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(parse)
