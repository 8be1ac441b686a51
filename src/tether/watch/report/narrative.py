"""The verdict in plain words, all computed from the run's own numbers; warnings of the training
come from its alarms. `brief` has it in three short lines: the result and its judge, the interval, the
control. There the distance from the start comes first among the doubts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tether.core.amounts import plural
from tether.core.types import Facts
from tether.stats import Estimate, shown_difference, side, vague
from tether.watch.report.about import Judge, judge_of, judge_of_labels, short_method
from tether.watch.report.doubts import alarms, distrust, doubts
from tether.watch.report.gains import (
    Part,
    gold_gain,
    gold_parts,
    heldout_gain,
    proxy_gain,
    spent_kl,
)
from tether.watch.report.numbers import (
    SENTENCES,
    Show,
    bracketed,
    centre,
    decimal,
    has_interval,
    interval,
    moved_in_words,
    percent,
    share_in_words,
    signed,
)
from tether.watch.report.reading import (
    Journey,
    LoopRun,
    SubRun,
    estimate,
    finite,
    mapping,
    present,
    trend_of,
)

ENOUGH_PROMPTS = 10
HEADLINES = SENTENCES["headlines"]
"""Words after the numbers by what a comparison shows (`stats.shown_difference`), and `sharper` by the
control of decoding (`evaluation.decoding.verdict`).
"""
TONES = {"better": "good", "worse": "bad", "lower": "bad"}
"""Tones of the headlines that are not open."""
AT_ONE = ", both at one temperature"
SAYS = SENTENCES["says"]


@dataclass(frozen=True)
class Conclusion:
    """A word, a paragraph, and what a careful reader should doubt."""

    tone: str
    headline: str
    sentences: Sequence[str] = ()
    warnings: Sequence[str] = ()


def control_of(summary: Facts) -> Facts:
    """Part of a policy's summary on decoding, from the judge of its answers: a reward that does not
    check them judges none. Empty without such a control.
    """
    if "over_best_decoding" in summary:
        temperatures = {"by_temperature": mapping(summary, "gold_by_temperature")}
        return {**mapping(summary, "gold"), **summary, **temperatures}
    block = mapping(summary, "heldout")
    checked = "correct" in block and "over_best_decoding" in block
    return block if checked and "gold_gain" not in summary else {}


def rate_at_best(policy: SubRun) -> Estimate | None:
    """A policy's win rate against its start, each at its own best temperature."""
    over = mapping(control_of(policy.summary), "over_best_decoding")
    return estimate(over, "win_rate")


def decoding_of(temperature: object) -> str:
    """A temperature in words: 0 is greedy decoding."""
    value = finite(temperature)
    return "greedy" if value == 0 else "" if value is None else f"{value:g}"


def control_sentences(control: Facts) -> list[str]:
    """Sentences that compare the policy with the start model, each at its best temperature, and with
    the best of n answers of the start model.
    """
    over = mapping(control, "over_best_decoding")
    says = SENTENCES["decoding"]
    gain = estimate(over)
    rate = bracketed(over.get("win_rate"), percent)
    if gain is None or not rate:
        return []
    if gain.value == 0 and (gain.low == gain.high or gain.reason.endswith("are alike")):
        return [says["alike"]]
    ours, theirs = (decoding_of(over.get(key)) for key in ("policy_temperature", "temperature"))
    sentences = [
        says["best"].format(ours=ours, theirs=theirs, rate=rate, gain=bracketed(gain, signed)),
    ]
    for n, row in list(mapping(control, "best_of_n").items())[-1:]:  # the widest choice
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
    gain = gold_gain(policy)
    control = control_of(policy.summary)
    warnings = []
    judge = judge_of(journey)
    tone, headline = _opening(journey, policy, gain, judge)
    sentences = page_sentences(journey, policy, judge)
    if control:
        tone, headline = _verdict(None, None, control)
        sentences += control_sentences(control)
    elif headline.endswith(f"{AT_ONE}: {HEADLINES['better']}"):
        warnings.append(SENTENCES["warns"]["no-control"])
    if (rate := policy.estimate("gold_win_rate")) and 0 < rate.count < ENOUGH_PROMPTS:
        tone = "open"
        headline = f"Only {plural(rate.count, 'comparison')}: too few to tell"
    if gain and rate:
        sentences.append(SAYS["gold"].format(judge=judge, gain=_with_bounds(gain, signed)))
    sentences += [*_part_sentences(gold_parts(policy, journey.answers))]
    sentences += filter(None, (kl_sentence(policy), proxy_sentence(policy, journey)))
    sentences += [SAYS["facts"]] if tone == "good" and gain else []
    warnings += [*distrust(policy, gain, judge), *alarms(policy), *doubts(journey)]
    return Conclusion(tone, headline, sentences, warnings)


def _verdict(
    wins: Estimate | None,
    gain: Estimate | None,
    control: Facts | None = None,
    even: float = 0.5,
) -> tuple[str, str]:
    """Tone, and the numbers that decide with what they show; those of a control before others. Its
    word only adds that decoding may explain a gain.
    """
    over = mapping(control and control["over_best_decoding"])
    if control:
        wins = estimate(over, "win_rate")
        gain = estimate(over)
    shown = shown_difference(wins, gain, even)
    sharper = shown == "undecided" and control and control.get("verdict") == "sharper"
    words = HEADLINES["sharper" if sharper else shown]
    tone = "open" if shown == "better" and not control else TONES.get(shown, "open")
    share = bracketed(wins, percent if even else signed)
    numbers = f"{'wins' if even else 'right answers'} {share}" if share else ""
    if gain and (not numbers or shown in ("higher", "lower")):
        numbers += f"{', ' * bool(numbers)}mean score {bracketed(gain, signed)}"
    where = ", each at its best temperature" if control else AT_ONE
    text = f"{numbers}{where}: {words}" if numbers else words
    return tone, text[:1].upper() + text[1:]


def _opening(
    journey: Journey,
    policy: SubRun,
    gain: Estimate | None,
    judge: Judge,
) -> tuple[str, str]:
    """Tone and headline without a control."""
    rate = policy.estimate("gold_win_rate")
    heldout = heldout_gain(policy)
    if rate or gain:
        return _verdict(rate, gain)
    moved = heldout.gain if heldout else proxy_gain(policy)
    if heldout and heldout.checked:  # right answers win against wrong ones
        return _verdict(moved, None, even=0)
    words = " ".join(filter(None, ("Reward", bracketed(moved, signed))))
    words = f"{words}: {SAYS[f'reward{side(moved, 0)}']}"
    if journey.asked_for_gold:
        words = f"Not judged by {judge}"
    return "open", words


def page_sentences(journey: Journey, policy: SubRun, judge: Judge) -> list[str]:
    """Sentences on the measurement of held-out answers and its judge."""
    heldout = heldout_gain(policy)
    measured = measured_sentence(journey, policy, judge)
    if not measured:
        return [SAYS["no-gold"]]
    if policy.estimate("gold_win_rate"):
        return [measured, SAYS["judged"].format(judge=judge)]
    if gold_gain(policy):
        return [measured, SAYS["no-win-rate"].format(judge=judge)]
    halves = [SAYS["halves"]] * bool(heldout and heldout.halves)
    return [
        measured,
        *halves,
        *[SAYS["own-reward-unclear"]] * bool(heldout and not heldout.checked),
    ]


def measured_sentence(journey: Journey, policy: SubRun, judge: Judge) -> str:
    """The result on held-out prompts with its 95% interval; empty where none was judged."""
    if rate := policy.estimate("gold_win_rate"):
        shown = centre(rate, percent)
        count = f"{rate.count:,} " if rate.count else ""
        # of few the count stands there already
        share = f"{shown} comparisons" if " of " in shown else f"{shown} of {count}comparisons"
        won = SAYS["won-trained-on" if journey.trained_on else "won"]
        return won.format(share=share, interval=_bounds(rate, percent), **journey.trained_on)
    if gain := gold_gain(policy):
        words = journey.held_out_words(SAYS["gold-gain"])
        return words.format(judge=judge, gain=_with_bounds(gain, signed))
    if measured := heldout_gain(policy):
        name, show = ("right-answers", percent) if measured.checked else ("own-reward", decimal)
        return SAYS[name].format(
            count=measured.num_prompts,
            gain=_with_bounds(measured.gain, signed),
            before=centre(measured.before, show),
            after=centre(measured.after, show),
        )
    return ""


def _bounds(value: Estimate, show: Show) -> str:
    return f" ({bounds})" if (bounds := interval(value, show)) else ""


def _with_bounds(value: Estimate, show: Show) -> str:
    return show(value.value) + _bounds(value, show)


def _part_sentences(parts: Sequence[Part]) -> Iterator[str]:
    for direction in (1, -1, 0):
        chosen = sorted(
            (part for part in parts if part.direction == direction),
            key=lambda part: -abs(part.change),
        )
        names = [f"{part.name} ({signed(part.change)})" for part in chosen[:6]] + ["…"] * (
            len(chosen) > 6
        )
        if names:
            yield SAYS[f"parts{direction}"].format(parts=", ".join(names))


def proxy_sentence(policy: SubRun, journey: Journey) -> str:
    """The movement of the reward that was trained, by the name that it has; empty without one."""
    if (proxy := proxy_gain(policy)) is None:
        return ""
    name = f"proxy{side(proxy, 0)}" if has_interval(proxy) else "proxy-few-steps"
    return SAYS[name].format(
        reward=SAYS["reward" if journey.own_reward else "proxy"],
        size=f"{decimal(abs(proxy.value))}{_bounds(proxy, signed)}",
        gain=_with_bounds(proxy, signed),
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
    losses = [value for _, value in present(sft.metrics, "eval_loss")]
    sentences = []
    if len(losses) > 1:
        name = "sft-too-long" if min(losses) < losses[-1] - 0.01 * abs(losses[-1]) else "sft"
        first, last, lowest = map(decimal, (losses[0], losses[-1], min(losses)))
        sentences.append(SAYS[name].format(first=first, last=last, lowest=lowest))
    else:
        sentences += _losses(sft, "sft-training")
    for key, pairs in (
        ("heldout_accuracy", "held-out pairs"),
        ("gold_accuracy", f"pairs labelled by {judge_of_labels(journey)}"),
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
        first, *others = *sentences, SAYS["no-policy"]
        return Conclusion("open", first.removesuffix("."), others, list(doubts(journey)))
    sentences += _rounds(direct)
    method = short_method(direct)
    if accuracy := direct.estimate("heldout_accuracy"):
        shown = side(accuracy, 0.5)
        tone = "bad" if shown < 0 else "open"
        words = SAYS[f"ranked{shown}"]
        headline = f"Held-out pairs ranked right {bracketed(accuracy, percent)}: {words}"
        if 0 < accuracy.count < ENOUGH_PROMPTS:
            tone = "open"
            headline = f"Trained, and only {plural(accuracy.count, 'held-out pair')} to judge it by"
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
    pairs = sum(int(finite(one, "num_pairs") or 0) for one in stage.rounds)
    yield SAYS["rounds"].format(rounds=plural(len(stage.rounds), "round"), pairs=f"{pairs:,}")
    scores = [
        score for one in stage.rounds if (score := finite(one, "sampling", "proxy")) is not None
    ]
    if len(scores) > 1:
        yield SAYS["rounds-scores"].format(scores=", ".join(map(decimal, scores)))


def _losses(stage: SubRun, name: str, method: str = "") -> list[str]:
    """The sentence of this name about the first and the last losses of training, or one about those
    of the rounds; none without them.
    """
    each = [loss for one in stage.rounds if (loss := finite(one, "train_loss")) is not None]
    if each:
        return [SAYS["rounds-losses"].format(losses=", ".join(map(decimal, each)))]
    course = trend_of(stage.metrics, "loss")
    return (
        [SAYS[name].format(method=method, first=decimal(course.first), last=decimal(course.last))]
        if course
        else []
    )


def loop_conclusion(loop: LoopRun) -> Conclusion:
    """The gain in gold of the last round's policy, and the rounds that lost."""
    last = loop.rounds[-1]
    count = len(loop.rounds)
    says = SENTENCES["loop"]
    title = f"{plural(count, 'round')}, {last['labels_so_far']} labels"
    gain = estimate(last["gold_gain"])
    control = control_of(last)
    tone, words = _verdict(estimate(last, "gold_win_rate"), gain, control)
    judge = Judge(loop.judge)
    sentences = [
        says["gain"].format(judge=judge, gain=bracketed(gain, signed)),
        *control_sentences(control),
    ]
    warnings = [
        says["lost"].format(place=place)
        for place, one in enumerate(loop.rounds, 1)
        if side(estimate(one, "gold_gain_of_round"), 0) < 0
    ]
    headline = f"{title}: {words[0].lower()}{words[1:]}"
    return Conclusion(tone, headline, sentences, warnings)


WORDS = SENTENCES["brief"]


def brief(journey: Journey, how: str = "") -> Conclusion:
    """The page's verdict without its paragraph; that of a run without a judged policy is short as
    it is.

    Args:
        how: the command that has the answers judged, for a run in which nothing judged any.
    """
    whole = conclusion(journey)
    policy = journey.judged
    line = WORDS["how"].format(how=how) if how else WORDS["not-judged"]
    if not policy.name:
        if not how or not (journey.policies or journey.stage("sft").name):
            return whole
        advised = (SAYS["no-policy"], SAYS["no-judge"])  # other ways
        sentences = [sentence for sentence in whole.sentences if sentence not in advised]
        return replace(whole, sentences=[*sentences, line])
    judge = judge_of(journey)
    headline = WORDS["result"].format(headline=whole.headline, judge=judge_in_words(journey))
    if measured := measured_sentence(journey, policy, judge):
        judged = gold_gain(policy) or policy.estimate("gold_win_rate")
        own = {} if judged else mapping(policy.summary, "heldout")
        sentences = [measured, *control_sentences(control_of(policy.summary) or own)[:1]]
    else:
        sentences = [proxy_sentence(policy, journey), line]
    warnings = [kl_sentence(policy), *whole.warnings]
    return Conclusion(whole.tone, headline, [*filter(None, sentences)], [*filter(None, warnings)])


def judge_in_words(journey: Journey) -> str:
    """The judge of the numbers that decide."""
    policy = journey.judged
    judge = judge_of(journey)
    if gold_gain(policy) or policy.estimate("gold_win_rate"):
        if judge.is_reward:
            return WORDS["own-judge"].format(name=judge.name)
        return f"gold ({judge.name})" if judge.is_gold and judge.name else f"{judge}"
    measured = heldout_gain(policy)
    if measured is None:
        return WORDS["training-reward"]
    return WORDS["checked" if measured.checked else "held-out-reward"]
