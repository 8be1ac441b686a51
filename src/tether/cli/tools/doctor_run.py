"""The doctor's round of a run: the log checks of each stage, and the encodings that it saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tether.core.errors import RunError
from tether.core.left_out import TOO_LONG
from tether.core.rundir import noted_path, read_json
from tether.core.types import Facts
from tether.models.saving import member_folders
from tether.watch.monitoring.doctor import (
    Finding,
    Result,
    Unexamined,
    diagnose,
    pairs_made,
)
from tether.watch.monitoring.doctor_log import (
    check_movement,
    check_rows,
    check_samples,
    check_time,
    seconds_left_out,
)
from tether.watch.report.doubts import length_warning, not_trained
from tether.watch.report.reading import SubRun, finite, mapping, read_journey


def examine_run(folder: Path) -> dict[str, list[Result]]:
    """The log checks of every stage in a run's folder, or of a stage's own: all of them where it
    sampled, else whether it moved.

    Raises:
        RunError: no stage in the folder has taken a step.
    """
    journey = read_journey(folder)
    results = {}
    missing = sum(seconds_left_out(stage.summary) for stage in journey.stages)
    for stage in journey.supervised:
        if stage.metrics:
            results[stage.title] = [
                *check_time(stage.section, stage.settings, stage.summary, missing),
                *_rounds_checks(stage),
                *_checks_of_rows(stage),
                check_movement(_numbers(stage.metrics), stage.learning, stage.summary),
            ]
    for arm in journey.arms:
        if not arm.metrics:
            continue
        own = arm.path or folder
        reward = (
            mapping(arm.manifest).get("reward")
            if arm.settings.get("reward_source", "learned") == "learned"
            else None
        )
        results[arm.title] = [
            *check_time(arm.section, arm.settings, arm.summary, missing),
            *check_rows(_numbers(arm.metrics), arm.settings),
            _saved_encoding(own, reward, arm.settings),
        ]
    if results and (damaged := [note for note in journey.notes if "damaged" in note]):
        results["records"] = [
            Finding(
                "records",
                "warning",
                "Some records cannot be read, and the checks were made without them.",
                " ".join(damaged),
                "A full disk or a killed process leaves such lines. Copy the run's files anew if "
                "this is a copy.",
            ),
        ]
    if not results:
        raise RunError(
            f"{folder} holds no steps of a stage. Give the folder of a run that has taken some.",
        )
    return results


def _rounds_checks(stage: SubRun) -> list[Result]:
    """Checks of a stage's samples over its rounds, with each round as a step."""
    sampled = [mapping(one, "sampling") for one in stage.rounds]
    if not sampled:
        return []
    scored = {"proxy": "reward/proxy", "proxy_std": "reward/proxy_std", "failed": "reward/failed"}
    names = {
        "length": "response/length",
        "finished": "response/stop_rate",
        **(scored if "failed" in sampled[0] else {}),
    }
    rows = [
        {names[key]: finite(value) for key, value in one.items() if key in names} for one in sampled
    ]
    return [*check_samples(rows), pairs_made(sampled)]


def _checks_of_rows(stage: SubRun) -> list[Result]:
    """The pairs of a stage prefer no length, and nearly all of its rows train whole."""
    length = "`tether reward-bench RUN FILES` has the accuracy among answers of like length."
    results = (
        ("length", length_warning(stage.section, stage.title, stage.summary), length),
        ("rows", not_trained(stage), " ".join(_remedies(stage))),
    )
    return [Finding(name, "warning", words, "", advice) for name, words, advice in results if words]


def _remedies(stage: SubRun) -> Iterator[str]:
    """Advice for rows that are left out or cut, for each reason that has a remedy."""
    reasons = [*mapping(stage.summary, "skipped"), *mapping(stage.summary, "cut")]
    if any(map(TOO_LONG.fullmatch, reasons)):
        yield "Raise the key, or split the rows."
    if "tie" in reasons and stage.settings.get("labels") == "given":
        yield 'Ties with votes train with labels = "votes".'


def _numbers(rows: Sequence[Facts]) -> list[dict[str, float | None]]:
    """The finite numbers of a log, without the measurement before the first step."""
    return [
        {key: finite(value) for key, value in row.items()} for row in rows if row.get("step") != 0
    ]


def _saved_encoding(folder: Path, reward: object, settings: Facts) -> Result:
    """The saved policy and reward model have one base and one encoding.

    A reward model with a base of its own may have another encoding, for it reads text then.
    """
    if reward is None:
        return Unexamined("encoding", "no reward model of this run's scored")
    scorer = noted_path(folder, str(reward))
    if scorer is None:
        return Unexamined("encoding", f"the reward model, {reward} when it scored, is not there")
    files = [place / "role.json" for place in (folder / "policy", member_folders(scorer)[0])]
    if missing := [file for file in files if not file.is_file()]:
        return Unexamined("encoding", f"{missing[0]} is not there")
    policy, scorer = map(read_json, files)
    differing = [key for key in ("base_digest", "encoding") if policy[key] != scorer[key]]
    own_base = settings.get("roles") == "separate" or settings.get("reward_servers")
    if own_base and "encoding" in differing:
        return Unexamined("encoding", "the reward model has another encoding, and reads text")
    evidence = f"policy and reward model have one encoding{'' if differing else ' and one base'}"
    if "encoding" in differing:
        evidence = f"{files[0]} and {files[1]} differ in {' and '.join(differing)}"
    return diagnose(
        "encoding",
        evidence,
        {"saved-encodings-differ": "encoding" in differing},
    )
