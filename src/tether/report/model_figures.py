"""The figures of the stages before reinforcement learning: the reward model's worth, and the losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tether.report.plotting import BLUE, GREEN, VERMILLION, Figure, Trace, axis, guide, label, layout, line, rounded
from tether.report.reading import Estimate, SubRun, estimate, mapping, number, series

AGREEMENTS = (
    ("annotator_agreement", "annotator, annotator"),
    ("annotator_gold_agreement", "annotator, gold"),
    ("majority_gold_agreement", "majority, gold"),
)


def accuracy_figures(reward: Mapping[str, Any], pairs: Mapping[str, Any]) -> list[Figure]:
    """The reward model's accuracy with its interval, beside the agreement of the people it learnt from."""
    rows: list[tuple[str, Estimate, str]] = []
    for key, name in (("heldout_accuracy", "model, held-out labels"), ("gold_accuracy", "model, gold")):
        found = estimate(reward.get(key))
        if found:
            rows.append((name, found, BLUE))
    if not rows:
        return []
    for key, name in AGREEMENTS:
        found = estimate(pairs.get(key))
        if found:
            rows.append((name, found, GREEN))
    data: list[Trace] = []
    for group, colour in (("reward model", BLUE), ("annotators", GREEN)):
        members = [(i, value) for i, (_, value, c) in enumerate(rows) if c == colour]
        if members:
            data.append(_interval_marks(members, group, colour))
    data.append(guide([0.5, 0.5], [-0.5, len(rows) - 0.5], "chance"))
    y = axis("", tickvals=list(range(len(rows))), ticktext=[label(name) for name, _, _ in rows])
    y |= {"range": [len(rows) - 0.5, -0.5], "showgrid": False}
    lowest = min(value.value if value.low is None else value.low for _, value, _ in rows)
    x = axis("share of pairs that agree", tickformat=".0%", range=[min(0.4, lowest - 0.04), 1.02])
    caption = "The bars should clear chance. A model of majorities may pass one annotator, hardly the majority."
    return [Figure("reward-accuracy", "Who agrees with whom", caption, data, layout(x, y), 420)]


def _interval_marks(members: list[tuple[int, Estimate]], name: str, colour: str) -> Trace:
    above = [0.0 if e.high is None else rounded(e.high - e.value) for _, e in members]
    below = [0.0 if e.low is None else rounded(e.value - e.low) for _, e in members]
    bar = {"color": colour, "thickness": 2.5, "width": 6}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [rounded(e.value) for _, e in members],
        "y": [i for i, _ in members],
        "marker": {"color": colour, "size": 11},
        "error_x": {"type": "data", "symmetric": False, "array": above, "arrayminus": below, **bar},
        "hovertemplate": "%{x:.1%}<extra>%{fullData.name}</extra>",
    }


def reliability_figures(reward: Mapping[str, Any]) -> list[Figure]:
    """Predicted probability against observed frequency, the diagonal, and how many pairs stand behind each point."""
    stored = reward.get("reliability")
    bins = [mapping(entry) for entry in stored] if isinstance(stored, list) else []
    points = [tuple(number(b.get(key)) for key in ("mean_probability", "frequency", "count", "low", "high")) for b in bins]
    found = [(p, f, n, low, high) for p, f, n, low, high in points if p is not None and f is not None and n]
    if not found:
        return []
    curve = line([p[0] for p in found], [p[1] for p in found], "reward model", BLUE, mode="lines+markers")
    curve |= {"customdata": [p[2] for p in found], "cliponaxis": False}
    curve["hovertemplate"] = "says %{x:.0%}, is right %{y:.0%}, %{customdata} pairs<extra></extra>"
    centres = [p[0] if p[3] is None or p[4] is None else (p[3] + p[4]) / 2 for p in found]
    widths = [0.05 if p[3] is None or p[4] is None else 0.9 * (p[4] - p[3]) for p in found]
    bars = {
        "type": "bar",
        "name": "pairs",
        "x": [rounded(c) for c in centres],
        "width": [rounded(w) for w in widths],
        "y": [p[2] for p in found],
        "yaxis": "y2",
        "marker": {"color": "@faint", "line": {"color": "@muted", "width": 1}},
        "text": [f"{p[2]:.0f}" for p in found],
        "textposition": "outside",
        "cliponaxis": False,
        "textfont": {"size": 10},
        "hovertemplate": "%{y} pairs<extra></extra>",
    }
    drawn = layout(
        axis("predicted probability of preference", tickformat=".0%", range=[-0.02, 1.02], anchor="y2"),
        axis("observed frequency", tickformat=".0%", range=[-0.04, 1.04], domain=[0.34, 1]),
    )
    drawn["yaxis2"] = axis("pairs", domain=[0, 0.22], range=[0, 1.45 * max(p[2] for p in found)], nticks=3)
    caption = "Points on the diagonal are honest; below it, the model is surer than it should be. Bars count the pairs."
    data = [guide([0, 1], [0, 1], "honest"), curve, bars]
    return [Figure("reliability", "Reliability of the reward model", caption, data, drawn, 420)]


COIN = "Starts near ln 2 ≈ 0.69, the loss of a coin; near zero in training is memorising."
FALLING = "The held-out loss should fall with the training loss; when it turns up, stop earlier."
APART = "Training pairs ranked far better than held-out ones are memorised."


def loss_figures(sft: SubRun | None, reward: SubRun | None, direct: SubRun | None = None) -> list[Figure]:
    """The losses of the supervised stages; of those that compare, accuracy and margin too."""
    figures = []
    for stage, name, title, unit, caption in (
        (sft, "sft", "Supervised fine-tuning", "nats per token", FALLING),
        (reward, "reward", "Reward model", "nats per pair", COIN),
        (direct, "direct", "Direct optimisation", "per pair or verdict", FALLING),
    ):
        data = _lines(stage, (("loss", "training", BLUE), ("eval_loss", "held-out", VERMILLION)))
        if data:
            drawn = layout(axis("step"), axis(f"loss ({unit})"), showlegend=len(data) > 1)
            figures.append(Figure(f"loss-{name}", f"{title} loss", caption, data, drawn, 300))
        accuracy = _lines(stage, (("accuracy", "accuracy", BLUE), ("eval_accuracy", "held-out", VERMILLION)))
        if accuracy:
            drawn = layout(axis("step"), axis("share ranked right", tickformat=".0%"), showlegend=len(accuracy) > 1)
            figures.append(Figure(f"accuracy-{name}", f"{title} accuracy in training", APART, accuracy, drawn, 300))
        margin = _lines(stage, (("margin", "margin", GREEN),))
        if margin:
            drawn = layout(axis("step"), axis("chosen − rejected (reward)"), showlegend=False)
            caption = "The mean lead of the chosen response; it should rise and level off."
            figures.append(Figure(f"margin-{name}", f"{title} margin in training", caption, margin, drawn, 300))
    return figures


def _lines(stage: SubRun | None, wanted: tuple[tuple[str, str, str], ...]) -> list[Trace]:
    if stage is None:
        return []
    data = []
    for key, name, colour in wanted:
        steps, values = series(stage.metrics, key)
        if steps and len(steps) < len(stage.metrics):
            steps, values = map(list, zip(*[(s, v) for s, v in zip(steps, values, strict=True) if v is not None], strict=True))
        if steps:
            data.append(line(steps, values, name, colour, mode="lines+markers" if len(steps) < 30 else "lines"))
    return data
