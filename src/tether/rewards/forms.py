"""The forms in which people write reward functions, each as (prompts, responses) -> values:
tether's, TRL's two, as coroutines.

TRL's form (https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function) is called
by keyword: `f(prompts=..., completions=..., **columns)`, with the other columns of the data as
lists. Its `rollout_reward_fn` has one argument, the `outcome` of an episode.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace

from tether.core.errors import RewardError
from tether.core.once import once
from tether.core.types import Entries, Json, Prompt, Rollout, Score
from tether.settings.rewards import Shape

Function = Callable[[Sequence[Prompt], Sequence["LastReply"]], object]
"""(prompts, responses), one prompt a response -> a number, a `Score` or None for each; or what
gives them when awaited.
"""
TAKEN = (
    "Your rows have a column %s, which is not passed: that argument of a reward function in TRL's "
    "form has another content. "
    "Rename the column, or read prompt.row[%r] in a function (prompts, responses)."
)
_LOG = logging.getLogger("tether.rewards")


class LastReply(str):
    """The text of a reply, as a reward function gets it; of an episode the last one.

    Attributes:
        turns: the messages of its episode from the first reply on: replies with their calls, and
            what was said to them.
        outcome: what its environment gave.
    """

    turns: Sequence[Json] = ()
    outcome = Score(None)

    @classmethod
    def of(cls, rollout: Rollout) -> LastReply:
        reply = cls(rollout.text)
        replies = [place for place, t in enumerate(rollout.turns) if t.role == "assistant"]
        first = next(iter(replies[-len(rollout.spans) :]), 0)
        reply.turns = [turn.as_row() for turn in rollout.turns[first:]]
        reply.outcome = rollout.outcome or reply.outcome
        return reply


def plain(function: Callable[..., object], completions: Shape = "texts") -> Function:
    """A function in any of the forms as (prompts, responses) -> values.

    Args:
        completions: what a function in TRL's form gets: texts, or lists of messages, as TRL has it
            for conversations.
    """
    parameters = _parameters(function)

    def score(prompts: Sequence[Prompt], responses: Sequence[LastReply]) -> object:
        if "completions" in parameters:
            return function(**_columns(prompts, responses, completions, parameters))
        return [function(_outcome(response)) for response in responses]

    foreign = "completions" in parameters or [*parameters] == ["outcome"]
    return functools.wraps(function)(score) if foreign else function


def _outcome(reply: LastReply) -> SimpleNamespace:
    """An episode as TRL's `HarnessRolloutOutcome`."""
    calls = [
        call["function"]["name"] for turn in reply.turns for call in turn.get("tool_calls", ())
    ]
    return SimpleNamespace(
        env_reward=reply.outcome.value,
        completion=reply.turns,
        trace=[],
        tool_call_count=len(calls),
        tool_failure_count=reply.outcome.parts.get("unread_calls", 0),
        tool_calls_by_name=Counter(calls),
        timed_out=False,
    )


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except Exception:  # noqa: BLE001 - built in, or an object that may raise at any attribute
        return {}


def _columns(
    prompts: Sequence[Prompt],
    responses: Sequence[LastReply],
    shape: Shape,
    parameters: Mapping[str, inspect.Parameter],
) -> Mapping[str, Sequence[object]]:
    """The arguments that TRL would give, and of these what the function takes."""
    texts: Sequence[object] = responses
    questions: Sequence[object] = [prompt.text for prompt in prompts]
    if shape == "messages":
        texts = [one.turns or [{"role": "assistant", "content": one}] for one in responses]
        questions = [[turn.as_row() for turn in prompt.messages] for prompt in prompts]
    rows = [{**prompt.metadata, **prompt.row} for prompt in prompts]
    names = dict.fromkeys(name for row in rows for name in row)
    given = {name: [row.get(name) for row in rows] for name in names}
    for name in given.keys() & {"prompts", "completions"}:
        once(_LOG.warning, TAKEN, name, name)
    given |= {"prompts": questions, "completions": texts}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        taken = given
    else:
        taken = {name: values for name, values in given.items() if name in parameters}
    _check_needed(parameters, given)
    return taken


def check_arguments(function: Function, prompts: Iterable[Prompt]) -> None:
    """Check that a function in TRL's form finds its arguments among the columns of these rows. As
    many are read as it takes.

    Raises:
        RewardError: no row has a column of an argument's name.
    """
    parameters = _parameters(function)
    row = dict[str, object]()
    fault = None
    if "completions" not in parameters:
        return
    for prompt in prompts:
        row = {**row, **prompt.metadata, **prompt.row}
        try:
            return _check_needed(parameters, {**row, "prompts": (), "completions": ()})
        except RewardError as error:
            fault = error
    if fault is not None:
        raise fault


def _check_needed(parameters: Mapping[str, inspect.Parameter], given: Entries) -> None:
    """Refuse a call without an argument that the function needs.

    Raises:
        RewardError: no column has its name.
    """
    ignored = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for name, parameter in parameters.items():
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in ignored
        if needed and name not in given:
            raise RewardError(
                f"it needs {name!r}, and the rows have no such column; they have: "
                f"{', '.join(sorted(given))}. Rename the argument, or give it a default value",
            )
