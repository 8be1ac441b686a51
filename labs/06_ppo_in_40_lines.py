# %% [markdown]
# # 6. PPO in 40 lines
#
# **Goal.** Read all of PPO on one screen, and run it on a language model.
# See from its own log that it is put together rightly.
#
# **Chapter:** the whole RLHF loop: policy, reference, reward, value.
#
# **Time:** 20 seconds.

# %%
import inspect
from statistics import fmean as mean

from tether.labs import Lab, level, line
from tether.labs.letters import Game
from tether.labs.ppo import train

lab = Lab("06_ppo_in_40_lines")
STEPS = 20

# %% [markdown]
# ## All of it
#
# `game` has the four models of RLHF: a policy that samples, a frozen reference, a score, and a
# value on the policy's own body. The losses are tether's functions of tensors.

# %%
lab.source(train)
body = inspect.getsource(train).split(":\n", 1)[1]
length = sum(1 for text in body.splitlines() if text.strip() and not text.strip().startswith("#"))

# %% [markdown]
# ## On a language model
#
# A tiny model with random weights answers in 12 bytes; its score is the share of vowels.
# Three runs: PPO with a tether, PPO without one, and PPO on a random reward.

# %%
start = Game(lab.seed, updates=1).by_temperature()
best = max(start.values())
games = {}
logs = {}
for name, beta, random_reward in (
    ("β = 0.02", 0.02, False),
    ("β = 0", 0.0, False),
    ("random reward, β = 0.02", 0.02, True),
):
    game = Game(lab.seed, updates=2 * STEPS, random_reward=random_reward)
    logs[name] = train(game, steps=STEPS, beta=beta, epochs=2)
    games[name] = game

# %% plot
lab.plot(
    "The mean share of vowels",
    [
        *(line(game.shares, name) for name, game in games.items()),
        level(best, "the start at its best temperature", [1, STEPS]),
    ],
    x="step",
    y="share of vowels",
    look_at="two curves climb; the random reward goes nowhere.",
)
lab.plot(
    "KL to the reference",
    [line([step.kl for step in log], name) for name, log in logs.items()],
    x="step",
    y="KL, nats an answer",
    look_at="every curve starts at 0, since the policy starts as its reference. "
    "The tethered run buys its vowels with less KL.",
)
for name, game in games.items():
    lab.text(f"{name}: " + "  ".join(repr(answer) for answer in game.answers()))
lab.table(["temperature of the start", "share of vowels"], list(start.items()))

# %% [markdown]
# ## Is it put together rightly?
#
# Before the first update of a batch the policy is the one that sampled it: every ratio is 1.
# At the first step the policy is the reference: the KL is 0.

# %%
right, free, control = logs.values()
ratios = max(abs(step.first_ratio - 1) for step in right)
lab.expect("lines of PPO", length, 1, 40, "the title")
lab.expect("first ratio, largest distance from 1", ratios, 0, 1e-3, "theory: 0 but for rounding")
lab.expect("KL of the first step", right[0].kl, -1e-4, 1e-4, "theory: 0 but for rounding")
ends = {name: mean(game.shares[-3:]) for name, game in games.items()}
with_tether, without, random_end = ends.values()
lab.expect("share of vowels at the end, β = 0.02", with_tether, 0, 1, "TODO")
lab.expect(
    "share of vowels, random reward", random_end, 0.0, 0.08, "theory: that of the start, 0.02"
)
lab.expect("KL at the end, β = 0 less β = 0.02", free[-1].kl - right[-1].kl, -99, 99, "TODO")

# %% [markdown]
# **Question to try.** Set the epochs to 20. Watch `clip_fraction` in the log, and the KL.

# %%
lab.finish()
