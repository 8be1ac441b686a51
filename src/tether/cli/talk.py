"""Commands that generate."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from tether.core.errors import ConfigError
from tether.core.types import Message, Prompt, Sampling, assistant, user
from tether.core.visible import visible


def generate(
    model: str,
    prompts: list[str],
    file: Path | None,
    output: Path | None,
    sampling: Sampling,
    samples: int,
    seed: int,
    limit: int | None,
) -> None:
    """See `tether generate --help`."""
    from tether.assemble import load_policy, local_engine

    rows = [Prompt((user(text),), f"p{n}") for n, text in enumerate(prompts)]
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


def chat(model: str, sampling: Sampling, seed: int) -> None:
    """See `tether chat --help`."""
    from tether.assemble import load_policy, local_engine

    console = Console()
    role, loaded = load_policy(model)
    engine = local_engine(role, loaded)
    console.print(f"[dim]{escape(loaded.source)}. An empty line ends, /new starts over.[/]")
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
