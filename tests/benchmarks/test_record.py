"""The figures of README are those of the one record."""

import json

import pytest
from tools.dev.record import RECORD, ROOT, filled, lines, recorded, texts

PAGE = ROOT / "README.md"
RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))


def test_readme_has_the_figures_of_the_record():
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, texts(RECORDED)[PAGE]) == page


def test_another_figure_would_be_noticed():
    other = json.loads(RECORD.read_text(encoding="utf-8"))
    other["summary"]["gold_win_rate"]["value"] = 0.713
    other["minutes"]["matrix unit"] = [43, 43]
    assert any("71.3% of 150" in line for line in lines(other))
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, texts(other)[PAGE]) != page
    with pytest.raises(ValueError, match="0 times"):
        filled("no block", texts(RECORDED)[PAGE])


def test_figures_of_seed_0_in_the_table_are_those_of_the_record():
    rate = RECORDED["summary"]["over_best_decoding"]["win_rate"]
    cell = f"{100 * rate['value']:.1f}% [{100 * rate['low']:.1f}, {100 * rate['high']:.1f}]"
    assert f"best temperature | {cell} |" in PAGE.read_text(encoding="utf-8")


def test_another_figure_of_seed_1_changes_the_table():
    other = json.loads(RECORD.read_text(encoding="utf-8"))
    other["seeds"]["best_decoding"]["1"] = [61.8, 51.2, 70.4]
    page = PAGE.read_text(encoding="utf-8")
    assert "61.8% [51.2, 70.4]" in filled(page, texts(other)[PAGE])


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
