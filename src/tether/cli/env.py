"""`tether env`: an environment, played by hand or by a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING

from tether.cli.terminal.console import print_line
from tether.core.errors import ConfigError
from tether.core.types import Conversation, Ids, Json, Message, Prompt, Rollout, Sampling
from tether.core.visible import visible

if TYPE_CHECKING:
    from tether.core.protocols import Environments

SHOWN = 12
"""Ids of a piece that are printed."""


def try_environment(
    call: str,
    tools: bool = False,
    task: str = "{}",
    prompt: str = "Begin.",
    model: str | None = None,
    chat_template: str | None = None,
    turns: int = 8,
    max_new_tokens: int = 64,
    temperature: float = 0.7,
    seed: int = 0,
) -> None:
    """Play one episode of an environment. You write the replies, a line each, or --model does.

    A line such as {"name": "multiply", "arguments": {"a": 2, "b": 3}} is a call. An empty line or
    Ctrl-D ends the episode. A model's episode is shown with its token ids: the policy would learn
    those that are written, and only read the others.
    """
    from tether.rewards.environments import ROLES, environments_of, messages_of
    from tether.settings.environment import EnvironmentConfig

    chosen = {"tools": (call,)} if tools else {"call": call}
    config = EnvironmentConfig.model_validate({**chosen, "turns": turns})
    environments = environments_of(config)
    try:
        row: Json = json.loads(task)
        given = row.get("prompt", prompt)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"--task is no JSON object: {error}") from error
    opened = Prompt(messages_of(given, ("assistant", *ROLES)), row=row)
    if model is None:
        _by_hand(environments, opened, turns)
        return
    from tether.rollout.episodes import EpisodeEngine
    from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
    from tether.settings.model import ModelConfig

    settings = ModelConfig(source=model, chat_template=chat_template) if chat_template else None
    role, loaded = load_policy(model, settings)
    encoder = encoder_of(loaded)
    engine = local_engine(role, loaded)
    player = EpisodeEngine(
        engine,
        environments,
        encoder,
        config,
        context_length=loaded.context_length,
    )
    sampling = Sampling(max_new_tokens, temperature)
    (group,) = player.generate([opened], sampling, seed=seed)
    for line in _pieces(group.rollouts[0], encoder.decode):
        print_line(line)


def _by_hand(environments: Environments, task: Prompt, turns: int) -> None:
    opening = environments.begin({0: task})[0]
    if isinstance(opening, str):
        raise ConfigError(opening)
    if environments.tools:
        names = (tool["function"]["name"] for tool in json.loads(environments.tools))
        print_line(f"tools: {', '.join(names)}")
    _show(opening)
    rewards: list[float | str | None] = []
    done = False
    for line in islice(iter(sys.stdin.readline, ""), turns):
        if not line.strip():
            break
        turn = environments.step({0: _reply(line.strip())})[0]
        if isinstance(turn, str):
            raise ConfigError(turn)
        _show(turn.messages)
        rewards.append(turn.reward)
        if turn.reward is not None:
            print_line(f"reward: {turn.reward:g}")
        if done := turn.done:
            break
    rewards += environments.end([] if done else [0]).values()
    numbers = [reward for reward in rewards if isinstance(reward, float)]
    print_line(f"score: {sum(numbers):g}" if numbers else "no reward: the episode has no score")


def _show(messages: Conversation) -> None:
    for message in messages:
        print_line(visible(f"{message.role}: {message.content}"))


def _reply(line: str) -> Message:
    """A line as a reply: a JSON object with a name and arguments is a call."""
    try:
        call = json.loads(line)
        function = {"name": call["name"], "arguments": call["arguments"]}
    except (ValueError, KeyError, TypeError):
        return Message("assistant", line)
    text = json.dumps({"id": "call", "type": "function", "function": function})
    return Message("assistant", "", tool_calls=(text,))


def _pieces(rollout: Rollout, decode: Callable[[Ids], str]) -> Iterator[str]:
    """An episode, piece by piece: what was read and what the model wrote, with their ids."""
    ids = rollout.response_ids
    edges = [0, *chain.from_iterable(rollout.spans), len(ids)]
    yield _piece("read", rollout.prompt_ids, decode)
    for number, (first, stop) in enumerate(pairwise(edges)):
        if first < stop:
            yield _piece("written" if number % 2 else "read", ids[first:stop], decode)
    score = rollout.outcome
    value = "none" if score is None or score.value is None else f"{score.value:g}"
    reason = f" ({score.reason})" if score and score.reason else ""
    yield f"ended by {rollout.stop_reason.value}; score: {value}{reason}"


def _piece(name: str, ids: Ids, decode: Callable[[Ids], str]) -> str:
    first = " ".join(map(str, ids[:SHOWN]))
    more = " ..." if len(ids) > SHOWN else ""
    return f"{name} {len(ids)} ids ({first}{more}): {visible(decode(ids))}"
