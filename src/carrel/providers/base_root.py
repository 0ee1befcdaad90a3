"""The directory that sandboxes with a kernel of their own have as their root: carrel's own files and those of the
host's `/etc` that every sandbox sees. What else belongs into the root is mounted there for each sandbox (see
`carrel.isolation.staging`).
"""

from __future__ import annotations

import fcntl
import glob
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from carrel.isolation import image_root, inside, launchers, rootfs
from carrel.isolation.staging import StagedMount
from carrel.primitives.trees import remove_tree

_NAMES = (inside.BUNDLE[1:], inside.CONTROL[1:], "sys/fs", "sys/fs/cgroup")
"""Further empty directories, for mounts."""


@dataclass(frozen=True)
class BaseRoot:
    """The directories that were made: `root` for sandboxes on the host's programs, layers around images."""

    place: str
    mounts: tuple[StagedMount, ...]
    """What a sandbox on the host's programs has besides."""
    tools: tuple[StagedMount, ...]
    """What a sandbox on an image has besides."""
    lock: int
    """A descriptor that keeps other processes of the server from removing the directories."""

    @property
    def root(self) -> str:
        return f"{self.place}/root"

    def layers(self, image: str, *, trust: bool) -> list[str]:
        """Return the layers of the root of a sandbox from an image, the first of them on top."""
        around = [image_root.TRUST, image_root.TOP] if trust else [image_root.TOP]
        return [*(self.place + layer for layer in around), image, self.place + image_root.BOTTOM]


def make(place: str, shared: Mapping[str, str]) -> BaseRoot:
    """Make the directories below `place`, which must not exist. `shared` maps paths in every sandbox to paths of the
    host. Raises `OSError`. Blocking.
    """
    root = f"{place}/root"
    os.makedirs(root, 0o755)
    lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    plan = rootfs.base_plan(rootfs.host_links(), names=_NAMES)
    binds = [step for step in plan if isinstance(step, rootfs.Bind)]
    rootfs.apply_plan([step for step in plan if not isinstance(step, rootfs.Bind | rootfs.Device)], root)
    image_root.make_layers(place, list(_NAMES))
    tools = [StagedMount(source, target) for target, source in shared.items() if target != inside.ENVIRONMENTS]
    main = root + launchers.MAIN_PLACE
    pips = [StagedMount(main, path) for pattern in launchers.MAINS for path in glob.glob(pattern)]
    own = StagedMount(f"{root}{rootfs.PYTHON}", rootfs.PYTHON)
    return BaseRoot(
        place,
        (*(StagedMount(step.source, step.target) for step in binds), *tools, *pips),
        (own, *tools),
        lock,
    )


def remove_unused(roots: str) -> None:
    """Remove the directories in `roots` of processes that are gone. Call it when no sandbox uses one. Blocking."""
    with suppress(FileNotFoundError):  # none was made, or another process removes them now
        for name in os.listdir(roots):
            lock = os.open(os.path.join(roots, name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(os.path.join(roots, name))
            except BlockingIOError:
                pass
            finally:
                os.close(lock)
