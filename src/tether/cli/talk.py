"""Commands that generate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from tether.cli.options import Talker
from tether.core.errors import ConfigError
from tether.core.visible import visible

if TYPE_CHECKING:
    from tether.core.types import Message


def generate(
    model: Talker,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be given several times.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A file of prompts, in any format that tether reads.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON lines here instead of text to the terminal.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1)] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    seed: int = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first so many prompts of the file.")] = None,
) -> None:
    """Answers to prompts, from a model or from a finished run."""
    from tether.assemble import load_policy, local_engine
    from tether.core.types import Prompt, Sampling, user

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p)
    rows = [Prompt((user(text),), f"p{n}") for n, text in enumerate(prompt or ())]
    if file is not None:
        from tether.data.sources import read

        rows += list(read(str(file), Prompt, limit=limit))
    if not rows:
        raise ConfigError("nothing to answer: give --prompt TEXT or --file PATH")
    role, loaded = load_policy(model)
    engine = local_engine(role, loaded)
    groups = engine.generate(rows, sampling, num_samples=samples, seed=seed)
    if output is not None:
        with output.open("w", encoding="utf-8") as sink:
            for group in groups:
                for r in group.rollouts:
                    row = {"id": r.prompt.id, "prompt": r.prompt.text, "response": r.text, "stop": r.stop_reason.value}
                    sink.write(json.dumps(row, ensure_ascii=False) + "\n")
        return
    console = Console()
    for group in groups:
        console.print(f"[bold cyan]{escape(visible(group.prompt.text))}")
        for rollout in group.rollouts:
            console.print(escape(visible(rollout.text)) + ("" if rollout.finished else " [dim]…[/]"), highlight=False)


def chat(
    model: Talker,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0)] = 0.95,
    seed: int = 0,
) -> None:
    """Talk with a model or with the result of a run. An empty line or Ctrl-D ends it; /new starts over."""
    from tether.assemble import load_policy, local_engine
    from tether.core.types import Prompt, Sampling, assistant, user
    from tether.pipelines.exporting import standing

    console, sampling = Console(), Sampling(max_new_tokens, temperature, top_p=top_p)
    role, loaded = load_policy(model)
    engine = local_engine(role, loaded)
    console.print(f"[dim]{escape(standing(model))}. An empty line ends, /new starts over.[/]")
    messages: list[Message] = []
    turn = 0
    while True:
        try:
            text = console.input("[bold cyan]you> ").strip() if sys.stdin.isatty() else sys.stdin.readline().strip()
        except EOFError:
            return
        if not text:
            return
        if text == "/new":
            messages = []
            continue
        messages.append(user(text))
        reply = engine.generate([Prompt(tuple(messages))], sampling, seed=seed, ordinals=[turn])[0].rollouts[0]
        turn += 1
        messages.append(assistant(reply.text))
        console.print(f"[bold green]model>[/] {escape(visible(reply.text))}", highlight=False)
