"""A program that tests run inside a sandbox: an HTTP and WebSocket server at 8000, and hostile ones beside it.

It needs nothing but Python. What it was asked for is in its answers, as JSON.
"""

import asyncio
import base64
import hashlib
import json
import struct

HOSTILE = {
    9001: b"\x16\x03\x01garbage\r\n\r\n",
    9002: b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: y\r\n" % number for number in range(5000)) + b"\r\n",
    9003: b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi",
    9004: b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
    9005: b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000 + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    9006: b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    9007: b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\nx-bad\x00: 1\r\ncontent-length: 0\r\n\r\n",
    9008: b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
    9009: b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecond",
    9010: b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFF\r\n",
    9011: b"",
    9012: b"HTTP/1.1 409 Conflict\r\ncarrel-runs-elsewhere: node\r\ncontent-length: 0\r\n\r\n",
    9013: b'HTTP/1.1 401 No\r\ncontent-length: 28\r\n\r\n{"field":"Carrel-Forwarded"}',
}  # fmt: skip


async def hostile(reader, writer, answer):
    await reader.read(1)
    try:
        writer.write(answer)
        await writer.drain()
    except OSError:
        pass
    writer.close()


async def echo(reader, writer):
    """Whatever comes, until the other side ends its direction."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write(b"bye")
    writer.close()


async def serve(reader, writer):
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = [line.split(": ", 1) for line in lines if line]
            known = {name.lower(): value for name, value in headers}
            method, target, _ = first.split(" ")
            if "sec-websocket-key" in known:
                await websocket(reader, writer, known, target)
                return
            body, size = hashlib.sha256(), 0
            async for piece in body_of(reader, known):
                body.update(piece)
                size += len(piece)
            if target.startswith("/bytes/"):
                left = int(target.removeprefix("/bytes/"))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % left)
                piece = bytes(262144)
                while left:
                    writer.write(piece[:left])
                    left -= min(left, len(piece))
                    await writer.drain()
                break
            facts = {"method": method, "target": target, "headers": headers, "size": size, "sha256": body.hexdigest()}
            text = json.dumps(facts).encode()
            extra = b"set-cookie: mine=1; Domain=example\r\nset-cookie: carrel-port=stolen\r\nx-mine: yes\r\n"
            if target == "/redirect":
                extra += b"location: http://localhost:8000/there\r\n"
            status = b"302 Found" if target == "/redirect" else b"200 OK"
            sent = b"" if method == "HEAD" else text
            writer.write(b"HTTP/1.1 %s\r\n%scontent-length: %d\r\n\r\n%s" % (status, extra, len(text), sent))
            await writer.drain()
            if known.get("connection", "").lower() == "close":
                break
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def body_of(reader, known):
    if known.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            yield await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    else:
        left = int(known.get("content-length", "0"))
        while left:
            piece = await reader.read(min(left, 1 << 18))
            if not piece:
                raise OSError
            left -= len(piece)
            yield piece


async def websocket(reader, writer, known, target):
    if target == "/refused":
        writer.write(b"HTTP/1.1 403 No\r\ncontent-length: 2\r\n\r\nno")
        writer.close()
        return
    key = known["sec-websocket-key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    accept = base64.b64encode(hashlib.sha1(key).digest())
    offered = known.get("sec-websocket-protocol", "").split(",")[0].strip()
    chosen = f"sec-websocket-protocol: {offered}\r\n".encode() if offered else b""
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        + chosen + b"sec-websocket-accept: " + accept + b"\r\n\r\n"
    )  # fmt: skip
    if target == "/huge":
        writer.write(b"\x82\x7f" + struct.pack(">Q", 1 << 40))
    frame(writer, 1, json.dumps({"target": target, "headers": known}).encode())
    while True:
        first, second = await reader.readexactly(2)
        length = second & 127
        if length == 126:
            length = struct.unpack(">H", await reader.readexactly(2))[0]
        elif length == 127:
            length = struct.unpack(">Q", await reader.readexactly(8))[0]
        mask = await reader.readexactly(4)
        data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(await reader.readexactly(length)))
        if first & 15 == 8:
            frame(writer, 8, data)
            writer.close()
            return
        if data == b"close":
            frame(writer, 8, struct.pack(">H", 4321) + b"because")
            continue
        frame(writer, first & 15, data)


def frame(writer, kind, data):
    size = bytes([len(data)]) if len(data) < 126 else b"\x7e" + struct.pack(">H", len(data))
    writer.write(bytes([128 | kind]) + size + data)


async def main():
    servers = [await asyncio.start_server(serve, "127.0.0.1", 8000), await asyncio.start_server(echo, "::", 7000)]
    for port, answer in HOSTILE.items():

        def one(reader, writer, answer=answer):
            return hostile(reader, writer, answer)

        servers.append(await asyncio.start_server(one, "127.0.0.1", port))
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    asyncio.run(main())
