"""The table in the terminal and the page tell one story of a run, and no more than its steps can
tell.
"""

import contextlib
import io
import json
import re

import pytest
from rich.console import Console

from tether.cli.terminal.results import show_stage
from tether.stages.online_loop import _summary
from tether.watch.report.narrative import conclusion
from tether.watch.report.reading import read_journey

pytestmark = pytest.mark.audit
# By hand: forty steps, so that the ends are five steps each.
FLAT = [-0.756, -0.90, -0.70, -0.95, -0.66, -0.88, -0.68, -0.95] * 5  # from -0.793 to -0.824
RISING = [0.05 * step + (0.1 if step % 2 else -0.1) for step in range(40)]  # from 0.08 to 1.87
NEGATIVE = [0.0, 0.05, -0.11, 0.08, -0.02, 0.03, -0.05, -0.096] * 5  # ends at -0.011


def told(folder, proxy, kl):
    """(the terminal's table, the page's verdict) of a run with these metrics."""
    rows = [
        {"step": step, "reward/proxy": value, "kl/policy_reference_k1": moved}
        for step, (value, moved) in enumerate(zip(proxy, kl, strict=True), 1)
    ]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps(summary := _summary(rows)))
    (folder / "config.json").write_text('{"grpo": {}}')
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        show_stage(Console(width=400), folder, summary)
    journey = read_journey(folder)
    page = " ".join(conclusion(journey).sentences).replace("−", "-")
    return shown.getvalue().replace("−", "-"), page


def test_a_flat_proxy_neither_rose_nor_fell(tmp_path):
    terminal, page = told(tmp_path / "flat", FLAT, NEGATIVE)
    assert "rose by" not in page and "fell by" not in page
    assert re.search(
        r"changed by -0\.031 \(95% interval -0\.\d+ to \+0\.\d+\)\. This shows "
        r"neither a rise nor a fall",
        page,
    )
    assert re.search(r"proxy gain +│ -0\.031 \[-0\.\d+, 0\.\d+\] \(n = 40\)", terminal)
    assert re.search(r"proxy first +│ -0\.793 ", terminal) and re.search(
        r"proxy last +│ "
        r"-0\.824 ",
        terminal,
    )


def test_a_risen_proxy_has_the_same_interval_on_terminal_and_page(tmp_path):
    terminal, page = told(tmp_path / "rising", RISING, [0.5 * value for value in RISING])
    low, high = map(float, re.search(r"proxy gain +│ 1\.79 \[(\S+), (\S+)\]", terminal).groups())
    assert 0 < low < 1.79 < high
    assert f"rose by 1.79 (95% interval +{low:.2f} to +{high:.2f})" in page
    assert "0.935 nats of KL" in page and "indistinguishable" not in page + terminal


def test_a_negative_kl_is_explained(tmp_path):
    terminal, page = told(tmp_path / "flat", FLAT, NEGATIVE)
    assert "For this" not in page
    for text in (terminal, page):
        assert "-0.011" in text and "indistinguishable from 0" in text and "may be negative" in text


def test_too_few_steps_are_told_as_such(tmp_path):
    terminal, page = told(tmp_path / "short", [0.0, 1.0, 2.0, 3.0], [0.0] * 4)
    assert "rose by" not in page and "separate a change" in page
    assert re.search(r"proxy gain +│ 3\.00 \[too few\]", terminal)
