"""From the request for a sandbox to the end of its first command, from an image and from the host's own root.

The image has one program without any library, which both run: so the root is the only difference. The raw provider is
measured, as in `start`. The image is measured with the usual user of images, root, and with the agent's own number.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

from bench import ground
from bench.measure import Contender, Figures, Progress, Report, Table, median, percentile, ratio, rounds
from bench.wire import Wire, request
from carrel.isolation import refusing_program
from carrel.isolation.rootfs import SANDBOX_UID
from carrel.providers.base import RootImage

ROUNDS = 150
SETTLE_S = 0.008
PROGRAM = "bin/program"


async def run(progress: Progress) -> Report:
    """Measure."""
    async with ground.sandboxes() as boxes:
        image = _image(boxes.images / "one")
        contenders: dict[str, Contender] = {
            "host": _contender(boxes, None),
            "image": _contender(boxes, image),
            "image, its user is the agent's": _contender(boxes, replace(image, user=f"{SANDBOX_UID}:{SANDBOX_UID}")),
        }
        samples = await rounds(contenders, ROUNDS, warm_up=3, progress=progress)
    host = samples["host"]
    table = Table(f"start to first command finished, {ROUNDS} rounds", ("", "median ms", "p99 ms", "× host"))
    for name, taken in samples.items():
        table.add(name, median(taken) * 1e3, percentile(taken, 99) * 1e3, ratio(taken, host))
    figures: Figures = {
        "image_start_ms": median(samples["image"]) * 1e3,
        "image_start_vs_host": ratio(samples["image"], host),
    }
    return Report(figures, [table])


def _image(root: Path) -> RootImage:
    (root / PROGRAM).parent.mkdir(parents=True)
    (root / PROGRAM).write_bytes(refusing_program.image(b"ran\n"))
    (root / PROGRAM).chmod(0o755)
    status = root.stat()
    return RootImage(str(root), (status.st_dev, status.st_ino))


def _contender(boxes: ground.Sandboxes, image: RootImage | None) -> Contender:
    async def turn() -> float:
        launch = replace(boxes.workspace(), image=image)
        program = f"/{PROGRAM}"
        if image is None:  # the same program, where the host's root has a place for it
            own = Path(launch.workspace, "program")
            own.write_bytes(refusing_program.image(b"ran\n"))
            own.chmod(0o755)
            program = "/workspace/program"
        run_it = request("POST", "/commands?wait=1", json.dumps({"command": [program], "timeout": 20}).encode())
        await asyncio.sleep(SETTLE_S)
        began = time.perf_counter()
        handle = await boxes.start(launch)
        wire = Wire(ground.reach(handle))
        try:
            answer = wire.call(run_it)
            took = time.perf_counter() - began
            assert b'"exit_code":126' in answer.replace(b" ", b""), answer
        finally:
            wire.close()
        await boxes.remove(handle)
        return took

    return turn
