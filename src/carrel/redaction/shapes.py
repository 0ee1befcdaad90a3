"""What well-known tokens look like. Knows no secret of anybody, only the forms their issuers gave them.

A shape is found by a literal beginning that a scan for many literals looks for, and decided by a bounded expression at
that place. It is narrow on purpose: hashes, UUIDs, images in base64 and words of prose must pass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

Span = tuple[int, int]
PENDING: Span = (-1, -1)
"""More bytes have to come before it can be told."""

CONTEXT = 16
"""Bytes before its beginning that decide whether a shape stands on its own."""

CHECKED = 256
"""Bytes of a run that `checks` look at: what is random has everything in fewer."""

_WORD = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_LONG_WORD = _WORD | frozenset(b"_+-")
# What ends in a letter or a digit and still is the end of something: an escape, or a change of colours.
_ENDED = re.compile(rb"(?:\\[nrtbfv0]|%[0-9A-Fa-f]{2}|\x1b\[[0-9;]{0,12}m)\Z")


def stands_alone(data: bytes, at: int, *, part: bool = False) -> bool:
    """Whether what begins at `at` is not the rest of a longer word; with `part` it may follow `_`, `-` or `+`."""
    if at == 0 or data[at - 1] not in (_WORD if part else _LONG_WORD):
        return True
    return _ENDED.search(data, max(0, at - CONTEXT), at) is not None


@dataclass(frozen=True)
class Shape:
    """One kind of token: `name` for people, `anchors` to find it by, `form` to decide.

    `alive` matches every beginning of what `form` matches, so that a token that is cut by the end of a chunk is waited
    for; it may match more. The group `token` of `form` is taken out, or all of it, if every one of `checks` finds
    something at the beginning of the group `run`. `torn` says what is taken out when `form` does not match and nothing
    more can come. A shape must stand alone, or with `part` may be a part of a longer name.
    """

    name: str
    anchors: tuple[bytes, ...]
    form: re.Pattern[bytes]
    alive: re.Pattern[bytes]
    longest: int
    checks: tuple[re.Pattern[bytes], ...] = ()
    torn: re.Pattern[bytes] | None = None
    part: bool = False

    @cached_property
    def label(self) -> bytes:
        """What stands in its place."""
        return b"[redacted:%s]" % self.name.encode()

    def match(self, data: bytes, at: int, *, final: bool) -> Span | None:
        """The bytes to take out when the shape is at `at`, where its anchor is, and stands alone there; `PENDING` when
        it is not clear yet.
        """
        near = at + CHECKED + CONTEXT
        if (
            self.longest > 4 * CHECKED
            and near <= len(data)
            and not all(each.search(data, at, near) for each in self.checks)
        ):
            return None  # a long run need not be gone through to tell
        stop = at + self.longest
        more = not final and len(data) < stop
        found = self.form.match(data, at, stop)
        if found is None and more:
            begun = self.alive.match(data, at)
            if begun is not None and begun.end() == len(data):
                return PENDING
        if found is None and self.torn is not None:
            found = self.torn.match(data, at, stop)
        if found is None:
            return None
        if more and found.end() == len(data) and self.torn is None:
            return PENDING
        if self.checks:
            begin, end = found.span("run")
            if not all(check.search(data, begin, min(end, begin + CHECKED)) for check in self.checks):
                return None
        return found.span("token" if "token" in found.re.groupindex else 0)


_DIGIT = re.compile(rb"[0-9]")
_UPPER = re.compile(rb"[A-Z]")
_LOWER = re.compile(rb"[a-z]")
_RANDOM = (_DIGIT,)
_MIXED = (_UPPER, _LOWER)
_ALNUM, _URLSAFE = "A-Za-z0-9", "A-Za-z0-9_-"


def _run(
    name: str, prefixes: tuple[str, ...], size: str, letters: str, checks: tuple[re.Pattern[bytes], ...] = _RANDOM
) -> Shape:
    """A prefix and a run of `letters`. A run of one exact size must end there."""
    exact = "" if "," in size else f"(?![{letters}])"
    largest = int(size.rpartition(",")[2])
    heads = "|".join(map(re.escape, prefixes))
    return Shape(
        name,
        tuple(prefix.encode() for prefix in prefixes),
        re.compile(f"(?:{heads})(?P<run>[{letters}]{{{size}}}){exact}".encode()),
        re.compile(f"(?:{heads})[{letters}]{{0,{largest}}}".encode()),
        max(map(len, prefixes)) + largest + 1,
        checks,
    )


_QUOTE = r"""["'\\]{0,3}"""
_CREDENTIAL = r"[A-Za-z0-9_.~+/=-]"
_B64URL = r"[A-Za-z0-9_-]"
# A private key in PEM: breaks are real, or escaped as in JSON; a line is long, or one of the last few.
_BREAK = r"(?:\\{1,2}[nr]|\s){1,32}+"
_HEADERS = rf"(?:{_BREAK}[A-Z][A-Za-z-]{{2,20}}: [^\r\n\\]{{1,100}}+){{0,4}}"
_LINE = rf"(?:{_BREAK}[A-Za-z0-9+/=]{{16,}}+)"
_ENDS = rf"(?:{_BREAK}[A-Za-z0-9+/=]{{1,15}}+){{0,3}}"
_KEY = r"[A-Z0-9 ]{0,32}PRIVATE KEY(?: BLOCK)?-----"


def _compile(*parts: str) -> re.Pattern[bytes]:
    return re.compile("".join(parts).encode())


SHAPES: tuple[Shape, ...] = (
    _run("aws-access-key", ("AKIA", "ASIA"), "16", "A-Z0-9"),
    _run("github-token", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), "36,255", _ALNUM),
    _run("github-token", ("github_pat_",), "40,255", "A-Za-z0-9_"),
    _run("gitlab-token", ("glpat-", "gldt-", "glrt-", "glptt-", "glcbt-"), "20,255", _URLSAFE),
    _run("slack-token", tuple(f"xox{kind}-" for kind in "abeoprs"), "20,255", "A-Za-z0-9-"),
    _run("slack-token", ("xapp-",), "40,255", "A-Za-z0-9-"),
    _run("anthropic-key", ("sk-ant-",), "40,255", _URLSAFE),
    _run("openai-key", ("sk-proj-", "sk-svcacct-", "sk-admin-", "sk-or-v1-"), "40,255", _URLSAFE),
    _run("api-key", ("sk-",), "32,255", _ALNUM),
    _run("google-api-key", ("AIza",), "35", _URLSAFE, (*_RANDOM, *_MIXED)),
    _run("google-token", ("ya29.",), "40,2048", "A-Za-z0-9_.-", (*_RANDOM, *_MIXED)),
    _run("google-token", ("GOCSPX-",), "28", _URLSAFE, _MIXED),
    _run("stripe-key", ("sk_live_", "sk_test_", "rk_live_", "rk_test_"), "20,255", _ALNUM),
    _run("stripe-key", ("whsec_",), "32,255", "A-Za-z0-9+/"),
    _run("npm-token", ("npm_",), "36", _ALNUM),
    _run("pypi-token", ("pypi-AgE",), "50,512", _URLSAFE),
    _run("hugging-face-token", ("hf_",), "34", _ALNUM, _MIXED),
    _run("groq-key", ("gsk_",), "52", _ALNUM, _MIXED),
    _run("digitalocean-token", ("dop_v1_", "doo_v1_", "dor_v1_"), "64", "0-9a-f"),
    _run("shopify-token", ("shpat_", "shpca_", "shppa_", "shpss_"), "32", "0-9a-fA-F"),
    _run("docker-token", ("dckr_pat_",), "27", _URLSAFE, _MIXED),
    _run("vault-token", ("hvs.", "hvb."), "24,255", _URLSAFE, _MIXED),
    _run("grafana-token", ("glsa_",), "41", "A-Za-z0-9_"),
    _run("age-key", ("AGE-SECRET-KEY-1",), "58", "A-Z0-9"),
    # Names of our own metrics begin alike; a token has letters of both cases.
    _run("carrel-token", ("carrel_",), "40,128", _URLSAFE, _MIXED),
    Shape(
        "sendgrid-key",
        (b"SG.",),
        _compile(rf"SG\.{_B64URL}{{22}}\.{_B64URL}{{43}}(?!{_B64URL})"),
        _compile(rf"SG\.{_B64URL}{{0,22}}(?:\.{_B64URL}{{0,43}})?"),
        71,
    ),
    Shape(
        "jwt",
        (b"eyJ",),
        _compile(rf"eyJ{_B64URL}{{8,2048}}\.eyJ{_B64URL}{{8,8192}}\.{_B64URL}{{16,1024}}"),
        _compile(rf"eyJ{_B64URL}{{0,2048}}(?:\.(?:e(?:y(?:J{_B64URL}{{0,8192}}(?:\.{_B64URL}{{0,1024}})?)?)?)?)?"),
        12_000,
    ),
    Shape(
        "aws-secret-key",
        (b"aws_secret_access_key", b"AWS_SECRET_ACCESS_KEY", b"SecretAccessKey"),
        _compile(
            rf"[A-Za-z_]{{15,21}}{_QUOTE}[ \t]{{0,4}}[:=][ \t]{{0,4}}{_QUOTE}",
            r"(?P<token>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
        ),
        _compile(rf"[A-Za-z_]{{15,21}}{_QUOTE}[ \t]{{0,4}}(?:[:=][ \t]{{0,4}}{_QUOTE}[A-Za-z0-9/+]{{0,40}})?"),
        80,
        part=True,
    ),
    Shape(
        "authorization",
        (b"Authorization", b"authorization", b"AUTHORIZATION"),
        _compile(
            rf"[A-Za-z]{{13}}{_QUOTE}[ \t]{{0,4}}[:=][ \t]{{0,4}}{_QUOTE}",
            rf"(?i:bearer|basic|token|digest|apikey)[ \t]{{1,4}}(?P<token>{_CREDENTIAL}{{8,8192}})",
        ),
        _compile(
            rf"[A-Za-z]{{13}}{_QUOTE}[ \t]{{0,4}}(?:[:=][ \t]{{0,4}}{_QUOTE}",
            rf"(?:[A-Za-z]{{1,6}}(?:[ \t]{{1,4}}{_CREDENTIAL}{{0,8192}})?)?)?",
        ),
        8192 + 64,
        part=True,
    ),
    Shape(
        "private-key",
        (b"-----BEGIN ",),
        _compile(rf"-----BEGIN {_KEY}{_HEADERS}{_LINE}{{0,1024}}{_ENDS}{_BREAK}-----END {_KEY}"),
        _compile(
            r"-----BEGIN [A-Z0-9 ]{0,50}(?:-{1,4}(?!-)|",
            rf"-----{_HEADERS}{_LINE}{{0,1024}}{_ENDS}(?:{_BREAK})?[^\r\n]{{0,128}})?",
        ),
        16_384,
        # The end never came: the lines of the key go all the same.
        torn=_compile(rf"-----BEGIN {_KEY}{_HEADERS}{_LINE}{{1,1024}}"),
        part=True,
    ),
)
"""Every shape."""
