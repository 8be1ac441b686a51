"""Memory of a process whose control group has less than the machine."""

from types import SimpleNamespace

import psutil
import pytest

from tether.models.cpu import memory

GB = 10**9


@pytest.fixture
def groups(tmp_path, monkeypatch):
    monkeypatch.setattr(
        psutil,
        "virtual_memory",
        lambda: SimpleNamespace(total=512 * GB, available=400 * GB),
    )
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")

    def group(own, **places):
        (tmp_path / "own").write_text(own)
        for place, files in places.items():
            folder = tmp_path / "groups" / place.replace("__", "/").replace("root", "")
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (folder / name).write_text(f"{text}\n")

    return group


def version_2(limit, used, cached):
    return {
        "memory.max": limit,
        "memory.current": used,
        "memory.stat": f"anon 5\ninactive_file {cached}\nslab 3",
    }


def version_1(limit, used, cached):
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": used,
        "memory.stat": f"inactive_file 7\ntotal_inactive_file {cached}",
    }


def test_a_container_of_version_2_sees_its_own_root(groups):
    groups("0::/\n", root=version_2(16 * GB, 6 * GB, GB))
    assert memory.machine_memory() == (16 * GB, 11 * GB)


def test_the_tightest_of_nested_groups_counts(groups):
    groups(
        "0::/user/job\n",
        user=version_2(8 * GB, 7 * GB, 0),
        user__job=version_2(16 * GB, 2 * GB, 0),
    )
    assert memory.machine_memory() == (8 * GB, GB)


def test_a_container_of_version_1_may_name_a_path_of_its_host(groups):
    own = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n3:cpuset:/docker/abc\n"
    groups(own, memory=version_1(4 * GB, 5 * GB, 0))
    assert memory.machine_memory() == (4 * GB, 0)


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/\n", version_2("max", GB, 0)),
        ("4:memory:/\n", version_1(9223372036854771712, GB, 0)),
        ("0::/\n", {"memory.max": 16 * GB}),
        ("", {}),
    ],
)
def test_without_a_limit_the_machine_counts(groups, own, files):
    groups(own, root=files, memory=files)
    assert memory.machine_memory() == (512 * GB, 400 * GB)
