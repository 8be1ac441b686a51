"""The commands in which a language model judges, criticises and rewrites; and `tether evaluate`: the
[evaluate] section of a recipe, or a suite of evaluators on a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tether.cli.journeys import method_command
from tether.cli.options import AskingOptions, Options, SamplingOptions
from tether.cli.terminal.bars import bars, starting
from tether.cli.terminal.console import Terminal, print_line, save, show_table
from tether.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tether.core.protocols import ChatModel
    from tether.core.types import Comparison
    from tether.judges.pairwise import PairJudge


@dataclass(frozen=True, kw_only=True)
class DuelOptions(SamplingOptions):
    """Sampling of the answers that are compared."""

    max_new_tokens: int = 512
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class JudgingOptions(Options):
    """Comparisons that are judged, and what is written of them."""

    rubric: str = "helpful"
    format: str = "auto"
    limit: int | None = None
    output: Path | None = None
    report: Path | None = None
    temperature: float = 1.0


def _opened(model: str, asking: AskingOptions, reasoning_tokens: int = 0) -> ChatModel:
    """A model in this process, or with an address the one of that name there; its answers are
    remembered.
    """
    from tether.models.packaged import cache_folder
    from tether.runner.assembly.judges import chat_model
    from tether.settings.judges import JudgeServerConfig
    from tether.settings.reading import build

    given = asking.server()
    if given and "url" not in given:
        option = next(iter(given)).replace("_", "-")
        raise ConfigError(f"--{option} has no effect on a model in this process: give --url too")
    source = build(JudgeServerConfig, {**given, "model": model}, where="server") if given else model
    return chat_model(
        source,
        asking.cache or cache_folder() / "answers.sqlite",
        reasoning_tokens=reasoning_tokens,
    )


def judge(model: str, files: list[str], *, judging: JudgingOptions, asking: AskingOptions) -> None:
    """Let a language model label comparisons, and measure its agreement with people."""
    from tether.cli.terminal.results import show_agreement, show_usage
    from tether.data.rows import write_rows
    from tether.judges.constitution import read_rubric
    from tether.judges.pairwise import PairJudge
    from tether.runner.methods.judge_agreement import judge_files

    console = Terminal()
    words = read_rubric(judging.rubric)
    chat = _opened(model, asking, asking.reasoning_tokens)
    pair_judge = PairJudge(chat, words, temperature=judging.temperature)
    with bars(console) as announce:
        labels, results = judge_files(
            pair_judge,
            files,
            format=judging.format,
            limit=judging.limit,
            announce=announce,
        )
    for place, (name, result) in enumerate(results.items(), 1):
        # the last is that of all files
        show_agreement(console, name, result, warn=place == len(results))
    usage = dict(chat.usage())
    show_usage(usage)
    save(
        judging.report,
        {"judge": pair_judge.name, "rubric": judging.rubric, "files": results, "usage": usage},
    )
    if judging.output:
        write_rows(judging.output, labels)
        print_line(f"{len(labels):,} labels: {judging.output}")


def duel_models(
    models: list[str],
    *,
    prompts: list[str],
    judge: str,
    rubric: str = "helpful",
    answers: DuelOptions,
    limit: int | None = None,
    output: Path | None = None,
    report: Path | None = None,
    page: Path | None = None,
    asking: AskingOptions,
) -> None:
    """Let models answer the same prompts, and a judge compare any two of them."""
    from tether.cli.terminal.results import show_conclusion, show_usage
    from tether.cli.tools.duel import duel, read_prompts
    from tether.core.types import Sampling
    from tether.data.rows import write_rows
    from tether.judges.constitution import read_rubric
    from tether.judges.pairwise import PairJudge
    from tether.watch.report.duel import (
        PLACES,
        duel_rods,
        duel_verdict,
        fact_rows,
        place_rows,
        result_table,
        write_duel,
    )

    if not 1 < len(models) == len(set(models)):
        raise ConfigError(f"a duel needs two or more different models: {', '.join(models)}")
    console = Terminal()
    words = read_rubric(rubric)
    questions, left_out = read_prompts(prompts, limit)
    pair_judge = PairJudge(_opened(judge, asking, asking.reasoning_tokens), words)
    sampling = Sampling(answers.max_new_tokens, answers.temperature, top_p=answers.top_p)
    with bars(console) as announce:
        figures, rows = duel(
            models,
            questions,
            pair_judge,
            sampling,
            seed=answers.seed,
            announce=announce,
        )
    show_conclusion(duel_verdict(figures), duel_rods(figures).lines())
    columns, wins = result_table(figures)
    show_table(wins, columns, f"{' against '.join(models)}, judged by {pair_judge.name}")
    show_table(place_rows(figures), PLACES)
    repeated = left_out["repeated_prompts"]
    asked_once = [("repeated prompts, asked once", f"{repeated:,}")] if repeated else []
    show_table([*fact_rows(figures), *asked_once])
    usage = dict(pair_judge.model.usage())
    show_usage(usage)
    save(report, {**figures, **left_out, "usage": usage})
    if output:
        write_rows(output, rows)
        print_line(f"{len(rows):,} pairs of answers: {output}")
    if page:
        write_duel(page, figures, rows)
        print_line(f"Page: {page}")


def constitution(
    model: str,
    prompts: str,
    output: Path,
    *,
    principles: str = "constitution",
    comparisons: Path | None = None,
    rounds: int = 1,
    answers: SamplingOptions,
    seed: int = 0,
    limit: int | None = None,
    asking: AskingOptions,
) -> None:
    """Let a model criticise and rewrite its answers by principles (Constitutional AI), and write the
    results as demonstrations.
    """
    from tether.cli.terminal.results import counted, show_usage
    from tether.core.types import Prompt, Sampling
    from tether.data.rows import write_rows
    from tether.data.sources import read
    from tether.judges.constitution import read_constitution, revise, sampled_pairs
    from tether.judges.pairwise import PairJudge, Reasoning

    if asking.reasoning_tokens and comparisons is None:
        raise ConfigError("--reasoning-tokens has no effect without --comparisons")
    console = Terminal()
    chosen = read_constitution(principles)
    questions = list(read(prompts, Prompt, limit=limit))
    sampling = Sampling(answers.max_new_tokens, answers.temperature, top_p=answers.top_p)
    chat = _opened(model, asking)
    with bars(console) as announce:
        bar = announce("revise")
        total = len(questions) * (1 + 2 * rounds)
        made, failed = revise(
            chat,
            chosen,
            questions,
            sampling,
            rounds=rounds,
            seed=seed,
            told=lambda done: bar(done, total, {}),
        )
    changed = sum(row.metadata["initial"] != row.messages[-1].content for row in made)
    rows = [("demonstrations", f"{len(made):,} of {len(questions):,} prompts")]
    rows += [*counted("none", failed), ("answers that changed", f"{changed:,}")]
    if made:
        write_rows(output, made)
    if comparisons is not None:
        pairs, failures = sampled_pairs(chat, questions, sampling, seed=seed)
        judge = PairJudge(
            Reasoning(chat, asking.reasoning_tokens) if asking.reasoning_tokens else chat,
            chosen.rubric,
        )
        labels, about = _labelled(judge, pairs)
        rows += [("comparisons", f"{len(labels):,} of {len(questions):,} prompts")]
        rows += [*counted("none", failures), *about]
        if labels:
            write_rows(comparisons, labels)
    show_table(rows, title="critique and revision")
    show_usage(chat.usage())
    if not made:
        why = "; ".join(f"{reason} ({count})" for reason, count in failed.most_common(3))
        raise DataError(f"no prompt of {len(questions)} gave a demonstration: {why}")
    print_line(f"Demonstrations: {output}")


def _labelled(
    judge: PairJudge,
    pairs: list[Comparison],
) -> tuple[list[Comparison], list[tuple[str, str]]]:
    """The pairs with the judge's labels, and rows of a table about the judgments."""
    from tether.cli.terminal.results import counted
    from tether.runner.methods.judge_agreement import judged_pairs, reasons

    with bars(Terminal()) as announce:
        judgments = judged_pairs(judge, pairs, announce("compare"))
    follow = sum(bool(judgment.follows_place) for judgment in judgments)
    return judge.label(pairs, judgments), [
        *counted("not judged", reasons(judgments)),
        ("  same place chosen in both orders", f"{follow:,} of {len(pairs):,}"),
    ]


def evaluate(
    subject: str,
    overrides: list[str] | None = None,
    budget: float | None = None,
    suite: str | None = None,
    against: str | None = None,
    data: list[str] | None = None,
    tasks: str | None = None,
    limit: int | None = None,
    output: Path | None = None,
) -> None:
    """Run the [evaluate] section of a recipe, or measure a model with evaluators."""
    if suite is None:
        options = {
            "against": against,
            "data": data,
            "tasks": tasks,
            "limit": limit,
            "output": output,
        }
        if idle := [name for name, value in options.items() if value]:
            raise ConfigError(f"--{idle[0]} has no effect without --suite. Add --suite all")
        method_command("evaluate")(model=subject, words=overrides, budget=budget)
        return
    if overrides or budget is not None:
        raise ConfigError(
            f"{overrides[0] if overrides else '--budget'} changes a recipe, but --suite "
            "measures a model. Remove one of the two",
        )
    names = (tasks or "").replace(",", " ").split()
    files = [*(data or ()), *(f"lm_eval={task}" for task in names)]
    with starting():
        from tether.runner.assembly.evaluation.suites import evaluate_model
        from tether.watch.report.numbers import bracketed

    with Terminal(stderr=True).status("measuring"):
        report = evaluate_model(subject, suite, against=against, data=files, limit=limit)
    cells = []
    for record in report["evaluators"]:
        for figure, fields in record["figures"].items():
            row = [record["evaluator"], figure, bracketed(fields), f"{fields['count']:,}"]
            change = report["changes"].get(record["evaluator"], {}).get(figure)
            if change is not None:
                row += [bracketed(change["difference"]), "yes" if change["paired"] else "no"]
            cells.append(row)
    columns = ["evaluator", "figure", "value [95% interval]", "n"]
    columns += [f"difference from {against}", "same rows"] if against is not None else []
    show_table(cells, columns, subject)
    for name, rows in report["left_out"].items():
        print_line(f"{name}: {rows['count']} rows are left out: {', '.join(rows['reasons'])}")
    save(output, report)
