"""The summary of a whole run: those of its stages, with what the judge says of its policies."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from tether.build.roles import newest_policy
from tether.core.rundir import RunDirectory, read_json
from tether.core.types import Json
from tether.runner.folder import round_folder
from tether.settings.recipe import BaseRecipe


def compared_in(recipe: BaseRecipe, place: Path) -> list[str]:
    """The policies of a recipe, and those that an earlier start of it compared."""
    before = place / "evaluate" / "summary.json"
    return [
        *dict.fromkeys(
            [*recipe.policies, *(read_json(before)["policies"] if before.is_file() else ())],
        ),
    ]


def write_totals(recipe: BaseRecipe) -> None:
    """The summary of a whole run: those of its stages, with what the judge says of its policies; of
    rounds, a row each.
    """
    root = Path(recipe.run)
    rounds = [_totals(recipe, root, number) for number in range(1, (recipe.repeat or 0) + 1)]
    if not rounds:
        RunDirectory(root).finish(_totals(recipe, root, None))
        return
    for number, (one, labels) in enumerate(
        zip(rounds, accumulate(one["labels"] for one in rounds), strict=True),
        1,
    ):
        one["labels_so_far"] = labels
        RunDirectory(round_folder(root, number)).finish(one)
    trained = round_folder(root, len(rounds)) / recipe.policies[0]
    policy = newest_policy(trained) or trained / "policy"
    RunDirectory(root).finish({"rounds": rounds, "policy": policy.relative_to(root).as_posix()})


def _totals(recipe: BaseRecipe, root: Path, number: int | None) -> Json:
    place = round_folder(root, number)
    names = dict.fromkeys([*recipe.stages, *compared_in(recipe, place)])
    folders = {name: (root if name == "sft" else place) / name for name in names}
    done = {
        name: read_json(folder / "summary.json")
        for name, folder in folders.items()
        if (folder / "summary.json").is_file()
    }
    verdict = done.pop("evaluate")
    policies = {name: {**done[name], **result} for name, result in verdict["policies"].items()}
    # others may not be trained yet
    first = next(name for name in (*recipe.policies, *policies) if name in policies)
    if number is not None:
        return _round(done, policies[first], first)
    seconds = sum(
        summary.get("seconds", 0.0)
        for name, summary in done.items()
        if name == first or name not in policies
    )
    return {
        **{name: summary for name, summary in done.items() if name not in policies},
        "arms": {name.removeprefix(f"{first}-"): summary for name, summary in policies.items()},
        first: policies[first],
        "evaluation": {
            key: verdict[key]
            for key in ("seconds", "num_prompts", "budget", "trained_on")
            if key in verdict
        },
        "seconds": seconds + verdict["seconds"],
        "peak_rss_bytes": max(
            summary.get("peak_rss_bytes", 0) for summary in (*done.values(), verdict)
        ),
    }


def _round(done: Json, policy: Json, name: str) -> Json:
    """Figures of one round: labels, learning and gain, and the gain for a hundred labels."""
    asked = done["pairs"].get("asked", done["pairs"]["num_pairs"])
    reward = {
        key: done["reward"][key]
        for key in ("heldout_accuracy", "gold_accuracy")
        if key in done.get("reward", {})
    }
    gain = policy.get("gold_gain_of_round", policy["gold_gain"])
    return {
        "asked": asked,
        "labels": done["pairs"]["num_pairs"],
        **({"reward": reward} if reward else {}),
        "alarms": len(done[name].get("alarms", ())),
        "seconds": done[name]["seconds"],
        **{
            key: value
            for key, value in policy.items()
            if key.startswith("gold_") or key in ("over_best_decoding", "verdict")
        },
        "gold_gain_of_round": gain,
        "kl": policy["answers"]["kl"],
        "gold_per_100_labels": {
            key: None if gain[key] is None else gain[key] * 100 / asked
            for key in ("value", "low", "high")
        },
    }
