"""A file is whole under its name, or as it was."""

import stat

import pytest

from tether.core.rundir import whole_file


def test_a_written_file_takes_its_name_at_the_end_and_can_be_read_by_others(tmp_path):
    path = tmp_path / "new" / "out.txt"
    with whole_file(path) as temporary:
        temporary.write_text("all of it", encoding="utf-8")
        assert not path.exists() and temporary.parent == path.parent
    assert path.read_text(encoding="utf-8") == "all of it" and stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("before", encoding="utf-8")

    def interrupted():
        with whole_file(path) as temporary:
            temporary.write_text("half", encoding="utf-8")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert path.read_text(encoding="utf-8") == "before" and list(tmp_path.iterdir()) == [path]
