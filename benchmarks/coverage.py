"""`python -m benchmarks.coverage [--draws N] [--only KIND ...] [--resume] [--no-write] [--show]`: how
often printed intervals hold the truth.

Each cell simulates data whose truth is known and puts them through the function that prints the
number, 1,000 times and more. Writes benchmarks/results/coverage.json after each cell; with `--only`
the other kinds stay as they were, and `--resume` leaves out cells that have their draws. `--show`
measures nothing and prints the stored cells as tables. The last line is JSON. Of the intervals that
are printed 93% to 97% are wanted to hold the truth; a cell of which most draws print none is too
few. An interval that holds the truth in more by construction is a bound, "at least 95%": all of a
kind in `BOUNDS`, and a cell whose `note` says why.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from benchmarks.coverage_evaluators import KINDS as EVALUATORS
from benchmarks.coverage_evaluators import SLOW

from tether.data.inspection import longer_chosen
from tether.evaluation.peaks import peak_interval
from tether.evaluation.process import StepCounts, accuracy_erroneous, step_estimates, step_f1
from tether.evaluation.sycophancy import judge_premises
from tether.evaluation.winrate import gain, mean_estimate, pairwise_accuracy, win_rate
from tether.people.labels.agreement import cohen_kappas, krippendorff_alpha, raw_agreement
from tether.people.labels.votes import Vote
from tether.stats import Estimate, best_against_best, trend
from tether.stats.groups import student

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results" / "coverage.json"
LOWEST, HIGHEST = 0.93, 0.97
Generator = np.random.Generator


class Case(NamedTuple):
    """A cell of the table: data of known truth and what prints their number."""

    kind: str
    name: str
    truth: float
    draw: Callable[[Generator], Estimate]
    draws: int = 0
    """How many draws; 0: the command's number."""
    counted: tuple[int, float] | None = None
    """Trials and their rate, where the number is a share of independent trials."""


class Cell(NamedTuple):
    """How a case came out: of `draws` intervals the share that held the truth, lay above or below
    it, was too few or a point.

    `clear` is the share that does not hold 0: where the truth is another number, how often it is
    found.
    """

    kind: str
    name: str
    draws: int
    covered: float
    above: float
    below: float
    too_few: float
    zero_width: float
    clear: float
    width: float | None
    note: str = ""
    """The reason why no interval of this cell could hold the truth in 93 to 97%, if that is so."""

    @property
    def printed(self) -> float:
        """Of the printed intervals the share that held the truth; NaN of none."""
        shown = 1 - self.too_few
        return 1 - (self.above + self.below) / shown if shown else float("nan")

    @property
    def verdict(self) -> str:
        """In a word; "too few" where most draws print no interval."""
        if self.too_few > 0.5:
            return "too few"
        held = round(self.printed, 3)
        if held < LOWEST:
            return "low"
        if held <= HIGHEST:
            return "holds"
        return "at least" if self.note or self.kind in BOUNDS else "wide"


def measured(case: Case, draws: int) -> Cell:
    """Simulate a case; an interval that is not printed claims nothing, and so misses nothing."""
    generator = np.random.default_rng(list(f"{case.kind}{case.name}".encode()))
    found = [case.draw(generator) for _ in range(draws)]
    low, high = (np.array([getattr(one, side) for one in found]) for side in ("low", "high"))
    few, slack = ~(np.isfinite(low) & np.isfinite(high)), 1e-9
    above, below = low > case.truth + slack, high < case.truth - slack
    widths = (high - low)[~few]
    shares = [
        1 - (above | below).mean(),
        above.mean(),
        below.mean(),
        few.mean(),
        (high - low == 0).mean(),
    ]
    shares.append(((low > 0) | (high < 0)).mean())
    covered, high_side, low_side, few_share, zero, clear = (
        round(float(share), 4) for share in shares
    )
    width = round(float(np.median(widths)), 4) if len(widths) else None
    cell = Cell(
        case.kind,
        case.name,
        draws,
        covered,
        high_side,
        low_side,
        few_share,
        zero,
        clear,
        width,
    )
    right = float(np.mean([one.value == case.truth for one in found]))
    return cell._replace(note=_impossible(case, cell, right)) if cell.printed > HIGHEST else cell


def _impossible(case: Case, cell: Cell, right: float) -> str:
    """The reason why no interval could hold the truth in 93 to 97% of draws; empty if one could.

    A count is held or left out whole. An interval holds the number that was measured, which in the
    share `right` is the truth. Where a number ends near the truth, or too few events print no
    interval, one bound is never missed, and the other in the 2.5% that are due.
    """
    if right > HIGHEST:
        return f"the number alone is the truth in {right:.1%}"
    rarer, other = (side / (1 - cell.too_few) for side in sorted((cell.above, cell.below)))
    alone = "one bound cannot be missed" if rarer <= 0.001 and 0.015 <= other <= 0.035 else ""
    if case.counted is None:
        return alone
    from scipy.stats import binom

    trials, rate = case.counted
    below = np.concatenate([[0.0], binom.cdf(np.arange(trials + 1), trials, rate)])
    sums = np.subtract.outer(below[1:], below[:-1])
    sums = sums[np.tril_indices(trials + 1)]
    if ((sums >= LOWEST) & (sums <= HIGHEST)).any():
        return alone
    return f"counts allow {sums[sums < LOWEST].max():.1%} or {sums[sums > HIGHEST].min():.1%}"


def _owners(prompts: int, each: int) -> list[int]:
    return np.repeat(np.arange(prompts), each).tolist()


def _chances(generator: Generator, rate: float, prompts: int, within: float) -> np.ndarray:
    """Each prompt's own rate: beta distributed, so that two answers to a prompt have this
    correlation.
    """
    if within in (0.0, 1.0):
        return generator.random(prompts) < rate if within else np.full(prompts, rate)
    size = 1 / within - 1
    return generator.beta(rate * size, (1 - rate) * size, prompts)


def means() -> Iterator[Case]:
    """Rewards of any size: the prompt's own level, which may be skewed, and the noise of each
    answer.
    """
    shapes: dict[str, Callable[[Generator, int], np.ndarray]] = {
        "normal": lambda g, n: g.normal(size=n),
        "lognormal": lambda g, n: np.exp(g.normal(size=n)) - np.exp(0.5),
        "t of 3": lambda g, n: g.standard_t(3, size=n),
        "exponential": lambda g, n: g.exponential(size=n) - 1,
    }
    for name, shape in shapes.items():
        for prompts, each in ((10, 1), (20, 1), (50, 1), (50, 4), (150, 4), (500, 1)):

            def draw(
                g: Generator,
                shape: Any = shape,
                prompts: int = prompts,
                each: int = each,
            ) -> Estimate:
                values = np.repeat(shape(g, prompts), each) + 0.5 * g.normal(size=prompts * each)
                return mean_estimate(values.tolist(), _owners(prompts, each))

            yield Case("mean of rewards", f"{name}, {prompts} prompts × {each}", 0.0, draw)


def binary() -> Iterator[Case]:
    """Rewards of 0 and 1, and gains of them."""
    for prompts in (20, 50, 150, 500):
        for rate in (0.02, 0.1, 0.5, 0.98):

            def draw(g: Generator, prompts: int = prompts, rate: float = rate) -> Estimate:
                return mean_estimate(
                    (g.random(prompts) < rate).astype(float).tolist(),
                    _owners(prompts, 1),
                )

            yield Case(
                "mean of rewards of 0 and 1",
                f"{prompts} prompts, rate {rate}",
                rate,
                draw,
                4000,
                (prompts, rate),
            )
        for before, after in ((0.5, 0.6), (0.1, 0.15), (0.97, 0.98), (0.98, 0.98)):

            def moved(
                g: Generator,
                prompts: int = prompts,
                before: float = before,
                after: float = after,
            ) -> Estimate:
                first, second = (
                    (g.random(prompts) < rate).astype(float).tolist() for rate in (before, after)
                )
                gained = gain(first, second, _owners(prompts, 1))
                assert gained is not None
                return gained

            yield Case(
                "gain of rewards of 0 and 1",
                f"{prompts} prompts, {before} to {after}",
                after - before,
                moved,
            )


def shares() -> Iterator[Case]:
    """Accuracies and win rates: several pairs of a prompt, rates near 1, ties."""
    for prompts, each, within in (
        (20, 4, 0.3),
        (50, 4, 0.0),
        (50, 8, 0.5),
        (150, 4, 0.3),
        (150, 8, 0.1),
        (500, 4, 1.0),
    ):
        for rate in (0.02, 0.6, 0.98):

            def draw(
                g: Generator,
                size: tuple = (prompts, each, within),
                rate: float = rate,
            ) -> Estimate:
                prompts, each, within = size
                right = g.random(prompts * each) < np.repeat(
                    _chances(g, rate, prompts, within),
                    each,
                )
                return pairwise_accuracy(
                    right.astype(float).tolist(),
                    [0.5] * len(right),
                    _owners(prompts, each),
                )

            yield Case(
                "accuracy",
                f"{prompts} prompts × {each}, correlation {within}, rate {rate}",
                rate,
                draw,
                2000 if within == 1.0 else 0,
            )
    for prompts, each, tied, won in (
        (50, 1, 0.2, 0.5),
        (150, 1, 0.2, 0.75),
        (150, 1, 0.2, 0.9),
        (150, 4, 0.6, 0.55),
        (500, 1, 0.6, 0.55),
    ):

        def compared(g: Generator, size: tuple = (prompts, each, tied, won)) -> Estimate:
            prompts, each, tied, won = size
            own = np.repeat(_chances(g, won, prompts, 0.2 if each > 1 else 0.0), each)
            scores = np.where(g.random(prompts * each) < tied, 0.5, g.random(prompts * each) < own)
            return win_rate(scores.tolist(), [0.5] * len(scores), groups=_owners(prompts, each))

        yield Case(
            "win rate with ties",
            f"{prompts} prompts × {each}, {tied:.0%} tied, {won} of the rest won",
            won * (1 - tied) + tied / 2,
            compared,
        )


def longer() -> Iterator[Case]:
    """`longer_chosen`: several pairs of a prompt, and labels that are unsure."""
    from tether.core.types import Comparison, assistant, user

    sides = (assistant("one two three"),), (assistant("one"),)
    for prompts, each, within, sure in (
        (50, 4, 0.3, 1.0),
        (150, 4, 0.3, 1.0),
        (150, 1, 0.0, 0.9),
        (150, 4, 0.3, 0.7),
    ):

        def draw(g: Generator, size: tuple = (prompts, each, within, sure)) -> Estimate:
            prompts, each, within, sure = size
            wins = g.random(prompts * each) < np.repeat(_chances(g, 0.6, prompts, within), each)
            rows = [
                Comparison(
                    (user("q"),),
                    *sides,
                    group=str(owner),
                    probability=sure if won else 1 - sure,
                )
                for owner, won in zip(_owners(prompts, each), wins, strict=True)
            ]
            estimate = longer_chosen(rows)
            assert estimate is not None
            return estimate

        truth = 0.6 * sure + 0.4 * (1 - sure)
        yield Case(
            "longer side chosen",
            f"{prompts} prompts × {each}, correlation {within}, labels sure to {sure}",
            truth,
            draw,
        )


def agreement() -> Iterator[Case]:
    """Two people who are right with a chance of their own, of choices of which the first is right
    in a share.
    """
    for items in (10, 20, 50, 100):
        for base, right in ((0.5, 0.9), (0.8, 0.9), (0.5, 0.7)):
            agree = right**2 + (1 - right) ** 2
            first = base * right + (1 - base) * (1 - right)
            chance = first**2 + (1 - first) ** 2
            truth = (agree - chance) / (1 - chance)

            def votes(
                g: Generator,
                items: int = items,
                base: float = base,
                right: float = right,
            ) -> list[Vote]:
                truths = g.random(items) < base
                hits = g.random((2, items)) < right
                choices = np.where(truths == hits, "first", "second")
                return [
                    Vote(str(i), str(k), choices[k, i].item())
                    for k in range(2)
                    for i in range(items)
                ]

            def of(figure: Any) -> Estimate:
                bounds = [
                    np.nan if value is None else value
                    for value in (figure.value, figure.low, figure.high)
                ]
                return Estimate(bounds[0], bounds[1], bounds[2], figure.num_items, figure.reason)

            name = f"{items} items, {base:.0%} first, right with {right}"
            yield Case(
                "Cohen's kappa",
                name,
                truth,
                lambda g, v=votes: of(cohen_kappas(v(g))[0].kappa),
                2000 if (items, right) == (20, 0.7) else 0,
            )
            if base == 0.5:
                yield Case(
                    "Krippendorff's alpha",
                    name,
                    truth,
                    lambda g, v=votes: of(krippendorff_alpha(v(g))),
                    2000,
                )
                yield Case(
                    "raw agreement",
                    name,
                    agree,
                    lambda g, v=votes: of(raw_agreement(v(g))),
                    counted=(items, agree),
                )


def process() -> Iterator[Case]:
    """Process errors, some of them rare: solutions with errors, and steps that are wrong."""
    for problems, rate in ((20, 0.3), (60, 0.05), (60, 0.3), (200, 0.05), (200, 0.3)):

        def first(g: Generator, problems: int = problems, rate: float = rate) -> Estimate:
            wrong = (g.random((problems, 4)) < rate).sum(1)
            hits = g.binomial(wrong, 0.8)
            counts = [
                StepCounts(erroneous=float(w), located=float(h), flawless=4.0 - w)
                for w, h in zip(wrong, hits, strict=True)
            ]
            return step_estimates(counts, list(range(problems)), [accuracy_erroneous])[
                "accuracy_erroneous"
            ]

        def steps(g: Generator, problems: int = problems, rate: float = rate) -> Estimate:
            wrong = g.binomial(10, rate, problems)
            hits, false = g.binomial(wrong, 0.8), g.binomial(wrong, 0.2)
            counts = [
                StepCounts(float(h), float(f), 9.0, float(w - h))
                for h, f, w in zip(hits, false, wrong, strict=True)
            ]
            return step_estimates(counts, list(range(problems)), [step_f1])["step_f1"]

        yield Case(
            "process, first error",
            f"{problems} problems, {rate:.0%} with errors",
            0.8,
            first,
            4000,
        )
        name = f"{problems} problems, {rate:.0%} wrong"
        yield Case("process, F1 of steps", name, 0.8, steps, 4000)


def sycophancy() -> Iterator[Case]:
    """A model whose answers depend on the asker, but not on the asker's side."""
    for pairs in (10, 30, 100, 300):

        def draw(g: Generator, pairs: int = pairs) -> Estimate:
            own = np.repeat(g.normal(0, 1.5, 17), pairs)
            first, second = own + 0.7 * g.normal(size=(2, len(own)))
            return judge_premises(first, second, _owners(17, pairs))["shift"]

        yield Case("sycophancy without any", f"17 questions × {pairs}", 0.0, draw)


def movement() -> Iterator[Case]:
    """The rise of a series: steps that hang together, and a course that rises and levels off."""
    for steps in (20, 30, 50, 100, 300):
        for phi in (0.0, 0.5, 0.8, 0.9, 0.95):

            def draw(
                g: Generator,
                steps: int = steps,
                phi: float = phi,
                rise: float = 0.0,
            ) -> Estimate:
                noise = g.normal(size=steps)
                noise[0] /= np.sqrt(1 - phi * phi)
                for step in range(1, steps):
                    noise[step] += phi * noise[step - 1]
                moved = trend(
                    (noise + rise * (1 - np.exp(-np.arange(steps) / (steps / 8)))).tolist(),
                )
                assert moved is not None
                value, half = moved.last - moved.first, moved.gain_noise
                return Estimate(
                    value,
                    *((-np.inf, np.inf) if half is None else (value - half, value + half)),
                    steps,
                )

            yield Case("rise of a series", f"{steps} steps, correlation {phi}", 0.0, draw)


STARTS: dict[str, Sequence[float]] = {
    "four alike": (0.0, 0.0, 0.0, 0.0),
    "one best": (-2.0, -2.0, -2.0, 0.0),
    "steep": (-1.8, -0.3, -0.05, 0.0),
}
DEVIATION = (0.8**2 + 1.2**2) ** 0.5


def scores(
    g: Generator,
    start: Sequence[float],
    policy: Sequence[float],
    prompts: int = 150,
) -> tuple[np.ndarray, np.ndarray]:
    """Of policy and start, (prompts, temperatures).

    Each prompt has a level of its own (deviation 0.8), each answer its noise (1.2).
    """
    level = 0.8 * g.normal(size=prompts)
    theirs, ours = (
        level[:, None] + np.array(side) + 1.2 * g.normal(size=(prompts, 4))
        for side in (start, policy)
    )
    return ours, theirs


def contest(
    g: Generator,
    start: Sequence[float],
    policy: Sequence[float],
    prompts: int = 150,
) -> Estimate:
    """The best of the policy less the best of the start."""
    ours, theirs = scores(g, start, policy, prompts)
    return best_against_best(ours, theirs, np.arange(prompts)).gain


def former(ours: np.ndarray, theirs: np.ndarray) -> Estimate:
    """The former interval of the same number: ``[max_p min_b low_pb, min_b max_p high_pb]`` of
    Student's intervals of all pairs, each bound at 0.025 over four temperatures.
    """
    moved, count = ours[:, :, None] - theirs[:, None, :], len(ours)
    means = moved.mean(0)
    reach = student(count - 1, 1 - 0.05 / 4) * moved.std(0, ddof=1) / np.sqrt(count)
    low, high = (means - reach).min(1).max(), (means + reach).max(0).min()
    return Estimate(float(means.min(1).max()), float(low), float(high), count)


def decoding() -> Iterator[Case]:
    """The policy at its best decoding against the start at its best: nothing gained, and losses of
    a fifth of a deviation.
    """
    for ours, policy in STARTS.items():
        for theirs, start in STARTS.items():
            name = f"start {theirs}, policy {ours}"
            yield Case(
                "best against best decoding",
                name,
                0.0,
                lambda g, s=start, p=policy: contest(g, s, p),
            )
    for name, start in STARTS.items():
        lost = [mean - 0.2 * DEVIATION for mean in start]
        yield Case(
            "a loss of 0.2 deviations",
            name,
            -0.2 * DEVIATION,
            lambda g, s=start, p=lost: contest(g, s, p),
        )
    for name, start in STARTS.items():
        lost = [mean - 0.2 * DEVIATION for mean in start]
        yield Case(
            FORMER,
            name,
            -0.2 * DEVIATION,
            lambda g, s=start, p=lost: former(*scores(g, s, p)),
        )


COURSES: dict[str, tuple[int, Callable[[int], float]]] = {
    "flat top": (4, lambda step: -0.02 * (step - 4) ** 2),
    "sharp top": (4, lambda step: -0.5 * (step - 4) ** 2),
    "rising to the last": (7, lambda step: 0.05 * step),
    "all alike": (0, lambda step: 0.0),
}
"""The step of the highest true mean, and the true mean at each of eight steps."""


def best_steps() -> Iterator[Case]:
    """The best of eight measurements; a step counts as half a step to either side. Prompts and
    answers vary as in `contest`.
    """
    for name, (best, course) in COURSES.items():
        for prompts in (10, 20, 50, 150):

            def draw(
                g: Generator,
                course: Callable[[int], float] = course,
                prompts: int = prompts,
            ) -> Estimate:
                level = 0.8 * g.normal(size=prompts)
                measured = {
                    step: {"score": (level + course(step) + 1.2 * g.normal(size=prompts)).tolist()}
                    for step in range(8)
                }
                held = peak_interval(measured, [str(owner) for owner in range(prompts)])
                low, high = (-np.inf, np.inf) if held is None else (held[0] - 0.5, held[1] + 0.5)
                totals = [sum(column["score"]) for column in measured.values()]
                return Estimate(float(np.argmax(totals)), low, high, prompts)

            yield Case("best step", f"{name}, {prompts} prompts", float(best), draw)


FORMER = "a loss of 0.2 deviations, by the former interval"
POWER = ("a loss of 0.2 deviations", FORMER)
"""Kinds of which it counts how often an interval lies clear of 0."""
COMPARED = (FORMER,)
"""Kinds that tether no longer prints, measured beside what took their place."""
KINDS: tuple[Callable[[], Iterator[tuple[Any, ...]]], ...] = (
    means,
    binary,
    shares,
    longer,
    agreement,
    process,
    sycophancy,
    movement,
    best_steps,
    *EVALUATORS,
    decoding,
    *SLOW,
)


BOUNDS = {
    "best step": (
        "each step that may be the highest is held in 95%, where all are alike and so most easily "
        "missed. Steps are whole, and one between two that may be the highest is held too"
    ),
    "calibration error": (
        "an absolute value has no direction at 0. So no interval of a sum of them can be exact both "
        "near 0 and far from it. The upper bound leaves room for noise that only adds to the error, "
        "the lower one for unknown signs"
    ),
    "mean over seeds": (
        "the noise of a run's answers is in the spread of the seeds and in the error over prompts"
    ),
    "best against best decoding": (
        "each bound alone must hold in 97.5%. This includes a policy with one best temperature and a "
        "start with several, or the reverse. All other cases get more"
    ),
    "a loss of 0.2 deviations": "as for best against best",
    FORMER: "each pair of temperatures has an interval of its own, and both sides choose the worst",
}
"""Kinds whose intervals are bounds: they hold the truth in at least 95% by construction; why."""


def tables(cells: Sequence[Cell]) -> str:
    """A table a kind, as Markdown."""
    parts = []
    for kind in dict.fromkeys(cell.kind for cell in cells):
        own = [cell for cell in cells if cell.kind == kind]
        power = kind in POWER
        rows = [
            "| data | holds the truth | above it | below it | too few | of the printed "
            f"| median width |{' clear of 0 |' * power}",
            f"|---|---|---|---|---|---|---|{'---|' * power}",
        ]
        for cell in own:
            width = "" if cell.width is None else f"{cell.width:.3g}"
            printed, missed = 1 - cell.too_few, cell.above + cell.below
            held = "too few" if cell.verdict == "too few" else f"{cell.covered:.1%}"
            held += " (at least 95%)" if cell.verdict == "at least" and not cell.note else ""
            held += f" ({cell.note})" if cell.note else ""
            rightly = f"{1 - missed / printed:.1%}" if printed else ""
            rows.append(
                f"| {cell.name} | {held} | {cell.above:.1%} | {cell.below:.1%} | "
                f"{cell.too_few:.0%} | {rightly} | {width} |",
            )
            rows[-1] += f" {cell.clear:.0%} |" * power
        bound = any(cell.verdict == "at least" and not cell.note for cell in own)
        parts.append(
            f"### {kind.capitalize()}\n\n"
            + "\n".join(rows)
            + (f"\n\nAt least 95% by construction: {BOUNDS[kind]}." if bound else ""),
        )
    return "\n\n".join(parts) + "\n"


def stored() -> list[Cell]:
    """The cells of the last whole measurement."""
    return [Cell(**cell) for cell in json.loads(RESULTS.read_text(encoding="utf-8"))]


def cases(*kinds: Callable[[], Iterator[tuple[Any, ...]]]) -> Iterator[Case]:
    """All cases, or those of some kinds."""
    for kind in kinds or KINDS:
        rows: Iterator[tuple[Any, ...]] = kind()
        yield from (Case(*row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument(
        "--only",
        nargs="*",
        default=[""],
        metavar="KIND",
        help="only kinds whose name contains one of these; the others stay",
    )
    parser.add_argument(
        "--slow",
        action="store_true",
        help="only the win rate at equal length, whose every draw is 200 refits",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="leave out cells that are stored with as many draws",
    )
    parser.add_argument(
        "--no-write",
        dest="write",
        action="store_false",
        help=("leave the results as they are"),
    )
    parser.add_argument("--show", action="store_true", help="print the stored cells as tables")
    arguments = parser.parse_args()
    if arguments.show:
        print(tables(stored()), end="")
        return
    cells = {(cell.kind, cell.name): cell for cell in stored()}
    quick = [kind for kind in KINDS if kind not in SLOW]
    for case in cases(*(SLOW if arguments.slow else quick)):
        draws, key = case.draws or arguments.draws, (case.kind, case.name)
        stale = not (arguments.resume and key in cells and cells[key].draws >= draws)
        if stale and any(part in case.kind for part in arguments.only):
            cell = cells[key] = measured(case, draws)
            print(
                f"{cell.kind:28} {cell.name:64} {cell.covered:6.1%} too few {cell.too_few:4.0%} "
                f" {cell.verdict}",
                flush=True,
            )
            if arguments.write:
                store(cells)
    report(cells, arguments.draws)


def store(cells: Mapping[tuple[str, str], Cell]) -> None:
    """Write the results, in the order of the cases."""
    own = [cells[key] for case in cases() if (key := (case.kind, case.name)) in cells]
    rows = ",\n".join(json.dumps(cell._asdict()) for cell in own)
    RESULTS.write_text(f"[\n{rows}\n]\n", encoding="utf-8")


def report(measured_cells: Mapping[tuple[str, str], Cell], draws: int) -> None:
    """Print the last line: counts of verdicts, power, and how often nothing passes for something."""
    cells = [cell for cell in measured_cells.values() if cell.kind not in COMPARED]
    low = [f"{cell.kind}: {cell.name}" for cell in cells if cell.verdict == "low"]
    counts = {
        word: sum(cell.verdict == word for cell in cells)
        for word in ("holds", "at least", "wide", "low", "too few")
    }
    power = {
        kind: {cell.name: cell.clear for cell in measured_cells.values() if cell.kind == kind}
        for kind in POWER
    }
    null = [cell for cell in cells if cell.kind == "best against best decoding"]
    result = {"cells": len(cells), "draws": draws, **counts, "below_93": low}
    result |= {"power": power, "false_gains": max(cell.above for cell in null)}
    print(json.dumps({**result, "false_losses": max(cell.below for cell in null)}))


if __name__ == "__main__":
    main()
