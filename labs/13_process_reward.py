# %% [markdown]
# # 13. Process against outcome reward
#
# **Question:** Should a solution be rewarded for its last line, or for each of its lines?
#
# **Goal.** Judge the same solutions by their last line, and by every line.
# See what each finds among n answers, what each teaches, and how a reward for lines is gamed.
#
# **Chapter:** process and outcome reward models.
#
# **Time:** 5 seconds.

# %%
from collections.abc import Callable

import torch
from torch import Tensor

from tether.algorithms.kl import kl_policy_reference_k1
from tether.algorithms.process import (
    aggregate_steps,
    place_step_rewards,
    right_probabilities,
    step_cross_entropy,
    weakest_step,
)
from tether.api.labs import Lab, line
from tether.api.labs.ppo import shaped, train
from tether.api.labs.sums import HABITS, NUMBERS, PLACES, Solutions, Solver, solve

lab = Lab("13_process_reward")
luck = torch.Generator().manual_seed(lab.seed)
BETA = 0.02
STEPS = 60

# %% [markdown]
# ## Solutions in lines
#
# A solution adds up six numbers, one a line. In each line the solver writes the right sum, one too
# few, one too many, or writes the last line again (`labs/sums.py`). Two lines are hard: in the
# third the solver mostly forgets a carry, and in the fifth it mostly takes one that is not there.
# The two mistakes cancel: the last line is then right, and the way there is wrong.

# %%
start = HABITS.log()
sample = solve(start, 4000, luck)
resting = 1 - float(sample.sound.float().sum() / sample.right.float().sum())
lab.table(
    ["solutions of the start", "share"],
    [
        ["last line right", float(sample.right.float().mean())],
        ["every line right", float(sample.sound.float().mean())],
        ["right last lines that rest on a wrong one", resting],
    ],
)

# %% [markdown]
# ## Two reward models
#
# The outcome model sees 150 solutions, each with one label: is the last line right? The process
# model sees the same 150, each line with its label. A third one is an outcome model on so many
# solutions that it has as many labels as the process model.

# %%
labelled = solve(start, 150, luck)
many = solve(start, 150 * NUMBERS, luck)


def fit(logits: Callable[[Tensor], Tensor], targets: Tensor, judged: Tensor) -> Tensor:
    """A weight for each place and action, by the cross-entropy of the labels."""
    weights = torch.zeros(NUMBERS, 4, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.1)
    for _ in range(150):
        loss = step_cross_entropy(
            logits(weights)[judged],
            targets[judged].float(),
            judged[judged],
            denominator=judged.sum(),
        )
        optimizer.zero_grad()
        (loss + 0.001 * weights.square().sum()).backward()
        optimizer.step()
    return weights.detach()


def by_outcome(solutions: Solutions) -> Tensor:
    """An outcome model: the sum over the lines of a solution."""
    every = torch.ones(len(solutions.lines), dtype=torch.bool)
    return fit(
        lambda w: (w[solutions.places, solutions.lines] * solutions.mask).sum(1),
        solutions.right,
        every,
    )


outcome = by_outcome(labelled)
outcome_many = by_outcome(many)
process = fit(lambda w: w[labelled.places, labelled.lines], labelled.errors == 0, labelled.mask)


def line_chances(solutions: Solutions) -> Tensor:
    """The process model's probability that each line is right."""
    logits = process[solutions.places, solutions.lines]
    return right_probabilities(logits.flatten()).reshape(logits.shape)


def outcome_score(weights: Tensor) -> Callable[[Solutions], Tensor]:
    return lambda s: (weights[s.places, s.lines] * s.mask).sum(1)


JUDGES = {
    "outcome": outcome_score(outcome),
    "outcome, as many labels": outcome_score(outcome_many),
    "process, least line": lambda s: aggregate_steps(line_chances(s), s.mask, "min"),
}

# %% [markdown]
# ## The best of n
#
# Each judge picks one of n solutions. Of the pick we ask two things: is its last line right, and
# is every line right?

# %%
COUNTS = (1, 2, 4, 8, 16, 32, 64)
PROBLEMS = 400
tries = solve(start, PROBLEMS * COUNTS[-1], luck)


def best_of(judge: Callable[[Solutions], Tensor], quality: Tensor) -> list[float]:
    scores = judge(tries).reshape(PROBLEMS, -1)
    good = quality.reshape(PROBLEMS, -1).float()
    return [float(good.gather(1, scores[:, :n].argmax(1, keepdim=True)).mean()) for n in COUNTS]


last = {name: best_of(judge, tries.right) for name, judge in JUDGES.items()}
every = {name: best_of(judge, tries.sound) for name, judge in JUDGES.items()}
chance = float(tries.sound.float().mean())
theory = [1 - (1 - chance) ** n for n in COUNTS]

# %%
exponents = range(len(COUNTS))
lab.plot(
    "Last line right, in the best of n",
    [line(row, name, exponents, mode="both") for name, row in last.items()],
    x="log2 n",
    y="share of 400 problems",
    look_at="by the last line alone the outcome model with as many labels is the best judge. The "
    "process model is the worst at first: where no solution is sound, two mistakes that cancel are "
    "no better to it than one.",
)
lab.plot(
    "Every line right, in the best of n",
    [
        *(line(row, name, exponents, mode="both") for name, row in every.items()),
        line(theory, "1 − (1 − q)ⁿ", exponents, dash="dot", colour="muted"),
    ],
    x="log2 n",
    y="share of 400 problems",
    look_at="the process model finds a sound solution wherever there is one: it lies on the "
    "theory. The outcome model learns that the two mistakes go together, and more labels make it "
    "surer.",
)
wrong = Solutions(*(part[~tries.sound & tries.finished] for part in tries))
blamed = weakest_step(line_chances(wrong), wrong.mask)
hit = wrong.errors.gather(1, blamed[:, None])[:, 0] != 0
blind = ((wrong.errors != 0).sum(1) / wrong.mask.sum(1)).mean()
lab.text(
    f"In unsound solutions the weakest line is a wrong one in {float(hit.float().mean()):.1%}; "
    f"a line drawn blindly in {float(blind):.1%}."
)

# %% [markdown]
# ## Four rewards
#
# PPO trains the same start on four rewards:
#
# - outcome: 1 if the last line is right, at the last line;
# - process, sum: each line's probability of being right, at that line;
# - process, minus the mean: the same minus the mean over the lines of the batch;
# - process, least line: the least of a solution's probabilities, at the last line.


# %%
def each_line(
    scores: Tensor, policy: Tensor, reference: Tensor, mask: Tensor, beta: float
) -> Tensor:
    """The KL penalty, and each line's score at the token that ends it: here a line is a token."""
    ends = torch.arange(mask.shape[1]).expand_as(mask)
    penalty = -beta * kl_policy_reference_k1(policy, reference) * mask
    return penalty + place_step_rewards(scores, ends, mask, mask)


def less_the_mean(batch: Solutions) -> Tensor:
    chances = line_chances(batch)
    return chances - chances[batch.mask].mean()


REWARDS: dict[str, tuple[Callable[[Solutions], Tensor], Callable[..., Tensor]]] = {
    "outcome": (lambda batch: batch.right.float(), shaped),
    "process, sum": (line_chances, each_line),
    "process, minus the mean": (less_the_mean, each_line),
    "process, least line": (JUDGES["process, least line"], shaped),
}
solvers = {}
for name, (score, shape) in REWARDS.items():
    solvers[name] = Solver(lab.seed, start, score)
    train(solvers[name], steps=STEPS, beta=BETA, shape=shape)


def course(name: str, of: Callable[[Solutions], Tensor]) -> list[float]:
    return [float(of(batch).float().mean()) for batch in solvers[name].seen]


# %%
lab.plot(
    "Last line right",
    [line(course(name, lambda s: s.right), name) for name in REWARDS],
    x="step",
    y="share of 64 solutions",
    look_at="the outcome reward is the fastest at what it pays for. One of the process rewards "
    "falls to nothing.",
)
lab.plot(
    "Every line right",
    [line(course(name, lambda s: s.sound), name) for name in REWARDS],
    x="step",
    y="share of 64 solutions",
    look_at="the outcome reward taught two mistakes that cancel. The process rewards taught to "
    "add.",
    leads=True,
)
lab.plot(
    "Lines of a solution",
    [line(course(name, lambda s: s.mask.sum(1)), name) for name in REWARDS],
    x="step",
    y="lines, of 16 at most",
    look_at="a sum of probabilities pays for every line, so the policy writes the same line again "
    "until there is no room. Less the mean, a line that says nothing new earns nothing.",
)

# %% [markdown]
# ## Held out: five numbers
#
# New problems end before the second mistake can cancel the first: of the six places they lack the
# fifth. The rewards never saw one.

# %%
held_out = {"start": solve(start[PLACES], 2000, luck, 5)}
for name, solver in solvers.items():
    held_out[name] = solve(solver.table.detach()[PLACES], 2000, luck, 5)
final = {"start": solve(start, 2000, luck)}
final |= {name: solve(solver.table.detach(), 2000, luck) for name, solver in solvers.items()}


def share(flags: Tensor) -> float:
    return float(flags.float().mean())


lab.table(
    ["reward", "last line right", "every line right", "lines", "five numbers: last line right"],
    [
        [
            name,
            share(final[name].right),
            share(final[name].sound),
            share(final[name].mask.sum(1)),
            share(held_out[name].right),
        ]
        for name in final
    ],
)

# %% [markdown]
# ## A chapter's code
#
# A chapter reads the states at the ends of the lines by `hidden_states[:, step_positions, :]`.
# With positions of the shape (batch, steps) that gives every solution the positions of all others.

# %%
hidden = torch.randn(2, 10, 8)
positions = torch.tensor([[2, 5, 9], [1, 4, 7]])
wrong_shape = list(hidden[:, positions, :].shape)
right_shape = list(hidden[torch.arange(2)[:, None], positions].shape)
lab.text(f"hidden[:, positions, :] has the shape {wrong_shape}; what is meant has {right_shape}.")

# %% [markdown]
# ## The numbers

# %%
reached = max(abs(seen - t) for seen, t in zip(every["process, least line"], theory, strict=True))
grown = share(final["process, sum"].mask.sum(1))
lab.expect(
    "start: right last lines that rest on a wrong one",
    resting,
    0.87,
    0.93,
    "theory: 0.90, with 4 standard errors",
)
lab.expect(
    "process, best of n minus 1 − (1 − q)ⁿ, largest",
    reached,
    0,
    0.1,
    "theory: 4 standard errors of 400 problems",
)
lab.expect(
    "outcome: every line right in the best of 64",
    every["outcome"][-1],
    0,
    0.1,
    "seeds 0 to 4: 0 to 0.018",
)
more = "outcome, as many labels"
lab.expect(
    "outcome, as many labels: every line right in the best of 64",
    every[more][-1],
    0,
    0.05,
    "seeds 0 to 4: 0",
)
lab.expect(
    "outcome, as many labels: last line right in the best of 64",
    last[more][-1],
    0.88,
    1,
    "seeds 0 to 4: 0.945 to 0.998",
)
lab.expect("the weakest line is a wrong one", share(hit), 0.95, 1, "seeds 0 to 4: 1")
taught = final["outcome"]
lab.expect(
    "trained on the outcome: last line right",
    share(taught.right),
    0.96,
    1,
    "seeds 0 to 4: 0.993 to 0.997",
)
lab.expect(
    "trained on the outcome: every line right", share(taught.sound), 0, 0.03, "seeds 0 to 4: 0"
)
lab.expect(
    "trained on the outcome: last line right, five numbers",
    share(held_out["outcome"].right),
    0,
    0.03,
    "seeds 0 to 4: 0 to 0.005",
)
lab.expect("trained on the sum: lines", grown, 15, 16, "theory: 16, the most that there are")
for name in ("process, minus the mean", "process, least line"):
    lab.expect(
        f"trained on {name}: last line right, five numbers",
        share(held_out[name].right),
        0.97,
        1,
        "seeds 0 to 4: 0.996 to 1",
    )
lab.expect(
    "dimensions of the chapter's states", len(wrong_shape), 4, 4, "theory: 4, where 3 are meant"
)

# %% [markdown]
# **Question to try.** Give the third line a chance of 0.6 to be right instead of 0.25 (`HABITS`).
# Does the outcome reward still teach the two mistakes? At which chance does it change its mind?

# %%
lab.finish(
    "Rewarded for the last line alone, the solver learns two mistakes that cancel. Rewarded "
    "by the sum over lines, it writes as many lines as it may. A reward less its mean, or "
    "the least of the lines, avoids both."
)
