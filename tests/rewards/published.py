"""Environments as a user's file makes them: those of other libraries, of which none comes with
tether, and some that fail.
"""

import os
import random
import time
from pathlib import Path


class Safe:
    """A class as TRL's `environment_factory` takes it."""

    def reset(self, code=None, **row):
        self.code, self.open = code, False

    def turn(self, number: int) -> str:
        """Turn the dial.

        Args:
            number: where to
        """
        self.open = number == self.code
        return "open" if self.open else "too high" if number > self.code else "too low"

    def get_reward(self):
        return float(self.open)


class Talking(Safe):
    def reset(self, **row):
        return " The safe has 3 digits."


def safe_of_a_task(task):
    return Safe()


class Broken:
    def __init__(self):
        raise ValueError("no")


class Endless:
    def __init__(self):
        time.sleep(20)


def hang(seconds: int) -> int:
    """Take some time.

    Args:
        seconds: how much
    """
    time.sleep(seconds)
    return seconds


def counting(task):
    class Counting:
        def reset(self, again):
            assert again["seed"] == task["seed"]

        async def step(self, message):
            return None, len(message["content"]) - float(task["answer"]), True

    return Counting()


class Bad:
    """Does what the reply names."""

    def reset(self, task):
        return "go"

    def step(self, message):
        if message["content"] == "raise":
            raise RuntimeError("boom")
        if message["content"] == "hang":
            time.sleep(1000)
        if message["content"] == "big":
            return "x" * 5_000_000, 1.0, False
        if message["content"] == "unicode":
            return "\ud800 odd", 1.0, True
        if message["content"] == "die":
            os._exit(3)
        if message["content"] == "array":
            import numpy as np

            return "on", np.float32(1), True
        return "on", float("nan" if message["content"] == "nan" else 1), True


class Mortal:
    """Dies once, in the middle of an episode."""

    def reset(self, task):
        self.mark, self.words = Path(task["mark"]), []

    def step(self, message):
        self.words.append(message["content"])
        if message["content"] == "die" and not self.mark.exists():
            self.mark.touch()
            os._exit(1)
        return " ".join(self.words), None, False


class Random:
    """Draws from the random numbers of its process."""

    def reset(self, task):
        random.seed(1)

    def step(self, message):
        time.sleep(random.random() / 100)
        return None, random.random(), True


class Holds:
    """Holds something until it is closed, and draws a game."""

    def reset(self, task):
        import numpy as np

        self.mark = Path(task["marks"]) / str(time.monotonic_ns())
        self.mark.touch()
        return f"{random.random()} {np.random.randint(10**6)}"

    def step(self, message):
        return None, 1.0, True

    def close(self):
        self.mark.unlink()


class Late:
    """Is made after the time for it is over, and holds something then."""

    def __init__(self):
        time.sleep(1.5)

    def reset(self, task):
        self.mark = Path(task["marks"]) / str(time.monotonic_ns())
        self.mark.touch()

    def step(self, message):
        return None, 1.0, True

    def close(self):
        self.mark.rename(self.mark.with_suffix(".closed"))


class BeginsLate:
    """Refuses its first beginning, and marks every one that was made."""

    def reset(self, task):
        place = Path(task["marks"])
        (place / str(time.monotonic_ns())).touch()
        if len([*place.iterdir()]) == 1:
            raise OSError("not yet")

    def step(self, message):
        return None, 1.0, True


class Helped:
    """Has tether's two methods, and helpers that other libraries' environments have too."""

    def load(self):
        raise NotImplementedError

    init = exchange = get_observation = score_answer = load

    def reset(self, task):
        self.number = task["seed"]

    def step(self, message):
        return None, float(self.number), True


def textarena_guess():
    import textarena

    return textarena.make("GuessTheNumber-v0")


def gymnasium_lake():
    import gymnasium

    return gymnasium.make("FrozenLake-v1", render_mode="ansi")


def minigrid_room():
    import gymnasium
    import minigrid  # noqa: F401 - it registers its rooms

    return gymnasium.make("MiniGrid-Empty-5x5-v0")


def gem_guess():
    import gem

    return gem.make("game:GuessTheNumber-v0-easy")


def reasoning_gym_sums():
    import reasoning_gym

    return reasoning_gym.create_dataset("simple_equations", size=100, seed=0)


def skyrl_gym_gsm8k(task):
    from skyrl_gym.envs.gsm8k.env import GSM8kEnv

    return GSM8kEnv({}, {"reward_spec": {"ground_truth": task["answer"]}, "extra_info": {}})


def openenv_action():
    from openenv.core.env_server.types import Action

    class Say(Action):
        message: str

    return Say


def openenv_echo():
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Observation, State

    class Heard(Observation):
        echo: str = ""

    class Echo(Environment[openenv_action(), Heard, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True
        said = 0

        def reset(self, seed=None, episode_id=None, **others):
            self.said = 0
            return Heard(echo=f"ready {seed}")

        def step(self, action, timeout_s=None, **others):
            self.said += 1
            return Heard(echo=action.message, reward=len(action.message), done=self.said == 4)

        @property
        def state(self):
            return State(step_count=self.said)

    return Echo()


def verifiers_sums():
    import verifiers.v1 as verifiers

    class Sum(verifiers.Task):
        @verifiers.reward(weight=2.0)
        async def right(self, trace):
            return float(trace.last_reply == self.data.name)

        @verifiers.reward
        def short(self, task, trace):
            return {"short": float(len(trace.last_reply) < 3)}

    class Sums(verifiers.Taskset):
        def load(self):
            for n in range(100):
                yield Sum(verifiers.TaskData(name=str(n % 10), prompt=f"{n} mod 10?"))

    return Sums(verifiers.TasksetConfig())


class Echoing:
    """Says the number of the turn."""

    def reset(self, task):
        self.turn = 0

    def step(self, message):
        self.turn += 1
        return f"Turn {self.turn}.", 0.5, False


class Letters:
    """Pays for vowels."""

    def reset(self, task):
        self.turn = 0

    def step(self, message):
        self.turn += 1
        share = sum(message["content"].count(one) for one in "aeiou") / 10
        return f"Turn {self.turn}.", share, share > 0.2
