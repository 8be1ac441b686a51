"""A conversation with a model in the terminal."""

from __future__ import annotations

import itertools
import sys

from rich.console import Console
from rich.markup import escape

from tether.cli.terminal.bars import starting
from tether.cli.terminal.console import Terminal
from tether.cli.tools.export_source import standing
from tether.core.types import Message, Prompt, Sampling, assistant, user
from tether.core.visible import visible
from tether.runner.assembly.roles import load_policy, local_engine


def talk(model: str, sampling: Sampling, seed: int = 0) -> None:
    """Answer line by line. An empty line or the end of the input ends it; `/new` starts over.

    Args:
        model: a name or a path of a model, or of the result of a run.
    """
    console = Terminal()
    with starting("loading the model"):
        engine = local_engine(*load_policy(model))
    console.print(f"[dim]{escape(standing(model))}. An empty line ends, /new starts over.[/]")
    messages: list[Message] = []
    for turn in itertools.count():
        text = _line(console)
        while text == "/new":
            messages = []
            text = _line(console)
        if not text:
            return
        messages.append(user(text))
        prompts = [Prompt(tuple(messages))]
        group = engine.generate(prompts, sampling, seed=seed, ordinals=[turn])[0]
        reply = group.rollouts[0].text
        messages.append(assistant(reply))
        console.print(f"[bold green]model>[/] {escape(visible(reply))}", highlight=False)


def _line(console: Console) -> str:
    """The user's next line; empty at the end of the input."""
    try:
        if sys.stdin.isatty():
            return console.input("[bold cyan]you> ").strip()
        return sys.stdin.readline().strip()
    except EOFError:
        return ""
