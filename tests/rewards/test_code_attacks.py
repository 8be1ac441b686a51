"""Real attacks by programs on the machine that runs them: each is contained, and the reward
outlives it.
"""

import os
import socket
import subprocess
import sys
import textwrap
import threading

import psutil
import pytest

from tether.rewards import code
from tether.rewards.verifiable import VerifiableReward
from tether.settings.rewards import VerifiableConfig

HELD = code.guards()
needs_landlock = pytest.mark.skipif(
    not HELD.files,
    reason=("this kernel has no Landlock of version 3: programs may read files"),
)
needs_seccomp = pytest.mark.skipif(
    not HELD.processes,
    reason=("this kernel takes no seccomp filter: only an audit hook refuses"),
)


FULL = "No space left" if HELD.space else "more than 64 MB of files"


@pytest.fixture(scope="module")
def strangers():
    """Children that this process had before any program ran: whatever other tests of the same run
    left behind.
    """
    return psutil.Process().children(recursive=True)


@pytest.fixture
def attack(strangers, score):
    def run(body, *, before=""):
        program = (
            f"import os, sys\n{textwrap.dedent(before)}\ndef "
            f"f():\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
        )
        found = score(program, "assert f() == 'harmless'")
        assert score("def f(x): return x * x").value == 1.0, "the reward has to outlive it"
        return found.reason

    return run


@needs_seccomp
@pytest.mark.parametrize(
    "how",
    [
        "__import__('socket').create_connection(('127.0.0.1', {port}), 1)",
        "__import__('urllib.request').request.urlopen('http://127.0.0.1:{port}', timeout=1)",
        "__import__('ctypes').CDLL(None, use_errno=True).socket(2, 1, 0) != -1 or os.abort()",
        "os.system('echo > /dev/tcp/127.0.0.1/{port}') == 0 or os.abort()",
    ],
)
def test_no_program_reaches_a_server_on_this_machine(attack, how):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        reason = attack(f"{how.format(port=server.getsockname()[1])}\nreturn 'connected'")
        assert "connected" not in reason
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    "how",
    [
        "open({path!r}, 'w').write('x')",
        "os.rename({victim!r}, {path!r})",
        "os.remove({victim!r})",
        "os.truncate({victim!r}, 0)",
        "os.chmod({victim!r}, 0o777)",
        "os.utime({victim!r}, (0, 0))",
        "os.mkdir({path!r})",
        "os.link({victim!r}, 'mine')",
        "os.symlink({victim!r}, {path!r})",
        "os.symlink({victim!r}, 'link'), open('link', 'a').write('x')",
        "os.mkfifo({path!r})",
        "os.setxattr({victim!r}, 'user.x', b'1')",
    ],
)
def test_no_program_changes_a_file_of_ours(attack, tmp_path, how):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    before = victim.stat()
    assert "changed" not in attack(
        f"{how.format(path=str(tmp_path / 'new'), victim=str(victim))}\nreturn 'changed'",
    )
    after = victim.stat()
    assert [p.name for p in tmp_path.iterdir()] == ["victim"] and victim.read_text() == "precious"
    assert (before.st_mode, before.st_mtime_ns, before.st_nlink) == (
        after.st_mode,
        after.st_mtime_ns,
        after.st_nlink,
    )


@needs_landlock
@pytest.mark.parametrize(
    "how",
    [
        "open({path!r}).read()",
        "os.listdir({folder!r})",
        "open('/proc/self/environ').read()",
        "open('/proc/%d/environ' % os.getppid()).read()",
        "open('/etc/passwd').read()",
        "(os.chdir({folder!r}), open('token').read())[1]",
    ],
)
def test_no_program_reads_a_secret(attack, tmp_path, monkeypatch, how):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "token").write_text("hf_secret")
    reason = attack(
        f"return 'read', {how.format(path=str(tmp_path / 'token'), folder=str(tmp_path))}",
    )
    assert "PermissionError" in reason and "read" not in reason.partition("raised")[0]


def test_the_environment_holds_no_secret(attack, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "hf_secret" not in attack("return dict(os.environ)")


@needs_seccomp
@pytest.mark.parametrize(
    "how",
    [
        "while True: os.fork()",
        "import subprocess\nfor _ in range(100): subprocess.Popen(['sleep', '60'], "
        "start_new_session=True)",
        "import multiprocessing as "
        "m\nm.get_context('fork').Process(target=__import__('time').sleep, args=(60,)).start()",
        "import ctypes\nassert ctypes.CDLL(None).fork() != -1",
        "import ctypes\nassert ctypes.CDLL(None).syscall(56 if os.uname().machine == 'x86_64' "
        "else 220, 17, 0, 0, 0, 0) != -1",
        "os.execv(sys.executable, [sys.executable, '-c', 'while True: pass'])",
        "os.setsid()",
    ],
)
def test_no_program_starts_a_process_or_stays_behind(attack, strangers, how):
    assert "done" not in attack(f"{how}\nreturn 'done'")
    kin = [
        process for process in psutil.Process().children(recursive=True) if process not in strangers
    ]
    assert len(kin) == 1 and "tether.rewards.sandbox" in kin[0].cmdline()  # the one worker


@needs_seccomp
@pytest.mark.parametrize(
    "how",
    [
        "os.kill({parent}, 9)",
        "os.kill({sibling}, 9)",
        "os.kill(os.getppid(), 9)",
        "os.kill(-1, 9)",
        "os.killpg(os.getpgid(os.getppid()), 9)",
        "import signal\nsignal.pidfd_send_signal(os.pidfd_open({sibling}), 9)",
        "import fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, 8, {sibling})",
        "import resource\nresource.prlimit({sibling}, resource.RLIMIT_CPU, (0, 0))",
        "os.setpriority(os.PRIO_PROCESS, {sibling}, 19)",
    ],
)
def test_no_program_touches_another_process(attack, how):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as sibling:
        assert "done" not in attack(
            f"{how.format(parent=os.getpid(), sibling=sibling.pid)}\nreturn 'done'",
        )
        assert sibling.poll() is None
        sibling.communicate(b"\n")
    assert sibling.returncode == 0


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("while True: pass", "too slow"),
        ("import time\ntime.sleep(1000)", "too slow"),
        ("return 9 ** 9 ** 9", "too slow"),
        ("import re\nreturn re.match('(a+)+b', 'a' * 60)", "too slow"),
        ("hold = []\nwhile True: hold.append(bytes(1 << 27))", "MemoryError"),
        (
            "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nreturn "
            "len(bytearray(1 << 32))",
            "raised",
        ),
        (
            "import threading\nwhile True: threading.Thread(target=__import__('time').sleep, "
            "args=(60,)).start()",
            "raised RuntimeError",
        ),
        ("while True: print('x' * 1000)", "more than 1 MB of output"),
        ("while True: sys.stderr.write('x' * 1000)", "more than 1 MB of output"),
        ("return 'x' * (1 << 22)", "more than 1 MB of output"),
        ("open('big', 'wb').write(bytes(1 << 26))", "File too large"),
        ("n = 0\nwhile True:\n    n += 1\n    open(str(n), 'wb').write(bytes(1 << 23))", FULL),
        ("hold = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
        ("sys.setrecursionlimit(10 ** 9)\ng = lambda x: (lambda: g(x))()\nreturn g(1)", "f():"),
        ("os.abort()", "SIGABRT"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    ],
)
def test_no_program_takes_more_than_its_share(attack, how, reason):
    assert reason in attack(f"{how}\nreturn 'done'")


HOLDERS = {
    "mapped after removal": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
        "libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, "
        "ctypes.c_int, ctypes.c_long]\n"
        "for n in range(200):\n"
        "    fd = os.open(f'f{n}', os.O_RDWR | os.O_CREAT)\n"
        "    for _ in range(15): os.write(fd, bytes(1 << 20))\n"
        "    assert libc.mmap(None, 4096, 1, 1, fd, 0) != 2**64 - 1\n"
        "    os.close(fd)\n    os.unlink(f'f{n}')"
    ),
    "open after removal": (
        "import os\nhold = []\nfor n in range(40):\n    hold.append(os.open(f'f{n}', os.O_RDWR | "
        "os.O_CREAT))\n"
        "    for _ in range(15): os.write(hold[-1], bytes(1 << 20))\n    os.unlink(f'f{n}')"
    ),
    "renamed over": (
        "import mmap, os\nhold = []\nfor n in range(40):\n    fd = os.open('a', os.O_RDWR | "
        "os.O_CREAT)\n"
        "    for _ in range(15): os.write(fd, bytes(1 << 20))\n    hold.append(mmap.mmap(fd, "
        "4096))\n    os.close(fd)\n"
        "    open('b', 'w').close()\n    os.rename('b', 'a')"
    ),
    "never named": (
        "import os\nhold = []\nfor n in range(40):\n    hold.append(os.open('.', os.O_RDWR | "
        "os.O_TMPFILE))\n"
        "    for _ in range(15): os.write(hold[-1], bytes(1 << 20))"
    ),
    "empty files": "for n in range(200_000): open(str(n), 'w').close()",
    "memory files": (
        "import mmap, os\nhold = []\nfor n in range(60):\n    fd = os.memfd_create('x')\n    "
        "os.write(fd, bytes(1 << 24))\n"
        "    hold.append(mmap.mmap(fd, 4096))\n    os.close(fd)"
    ),
}
"""Programs that hold more than their share of disk, files or memory in ways that the size of a
folder does not show.
"""


def free_bytes(folder):
    status = os.statvfs(folder)
    return status.f_bfree * status.f_frsize


def shared_memory():
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Shmem:"))


def watched(folder, run):
    """The result of `run`, and the most bytes that it took meanwhile from a folder's file system
    and from memory files.
    """
    before, most, ended = (free_bytes(folder), shared_memory()), [0, 0], threading.Event()

    def watch():
        while not ended.wait(0.005):
            most[0] = max(most[0], before[0] - free_bytes(folder))
            most[1] = max(most[1], shared_memory() - before[1])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return run(), most
    finally:
        ended.set()
        watcher.join()


@pytest.mark.skipif(not HELD.space, reason="nothing can be mounted here")
def test_a_program_has_1024_files_at_a_time(attack):
    body = "for n in range(3000):\n    try: open(str(n), 'w').close()\n    except OSError: return n"
    assert "gave 1024" in attack(body)
    removed = f"for n in range(600): open(str(n), 'w').close(); os.remove(str(n))\n{body}"
    assert "gave 1024" in attack(removed)
    held = "hold = []\nfor n in range(40):\n    hold.append(open(str(n), 'w')); os.remove(str(n))\n"
    assert "gave 984" in attack(held + body)


@needs_seccomp
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", HOLDERS)
def test_no_program_holds_space_that_it_hides(attack, tmp_path, name):
    reason, (on_disk, in_memory) = watched(
        tmp_path,
        lambda: attack("return 'done'", before=HOLDERS[name]),
    )
    assert "done" not in reason
    # other programs of this machine write, too
    assert on_disk + in_memory < 3 * code.SCRATCH, reason


@needs_seccomp
@pytest.mark.parametrize("name", HOLDERS)
def test_space_is_measured_where_nothing_can_be_mounted(tmp_path, name):
    """The second line alone: what is removed and held counts, and so do empty files."""
    program = (
        "import json, sys\nfrom tether.rewards import code\ncode.confine = lambda *_: False\n"
        "print(json.dumps(code.make_runner(20.0)(sys.stdin.read(), [['value', 'f()']])))"
    )
    command = [sys.executable, "-c", program]
    given = HOLDERS[name] + "\ndef f(): return 'done'\n"

    def run():
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        ).stdout

    printed, (on_disk, in_memory) = watched(tmp_path, run)
    assert "done" not in printed and (
        "by force: more than" in printed or ("not permitted") in printed or "Too many" in printed
    )
    # a program writes on between two measurements
    assert on_disk + in_memory < 12 * code.SCRATCH, printed
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_what_programs_wrote(answered, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = (
        "open('x', 'w').write('y')\nimport tempfile\nf = lambda: "
        "tempfile.NamedTemporaryFile(delete=False).name"
    )
    with VerifiableReward(VerifiableConfig(kind="code", workers=1)) as reward:
        (found,) = reward.score([answered(program, "assert f() == 1")])
    assert f"gave {tmp_path}" in found.reason and list(tmp_path.iterdir()) == []


@needs_landlock
@pytest.mark.parametrize(
    "deed",
    [
        "os.fork()",
        "os.kill(os.getppid(), 0)",
        "os.system('true')",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "socket.socket()",
        "subprocess.run(['true'])",
        "ctypes.CDLL(None)",
    ],
)
def test_an_audit_hook_stands_in_where_only_seccomp_is_missing(tmp_path, deed):
    program = (
        "import ctypes, os, socket, subprocess\nfrom tether.rewards import guard\n"
        "guard._seccomp = lambda *_, **__: False\n"
        f"assert guard.restrict({str(tmp_path)!r})[:2] == (True, False)\n"
        f"try:\n    {deed}\nexcept PermissionError as error:\n"
        "    assert 'may not' in str(error), error\n"
        "else:\n    raise SystemExit('it could')"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    "deed",
    [
        "open({path!r}, 'w')",
        "os.system('touch {path}')",
        "os.fork()",
        "os.kill(os.getppid(), 0)",
        "socket.socket()",
        "subprocess.run(['touch', {path!r}])",
        "ctypes.CDLL(None)",
    ],
)
def test_an_audit_hook_stands_in_where_the_kernel_holds_nothing(tmp_path, deed):
    program = (
        "import ctypes, os, socket, subprocess\nfrom tether.rewards import guard\n"
        "guard._landlock = guard._seccomp = lambda *_, **__: False\n"
        f"assert guard.restrict({str(tmp_path)!r} + '/scratch')[:2] == (False, False)\n"
        f"open({str(tmp_path)!r} + '/scratch/mine', 'w').close()\n"
        f"try:\n    {deed.format(path=str(tmp_path / 'trace'))}\nexcept PermissionError as error:\n"
        "    assert 'may not' in str(error)\n"
        "else:\n    raise SystemExit('it could')"
    )
    (tmp_path / "scratch").mkdir()
    finished = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert not (tmp_path / "trace").exists() and (tmp_path / "scratch" / "mine").exists()
