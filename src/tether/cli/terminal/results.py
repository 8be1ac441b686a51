"""The results of training and judging, as commands show them at their end; loaded by then, not
before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tether.cli.terminal.console import Terminal, print_line, show_next, show_table
from tether.core.amounts import duration, gigabytes
from tether.core.command import command_line
from tether.core.rundir import stage_folder
from tether.core.types import Facts
from tether.runner.call import finished_stages
from tether.runner.folder import remembered
from tether.settings.rewards import GIVEN
from tether.settings.stages import STAGES
from tether.watch.report.about import judge_of
from tether.watch.report.measures import arm_table
from tether.watch.report.narrative import Conclusion, brief, loop_conclusion
from tether.watch.report.numbers import SENTENCES, listing
from tether.watch.report.picture import picture_lines
from tether.watch.report.reading import read_journey, read_loop, read_sub_run
from tether.watch.report.sweep import sweep_brief
from tether.watch.report.sweeps import read_sweep
from tether.watch.report.tiles import (
    ROUND_OF_PAIRS,
    pair_rounds,
    round_table,
)

Rows = Iterator[tuple[str, str]]
OF_RUNS = [SENTENCES["says"][key] for key in ("no-policy", "no-judge")]
"""Sentences about a whole run, which are left out where one stage is shown."""
FLAT = 100.0
"""A fitted temperature above which nothing is left of a verdict: log-odds of 5 become a probability
of 0.51.
"""


def show_run(console: Console, run: Path) -> None:
    """The end of a whole recipe: its policies side by side and the verdict, or those of its rounds;
    the page has the numbers.
    """
    if loop := read_loop(run):
        # a file or a pipe has no edge
        wide = console if console.is_terminal else Terminal(width=170)
        columns, rows = round_table(loop)
        show_table(rows, columns, "rounds", console=wide)
    else:
        journey = read_journey(run)
        columns, rows = arm_table(journey.compared, judge_of(journey))
        show_table(rows, columns, "policies", console=console)
    show_conclusion(*concluded(run))


def show_sweep(run: Path) -> None:
    """The end of a sweep: the first numbers of each setting, means over its seeds, and the verdict;
    the page has all numbers.
    """
    if (sweep := read_sweep(run)) is None:
        return
    verdict, lines, columns, rows, notes = sweep_brief(sweep)
    # a long key goes on in the next line at a dot
    show_table(rows, [name.replace(".", "\n.") for name in columns], "settings")
    show_conclusion(verdict, lines)
    for note in notes:
        print_line(note)


def show_after(run: Path, done: Sequence[str], again: Sequence[str]) -> None:
    """The commands that make sense after these stages; `again` runs the next stage."""
    kinds = [STAGES[name] for name in done if name in STAGES]
    made = {kind.makes for kind in kinds}
    states = {
        "pairs": "pairs" in made,
        "reward": "reward" in done,
        "scorer": "reward" in done and not again and made <= {"sft", "pairs", "reward"},
        "policy": any(kind.answers or kind.makes == "verdict" for kind in kinds),
    }
    if again:
        print_line(f"  the next stage   {command_line(*again)}")
    holding = (state for state, holds in states.items() if holds)
    show_next(*holding, run=run, pairs=stage_folder(run, "pairs"))


def to_judge(run: Path, *, in_python: bool = False) -> str:
    """A line to paste that judges answers of a finished run, on prompts that come with tether. The
    judge is the training's own function, or else the model of the start.

    Args:
        in_python: a call of Python, where the function has its name; not a command.
    """
    sections = remembered(run)[1]["config"]
    source = sections["model"]["source"]
    done = finished_stages(run)
    if not any(STAGES[name].trains_policy for name in done):
        prompts = ("--prompts", "tether:heldout", "--limit", 50)
        return command_line("duel", run, source, *prompts, "--judge", source)
    played = (sections.get(name, {}).get("environment") or {} for name in done)
    if any(environment.get("call") for environment in played):
        if in_python:
            return f"tether.evaluate(tether.load({str(run)!r}), HELD_OUT, judge='environment')"
        return command_line("evaluate", run, "HELD_OUT.jsonl", "evaluate.judge=environment")
    tables = [sections.get(name, {}).get(key) for name in done for key in ("function", "judge")]
    calls = [table.get("call") for table in tables if isinstance(table, dict)]
    call = next((call for call in calls if isinstance(call, str)), GIVEN)
    judge = {"model": source} if call.startswith(GIVEN) else {"call": call}
    samples = any(hasattr(STAGES[name].section, "sampling") for name in done)
    more = {} if samples else {"max_new_tokens": 64, "temperature": 0.7}
    if not in_python:
        keys = {"data.limit": 50, **{f"judge.{key}": value for key, value in judge.items()}, **more}
        own = [f"evaluate.{key}={value}" for key, value in keys.items()]
        return command_line("evaluate", run, "tether:heldout", *own)
    name = call.removeprefix(GIVEN).partition("@")[0]
    heldout = {"path": "tether:heldout", "limit": 50}
    shown = name if name.isidentifier() else repr(judge)
    keys = "".join(f", {key}={value}" for key, value in more.items())
    return f"tether.evaluate(tether.load({str(run)!r}), {heldout}, judge={shown}{keys})"


def concluded(run: Path, how: str = "") -> tuple[Conclusion, Iterable[str]]:
    """The verdict on a run or stage in short lines, and its picture; `how` judges the answers."""
    if loop := read_loop(run):
        return loop_conclusion(loop), ()
    journey = read_journey(run)
    return brief(journey, how), picture_lines(journey)


def show_verdict(run: Path) -> None:
    """The end of a call from Python: the verdict, and where to look further."""
    show_conclusion(*concluded(run, to_judge(run, in_python=True)))
    show_next("verdict", run=run)


def show_conclusion(conclusion: Conclusion, lines: Iterable[str] = ()) -> None:
    """A verdict, its picture in a few lines, and its warnings, a sentence a line."""
    for sentence in (conclusion.headline, *lines, *conclusion.sentences, *conclusion.warnings):
        print_line(sentence)


def show_stage(console: Console, run: Path, summary: Facts, how: str = "") -> None:
    """The summary of a stage, its verdict and warnings; collected pairs have none. `how` judges a
    policy's answers.
    """
    costs = (
        ("time", summary.get("seconds"), duration),
        ("peak memory", summary.get("peak_rss_bytes"), gigabytes),
        ("peak memory of the GPU", summary.get("peak_gpu_bytes"), gigabytes),
    )
    stage = read_sub_run(run, [])
    rows = [
        *listing(summary),
        *((name, show(value)) for name, value, show in costs if value is not None),
    ]
    show_table(rows, title=stage.title, console=console)
    show_table(pair_rounds(stage), ROUND_OF_PAIRS, "rounds", console=console)
    if not (run / "pairs.jsonl").is_file():
        whole, lines = concluded(run, how)
        own = [sentence for sentence in whole.sentences if sentence not in OF_RUNS]
        show_conclusion(replace(whole, sentences=own), lines)
    print_line(f"{stage.title}: {run}")


def show_agreement(console: Console, name: str, result: Facts, *, warn: bool = True) -> None:
    """Print the agreement of a judge with the labels of a file, and warnings about it."""
    show_table(_agreement_rows(result), title=name, console=console)
    for sentence in _warnings(result) if warn else ():
        console.print(f"[bold yellow]{sentence}[/]", highlight=False)


AGREEMENT = SENTENCES["agreement"]
"""Measurements of a judge's report, in the order of its table."""


def _agreement_rows(result: Facts) -> Rows:
    yield "judged in both orders", f"{result['num_judged']:,} of {result['num_pairs']:,} pairs"
    yield from (
        (f"  not judged: {reason}", f"{count:,}") for reason, count in result["failures"].items()
    )
    if result["num_parsed"]:
        yield (
            "  read off written replies",
            f"{result['num_parsed']:,}: their labels are 0, 1/2 or 1",
        )
    agreement = result["agreement"] or {}
    measured = {**result, **(result["position"] or {}), **agreement}
    yield from listing({name: measured[key] for key, name in AGREEMENT.items() if key in measured})
    if (temperature := agreement.get("temperature")) is not None:
        after = f"{agreement['calibration_error_after']:.3f} by --temperature {temperature:.2f}"
        yield (
            "  mended",
            "by no temperature: its verdicts say nothing of these labels"
            if temperature > FLAT
            else after,
        )


def _warnings(result: Facts) -> Iterator[str]:
    agreement = result["agreement"]
    lasting = result["num_lasting"]
    cut_off = result["num_cut_off"]
    if agreement is None:
        yield "There are no labels to agree with: nothing is known of how good these verdicts are."
    elif (accuracy := agreement["accuracy"])["high"] is not None and accuracy["high"] < 0.5:
        yield (
            "This judge is worse than a coin on these pairs, it prefers what people reject: do "
            "not train on its labels."
        )
    elif accuracy["low"] is None or accuracy["low"] <= 0.5:
        yield "This judge cannot be told from a coin on these pairs: do not train on its labels."
    if cut_off:
        yield (
            f"{cut_off:,} pairs have no label because a reply was cut off at its greatest length: "
            "give --reply-tokens a larger number. A model that thinks before its verdict may need "
            "thousands, and a longer --time-limit."
        )
    if left := result["num_pairs"] - result["num_judged"] - lasting - cut_off:
        yield (
            f"{left:,} pairs have no label. Give the same command again to ask for them; what "
            "is known is not asked again."
        )
    if lasting:
        yield (
            f"{lasting:,} pairs get no label from this judge, however often it is asked: the "
            "table says why."
        )


def counted(what: str, failures: Counter[str]) -> list[tuple[str, str]]:
    """A row a reason, the commonest first."""
    return [(f"  {what}: {reason}", f"{count:,}") for reason, count in failures.most_common()]


def show_usage(usage: Mapping[str, int]) -> None:
    """Print the number of requests to a model, and their cost."""
    counts = ", ".join(
        f"{count:,} {name.replace('_', ' ')}" for name, count in usage.items() if count
    )
    print_line(f"asked: {counts}")
