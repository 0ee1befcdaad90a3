"""Masks in a sandbox that runs already, before any code of an agent runs there. For root; blocking.

In gVisor only those of the workspace can be applied late: the sandbox may have looked at other files already.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from carrel.isolation import linux, mask_mounts
from carrel.isolation.late_mounts import Sandbox
from carrel.isolation.mask_mounts import CoverFiles, MaskPlan
from carrel.isolation.masks import Masks

COVERS = "/covers"
"""The empty directory beside a workspace that the files of masks are mounted at for a moment."""


def cover(sandbox: Sandbox, top: str, masks: Masks) -> None:
    """Apply the masks of a workspace, which is mounted at its usual path below `top` in the sandbox.

    For that, `top` is the root: so patterns find nothing else. Raises as a start with masks does.
    """
    hidden, readonly = list(masks.hidden), list(masks.readonly)
    writable = None if masks.writable is None else list(masks.writable)
    plan = MaskPlan({}, {}, hidden, writable, readonly)
    root = sandbox.open(top)

    def work() -> None:
        os.fchdir(root)
        os.chroot(".")
        cover_here(COVERS, lambda _: plan)

    try:
        sandbox.act(work)
    finally:
        os.close(root)


def cover_here(place: str, plan: Callable[[CoverFiles], MaskPlan], path: Sequence[str] = ()) -> None:
    """Apply masks in the mounts and below the root of this thread.

    `place` is an empty directory there, for the covers; `path` are further directories of programs. Raises as a start
    with masks does; then some may be applied, and the sandbox has to be ended.
    """
    files = CoverFiles(place, "/")
    try:
        covers = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            mask_mounts.cover(plan(files), covers, path)
        finally:
            os.close(covers)
    finally:
        files.close()
        linux.unmount(place, linux.MNT_DETACH)  # what covers a path is a mount of its own
