"""The shapes of well-known tokens, as their issuers define them. Knows no secrets.

A scan for the literal beginnings of all shapes finds candidates, and a bounded regular expression decides. Shapes are
narrow on purpose: hashes, UUIDs, images in base64 and prose must not match.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property

Span = tuple[int, int]
PENDING: Span = (-1, -1)
"""More bytes are needed to decide."""

CONTEXT = 16
"""Bytes before a shape that decide whether it stands alone."""

CHECKED = 256
"""Bytes of a run that `checks` search: a random run has all kinds of characters in fewer."""

_WORD = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_LONG_WORD = _WORD | frozenset(b"_+-")
# Escapes and colour codes end in a letter or a digit, but do not belong to the word after them.
_ENDED = re.compile(rb"(?:\\[nrtbfv0]|%[0-9A-Fa-f]{2}|\x1b\[[0-9;]{0,12}m)\Z")


def stands_alone(data: bytes, at: int, *, part: bool = False) -> bool:
    """Whether no longer word continues at `at`; with `part`, `_`, `-` or `+` may come before it."""
    if at == 0 or data[at - 1] not in (_WORD if part else _LONG_WORD):
        return True
    return _ENDED.search(data, max(0, at - CONTEXT), at) is not None


_compiled = cache(re.compile)
"""To compile all shapes takes longer than most programs need: few texts have a candidate."""


@dataclass(frozen=True)
class Shape:
    """One kind of token: `name` for people, `anchors` to find candidates, `form` to decide.

    `alive` matches every beginning of a text that `form` matches (and perhaps more), so that the rest of a token that
    the end of a chunk cuts is waited for. If every one of `checks` finds something at the beginning of the group `run`,
    the group `token` of `form` is redacted, or the whole match if there is no such group. `torn` matches what is
    redacted if `form` does not match and no more bytes can come. A shape must stand alone; with `part` it may be a part
    of a longer name.
    """

    name: str
    anchors: tuple[bytes, ...]
    form: bytes
    alive: bytes
    longest: int
    checks: tuple[re.Pattern[bytes], ...] = ()
    torn: bytes | None = None
    part: bool = False

    @cached_property
    def label(self) -> bytes:
        """The text that replaces it."""
        return b"[redacted:%s]" % self.name.encode()

    def match(self, data: bytes, at: int, *, final: bool) -> Span | None:
        """Return the span to redact if the shape is at `at`, where its anchor is; `PENDING` if more
        bytes are needed.
        """
        near = at + CHECKED + CONTEXT
        if (
            self.longest > 4 * CHECKED
            and near <= len(data)
            and not all(each.search(data, at, near) for each in self.checks)
        ):
            return None  # decided without a match of the whole long run
        stop = at + self.longest
        more = not final and len(data) < stop
        found = _compiled(self.form).match(data, at, stop)
        if found is None and more:
            begun = _compiled(self.alive).match(data, at)
            if begun is not None and begun.end() == len(data):
                return PENDING
        if found is None and self.torn is not None:
            found = _compiled(self.torn).match(data, at, stop)
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
    """Make a shape of a prefix and a run of `letters`. A run of one exact size must end there."""
    exact = "" if "," in size else f"(?![{letters}])"
    largest = int(size.rpartition(",")[2])
    heads = "|".join(map(re.escape, prefixes))
    return Shape(
        name,
        tuple(prefix.encode() for prefix in prefixes),
        f"(?:{heads})(?P<run>[{letters}]{{{size}}}){exact}".encode(),
        f"(?:{heads})[{letters}]{{0,{largest}}}".encode(),
        max(map(len, prefixes)) + largest + 1,
        checks,
    )


_QUOTE = r"""["'\\]{0,3}"""
_CREDENTIAL = r"[A-Za-z0-9_.~+/=-]"
_B64URL = r"[A-Za-z0-9_-]"
# A private key in PEM. Line breaks are real or escaped as in JSON; lines are long, except for the last few.
_BREAK = r"(?:\\{1,2}[nr]|\s){1,32}+"
_HEADERS = rf"(?:{_BREAK}[A-Z][A-Za-z-]{{2,20}}: [^\r\n\\]{{1,100}}+){{0,4}}"
_LINE = rf"(?:{_BREAK}[A-Za-z0-9+/=]{{16,}}+)"
_ENDS = rf"(?:{_BREAK}[A-Za-z0-9+/=]{{1,15}}+){{0,3}}"
_KEY = r"[A-Z0-9 ]{0,32}PRIVATE KEY(?: BLOCK)?-----"


def _pattern(*parts: str) -> bytes:
    return "".join(parts).encode()


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
    # Names of carrel's metrics have the same prefix; a token has letters of both cases.
    _run("carrel-token", ("carrel_",), "40,128", _URLSAFE, _MIXED),
    Shape(
        "sendgrid-key",
        (b"SG.",),
        _pattern(rf"SG\.{_B64URL}{{22}}\.{_B64URL}{{43}}(?!{_B64URL})"),
        _pattern(rf"SG\.{_B64URL}{{0,22}}(?:\.{_B64URL}{{0,43}})?"),
        71,
    ),
    Shape(
        "jwt",
        (b"eyJ",),
        _pattern(rf"eyJ{_B64URL}{{8,2048}}\.eyJ{_B64URL}{{8,8192}}\.{_B64URL}{{16,1024}}"),
        _pattern(rf"eyJ{_B64URL}{{0,2048}}(?:\.(?:e(?:y(?:J{_B64URL}{{0,8192}}(?:\.{_B64URL}{{0,1024}})?)?)?)?)?"),
        12_000,
    ),
    Shape(
        "aws-secret-key",
        (b"aws_secret_access_key", b"AWS_SECRET_ACCESS_KEY", b"SecretAccessKey"),
        _pattern(
            rf"[A-Za-z_]{{15,21}}{_QUOTE}[ \t]{{0,4}}[:=][ \t]{{0,4}}{_QUOTE}",
            r"(?P<token>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
        ),
        _pattern(rf"[A-Za-z_]{{15,21}}{_QUOTE}[ \t]{{0,4}}(?:[:=][ \t]{{0,4}}{_QUOTE}[A-Za-z0-9/+]{{0,40}})?"),
        80,
        part=True,
    ),
    Shape(
        "authorization",
        (b"Authorization", b"authorization", b"AUTHORIZATION"),
        _pattern(
            rf"[A-Za-z]{{13}}{_QUOTE}[ \t]{{0,4}}[:=][ \t]{{0,4}}{_QUOTE}",
            rf"(?i:bearer|basic|token|digest|apikey)[ \t]{{1,4}}(?P<token>{_CREDENTIAL}{{8,8192}})",
        ),
        _pattern(
            rf"[A-Za-z]{{13}}{_QUOTE}[ \t]{{0,4}}(?:[:=][ \t]{{0,4}}{_QUOTE}",
            rf"(?:[A-Za-z]{{1,6}}(?:[ \t]{{1,4}}{_CREDENTIAL}{{0,8192}})?)?)?",
        ),
        8192 + 64,
        part=True,
    ),
    Shape(
        "private-key",
        (b"-----BEGIN ",),
        _pattern(rf"-----BEGIN {_KEY}{_HEADERS}{_LINE}{{0,1024}}{_ENDS}{_BREAK}-----END {_KEY}"),
        _pattern(
            r"-----BEGIN [A-Z0-9 ]{0,50}(?:-{1,4}(?!-)|",
            rf"-----{_HEADERS}{_LINE}{{0,1024}}{_ENDS}(?:{_BREAK})?[^\r\n]{{0,128}})?",
        ),
        16_384,
        # Without the end line, the lines of the key are redacted too.
        torn=_pattern(rf"-----BEGIN {_KEY}{_HEADERS}{_LINE}{{1,1024}}"),
        part=True,
    ),
)
