"""What an attack inside a sandbox works with: raw system calls and the like. Shipped as text, so it imports nothing of ours."""

import errno
import os
import sys

NUMBERS = {
    "x86_64": {
        "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "mknod": 133,
        "open_by_handle_at": 304, "name_to_handle_at": 303, "process_vm_readv": 310, "process_vm_writev": 311,
        "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "init_module": 175, "finit_module": 313, "kexec_load": 246, "kexec_file_load": 320, "modify_ldt": 154,
        "personality": 135, "ptrace": 101, "swapon": 167, "syslog": 103, "iopl": 172, "ioperm": 173,
        "sethostname": 170, "settimeofday": 164, "clock_settime": 227, "quotactl": 179, "acct": 163, "clone": 56,
        "kcmp": 312, "renameat2": 316,
    },
    "aarch64": {
        "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268, "mknod": -1,
        "open_by_handle_at": 265, "name_to_handle_at": 264, "process_vm_readv": 270, "process_vm_writev": 271,
        "keyctl": 219, "add_key": 217, "request_key": 218, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "init_module": 105, "finit_module": 273, "kexec_load": 104, "kexec_file_load": 294, "modify_ldt": -1,
        "personality": 92, "ptrace": 117, "swapon": 224, "syslog": 116, "iopl": -1, "ioperm": -1,
        "sethostname": 161, "settimeofday": 170, "clock_settime": 112, "quotactl": 60, "acct": 89, "clone": 220,
        "kcmp": 272, "renameat2": 276,
    },
}[os.uname().machine]  # fmt: skip
NUMBERS |= {
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "mount_setattr": 442, "io_uring_setup": 425, "clone3": 435, "pidfd_getfd": 438,
}  # fmt: skip


def __getattr__(name):
    """The C library, once an attack wants it: most of them only open and connect, and to import this takes as long."""
    if name != "LIBC":
        raise AttributeError(name)
    import ctypes

    libc = globals()["LIBC"] = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc


def call(name, *arguments):
    """A system call by name; raises `OSError` as the kernel answers."""
    import ctypes

    libc = globals().get("LIBC") or __getattr__("LIBC")
    taken = [
        ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) if isinstance(a, int) else a for a in arguments
    ]
    ctypes.set_errno(0)
    answer = libc.syscall(ctypes.c_long(NUMBERS[name]), *taken)
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return answer


def those_that_work(tries):
    """The names of the ways that the kernel does not refuse."""
    done = []
    for name, attempt in tries.items():
        try:
            attempt()
        except OSError:
            continue
        done.append(name)
    return done


def first_that_works(*tries):
    """The first true answer of several ways to the same end; a way the kernel refuses counts as none."""
    for one in tries:
        try:
            found = one()
        except OSError:
            continue
        if found:
            return found
    return None


def read(path, size=4096):
    """Bytes of a file as text."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(descriptor, size).decode(errors="replace")
    finally:
        os.close(descriptor)


def perform(attack):
    """Run an attack and print what it brought: evidence, or how the kernel refused. As Python writes it: to import more
    would take longer than most attacks.
    """
    try:
        answer = {"evidence": attack()}
    except OSError as error:
        answer = {"refused": f"{errno.errorcode.get(error.errno, error.errno)}: {error}"}
    except Exception:
        import traceback

        answer = {"broken": traceback.format_exc()}
    sys.stdout.write("\n@@" + ascii(answer) + "\n")
    sys.stdout.flush()
