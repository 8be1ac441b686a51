"""Arms side by side: their held-out gains, and a sentence for each control."""

from __future__ import annotations

import io

from tests.watch.report.synthetic_run import estimate, ppo_rows, write, write_lines
from tests.watch.report.test_evaluators import cells
from tests.watch.report.test_report import report

from tether.cli.terminal.console import Terminal
from tether.cli.terminal.results import show_run

GAINS = {"verifiable": 0.125, "random": -0.02, "majority": 0.08}
ROWS = [
    ["grpo", "+0.125 [+0.075, +0.175]"],
    ["grpo-majority", "+0.080 [+0.030, +0.130]"],
    ["grpo-random", "−0.020 [−0.070, +0.030]"],
]


def write_arms(run):
    """Three arms from one start of 15% right answers."""
    for source, gain in GAINS.items():
        folder = run / ("grpo" if source == "verifiable" else f"grpo-{source}")
        write_lines(folder / "metrics.jsonl", ppo_rows(5))
        ends = {
            "before": estimate(0.15, 0.1, 0.2),
            "after": estimate(0.15 + gain, 0.2, 0.3),
            "gain": estimate(gain, gain - 0.05, gain + 0.05),
        }
        heldout = {"num_prompts": 192, "correct": ends, "score": ends}
        write(folder / "summary.json", {"steps": 5, "kl": 4.0, "heldout": heldout})
        write(folder / "config.json", {"grpo": {"reward_source": source}})
    write(run / "command.json", {"stages": ["grpo"], "config": {}})
    return run


def test_arms_are_compared_by_held_out_gains_and_say_what_they_take_away(tmp_path):
    page = report(write_arms(tmp_path / "run"))
    head = page.source[page.source.index(">policy</th>") :].partition("</tr>")[0]
    columns = [cell.partition("<")[0] for cell in head.split('scope="col">')[1:]]
    place = 1 + columns.index("held-out gain")
    assert [[row[0], row[place]] for row in cells(page, "policy")] == ROWS
    assert "gold gain" not in columns and "KL, nats" in columns
    for words in (
        "grpo-random takes away all that the reward says: its gain comes from training as such.",
        "grpo-majority takes away the known answer and pays for agreement: its gain is self-consistency.",
    ):
        assert page.text.count(words) == 1


def test_the_terminal_has_the_same_table(tmp_path):
    shown = io.StringIO()
    show_run(Terminal(file=shown, width=160), write_arms(tmp_path / "run"))
    lines = shown.getvalue().splitlines()
    for name, gain in ROWS:
        assert any(name in line and gain in line for line in lines)
