from __future__ import annotations

from carrel.providers.gvisor import oci

SPEC = oci.GvisorSpec(
    id="sbx-1",
    root="/run/g/root",
    control="/run/g/c",
    late="/run/g/late",
    secrets="/run/g/c/private/secrets",
    command=("/opt/carrel/bin/python3", "-I"),
    environments="/data/envs",
    memory_mb=256,
)


def memory(target: str, mode: str, size: str, *more: str) -> dict[str, object]:
    options = ["nosuid", "nodev", f"mode={mode}", f"size={size}", "uid=1000", "gid=1000", *more]
    return {"destination": target, "type": "tmpfs", "source": "tmpfs", "options": options}


def bind(source: str, target: str, *options: str) -> dict[str, object]:
    return {"destination": target, "type": "bind", "source": source, "options": ["rbind", *options]}


def test_configuration() -> None:
    capabilities = ["CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_ADMIN"]
    assert oci.configuration(SPEC) == {
        "ociVersion": "1.0.2",
        "hostname": "carrel",
        "root": {"path": "/run/g/root", "readonly": True},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/opt/carrel/bin/python3", "-I"],
            "env": [
                *("PATH=/usr/bin:/bin", "LANG=C.UTF-8"),
                *("MALLOC_MMAP_THRESHOLD_=4194304", "MALLOC_TRIM_THRESHOLD_=4194304"),
            ],
            "cwd": "/",
            "noNewPrivileges": True,
            "rlimits": [{"type": "RLIMIT_CORE", "hard": 0, "soft": 0}],
            "capabilities": {"bounding": capabilities, "effective": capabilities, "permitted": capabilities},
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "nodev", "noexec"]},
            memory("/dev/shm", "1777", "16m", "noexec"),
            memory("/tmp", "1777", "64m"),
            memory("/home/agent", "755", "64m"),
            {
                "destination": "/sys/fs/cgroup",
                "type": "cgroup",
                "source": "cgroup",
                "options": ["nosuid", "nodev", "noexec"],
            },
            bind("/run/g/c", "/run/carrel", "rw", "nosuid", "nodev", "noexec"),
            bind("/run/g/c/private/secrets", "/run/secrets", "ro", "nosuid", "nodev", "noexec"),
            bind("/run/g/late", "/run/carrel/private/late", "rw", "nosuid", "nodev"),
            bind("/data/envs", "/envs", "ro", "nosuid", "nodev"),
        ],
        "linux": {
            "namespaces": [
                {"type": "pid"},
                {"type": "ipc"},
                {"type": "uts"},
                {"type": "mount"},
                {"type": "network"},
            ]
        },
    }


def test_command() -> None:
    assert oci.command("/bin/runsc", "/run/g/state", "systrap", "/run/g", "/run/g/pid", "sbx-1") == (
        "/bin/runsc",
        "--root=/run/g/state",
        "--platform=systrap",
        "--network=none",
        "--ignore-cgroups",
        "--directfs=false",
        "--overlay2=none",
        "--host-uds=all",
        "--gofer-network-namespace=new",
        "--in-sandbox-cgroup=v2",
        "--host-settings=ignore",
        "run",
        "--detach",
        "--bundle=/run/g",
        "--pid-file=/run/g/pid",
        "sbx-1",
    )


def test_processes_are_limited_by_the_kernel_of_the_sandbox() -> None:
    assert oci.tasks_file("sbx-1") == "/sys/fs/cgroup/sbx-1/pids.max"
