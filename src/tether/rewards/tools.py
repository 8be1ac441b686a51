"""Functions of the user as tools: their schemas, and an environment that runs the calls of a reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from pydantic import ConfigDict, ValidationError, validate_call

from tether.core.errors import ConfigError, RunError, error_words, one_line
from tether.core.secrets import redact
from tether.core.types import Json, JsonValue
from tether.rewards.calling import in_time, settled
from tether.rewards.loading import load_object
from tether.rewards.mcp import SCHEME, McpTool, mcp_tools

LONGEST = 100_000
"""Characters of what an environment may say at once."""


def tool_functions(names: Sequence[str]) -> list[Callable[..., object]]:
    """The functions that `environment.tools` names, and the tools of servers.

    Raises:
        ConfigError: a name leads to nothing that can be called, or a server names no tools.
    """
    return [
        function
        for name in names
        for function in (
            mcp_tools(name) if name.startswith(SCHEME) else [load_object(name, "environment.tools")]
        )
    ]


def schemas(functions: Sequence[Callable[..., object]]) -> str:
    """The JSON text of the functions' schemas, from their types and docstrings, as transformers
    makes them.

    Raises:
        ConfigError: a function lacks a type or a description.
    """
    from transformers.utils import get_json_schema

    rows = []
    for function in functions:
        try:
            rows.append(
                function.schema if isinstance(function, McpTool) else get_json_schema(function),
            )
        except Exception as error:
            raise ConfigError(
                f"the tool {function.__name__} needs a docstring that describes it and each of its "
                f"arguments under 'Args:', and a type for each argument: {one_line(error)}",
            ) from error
    return json.dumps(rows)


class ToolEnvironment:
    """Runs the calls of a reply, one after another, and answers each with a message; a reply that
    calls nothing ends the episode.

    A wrong call is answered with its fault, for the policy to read.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., object]],
        seconds: float | None = None,
    ) -> None:
        names = [function.__name__ for function in functions]
        if again := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"several tools are named {again[0]}: give each a name of its own")
        checked = validate_call(config=ConfigDict(arbitrary_types_allowed=True))
        self.tools = functions
        self.seconds = seconds
        self.functions = {
            function.__name__: function if isinstance(function, McpTool) else checked(function)
            for function in functions
        }

    def reset(self, task: Json) -> None:
        """The prompt as it is."""

    def step(self, message: Json) -> tuple[list[Json], None, bool]:
        calls = message.get("tool_calls") or []
        return [self._answer(call) for call in calls], None, not calls

    def _answer(self, call: Json) -> Json:
        function = call["function"]
        return {
            "role": "tool",
            "name": function["name"],
            "tool_call_id": call["id"],
            "content": self._result(**function),
        }

    def _result(self, name: str, arguments: Mapping[str, JsonValue]) -> str:
        function = self.functions.get(name)
        if function is None:
            return _fault(f"there is no function {name}; there are {', '.join(self.functions)}")
        try:
            returned = in_time(lambda: settled(function(**arguments)), self.seconds)
            if not isinstance(returned, str):
                returned = json.dumps(returned, default=str, ensure_ascii=False)
            if len(returned) > LONGEST:
                return _fault(f"the result has {len(returned):,} characters, more than {LONGEST:,}")
            return returned
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            return _fault("; ".join(faults))
        except (Exception, SystemExit) as error:
            if isinstance(function, McpTool) and not isinstance(error, RunError):
                raise  # the server has failed, and no policy can do anything about it
            return _fault(redact(error_words(error)))


def _fault(text: str) -> str:
    return json.dumps({"error": text})
