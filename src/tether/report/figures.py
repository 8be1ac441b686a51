"""The figures of a run: the reward against its price and against the truth, the reward model's worth, losses, time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tether.report.plotting import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    PALETTE,
    PURPLE,
    SKY,
    VERMILLION,
    Figure,
    Trace,
    axis,
    guide,
    label,
    layout,
    line,
    marks,
    plot,
    rounded,
    thin,
)  # fmt: skip
from tether.report.reading import Estimate, SubRun, estimate, kl_key, mapping, number, present, series

STEP = "step"
CURVES = (
    ("heldout/score", "Held-out score", "reward", "The training's own reward on prompts that it never sees."),
    ("heldout/correct", "Held-out, right", "share of answers", "Checked answers to prompts that are never trained on."),
    ("test/score", "Held-out, by the test model", "reward", "A reward model of other labels, which training does not see."),
    ("sycophancy/shift", "Sycophancy", "shift of probability", "How far answers follow what the asker seems to believe."),
    ("response/length", "Response length", "tokens", "Growth without a gain in gold is the commonest way to cheat a reward."),
    ("response/stop_rate", "Stop rate", "share of responses", "Responses that end by themselves; a fall: they hit the limit."),
    ("policy/entropy", "Policy entropy", "nats per token", "A slow fall is learning; a fall to near zero is collapse."),
    ("response/distinct_2", "Distinct bigrams", "share of bigrams", "A fall: responses repeat themselves or each other."),
)
HEALTH = (
    ("policy/clip_fraction", "Clip fraction", "share of tokens", "Above about 0.3 the steps are too large."),
    ("policy/approximate_kl", "KL of one update", "nats per token", "Old policy to new within one step; spikes: unstable steps."),
    ("policy/ratio_max", "Largest ratio", "new / old probability", "Single tokens far from 1 are where clipping works."),
    ("policy/first_ratio_deviation", "Ratio before any update", "|ratio − 1|", "Only rounding, or old and new numerics differ."),
    ("value/explained_variance", "Explained variance", "share", "Should rise above 0: the value head predicts the return."),
    ("value/loss", "Value loss", "squared return", "Should settle; a jump often follows a jump of the reward."),
    ("kl/coefficient", "KL coefficient", "reward per nat", "Constant if fixed; if adaptive, it should settle."),
    ("reward/proxy_std", "Spread of the proxy", "reward", "Near zero, all responses score alike and nothing is learnt."),
    ("grad_norm", "Gradient norm", "norm before clipping", "Spikes announce divergence."),
)  # fmt: skip
THROUGHPUT = ("tokens_per_second", "Throughput", "tokens per second", "Should be level; a fall means waiting or swapping.")
PHASES = (("rollout", BLUE), ("reward", ORANGE), ("evaluate", GREEN), ("update", PURPLE))
AGREEMENTS = (
    ("annotator_agreement", "annotator, annotator"),
    ("annotator_gold_agreement", "annotator, gold"),
    ("majority_gold_agreement", "majority, gold"),
)
COIN = "Starts near ln 2 ≈ 0.69, the loss of a coin; near zero in training is memorising."
FALLING = "The held-out loss should fall with the training loss; when it turns up, stop earlier."
APART = "Training pairs ranked far better than held-out ones are memorised."
LEAD = "The mean lead of the chosen response; it should rise and level off."


def policy_figures(arms: Sequence[SubRun]) -> list[Figure]:
    """Proxy reward and KL on one step axis, the arms over each other."""
    data: list[Trace] = []
    for index, arm in enumerate(arms):
        proxy_colour, kl_colour = _colours(arms, index)
        data += _line(arm, "reward/proxy", _name(arms, arm, "proxy reward"), proxy_colour)
        data += _line(arm, kl_key(arm.metrics), _name(arms, arm, "KL"), kl_colour, dash="dot", axis="y2")
    caption = "Look for a reward that rises while the KL (dotted) levels off; a KL that keeps climbing is drift."
    drawn = layout(axis(STEP), axis("proxy reward"), axis("KL (nats per response)", rangemode="tozero"))
    return plot("reward-kl", "Proxy reward and its price", caption, data, drawn, 400)


def goodhart_figures(arms: Sequence[SubRun]) -> list[Figure]:
    """Proxy against gold, over the square root of the KL and over steps; nothing without gold."""
    gold = [arm for arm in arms if series(arm.metrics, "gold/score")[0]]
    by_step: list[Trace] = []
    by_distance: list[Trace] = []
    hover = "√KL %{x:.3g}: %{y:.4g}"
    for index, arm in enumerate(gold):
        proxy_colour, gold_colour = _colours(gold, index)
        proxy, truth = _name(gold, arm, "proxy"), _name(gold, arm, "gold")
        # Where it is known, the proxy of the very answers that gold judged.
        key = "gold/proxy" if series(arm.metrics, "gold/proxy")[0] else "reward/proxy"
        by_step += _line(arm, key, proxy, proxy_colour, dash="dot", width=1.4)
        scores = _present(arm, "gold/score")
        by_step.append(line(*scores, truth, gold_colour, mode="lines+markers", axis="y2", width=2.2))
        if (points := _over_distance(arm, key))[0]:
            by_distance.append(marks(*points, proxy, proxy_colour, hover=hover, marker={"size": 4, "opacity": 0.55}))
        if (points := _over_distance(arm, "gold/score"))[0]:
            by_distance.append(line(*points, truth, gold_colour, mode="lines+markers", axis="y2", width=2.2, hover=hover))
    left, right = axis("proxy reward"), axis("gold score, held-out prompts")
    distance = layout(axis("√KL from the reference (√nats per response)", rangemode="tozero"), left, right)
    caption = "Proxy up and gold level or down to the right: the policy is gaming the reward model beyond that distance."
    turn = "The step where gold (line with marks) turns down while the proxy (dotted) still climbs is where to stop."
    return [
        *plot("goodhart-distance", "Proxy and gold over distance from the reference", caption, by_distance, distance, 380),
        *plot("goodhart-steps", "Proxy and gold over steps", turn, by_step, layout(axis(STEP), left, right), 380),
    ]


def curve_figures(arms: Sequence[SubRun], curves: Sequence[tuple[str, str, str, str]], prefix: str) -> list[Figure]:
    """One small figure a metric, the arms over each other."""
    figures = []
    for key, title, unit, caption in curves:
        data = [t for i, arm in enumerate(arms) for t in _line(arm, key, arm.name, PALETTE[i % len(PALETTE)])]
        positive = all(value is None or value >= 0 for trace in data for value in trace["y"])
        drawn = layout(axis(STEP), axis(unit, rangemode="nonnegative" if positive else "normal"), showlegend=len(data) > 1)
        figures += plot(f"{prefix}-{key.replace('/', '-')}", title, caption, data, drawn, 260)
    return figures


def parts_figures(parts: Sequence[tuple[str, float, float]], arms: Sequence[tuple[str, dict[str, float]]]) -> list[Figure]:
    """A dumbbell a part of the gold score, before to after; other arms as open marks."""
    places = range(len(parts))

    def row(values: Sequence[float], rows: Sequence[int], name: str, colour: str, symbol: str, size: int) -> Trace:
        marker = {"size": size, "symbol": symbol, "line": {"width": 2, "color": colour}}
        return marks(values, rows, name, colour, hover="%{x:.4g}", marker=marker)

    rods = [point for place, (_, before, after) in zip(places, parts, strict=True)
            for point in ((before, place), (after, place), (None, None))]  # fmt: skip
    data = [
        line([x for x, _ in rods], [y for _, y in rods], "", MUTED, width=3, showlegend=False, hoverinfo="skip"),
        row([before for _, before, _ in parts], places, "before", MUTED, "circle-open", 11),
        row([after for _, _, after in parts], places, "after", BLUE, "circle", 12),
    ] if parts else []  # fmt: skip
    for index, (name, values) in enumerate(arms):
        if found := [(values[part], place) for place, (part, _, _) in zip(places, parts, strict=True) if part in values]:
            colour = PALETTE[(index + 1) % len(PALETTE)]
            data.append(row([x for x, _ in found], [y for _, y in found], f"after, {name}", colour, "diamond-open", 9))
    rows = axis("", tickvals=list(places), ticktext=[label(name, 24) for name, _, _ in parts])
    rows |= {"range": [len(parts) - 0.5, -0.5], "showgrid": False}
    caption = "Every part should move right or stay; a part that moves left was paid for the others' gain."
    drawn = layout(axis("mean score on held-out prompts"), rows)
    return plot("gold-parts", "Parts of the gold score, before → after", caption, data, drawn, 130 + 44 * len(parts))


def cost_figures(policy: SubRun | None, arms: Sequence[SubRun], stages: Sequence[tuple[str, float]]) -> list[Figure]:
    """Seconds by stage and by phase of a step, throughput, memory."""
    split = [
        _bars([rounded(seconds)], [0], name, PALETTE[i % len(PALETTE)], "%{x:.1f} s", orientation="h")
        for i, (name, seconds) in enumerate(stages)
    ]
    memory = [
        line(steps, [None if v is None else v / 1e9 for v in values], _name(arms, arm, "memory"), PALETTE[i % len(PALETTE)])
        for i, arm in enumerate(arms)
        for steps, values in [series(arm.metrics, "memory/rss_bytes")]
        if steps
    ]
    longest = "Wall time of each stage and arm; the longest one is the one to speed up."
    tallest = "The tallest colour is where a faster engine would pay; rollout usually leads."
    leak = "Should level off after the first steps; a steady climb is a leak."
    whole = layout(axis("seconds"), axis("", visible=False), barmode="stack")
    by_step = layout(axis(STEP), axis("seconds per step"), barmode="stack", bargap=0)
    resident = layout(axis(STEP), axis("resident memory (GB)", rangemode="tozero"), showlegend=len(memory) > 1)
    return [
        *plot("stages", "Seconds by stage", longest, split if len(split) > 1 else [], whole),
        *plot("phases", "Seconds of a step, by phase", tallest, _phases(policy.metrics if policy else ()), by_step),
        *curve_figures(arms, [THROUGHPUT], "cost"),
        *plot("memory", "Memory", leak, memory, resident, 260),
    ]


def accuracy_figures(reward: Mapping[str, Any], pairs: Mapping[str, Any]) -> list[Figure]:
    """The reward model's accuracy with its interval, beside the agreement of the people it learnt from."""
    wanted = [(reward, key, name, BLUE) for key, name in (("heldout_accuracy", "model, held-out labels"),
                                                         ("gold_accuracy", "model, gold"))]  # fmt: skip
    wanted += [(pairs, key, name, GREEN) for key, name in AGREEMENTS]
    rows = [(name, found, colour) for source, key, name, colour in wanted if (found := estimate(source.get(key)))]
    if not any(colour == BLUE for _, _, colour in rows):
        return []
    data = [
        _interval_marks(members, group, colour)
        for group, colour in (("reward model", BLUE), ("annotators", GREEN))
        if (members := [(i, value) for i, (_, value, c) in enumerate(rows) if c == colour])
    ]
    data.append(guide([0.5, 0.5], [-0.5, len(rows) - 0.5], "chance"))
    y = axis("", tickvals=list(range(len(rows))), ticktext=[label(name) for name, _, _ in rows])
    y |= {"range": [len(rows) - 0.5, -0.5], "showgrid": False}
    lowest = min(value.value if value.low is None else value.low for _, value, _ in rows)
    x = axis("share of pairs that agree", tickformat=".0%", range=[min(0.4, lowest - 0.04), 1.02])
    caption = "The bars should clear chance. A model of majorities may pass one annotator, hardly the majority."
    return plot("reward-accuracy", "Who agrees with whom", caption, data, layout(x, y), 420)


def reliability_figures(reward: Mapping[str, Any]) -> list[Figure]:
    """Predicted probability against observed frequency, the diagonal, and how many pairs stand behind each point."""
    stored = reward.get("reliability")
    bins = [mapping(entry) for entry in stored] if isinstance(stored, list) else []
    points = [tuple(number(b.get(key)) for key in ("mean_probability", "frequency", "count", "low", "high")) for b in bins]
    found = [(p, f, n, low, high) for p, f, n, low, high in points if p is not None and f is not None and n]
    if not found:
        return []
    says, right, counts, _, _ = zip(*found, strict=True)
    curve = line(says, right, "reward model", BLUE, mode="lines+markers", customdata=counts, cliponaxis=False)
    curve["hovertemplate"] = "says %{x:.0%}, is right %{y:.0%}, %{customdata} pairs<extra></extra>"
    centres = [p if low is None or high is None else (low + high) / 2 for p, _, _, low, high in found]
    widths = [0.05 if low is None or high is None else 0.9 * (high - low) for _, _, _, low, high in found]
    bars = _bars(
        [rounded(centre) for centre in centres], list(counts), "pairs", "@faint", "%{y} pairs", yaxis="y2",
        width=[rounded(width) for width in widths], text=[f"{count:.0f}" for count in counts], textposition="outside",
        cliponaxis=False, textfont={"size": 10},
    )  # fmt: skip
    bars["marker"]["line"] = {"color": MUTED, "width": 1}
    drawn = layout(
        axis("predicted probability of preference", tickformat=".0%", range=[-0.02, 1.02], anchor="y2"),
        axis("observed frequency", tickformat=".0%", range=[-0.04, 1.04], domain=[0.34, 1]),
        yaxis2=axis("pairs", domain=[0, 0.22], range=[0, 1.45 * max(counts)], nticks=3),
    )
    caption = "Points on the diagonal are honest; below it, the model is surer than it should be. Bars count the pairs."
    return plot(
        "reliability", "Reliability of the reward model", caption, [guide([0, 1], [0, 1], "honest"), curve, bars], drawn, 420
    )


SUPERVISED = {
    "sft": ("Supervised fine-tuning", "nats per token", FALLING),
    "reward": ("Reward model", "nats per pair", COIN),
    "process": ("Process reward model", "nats per step", FALLING),
    "direct": ("Direct optimisation", "per pair", FALLING),
    "kto": ("KTO", "per judged answer", FALLING),
}
"""By section: title, the loss's unit, what to look for."""


def loss_figures(stages: Sequence[tuple[str, SubRun]]) -> list[Figure]:
    """The losses of the supervised stages, each with its section; of those that compare, accuracy and margin too."""
    figures = []
    for number_, (section, stage) in enumerate(stages, 1):
        repeated = [other for other, _ in stages].count(section) > 1
        name, (title, unit, caption) = f"{section}-{number_}" if repeated else section, SUPERVISED[section]
        title += f" ({stage.name})" if repeated else ""
        for key, what, shown, text, colour in (
            ("loss", "loss", axis(f"loss ({unit})"), caption, BLUE),
            ("accuracy", "accuracy in training", axis("share ranked right", tickformat=".0%"), APART, BLUE),
            ("margin", "margin in training", axis("chosen − rejected (reward)"), LEAD, GREEN),
        ):
            told = (key, "training" if key == "loss" else key, colour), (f"eval_{key}", "held-out", VERMILLION)
            data = [trace for metric, name_, tint in told for trace in _whole_line(stage, metric, name_, tint)]
            drawn = layout(axis(STEP), shown, showlegend=len(data) > 1)
            figures += plot(f"{key}-{name}", f"{title} {what}", text, data, drawn, 300)
    return figures


def _whole_line(stage: SubRun, key: str, name: str, colour: str) -> list[Trace]:
    """A metric without gaps where only some rows have it, its values marked where they are few."""
    steps, values = series(stage.metrics, key)
    if steps and len(steps) < len(stage.metrics):
        steps, values = _present(stage, key)
    return [line(steps, values, name, colour, mode="lines+markers" if len(steps) < 30 else "lines")] if steps else []


def _phases(rows: Sequence[Mapping[str, Any]]) -> list[Trace]:
    rows = [row for row in rows if any(number(row.get(f"time/{name}")) is not None for name, _ in PHASES)]
    steps = [number(row.get("step")) if number(row.get("step")) is not None else float(i) for i, row in enumerate(rows)]
    named = [(name, colour, [number(row.get(f"time/{name}")) or 0.0 for row in rows]) for name, colour in PHASES]
    spent = [sum(values[i] for _, _, values in named) for i in range(len(rows))]
    rest = [max(0.0, (number(row.get("time/step")) or 0.0) - total) for row, total in zip(rows, spent, strict=True)]
    hover = "step %{x}: %{y:.3g} s"
    return [
        _bars(*thin(steps, values, 400), name, colour, hover)
        for name, colour, values in [*named, ("rest", SKY, rest)]
        if any(values)
    ]


def _bars(xs: Sequence[Any], ys: Sequence[Any], name: str, colour: str, hover: str, **more: Any) -> Trace:
    marker = {"color": colour, "line": {"width": 0}}
    hover += "<extra>%{fullData.name}</extra>"
    return {"type": "bar", "x": xs, "y": ys, "name": label(name), "marker": marker, "hovertemplate": hover, **more}


def _interval_marks(members: Sequence[tuple[int, Estimate]], name: str, colour: str) -> Trace:
    above = [0.0 if e.high is None else rounded(e.high - e.value) for _, e in members]
    below = [0.0 if e.low is None else rounded(e.value - e.low) for _, e in members]
    bar = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": colour, "thickness": 2.5, "width": 6}
    xs, ys = [e.value for _, e in members], [i for i, _ in members]
    return marks(xs, ys, name, colour, hover="%{x:.1%}", marker={"size": 11}, error_x=bar)


def _colours(arms: Sequence[SubRun], index: int) -> tuple[str, str]:
    """With one arm colour tells the quantity, with several it tells the arm and the line's style the quantity."""
    colour = PALETTE[index % len(PALETTE)]
    return (BLUE, VERMILLION) if len(arms) == 1 else (colour, colour)


def _name(arms: Sequence[SubRun], arm: SubRun, quantity: str) -> str:
    return quantity if len(arms) == 1 else f"{arm.name}: {quantity}"


def _line(arm: SubRun, key: str, name: str, colour: str, **more: Any) -> list[Trace]:
    steps, values = series(arm.metrics, key)
    return [line(steps, values, name, colour, **more)] if steps else []


def _present(arm: SubRun, key: str) -> tuple[Sequence[float], Sequence[float]]:
    steps, values = zip(*present(arm.metrics, key), strict=True)
    return steps, values


def _over_distance(arm: SubRun, key: str) -> tuple[list[float], list[float]]:
    """A metric against √KL of the same row, and of the same answers where they have one of their own; an estimate of the KL
    below zero is noise around zero."""
    own = f"{key.split('/', maxsplit=1)[0]}/kl"
    distance = own if series(arm.metrics, own)[0] else kl_key(arm.metrics)
    points = [(number(row.get(distance)), number(row.get(key))) for row in arm.metrics]
    found = [(math.sqrt(max(0.0, kl)), value) for kl, value in points if kl is not None and value is not None]
    return [x for x, _ in found], [y for _, y in found]
