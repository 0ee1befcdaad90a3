"""The masks of a workspace that is mounted in a sandbox which runs already. For root; blocking.

Masks of the other files have to be there from the start: the sandbox may have looked at those already.
"""

from __future__ import annotations

import os

from carrel.isolation import linux, mask_mounts
from carrel.isolation.late_mounts import Sandbox
from carrel.isolation.masks import Masks

COVERS = "/covers"
"""The empty directory beside the workspace that the files of masks are mounted at for a moment."""


def cover(sandbox: Sandbox, top: str, masks: Masks) -> None:
    """Apply the masks of a workspace, which is mounted at its usual path below `top` in the sandbox.

    For that, `top` is the root: so patterns find nothing else. Raises as a start with masks does.
    """
    hidden, readonly = list(masks.hidden), list(masks.readonly)
    writable = None if masks.writable is None else list(masks.writable)
    plan = mask_mounts.MaskPlan({}, {}, hidden, writable, readonly)
    root = sandbox.open(top)

    def work() -> None:
        os.fchdir(root)
        os.chroot(".")
        files = mask_mounts.CoverFiles(COVERS, "/")
        try:
            covers = os.open(COVERS, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                mask_mounts.cover(plan, covers)
            finally:
                os.close(covers)
        finally:
            files.close()
            linux.unmount(COVERS, linux.MNT_DETACH)  # what covers a path is a mount of its own

    try:
        sandbox.act(work)
    finally:
        os.close(root)
