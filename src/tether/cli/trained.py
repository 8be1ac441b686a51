"""Commands that use what was trained: it answers, it talks, it becomes a folder that other programs
load.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from tether.cli.options import SamplingOptions
from tether.cli.terminal.bars import starting
from tether.cli.terminal.console import Terminal, print_line
from tether.core.errors import ConfigError
from tether.core.rundir import read_json
from tether.core.visible import visible

if TYPE_CHECKING:
    from tether.scale.servers.http import JsonServer


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(SamplingOptions):
    """Sampling of answers to prompts."""

    max_new_tokens: int = 128
    top_k: int = 0
    seed: int = 0


def generate(
    model: str,
    prompts: list[str] | None = None,
    *,
    prompt: list[str] | None = None,
    file: Path | None = None,
    output: Path | None = None,
    samples: int = 1,
    answers: AnswerOptions,
    limit: int | None = None,
) -> None:
    """Answer prompts with a model or with the result of a run."""
    from tether.core.rundir import write_jsonl
    from tether.core.types import Prompt, Sampling, user
    from tether.data.rows import turn_rows
    from tether.data.sources import read
    from tether.runner.assembly.roles import load_policy, local_engine

    if limit is not None and file is None:
        raise ConfigError("--limit has no effect without --file")
    sampling = Sampling(answers.max_new_tokens, answers.temperature, answers.top_k, answers.top_p)
    rows = [
        Prompt((user(text),), f"p{n}") for n, text in enumerate([*(prompts or ()), *(prompt or ())])
    ]
    rows += [] if file is None else list(read(str(file), Prompt, limit=limit))
    if not rows:
        raise ConfigError("nothing to answer: give a prompt, in quotes, or --file PATH")
    with starting("loading the model"):
        engine = local_engine(*load_policy(model))
    with starting("answering"):
        groups = engine.generate(rows, sampling, num_samples=samples, seed=answers.seed)
    if output is not None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        fields = (
            {
                "id": r.prompt.id,
                "prompt": r.prompt.text
                if len(r.prompt.messages) == 1
                else turn_rows(r.prompt.messages),
                "response": r.text,
                "stop": r.stop_reason.value,
            }
            for r in rollouts
        )
        write_jsonl(output, fields)
        return
    console = Terminal()
    for group in groups:
        console.print(f"[bold cyan]{escape(visible(group.prompt.text))}")
        for number, rollout in enumerate(group.rollouts, 1):
            if samples > 1:
                console.print(f"[dim]{number}[/]")
            console.print(
                escape(visible(rollout.text)) + ("" if rollout.finished else " [dim]…[/]"),
                highlight=False,
            )


def chat(
    model: str,
    max_new_tokens: int = 256,
    temperature: float = 0.7,
    top_p: float = 0.95,
    seed: int = 0,
) -> None:
    """Talk with a model or with the result of a run. An empty line or Ctrl-D ends the chat.
    /new starts a new conversation.
    """
    from tether.cli.terminal.talk import talk
    from tether.core.types import Sampling

    talk(model, Sampling(max_new_tokens, temperature, top_p=top_p), seed)


def read_again(kind: str, difference: float) -> str:
    """Difference between an exported model and the trained one, in a sentence. More than rounding
    is an error of the export.
    """
    unit = "nats a token" if kind == "policy" else "units of its score"
    differs = (
        f"Loaded again, the exported model differs from the trained model by at "
        f"most {difference:.2g} {unit}"
    )
    if difference < ROUNDED:
        return f"{differs}."
    meaning = (
        f", a factor of {math.exp(difference):.2f} in one token's probability"
        if kind == "policy"
        else ""
    )
    return (
        f"{differs}{meaning}. This comes from rounding merged weights to 16 bits. "
        "--dtype float32 avoids it."
    )


ROUNDED = 0.01
"""A difference above which the rounding of weights is named."""


def export(
    source: str,
    output: Path,
    adapter: bool = False,
    dtype: str = "auto",
    shard_size: str = "5GB",
    gguf: str | None = None,
    push: str | None = None,
    private: bool = False,
) -> None:
    """Write a policy or reward model as a plain folder for transformers, vLLM, TRL or peft, with a
    model card.
    """
    from tether.cli.tools.export import export_model
    from tether.cli.tools.push import open_hub, push_folder

    if private and push is None:
        raise ConfigError(
            "--private has no effect without --push owner/name. Add --push, or remove --private",
        )
    hub = open_hub(push) if push else None
    with starting("loading, writing and loading again"):
        how = {"adapter": adapter, "dtype": dtype, "shard_size": shard_size, "gguf": gguf}
        made = export_model(source, output, **how)
    print_line(f"{made['kind']} of {made['source']}: {made['folder']}")
    print_line(read_again(made["kind"], made["difference"]))
    if gguf:
        print_line(f"{output}/gguf: rounding changes at most {made['gguf']:.2g} nats a token.")
    if made["constant"]:
        print_line(
            f"The scores of the exported model lack a constant of "
            f"{made['constant']:.6g}, which tether adds again. Differences "
            "between scores are right.",
        )
    if not made["same_ids"]:
        print_line(
            "If a program tokenizes the whole text of the chat template at "
            "once, some token ids differ from those in training.",
        )
    if push and hub:
        print_line(f"Uploaded to {push_folder(hub, output, push, private=private)}")


def engine(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: str = "auto",
    rows: int = 64,
    alone: bool = False,
) -> None:
    """Serve tether's engine to runs with engine.addresses. It takes adapters, or whole models, from
    folders that it can read.
    """
    with starting("loading the model"):
        from tether.runner.assembly.engines import engine_server
        from tether.runner.assembly.models import open_model
        from tether.scale.servers.http import new_token
        from tether.settings.model import ModelConfig
        from tether.settings.reading import build

        loaded = open_model(
            build(ModelConfig, {"source": model, "dtype": dtype}, where="tether engine"),
        )
    server = engine_server(loaded, (host, port), rows, new_token(), alone=alone)
    _announce("Sampling", server)
    server.serve_forever()


def rewards(
    recipe: str,
    stage: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8100,
) -> None:
    """Serve a stage's reward to runs with reward_servers.addresses. It runs the reward function
    that the recipe names.
    """
    with starting("loading the reward"):
        server = _reward_server(recipe, stage, (host, port))
    _announce("Scoring", server)
    server.serve_forever()


def _reward_server(recipe: str, stage: str | None, address: tuple[str, int]) -> JsonServer:
    """A server for a stage of a recipe, or by the settings that a run wrote (`reward/settings.json`
    in a stage's folder).

    Raises:
        ConfigError: the recipe has no such stage, or `stage` must name one of several that sample.
    """
    from tether.runner.assembly.reward_servers import reward_settings, settings_server
    from tether.runner.earlier import with_earlier_results
    from tether.runner.jobs import expand
    from tether.scale.servers.http import new_token
    from tether.settings.recipe import read_recipe

    if recipe.endswith(".json"):
        path = Path(recipe)
        return settings_server(read_json(path), address, path.with_name("stacks.txt"), new_token())
    config = read_recipe(recipe)
    names = [name for name in config.stages if config.section(name).online]
    if stage not in names and (stage or len(names) != 1):
        raise ConfigError(
            f"the stage of the reward is not clear. Name one of the stages that sample "
            f"in {recipe}: {', '.join(names) or 'none'}",
        )
    name = stage or names[0]
    job: Any = with_earlier_results(expand(config, [name])[0])
    settings = reward_settings(job)
    return settings_server(settings, address, token=new_token())


def _announce(work: str, server: JsonServer) -> None:
    """Print the address of a server that was started by hand and, where it made one, the token that
    runs need.
    """
    from tether.scale.servers.http import TOKEN

    if TOKEN not in os.environ:
        print_line(f"Runs that use this server need its token: export {TOKEN}={server.token}")
    print_line(
        "{} at http://{}:{}. Ctrl-C ends the server.".format(work, *server.server_address[:2]),
    )
