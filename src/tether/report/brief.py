"""The verdict of a run in three short lines: the result and its judge, the interval, the control.
The distance from the start comes first among the doubts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tether.report.about import judge_of
from tether.report.gains import gold_gain, heldout_gain, proxy_gain
from tether.report.narrative import Conclusion, at_temperature, conclusion, control_of, kl_sentence
from tether.report.numbers import (
    SENTENCES,
    TOO_FEW,
    Show,
    bracketed,
    centre,
    decimal,
    interval,
    percent,
    signed,
)
from tether.report.reading import Journey, SubRun, estimate, mapping, printable
from tether.report.wording import wording_of

SAYS = SENTENCES["brief"]


def brief(journey: Journey, how: str = "") -> Conclusion:
    """The page's verdict without its paragraph; that of a run without a judged policy is short as
    it is.

    Args:
        how: the command that has the answers judged, for a run in which nothing judged any.
    """
    whole = conclusion(journey)
    policy = journey.judged
    if not policy.name:
        if not how or not (journey.policies or journey.stage("sft").name):
            return whole
        line = SAYS["how"].format(how=how)
        return replace(whole, sentences=[*whole.sentences, line])
    headline = SAYS["result"].format(headline=whole.headline, judge=_judge(journey, policy))
    return Conclusion(
        whole.tone,
        headline,
        [*map(wording_of(journey).sentence, _measured(journey, policy)), *_controlled(policy, how)],
        [*filter(None, (kl_sentence(policy),)), *whole.warnings],
    )


def is_judged(policy: SubRun) -> bool:
    """True where held-out answers were scored, by gold or by the training's own reward."""
    return bool(policy.estimate("gold_win_rate") or gold_gain(policy) or heldout_gain(policy))


def _judge(journey: Journey, policy: SubRun) -> str:
    if gold_gain(policy) or policy.estimate("gold_win_rate"):
        name = printable(judge_of(journey)[0], 60)
        wording = wording_of(journey)
        if wording.is_reward:
            return SAYS["own-judge"].format(name=name)
        if not wording.is_gold:
            return name
        return SAYS["gold-named" if name else "gold"].format(name=name)
    measured = heldout_gain(policy)
    return SAYS[
        "training-reward"
        if measured is None
        else "checked"
        if measured.checked
        else "held-out-reward"
    ]


def _shown(value: object, show: Show) -> str:
    """`value [low, high]`; of too few, words in the place of an interval."""
    return bracketed(value, show).replace(f"[{TOO_FEW}]", "(too few for an interval)")


def _measured(journey: Journey, policy: SubRun) -> Iterator[str]:
    """Measured results, with their 95% intervals."""
    if rate := policy.estimate("gold_win_rate"):
        count = f"{rate.count:,} comparisons" if rate.count else "comparisons"
        of = SAYS["interval"].format(interval=bounds) if (bounds := interval(rate, percent)) else ""
        shown = centre(rate, percent)
        # of few the count stands there already
        share = f"{shown} comparisons" if " of " in shown else f"{shown} of {count}"
        won = SAYS["won-trained-on" if journey.trained_on else "won"]
        yield won.format(share=share, interval=of, **journey.trained_on)
    elif gain := gold_gain(policy):
        yield journey.held_out_words(SAYS["gold-gain"]).format(gain=_shown(gain, signed))
    elif measured := heldout_gain(policy):
        show = percent if measured.checked else decimal
        ends = {"before": centre(measured.before, show), "after": centre(measured.after, show)}
        yield SAYS["held-out"].format(
            count=measured.num_prompts,
            gain=_shown(measured.gain, signed),
            **ends,
        )
    elif proxy := proxy_gain(policy):
        yield SAYS["training"].format(gain=_shown(proxy, signed))


def _controlled(policy: SubRun, how: str) -> Iterator[str]:
    """The gain over decoding alone, or the way to have the answers judged."""
    over = mapping(control_of(policy.summary).get("over_best_decoding"))
    rate = _shown(over.get("win_rate"), percent)
    gain = estimate(over)
    if rate and gain:
        sides = {
            "ours": at_temperature(over.get("policy_temperature")).removeprefix("at temperature "),
            "theirs": at_temperature(over.get("temperature")).removeprefix("at temperature "),
        }
        yield SAYS["control"].format(rate=rate, gain=_shown(gain, signed), **sides)
    elif is_judged(policy):
        yield SAYS["no-control"]
    else:
        yield SAYS["how"].format(how=how) if how else SAYS["not-judged"]
