"""The verdict in plain words, the key numbers, and the warnings, all computed from the run's own numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from tether.core.trend import vague
from tether.report import decoding
from tether.report.reading import Estimate, Journey, SubRun, ends, estimate, kl_key, mapping, moved, number, present, printable

ENOUGH_ANSWERS = 10
NO_CONTROL = (
    "Both sides answered at one temperature. A lower one often makes the model before better for nothing, and how much was not "
    "measured: part of this gain, or all of it, may be that."
)
Show = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A word, a paragraph, and what a careful reader should doubt."""

    tone: str
    headline: str
    sentences: Sequence[str]
    warnings: Sequence[str]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the gold score before and after; `noise` is half the interval of its change, where it is known."""

    name: str
    before: float
    after: float
    noise: float | None

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def direction(self) -> int:
        """+1 risen, -1 fallen, 0 no clear change."""
        floor = 0.01 * max(abs(self.before), abs(self.after)) if self.noise is None else self.noise
        return 0 if abs(self.change) <= floor else (1 if self.change > 0 else -1)


def decimal(value: float, signed: bool = False) -> str:
    """A number for people: about three digits, all of a large one, a real minus sign."""
    size = abs(value)
    places = 4 if size < 1e-3 else 3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0
    text = "0" if size == 0 else (f"{size:.1e}" if size < 1e-4 else f"{size:,.{places}f}")
    sign = "−" if value < 0 else ("+" if signed and value > 0 else "")
    return sign + text


def signed(value: float) -> str:
    return decimal(value, True)


def whole(value: float) -> str:
    return f"{value:,.0f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}%".replace("-", "−")


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def interval(found: Estimate, show: Show = decimal) -> str:
    return "" if found.low is None or found.high is None else f"interval {show(found.low)} to {show(found.high)}"


def _bounds(found: Estimate, show: Show, more: str = "") -> str:
    return f" ({interval(found, show)}{more})" if interval(found, show) else ""


def bracketed(found: Mapping[str, float] | None, show: Show) -> str:
    """`value [low, high]` of an estimate as files have it; empty without one."""
    return f"{show(found['value'])} [{show(found['low'])}, {show(found['high'])}]" if found else ""


def gold_gain(policy: SubRun) -> Estimate | None:
    """The gain of the summary, else the last gold score less the first."""
    values = [value for _, value in present(policy.metrics, "gold/score")]
    return estimate(policy.summary.get("gold_gain")) or (Estimate(values[-1] - values[0]) if len(values) > 1 else None)


def proxy_gain(policy: SubRun) -> Estimate | None:
    """The gain of the summary, else of the metrics, from which an interval comes where the summary has none."""
    found, of_steps = estimate(policy.summary.get("proxy_gain")), moved(policy.metrics, "reward/proxy")
    own = estimate(of_steps.gain) if of_steps else None
    if found is None or own is None or own.low is None or own.high is None or found.low is not None:
        return found or own
    return Estimate(found.value, found.value + own.low - own.value, found.value + own.high - own.value)


def spent_kl(policy: SubRun) -> Estimate | None:
    """The KL of the summary, else over the last steps, with its interval where there is one."""
    found, of_steps = estimate(policy.summary.get("kl")), moved(policy.metrics, kl_key(policy.metrics))
    found = found or (Estimate(of_steps.last) if of_steps else None)
    noise = number(policy.summary.get("kl_noise")) or (of_steps.noise if of_steps else None)
    if found is None or noise is None or found.low is not None:
        return found
    return Estimate(found.value, found.value - noise, found.value + noise)


def _kl_sentence(kl: Estimate) -> str:
    why = vague(kl.value, None if kl.low is None else kl.value - kl.low)
    moved_by = f"The policy moved {decimal(kl.value)} nats of KL per response{_bounds(kl, decimal)} away from its reference"
    return f"{moved_by}{f', {why}' if why else ''}."


def _proxy_sentence(proxy: Estimate) -> str:
    what = "The proxy, the reward that training maximised,"
    if proxy.low is None:
        return f"{what} changed by {signed(proxy.value)} between the first and the last steps, too few to tell it from noise."
    if proxy.contains(0):
        doubt = "which does not show that it rose or fell"
        return f"{what} changed by {signed(proxy.value)}{_bounds(proxy, signed)}, {doubt}."
    return f"{what} {'rose' if proxy.value > 0 else 'fell'} by {decimal(abs(proxy.value))}{_bounds(proxy, signed)}."


def gold_parts(journey: Journey) -> list[Part]:
    """The parts of the gold score from the policy's summary, or else as means over the evaluated answers."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    by_prompt: dict[str, dict[Any, list[float]]] = {}
    for index, answer in enumerate(journey.answers):
        before, after = mapping(answer.get("parts_before")), mapping(answer.get("parts_after"))
        for name in before:
            first, second = number(before[name]), number(after.get(name))
            if first is not None and second is not None:
                pairs.setdefault(name, []).append((first, second))
                by_prompt.setdefault(name, {}).setdefault(str(answer.get("id", index)), []).append(second - first)
    noise = {name: _half_interval(changes) for name, changes in by_prompt.items() if len(changes) >= ENOUGH_ANSWERS}
    stored = mapping(journey.policy.summary.get("gold_parts")) if journey.policy else {}
    found = [(name, number(mapping(v).get("before")), number(mapping(v).get("after"))) for name, v in stored.items()]
    found = found or [(name, fmean(a for a, _ in p), fmean(b for _, b in p)) for name, p in pairs.items()]
    return [Part(printable(name, 60), a, b, noise.get(name)) for name, a, b in found if a is not None and b is not None]


def _half_interval(changes: Mapping[Any, Sequence[float]]) -> float:
    """Half the 95% interval of the mean change; several samples of one prompt are not independent, so prompts count."""
    means = [fmean(samples) for samples in changes.values()]
    return 1.96 * stdev(means) / len(means) ** 0.5


def verdict(journey: Journey) -> Verdict:
    """Did it get better, by what, at which price, and what got worse."""
    policy = journey.policy
    if policy is None:
        return _verdict_without_policy(journey)
    rate, gain = estimate(policy.summary.get("gold_win_rate")), gold_gain(policy)
    checked = None if rate or gain else heldout(policy)
    tone, headline, opening = _checked(checked) if checked else _judgement(rate, gain)
    control, sentences, alone = decoding.control_of(policy.summary), [opening], []
    if control and (checked is None or checked.true):
        tone, headline = decoding.WORDS[control["verdict"]]
        sentences += decoding.sentences(control)
    elif tone == "good":
        tone, headline, alone = "open", f"{headline}, at one temperature", [NO_CONTROL]
    if gain:
        sentences.append(f"The gold score changed by {signed(gain.value)}{_bounds(gain, signed)}.")
    sentences += _part_sentences(gold_parts(journey))
    kl, proxy = spent_kl(policy), proxy_gain(policy)
    if kl is not None:
        sentences.append(_kl_sentence(kl))
    if proxy is not None:
        sentences.append(_proxy_sentence(proxy))
    warnings = _policy_warnings(policy, gain, proxy) + _reward_warnings(journey.reward)
    return Verdict(tone, headline, sentences, [*alone, *warnings, *_left_out(journey)])


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The training's own reward on prompts that it never saw; `true`: the reward is a checked answer and no model's guess.

    `apart`: the step was chosen for its score, and each half of the prompts is told at the step that the other half chose.
    """

    before: Estimate
    after: Estimate
    gain: Estimate
    num_prompts: int
    true: bool
    apart: bool = False


def heldout(policy: SubRun) -> HeldOut | None:
    """What the run's summary says of held-out prompts: the share of right answers, where answers are checked."""
    stored = mapping(policy.summary.get("heldout"))
    true = "correct" in stored
    values = mapping(stored.get("correct" if true else "score"))
    known = [found for key in ("before", "after", "gain") if (found := estimate(values.get(key)))]
    prompts = int(number(stored.get("num_prompts")) or 0)
    apart = stored.get("judged_by") == "the prompts that did not choose the step"
    return HeldOut(known[0], known[1], known[2], prompts, true, apart) if len(known) == 3 else None


def _checked(found: HeldOut) -> tuple[str, str, str]:
    show = percent if found.true else decimal
    what = "answers that are right" if found.true else "the reward that training maximised"
    text = (
        f"On {found.num_prompts:,} held-out prompts {what} went from {show(found.before.value)} to {show(found.after.value)}; "
        f"change {signed(found.gain.value)}{_bounds(found.gain, signed)}."
    )
    if found.apart:
        text += (
            " The weights with the highest score were kept: each half of the prompts is judged at the step the other half chose."
        )
    if not found.true:
        return "open", "Not judged by gold", f"{text} Nothing here says whether the answers got better; that reward cannot tell."
    if found.gain.low is None or found.gain.contains(0):
        return "open", "Not shown to be better", f"{text} The interval contains 0, so this run does not show a difference."
    return ("good", "Better", text) if found.gain.value > 0 else ("bad", "Worse", text)


def _judgement(rate: Estimate | None, gain: Estimate | None) -> tuple[str, str, str]:
    if rate is None and gain is None:
        text = "No gold score was recorded, so nothing here says whether the answers got better; the proxy cannot tell."
        return "open", "Not judged by gold", text
    if rate is None:
        text = "No gold win rate was recorded; the change of the gold score is all there is to judge by."
        if gain is None or gain.low is None or gain.contains(0):
            return "open", "Not shown to be better", text
        return ("good", "Better by the gold score", text) if gain.value > 0 else ("bad", "Worse by the gold score", text)
    of = f"{rate.count:,} comparisons" if rate.count else "comparisons"
    none = "; 50% is no difference"
    wins = (
        f"judged by gold, the trained model's answers beat those from before in {percent(rate.value)} of {of} on held-out prompts"
        f"{_bounds(rate, percent, none) or f' (no interval recorded{none})'}"
    )
    if rate.contains(0.5):
        why = "The interval contains 50%, so" if interval(rate) else "Without an interval,"
        return "open", "Not shown to be better", f"{wins[0].upper()}{wins[1:]}. {why} this run does not show a difference."
    tone, headline = ("good", "Better") if rate.value > 0.5 else ("bad", "Worse")
    return tone, headline, f"{wins[0].upper()}{wins[1:]}."


def _part_sentences(parts: Sequence[Part]) -> list[str]:
    sentences = []
    for direction, head in ((1, "What improved"), (-1, "What got worse"), (0, "No clear change")):
        chosen = sorted((p for p in parts if p.direction == direction), key=lambda p: -abs(p.change))
        listed = ", ".join(f"{p.name} ({signed(p.change)})" for p in chosen[:6]) + (", …" if len(chosen) > 6 else "")
        sentences += [f"{head}: {listed}."] if chosen else []
    return sentences


def _policy_warnings(policy: SubRun, gain: Estimate | None, proxy: Estimate | None) -> list[str]:
    rows = policy.metrics
    rose = proxy is not None and (proxy.value if proxy.low is None else proxy.low) > 0
    if proxy is not None and rose and gain is not None and (gain.value if gain.high is None else gain.high) < 0:
        warnings = [
            f"Distrust the proxy: it rose by {decimal(proxy.value)} while the gold score fell by {decimal(-gain.value)}. The "
            "policy learnt what the reward model likes, not what the gold score measures; stop earlier, raise the KL coefficient "
            "or mend the reward."
        ]
    else:
        warnings = _past_the_peak(policy)
    length = ends(rows, "response/length")
    if length and length[0] > 0 and not 0.7 < length[1] / length[0] < 1.4:
        word = "longer" if length[1] > length[0] else "shorter"
        warnings.append(f"Responses became {word}: from {decimal(length[0])} to {decimal(length[1])} tokens. Is it wanted?")
    if (entropy := ends(rows, "policy/entropy")) and entropy[1] < 0.4 * entropy[0]:
        warnings.append(f"Entropy fell from {decimal(entropy[0])} to {decimal(entropy[1])} nats per token: answers lose variety.")
    if (distinct := ends(rows, "response/distinct_2")) and distinct[1] < 0.75 * distinct[0]:
        warnings.append(f"Distinct bigrams fell from {percent(distinct[0])} to {percent(distinct[1])}: responses repeat.")
    if (stops := ends(rows, "response/stop_rate")) and stops[1] < 0.5:
        warnings.append(f"Only {percent(stops[1])} of the last responses end by themselves; the others hit the length limit.")
    if failed := sum(value for _, value in present(rows, "reward/failed")):
        warnings.append(f"{whole(failed)} rewards failed during training and were left out.")
    if (off := max((value for _, value in present(rows, "policy/first_ratio_deviation")), default=0.0)) > 0.01:
        warnings.append(f"Before any update the ratio is off 1 by up to {decimal(off)}: rollout and training numerics differ.")
    return warnings


def _past_the_peak(policy: SubRun) -> list[str]:
    points = present(policy.metrics, "gold/score")
    if len(points) < 4:
        return []
    peak_step, peak = max(points, key=lambda point: point[1])
    first, last = points[0][1], points[-1][1]
    span = ends([row for row in policy.metrics if (number(row.get("step")) or 0) >= peak_step], "reward/proxy")
    if peak - last <= 0.25 * (peak - first) or not span or span[1] <= span[0]:
        return []
    return [
        f"Distrust the last steps: gold was highest at step {peak_step:.0f} ({decimal(peak)}) and ended at {decimal(last)} while "
        f"the proxy went from {decimal(span[0])} to {decimal(span[1])}. One evaluation is noisy, but a checkpoint nearer to that "
        "step may be the better model."
    ]


def _reward_warnings(reward: SubRun | None) -> list[str]:
    warnings, summary = [], reward.summary if reward else {}
    accuracy = estimate(summary.get("gold_accuracy"))
    if accuracy and accuracy.low is not None and accuracy.contains(0.5):
        warnings.append(f"The reward model agrees with gold on {percent(accuracy.value)} of pairs, not clearly more than chance.")
    correlation = number(mapping(summary.get("length_correlation")).get("pearson"))
    if correlation is not None and abs(correlation) >= 0.4:
        which = "longer" if correlation > 0 else "shorter"
        told = f"The reward model's score goes with length (r = {decimal(correlation)})"
        warnings.append(f"{told}: {which} answers score higher, deserved or not.")
    return warnings


def _left_out(journey: Journey) -> Iterator[str]:
    """What a stage did not learn from, of what it was given."""
    for stage in journey.stages:
        if steps := number(stage.summary.get("steps_left_out")):
            yield f"{stage.name}: in {whole(steps)} steps an update was left out, since its loss or gradient was not finite."
        if rows := number(mapping(stage.summary.get("quarantine")).get("count")):
            yield f"{stage.name}: {whole(rows)} rows of its data could not be used and were set aside."


def _verdict_without_policy(journey: Journey) -> Verdict:
    sentences = []
    sft = [value for _, value in present(journey.sft.metrics, "eval_loss")] if journey.sft else []
    if len(sft) > 1:
        text = f"Supervised fine-tuning brought the held-out loss from {decimal(sft[0])} to {decimal(sft[-1])} nats per token"
        rose = min(sft) < sft[-1] - 0.01 * abs(sft[-1])
        sentences.append(text + (f", after a lowest value of {decimal(min(sft))}: it trained too long." if rose else "."))
    elif journey.sft and (span := ends(journey.sft.metrics, "loss")):
        sentences.append(f"Supervised fine-tuning brought the training loss from {decimal(span[0])} to {decimal(span[1])}.")
    for key, name in (("heldout_accuracy", "held-out pairs"), ("gold_accuracy", "pairs labelled by gold")):
        if found := estimate(journey.reward.summary.get(key)) if journey.reward else None:
            bounds = _bounds(found, percent)
            doubt = " The interval contains 50%: not shown to beat chance." if bounds and found.contains(0.5) else ""
            sentences.append(f"The reward model ranks {percent(found.value)} of {name} right{bounds}.{doubt}")
    if journey.direct:
        sentences.append(_direct_sentence(journey.direct))
    sentences.append("There is no reinforcement learning stage here, so no judgement on answers.")
    headline = "Trained without reinforcement learning" if journey.direct else "Before reinforcement learning"
    return Verdict("open", headline, sentences, [*_reward_warnings(journey.reward), *_left_out(journey)])


def _direct_sentence(direct: SubRun) -> str:
    found, span = estimate(direct.summary.get("heldout_accuracy")), ends(direct.metrics, "loss")
    if found:
        ranked = f"After direct optimisation the policy ranks {percent(found.value)} of held-out pairs as people did"
        return f"{ranked}{_bounds(found, percent)}."
    if span:
        brought = f"Direct optimisation brought the training loss from {decimal(span[0])} to {decimal(span[1])}"
        return f"{brought}; nothing was held out."
    return "Direct optimisation ran, and left no losses."
