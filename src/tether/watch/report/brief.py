"""The verdict of a run in three short lines: the result and its judge, the interval, the control.
The distance from the start comes first among the doubts.
"""

from __future__ import annotations

from dataclasses import replace

from tether.watch.report.about import Judge, judge_of
from tether.watch.report.gains import gold_gain, heldout_gain
from tether.watch.report.narrative import (
    SAYS,
    Conclusion,
    conclusion,
    control_of,
    control_sentences,
    kl_sentence,
    measured_sentence,
    proxy_sentence,
)
from tether.watch.report.numbers import SENTENCES
from tether.watch.report.reading import Journey, SubRun

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
    headline = WORDS["result"].format(headline=whole.headline, judge=_judge(judge, policy))
    if measured := measured_sentence(journey, policy, judge):
        sentences = [measured, *control_sentences(control_of(policy.summary))[:1]]
    else:
        sentences = [proxy_sentence(policy, journey), line]
    warnings = [kl_sentence(policy), *whole.warnings]
    return Conclusion(whole.tone, headline, [*filter(None, sentences)], [*filter(None, warnings)])


def _judge(judge: Judge, policy: SubRun) -> str:
    if gold_gain(policy) or policy.estimate("gold_win_rate"):
        if judge.is_reward:
            return WORDS["own-judge"].format(name=judge.name)
        return f"gold ({judge.name})" if judge.is_gold and judge.name else f"{judge}"
    measured = heldout_gain(policy)
    if measured is None:
        return WORDS["training-reward"]
    return WORDS["checked" if measured.checked else "held-out-reward"]
