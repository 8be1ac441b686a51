"""System calls that the page of safety takes from programs: each is refused by the kernel's filter,
whatever its arguments are.
"""

import os
import sys

import pytest
from benchmarks.sandbox import HEAD

from tether.rewards import code

pytestmark = pytest.mark.skipif(
    not code.guards().processes or os.uname().machine != "x86_64",
    reason="the numbers are those of x86-64, with a seccomp filter",
)
REFUSED, MISSING = 1, 38
"""EPERM and ENOSYS."""
ROWS = {
    "rights": {
        "chmod": (90, "mine, 0o600"),
        "fchmod": (91, "file, 0o600"),
        "fchmodat": (268, "-100, mine, 0o600"),
        "fchmodat2": (452, "-100, mine, 0o600, 0"),
    },
    "owners": {
        "chown": (92, "mine, -1, -1"),
        "fchown": (93, "file, -1, -1"),
        "lchown": (94, "mine, -1, -1"),
        "fchownat": (260, "-100, mine, -1, -1, 0"),
    },
    "times": {
        "utime": (132, "mine, 0"),
        "utimes": (235, "mine, 0"),
        "futimesat": (261, "-100, mine, 0"),
        "utimensat": (280, "-100, mine, 0, 0"),
    },
    "attributes": {
        "setxattr": (188, "mine, name, name, 1, 0"),
        "lsetxattr": (189, "mine, name, name, 1, 0"),
        "fsetxattr": (190, "file, name, name, 1, 0"),
        "removexattr": (197, "mine, name"),
        "lremovexattr": (198, "mine, name"),
        "fremovexattr": (199, "file, name"),
        "setxattrat": (463, "-100, mine, 0, name, 0, 0"),
        "removexattrat": (466, "-100, mine, 0, name"),
        "file_setattr": (469, "-100, mine, 0, 0, 0"),
        "ioctl FS_IOC_SETFLAGS": (16, "file, 0x40086602, 0"),
    },
    "links": {
        "link": (86, "mine, b'second'"),
        "linkat": (265, "-100, mine, -100, b'second', 0"),
    },
    "processes": {
        "fork": (57, ""),
        "vfork": (58, ""),
        "clone": (56, "0x800, 0, 0, 0, 0"),
        "clone, a thread with open files of its own": (56, "0x10200, 0, 0, 0, 0"),
        "clone, a thread with a folder of its own": (56, "0x10400, 0, 0, 0, 0"),
        "execve": (59, "0, 0, 0"),
        "execveat": (322, "-1, 0, 0, 0, 0"),
        "setsid": (112, ""),
        "setpgid": (109, "0, -1"),
        "unshare": (272, "0"),
        "setns": (308, "-1, 0"),
    },
    "signals to others": {
        "kill": (62, "4194305, 0"),
        "kill of a group": (62, "0, 0"),
        "tkill": (200, "-1, 0"),
        "tgkill": (234, "parent, -1, 0"),
        "rt_sigqueueinfo": (129, "parent, 0, 0"),
        "rt_tgsigqueueinfo": (297, "parent, -1, 0, 0"),
        "pidfd_open": (434, "parent, 0"),
        "pidfd_send_signal": (424, "-1, 0, 0, 0"),
        "pidfd_getfd": (438, "-1, 0, 0"),
        "fcntl F_SETOWN": (72, "file, 8, 0"),
        "fcntl F_SETSIG": (72, "file, 10, 0"),
        "fcntl F_SETOWN_EX": (72, "file, 15, 0"),
    },
    "tracing, priorities and limits of others": {
        "ptrace": (101, "-1, 0, 0, 0"),
        "process_vm_readv": (310, "-1, 0, 0, 0, 0, 0"),
        "process_vm_writev": (311, "-1, 0, 0, 0, 0, 0"),
        "process_madvise": (440, "-1, 0, 0, 0, 0"),
        "setpriority": (141, "9, 0, 0"),
        "ioprio_set": (251, "9, 0, 0"),
        "sched_setaffinity": (203, "-1, 0, 0"),
        "sched_setscheduler": (144, "-1, 0, 0"),
        "sched_setparam": (142, "-1, 0"),
        "sched_setattr": (314, "-1, 0, 0"),
        "prlimit64": (302, "-1, 7, 0, 0"),
    },
    "sockets": {
        "socket": (41, "1, 1, 0"),
        "bind": (49, "-1, 0, 0"),
        "connect": (42, "-1, 0, 0"),
        "listen": (50, "-1, 0"),
        "accept": (43, "-1, 0, 0"),
        "accept4": (288, "-1, 0, 0, 0"),
        "sendmsg": (46, "-1, 0, 0"),
        "sendmmsg": (307, "-1, 0, 0, 0"),
        "setsockopt": (54, "-1, 0, 0, 0, 0"),
        "socketpair of datagrams": (53, "1, 2, 0, 0"),
        "socketpair of the network": (53, "2, 1, 0, 0"),
    },
    "shared memory, memory files, asynchronous work": {
        "shmget": (29, "0, 0, 0"),
        "shmat": (30, "-1, 0, 0"),
        "shmctl": (31, "-1, 0, 0"),
        "semget": (64, "0, 0, 0"),
        "semop": (65, "-1, 0, 0"),
        "semctl": (66, "-1, 0, 0"),
        "semtimedop": (220, "-1, 0, 0, 0"),
        "msgget": (68, "0, 0"),
        "msgsnd": (69, "-1, 0, 0, 0"),
        "msgrcv": (70, "-1, 0, 0, 0, 0"),
        "msgctl": (71, "-1, 0, 0"),
        "mq_open": (240, "0, 0, 0, 0"),
        "mq_unlink": (241, "0"),
        "memfd_create": (319, "0, 0"),
        "memfd_secret": (447, "-1"),
        "io_uring_setup": (425, "0, 0"),
        "io_setup": (206, "0, 0"),
    },
    "memory of the kernel's": {
        "fcntl F_SETPIPE_SZ": (72, "pipe, 1031, 4096"),
        "splice": (275, "-1, 0, -1, 0, 0, 0"),
        "tee": (276, "-1, -1, 0, 0"),
        "vmsplice": (278, "-1, 0, 0, 0"),
        "fallocate": (285, "-1, 0, 0, 0"),
        "inotify_init": (253, ""),
        "inotify_init1": (294, "-1"),
        "fanotify_init": (300, "-1, -1"),
        "timer_create": (222, "-1, 0, 0"),
    },
    "users and groups": {
        "setuid": (105, "-1"),
        "setgid": (106, "-1"),
        "setreuid": (113, "-1, -1"),
        "setregid": (114, "-1, -1"),
        "setgroups": (116, "-1, 0"),
        "setresuid": (117, "-1, -1, -1"),
        "setresgid": (119, "-1, -1, -1"),
        "setfsuid": (122, "-1"),
        "setfsgid": (123, "-1"),
    },
    "others": {
        "sync": (162, ""),
        "syncfs": (306, "-1"),
        "truncate": (76, "mine, 0"),
        "open_by_handle_at": (304, "-1, 0, 0"),
        "remap_file_pages": (216, "0, 0, 0, 0, 0"),
        "mbind": (237, "0, 0, 99, 0, 0, 0"),
        "add_key": (248, "0, 0, 0, 0, 0"),
        "request_key": (249, "0, 0, 0, 0"),
        "keyctl": (250, "-1, 0, 0, 0, 0"),
        "userfaultfd": (323, "-1"),
        "bpf": (321, "-1, 0, 0"),
        "perf_event_open": (298, "0, -1, -1, -1, 0"),
        "syslog": (103, "10, 0, 0"),
        "landlock_create_ruleset": (444, "0, 0, 99"),
        "close_range, a table of its own": (436, "1000, 2000, 2"),
        "prctl PR_SET_PDEATHSIG": (157, "1, 0"),
    },
}
"""Calls by the row of the page that takes them: the number, and arguments with which a kernel
without the filter gives something else than EPERM.
"""
PROGRAM = """
parent, mine, name = os.getppid(), b'mine', b'user.x'
file, pipe = os.open('mine', os.O_RDWR | os.O_CREAT), os.pipe()[1]
def asked(number, *arguments):
    ctypes.set_errno(0)
    words = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return 0 if libc.syscall(ctypes.c_long(number), *words) != -1 else ctypes.get_errno()
def f(): return [asked(number, *eval(f'({given},)' if given else '()')) for number, given in CALLS]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="calls of Linux")
@pytest.mark.parametrize("row", ROWS)
def test_no_call_of_a_row_reaches_the_kernel(row):
    program = f"{HEAD}CALLS = {list(ROWS[row].values())!r}\n{PROGRAM}"
    ((what, given),) = code.make_runner(60.0)(program, [["value", "f()"]])
    assert what == "gave", given
    answers = dict(zip(ROWS[row], given[1:], strict=True))
    assert {name: answer for name, answer in answers.items() if answer != REFUSED} == {}


@pytest.mark.skipif(sys.platform != "linux", reason="calls of Linux")
def test_calls_whose_arguments_lie_in_memory_do_not_exist():
    program = f"{HEAD}CALLS = [(435, '0, 0'), (470, ''), (100_000, '')]\n{PROGRAM}"
    ((_, given),) = code.make_runner(60.0)(program, [["value", "f()"]])
    assert given[1:] == [MISSING] * 3


@pytest.mark.parametrize(
    "deed",
    [
        "os.mkdir('made')",
        "os.symlink('mine', 'made')",
        "os.link('mine', 'made')",
        "os.mkfifo('made')",
        "os.mknod('made', 0o600 | stat.S_IFSOCK)",
        "os.mknod('made', 0o600 | stat.S_IFCHR, os.makedev(1, 3))",
        "os.mknod('made', 0o600 | stat.S_IFBLK, os.makedev(7, 0))",
    ],
)
@pytest.mark.skipif(not code.guards().files, reason="this kernel has no Landlock of version 3")
def test_in_the_scratch_folder_a_program_makes_plain_files_alone(deed):
    program = (
        "import os, stat\nopen('mine', 'w').close()\n"
        f"def f():\n    try:\n        {deed}\n    except PermissionError:\n"
        "        return os.listdir('.')\n    return 'made'\n"
    )
    assert code.make_runner(60.0)(program, [["value", "f()"]]) == [["gave", ["list", "mine"]]]
