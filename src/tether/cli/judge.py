"""The commands in which a language model judges, criticises and rewrites."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether.cli import options
from tether.core.errors import ConfigError, DataError
from tether.terminal.bars import bars
from tether.terminal.console import Terminal
from tether.terminal.tables import point_to, save, show_table

if TYPE_CHECKING:
    from tether.core.protocols import ChatModel
    from tether.core.types import Comparison
    from tether.judges.pairwise import PairJudge


@dataclass(frozen=True, kw_only=True)
class DuelOptions(options.Options):
    """Two models against each other on the same prompts."""

    prompts: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare two models on these prompts: tether judge A "
            "B --prompts FILE --judge MODEL.",
        ),
    ] = None
    judge: Annotated[
        str | None,
        typer.Option(help="With --prompts: the model that judges, named like MODEL."),
    ] = None
    max_new_tokens: Annotated[
        int,
        typer.Option(min=1, help="With --prompts: maximum length of an answer, in tokens."),
    ] = 512
    answer_temperature: Annotated[
        float,
        typer.Option(
            min=0,
            help="With --prompts: sampling temperature of both models; 0 is greedy.",
        ),
    ] = 0.7
    page: Annotated[
        Path | None,
        typer.Option(help="With --prompts: write a page of figures and answers here."),
    ] = None
    seed: options.Seed = 0


@dataclass(frozen=True, kw_only=True)
class JudgingOptions(options.Options):
    """Comparisons that are judged, and what is written of them."""

    rubric: Annotated[
        str,
        typer.Option(
            help="Criterion of the judge: helpful, harmless, a text file, or a .toml "
            "file of principles.",
        ),
    ] = "helpful"
    format: options.Format = "auto"
    limit: options.Pairs = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            dir_okay=False,
            help="Write the soft labels here, as JSON lines.",
        ),
    ] = None
    report: Annotated[Path | None, typer.Option(help="Write the figures as JSON here.")] = None
    temperature: Annotated[
        float,
        typer.Option(
            min=0.01,
            help="Divides the log-odds of the labels. Give more than 1 for an overconfident judge.",
        ),
    ] = 1.0


def _opened(model: str, asking: options.AskingOptions, reasoning_tokens: int = 0) -> ChatModel:
    """A model in this process, or with an address the one of that name there; its answers are
    remembered.
    """
    from tether.build.judges import chat_model
    from tether.models.packaged import cache_folder
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


@options.grouped
def judge_pairs(
    model: options.Asked,
    files: Annotated[
        list[str],
        typer.Argument(
            help="Comparisons, in any format that tether reads. With --prompts: the second model.",
        ),
    ],
    *,
    against: DuelOptions,
    judging: JudgingOptions,
    asking: options.AskingOptions,
) -> None:
    """Let a language model label comparisons, and measure its agreement with people. Or compare two
    models (A B --prompts FILE).
    """
    from tether.data.rows import write_rows
    from tether.judges.constitution import read_rubric
    from tether.judges.pairwise import PairJudge
    from tether.methods.judge_agreement import judge_files
    from tether.terminal.results import show_agreement, show_usage

    console = Terminal()
    words = read_rubric(judging.rubric)
    _check_duel(against, judging, files)
    chat = _opened(against.judge or model, asking, asking.reasoning_tokens)
    pair_judge = PairJudge(chat, words, temperature=judging.temperature)
    if against.prompts:
        _compare((model, files[0]), against.prompts, pair_judge, against, judging)
        return
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
    show_usage(console, usage)
    figures = {"judge": pair_judge.name, "rubric": judging.rubric, "files": results}
    save(console, judging.report, {**figures, "usage": usage})
    if judging.output:
        write_rows(judging.output, labels)
        point_to(console, f"{len(labels):,} labels", judging.output)


def _check_duel(against: DuelOptions, judging: JudgingOptions, files: list[str]) -> None:
    prompts, judge = against.prompts, against.judge
    if prompts and (judge is None or len(files) != 1):
        raise ConfigError(
            "to compare two models, give two models and a judge: tether judge A B "
            "--prompts FILE --judge MODEL",
        )
    if judge is not None and not prompts:
        raise ConfigError("--judge belongs to the comparison of two models: give --prompts too")
    if prompts and judging.format != "auto":
        raise ConfigError("--format has no effect with --prompts")
    usual = vars(DuelOptions())
    idle = [name for name, value in vars(against).items() if value != usual[name]]
    if idle and not prompts:
        raise ConfigError(f"--{idle[0].replace('_', '-')} has no effect without --prompts")


def _compare(
    models: tuple[str, str],
    files: list[str],
    judge: PairJudge,
    against: DuelOptions,
    judging: JudgingOptions,
) -> None:
    """Two models against each other, as tables, as JSON in `report` and with all answers as JSON
    lines in `output`.
    """
    from tether.core.rundir import write_jsonl
    from tether.core.types import Sampling
    from tether.report.duel import COLUMNS, fact_rows, result_rows, write_duel
    from tether.terminal.results import show_usage
    from tether.tools.duel import duel, read_prompts

    console = Terminal()
    prompts, left_out = read_prompts(files, judging.limit)
    sampling = Sampling(against.max_new_tokens, against.answer_temperature)
    with bars(console) as announce:
        figures, rows = duel(models, prompts, judge, sampling, seed=against.seed, announce=announce)
    title = f"{models[0]} against {models[1]}, judged by {judge.name}"
    show_table(console, title, result_rows(figures), COLUMNS)
    repeated = (
        [("repeated prompts, asked once", f"{count:,}")]
        if (count := left_out["repeated_prompts"])
        else []
    )
    show_table(console, "", [*fact_rows(figures), *repeated])
    usage = dict(judge.model.usage())
    show_usage(console, usage)
    save(console, judging.report, {**figures, **left_out, "usage": usage})
    if judging.output:
        write_jsonl(judging.output, rows)
        point_to(console, f"{len(rows):,} pairs of answers", judging.output)
    if against.page:
        write_duel(against.page, figures, rows)
        point_to(console, "Page", against.page)


@options.grouped
def constitution(
    model: options.Asked,
    prompts: Annotated[str, typer.Argument(help="Prompts, in any format that tether reads.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            dir_okay=False,
            help="Write demonstrations here, as JSON lines.",
        ),
    ],
    *,
    principles: Annotated[str, typer.Option(help="A .toml file of principles.")] = "constitution",
    comparisons: Annotated[
        Path | None,
        typer.Option(help="Write comparisons of two sampled answers to each prompt here."),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Number of critiques and revisions of each answer."),
    ] = 1,
    answers: options.SamplingOptions,
    seed: options.Seed = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only this many prompts.")] = None,
    asking: options.AskingOptions,
) -> None:
    """Let a model criticise and rewrite its answers by principles (Constitutional AI), and write the
    results as demonstrations.
    """
    from tether.core.types import Prompt, Sampling
    from tether.data.rows import write_rows
    from tether.data.sources import read
    from tether.judges.constitution import read_constitution, revise, sampled_pairs
    from tether.judges.pairwise import PairJudge, Reasoning
    from tether.terminal.results import counted, show_usage

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
    show_table(console, "critique and revision", rows)
    show_usage(console, chat.usage())
    if not made:
        why = "; ".join(f"{reason} ({count})" for reason, count in failed.most_common(3))
        raise DataError(f"no prompt of {len(questions)} gave a demonstration: {why}")
    point_to(console, "Demonstrations", output)


def _labelled(
    judge: PairJudge,
    pairs: list[Comparison],
) -> tuple[list[Comparison], list[tuple[str, str]]]:
    """The pairs with the judge's labels, and rows of a table about the judgments."""
    from tether.methods.judge_agreement import judged_pairs, reasons
    from tether.terminal.results import counted

    with bars(Terminal()) as announce:
        judgments = judged_pairs(judge, pairs, announce("compare"))
    follow = sum(bool(judgment.follows_place) for judgment in judgments)
    return judge.label(pairs, judgments), [
        *counted("not judged", reasons(judgments)),
        ("  same place chosen in both orders", f"{follow:,} of {len(pairs):,}"),
    ]
