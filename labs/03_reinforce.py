# %% [markdown]
# # 3. REINFORCE: do more of what earned reward
#
# **Goal.** Teach a language model with nothing but its own answers and a number for each.
# See that the sign of the reward is all that points the way.
#
# **Chapter:** reinforcement learning for language models, the policy gradient.
#
# **Time:** 15 seconds.

# %%
from statistics import fmean as mean

from tether.algorithms.policy_losses import reinforce_loss
from tether.labs import Lab, level, line
from tether.labs.letters import Game

lab = Lab("03_reinforce")
STEPS = 40

# %% [markdown]
# ## The policy gradient
#
# A tiny model with random weights answers four prompts, 16 times each, in 12 bytes.
# The reward of an answer is its share of vowels. The gradient of the expected reward is
#
#     ∇J = E[ r(y) ∇ log π(y) ]     and log π(y) = Σ_t log π(y_t | y_<t)
#
# so the loss is −r(y) log π(y), averaged over the answers. Every token of an answer carries
# the same weight, since nothing says which token earned the reward.


# %%
def train(random_reward: bool) -> Game:
    """A game after its training; it remembers the share of vowels at every step."""
    game = Game(lab.seed, updates=STEPS, random_reward=random_reward)
    for step in range(STEPS):
        batch, scores = game.sample(step)
        logprobs, _ = game.evaluate(batch)
        reward = scores[:, None].expand_as(logprobs)
        loss = reinforce_loss(logprobs, reward, batch.mask, denominator=len(scores))
        game.update(loss, step + 1)
    return game


start = Game(lab.seed, updates=STEPS).by_temperature()
best = max(start.values())
learned = train(random_reward=False)
control = train(random_reward=True)

# %% plot
lab.plot(
    "The mean share of vowels, step by step",
    [
        line(learned.shares, "REINFORCE"),
        line(control.shares, "REINFORCE, random reward"),
        level(best, "the start at its best temperature", [1, STEPS]),
    ],
    x="step",
    y="share of vowels",
    look_at="the curve of the real reward climbs; the one of the random reward does not. "
    "Both models moved: only one of them had a reason to.",
)
lab.table(["temperature of the start", "share of vowels"], list(start.items()))
lab.text("Four answers at the end: " + "  ".join(repr(answer) for answer in learned.answers()))
lab.expect("share at the end", mean(learned.shares[-5:]), 0.3, 0.9, "seeds 0 to 2: TODO")
lab.expect(
    "share, random reward", mean(control.shares[-5:]), 0.0, 0.06, "theory: that of the start, 0.02"
)
lab.expect("start at its best temperature", best, 0.0, 0.06, "seeds 0 to 2: TODO")

# %% [markdown]
# **Question to try.** Subtract 0.5 from every reward. Now bad answers are pushed down, too.
# Is the climb faster or slower, and how jumpy is it? Lab 4 measures this.

# %%
lab.finish()
