"""Recipes that collect preferences, learn from them and compare, in seconds: a tiny random model,
and letters for a judge.
"""

import json

from tether.core.protocols import Verdict
from tether.judges.verdicts import SPENT
from tether.settings.reading import build
from tether.settings.recipe import Recipe

LETTERS = {"call": "tether.quickstart.judges:letters"}
FEW = {
    name: {"path": f"tether:{name}", "limit": 12}
    for name in ("demonstrations", "prompts", "heldout")
}
VALUES = {
    "seed": 3,
    "model": {"source": "tiny", "dtype": "float32"},
    "sft": {
        **{"data": FEW["demonstrations"], "epochs": 1, "batch_size": 8, "row_tokens": 256},
        "optimizer": {"learning_rate": 1e-3},
    },
    "pairs": {
        **{
            "data": FEW["prompts"],
            "prompts": 8,
            "samples_per_prompt": 4,
            "labels": 12,
            "judge": LETTERS,
        },
        **{"max_new_tokens": 8, "temperature": 1.0},
    },
    "reward": {
        "prompts_per_update": 4,
        "heldout_fraction": 0.25,
        "optimizer": {"learning_rate": 1e-2},
    },
    "ppo": {
        **{"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 8},
        "optimizer": {"learning_rate": 1e-2},
    },
    "evaluate": {"data": FEW["heldout"], "judge": LETTERS},
}
DIRECT = {"epochs": 1, "heldout_fraction": 0.0, "optimizer": {"learning_rate": 1e-2}}


def journey(root, *overrides, **changes):
    """The recipe with other sections (None: without them); `pairs` are laid over those that it
    has.
    """
    pairs = {**VALUES["pairs"], **changes.pop("pairs", {})}
    values = {
        **VALUES,
        "pairs": {key: value for key, value in pairs.items() if value is not None},
        **changes,
        "run": str(root),
    }
    return build(
        Recipe,
        {key: value for key, value in values.items() if value is not None},
        overrides,
    )


def collection(root, **pairs):
    """A recipe of [pairs] alone."""
    return journey(root, pairs=pairs, sft=None, reward=None, ppo=None, evaluate=None)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbered_prompts(folder):
    """A file of somebody's own prompts, as the data of a section."""
    path = folder / "prompts.txt"
    path.write_text("".join(f"Tell me about number {n}.\n" for n in range(10)), encoding="utf-8")
    return {"path": str(path)}


class AlphabetJudge:
    """Speaks core.protocols.ChatModel: likes the first place a little and the alphabet's end more,
    within its budget.
    """

    name = "planted"

    def __init__(self, budget):
        self.budget = budget

    def verdicts(self, conversations, options, *, told=None):
        verdicts = []
        for place, talk in enumerate(conversations):
            first, second = (
                part.split("]\n", 1)[1].split("\n\n[")[0]
                for part in talk[0].content.split("[answer ")[1:3]
            )
            self.budget -= 1
            odds = 0.3 + (second > first) - (second < first)
            verdicts.append(
                Verdict((odds, 0.0)) if self.budget >= 0 else Verdict(None, reason=SPENT),
            )
            if told:
                told(place, verdicts[-1])
        return verdicts

    def usage(self):
        return {"questions": 1}


class Killed(BaseException):
    """No handler of ours catches it."""


def dying_after(calls):
    """A progress bar that ends the process, as far as a test can, at its n-th call."""
    left = [calls]

    def bar(*_):
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    return lambda phase: bar
