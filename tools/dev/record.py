"""`python -m tools.dev.record [RUN]`: the quickstart's figures, everywhere from one record.

docs/guides/quickstart.json holds the record. With RUN, a finished quickstart's folder, the record
is written anew from its summary (its `minutes` stay: they are of a quiet machine). Then README.md
is written from the record, in the very sentences that the terminal prints.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tether.core.rundir import read_json, write_json
from tether.stats.shares import trials_interval
from tether.watch.report.narrative import Conclusion, brief
from tether.watch.report.picture import picture_lines
from tether.watch.report.reading import read_journey

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs" / "guides" / "quickstart.json"
JUDGE = "tether.quickstart.judges:gold"
KEYS = ("kl", "gold_win_rate", "gold_gain", "over_best_decoding", "verdict")
BLOCK = "<!-- {name}: python -m tools.dev.record -->\n{text}\n<!-- end -->"


def verdict(record: dict[str, Any]) -> Conclusion:
    """The verdict with its picture, as the terminal prints it of a run with these figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "quickstart"
        folder.mkdir()
        write_json(folder / "summary.json", record["summary"])
        write_json(folder / "config.json", {"ppo": {}})
        write_json(folder / "manifest.json", {"judge": {"name": JUDGE, "says": ""}})
        (folder / "metrics.jsonl").write_text("", encoding="utf-8")
        journey = read_journey(folder)
        found = brief(journey)
        return replace(found, sentences=[*picture_lines(journey), *found.sentences])


def minutes(record: dict[str, Any]) -> tuple[int, int]:
    """The shortest and the longest time that is recorded."""
    values = [value for pair in record["minutes"].values() for value in pair]
    return min(values), max(values)


def lines(record: dict[str, Any]) -> list[str]:
    """The last lines of the quickstart."""
    found = verdict(record)
    return [found.headline, *found.sentences, "Report: runs/quickstart/report.html"]


def best_decoding(record: dict[str, Any]) -> dict[str, list[float]]:
    """By seed, in percent, how often the best decoding won, and the interval."""
    rate = record["summary"]["over_best_decoding"]["win_rate"]
    own = [100 * rate[key] for key in ("value", "low", "high")]
    return {str(record["seed"]): own, **record["seeds"]["best_decoding"]}


def seeds_table(record: dict[str, Any]) -> str:
    """The seeds side by side."""
    best = best_decoding(record)
    random, choice = (record["seeds"][key] for key in ("random_reward", "best_of_2_4_8"))
    rows = [
        ["the policy's share of wins, in percent", *(f"seed {seed}" for seed in best)],
        ["---"] * (1 + len(best)),
        ["against the SFT model, each at its best temperature"]
        + [_bounds(best[seed]) for seed in best],
        ["the same, trained on a random reward"]
        + [_bounds(random[seed]) if seed in random else "" for seed in best],
        ["against the best of 2 / 4 / 8 answers of the SFT model"]
        + [
            " / ".join(_won(choice[seed], place) for place in range(3)) if seed in choice else ""
            for seed in best
        ],
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _won(counts: dict[str, Any], place: int) -> str:
    """A share of comparisons without ties, which would make the interval narrower."""
    won, total = counts["won"][place], counts["of"]
    return _bounds([100 * won / total, *(100 * end for end in trials_interval(won, total))], 0)


def _bounds(values: list[float], digits: int = 1) -> str:
    """A share with its interval, in percent."""
    won, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{won}% [{low}, {high}]"


def texts(record: dict[str, Any]) -> dict[Path, dict[str, str]]:
    """By page and block, what stands there."""
    least, most = minutes(record)
    return {
        ROOT / "README.md": {
            "time": (
                f"On two CPU cores that multiply bfloat16 fast, this takes {least} to {most} minutes and "
                f"{record['memory_gb']:.0f} GB of RAM. With AVX2 alone it takes "
                f"{record['minutes_avx2']} minutes and {record['memory_gb_avx2']:.0f} GB; the first lines "
                "then name `--budget 12` and what it costs in certainty."
            ),
            "verdict": "```\n" + "\n".join(lines(record)) + "\n```",
            "seeds": seeds_table(record),
        },
    }


def filled(page: str, blocks: dict[str, str]) -> str:
    """A page with the text of its marked blocks."""
    for name, text in blocks.items():
        pattern = (
            re.escape(BLOCK).replace(re.escape("{name}"), name).replace(re.escape("{text}"), ".*?")
        )
        whole = BLOCK.format(name=name, text=text)
        page, count = re.subn(pattern, lambda _, whole=whole: whole, page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the block {name!r} stands in the page {count} times")
    return page


def recorded(run: Path, before: dict[str, Any]) -> dict[str, Any]:
    """The record of a finished quickstart."""
    summary = read_json(run / "summary.json")["ppo"]
    whole = {**before, "summary": {key: summary[key] for key in KEYS if key in summary}}
    if "kl" not in whole["summary"]:
        whole["summary"]["kl"] = summary["answers"]["kl"]["value"]
    peak = max(read_json(path).get("peak_rss_bytes", 0) for path in run.glob("*/summary.json"))
    return whole | {"date": datetime.date.today().isoformat(), "memory_gb": round(peak / 1e9, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run",
        nargs="?",
        type=Path,
        help=("a finished quickstart, whose figures become the record"),
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help=("write nothing: is what stands there what would be written?"),
    )
    chosen = parser.parse_args()
    record, run = read_json(RECORD), chosen.run
    if run is not None and not chosen.check:
        record = recorded(run, record)
        RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    made = {
        path: filled(path.read_text(encoding="utf-8"), blocks)
        for path, blocks in texts(record).items()
    }
    for path, text in made.items():
        if chosen.check and path.read_text(encoding="utf-8") != text:
            parser.error(f"{path} is not what the record gives: run python -m tools.dev.record")
        if not chosen.check:
            path.write_text(text, encoding="utf-8")
    print(f"{len(made)} files hold the figures of {RECORD.name}")


if __name__ == "__main__":
    main()
