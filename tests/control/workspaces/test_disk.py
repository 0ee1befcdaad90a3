from __future__ import annotations

from pathlib import Path

from carrel.control.plane import ControlPlane
from carrel.control.workspaces.disk import Disk
from carrel.models import CommandRequest, SandboxRequest, TerminateRequest

MB = 1024 * 1024


async def test_every_part_of_the_disk_is_told(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(SandboxRequest(context_id="c"))
    await plane.operations.run_command("c", CommandRequest(command="head -c 3000000 /dev/urandom > data/x"))
    await plane.operations.terminate("c", TerminateRequest())
    packages = Path(plane.layout.cache) / "packages" / "x"
    packages.parent.mkdir(exist_ok=True)
    packages.write_bytes(b"x" * 2 * MB)
    usage = await plane.disk.usage()
    sizes = {part.name: part.bytes for part in usage.parts}
    assert list(sizes) == ["workspaces", "snapshots", "archive", "environments", "packages", "records", "other"]
    assert min(sizes["workspaces"], sizes["snapshots"], sizes["archive"]) >= 3_000_000
    assert 2 * MB <= sizes["packages"] < 3 * MB and sizes["records"] > 0
    assert all(part.complete for part in usage.parts) and 0 < usage.free_bytes <= usage.capacity_bytes
    assert await plane.disk.usage() is usage, "it is not measured anew for everyone who asks"


async def test_what_is_too_much_to_count_is_told_so(plane: ControlPlane) -> None:
    await plane.sessions.deploy_or_resume(SandboxRequest(context_id="c"))
    await plane.operations.run_command("c", CommandRequest(command="seq 100 | xargs touch"))
    disk = Disk(plane.layout, plane.driver, plane.settings.archive_url, most_entries=50)
    parts = {part.name: part for part in (await disk.usage()).parts}
    assert not parts["workspaces"].complete and not parts["snapshots"].complete
