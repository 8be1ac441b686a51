"""Checks for faulty set-ups of reinforcement learning from human feedback, on live objects. The
checks on a log's rows are in doctor_log.

Every check takes only its own inputs. It returns a finding, a clean bill, or the reason why it
cannot decide. Thresholds are far outside the values of healthy runs
(docs/reference/monitoring.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tether.core.tables import table_beside
from tether.core.types import Conversation, Facts, Ids, Rollout, Score, StopReason, assistant, user
from tether.data.chat import ChatEncoder
from tether.watch.monitoring.view import Series

TYPICAL_KL = 10.0
"""Nats a response that a policy commonly ends at, to weigh a KL coefficient before there is a
KL.
"""
FAULTS: dict[str, dict[str, str]] = table_beside(__file__, "faults.toml")
"""Message, advice and perhaps severity of everything that a check can find, by name."""


class Finding(NamedTuple):
    """A fault, the numbers that show it, and the remedy. A warning may be meant so; an error is
    not.
    """

    check: str
    severity: str
    message: str
    evidence: str
    advice: str


class Healthy(NamedTuple):
    """A check that found nothing wrong."""

    check: str
    evidence: str


class Unexamined(NamedTuple):
    """A check that could not be made here, and the reason."""

    check: str
    reason: str


Result = Finding | Healthy | Unexamined


def diagnose(
    check: str,
    evidence: str,
    faults: Mapping[str, bool],
    **words: str,
) -> Finding | Healthy:
    """The first fault that is present as a finding; without any a clean bill.

    Args:
        faults: names of `FAULTS`, and whether each is present.
        words: what fills the braces of the messages.
    """
    for fault in (FAULTS[name] for name, present in faults.items() if present):
        severity = fault.get("severity", "error")
        message = fault["message"].format(**words)
        return Finding(check, severity, message, evidence, fault["advice"])
    return Healthy(check, evidence)


def wrong_reference(policy: Tensor, reference: Tensor, mask: Tensor) -> Result:
    """Before training the policy is the reference: both say the same about every token.

    Args:
        policy, reference, mask: (sequences, time) log-probabilities, and which of them count.
    """
    gap = float((policy - reference).abs()[mask].mean())
    return diagnose(
        "reference",
        f"mean |log pi - log pi_ref| = {gap:.4g} over {int(mask.sum())} tokens",
        {"reference-is-not-the-start": gap > 0.02},
    )


def kl_sign(change: float, coefficient: float, place: Literal["reward", "loss"]) -> Result:
    """A policy that drifts up against its reference must be paid less, or lose more.

    Args:
        change: of the total reward, or of the loss, when the policy's log-probabilities rise
            against the reference's.
    """
    faults = {"kl-unpaid": change == 0, "kl-of-wrong-sign": (change > 0) == (place == "reward")}
    return diagnose(
        "KL sign",
        f"coefficient {coefficient:g}: drift changes the {place} by {change:+.4g}",
        faults,
        place=place,
    )


def score_once(rewards: Tensor, lengths: Sequence[int]) -> Result:
    """Without KL a response has one reward, at its last real token.

    Args:
        rewards: (sequences, time) shaped without KL, from scores that differ.
        lengths: tokens of each response.
    """
    last = torch.tensor(lengths, device=rewards.device)[:, None] - 1
    most = int((rewards != 0).sum(-1).max())
    elsewhere = int(rewards.scatter(1, last, 0.0).count_nonzero())
    evidence = (
        f"at most {most} rewarded tokens a response, {elsewhere} of them not the last, in "
        f"{len(lengths)} responses"
    )
    faults = {"score-reaches-no-token": most == 0, "score-on-many-tokens": elsewhere > 0}
    return diagnose("score placement", evidence, faults)


def planned_epochs(epochs: int, minibatches: int, target_kl: float | None) -> Result:
    """Check the planned number of updates on a batch of rollouts."""
    many = target_kl is None and (epochs > 10 or epochs * minibatches > 64)
    evidence = f"{epochs} epochs x {minibatches} minibatches a batch of rollouts"
    return diagnose("epochs", evidence, {"many-updates-planned": many})


def encodings(
    policy: ChatEncoder,
    reward: ChatEncoder,
    conversations: Sequence[Conversation],
) -> Result:
    """Policy and reward model read the same tokens in the same conversation."""
    differing = [key for key, value in policy.describe().items() if reward.describe()[key] != value]
    if policy.tokenizer.get_vocab() != reward.tokenizer.get_vocab():
        differing.append("vocabulary")
    talks = [(*talk, assistant("Certainly, here is one.")) for talk in conversations]
    unequal = sum(policy.conversation(talk).ids != reward.conversation(talk).ids for talk in talks)
    evidence = f"{len(talks) - unequal} of {len(talks)} conversations have the same ids"
    if differing:
        evidence += f"; they differ in {', '.join(differing)}"
    return diagnose("encoding", evidence, {"encodings-differ": bool(differing or unequal)})


def empty_or_endless(ordinary: Sequence[float], odd: Series) -> list[Result]:
    """An empty answer, or one that repeats itself endlessly, is not among the best.

    Args:
        ordinary: training's view of the scores of the policy's own samples, without penalties.
        odd: the same for unwanted answers, by their kind.
    """
    high = statistics.quantiles(ordinary, n=10, method="inclusive")[-1]
    results = []
    for kind, scores in odd.items():
        mean = statistics.fmean(scores)
        evidence = (
            f"{kind}: {mean:.3g} on average; own samples {statistics.fmean(ordinary):.3g}, "
            f"one in ten above {high:.3g}"
        )
        results.append(
            diagnose(
                "empty or endless answers",
                evidence,
                {"odd-answers-preferred": mean > high},
                kind=kind,
            ),
        )
    return results


def odd_answers(
    rollouts: Sequence[Rollout],
    encoder: ChatEncoder,
    limit: int,
) -> dict[str, list[Rollout]]:
    """An empty answer and an endless one in the place of each rollout; the endless one repeats the
    beginning of its own words.
    """
    stop = encoder.stop_ids[:1]

    def answer(rollout: Rollout, ids: Ids, reason: StopReason) -> Rollout:
        return replace(
            rollout,
            response_ids=ids,
            logprobs=(),
            spans=(),
            stop_reason=reason,
            text=encoder.decode(ids),
        )

    def endless(rollout: Rollout) -> Ids:
        words = (
            tuple(token for token in rollout.response_ids if token not in encoder.stop_ids)[:8]
            or stop
        )
        return (words * limit)[:limit]

    return {
        "empty": [answer(rollout, stop, StopReason.STOP_TOKEN) for rollout in rollouts],
        "endless": [answer(rollout, endless(rollout), StopReason.LENGTH) for rollout in rollouts],
    }


def temperature(
    engine: Tensor | None,
    logprobs_at: Callable[[float], Tensor],
    entropy: Tensor,
    mask: Tensor,
    sampled_at: float,
    tolerance: float,
) -> Result:
    """Samples come from the distribution that the learner takes them for.

    Args:
        engine: (sequences, time) the engine's own log-probabilities, if it reports them.
        logprobs_at: the learner's log-probabilities at a temperature.
        entropy: the learner's, at the recipe's temperature. On average, a sampled token's
            log-probability is its negative.
        tolerance: nats a token by which two numerics may differ.
    """
    own = logprobs_at(sampled_at)
    excess = (-own - entropy)[mask].double()
    mean = float(excess.mean())
    error = float(excess.std()) / math.sqrt(len(excess))
    evidence = f"surprisal minus entropy {mean:+.3f} ± {error:.3f} nats a token"
    disagree = False
    if engine is not None:
        gap = float((engine - own).abs()[mask].mean())
        evidence = f"engine and learner differ by {gap:.3g} nats a token; {evidence}"
        disagree = gap > tolerance
        if disagree:
            gaps = {
                t / 10: float((engine - logprobs_at(t / 10)).abs()[mask].mean())
                for t in range(2, 21)
            }
            best = min(gaps, key=lambda t: gaps[t])
            evidence += (
                f"; temperature {best:g} would fit to {gaps[best]:.3g}, the recipe says "
                f"{sampled_at:g}"
            )
    other = abs(mean) > 0.1 and abs(mean) > 5 * error
    shape = "sharper" if mean < 0 else "flatter"
    return diagnose(
        "temperature",
        evidence,
        {"engine-disagrees": disagree, "another-distribution": other},
        shape=shape,
    )


def stop_tokens(encoder: ChatEncoder, engine_stops: Sequence[int]) -> Result:
    """The engine stops at the token that ends a turn in training, and at the tokenizer's EOS if the
    template writes none.
    """
    tokenizer = encoder.tokenizer
    turn = encoder.conversation((user("Hello."), assistant("Yes")))
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | set(
        tokenizer.all_special_ids,
    )
    written = [
        token
        for token, trained in zip(turn.ids, turn.trained, strict=True)
        if trained and token in special
    ]
    ending = written[0] if written else tokenizer.eos_token_id
    shown = "none" if ending is None else repr(tokenizer.decode([ending]))
    evidence = (
        f"a turn ends with {shown}; the engine stops at "
        f"{[tokenizer.decode([i]) for i in engine_stops]}"
    )
    runs_on = ending is not None and ending not in engine_stops
    differ = set(engine_stops) != set(encoder.stop_ids)
    return diagnose(
        "stop tokens",
        evidence,
        {"no-stop-at-the-end-of-a-turn": runs_on, "stops-differ": differ},
    )


def scores(scores: Sequence[Score], *, checked: bool = False) -> Result:
    """Scores that can be learned from.

    Args:
        checked: the reward is right or wrong, and a short probe may be all wrong.
    """
    values = [s.value for s in scores if s.value is not None and math.isfinite(s.value)]
    failed = len(scores) - len(values)
    spread = statistics.pstdev(values) if values else 0.0
    reasons = "; ".join(sorted({s.reason for s in scores if s.value is None and s.reason})[:2])
    evidence = f"{len(values)} scores, {failed} failed" + (f" ({reasons})" if reasons else "")
    if values:
        evidence += f", {statistics.fmean(values):.3g} ± {spread:.3g}"
    grave = failed > len(scores) / 2 or any(
        s.value is not None and math.isnan(s.value) for s in scores
    )
    failing = {"most-rewards-fail": grave, "some-rewards-fail": failed > 0}
    equal = {"checked-scores-equal" if checked else "scores-equal": spread < 1e-6}
    return diagnose("scores", evidence, failing | equal)


def pairs_made(rounds: Sequence[Facts]) -> Result:
    """Most prompts give a pair.

    Args:
        rounds: counts of a round's `pairs`, and of the prompts that gave none: `tied`, `failed`,
            `unusable`, `too_long`.
    """
    made = sum(one.get("pairs") or 0 for one in rounds)
    lost = {
        key: sum(one.get(key) or 0 for one in rounds)
        for key in ("tied", "failed", "unusable", "too_long")
    }
    # the long ones are pairs first
    total = made + sum(count for key, count in lost.items() if key != "too_long")
    reasons = ", ".join(f"{count} {key.replace('_', ' ')}" for key, count in lost.items() if count)
    evidence = (
        f"{made - lost['too_long']} pairs of {total} prompts in {len(rounds)} "
        f"rounds{f'; {reasons}' if reasons else ''}"
    )
    return diagnose("pairs", evidence, {"few-pairs": 2 * (made - lost["too_long"]) < total})


def kl_scale(coefficient: float, kl: float, spread: float, most: float = 20.0) -> Result:
    """The price of the KL is of the size of the score's deviation.

    Args:
        kl: nats a response.
        spread: deviation of the scores as they are trained on.
        most: deviations that the KL may cost.
    """
    share = coefficient * kl / spread if spread else math.inf
    evidence = (
        f"coefficient {coefficient:g} x {kl:.3g} nats = {share:.3g} deviations of the "
        f"score ({spread:.3g})"
    )
    return diagnose(
        "KL scale",
        evidence,
        {"kl-dwarfs-the-score": share > most, "kl-too-light": share < 1e-3},
    )
