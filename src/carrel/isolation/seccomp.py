"""The system call filter of a sandbox, an allow list compiled to classic BPF.

`build` is pure and is called once, before any fork. The filter is installed as the last step before agent code.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from carrel.errors import PlatformError, Unsupported
from carrel.isolation import linux
from carrel.isolation.syscalls import TABLES
from carrel.primitives import libc

RET_ALLOW = 0x7FFF0000
RET_ERRNO = 0x00050000

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "i386": 0x40000003, "arm": 0x40000028}


# --- decisions ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArgumentSwitch:
    """A switch on one argument: the decision of the first equal case, else `otherwise`.

    Only the low half of the argument is looked at. That is right exactly because the kernel declares every
    argument checked below as (unsigned) int or umode_t, or cuts it to 32 bits (clone): a caller may put
    anything into what the kernel drops, so looking at it would open a way around the check.
    """

    argument: int
    cases: tuple[tuple[int, Decision], ...]
    otherwise: Decision
    mask: int = 0xFFFFFFFF


Decision = int | ArgumentSwitch


def refuse(number: int) -> int:
    """Return the action that makes a call fail with this errno."""
    return RET_ERRNO | number


_EPERM, _ENOSYS = refuse(errno.EPERM), refuse(errno.ENOSYS)
_ENOTTY = refuse(errno.ENOTTY)
_EAFNOSUPPORT, _EPROTONOSUPPORT = refuse(errno.EAFNOSUPPORT), refuse(errno.EPROTONOSUPPORT)


def _only(
    argument: int, values: Sequence[int], then: Decision, otherwise: Decision, mask: int = 0xFFFFFFFF
) -> ArgumentSwitch:
    return ArgumentSwitch(argument, tuple((value, then) for value in values), otherwise, mask)


# --- policy ---------------------------------------------------------------------------------------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ALLOWED = _names(
    """
    accept accept4 access alarm arch_prctl bind brk cachestat capget capset chdir chmod chown clock_getres
    clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create
    epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit
    exit_group faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat
    fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate
    futex futex_requeue futex_wait futex_waitv futex_wake futimesat get_mempolicy get_robust_list
    get_thread_area getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername
    getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid
    getsockname getsockopt gettid gettimeofday getuid getxattr getxattrat inotify_add_watch inotify_init
    inotify_init1 inotify_rm_watch ioprio_get ioprio_set kcmp kill landlock_add_rule
    landlock_create_ruleset landlock_restrict_self lchown
    lgetxattr link linkat listen listxattr listxattrat llistxattr lremovexattr lseek lsetxattr
    lsm_get_self_attr lsm_list_modules lstat madvise map_shadow_stack mbind membarrier memfd_create
    memfd_secret mincore mkdir mkdirat mlock mlock2 mlockall mmap mprotect mq_getsetattr mq_notify mq_open
    mq_timedreceive mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall
    munmap nanosleep newfstatat open openat openat2 pause pidfd_getfd pidfd_open pidfd_send_signal pipe
    pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll pread64 preadv preadv2 process_madvise
    process_mrelease process_vm_readv process_vm_writev pselect6 ptrace pwrite64 pwritev pwritev2 read
    readahead readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr removexattrat
    rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
    rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
    sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
    sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield
    seccomp select semctl semget semop semtimedop sendfile sendmmsg sendmsg sendto set_mempolicy
    set_mempolicy_home_node set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid
    setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid
    setuid setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaltstack signalfd signalfd4
    splice stat statfs statx symlink symlinkat sync sync_file_range syncfs sysinfo tee tgkill time
    timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime
    timerfd_settime times tkill truncate umask uname unlink unlinkat utime utimensat utimes vfork vmsplice
    wait4 waitid write writev
    """
)

# Refused for root as well: these reach the host's kernel, clock, keys, mounts or namespaces.
DENIED = _names(
    """
    _sysctl acct add_key adjtimex bpf chroot clock_adjtime clock_settime create_module delete_module
    fanotify_init fanotify_mark finit_module fsconfig fsmount fsopen fspick get_kernel_syms init_module
    io_uring_enter io_uring_register io_uring_setup ioperm iopl kexec_file_load kexec_load keyctl
    lookup_dcookie lsm_set_self_attr migrate_pages modify_ldt mount mount_setattr move_mount move_pages
    name_to_handle_at nfsservctl open_by_handle_at open_tree open_tree_attr perf_event_open pivot_root
    query_module quotactl quotactl_fd reboot request_key setdomainname sethostname setns settimeofday
    swapoff swapon sysfs syslog umount2 unshare userfaultfd uselib ustat vhangup
    """
)

# As if the kernel were older: programs fall back from these, and clone3 hides its flags behind a pointer.
ABSENT = _names(
    """
    afs_syscall clone3 epoll_ctl_old epoll_wait_old file_getattr file_setattr getpmsg io_cancel io_destroy
    io_getevents io_pgetevents io_setup io_submit listmount putpmsg security statmount tuxcall vserver
    """
)
# The io_ calls among them take requests from a budget of the whole machine (fs.aio-max-nr).

_CLONE_NEW = 0x7E020000  # NEWTIME is absent: its bit lies in the exit signal here, only clone3 and unshare know it
_SOCKET_TYPE = 0xF  # the rest is SOCK_NONBLOCK and SOCK_CLOEXEC; the kernel refuses other bits
_NETLINK_ROUTE = 0
_IP_PROTOCOLS = (0, socket.IPPROTO_ICMP, socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_ICMPV6)
_TERMINAL_HIJACKS = (0x5412, 0x541C, 0x541D, 0x5423)  # TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD
# btrfs lets a directory's owner make subvolumes, and one inside a workspace would escape the workspace's cap and
# its snapshots. Of all requests with the letter of btrfs, only sharing blocks between files is left.
_LETTER, _BTRFS = 0xFF00, 0x9400
_FILE_CLONES = (0x40049409, 0x4020940D, 0xC0189436)  # FICLONE, FICLONERANGE, FIDEDUPERANGE
_PR_SET_MM = 35
# A lease lets its holder stop the server for 45 s when it opens the file; larger pipes come from a budget of the user,
# where EPERM is also the kernel's answer when it is used up.
_FILE_COMMANDS = (1024, 1031)  # F_SETLEASE, F_SETPIPE_SZ
# Compiled socket filters fill a budget of the whole machine (net.core.bpf_jit_limit) that seccomp itself needs.
_SOCKET_FILTERS = (26, 50, 51, 52)  # SO_ATTACH_FILTER, _BPF, _REUSEPORT_CBPF, _REUSEPORT_EBPF
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)  # default, PER_LINUX32, UNAME26, both, "only ask"
_FILE_TYPES = (0, stat.S_IFREG, stat.S_IFIFO, stat.S_IFSOCK)

# Protocols are listed too: SCTP, DCCP, L2TP and the like load kernel modules on first use by anybody.
_IP_SOCKET = _only(
    1,
    (socket.SOCK_STREAM, socket.SOCK_DGRAM),
    _only(2, _IP_PROTOCOLS, RET_ALLOW, _EPROTONOSUPPORT),
    _EPERM,
    _SOCKET_TYPE,
)
_UNIX_SOCKET = _only(1, (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET), RET_ALLOW, _EPERM, _SOCKET_TYPE)
_NETLINK_SOCKET = _only(
    1,
    (socket.SOCK_RAW, socket.SOCK_DGRAM),
    _only(2, (_NETLINK_ROUTE,), RET_ALLOW, _EPROTONOSUPPORT),
    _EPERM,
    _SOCKET_TYPE,
)

_FILE_SYSTEM_REQUEST = _only(1, (_BTRFS,), _only(1, _FILE_CLONES, RET_ALLOW, _ENOTTY), RET_ALLOW, _LETTER)

CHECKED: Mapping[str, ArgumentSwitch] = {
    "clone": _only(0, (0,), RET_ALLOW, _EPERM, _CLONE_NEW),
    "fcntl": _only(1, _FILE_COMMANDS, _EPERM, RET_ALLOW),
    "ioctl": _only(1, _TERMINAL_HIJACKS, _EPERM, _FILE_SYSTEM_REQUEST),
    "mknod": _only(1, _FILE_TYPES, RET_ALLOW, _EPERM, stat.S_IFMT(0xFFFF)),
    "mknodat": _only(2, _FILE_TYPES, RET_ALLOW, _EPERM, stat.S_IFMT(0xFFFF)),
    "personality": _only(0, _PERSONALITIES, RET_ALLOW, _EPERM),
    "prctl": _only(0, (_PR_SET_MM,), _EPERM, RET_ALLOW),
    "prlimit64": _only(0, (1,), _EPERM, RET_ALLOW),  # the supervisor has the agent's user id
    "setsockopt": _only(1, (socket.SOL_SOCKET,), _only(2, _SOCKET_FILTERS, _EPERM, RET_ALLOW), RET_ALLOW),
    "socket": ArgumentSwitch(
        0,
        (
            (socket.AF_UNIX, _UNIX_SOCKET),
            (socket.AF_INET, _IP_SOCKET),
            (socket.AF_INET6, _IP_SOCKET),
            (socket.AF_NETLINK, _NETLINK_SOCKET),
        ),
        _EAFNOSUPPORT,
    ),
    "socketpair": _only(0, (socket.AF_UNIX,), _UNIX_SOCKET, _EAFNOSUPPORT),
}

# Where no cgroup counts the buffers of sockets, they keep the size that the kernel gives them: setting it does nothing
# and succeeds, as beyond net.core.wmem_max.
_BUFFER_SIZES = (socket.SO_SNDBUF, socket.SO_RCVBUF)
FIXED_BUFFERS: Mapping[str, ArgumentSwitch] = {
    "setsockopt": _only(
        1,
        (socket.SOL_SOCKET,),
        ArgumentSwitch(
            2,
            (*((option, _EPERM) for option in _SOCKET_FILTERS), *((option, refuse(0)) for option in _BUFFER_SIZES)),
            RET_ALLOW,
        ),
        RET_ALLOW,
    ),
}

# In a sandbox that works on a folder of the host nobody makes a set-user-ID or set-group-ID file. It would belong to
# the owner of the folder, and another user of the host could run it with the owner's rights. The kernel itself ignores
# these bits in mkdir. chmod is refused for directories as well, because the filter does not see what a path names.
_SET_IDS = stat.S_ISUID | stat.S_ISGID
_CREATES = os.O_CREAT | (os.O_TMPFILE & ~os.O_DIRECTORY)


def _plain_mode(argument: int) -> ArgumentSwitch:
    return _only(argument, (0,), RET_ALLOW, _EPERM, _SET_IDS)


def without_set_ids() -> dict[str, ArgumentSwitch]:
    """Return the checks for such a sandbox.

    openat2 has its mode behind a pointer, which a filter cannot follow. It exists only for this process and its forks,
    whose calls have two secret words in arguments that the kernel ignores; programs fall back to openat.
    """
    first, second = libc.OPEN_BENEATH_WORDS
    return {
        "chmod": _plain_mode(1),
        "fchmod": _plain_mode(1),
        "fchmodat": _plain_mode(2),
        "fchmodat2": _plain_mode(2),
        "creat": _plain_mode(1),
        "open": _only(1, (0,), RET_ALLOW, _plain_mode(2), _CREATES),
        "openat": _only(2, (0,), RET_ALLOW, _plain_mode(3), _CREATES),
        "openat2": _only(4, (first,), _only(5, (second,), RET_ALLOW, _ENOSYS), _ENOSYS),
        "mknod": _only(1, _FILE_TYPES, _plain_mode(1), _EPERM, stat.S_IFMT(0xFFFF)),
        "mknodat": _only(2, _FILE_TYPES, _plain_mode(2), _EPERM, stat.S_IFMT(0xFFFF)),
    }


FOR_BUILDS: Mapping[str, Decision] = {"chroot": RET_ALLOW}
"""Package managers run scripts after a `chroot`, which needs a capability as well."""

# A tracer that skips a call sets its number to -1: nothing runs, and refusing would overwrite its answer.
_SKIPPED_BY_TRACER = 0xFFFFFFFF


def decision(name: str, more: Mapping[str, Decision] = MappingProxyType({})) -> Decision:
    """Return the decision for the call of this name; `more` checks come first. Unknown calls get ENOSYS."""
    if name in more:
        return more[name]
    if name in ALLOWED:
        return RET_ALLOW
    if name in DENIED:
        return _EPERM
    return CHECKED.get(name, _ENOSYS)


# --- compiler -------------------------------------------------------------------------------------------

_LD, _AND, _JA, _JEQ, _JGE, _RET = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_AT_NR, _AT_ARCH, _AT_ARGS = 0, 4, 16
_REACH = 255
_INSTRUCTION = struct.Struct("=HBBI")


class _Assembler:
    """Writes a program from its end to its start: every target exists before the jump to it.

    A place is its distance from the end. Equal decisions share one place as long as a jump reaches it, which
    keeps the program short: the kernel verifies, translates and simulates it at each installation.
    """

    def __init__(self) -> None:
        self._code: list[tuple[int, int, int, int]] = []
        self._places: dict[Decision, int] = {}

    def _put(self, code: int, value: int, true: int = 0, false: int = 0) -> int:
        self._code.append((code, true, false, value))
        return len(self._code)

    def _near(self, place: int, room: int) -> int:
        here = len(self._code)
        return place if here - place + room <= _REACH else self._put(_JA, here - place)

    def jump(self, code: int, value: int, true: int, false: int) -> int:
        # Either detour may add an instruction, so the first leaves room for the second.
        true, false = self._near(true, 1), self._near(false, 0)
        here = len(self._code)
        return self._put(code, value, here - true, here - false)

    def decide(self, wanted: Decision) -> int:
        known = self._places.get(wanted)
        # A far return costs as much as the jump to it would, a far check does not.
        if known is not None and (isinstance(wanted, ArgumentSwitch) or len(self._code) - known < _REACH):
            return known
        if isinstance(wanted, int):
            place = self._put(_RET, wanted)
        else:
            targets = [(value, self.decide(then)) for value, then in wanted.cases]
            place = self.decide(wanted.otherwise)
            for value, target in reversed(targets):
                place = self.jump(_JEQ, value, target, place)
            if wanted.mask != 0xFFFFFFFF:
                self._put(_AND, wanted.mask)
            place = self._put(_LD, _AT_ARGS + 8 * wanted.argument)
        self._places[wanted] = place
        return place

    def tree(self, ranges: Sequence[tuple[int, Decision]]) -> int:
        """Write a balanced search among (first number, decision) ranges for the loaded number."""
        if len(ranges) == 1:
            return self.decide(ranges[0][1])
        middle = len(ranges) // 2
        upper = self.tree(ranges[middle:])
        lower = self.tree(ranges[:middle])
        return self.jump(_JGE, ranges[middle][0], upper, lower)

    def program(self, arch: int, ranges: Sequence[tuple[int, Decision]]) -> bytes:
        """Write the whole filter. Another architecture (a 32-bit program) gets ENOSYS for every call."""
        self.tree(ranges)
        number = self._put(_LD, _AT_NR)
        foreign = self._put(_RET, _ENOSYS)
        self.jump(_JEQ, arch, number, foreign)
        self._put(_LD, _AT_ARCH)
        return b"".join(_INSTRUCTION.pack(*one) for one in reversed(self._code))


def _ranges(table: Mapping[str, int], more: Mapping[str, Decision]) -> list[tuple[int, Decision]]:
    by_number: dict[int, Decision] = {number: decision(name, more) for name, number in table.items()}
    by_number[_SKIPPED_BY_TRACER] = RET_ALLOW
    found: list[tuple[int, Decision]] = [(0, by_number.get(0, _ENOSYS))]
    for number in sorted(by_number.keys() | {after + 1 for after in by_number if after < _SKIPPED_BY_TRACER}):
        here = by_number.get(number, _ENOSYS)
        if here != found[-1][1]:
            found.append((number, here))
    return found


def build(arch: str | None = None, more: Mapping[str, Decision] = MappingProxyType({})) -> bytes:
    """Return the filter program (an array of struct sock_filter) for an architecture, by default this machine's.

    `more` are checks that replace the usual ones, such as `FIXED_BUFFERS` or `without_set_ids()`.
    """
    arch = arch or os.uname().machine
    table = TABLES.get(arch)
    if table is None:
        raise Unsupported(
            f"there is no system call filter for {arch}",
            field="arch",
            hint=f"carrel knows {' and '.join(TABLES)}",
        )
    return _Assembler().program(AUDIT_ARCH[arch], _ranges(table, more))


# --- kernel ---------------------------------------------------------------------------------------------

_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_NR_SECCOMP = TABLES.get(os.uname().machine, {}).get("seccomp")


def available() -> bool:
    """Whether this kernel filters system calls and carrel has a filter for this machine."""
    if _NR_SECCOMP is None:
        return False
    try:
        libc.system_call("seccomp", _NR_SECCOMP, _GET_ACTION_AVAIL, 0, struct.pack("=I", RET_ERRNO))
    except OSError:
        return False
    return True


def install(program: bytes) -> None:
    """Apply the program to the calling thread and all it will start, for good. Sets no_new_privs first."""
    if _NR_SECCOMP is None:
        raise PlatformError(f"there is no system call filter for {os.uname().machine}")
    header = struct.pack("@HP", len(program) // _INSTRUCTION.size, libc.address_of(program))
    try:
        libc.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        libc.system_call("seccomp", _NR_SECCOMP, _SET_MODE_FILTER, 0, header)
    except OSError as error:
        raise PlatformError(
            f"the system call filter was refused: {error.strerror}",
            hint="the kernel needs CONFIG_SECCOMP_FILTER",
        ) from error
