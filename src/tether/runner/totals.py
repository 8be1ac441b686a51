"""The summary of a whole run: those of its stages, with what the judge says of its policies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tether.core.rundir import read_if_there, write_json
from tether.core.types import Json
from tether.runner.assembly.job import AnyJob
from tether.runner.assembly.roles import newest_policy


def compared_in(job: AnyJob) -> list[str]:
    """The policies that an evaluation compares, and those that an earlier start of it compared."""
    earlier = read_if_there(job.folder / "summary.json").get("policies", ())
    return [*dict.fromkeys([*job.policies, *earlier])]


def write_totals(jobs: Sequence[AnyJob]) -> None:
    """Write the summary of a run with an evaluation: those of its stages, with the verdicts on its
    policies; of rounds, a row each. Where the policies lie elsewhere there is none.
    """
    verdicts = [job for job in jobs if job.kind.makes == "verdict"]
    folders = [folder for job in verdicts for folder in job.policies.values()]
    if not verdicts or not all(folder.is_relative_to(verdicts[0].root) for folder in folders):
        return
    root = verdicts[0].root
    if verdicts[0].round is None:
        write_json(root / "summary.json", _totals(verdicts[0]))
        return
    rounds = [_totals(job) for job in verdicts]
    for job, one, labels in zip(
        verdicts,
        rounds,
        accumulate(one["labels"] for one in rounds),
        strict=True,
    ):
        one["labels_so_far"] = labels
        write_json(job.place / "summary.json", one)
    trained = next(iter(verdicts[-1].policies.values()))
    policy = newest_policy(trained) or trained / "policy"
    result = {"rounds": rounds, "policy": policy.relative_to(root).as_posix()}
    write_json(root / "summary.json", result)


def _totals(job: AnyJob) -> Json:
    done: Json = {}
    for name in (*job.others, *compared_in(job), job.name):
        folder = (job.root if name == "sft" else job.place) / name
        if summary := read_if_there(folder / "summary.json"):
            done[name] = summary
    verdict = done.pop(job.name)
    policies = {name: {**done[name], **result} for name, result in verdict["policies"].items()}
    # others may not be trained yet
    first = next(name for name in (*job.policies, *policies) if name in policies)
    if job.round is not None:
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
    labels = done["pairs"]["num_pairs"]
    asked = done["pairs"].get("asked", labels)
    learned = done.get("reward", {})
    reward = {key: learned[key] for key in ("heldout_accuracy", "gold_accuracy") if key in learned}
    trained = done[name]
    results = {
        key: value
        for key, value in policy.items()
        if key.startswith("gold_") or key in ("over_best_decoding", "verdict")
    }
    gain = policy.get("gold_gain_of_round", policy["gold_gain"])
    return {
        "asked": asked,
        "labels": labels,
        **({"reward": reward} if reward else {}),
        "alarms": len(trained.get("alarms", ())),
        "seconds": trained["seconds"],
        **results,
        "gold_gain_of_round": gain,
        "kl": policy["answers"]["kl"],
        "gold_per_100_labels": {
            key: None if gain[key] is None else gain[key] * 100 / asked
            for key in ("value", "low", "high")
        },
    }
