"""A file is whole under its name, or as it was."""

import errno
import fcntl
import importlib.util
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tether.core import keeping, locks, rundir
from tether.core.errors import RunError
from tether.core.keeping import durable


def test_a_written_file_takes_its_name_at_the_end_and_can_be_read_by_others(tmp_path):
    path = tmp_path / "new" / "out.txt"
    with durable(path) as temporary:
        temporary.write_text("all of it", encoding="utf-8")
        assert not path.exists()
    assert (
        path.read_text(encoding="utf-8") == "all of it"
        and stat.S_IMODE(path.stat().st_mode) == 0o644
    )
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("before", encoding="utf-8")

    def interrupted():
        with durable(path) as temporary:
            temporary.write_text("half", encoding="utf-8")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert path.read_text(encoding="utf-8") == "before" and list(tmp_path.iterdir()) == [path]


def test_the_next_write_removes_the_leftovers_of_a_killed_process(tmp_path):
    program = (
        "import os, sys\nfrom pathlib import Path\n"
        "from tether.core.keeping import durable\n"
        "with durable(Path(sys.argv[1]) / 'summary.json') as part:\n    "
        "part.write_text('{')\n    os._exit(9)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 9
    )
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".summary.json.")
    (tmp_path / "another.json").write_text("1")
    rundir.write_json(tmp_path / "another.json", 2)
    assert left.exists()
    rundir.write_json(tmp_path / "summary.json", 2)
    assert {path.name for path in tmp_path.iterdir()} == {"another.json", "summary.json"}


def test_an_unfinished_folder_of_a_killed_process_goes_and_one_of_a_living_stays(tmp_path):
    program = (
        "import os, sys\nfrom pathlib import Path\n"
        "from tether.core.keeping import unfinished_folder\n"
        "with unfinished_folder(Path(sys.argv[1]) / 'out[1]') as part:\n"
        "    (part / 'weights').write_text('half')\n    print(part.name, flush=True)\n"
        "    sys.stdin.read()\n    os._exit(9)\n"
    )

    def start():
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return process, process.stdout.readline().strip()

    def there():
        return {path.name for path in tmp_path.iterdir()}

    (killed, left), (living, filled) = start(), start()
    assert there() == {left, filled}
    killed.communicate("")
    assert killed.returncode == 9 and left in there()
    (tmp_path / ".out[1].original.tether").mkdir()
    with keeping.unfinished_folder(tmp_path / "out[1]") as part:
        assert there() == {part.name, filled, ".out[1].original.tether"}
        (part / "whole").mkdir()
        (part / "whole").rename(tmp_path / "out[1]")
    living.communicate("")
    assert there() == {filled, ".out[1].original.tether", "out[1]"}


def test_an_unfinished_folder_that_another_process_takes_for_a_left_one_is_made_anew(
    tmp_path,
    monkeypatch,
):
    opened, taken = os.open, []

    def taken_first(path, *flags, **more):
        if not taken:
            taken.append(path)
            os.rmdir(path)
        return opened(path, *flags, **more)

    monkeypatch.setattr(os, "open", taken_first)
    with keeping.unfinished_folder(tmp_path / "out") as part:
        assert part.is_dir() and str(part) != str(taken[0])
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_folder_that_goes_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    flock, taken = fcntl.flock, []

    def taken_first(handle, how):
        if not taken:
            taken.append(os.readlink(f"/proc/self/fd/{handle}"))
            os.rmdir(taken[0])
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", taken_first)
    with keeping.unfinished_folder(tmp_path / "out") as part:
        assert part.is_dir() and str(part) != taken[0]


def test_a_file_that_goes_while_its_folder_is_flushed_is_no_fault(tmp_path, monkeypatch):
    (tmp_path / "journal").touch()
    opened = os.open

    def gone(path, *flags, **more):
        if path == tmp_path / "journal":
            path.unlink()
        return opened(path, *flags, **more)

    monkeypatch.setattr(os, "open", gone)
    keeping.flush_all(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_was_left_of_another_target_stays(tmp_path):
    """The name of the one begins with that of the other."""
    left = tmp_path / f".out.more.abcdefgh{keeping.MARK}"
    left.mkdir()
    keeping.write_whole(tmp_path / "out", b"")
    assert left.is_dir()
    keeping.write_whole(tmp_path / "out.more", b"")
    assert not left.exists()


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_on_the_new_file(tmp_path, monkeypatch):
    """Between opening and locking, the holder releases, and removes the file that was opened."""
    other = tmp_path / ".lock"
    once = []
    locked = locks._locked

    def removed_first(file, folder):
        if not once:
            once.append(True)
            other.unlink()
        return locked(file, folder)

    monkeypatch.setattr(locks, "_locked", removed_first)
    locks.hold(tmp_path)
    try:
        held, _ = locks._HELD[other.resolve()]
        assert os.path.samestat(os.fstat(held.fileno()), other.stat())
    finally:
        locks.release(tmp_path)


def test_a_second_thread_is_kept_out_and_lets_nobody_in(tmp_path):
    """It releases what it never held, as every start does at its end."""
    locks.hold(tmp_path)
    try:
        with ThreadPoolExecutor(1) as threads:
            with pytest.raises(RunError, match="another thread of this process is at work"):
                threads.submit(locks.hold, tmp_path).result()
            threads.submit(locks.release, tmp_path).result()
        assert (tmp_path / ".lock").exists()
        locks.hold(tmp_path)
    finally:
        locks.release(tmp_path)
    assert not (tmp_path / ".lock").exists()


def test_a_lock_that_cannot_be_had_is_an_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunError, match=r"No locks available.*TETHER_LOCKS=0"):
        locks.hold(tmp_path)
    monkeypatch.setenv("TETHER_LOCKS", "0")
    locks.hold(tmp_path)
    locks.release(tmp_path)


def test_a_file_that_a_library_kept_to_its_owner_gets_the_rights_of_a_new_one(tmp_path):
    with durable(tmp_path / "model") as folder:
        folder.mkdir()
        for name, rights in (("weights", 0o600), ("program", 0o700)):
            (folder / name).touch()
            (folder / name).chmod(rights)
    (tmp_path / "new").touch()
    added = (tmp_path / "new").stat().st_mode & 0o666
    assert (tmp_path / "model" / "weights").stat().st_mode & 0o777 == 0o600 | added == added
    assert (tmp_path / "model" / "program").stat().st_mode & 0o777 == 0o700 | added


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_have_the_rights_that_the_umask_gives(tmp_path, mask):
    program = (
        f"import os, sys\nos.umask({mask})\nfrom tether.core.rundir import "
        "write_json\nwrite_json(sys.argv[1], 1)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "a.json")], check=True)
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2, is damaged"):
        list(rundir.read_jsonl(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("__version__ = '2.13.0+cu130'\n", "2.13.0+cu130"), ("debug = False\n", "2.13.0")],
)
def test_the_build_of_torch_comes_from_its_own_file(tmp_path, monkeypatch, text, expected):
    """Installers of CUDA builds note the version without the build."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "version.py").write_text(text)
    place = importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(rundir.importlib.util, "find_spec", lambda name: place)
    monkeypatch.setattr(rundir.metadata, "version", lambda name: "2.13.0")
    assert rundir.versions(["torch", "peft"]) == {"torch": expected, "peft": "2.13.0"}
