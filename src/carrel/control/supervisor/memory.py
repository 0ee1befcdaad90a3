"""Whether a command was killed because memory ran out. Only the provider knows: a sandbox cannot be
trusted with this.
"""

from __future__ import annotations

from carrel.control.sessions.live import LiveSandbox
from carrel.models import CellResult, CommandInfo, CommandResult

Ended = CommandInfo | CommandResult | CellResult


async def for_memory(box: LiveSandbox, ended: Ended) -> bool:
    """Whether the kernel killed a process of it because memory ran out. The answer stays the same for each id."""
    killed = ended.signal in {"SIGKILL", "KILL"} or ended.exit_code == 137  # the shell's name for it
    if not killed or ended.timed_out:
        return False
    if box.starved.get(ended.id) is None:
        count = await box.provider.out_of_memory_kills(box.handle)
        if box.starved.get(ended.id) is None:  # else another request has just asked
            box.starved.put(ended.id, count > box.oom_kills)
        box.oom_kills = max(count, box.oom_kills)
    return bool(box.starved.get(ended.id))
