import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carrel.egress.index import pages
from carrel.egress.index.pages import BadPage, Link, ProjectPage, belongs, form, project_name, read, read_json

SHA = "ab" * 32
BASE = "http://index.test/simple/demo/"

hexes = st.text("0123456789abcdef", min_size=64, max_size=64)
words = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=1, max_size=40).filter(str.isprintable)
versions = st.from_regex(r"[0-9]{1,2}\.[0-9]{1,3}(\.post[0-9])?", fullmatch=True)
filenames = st.builds(
    lambda version, shape: shape.format(version),
    versions,
    st.sampled_from(["demo-{}-py3-none-any.whl", "demo-{}.tar.gz", "demo-{}.zip", "Demo-{}.tar.gz"]),
)
links = st.builds(
    Link,
    filename=filenames,
    url=st.just("http://files.test/a%20b/f?x=1&y=2"),
    hashes=st.one_of(st.just({}), st.builds(lambda h: {"sha256": h}, hexes), st.just({"md5": "0" * 32})),
    size=st.one_of(st.none(), st.integers(0, 1 << 40)),
    requires_python=st.one_of(st.none(), st.just(">=3.8,<4"), words),
    yanked=st.one_of(st.booleans(), words),
    metadata=st.one_of(st.booleans(), hexes),
    upload_time=st.one_of(st.none(), st.just("2024-01-01T00:00:00Z")),
)
all_pages = st.builds(
    ProjectPage,
    st.just("demo"),
    st.lists(links, max_size=5).map(tuple),
    st.one_of(st.none(), st.lists(versions).map(tuple)),
)


@given(all_pages)
def test_json_is_read_as_it_was_written(page):
    assert read_json(pages.pack(page), "demo") == page


@given(all_pages)
def test_html_keeps_what_it_can_say(page):
    written = pages.write_html(page, lambda link: f"/files/i/demo/{link.token}/{link.filename}")
    found = read(written, "text/html", "demo", BASE)
    assert len(found.links) == len(page.links)
    for link, former in zip(found.links, page.links, strict=True):
        assert link.filename == former.filename
        assert link.url == f"http://index.test/files/i/demo/{former.token}/{former.filename}"
        assert link.hashes == former.hashes
        stripped = former.requires_python
        assert link.requires_python == stripped
        assert link.yanked == former.yanked
        assert link.metadata == former.metadata


@given(st.binary(max_size=300), st.sampled_from(["text/html", pages.JSON_TYPE, "application/json; charset=x"]))
def test_no_bytes_do_more_than_be_refused(body, kind):
    try:
        assert read(body, kind, "demo", BASE).project == "demo"
    except BadPage:
        pass


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["files", "meta", "versions", "url", "filename", "hashes", "size", "yanked", "core-metadata", "sha256"]
            ),
            inner,
            max_size=6,
        )
    ),
)


@given(_json, _json, _json, _json)
def test_no_json_does_more_than_be_refused(whole, url, hashes, told):
    entry = {
        "filename": "demo-1.tar.gz",
        "url": url,
        "hashes": hashes,
        "core-metadata": told,
        "size": told,
        "yanked": told,
    }
    for value in (whole, {"files": whole}, {"files": [whole]}, {"files": [entry]}, {"files": [], "meta": whole}):
        try:
            page = read(json.dumps(value).encode(), pages.JSON_TYPE, "demo", BASE)
        except BadPage:
            continue
        again = read_json(pages.pack(page), "demo")
        assert again == page
        pages.write_html(page, lambda link: link.token)


@given(st.text("<>a hrefbase='\"/=#sha256!-[]&;demo.whl\n", max_size=400))
def test_no_markup_does_more_than_be_refused(text):
    try:
        read(text.encode(), "text/html", "demo", BASE)
    except BadPage:
        pass


@pytest.mark.parametrize("piece", ["<a ", "<!--", "<![", "<a href='", "&#", "</", "<script>"])
def test_markup_that_never_ends_is_given_up_soon(piece):
    try:
        read(piece.encode() * (4_000_000 // len(piece)), "text/html", "demo", BASE)
    except BadPage:
        pass


def test_what_is_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(pages, "MOST_FILES", 10)
    with pytest.raises(BadPage, match="more than 10 files"):
        read(b"<a href='x'>x</a>" * 11, "text/html", "demo", BASE)
    with pytest.raises(BadPage, match="more than 10 files"):
        read(json.dumps({"files": [1] * 11}).encode(), pages.JSON_TYPE, "demo", BASE)
    monkeypatch.setattr(pages, "MOST_BYTES", 100)
    with pytest.raises(BadPage, match="more than 100 bytes"):
        read(b"x" * 101, "text/html", "demo", BASE)


@pytest.mark.parametrize(
    ("body", "kind", "match"),
    [
        (b"{", pages.JSON_TYPE, "not JSON"),
        (b"[" * 100_000, pages.JSON_TYPE, "not JSON"),
        (b"[]", pages.JSON_TYPE, "lists no files"),
        (b'{"meta": {"api-version": "2.0"}, "files": []}', pages.JSON_TYPE, "version '2.0'"),
        (b'<meta name="pypi:repository-version" content="2.1">', "text/html", "version '2.1'"),
        (b"hello", "text/plain", "of type 'text/plain'"),
        (b"hello", "", "of type ''"),
    ],
)
def test_what_is_no_page_is_named(body, kind, match):
    with pytest.raises(BadPage, match=match):
        read(body, kind, "demo", BASE)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Demo", "demo"),
        ("de_.-mo", "de-mo"),
        ("a", "a"),
        ("", None),
        ("..", None),
        ("-a", None),
        ("a/b", None),
        ("a\0", None),
        ("a\n", None),
        ("ä", None),
        ("a" * 300, None),
        ("%2e", None),
    ],
)
def test_names_of_projects(name, found):
    assert project_name(name) == found


@pytest.mark.parametrize(
    "filename",
    ["demo-1.0.tar.gz", "demo-1.0-py3-none-any.whl", "Demo-1.zip", "demo-1.0-1-cp311-cp311-manylinux_2_17_x86_64.whl"],
)
def test_files_of_a_project(filename):
    assert belongs(filename, "demo")


@pytest.mark.parametrize(
    "filename",
    [
        "other-1.0.tar.gz",
        "demo.tar.gz",
        "demo-1.0.exe",
        "demo-1.0.tar.gz.asc",
        "../demo-1.0.tar.gz",
        "demo-1.0/x.tar.gz",
        "demo-1.0\n.tar.gz",
        "demo-1.0.whl",
        "other-1.0-py3-none-any.whl",
        "demo-" + "1" * 300 + ".zip",
        "",
        ".demo-1.tar.gz",
        "demo-1 .tar.gz",
    ],
)
def test_files_that_are_none(filename):
    assert not belongs(filename, "demo")


def test_urls_are_found_from_the_page_its_base_and_nothing_else():
    body = b"""<base href="/pool/"><base href="/wrong/">
        <a href="demo-1.tar.gz">1</a> <a href="//cdn.test/demo-2.tar.gz#sha256=%s&x=1">2</a>
        <a href="javascript:demo-3.tar.gz">3</a> <a href="file:///demo-4.tar.gz">4</a> <a href="http://[/demo-5.tar.gz">5</a>
        <a href="http://h:99999/demo-6.tar.gz">6</a> <a href="https:///demo-7.tar.gz">7</a> <a>8</a>
        <a href="demo-9.tar.gz#sha256=short">9</a> <a href="other-1.tar.gz">10</a>
    """
    page = read(body % SHA.encode(), "text/html", "demo", BASE)
    assert [link.url for link in page.links] == [
        "http://index.test/pool/demo-1.tar.gz",
        "http://cdn.test/demo-2.tar.gz",
        "http://index.test/pool/demo-9.tar.gz",
    ]
    assert [dict(link.hashes) for link in page.links] == [{}, {"sha256": SHA}, {}]


def test_attributes_of_html():
    body = b"""<a href="demo-1.tar.gz" data-requires-python="&gt;=3.8" data-yanked="broken &amp; bad">1</a>
        <a href="demo-2.tar.gz" data-yanked data-dist-info-metadata="true">2</a>
        <a href="demo-3.tar.gz" data-core-metadata="sha256=%s" data-dist-info-metadata="true">3</a>
        <a href="demo-4.tar.gz" data-core-metadata="false" data-gpg-sig="true">4</a>"""
    one, two, three, four = read(body % SHA.encode(), "text/html", "demo", BASE).links
    assert (one.requires_python, one.yanked, one.metadata) == (">=3.8", "broken & bad", False)
    assert (two.yanked, two.metadata) == (True, True)
    assert (three.yanked, three.metadata) == (False, SHA)
    assert four.metadata is False


def test_what_stands_for_a_file():
    link = Link("demo-1.tar.gz", "http://a/demo-1.tar.gz", {"sha256": SHA})
    assert link.token == SHA
    assert link.sealed
    plain = Link("demo-1.tar.gz", "http://a/demo-1.tar.gz", {"md5": "0" * 32})
    assert plain.token.startswith("x")
    assert plain.token != Link("demo-1.tar.gz", "http://b/demo-1.tar.gz").token
    assert not plain.sealed
    assert ProjectPage("demo", (link, plain)).find(plain.token, "demo-1.tar.gz") is plain
    assert ProjectPage("demo", (link,)).find(SHA, "demo-2.tar.gz") is None


@pytest.mark.parametrize(
    ("accept", "found"),
    [
        ("", "plain"),
        ("*/*", "plain"),
        ("text/html", "plain"),
        (pages.JSON_TYPE, "json"),
        (pages.HTML_TYPE, "html"),
        (f"{pages.JSON_TYPE}, {pages.HTML_TYPE}; q=0.1, text/html; q=0.01", "json"),
        (f"{pages.JSON_TYPE};q=0.1, text/html", "plain"),
        (f"{pages.JSON_TYPE};q=0, */*;q=0.1", "plain"),
        (f"{pages.JSON_TYPE};q=nan", "plain"),
        ("application/vnd.pypi.simple.latest+json", "json"),
        (f"{pages.HTML_TYPE}, {pages.JSON_TYPE}, */*", "json"),
    ],
)
def test_which_form_a_client_gets(accept, found):
    assert form(accept) == found


@given(st.text(max_size=100))
def test_any_accept_has_a_form(accept):
    assert form(accept) in {"json", "html", "plain"}
