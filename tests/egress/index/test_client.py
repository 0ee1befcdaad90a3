import asyncio
import datetime
import ipaddress
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.support.indexes import IndexAnswer, IndexServer, Web, serving, wheel

from carrel.egress.index.client import IndexClient, Unreachable, plain
from carrel.egress.plan import PackageIndex


@pytest.fixture
async def upstream():
    upstream = IndexClient()
    yield upstream
    await upstream.aclose()


@pytest.fixture
def certificate(tmp_path):
    """A certificate of 127.0.0.1 that nobody signed: its file, and a server's context."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "index")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(private, hashes.SHA256())
    )
    path, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key)
    return str(path), context


async def ask(upstream, index, url, **given):
    async with upstream.get(index, url, {}, **given) as response:
        return response.status_code, await response.aread()


async def test_a_request(upstream, server):
    server.add(wheel("demo"))
    status, body = await ask(upstream, server.index(), server.index().url + "demo/")
    assert status == 200
    assert b"demo-1.0" in body
    assert (await ask(upstream, server.index(), server.index().url + "none/"))[0] == 404


async def test_credentials_go_to_the_index_only(upstream, server):
    server.add(wheel("demo"))
    server.login = "me:p%40ss"
    server.login = "me:pass"
    index = server.index()
    assert "me" not in plain(index)
    async with serving(IndexServer()) as other:
        server.redirects["/away"] = f"{other.web.url}/here"
        server.redirects["/back"] = "/simple/demo/"
        assert (await ask(upstream, index, f"{server.web.url}/back"))[0] == 200
        await ask(upstream, index, f"{server.web.url}/away")
        assert "authorization" in server.seen[-1]
        assert other.asked == ["/here"]
        assert "authorization" not in other.seen[-1]


async def test_credentials_may_have_any_characters(upstream):
    seen = []

    async def answer(method, target, headers):
        seen.append(headers.get("authorization"))
        return IndexAnswer(200, [("content-length", "0")])

    web = Web(answer)
    await web.open()
    url = web.url.replace("://", "://us%3Aer:p%40%2Fss@") + "/simple"
    await ask(upstream, PackageIndex("main", url), url)
    await web.close()
    assert seen == ["Basic dXM6ZXI6cEAvc3M="]


async def test_redirects_end(upstream, server):
    for at in range(10):
        server.redirects[f"/{at}"] = f"/{at + 1}"
    server.redirects["/ftp"] = "ftp://127.0.0.1/x"
    server.redirects["/file"] = "file:///etc/passwd"
    server.redirects["/bad"] = "http://[bad"
    server.redirects["/port"] = "http://127.0.0.1:99999/"
    index = server.index()
    assert (await ask(upstream, index, f"{server.web.url}/5"))[0] == 404
    for path in ("/4", "/ftp", "/file", "/port"):
        with pytest.raises(Unreachable, match="it redirected"):
            await ask(upstream, index, server.web.url + path)
    with pytest.raises(Unreachable):
        await ask(upstream, index, server.web.url + "/bad")


async def test_words_for_failures(upstream, server):
    index = PackageIndex("main", "http://me:pass@127.0.0.1:1/simple")
    with pytest.raises(Unreachable, match=r"^it cannot be reached$"):
        await ask(upstream, index, index.url)

    async def half(method, target, headers):
        return IndexAnswer(200, [("content-length", "100")], broken())

    async def broken():
        yield b"x"
        raise OSError

    web = Web(half)
    await web.open()
    with pytest.raises(Unreachable, match="the connection to it broke"):
        await ask(upstream, index, web.url)
    await web.close()


async def test_certificates(upstream, certificate):
    path, context = certificate
    server = IndexServer()
    server.web.tls = context
    server.add(wheel("demo"))
    async with serving(server), serving(IndexServer()) as open_server:
        url = server.index().url + "demo/"
        with pytest.raises(Unreachable, match="its certificate is not valid"):
            await ask(upstream, server.index(), url)
        assert (await ask(upstream, server.index(trusted=True), url))[0] == 200
        assert (await ask(upstream, server.index(cert=path), url))[0] == 200
        # The client without a check is not the one that checks.
        with pytest.raises(Unreachable, match="its certificate is not valid"):
            await ask(upstream, server.index(), url)
        with pytest.raises(Unreachable, match="cannot be used"):
            await ask(upstream, server.index(cert=path + ".missing"), url)
        server.redirects["/down"] = open_server.web.url + "/x"
        down = f"{server.web.url}/down"
        with pytest.raises(Unreachable, match="not encrypted"):
            await ask(upstream, server.index(cert=path), down)
        assert open_server.asked == []
        assert (await ask(upstream, server.index(cert=path), down, sealed=True))[0] == 404
        assert (await ask(upstream, server.index(trusted=True), down))[0] == 404


async def test_a_public_index_leads_to_no_private_address(server):
    """The index's own name is public when it is judged; its links and redirects are looked up as any name."""
    looked_up = []

    async def resolve(host, port):
        looked_up.append(host)
        if host == "unknown.test":
            raise OSError
        return ["93.184.216.34"] if (host, port) == ("index.test", 0) else ["127.0.0.1"]

    upstream = IndexClient(resolve=resolve)
    index = PackageIndex("main", f"http://index.test:{server.web.port}/simple/")
    server.add(wheel("demo"))
    try:
        assert (await ask(upstream, index, index.url + "demo/"))[0] == 200
        for host in ("other.test", "127.0.0.1", "[::1]", "localhost"):
            with pytest.raises(Unreachable, match="private address"):
                await ask(upstream, index, f"http://{host}:{server.web.port}/simple/demo/")
        server.redirects["/away"] = f"http://other.test:{server.web.port}/"
        with pytest.raises(Unreachable, match="private address"):
            await ask(upstream, index, f"http://index.test:{server.web.port}/away")
        with pytest.raises(Unreachable, match="cannot be reached"):
            await ask(upstream, index, "http://unknown.test/")
        assert len(server.asked) == 2
    finally:
        await upstream.aclose()


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        "169.254.169.254",
        "168.63.129.16",
        "100.64.0.1",
        "::ffff:127.0.0.1",
        "::ffff:0:127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "fe80::1%eth0",
    ],
)
async def test_private_addresses_in_every_form(server, address):
    async def resolve(host, port):
        return ["93.184.216.34"] if host == "index.test" else ["93.184.216.34", address]

    upstream = IndexClient(resolve=resolve)
    with pytest.raises(Unreachable, match="private address"):
        await ask(upstream, PackageIndex("main", "http://index.test/"), "http://other.test/")
    await upstream.aclose()


async def test_a_proxy(server, monkeypatch):
    monkeypatch.setenv("no_proxy", "localhost")
    asked = []

    async def answer(method, target, headers):
        asked.append(target)
        return IndexAnswer(200, [("content-length", "2")], b"ok")

    proxy = Web(answer)
    await proxy.open()
    upstream = IndexClient(proxy=proxy.url)
    index = PackageIndex("main", "http://127.0.0.1:9/simple/")
    assert await ask(upstream, index, "http://index.test/simple/demo/") == (200, b"ok")
    assert asked == ["http://index.test/simple/demo/"]
    assert (await ask(upstream, index, f"http://localhost:{server.web.port}/none"))[0] == 404
    await upstream.aclose()
    await proxy.close()


async def test_a_proxy_that_cannot_be_used():
    upstream = IndexClient(proxy="gopher://127.0.0.1:1")
    with pytest.raises(Unreachable, match="cannot be used"):
        await ask(upstream, PackageIndex("main", "http://index.test/"), "http://index.test/")
    await upstream.aclose()


async def test_many_indexes_do_not_pile_up(upstream, server):
    for number in range(80):
        index = PackageIndex(f"i{number}", server.index().url)
        await ask(upstream, index, f"{server.web.url}/x")
    assert len(upstream._clients) <= 64
    await asyncio.gather(
        *(ask(upstream, PackageIndex(f"j{n}", server.index().url), f"{server.web.url}/x") for n in range(90))
    )
    await ask(upstream, server.index(), f"{server.web.url}/x")
    assert len(upstream._clients) <= 64
