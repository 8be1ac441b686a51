"""The verdict in plain words, all computed from the run's own numbers; warnings of the training
come from its alarms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tether.core.types import Facts
from tether.report.about import short_method
from tether.report.doubts import alarms, distrust, doubts
from tether.report.gains import gold_gain, heldout_gain, proxy_gain, spent_kl
from tether.report.numbers import (
    SENTENCES,
    Show,
    bracketed,
    centre,
    decimal,
    few,
    has_interval,
    interval,
    moved_in_words,
    percent,
    plural,
    share_in_words,
    side,
    signed,
)
from tether.report.parts import Part, gold_parts
from tether.report.reading import (
    Journey,
    LoopRun,
    SubRun,
    estimate,
    finite,
    mapping,
    present,
    trend_of,
)
from tether.report.wording import Wording, wording_of, wording_of_labels
from tether.stats import Estimate, vague

ENOUGH_PROMPTS = 10
BETTER = {
    1: ("good", "Better than the start model"),
    0: ("open", "Not shown to be better than the start model"),
    -1: ("bad", "Worse than the start model"),
}
"""Tone and headline by the side of no difference on which an interval lies."""
UNJUDGED = ("open", "Not judged by gold")
REWARDED = {
    1: ("open", "The reward rose"),
    0: ("open", "No clear change of the reward"),
    -1: ("open", "The reward fell"),
}
"""The same without gold: of the training's own reward."""
RANKED = {
    1: ("open", "Ranks held-out pairs better than chance"),
    0: ("open", "Not shown to rank pairs better than chance"),
    -1: ("bad", "Ranks held-out pairs worse than chance"),
}
DECODED = {
    "better": ("good", "Better than the start model, each at its best temperature"),
    "sharper": ("open", "A lower temperature may explain the gain"),
    "undecided": BETTER[0],
    "worse": BETTER[-1],
}
"""The same by the verdict of the control of decoding (`evaluation.decoding.verdict`)."""
SAYS = SENTENCES["says"]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A word, a paragraph, and what a careful reader should doubt."""

    tone: str
    headline: str
    sentences: Sequence[str]
    warnings: Sequence[str]


def control_of(summary: Facts) -> Facts:
    """Part of a policy's summary on decoding, judged by gold, a test model or a checked reward;
    empty without a control.
    """
    if "over_best_decoding" in summary:
        best_of_n = mapping(summary.get("gold")).get("best_of_n")
        return {
            **summary,
            "by_temperature": mapping(summary.get("gold_by_temperature")),
            "best_of_n": best_of_n,
        }
    blocks = [mapping(summary.get(name)) for name in ("gold", "test", "heldout")]
    return next((block for block in blocks if block.get("verdict") in DECODED), {})


def at_temperature(temperature: object) -> str:
    """A temperature in words: 0 is greedy decoding."""
    value = finite(temperature)
    return "greedy" if value == 0 else "" if value is None else f"at temperature {value:g}"


def control_sentences(control: Facts) -> list[str]:
    """Sentences that compare the policy with the start model, each at its best temperature, and with
    the best of n answers of the start model.
    """
    over = mapping(control.get("over_best_decoding"))
    says = SENTENCES["decoding"]
    gain = estimate(over)
    rate = bracketed(over.get("win_rate"), percent)
    if gain is None or not rate:
        return []
    if gain.value == 0 and (gain.low == gain.high or gain.reason.endswith("are alike")):
        return [says["alike"]]
    ours = at_temperature(over.get("policy_temperature"))
    theirs = at_temperature(over.get("temperature"))
    meaning = says[control["verdict"]]
    sentences = [
        says["best"].format(
            ours=ours,
            theirs=theirs,
            rate=rate,
            gain=bracketed(gain, signed),
            meaning=meaning,
        ),
    ]
    for n, row in list(mapping(control.get("best_of_n")).items())[-1:]:  # the widest choice
        gained = bracketed(mapping(row).get("gain"), signed)
        won = bracketed(mapping(row).get("win_rate"), percent)
        sentences += (
            [says["best-of-n"].format(n=n, gain=gained, rate=won)] if gained and won else []
        )
    return sentences


def conclusion(journey: Journey) -> Conclusion:
    """Did it get better, by what, at which price, and what got worse."""
    policy = journey.judged
    if not policy.name:
        return _conclusion_without_policy(journey)
    gain, control, warnings = gold_gain(policy), control_of(policy.summary), []
    (tone, headline), sentences, believed = _opening(journey, policy, gain)
    if control and believed:
        tone, headline = DECODED[control["verdict"]]
        sentences += control_sentences(control)
    elif tone == "good":
        tone = "open"
        headline += ", at one temperature"
        warnings.append(SENTENCES["warns"]["no-control"])
    if (rate := policy.estimate("gold_win_rate")) and 0 < rate.count < ENOUGH_PROMPTS:
        tone = "open"
        headline = f"Only {rate.count} comparisons: too few to tell"
    if gain:
        sentences.append(SAYS["gold"].format(gain=_with_bounds(gain, signed)))
    reward = SAYS["reward" if journey.own_reward else "proxy"]
    sentences += [*_part_sentences(gold_parts(policy, journey.answers)), *_price(policy, reward)]
    sentences += [SAYS["facts"]] if tone == "good" and gain else []
    warnings += [*distrust(policy, gain), *alarms(policy), *doubts(journey)]
    named = wording_of(journey).sentence
    return Conclusion(tone, named(headline), [*map(named, sentences)], [*map(named, warnings)])


def _opening(
    journey: Journey,
    policy: SubRun,
    gain: Estimate | None,
) -> tuple[tuple[str, str], list[str], bool]:
    """Tone and headline, the sentences for them, and whether a control may replace them: the own
    reward alone cannot judge.
    """
    if rate := policy.estimate("gold_win_rate"):
        count = f"{rate.count:,} comparisons" if rate.count else "comparisons"
        bounds = interval(rate, percent) or "no interval recorded"
        unclear = (
            ""
            if side(rate, 0.5)
            else "win-rate-unclear"
            if has_interval(rate)
            else "win-rate-no-interval"
        )
        name = "win-rate-few" if few(rate, percent) else "win-rate"
        words = journey.held_out_words(SAYS[name])
        sentence = words.format(rate=centre(rate, percent), count=count, interval=bounds)
        return BETTER[side(rate, 0.5)], [sentence, *([SAYS[unclear]] if unclear else [])], True
    if gain:
        tone, headline = BETTER[side(gain, 0)]
        return (
            (tone, headline if tone == "open" else f"{headline} by the gold score"),
            [SAYS["no-win-rate"]],
            True,
        )
    if not (measured := heldout_gain(policy)):
        moved = proxy_gain(policy)
        return (
            (UNJUDGED if journey.asked_for_gold else REWARDED[side(moved, 0) if moved else 0]),
            [SAYS["no-gold"]],
            True,
        )
    name, show = ("right-answers", percent) if measured.checked else ("own-reward", decimal)
    ends = {"before": centre(measured.before, show), "after": centre(measured.after, show)}
    sentences = [
        SAYS[name].format(
            count=measured.num_prompts,
            gain=_with_bounds(measured.gain, signed),
            **ends,
        ),
    ]
    sentences += [SAYS["halves"]] if measured.halves else []
    better = side(measured.gain, 0) if measured.checked else 0
    sentences += [] if better else [SAYS[f"{name}-unclear"]]
    own = UNJUDGED if journey.asked_for_gold else REWARDED[side(measured.gain, 0)]
    return BETTER[better] if measured.checked else own, sentences, measured.checked


def _bounds(value: Estimate, show: Show) -> str:
    return f" ({bounds})" if (bounds := interval(value, show)) else ""


def _with_bounds(value: Estimate, show: Show) -> str:
    return show(value.value) + _bounds(value, show)


def _part_sentences(parts: Sequence[Part]) -> Iterator[str]:
    for name, direction in (("parts-up", 1), ("parts-down", -1), ("parts-level", 0)):
        chosen = sorted(
            (part for part in parts if part.direction == direction),
            key=lambda part: -abs(part.change),
        )
        names = [f"{part.name} ({signed(part.change)})" for part in chosen[:6]] + ["…"] * (
            len(chosen) > 6
        )
        if names:
            yield SAYS[name].format(parts=", ".join(names))


def _price(policy: SubRun, reward: str) -> Iterator[str]:
    """The KL that was spent, and the reward that it bought, by the name that it has."""
    if sentence := kl_sentence(policy):
        yield sentence
    if proxy := proxy_gain(policy):
        names = {
            1: "proxy-up",
            -1: "proxy-down",
            0: "proxy-unclear" if has_interval(proxy) else "proxy-few-steps",
        }
        size = f"{decimal(abs(proxy.value))}{_bounds(proxy, signed)}"
        yield SAYS[names[side(proxy, 0)]].format(
            reward=reward,
            size=size,
            gain=_with_bounds(proxy, signed) if has_interval(proxy) else signed(proxy.value),
        )


def kl_sentence(policy: SubRun) -> str:
    """The KL that was spent, in nats and in words; empty without one."""
    if (kl := spent_kl(policy)) is None:
        return ""
    why = vague(kl.value, kl.value - kl.low if has_interval(kl) else None)
    words = why or moved_in_words(kl.value)
    return SAYS["kl-vague" if why else "kl"].format(
        kl=decimal(kl.value),
        interval=_bounds(kl, decimal),
        words=words,
    )


def _conclusion_without_policy(journey: Journey) -> Conclusion:
    sft = journey.stage("sft")
    reward = journey.stage("reward")
    direct = journey.stage("direct", "rounds")
    before = finite(sft.summary.get("eval_loss_before"))
    losses = [
        *([] if before is None else [before]),
        *(value for _, value in present(sft.metrics, "eval_loss")),
    ]
    sentences = []
    if len(losses) > 1:
        name = "sft-too-long" if min(losses) < losses[-1] - 0.01 * abs(losses[-1]) else "sft"
        first, last, lowest = map(decimal, (losses[0], losses[-1], min(losses)))
        sentences.append(SAYS[name].format(first=first, last=last, lowest=lowest))
    else:
        sentences += _losses(sft, "sft-training")
    for key, pairs in (
        ("heldout_accuracy", "held-out pairs"),
        ("gold_accuracy", wording_of_labels(journey).sentence("pairs labelled by gold")),
    ):
        if accuracy := reward.estimate(key):
            bounds = _bounds(accuracy, percent)
            sentences.append(
                SAYS["reward-model"].format(
                    accuracy=share_in_words(accuracy),
                    pairs=pairs,
                    interval=bounds,
                ),
            )
            sentences += [SAYS["reward-unclear"]] if bounds and not side(accuracy, 0.5) else []
    if not direct.name:
        return Conclusion(
            "open",
            "Before a policy is trained",
            [*sentences, SAYS["no-policy"]],
            list(doubts(journey)),
        )
    sentences += _rounds(direct)
    method = short_method(direct)
    if accuracy := direct.estimate("heldout_accuracy"):
        few_pairs = ("open", f"Trained, and only {accuracy.count} held-out pairs to judge it by")
        tone, headline = (
            few_pairs if 0 < accuracy.count < ENOUGH_PROMPTS else RANKED[side(accuracy, 0.5)]
        )
        sentences.append(
            SAYS["direct"].format(
                method=method,
                accuracy=share_in_words(accuracy),
                interval=_bounds(accuracy, percent),
            ),
        )
    else:
        tone = "open"
        headline = "Trained, and nothing held out to judge it by"
        sentences += _losses(direct, "direct-training", method) or [
            SAYS["direct-no-losses"].format(method=method),
        ]
    return Conclusion(
        tone,
        headline,
        [*sentences, SAYS["no-judge"]],
        [*alarms(direct), *doubts(journey)],
    )


def _rounds(stage: SubRun) -> Iterator[str]:
    """Number of rounds, number of pairs, and the scores of the samples at the start of each round."""
    if not stage.rounds:
        return
    pairs = sum(int(finite(one.get("num_pairs")) or 0) for one in stage.rounds)
    yield SAYS["rounds"].format(rounds=plural(len(stage.rounds), "round"), pairs=f"{pairs:,}")
    scores = [
        score
        for one in stage.rounds
        if (score := finite(mapping(one.get("sampling")).get("proxy"))) is not None
    ]
    if len(scores) > 1:
        yield SAYS["rounds-scores"].format(scores=", ".join(map(decimal, scores)))


def _losses(stage: SubRun, name: str, method: str = "") -> list[str]:
    """The sentence of this name about the first and the last losses of training; none without
    them.
    """
    course = trend_of(stage.metrics, "loss")
    return (
        [SAYS[name].format(method=method, first=decimal(course.first), last=decimal(course.last))]
        if course
        else []
    )


def loop_conclusion(loop: LoopRun) -> Conclusion:
    """The gain in gold of the last round's policy, and the rounds that lost."""
    last, count, says = loop.rounds[-1], len(loop.rounds), SENTENCES["loop"]
    title = f"{plural(count, 'round')}, {last['labels_so_far']} labels"
    gain = estimate(last["gold_gain"])
    control = control_of(last)
    outcomes = {
        1: ("open", "Better than the start model, at one temperature"),
        0: ("open", "No clear change in gold"),
        -1: ("bad", "Worse than the start model by the gold score"),
    }
    tone, words = DECODED[control["verdict"]] if control else outcomes[side(gain, 0) if gain else 0]
    sentences = [says["gain"].format(gain=bracketed(gain, signed)), *control_sentences(control)]
    gains = [
        (place, estimate(one.get("gold_gain_of_round"))) for place, one in enumerate(loop.rounds, 1)
    ]
    warnings = [
        says["lost"].format(place=place) for place, gain in gains if gain and side(gain, 0) < 0
    ]
    named = Wording(loop.judge or "gold").sentence
    headline = f"{title}: {words[0].lower()}{words[1:]}"
    return Conclusion(tone, named(headline), [*map(named, sentences)], warnings)
