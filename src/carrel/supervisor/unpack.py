"""The program of the init container of a pod: copies the bundle and the credentials of a slot into the pod's volumes.

It ends with an error in a pod that can connect to an address which no sandbox may reach: then the cluster does not
enforce its network policies. They may take a moment to hold for a new pod.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time

PATIENCE_S = 15.0
"""How long policies may take to hold for a new pod."""
_ATTEMPT_S, _PAUSE_S = 1.0, 0.2
_COPIED = 0o755


def main(arguments: list[str]) -> None:
    """Copy a directory to another, and a file to another place. The last arguments are `address:port`, and a directory
    to make; either may be empty.
    """
    _, bundle, target, source, copy, probe, own = arguments
    try:
        if own:
            os.mkdir(own, 0o700)
        copy_tree(bundle, target)
        shutil.copyfile(source, copy)
        os.chmod(copy, 0o600)
        if probe and not is_refused(probe):
            sys.exit(
                f"this pod can reach {probe}: the cluster does not enforce network policies, so nothing may run in it"
            )
    except OSError as error:
        sys.exit(f"the pod cannot be prepared: {error}")


def copy_tree(source: str, target: str) -> None:
    """Copy a directory with everything below it. All that is copied can be read and executed by everybody."""
    for folder, names, files in os.walk(source):
        place = os.path.join(target, os.path.relpath(folder, source))
        for name in (*names, *files):
            path, copied = os.path.join(folder, name), os.path.join(place, name)
            if os.path.islink(path):
                os.symlink(os.readlink(path), copied)
            elif os.path.isdir(path):
                os.mkdir(copied, _COPIED)
            else:
                shutil.copyfile(path, copied)
                os.chmod(copied, _COPIED)


def is_refused(address: str) -> bool:
    """Return whether no connection to an address can be made, now or soon."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ATTEMPT_S).close()
        except OSError:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(sys.argv)
