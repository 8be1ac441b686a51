"""The checks of a first half hour on a card: each outcome is on the disk when it is known."""

from pathlib import Path

from benchmarks.first_card import CARD_TESTS, CHECKS, Check, run_checks

ROOT = Path(__file__).parents[2]


def test_every_outcome_is_written_down_and_a_second_start_goes_on(tmp_path, capsys):
    record = tmp_path / "first.md"
    checks = (
        Check("works", ("-c", "print('a figure')"), 60),
        Check("fails", ("-c", "raise SystemExit('a reason')"), 60),
        Check("hangs", ("-c", "import time; print('so far', flush=True); time.sleep(60)"), 3),
    )
    assert run_checks(checks[:2], record) == 1
    assert run_checks(checks, record) == 1
    text = record.read_text()
    assert text.count("## ") == 3
    assert "## works: passed" in text and "a figure" in text
    assert "## fails: FAILED" in text and "a reason" in text
    assert "## hangs: CUT OFF after 3 s" in text and "so far" in text
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [
        "works",
        "fails",
        "hangs",
    ]


def test_the_checks_fit_into_half_an_hour_by_what_they_take_and_name_what_is_there():
    assert sum(check.limit for check in CHECKS[:7]) <= 1200
    tests = (ROOT / CARD_TESTS).read_text()
    for check in CHECKS:
        for path in (word for word in check.command if word.startswith("tests/")):
            assert (ROOT / path).is_file()
        if "-k" in check.command:
            words = check.command[-1].split(" or ")
            assert all(word in tests for word in words), words
