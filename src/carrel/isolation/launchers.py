"""Small programs that come before the host's own on the PATH of every sandbox: `pip` and `uv`, which install into the
workspace's virtual environment and create it when needed, and `python3`, which runs in it.

Also the search programs of the templates. This module has only their texts. A policy that denies `pip` or `uv` masks
these too.
"""

from __future__ import annotations

from pathlib import Path

PLACE = "/etc/carrel/bin"
VENV = "/workspace/.venv"
"""The virtual environment of a workspace, and a part of it."""

_MAKE = """\
#!/bin/sh
# Makes the virtual environment of this workspace, once: on top of a shared environment (/envs/NAME) that is named, or
# of the one that this sandbox has from its template. With --there nothing is made that is not there already.
venv=/workspace/.venv
if [ "${1-}" = --there ]; then
    [ -x "$venv/bin/python" ] || exit 0
    shift
fi
base=${1-${CARREL_ENV-}}
if [ ! -x "$venv/bin/python" ]; then
    python=${CARREL_PYTHON:-/usr/bin/python3}
    if [ -n "$base" ]; then
        python=$(readlink -f "$base/bin/python") || { echo "carrel-venv: there is no $base" >&2; exit 1; }
    fi
    draft=$venv.$$
    if /etc/carrel/tools/uv venv -q --no-project --relocatable --no-python-downloads --python "$python" \\
        --prompt workspace "$draft" 2>/dev/null; then
        mv -T "$draft" "$venv" 2>/dev/null || rm -rf "$draft"
    else
        rm -rf "$draft"
        "$python" -m venv --without-pip --prompt workspace "$venv" || exit 1
    fi
    [ -x "$venv/bin/python" ] || { echo "carrel-venv: $venv cannot be made" >&2; exit 1; }
fi
for packages in "$venv"/lib/python3*/site-packages; do
    [ -e "$packages/_carrel_pip.pth" ] || echo /etc/carrel/python >"$packages/_carrel_pip.pth" || exit 1
    if [ -n "$base" ]; then
        shared=$base/lib/$(basename "$(dirname "$packages")")/site-packages
        [ -d "$shared" ] || { echo "carrel-venv: $base is of another Python than $venv" >&2; exit 1; }
        if [ -n "${1-}" ]; then
            echo "import site; site.addsitedir('$shared')" >"$packages/_carrel_base.pth" || exit 1
        elif [ ! -e "$packages/_carrel_base.pth" ]; then
            inner=${shared#"$base"}
            echo "import os, site; site.addsitedir(os.environ.get('CARREL_ENV', '$base') + '$inner')" \\
                >"$packages/_carrel_base.pth" || exit 1
        fi
    fi
done
"""

_PIP = """\
#!/bin/sh
# pip for the virtual environment of this workspace, which is made when something is first installed.
venv=${VIRTUAL_ENV:-/workspace/.venv}
installs= elsewhere=
for word; do
    case $word in
        install|uninstall) installs=yes ;;
        -t|-t?*|--target|--target=*|--prefix|--prefix=*|--root|--root=*|--python|--python=*) elsewhere=yes ;;
    esac
done
if [ -n "$installs" ] && [ -z "$elsewhere" ] && [ "$venv" = /workspace/.venv ]; then
    /etc/carrel/bin/carrel-venv || exit 1
fi
if [ -n "$elsewhere" ] || [ ! -x "$venv/bin/python" ]; then
    export CARREL_PIP=1
    [ -d /etc/carrel/python/pip/_internal ] && export PYTHONPATH="/etc/carrel/python${PYTHONPATH:+:$PYTHONPATH}"
    [ -x "${CARREL_ENV-}/bin/python" ] && exec "$CARREL_ENV/bin/python" -m pip "$@"
    exec "${CARREL_PYTHON:-/usr/bin/python3}" -m pip "$@"
fi
for word; do
    shift
    case $word in
        --user|--break-system-packages) ;;
        *) set -- "$@" "$word" ;;
    esac
done
if [ "$venv" != /workspace/.venv ]; then
    export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}/etc/carrel/python"
fi
exec "$venv/bin/python" -m pip "$@"
"""

_PYTHON = """\
#!/bin/sh
# The Python of the virtual environment of this workspace, once there is one; else that of its template's packages.
[ -x /workspace/.venv/bin/python ] && exec /workspace/.venv/bin/python "$@"
case ${CARREL_ENV-} in
    /envs/*) [ -x "$CARREL_ENV/bin/python" ] && exec "$CARREL_ENV/bin/python" "$@" ;;
esac
exec "${CARREL_PYTHON:-/usr/bin/python3}" "$@"
"""

_HEARTBEAT = """\
#!/bin/sh
# Says how far a job is: carrel-heartbeat "indexing 40 %". Whoever looks at the job sees it, and it counts as alive.
if [ -z "${CARREL_HEARTBEAT-}" ]; then
    echo "carrel-heartbeat: nobody listens, this is not part of a job" >&2
    exit 0
fi
draft=$CARREL_HEARTBEAT.$$
printf '%.1000s' "$*" >"$draft" && mv -f "$draft" "$CARREL_HEARTBEAT"
"""

_UV = """\
#!/bin/sh
# uv; `uv pip install` goes into the virtual environment of this workspace, which is made on first need.
pip= installs= elsewhere=
for word; do
    case $word in
        pip) pip=yes ;;
        install|sync) installs=$pip ;;
        -t|--target|--target=*|--prefix|--prefix=*|-p|--python|--python=*|--system) elsewhere=yes ;;
    esac
done
if [ -n "$installs" ] && [ -z "$elsewhere" ] && [ "${VIRTUAL_ENV:-/workspace/.venv}" = /workspace/.venv ]; then
    /etc/carrel/bin/carrel-venv || exit 1
    export VIRTUAL_ENV=/workspace/.venv
fi
exec /etc/carrel/tools/uv "$@"
"""

MAIN = """\
# Seen in the place of the `__main__` of the host's pip: `python3 -m pip install` goes where `pip install` goes.
import os
import sys

if sys.path and sys.path[0] in ("", os.getcwd()):
    sys.path.pop(0)

if __name__ == "__main__":
    if sys.prefix == sys.base_prefix and "install" in sys.argv and "CARREL_PIP" not in os.environ:
        os.execv("/etc/carrel/bin/pip", ["pip", *sys.argv[1:]])
    from pip._internal.cli.main import main

    sys.exit(main())
"""
MAIN_PLACE = "/etc/carrel/pip-main.py"
MAINS = (
    "/usr/lib/python3/dist-packages/pip/__main__.py",
    "/usr/lib/python3.*/site-packages/pip/__main__.py",
    "/usr/local/lib/python3.*/*-packages/pip/__main__.py",
)
"""Patterns for the paths of the host's own pips."""

SHARED_PIP = """\
# What a shared environment has for pip: it is read-only, so installing goes where `pip install` goes.
import os
import sys

if __name__ == "__main__":
    if sys.prefix.startswith("/envs/"):
        os.execv("/etc/carrel/bin/pip", ["pip", *sys.argv[1:]])
    import runpy

    sys.path.insert(0, "/etc/carrel/python")
    for name in [name for name in sys.modules if name.partition(".")[0] == "pip"]:
        del sys.modules[name]
    runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
SHARED_PIP_PLACE = "/etc/carrel/shared"
"""A directory of modules that every shared environment can import, after its own."""

_PROGRAMS = Path(__file__).parent.parent / "sandbox_programs"
_SEARCH = {name: (_PROGRAMS / f"{name.replace('-', '_')}.py").read_text() for name in ("file-search", "web-search")}

TEXTS = {
    "carrel-heartbeat": _HEARTBEAT,
    "carrel-venv": _MAKE,
    "pip": _PIP,
    "pip3": _PIP,
    "python": _PYTHON,
    "python3": _PYTHON,
    "uv": _UV,
    **_SEARCH,
}
"""The programs by name."""
