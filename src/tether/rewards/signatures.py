"""Functions that score, in the forms in which people write them: tether's, TRL's, as coroutines; and by what name they go.

TRL's form (https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function) is called by keyword:
`f(prompts=..., completions=..., **columns)`, with the other columns of the data as lists.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from tether.core.types import Prompt

Function = Callable[[Sequence[Prompt], Sequence[str]], Sequence[Any]]
"""(prompts, responses), one prompt a response -> a number, a `Score` or None for each."""
Shape = Literal["texts", "messages"]
GIVEN = "python:"
"""What the name of a function begins with that a program handed over."""
_GIVEN: dict[str, Callable[..., Any]] = {}


def register(function: Callable[..., Any]) -> str:
    """The name by which a recipe of this process knows a function; its digest keeps a run from going on with another."""
    name = f"{GIVEN}{_title(function)}@{_digest(function)}"
    _GIVEN[name] = function
    return name


def registered(name: str) -> Callable[..., Any] | None:
    """The function of that name, if this process has handed it over."""
    return _GIVEN.get(name)


def _title(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return (inner if inspect.isroutine(inner) else type(inner)).__qualname__.replace("<locals>.", "")


def _digest(function: Any) -> str:
    """A short hash of what a function does: its code without comments and layout, and the plain values that it closes over."""
    if isinstance(function, functools.partial):
        return _hash(_digest(function.func), repr(function.args), repr(sorted(function.keywords.items())))
    code = function if inspect.isroutine(function) else type(function)
    state = vars(function) if not inspect.isroutine(function) else {}
    if inspect.isfunction(function):
        state = inspect.getclosurevars(function).nonlocals
    plain = {k: v for k, v in state.items() if isinstance(v, str | int | float | tuple | None)}
    try:
        words = ast.dump(ast.parse(textwrap.dedent(inspect.getsource(code))))
    except (OSError, TypeError, SyntaxError, IndentationError):  # typed into a prompt, built in, or a lambda amid a call
        compiled = code.__code__ if inspect.isfunction(code) else None
        words = repr(code) if compiled is None else repr((compiled.co_code, compiled.co_names, compiled.co_consts))
    return _hash(words, repr(sorted(plain.items())))


def _hash(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]


def plain(function: Callable[..., Any], completions: Shape = "texts") -> Function:
    """A function in any of the forms as (prompts, responses) -> values.

    Args:
        completions: what a function in TRL's form gets: texts, or lists of messages, as TRL has it for conversations.
    """
    parameters = _parameters(function)
    by_keyword = "completions" in parameters

    def score(prompts: Sequence[Prompt], responses: Sequence[str]) -> Sequence[Any]:
        values = function(**_columns(prompts, responses, completions, parameters)) if by_keyword else function(prompts, responses)
        return asyncio.run(_awaited(values)) if inspect.isawaitable(values) else values

    return functools.wraps(function)(score) if by_keyword or inspect.iscoroutinefunction(function) else function


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # built in
        return {}


def _columns(
    prompts: Sequence[Prompt], responses: Sequence[str], shape: Shape, parameters: Mapping[str, inspect.Parameter]
) -> dict[str, Sequence[Any]]:
    """The arguments that TRL would give, and of these what the function takes."""
    texts: Sequence[Any] = responses
    questions: list[Any] = [prompt.text for prompt in prompts]
    if shape == "messages":
        texts = [[{"role": "assistant", "content": response}] for response in responses]
        questions = [[turn.as_row() for turn in prompt.messages] for prompt in prompts]
    names = dict.fromkeys(name for prompt in prompts for name in prompt.metadata)
    columns = {name: [prompt.metadata.get(name) for prompt in prompts] for name in names}
    given = {**columns, "prompts": questions, "completions": texts}
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {name: values for name, values in given.items() if name in parameters}


async def _awaited(values: Awaitable[Any]) -> Any:
    return await values
