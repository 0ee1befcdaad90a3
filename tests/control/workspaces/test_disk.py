from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.calls import ADMIN

from carrel.control.plane import ControlPlane
from carrel.control.workspaces.disk import REUSED_S, REUSED_TIMES, Disk
from carrel.models import CommandRequest, DiskUsage, SandboxRequest, TerminateRequest

MB = 1024 * 1024


async def test_answer_is_reused_for_as_long_as_measuring_is_costly(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    measure = Disk._measure
    took = [0.0]

    def measured(disk: Disk) -> DiskUsage:
        clock[0] += took[0]
        return measure(disk)

    monkeypatch.setattr(Disk, "_measure", measured)
    for took[0], reused in ((0.1, 0.1 * REUSED_TIMES), (10.0, REUSED_S)):
        disk = Disk(plane.layout, plane.driver, plane.settings.archive_url, clock=lambda: clock[0])
        first = await disk.usage()
        clock[0] += reused - 0.01
        assert await disk.usage() is first, "it is not measured anew for everyone who asks"
        clock[0] += 0.02
        assert await disk.usage() is not first, "what was written since is seen"


async def test_every_part_of_the_disk_is_told(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.operations.run_command(ADMIN, "c", CommandRequest(command="head -c 3000000 /dev/urandom > data/x"))
    await plane.operations.terminate(ADMIN, "c", TerminateRequest())
    packages = Path(plane.layout.cache) / "packages" / "x"
    packages.parent.mkdir(exist_ok=True)
    packages.write_bytes(b"x" * 2 * MB)
    usage = await plane.disk.usage()
    sizes = {part.name: part.bytes for part in usage.parts}
    assert list(sizes) == ["workspaces", "snapshots", "archive", "environments", "packages", "records", "other"]
    assert min(sizes["workspaces"], sizes["snapshots"], sizes["archive"]) >= 3_000_000
    assert 2 * MB <= sizes["packages"] < 3 * MB and sizes["records"] > 0
    assert all(part.complete for part in usage.parts) and 0 < usage.free_bytes <= usage.capacity_bytes


async def test_what_is_too_much_to_count_is_told_so(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(ADMIN, SandboxRequest(context_id="c"))
    await plane.operations.run_command(ADMIN, "c", CommandRequest(command="seq 100 | xargs touch"))
    disk = Disk(plane.layout, plane.driver, plane.settings.archive_url, most_entries=50)
    parts = {part.name: part for part in (await disk.usage()).parts}
    assert not parts["workspaces"].complete and not parts["snapshots"].complete
