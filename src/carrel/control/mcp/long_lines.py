"""Messages of MCP servers that are too long to be taken: passed over without being kept, and answered for. Pure.

Only the two ends of one are looked at, where servers write which request it answers.
"""

from __future__ import annotations

import json
import re

EDGE = 256
TOO_LARGE = -32000
_VERSION = rb'"jsonrpc"\s*:\s*"2\.0"\s*'
_NUMBER = rb'"id"\s*:\s*(\d{1,15})\s*'
_ASKS = re.compile(rb'\{\s*(?:(?:%s|%s),\s*){0,2}"method"' % (_VERSION, _NUMBER))
_FIRST = re.compile(rb"\{\s*(?:%s,\s*)?%s," % (_VERSION, _NUMBER))
# The last brace is the message's own, and a number stands in no text: what is before it is the message's own too.
_LAST = re.compile(rb",\s*%s(?:,\s*%s)?\}\Z" % (_NUMBER, _VERSION))


class StandIn(bytes):
    """A short message in the place of a long one, which had `size` bytes."""

    size: int


class LongLine:
    """One message that is passed over: `feed` it until `left` is 0."""

    def __init__(self, size: int):
        self.size = self.left = size
        self._head = self._tail = b""

    def feed(self, data: bytes | bytearray) -> int:
        """Pass over some of it; how many bytes were its own."""
        mine = min(self.left, len(data))
        self.left -= mine
        if len(self._head) < EDGE:
            self._head += bytes(data[: min(mine, EDGE - len(self._head))])
        self._tail = (self._tail + bytes(data[max(0, mine - EDGE) : mine]))[-EDGE:]
        return mine

    def stand_in(self, most: int) -> StandIn | None:
        """A refusal for who waits for its answer; None when it does not say whom it answers. `most` would be taken."""
        found = None if _ASKS.match(self._head) else _FIRST.match(self._head) or _LAST.search(self._tail)
        if found is None:
            return None
        words = f"the answer has {self.size} bytes, and at most {most} are taken: ask for less at once"
        error = {"jsonrpc": "2.0", "id": int(found[1]), "error": {"code": TOO_LARGE, "message": words}}
        made = StandIn(json.dumps(error).encode())
        made.size = self.size
        return made
