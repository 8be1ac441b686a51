"""A figure of training rows is never shown as one of held-out rows: every stage on rows says how
many it held out.
"""

import io
import logging
import re

import pytest
from rich.console import Console

import tether
from tether.cli.terminal.bars import bars
from tether.core.once import once
from tether.core.types import Comparison, Demonstration, StepLabels, assistant, user
from tether.watch.report.page import write_report

QUESTIONS = [f"What is number {n}?" for n in range(8)]
ONE = [QUESTIONS[0]] * 8
"""Eight rows of one prompt: however large the fraction, a part of the prompts is all of them or
none.
"""


def comparison(question, number):
    return Comparison(
        (user(question),),
        (assistant(f"good {number}"),),
        (assistant(f"bad {number}"),),
    )


def demonstration(question, number):
    return Demonstration((user(question), assistant(f"answer {number}")))


def feedback(question, number):
    return {"prompt": question, "completion": f"answer {number}", "label": number % 2 == 0}


def steps(question, number):
    return StepLabels((user(question),), (f"one {number}", "two"), (True, False))


METHODS = {
    "sft": (demonstration, {"batch_size": 4}, "num_heldout"),
    "reward": (comparison, {"prompts_per_update": 4}, "num_heldout_pairs"),
    "dpo": (comparison, {"prompts_per_update": 4}, "num_heldout_pairs"),
    "kto": (feedback, {"prompts_per_update": 4}, "num_heldout"),
    "process": (steps, {"solutions_per_update": 4}, "num_heldout"),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("fraction", [1e-9, 0.5])
def test_the_log_the_summary_and_the_page_say_so(name, fraction, tmp_path, caplog):
    once.cache_clear()
    make, more, key = METHODS[name]
    rows = [make(question, number) for number, question in enumerate(QUESTIONS)]
    with caplog.at_level(logging.WARNING):
        run = getattr(tether, name)(
            "tiny",
            data=rows,
            heldout_fraction=fraction,
            epochs=1,
            run=tmp_path / "run",
            progress=False,
            **more,
        )
    none = fraction < 0.1
    page = re.sub(r"<[^>]+>", "", write_report(tmp_path / "run").read_text(encoding="utf-8"))
    assert ("held out: no " in caplog.text) == none
    assert (run.summary[key] == 0) == none
    assert (
        "no rows were held out. Its accuracy and loss come from rows that it learned from." in page
    ) == none


def test_a_bar_names_whose_accuracy_it_shows():
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with bars(console) as announce:
        announce("reward")(1, 1, {"loss": 0.5, "accuracy": 1.0})
        announce("dpo")(1, 1, {"loss": 0.5, "accuracy": 1.0, "eval_accuracy": 0.25})
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    first, second = (
        [line for line in shown.splitlines() if line.startswith(name)][-1]
        for name in ("reward", "dpo")
    )
    assert "training accuracy 1.00" in first and "held-out" not in first
    assert "held-out accuracy 0.25" in second


def test_one_prompt_alone_cannot_be_held_out(tmp_path, caplog):
    once.cache_clear()
    rows = [comparison(question, number) for number, question in enumerate(ONE)]
    with caplog.at_level(logging.WARNING):
        run = tether.reward(
            "tiny",
            data=rows,
            heldout_fraction=0.05,
            epochs=1,
            run=tmp_path / "run",
            progress=False,
        )
    assert run.summary["num_heldout_pairs"] == 0 and "heldout_accuracy" not in run.summary
    assert "rows of [reward] (heldout_fraction = 0.05)" in caplog.text
