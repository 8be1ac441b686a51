"""`python -m benchmarks.record [RUN]`: the quickstart's figures, everywhere from one record.

docs/guides/quickstart.json holds the record. With RUN, a finished quickstart's folder, the record
is written anew from its summary (its `minutes` stay: they are of a quiet machine). Then README.md,
docs/guides/quickstart.md and the picture docs/report.svg are written from the record, in the very
sentences that the terminal prints.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from tether.core.rundir import read_json, write_json
from tether.report.brief import brief
from tether.report.narrative import Conclusion
from tether.report.numbers import percent
from tether.report.reading import read_journey

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "guides" / "quickstart.json"
JUDGE = "tether.quickstart.judges:gold"
KEYS = ("kl", "gold_win_rate", "gold_gain", "over_best_decoding", "verdict")
BLOCK = "<!-- {name}: python -m benchmarks.record -->\n{text}\n<!-- end -->"


def verdict(record: dict[str, Any]) -> Conclusion:
    """The verdict that the terminal prints of a run with these figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "quickstart"
        folder.mkdir()
        write_json(folder / "summary.json", record["summary"])
        write_json(folder / "config.json", {"ppo": {}})
        write_json(folder / "manifest.json", {"judge": {"name": JUDGE, "says": ""}})
        (folder / "metrics.jsonl").write_text("", encoding="utf-8")
        return brief(read_journey(folder))


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
        ["share of comparisons that the policy won", *(f"seed {seed}" for seed in best)],
        ["---"] * (1 + len(best)),
        ["policy against SFT model, each at its best temperature"]
        + [_bounds(best[seed]) for seed in best],
        ["policy trained on a random reward against SFT model, each at its best temperature"]
        + [_bounds(random[seed]) if seed in random else "" for seed in best],
        [
            "policy against the best of 2 / 4 / 8 answers of the SFT model. The reward model chooses the best",
        ]
        + [
            " / ".join(f"{share:.0f}" for share in choice[seed]) + "%" if seed in choice else ""
            for seed in best
        ],
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def seeds_sentence(record: dict[str, Any]) -> str:
    """The same in a sentence, in whole percent."""
    *first, last = [_bounds(value, 0) for value in best_decoding(record).values()]
    (random,) = record["seeds"]["random_reward"].values()
    return (
        f"In runs with three seeds, the policy won {', '.join(first)} and {last} of 150 comparisons "
        f"with the SFT model.\nEach model used its best temperature. For comparison, a policy that "
        f"was trained on a random reward won {_bounds(random, 0)} (seed 0)."
    )


def _bounds(values: list[float], digits: int = 1) -> str:
    """A share with its interval, in percent."""
    won, low, high = (f"{value:.{digits}f}" for value in values)
    return f"{won}% [{low}, {high}]"


def texts(record: dict[str, Any]) -> dict[Path, dict[str, str]]:
    """By page and block, what stands there."""
    least, most = minutes(record)
    fast, usual = record["minutes"]["matrix unit"], record["minutes"]["bfloat16"]
    over, gigabytes = record["summary"]["over_best_decoding"], f"{record['memory_gb']:.0f} GB"
    rate = (
        f"{percent(over['win_rate']['value'])} [{percent(over['win_rate']['low'])}, "
        f"{percent(over['win_rate']['high'])}]"
    )
    time = (
        f"On two CPU cores, `make quickstart` takes {least} to {most} minutes. The time of the installation "
        f"is not included. The quickstart needs {gigabytes} of RAM."
    )
    expected = (
        f"On two cores with AMX instructions, the quickstart takes {fast[0]} minutes. On two cores "
        f"with bfloat16 instructions but without AMX, the quickstart takes {usual[0]} to {usual[1]} minutes. "
    )
    return {
        ROOT / "README.md": {
            "time": time,
            "verdict": "```\n" + "\n".join(lines(record)) + "\n```",
            "seeds": seeds_sentence(record),
        },
        ROOT / "docs" / "guides" / "quickstart.md": {
            "time": (
                f"{expected}The peak memory is {gigabytes}.\nWith random seed {record['seed']}, the policy won {rate} "
                f"of the comparisons with the SFT model. Each model used its best temperature."
            ),
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


def picture(record: dict[str, Any]) -> str:
    """The verdict as a picture."""
    headline, *sentences = lines(record)[:-1]
    rows = [part for sentence in sentences for part in _broken(sentence, 88)]
    titles = _broken(headline, 68)
    top = 62 + 26 * len(titles)
    height = top + 8 + 26 * len(rows)
    bold = 'font-size="20" font-weight="bold" fill="#0b7353"'
    shown = [
        f'<text x="34" y="{46 + 26 * place}" {bold}>{escape(row)}</text>'
        for place, row in enumerate(titles)
    ]
    style = 'font-size="16" fill="#1d2129"'
    shown += [
        f'<text x="34" y="{top + 26 * place}" {style}>{escape(row)}</text>'
        for place, row in enumerate(rows)
    ]
    size = f'width="820" height="{height}" viewBox="0 0 820 {height}"'
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
        f'<rect x="1" y="1" width="818" height="{height - 2}" rx="8" fill="#fdfdfb" '
        'stroke="#dcdcd8"/>',
        f'<rect x="1" y="1" width="8" height="{height - 2}" rx="4" fill="#0b7353"/>',
        *shown,
        "</svg>\n",
    ))  # fmt: skip


def _broken(text: str, width: int) -> list[str]:
    rows = [""]
    for word in text.split():
        if len(rows[-1]) + len(word) + 1 > width:
            rows.append("")
        rows[-1] = f"{rows[-1]} {word}".strip()
    return rows


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
    made[ROOT / "docs" / "report.svg"] = picture(record)
    for path, text in made.items():
        if chosen.check and path.read_text(encoding="utf-8") != text:
            parser.error(f"{path} is not what the record gives: run python -m benchmarks.record")
        if not chosen.check:
            path.write_text(text, encoding="utf-8")
    print(f"{len(made)} files hold the figures of {RECORD.name}")


if __name__ == "__main__":
    main()
