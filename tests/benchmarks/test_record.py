"""The figures of README, the quickstart's page and the picture are those of the one record."""

import json

import pytest
from benchmarks.record import RECORD, ROOT, filled, lines, picture, recorded, texts

PAGES = ROOT / "docs" / "guides" / "quickstart.md", ROOT / "README.md"
RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", texts(RECORDED), ids=lambda path: path.name)
def test_pages_have_the_figures_of_the_record(path):
    page = path.read_text(encoding="utf-8")
    assert filled(page, texts(RECORDED)[path]) == page


def test_the_picture_is_made_of_the_record():
    assert (ROOT / "docs" / "report.svg").read_text(encoding="utf-8") == picture(RECORDED)
    rate = RECORDED["summary"]["gold_win_rate"]["value"]
    assert f"{100 * rate:.1f}% of 150" in picture(RECORDED)


def test_another_figure_would_be_noticed():
    other = json.loads(RECORD.read_text(encoding="utf-8"))
    other["summary"]["gold_win_rate"]["value"] = 0.713
    other["minutes"]["matrix unit"] = [43, 43]
    assert any("71.3% of 150" in line for line in lines(other)) and picture(other) != picture(
        RECORDED,
    )
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert filled(page, texts(other)[ROOT / "README.md"]) != page
    with pytest.raises(ValueError, match="0 times"):
        filled("no block", texts(RECORDED)[ROOT / "README.md"])


def test_figures_of_seed_0_in_the_tables_are_those_of_the_record():
    rate = RECORDED["summary"]["over_best_decoding"]["win_rate"]
    cell = f"{100 * rate['value']:.1f}% [{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"
    assert f"best temperature | {cell} |" in PAGES[0].read_text(encoding="utf-8")


def test_the_seeds_stand_in_both_pages_by_one_record():
    """Another figure of seed 1 changes table and sentence."""
    other = json.loads(RECORD.read_text(encoding="utf-8"))
    other["seeds"]["best_decoding"]["1"] = [61.8, 51.2, 70.4]
    for path, text in ((PAGES[0], "61.8% [51.2, 70.4]"), (PAGES[1], "62% [51, 70]")):
        page = path.read_text(encoding="utf-8")
        assert text not in page and text in filled(page, texts(other)[path])


def test_a_finished_run_becomes_the_record(tmp_path):
    summary = {**RECORDED["summary"], "more": 1}
    del summary["kl"]
    summary["answers"] = {"kl": {"value": 4.2}}
    (tmp_path / "summary.json").write_text(json.dumps({"ppo": summary}))
    (tmp_path / "ppo").mkdir()
    (tmp_path / "ppo" / "summary.json").write_text(json.dumps({"peak_rss_bytes": 3_140_000_000}))
    made = recorded(tmp_path, RECORDED)
    assert (
        made["summary"]["kl"] == 4.2 and made["memory_gb"] == 3.1 and "more" not in made["summary"]
    )
    assert made["minutes"] == RECORDED["minutes"]
