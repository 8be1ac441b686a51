# %% [markdown]
# # 1. A bandit with two actions, and PPO's clip
#
# **Question:** What does PPO's clip prevent when a policy learns many times from the same answers?
#
# **Goal.** See the clip of PPO alone, on a policy that is one number.
# Then see that the same clip keeps whole training runs from going wrong.
#
# **Chapter:** proximal policy optimization, the clipped objective.
#
# **Time:** 3 seconds.

# %%
import torch
from torch.nn.functional import logsigmoid

from tether.algorithms.policy_losses import ppo_clip_loss
from tether.api.labs import Lab, level, line

lab = Lab("01_bandit_and_clip")
torch.manual_seed(lab.seed)
CLIP = 0.2
NOISE = 3.0
EPOCHS = 20

# %% [markdown]
# ## The objective over the ratio
#
# The ratio says how much likelier the new policy π makes an action a: ρ = π(a) / π_old(a).
# π_old is the policy that took the action. The advantage A says how much better than expected
# the action was. PPO maximises min(ρ A, clip(ρ, 1 − ε, 1 + ε) A), with the clip range ε = 0.2.
#
# `ppo_clip_loss` takes the new and the old log-probabilities, the advantages, and a mask of the
# actions that count. It divides the sum over actions by `denominator`. We compute the objective at
# 41 ratios, once for a good action (A = +1) and once for a bad one (A = −1).


# %%
def objective(ratio: torch.Tensor, advantage: float, clip: float) -> torch.Tensor:
    """The objective of each ratio, taken alone."""
    values = []
    for one in ratio:
        loss, _ = ppo_clip_loss(
            one.log().reshape(1, 1),
            torch.zeros(1, 1),
            torch.full((1, 1), advantage),
            torch.ones(1, 1, dtype=torch.bool),
            clip_range=clip,
            denominator=1,
        )
        values.append(-loss)
    return torch.stack(values)


ratios = torch.linspace(0.5, 1.5, 41, requires_grad=True)
good = objective(ratios, +1.0, CLIP)
bad = objective(ratios, -1.0, CLIP)
(slope_good,) = torch.autograd.grad(good.sum(), ratios)
(slope_bad,) = torch.autograd.grad(bad.sum(), ratios)

# %%
places = ratios.tolist()
lab.plot(
    "The clipped objective",
    [line(good.tolist(), "A = +1", places), line(bad.tolist(), "A = −1", places)],
    x="ratio ρ",
    y="objective",
    look_at="each curve is flat on one side only. A good action gains nothing above 1.2, "
    "a bad one nothing below 0.8. The other sides stay steep, so PPO can undo a mistake.",
)
outside_good = slope_good[ratios > 1 + CLIP + 1e-3]
outside_bad = slope_bad[ratios < 1 - CLIP - 1e-3]
undone = slope_good[ratios < 1 - CLIP - 1e-3]
lab.expect("slope above 1 + ε, A = +1", outside_good.abs().max(), 0, 0, "theory: flat")
lab.expect("slope below 1 − ε, A = −1", outside_bad.abs().max(), 0, 0, "theory: flat")
lab.expect("slope below 1 − ε, A = +1", undone.min(), 0.999, 1.001, "theory: A itself, 1")

# %% [markdown]
# ## One action, one number
#
# The policy has one weight z. It takes action 0 with probability π = σ(z) = 1 / (1 + e^−z). It
# starts at z = 0, so π_old = 0.5. We took action 0, and its advantage is +1. Then come ten steps of
# gradient ascent: z ← z + η g. Here g is the slope of the objective at z, and η = 0.5 the learning
# rate.


# %%
def climb(clip: float, steps: int = 10, rate: float = 0.5) -> list[float]:
    """The ratio before each step."""
    logit = torch.zeros(1, 1, requires_grad=True)
    old = logsigmoid(logit).detach()
    seen = []
    for _ in range(steps):
        new = logsigmoid(logit)
        seen.append(float((new - old).detach().exp()))
        loss, _ = ppo_clip_loss(
            new,
            old,
            torch.ones(1, 1),
            torch.ones(1, 1, dtype=torch.bool),
            clip_range=clip,
            denominator=1,
        )
        (slope,) = torch.autograd.grad(loss, logit)
        logit = (logit - rate * slope).detach().requires_grad_()
    return seen


clipped = climb(CLIP)
free = climb(clip=1e6)
# %%
lab.plot(
    "The ratio of the action that was taken",
    [
        line(clipped, "with the clip"),
        line(free, "without"),
        level(1 + CLIP, "1 + ε", [1, 10]),
    ],
    x="step",
    y="ratio ρ",
    look_at="with the clip the ratio crosses 1.2 once and rests where it landed. "
    "The clip takes the gradient away. Nothing pulls the ratio back to 1.2.",
)

# The last step before the bound starts at 2σ(z) < 1.2, so z < 0.406, and is at most η/2 = 0.25
# long.
highest = 2 * float(torch.sigmoid(torch.tensor(0.4055 + 0.25)))
lab.expect("ratio at rest", clipped[-1], 1 + CLIP, highest, "theory: at most one step past 1 + ε")
lab.expect("ratio without the clip", free[-1], 1.5, 2.0, "theory: on its way to 1 / 0.5")

# %% [markdown]
# One chapter trains this bandit with another step: z ← z + η A, without the gradient, and η = 0.5.
# Below its code the chapter prints the ratios 1.000, 1.082, 1.170, 1.200, 1.200: a slow climb, then
# a stop at exactly 1 + ε. If you run the chapter's code, it gives 1.000, then 1.245, and stops,
# since 1.245 is above 1.2. So the clip does not keep the ratio within 1 ± ε. It only ends the push.

# %%
one_step = 2 * float(torch.sigmoid(torch.tensor(0.5)))
lab.text(f"z = 0.5 after one step: ratio = {one_step:.3f}, clipped ratio = {1 + CLIP:.3f}")
lab.expect("ratio after z ← z + 0.5", one_step, 1.2449, 1.2450, "theory: 2σ(0.5)")

# %% [markdown]
# ## Many epochs on the same samples
#
# Now the policy plays. Action 0 pays 1, action 1 pays 0, both with noise of standard deviation 3.
# A batch has 16 plays, and each batch gets 20 gradient steps (epochs), which are far too many.
# 200 policies learn side by side, so that the picture does not depend on luck.
# The advantage of a play is its reward minus the mean of its batch.
# The control is the same training on a reward of noise alone.


# %%
def train(clip: float, pay: float, batches: int = 20) -> tuple[list[float], list[float]]:
    """By batch: the mean probability of action 0, and the share of policies that gave it up."""
    generator = torch.Generator().manual_seed(lab.seed)
    logit = torch.zeros(200, 1)
    everything = torch.ones(200, 16, dtype=torch.bool)
    probability = []
    fooled = []
    for _ in range(batches):
        first = torch.rand(200, 16, generator=generator) < torch.sigmoid(logit)
        reward = pay * first + NOISE * torch.randn(200, 16, generator=generator)
        advantage = reward - reward.mean(1, keepdim=True)
        sign = torch.where(first, 1.0, -1.0)
        old = logsigmoid(sign * logit)
        for _ in range(EPOCHS):
            logit.requires_grad_()
            loss, _ = ppo_clip_loss(
                logsigmoid(sign * logit),
                old,
                advantage,
                everything,
                clip_range=clip,
                denominator=16,
            )
            (slope,) = torch.autograd.grad(loss, logit)
            logit = (logit - slope).detach()
        chance = torch.sigmoid(logit)
        probability.append(float(chance.mean()))
        fooled.append(float((chance < 0.1).float().mean()))
    return probability, fooled


steady, steady_fooled = train(CLIP, pay=1.0)
wild, wild_fooled = train(1e6, pay=1.0)
noise, _ = train(CLIP, pay=0.0)
# %%
lab.plot(
    "The probability of the better action, mean of 200 policies",
    [
        line(steady, "with the clip"),
        line(wild, "without"),
        line(noise, "with the clip, reward of noise alone", dash="dash"),
    ],
    x="batch",
    y="π(action 0)",
    look_at="without the clip the policies rise fast in the first batch, and then the curve stays "
    "flat. Some policies prefer the wrong action and no longer try the other one (a later plot counts them).",
    leads=True,
)
lab.plot(
    "Policies that nearly gave up the better action, π(action 0) < 0.1",
    [line(steady_fooled, "with the clip"), line(wild_fooled, "without")],
    x="batch",
    y="share of 200",
    look_at="without the clip about a quarter of the policies give up. With the clip hardly any does: "
    "one batch of 16 noisy plays cannot decide alone.",
)
lab.table(
    ["", "π(action 0) at the start", "after 20 batches", "gave up the better action"],
    [
        ["with the clip", 0.5, steady[-1], steady_fooled[-1]],
        ["without", 0.5, wild[-1], wild_fooled[-1]],
        ["with the clip, noise alone", 0.5, noise[-1], "-"],
    ],
)

lab.expect("π with the clip", steady[-1], 0.90, 0.97, "seeds 0 to 7: 0.923 to 0.944")
lab.expect("π without the clip", wild[-1], 0.62, 0.82, "seeds 0 to 7: 0.684 to 0.759")
lab.expect(
    "π after noise alone", noise[-1], 0.42, 0.58, "theory: 0.5; seeds 0 to 7: 0.465 to 0.518"
)
lab.expect("gave up, with the clip", steady_fooled[-1], 0, 0.03, "seeds 0 to 7: 0 to 0.01")
lab.expect("gave up, without", wild_fooled[-1], 0.2, 0.36, "seeds 0 to 7: 0.235 to 0.315")

# %% [markdown]
# **Question to try.** Set `EPOCHS` to 1. How much of the clip's work is left, and why?

# %%
lab.finish(
    "The clip stops a policy from going further on an action whose probability has already "
    "moved by 20%. Without the clip about a quarter of the policies gave up the better "
    "action; with it, at most one in a hundred did."
)
