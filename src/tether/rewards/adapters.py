"""Environments that were written for other libraries, known by what they can do.

None of these libraries is imported. An environment that begins by chance takes the row's `seed`, or
one made from the row: the episodes of a group begin alike.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import httpx2
from pydantic import TypeAdapter

from tether.core.errors import DataError, RunError, one_line
from tether.core.received import received
from tether.core.types import Json, JsonValue
from tether.rewards.calling import settled
from tether.rewards.loading import load_object
from tether.rewards.tools import ToolEnvironment, tool_functions
from tether.settings.environment import EnvironmentConfig

Foreign = JsonValue
"""An object of another library: anything."""
Maker = Callable[..., Foreign]
Step = tuple[JsonValue, float | None, bool]
ANSWER: TypeAdapter[Json] = TypeAdapter(Json)
OBSERVATION = {"done", "reward", "metadata"}
"""The keys of an observation of OpenEnv that say nothing of what is observed."""


def _arguments(one: object, method: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(getattr(one, method)).parameters if hasattr(one, method) else {}


def seed_of(task: Json) -> int:
    if isinstance(seed := task.get("seed"), int):
        return seed
    return zlib.crc32(json.dumps(task, sort_keys=True, default=str).encode())


def _opening(task: Json, text: str) -> list[Json]:
    """The first turns: an environment's text in the place of the prompt; its system turn stays."""
    system = [turn for turn in task["prompt"] if turn["role"] == "system"]
    return [*system, {"role": "user", "content": text}]


@dataclass
class Adapter:
    """Has what another library made."""

    inner: Foreign

    def close(self) -> None:
        if hasattr(self.inner, "close"):
            settled(self.inner.close())


class ToolClass(ToolEnvironment):
    """A class for TRL's `environment_factory`: its public methods are the tools."""

    def __init__(self, inner: Foreign) -> None:
        names = {name for name in dir(inner) if not name.startswith("_")}
        methods = (
            getattr(inner, name) for name in sorted(names - {"reset", "get_reward", "close"})
        )
        super().__init__([one for one in methods if inspect.ismethod(one)])
        self.inner = inner

    def reset(self, task: Json) -> JsonValue:
        """The prompt, with a text that the class returns behind its last turn, as TRL has it."""
        text = settled(self.inner.reset(**task))
        if not isinstance(text, str):
            return text
        *turns, last = task["prompt"]
        return [*turns, {**last, "content": last["content"] + text}]

    def step(self, message: Json) -> Step:
        answers, _, done = super().step(message)
        return answers, self.finish() if done else None, done

    close = Adapter.close

    def finish(self) -> JsonValue:
        if hasattr(self.inner, "get_reward"):
            return settled(self.inner.get_reward())
        return None


class SkyRL(Adapter):
    """SkyRL-Gym's `BaseTextEnv`."""

    def reset(self, task: Json) -> JsonValue:
        return settled(self.inner.init(task["prompt"]))[0]

    def step(self, message: Json) -> Step:
        result = settled(self.inner.step(message["content"]))
        return list(result["observations"]), result["reward"], result["done"]


class TextArena(Adapter):
    """A game of textarena for one player."""

    def reset(self, task: Json) -> JsonValue:
        self.inner.reset(num_players=1, seed=seed_of(task))
        return _opening(task, self._observation())

    def step(self, message: Json) -> Step:
        done, _ = self.inner.step(message["content"])
        if not done:
            return self._observation(), None, False
        rewards, _ = self.inner.close()
        return None, float(rewards[0]), True

    def finish(self) -> float:
        """A game that is not over is worth nothing."""
        return 0.0

    def _observation(self) -> str:
        _, words = self.inner.get_observation()
        return words if isinstance(words, str) else "\n".join(text for _, text, _ in words)


class Gymnasium(Adapter):
    """An environment with Gymnasium's five-tuple; a reply is its text, or the number of an action."""

    def reset(self, task: Json) -> JsonValue:
        return _opening(task, self._words(self.inner.reset(seed=seed_of(task))[0]))

    def step(self, message: Json) -> Step:
        action: Foreign = message["content"]
        if hasattr(self.inner, "action_space") and hasattr(self.inner.action_space, "n"):
            count = self.inner.action_space.n
            number = re.search(r"\d+", action)
            if number is None or not int(number[0]) < count:
                return f"Answer with a whole number from 0 to {count - 1}.", None, False
            action = int(number[0])
        seen, reward, ended, cut, _ = self.inner.step(action)
        return self._words(seen), float(reward), bool(ended or cut)

    def _words(self, seen: object) -> str:
        if isinstance(seen, str):
            return seen
        drawn = self.inner.render()
        return drawn if isinstance(drawn, str) else str(seen)


class OpenEnvHere:
    """OpenEnv's `Environment` in this process, by the messages that its server takes."""

    def __init__(self, inner: Foreign) -> None:
        self.inner = inner
        bases = (
            base for kind in type(inner).__mro__ for base in vars(kind).get("__orig_bases__", ())
        )
        self.action = next(kinds[0] for base in bases if (kinds := typing.get_args(base)))
        self.fields = [*self.action.model_fields]

    def exchange(self, kind: str, data: Json) -> Json:
        """An observation.

        Raises:
            DataError: the action has another shape.
        """
        try:
            given = {"action": self.action(**data)} if kind == "step" else data
        except ValueError as error:
            raise DataError(one_line(error)) from error
        values = settled(getattr(self.inner, kind)(**given)).model_dump(mode="json")
        return {"observation": values, **values}


class OpenEnvSocket:
    """A server of OpenEnv's environments, by its WebSocket: one connection is one environment."""

    def __init__(self, address: str) -> None:
        from websockets.sync.client import connect

        base = address.removesuffix("/ws")
        with httpx2.Client() as client:
            schema = client.get(f"{re.sub('^ws', 'http', base)}/schema").raise_for_status()
        self.fields = [*received(schema.content, ANSWER)["action"]["properties"]]
        self.connection = connect(f"{base}/ws")

    def exchange(self, kind: str, data: Json) -> Json:
        """See OpenEnvHere.exchange."""
        self.connection.send(json.dumps({"type": kind, "data": data}))
        answer = received(self.connection.recv(), ANSWER)
        if answer["type"] == "error":
            wrong = answer["data"].get("code") == "VALIDATION_ERROR"
            raise (DataError if wrong else RunError)(f"{answer['data'].get('message')}")
        return answer["data"]

    def close(self) -> None:
        self.connection.close()


class OpenEnv(Adapter):
    """An environment of OpenEnv. A reply is the text of an action with one field, and the JSON of an
    action with several.
    """

    def reset(self, task: Json) -> JsonValue:
        return _opening(task, self._words(self.inner.exchange("reset", {"seed": seed_of(task)})))

    def step(self, message: Json) -> Step:
        names = [name for name in self.inner.fields if name != "metadata"]
        try:
            action = message["content"]
            action = {names[0]: action} if len(names) == 1 else received(action, ANSWER)
            answer = self.inner.exchange("step", action)
        except (DataError, ValueError) as error:
            return f"Answer with {', '.join(names)} as JSON: {error}"[:500], None, False
        return self._words(answer), answer["reward"], answer["done"]

    @staticmethod
    def _words(answer: Json) -> str:
        values = {k: v for k, v in answer["observation"].items() if k not in OBSERVATION}
        texts = [*values.values()]
        return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else json.dumps(values)


class ReasoningGym(Adapter):
    """A data set of reasoning-gym: one question, and its own score of the reply."""

    def reset(self, task: Json) -> JsonValue:
        self.entry = self.inner[seed_of(task) % len(self.inner)]
        return _opening(task, self.entry["question"])

    def step(self, message: Json) -> Step:
        return None, float(self.inner.score_answer(message["content"], self.entry)), True


class Verifiers:
    """A taskset of verifiers: its tasks by the row's `idx`, and their rewards of one reply."""

    def __init__(self, inner: Foreign) -> None:
        self.tasks = [*inner.load()]

    def reset(self, task: Json) -> JsonValue:
        self.task = self.tasks[int(task.get("idx", seed_of(task))) % len(self.tasks)]
        data = self.task.data
        turns = data.prompt
        if isinstance(turns, str):
            turns = [{"role": "user", "content": turns}]
        self.turns = [turn if isinstance(turn, dict) else turn.model_dump() for turn in turns]
        if data.system_prompt:
            self.turns.insert(0, {"role": "system", "content": data.system_prompt})
        return self.turns

    def step(self, message: Json) -> Step:
        turns = [SimpleNamespace(**turn) for turn in (*self.turns, message)]
        trace = SimpleNamespace(
            task=self.task,
            messages=turns,
            assistant_messages=turns[-1:],
            last_message=turns[-1],
            last_reply=message["content"].strip(),
            num_turns=1,
        )
        return None, sum(self._scores({"trace": trace, "task": self.task.data})), True

    def _scores(self, values: Json) -> Iterator[float]:
        for name, function in inspect.getmembers(self.task, inspect.ismethod):
            if not hasattr(function, "reward"):
                continue
            chosen = {key: values[key] for key in _arguments(self.task, name)}
            scores = settled(function(**chosen))
            if not isinstance(scores, Mapping):
                scores = {name: scores}
            weight = vars(function.__func__).get("_vf_weight", 1.0)
            yield weight * sum(scores.values())


METHODS: Mapping[str, Callable[[Foreign], Foreign]] = {
    "score_answer": ReasoningGym,
    "load": Verifiers,
    "get_observation": TextArena,
    "init": SkyRL,
    "exchange": OpenEnv,
}
"""Adapters of foreign environments, by the name of a method that such an environment has."""


def adapted(environment: Foreign) -> Foreign:
    """An environment with tether's two methods; one that has them is itself."""
    given = _arguments(environment, "reset")
    needed = [name for name, one in given.items() if one.default is one.empty and one.kind < 2]
    own = len(needed) == 1 and needed[0] not in ("seed", "num_players")
    if own and hasattr(environment, "step"):
        return environment
    for method, kind in METHODS.items():
        if hasattr(environment, method):
            return kind(environment)
    if "timeout_s" in _arguments(environment, "step"):
        return OpenEnv(OpenEnvHere(environment))
    if "seed" in given:
        return Gymnasium(environment)
    takes_columns = any(p.kind is p.VAR_KEYWORD for p in given.values())
    return (
        ToolClass(environment) if takes_columns or not hasattr(environment, "step") else environment
    )


def takes_task(make: Maker) -> bool:
    """True if a task's row is the argument of what makes an environment."""
    kinds = inspect.signature(make).parameters.values()
    return any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in kinds)


def fresh(make: Maker, task: Json) -> Foreign:
    """A new environment for a task.

    Raises:
        DataError: one that is made from a task brings tools, which no prompt would show.
    """
    if not takes_task(make):
        return adapted(make())
    environment = adapted(make(task))
    if hasattr(environment, "tools"):
        raise DataError(
            "an environment that is made from a task's row has tools, and all prompts show the "
            "same ones. Make it without the row: its reset gets the row",
        )
    return environment


def maker_of(config: EnvironmentConfig) -> Maker:
    """The function that makes an environment for a new episode.

    Raises:
        ConfigError: a name leads to nothing that can be called.
    """
    call = config.call
    if call is None:
        return partial(ToolEnvironment, tool_functions(config.tools), config.time_limit / 2)
    if call.startswith(("ws://", "wss://")):
        return partial(OpenEnvSocket, call)
    return load_object(call, "environment.call")
