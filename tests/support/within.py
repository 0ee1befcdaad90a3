"""What an attempt inside a sandbox works with. Shipped as text, so it imports nothing of ours and needs no packages."""

import json
import os
import socket
import ssl
import struct
import subprocess
import sys
import time
import traceback

PROXY = ("127.0.0.1", 3128)
PATIENCE_S = 20


def dial(where=PROXY):
    one = socket.create_connection(where, PATIENCE_S)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one


def bytes_of(text):
    return text if isinstance(text, bytes) else text.encode("latin-1")


def rest_of(one):
    """Everything up to the end, however it comes."""
    found = b""
    try:
        while data := one.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


def send(one, pieces, pause=0.0):
    """Send, and say that this was all. A peer that has heard enough is no fault."""
    try:
        for piece in pieces:
            one.sendall(bytes_of(piece))
            if pause:
                time.sleep(pause)
        one.shutdown(socket.SHUT_WR)
    except (BrokenPipeError, ConnectionResetError, OSError):
        pass


def say(*pieces, pause=0.0):
    """What the proxy answers to these bytes."""
    with dial() as one:
        send(one, pieces, pause)
        return rest_of(one).decode("latin-1")


def head_of(one):
    found = b""
    while b"\r\n\r\n" not in found:
        data = one.recv(1)
        if not data:
            break
        found += data
    return found


def connect(where):
    """An open tunnel, and nothing; or nothing, and what was answered."""
    one = dial()
    one.sendall(bytes_of(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n"))
    head = head_of(one)
    if b" 200 " in head.split(b"\r\n")[0]:
        return one, ""
    with one:
        return None, (head + rest_of(one)).decode("latin-1")


def order(host, port, command=1, version=5, reserved=0):
    """A SOCKS order. A host that is bytes is an address, text is a name."""
    if isinstance(host, bytes):
        named = bytes([{4: 1, 16: 4}[len(host)]]) + host
    else:
        named = bytes([3, len(bytes_of(host))]) + bytes_of(host)
    return bytes([version, command, reserved]) + named + struct.pack("!H", port)


def socks(host, port, **more):
    """As `connect`, by SOCKS5."""
    one = dial()
    one.sendall(b"\x05\x01\x00")
    greeting = one.recv(2)
    if greeting != b"\x05\x00":
        with one:
            return None, f"greeting {greeting!r}"
    one.sendall(order(host, port, **more))
    reply = one.recv(10)
    if reply[:2] == b"\x05\x00":
        return one, ""
    with one:
        return None, f"reply {list(reply[:2])}"


def through(opened, *pieces, pause=0.0):
    """Say something through a tunnel that `connect` or `socks` opened, if it did."""
    one, answer = opened
    if one is None:
        return answer
    with one:
        send(one, pieces, pause)
        return "opened " + rest_of(one).decode("latin-1")


def secure(opened, name, request, protocols=()):
    """A request inside real TLS for a name, through a tunnel that was opened."""
    one, answer = opened
    if one is None:
        return answer
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    with one:
        try:
            with context.wrap_socket(one, server_hostname=name) as inner:
                inner.sendall(bytes_of(request))
                found = b""
                while data := inner.recv(65536):
                    found += data
                return found.decode("latin-1")
        except (ssl.SSLError, ConnectionError, EOFError) as error:
            return f"TLS failed: {error}"


def extension(kind, content):
    return struct.pack("!HH", kind, len(content)) + content


def server_names(*names, kind=0):
    entries = b"".join(bytes([kind]) + struct.pack("!H", len(bytes_of(each))) + bytes_of(each) for each in names)
    return extension(0, struct.pack("!H", len(entries)) + entries)


def hello_message(*extensions):
    """A ClientHello with these extensions before those that every server wants."""
    wanted = [
        extension(10, b"\0\x04\0\x1d\0\x17"),
        extension(13, b"\0\x06\x04\x03\x08\x04\x04\x01"),
        extension(43, b"\x04\x03\x04\x03\x03"),
        extension(51, b"\0\x24\0\x1d\0\x20" + os.urandom(32)),
        extension(45, b"\x01\x01"),
    ]
    content = b"".join([*extensions, *wanted])
    body = b"\x03\x03" + os.urandom(32) + b"\x20" + os.urandom(32)
    body += b"\0\x06\x13\x01\xc0\x2b\xc0\x2f" + b"\x01\0" + struct.pack("!H", len(content)) + content
    return b"\x01" + len(body).to_bytes(3, "big") + body


def records(message, size=16384, kind=22, version=b"\x03\x01"):
    """A message in records of this size."""
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(bytes([kind]) + version + struct.pack("!H", len(part)) + part for part in parts)


def hello(*names):
    return records(hello_message(server_names(*names)))


def curl(*arguments):
    done = subprocess.run(
        ["curl", "-sS", "-m", str(PATIENCE_S), *arguments], capture_output=True, text=True, check=False
    )
    return f"{done.returncode} {done.stdout} {done.stderr}"


def still_works(where):
    """Whether an allowed request gets its answer; else what it got."""
    answer = say(f"GET http://{where} HTTP/1.1\r\nHost: {where.partition('/')[0]}\r\nConnection: close\r\n\r\n")
    return True if answer.startswith("HTTP/1.1 200 ") and "welcome" in answer else answer


def perform(attack, arguments):
    """What an attempt brings."""
    try:
        return {"evidence": attack(**arguments)}
    except (OSError, EOFError) as error:
        return {"refused": repr(error)}
    except Exception:
        return {"broken": traceback.format_exc()}


def main(given):
    """Run attempts one after the other, and see after each whether the way out still works."""
    space = dict(globals())
    exec(given["code"], space)
    for name, arguments in given["cases"]:
        answer = perform(space[given["name"]], arguments)
        answer["after"] = still_works(given["after"] + name)
        sys.stdout.write("\n@@" + json.dumps(answer, default=repr) + "\n")


if __name__ == "__main__":
    main(json.load(sys.stdin))
