"""The figures of the pages are those of the records, and the command finds those that are not."""

import pytest

from benchmarks import figures

README = (figures.ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ("benchmarks", "beta", "learning", "scaling")


@pytest.fixture(scope="module")
def rows():
    return [sentence for sentence in figures.sentences() if sentence.page == "README.md"]


def test_pages_and_records_agree(capsys):
    assert figures.main([]) == 0
    out, err = capsys.readouterr()
    assert "README.md:" in out and " docs/guides/quickstart.json " in out
    for page in ("README.md", *map("docs/results/{}.md".format, RESULTS)):
        (count,) = [line for line in err.splitlines() if line.startswith(f"{page}: ")]
        _, covered, _, _, every, *_ = count.split()
        assert covered == every and int(covered) > 30


@pytest.mark.parametrize(
    ("there", "wrong", "named"),
    [
        ("65.7% of 150", "66.7% of 150", ": 66.7 is 65.7 in docs/guides/quickstart.json (verdict)"),
        ("+0.603, +1.17", "+0.603, +1.18", ": +1.18 is +1.17 in docs/guides/quickstart.json"),
        ("48 comparisons are", "84 comparisons are", ": 84 is 48 in docs/guides/quickstart.json"),
        ("10 points", "10 points, 8.5 of them", ": 8.5 has no record"),
        ("are too few.", "are not enough.", "not there: '48 comparisons are too few"),
    ],
)
def test_a_figure_that_is_not_the_records_is_named(there, wrong, named, rows):
    assert README.count(there) == 1
    text = README.replace(there, wrong)
    settings = figures.settings("README.md")
    fault, *_ = figures.check("README.md", text, rows, settings)
    line = README[: README.index(there)].count("\n") + 1
    assert named in fault and fault.startswith("README.md:")
    assert fault.startswith(f"README.md:{line}:") or "not there" in named


def test_a_comparison_in_words_follows_its_record(monkeypatch, capsys):
    slow = {"tether": {"rates": [3, 3], "peak": 1}, "TRL": {"rates": [1.1, 1.1], "peak": 3}}
    read = figures._read
    monkeypatch.setattr(
        figures,
        "_read",
        lambda source: (
            read(source) | ({"sides": slow} if str(source).endswith("/sft.json") else {})
        ),
    )
    (claim,) = [claim for claim in figures.claims() if not claim.holds]
    assert claim.record == "benchmarks/results/sft.json" and "three times" in claim.text
