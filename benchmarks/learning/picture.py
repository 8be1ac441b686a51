"""Curves as SVG that can be read on white and on dark: no background, grey letters, colours of
middle brightness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import stdev
from typing import Any

BLUE, ORANGE, GREEN, RED, VIOLET, GREY = (
    "#2f8fce",
    "#dd7f2e",
    "#2f9e6b",
    "#d6504f",
    "#9a6fd0",
    "#8a9096",
)
COLOURS = (BLUE, ORANGE, GREEN, RED, VIOLET, GREY)
LETTERS = "#7d858c"


@contextmanager
def figure(path: Path, panels: int) -> Iterator[Any]:
    """So many axes side by side, written to `path` afterwards."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    named = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"),
        LETTERS,
    )
    plain: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": path.stem,
        "font.size": 9,
        "axes.titlesize": 9,
        "legend.fontsize": 8,
    }
    plain |= {**named, "legend.frameon": False, "savefig.transparent": True}
    with matplotlib.rc_context(plain):
        drawn, axes = plt.subplots(
            1,
            panels,
            figsize=(4.4 * panels, 3.4),
            layout="constrained",
            squeeze=False,
        )
        for axis in axes.flat:
            axis.grid(True, color=GREY, alpha=0.25, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
        yield axes[0]
        drawn.savefig(path, metadata={"Date": None})
        plt.close(drawn)


def band(
    axis: Any,
    x: Sequence[float],
    runs: Sequence[Sequence[float]],
    colour: str,
    label: str,
    line: str = "-",
) -> None:
    """The mean of several seeds' curves, in the range from lowest to highest; of eight and more, in
    two standard errors.
    """
    columns = list(zip(*runs, strict=True))
    means, few = [sum(c) / len(c) for c in columns], len(runs) < 8
    errors = [0.0 if few else 2 * stdev(c) / len(c) ** 0.5 for c in columns]
    low = [min(c) if few else m - e for c, m, e in zip(columns, means, errors, strict=True)]
    high = [max(c) if few else m + e for c, m, e in zip(columns, means, errors, strict=True)]
    axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    axis.plot(x, means, line, color=colour, label=label, linewidth=1.6)
