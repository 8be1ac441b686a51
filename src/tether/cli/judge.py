"""The commands in which a language model judges, criticises and rewrites."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tether.cli import options
from tether.cli.terminal.bars import bars
from tether.cli.terminal.console import Terminal, print_line
from tether.cli.terminal.tables import save, show_table
from tether.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tether.core.protocols import ChatModel
    from tether.core.types import Comparison
    from tether.judges.pairwise import PairJudge


Rubric = Annotated[
    str,
    typer.Option(
        help="Criterion of the judge: helpful, harmless, a text file, or a .toml file of principles.",
    ),
]
Report = Annotated[Path | None, typer.Option(help="Write the figures as JSON here.")]


@dataclass(frozen=True, kw_only=True)
class DuelOptions(options.SamplingOptions):
    """Sampling of the answers that are compared."""

    max_new_tokens: options.MaxNewTokens = 512
    seed: options.Seed = 0


@dataclass(frozen=True, kw_only=True)
class JudgingOptions(options.Options):
    """Comparisons that are judged, and what is written of them."""

    rubric: Rubric = "helpful"
    format: options.Format = "auto"
    limit: options.Pairs = None
    output: Annotated[
        Path | None,
        options.output_option("Write the soft labels here, as JSON lines."),
    ] = None
    report: Report = None
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


@options.grouped
def judge_pairs(
    model: options.Asked,
    files: Annotated[
        list[str],
        typer.Argument(help="Comparisons, in any format that tether reads."),
    ],
    *,
    judging: JudgingOptions,
    asking: options.AskingOptions,
) -> None:
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


@options.grouped
def duel_models(
    models: Annotated[list[str], typer.Argument(help="Two or more, each a folder, hub id or run.")],
    *,
    prompts: Annotated[
        list[str],
        typer.Option(help="Prompts that all models answer, in any format; may be repeated."),
    ],
    judge: Annotated[
        str,
        typer.Option(help="The model that judges. With --url: its name on the server."),
    ],
    rubric: Rubric = "helpful",
    answers: DuelOptions,
    limit: options.Rows = None,
    output: Annotated[
        Path | None,
        options.output_option("Write all pairs of answers here, as comparisons in JSON lines."),
    ] = None,
    report: Report = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Write a page of figures and answers here."),
    ] = None,
    asking: options.AskingOptions,
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
    show_table(console, f"{' against '.join(models)}, judged by {pair_judge.name}", wins, columns)
    show_table(console, "", place_rows(figures), PLACES)
    repeated = left_out["repeated_prompts"]
    asked_once = [("repeated prompts, asked once", f"{repeated:,}")] if repeated else []
    show_table(console, "", [*fact_rows(figures), *asked_once])
    usage = dict(pair_judge.model.usage())
    show_usage(usage)
    save(report, {**figures, **left_out, "usage": usage})
    if output:
        write_rows(output, rows)
        print_line(f"{len(rows):,} pairs of answers: {output}")
    if page:
        write_duel(page, figures, rows)
        print_line(f"Page: {page}")


@options.grouped
def constitution(
    model: options.Asked,
    prompts: Annotated[str, typer.Argument(help="Prompts, in any format that tether reads.")],
    output: Annotated[
        Path,
        options.output_option("Write demonstrations here, as JSON lines."),
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
    limit: options.Rows = None,
    asking: options.AskingOptions,
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
    show_table(console, "critique and revision", rows)
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
