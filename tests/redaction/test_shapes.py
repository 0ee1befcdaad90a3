from __future__ import annotations

import base64
import json
import random
import string

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from carrel.redaction import Redactor
from carrel.redaction.shapes import PENDING, SHAPES

DRAW = random.Random(11)
REDACTOR = Redactor()


def letters(size: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "a1B" + "".join(DRAW.choices(alphabet, k=size - 3))


HEX, UPPER, URL = (
    "0123456789abcdef",
    string.ascii_uppercase + string.digits,
    string.ascii_letters + string.digits + "-_",
)
TOKENS = {
    "aws-access-key": ["AKIA1" + "".join(DRAW.choices(UPPER, k=15)), "ASIAIOSFODNN7EXAMPLE"],
    "github-token": [*(f"gh{kind}_{letters(36)}" for kind in "pousr"), f"github_pat_{letters(22)}_{letters(59)}"],
    "gitlab-token": [f"glpat-{letters(20, URL)}"],
    "slack-token": [f"xoxb-123456789012-1234567890123-{letters(24)}", f"xapp-1-A0123456789-12345-{letters(64)}"],
    "anthropic-key": [f"sk-ant-api03-{letters(93, URL)}AA"],
    "openai-key": [f"sk-proj-{letters(120, URL)}", f"sk-svcacct-{letters(80, URL)}"],
    "api-key": [f"sk-{letters(48)}", f"sk-0{letters(31)}"],
    "google-api-key": [f"AIza{letters(35, URL)}"],
    "google-token": [f"ya29.{letters(120, URL)}", f"GOCSPX-{letters(28, URL)}"],
    "stripe-key": [f"sk_live_{letters(24)}", f"rk_test_{letters(99)}", f"whsec_{letters(32)}"],
    "npm-token": [f"npm_{letters(36)}"],
    "pypi-token": [f"pypi-AgEIcHlwaS5vcmc{letters(120, URL)}"],
    "hugging-face-token": [f"hf_{letters(34, string.ascii_letters)}"],
    "groq-key": [f"gsk_{letters(52)}"],
    "digitalocean-token": [f"dop_v1_{'0a1b2c3d' * 8}"],
    "shopify-token": [f"shpat_{'0a1b2c3d' * 4}"],
    "docker-token": [f"dckr_pat_{letters(27, URL)}"],
    "vault-token": [f"hvs.{letters(90, URL)}"],
    "grafana-token": [f"glsa_{letters(32)}_{'0a1b2c3d'}"],
    "age-key": [f"AGE-SECRET-KEY-1{'1QYQSZ' * 9}7PJM"],
    "carrel-token": [f"carrel_{letters(43, URL)}"],
    "sendgrid-key": [f"SG.{letters(22, URL)}.{letters(43, URL)}"],
    "jwt": ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"],
}
WHOLE = [(name, token) for name, tokens in TOKENS.items() for token in tokens]


def test_every_shape_is_shown() -> None:
    partly = {"aws-secret-key", "authorization", "private-key"}
    assert {shape.name for shape in SHAPES} == TOKENS.keys() | partly


@pytest.mark.parametrize(("name", "token"), WHOLE, ids=lambda each: each[:16])
def test_tokens_go(name: str, token: str) -> None:
    label = f"[redacted:{name}]"
    for text in (
        "{}",
        "token={}\n",
        '"{}"',
        "https://me:{}@host/",
        "a {}, b",
        "\x1b[31m{}\x1b[0m",
        "x\\n{}\\n",
        "t%3D{}",
    ):
        assert REDACTOR.text(text.format(token)) == text.format(label)
    assert REDACTOR.text(json.dumps({"a": token})) == json.dumps({"a": label})


@pytest.mark.parametrize(("name", "token"), WHOLE, ids=lambda each: each[:16])
def test_a_part_of_a_longer_word_is_none(name: str, token: str) -> None:
    assert REDACTOR.text("x" + token) == "x" + token
    assert REDACTOR.text(token[:12] + " " + token[12:17]) == token[:12] + " " + token[12:17]


@pytest.mark.parametrize(("name", "token"), WHOLE, ids=lambda each: each[:16])
def test_every_beginning_is_waited_for(name: str, token: str) -> None:
    data = token.encode()
    for shape in SHAPES:
        for anchor in shape.anchors:
            if shape.name == name and data.startswith(anchor):
                states = {shape.match(data[:size], 0, final=False) for size in range(len(anchor), len(data))}
                if shape.match(data + b" ", 0, final=False) is not None:
                    assert states == {PENDING}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("Authorization: Bearer abc.def_ghi", "Authorization: Bearer [redacted:authorization]"),
        ("> proxy-authorization: basic dXNlcjpwdw==\r\n", "> proxy-authorization: basic [redacted:authorization]\r\n"),
        ('-H "Authorization: Bearer abcdefgh"', '-H "Authorization: Bearer [redacted:authorization]"'),
        ('{"Authorization": "Bearer abcdefgh"}', '{"Authorization": "Bearer [redacted:authorization]"}'),
        ('{\\"authorization\\":\\"Token abcdefgh\\"}', '{\\"authorization\\":\\"Token [redacted:authorization]\\"}'),
        (
            "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY\n",
            "aws_secret_access_key = [redacted:aws-secret-key]\n",
        ),
        (
            'TF_AWS_SECRET_ACCESS_KEY="wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"',
            'TF_AWS_SECRET_ACCESS_KEY="[redacted:aws-secret-key]"',
        ),
    ],
)
def test_only_the_credential_goes(text: str, clean: str) -> None:
    assert REDACTOR.text(text) == clean


def keys() -> list[bytes]:
    large = rsa.generate_private_key(65537, 2048)
    small = ed25519.Ed25519PrivateKey.generate()
    locked = BestAvailableEncryption(b"pw")
    return [
        large.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        large.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()),
        large.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, locked),
        large.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
        small.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    ]


def test_private_keys_go_however_their_lines_are_broken() -> None:
    for key in keys():
        text = key.decode().strip()
        for shown in (
            text,
            text.replace("\n", "\r\n"),
            json.dumps(text)[1:-1],
            json.dumps(json.dumps(text))[3:-3],
            "\n".join("    " + line for line in text.split("\n")).strip(),
        ):
            assert REDACTOR.text(f"key: {shown}, next") == "key: [redacted:private-key], next"
        torn = text[: len(text) // 2]
        left = REDACTOR.text(torn)
        assert left.startswith("[redacted:private-key]")
        assert len(left) < 45
        assert REDACTOR.text(torn + "\n# and more words here").endswith("\n# and more words here")


def test_other_blocks_and_words_pass() -> None:
    body = base64.encodebytes(DRAW.randbytes(600)).decode()
    for kind in ("CERTIFICATE", "PUBLIC KEY", "PGP MESSAGE"):
        text = f"-----BEGIN {kind}-----\n{body}-----END {kind}-----\n"
        assert REDACTOR.text(text) == text
    for text in ("-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY----- and so on\nMIIE", "-----BEGIN \n"):
        assert REDACTOR.text(text) == text
