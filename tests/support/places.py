"""Where a server keeps things."""

from __future__ import annotations

from pathlib import Path


def volumes(data_dir: Path) -> Path:
    """The directory of the workspaces: in a pool where the server has one."""
    pool = data_dir / "storage" / "pool" / "volumes"
    return pool if pool.exists() else data_dir / "storage" / "volumes"
