"""Environments of the packaged recipes, and a tool. The tasks are the rows of `tether:NAME`."""

from __future__ import annotations

import re
from threading import Semaphore

from tether.core.types import Json
from tether.rewards.adapters import Step
from tether.rewards.sandbox import Sandbox
from tether.rewards.tools import ToolEnvironment

RUNNER = "tether.rewards.code:make_runner"
PROGRAMS = Semaphore(4)
"""Programs that run at the same time."""


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a * b


class Calculator(ToolEnvironment):
    """Pays 1 for the row's `answer` in the last reply, less a price for each call."""

    price = 0.0

    def __init__(self) -> None:
        super().__init__([multiply])

    def reset(self, task: Json) -> None:
        self.answer = task["answer"]

    def step(self, message: Json) -> Step:
        answers, _, done = super().step(message)
        right = done and self.answer in re.findall(r"\d+", message["content"].replace(",", ""))
        return answers, right - self.price * len(answers), done


class Hangman:
    """The row's `word` is guessed by letters, the first of each reply. A guess pays the part of the
    word that it shows, so that an episode that a limit ends has its share.
    """

    at_once = -1
    """Places that a letter fills; -1: all."""

    def reset(self, task: Json) -> None:
        self.word = self.hidden = task["word"]

    def step(self, message: Json) -> Step:
        before = len(self.hidden)
        self.hidden = self.hidden.replace(message["content"].strip().lower()[:1], "", self.at_once)
        return self.shown(), (before - len(self.hidden)) / len(self.word), not self.hidden

    def shown(self) -> str:
        return " ".join("_" if letter in self.hidden else letter for letter in self.word)


class Walk(Hangman):
    """A walk to a door: `word` has a letter for each step, north, south, east or west, in any order."""

    at_once = 1

    def shown(self) -> str:
        steps = self.hidden.count
        return (
            f"The door is {steps('n')} north, {steps('s')} south, {steps('e')} east and "
            f"{steps('w')} west."
        )


def python(program: str) -> str:
    """Run a Python program; the result is what it prints.

    Args:
        program: the text of the program
    """
    sandbox = Sandbox(RUNNER, {"seconds": 5}, workers=1, seconds=9, memory_mb=1024, guarded=False)
    with PROGRAMS, sandbox:
        (reply,) = sandbox.run([{"program": program, "asks": [["program", ""]]}])
    return " ".join((reply.result or [[reply.failure]])[0])[:500]
