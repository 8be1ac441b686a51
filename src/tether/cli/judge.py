"""The commands in which a language model judges, criticises and rewrites."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tether.cli.options import Format, Pairs
from tether.cli.progress import bars


def _server(*values: str | int | None) -> dict[str, str | int | None]:
    return dict(zip(("url", "key_variable", "concurrency", "max_requests", "max_tokens"), values, strict=True))


def _asked(model: str, server: Mapping[str, Any], cache: Path | None, reasoning_tokens: int = 0) -> Any:
    """Who is asked: a model in this process, or where `server` has an address, the one of that name there. All is remembered."""
    from tether.assemble.judges import chat_model
    from tether.core.config import build
    from tether.models.packaged import cache_folder
    from tether.rollout.served import ServerConfig

    found: Any = model
    if server["url"] is not None:
        said = {name: value for name, value in server.items() if value is not None}
        found = build(ServerConfig, {**said, "model": model}, where="server")
    elif useless := [name for name, value in server.items() if value is not None]:
        from tether.core.errors import ConfigError

        raise ConfigError(f"--{useless[0].replace('_', '-')} has no effect on a model in this process: give --url too")
    return chat_model(found, cache or cache_folder() / "answers.sqlite", reasoning_tokens=reasoning_tokens)


AskedArgument = Annotated[
    str, typer.Argument(help="Who is asked: a model folder, a hub id, a run directory; with --url a model's name at that server.")
]
Url = Annotated[str | None, typer.Option(help="An OpenAI-compatible server, such as http://127.0.0.1:8000/v1.")]
KeyVariable = Annotated[
    str | None, typer.Option(help="Environment variable that holds the server's key; the key itself goes nowhere.")
]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Requests to the server at a time; default 8.")]
MaxRequests = Annotated[int | None, typer.Option(min=0, help="Budget: requests to the server, repeated ones counted.")]
MaxTokens = Annotated[int | None, typer.Option(min=0, help="Budget: tokens of prompts and replies.")]
Cache = Annotated[
    Path | None, typer.Option(help="Where answers are kept, so that none is asked for twice; default: tether's cache.")
]
ReasoningTokens = Annotated[
    int, typer.Option(min=0, help="Tokens of the reasons that it writes before each verdict; 0: a verdict at once.")
]


def judge(
    model: AskedArgument,
    files: Annotated[list[str], typer.Argument(help="Comparisons, in any format that tether reads.")],
    rubric: Annotated[
        str, typer.Option(help="What makes an answer better: a text file, helpful, harmless; or a .toml of principles.")
    ] = "helpful",
    format: Format = "auto",
    limit: Pairs = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the judge's soft labels here, as JSON lines.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the figures as JSON here.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0.01, help="Divides the labels' log-odds: above 1 for a judge too sure.")
    ] = 1.0,
    reasoning_tokens: ReasoningTokens = 0,
    cache: Cache = None,
    url: Url = None,
    key_variable: KeyVariable = None,
    concurrency: Concurrency = None,
    max_requests: MaxRequests = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Label comparisons with a language model, and see first how far it agrees with people and how much the place counts."""
    from tether.core.rundir import write_json
    from tether.pipelines.judging import judge_files
    from tether.preferences.constitution import read_rubric
    from tether.preferences.judge import PairJudge
    from tether.preferences.rows import write_rows

    console = Console()
    words = read_rubric(rubric)
    server = _server(url, key_variable, concurrency, max_requests, max_tokens)
    judge = PairJudge(_asked(model, server, cache, reasoning_tokens), words, temperature=temperature)
    with bars(console) as announce:
        labels, found = judge_files(judge, files, format=format, limit=limit, announce=announce)
    *parts, (name, total) = found.items()  # the last is that of all files
    for part, result in parts:
        console.print(_table(part, result))
    show(console, name, total)
    console.print(_usage(judge.model.usage()), highlight=False)
    if report:
        write_json(report, {"judge": judge.name, "rubric": rubric, "files": found, "usage": dict(judge.model.usage())})
        console.print(f"Everything: {report}", highlight=False, soft_wrap=True)
    if output:
        write_rows(output, labels)
        console.print(f"{len(labels):,} labels: {output}", highlight=False, soft_wrap=True)


def show(console: Console, name: str, found: dict[str, Any]) -> None:
    """How far a judge agrees with the labels of a file, and what that means."""
    console.print(_table(name, found))
    for sentence in _warnings(found):
        console.print(f"[bold yellow]{sentence}[/]", highlight=False)


def _table(name: str, found: dict[str, Any]) -> Table:
    table = Table(title=name, show_header=False, title_justify="left")
    table.add_row("judged in both orders", f"{found['num_judged']:,} of {found['num_pairs']:,} pairs")
    for reason, count in found["failures"].items():
        table.add_row(f"  not judged: {reason}", f"{count:,}")
    if found["num_parsed"]:
        table.add_row("  read off written replies", f"{found['num_parsed']:,}: their labels are 0, 1/2 or 1")
    position, agreement = found["position"], found["agreement"]
    if agreement:
        shares, people = agreement["first_share"], agreement["annotators"]
        table.add_row(
            "agrees with the labels", f"{_share(agreement['accuracy'])}; asked once {agreement['accuracy_once']['value']:.1%}"
        )
        table.add_row("Cohen's kappa", f"{_number(agreement['kappa'])}; asked once {agreement['kappa_once']['value']:+.2f}")
        table.add_row(
            "  chosen shown first, last",
            " and ".join(f"{agreement[f'accuracy_shown_{k}']['value']:.1%}" for k in ("first", "second")),
        )
        table.add_row("the longer answer", f"{_share(agreement['length_only'])} of the labels")
        if people:
            table.add_row("two annotators agree", f"{people['agree']:.1%}; the judge with one {people['model_agrees']:.1%}")
    if position:
        if position["bias"]:
            table.add_row("the first place adds", f"{_number(position['bias'])} nats of log-odds")
        table.add_row("verdicts for the first place", _share(position["names_first"]))
        table.add_row("verdict follows the place", f"{_share(position['follows_place'])} of pairs")
        if agreement:
            asked, averaged, labels = (f"{shares[k]['value']:.1%}" for k in ("once", "averaged", "people"))
            table.add_row("first of a drawn order wins", f"{asked} asked once, {averaged} averaged, {labels} by the labels")
        table.add_row("undecided after averaging", f"{found['undecided']:.1%}")
    if agreement:
        table.add_row("calibration error", f"{agreement['calibration_error']:.3f}")
        if agreement["temperature"] is not None:
            table.add_row(
                "  mended", f"{agreement['calibration_error_after']:.3f} by --temperature {agreement['temperature']:.2f}"
            )
    if found["mass"] is not None:
        table.add_row("probability of any verdict", f"{found['mass']:.1%}")
    return table


def _warnings(found: dict[str, Any]) -> list[str]:
    agreement, said = found["agreement"], []
    if agreement is None:
        said.append("There are no labels to agree with: nothing is known of how good these verdicts are.")
    elif agreement["accuracy"]["high"] < 0.5:
        said.append("This judge is worse than a coin on these pairs, it prefers what people reject: do not train on its labels.")
    elif agreement["accuracy"]["low"] <= 0.5:
        said.append("This judge cannot be told from a coin on these pairs: do not train on its labels.")
    lasting = found["num_lasting"]
    if left := found["num_pairs"] - found["num_judged"] - lasting:
        said.append(
            f"{left:,} pairs have no label. Give the same command again to ask for them; what is known is not asked again."
        )
    if lasting:
        said.append(f"{lasting:,} pairs get no label from this judge, however often it is asked: the table says why.")
    return said


def constitution(
    model: AskedArgument,
    prompts: Annotated[str, typer.Argument(help="Prompts, in any format that tether reads.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write demonstrations here, as JSON lines.")],
    principles: Annotated[str, typer.Option(help="A .toml file of principles.")] = "constitution",
    comparisons: Annotated[
        Path | None,
        typer.Option(help="Also sample two answers to each prompt, compare them by a principle, and write that here."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Critiques and revisions of each answer.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0)] = 1.0,
    seed: int = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    reasoning_tokens: ReasoningTokens = 0,
    cache: Cache = None,
    url: Url = None,
    key_variable: KeyVariable = None,
    concurrency: Concurrency = None,
    max_requests: MaxRequests = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Constitutional AI: a model criticises and rewrites its answers by principles; demonstrations, and comparisons if asked."""
    from tether.core.errors import DataError
    from tether.core.types import Prompt, Sampling
    from tether.data.sources import read
    from tether.pipelines.judging import reasons
    from tether.preferences.constitution import read_constitution, revise, sampled_pairs
    from tether.preferences.judge import PairJudge
    from tether.preferences.reasoning import Reasoning
    from tether.preferences.rows import write_rows

    console = Console()
    chosen = read_constitution(principles)
    rows = list(read(prompts, Prompt, limit=limit))
    sampling = Sampling(max_new_tokens, temperature, top_p=top_p)
    asked = _asked(model, _server(url, key_variable, concurrency, max_requests, max_tokens), cache)
    with bars(console) as announce:
        bar, total = announce("revise"), len(rows) * (1 + 2 * rounds)
        revised = revise(asked, chosen, rows, sampling, rounds=rounds, seed=seed, told=lambda done: bar(done, total, {}))
    table = Table(title="critique and revision", show_header=False, title_justify="left")
    table.add_row("demonstrations", f"{len(revised.demonstrations):,} of {len(rows):,} prompts")
    for reason, count in revised.failures.most_common():
        table.add_row(f"  none: {reason}", f"{count:,}")
    changed = sum(d.metadata["initial"] != d.messages[-1].content for d in revised.demonstrations)
    table.add_row("answers that changed", f"{changed:,}")
    if revised.demonstrations:
        write_rows(output, revised.demonstrations)
    if comparisons is not None:
        pairs, failures = sampled_pairs(asked, rows, sampling, seed=seed)
        judge = PairJudge(Reasoning(asked, reasoning_tokens) if reasoning_tokens else asked, chosen.rubric)
        with bars(console) as announce:
            compare = announce("compare")
            judgments = judge.judge(pairs, told=lambda done: compare(done // 2, len(pairs), {}))
        labels = judge.label(pairs, judgments)
        table.add_row("comparisons", f"{len(labels):,} of {len(rows):,} prompts")
        for reason, count in failures.most_common():
            table.add_row(f"  none: {reason}", f"{count:,}")
        for reason, count in reasons(judgments).most_common():
            table.add_row(f"  not judged: {reason}", f"{count:,}")
        table.add_row("  verdict follows the place", f"{sum(bool(j.follows_place) for j in judgments):,} of {len(pairs):,}")
        if labels:
            write_rows(comparisons, labels)
    console.print(table)
    console.print(_usage(asked.usage()), highlight=False)
    if not revised.demonstrations:
        why = "; ".join(f"{reason} ({count})" for reason, count in revised.failures.most_common(3))
        raise DataError(f"no prompt of {len(rows)} gave a demonstration: {why}")
    console.print(f"Demonstrations: {output}", highlight=False, soft_wrap=True)


def _usage(spent: Mapping[str, int]) -> str:
    return "asked: " + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in spent.items() if count)


def _share(found: dict[str, Any]) -> str:
    low, high = found["low"], found["high"]
    return f"{found['value']:.1%}" + (f" ({low:.1%} to {high:.1%})" if low is not None and high is not None else "")


def _number(found: dict[str, Any]) -> str:
    if found["value"] is None:
        return "not known"
    known = found["low"] is not None and found["high"] is not None
    return f"{found['value']:+.2f}" + (f" ({found['low']:+.2f} to {found['high']:+.2f})" if known else "")
