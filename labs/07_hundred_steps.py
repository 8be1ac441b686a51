# %% [markdown]
# # 7. A hundred steps of PPO, and then without the tether
#
# **Question:** What happens to the answers when nothing holds the policy near its start?
#
# **Goal.** Run PPO for 100 steps against a learned reward, and see reward and KL in one picture.
# Then set β to 0, and read the answers that the reward model likes best.
#
# **Chapter:** PPO for RLHF, the exercise at its end.
#
# **Time:** 8 seconds.

# %%
import torch

from tether.api.labs import Lab, level, line, ratio
from tether.api.labs.ppo import train
from tether.api.labs.words import (
    WORDS,
    Shop,
    best_temperature,
    compare,
    draw,
    fine_tuned,
    fit_reward,
    gold,
    learned,
    random_score,
)

lab = Lab("07_hundred_steps")
luck = torch.Generator().manual_seed(lab.seed)
BETA = 1.0
STEPS = 100

# %% [markdown]
# ## The shop and its reward model
#
# The policy is the assistant of a shop that mends and sends things: a table of which word follows
# which. People compared 1,000 pairs of its answers. The truth behind their labels: a promise to
# mend or to send is worth 1, thanks are worth 1, and each word that is said again costs 1.
#
# The reward model (in the code: `proxy`, as it stands in for the truth) gives each word a number,
# as in lab 2. Hardly any answer in its pairs repeats a word, so it cannot learn the cost of
# repetition.

# %%
reward = fit_reward(compare(1000, luck))
proxy = learned(reward)
best = reward.topk(4).indices.tolist()
lab.table(["word", "its reward"], [[WORDS[word], float(reward[word])] for word in best])

# %% [markdown]
# ## The run
#
# The reward of a word is r_t = −β (log π − log π_ref), and the last word gets the score as well. π
# is the policy, π_ref the frozen start, and β the tether: the price of a nat of KL. The KL measures
# how far the policy has moved from its start. Here it is computed exactly, in nats. `labs/ppo.py`
# has all 40 lines of `train`. On a model of your own the same run is `tether.ppo(model, prompts,
# reward_run, steps=100)`.

# %%
tethered = Shop(lab.seed, proxy)
steps = train(tethered, steps=STEPS, beta=BETA)
scores = [step.score for step in steps]

# %%
lab.plot(
    f"Reward and KL with β = {BETA:g}",
    [line(scores, "reward"), line(tethered.drift, "KL", right=True)],
    x="step",
    y="reward (by the reward model)",
    right="KL, nats an answer",
    look_at="the reward rises, and the KL rises and then stays in a flat band. "
    "That band is the tether holding.",
)

# %% [markdown]
# ## β = 0
#
# The same run without the tether.

# %%
loose = Shop(lab.seed, proxy)
free = train(loose, steps=STEPS, beta=0.0)
free_scores = [step.score for step in free]

# %%
lab.plot(
    "Reward and KL with β = 0",
    [line(free_scores, "reward"), line(loose.drift, "KL", right=True)],
    x="step",
    y="reward (by the reward model)",
    right="KL, nats an answer",
    look_at="the reward is several times as high as with the tether. So is the KL.",
)
lab.plot(
    "The truth, which no training sees",
    [
        line(tethered.truth, f"β = {BETA:g}"),
        line(loose.truth, "β = 0"),
        level(loose.truth[0], "start", [1, STEPS]),
    ],
    x="step",
    y="true reward of the answers",
    look_at="without the tether the truth rises for a few steps, and then falls far below the "
    "start. The reward model reports the opposite.",
    leads=True,
)

# %% [markdown]
# ## Read the answers

# %%
answers = {
    "start": draw(fine_tuned(), 500, luck),
    f"β = {BETA:g}": draw(tethered.table.detach(), 500, luck),
    "β = 0": draw(loose.table.detach(), 500, luck),
}
for name, drawn in answers.items():
    lab.text(f"{name}: " + " / ".join(drawn.texts[:4]))

# %% [markdown]
# ## Is it better than its start?
#
# The verdict is the truth about fresh answers. The table has two controls. One is the start at its
# best temperature: a temperature below 1 makes likely words likelier, with no training. The other
# is a policy that PPO trained for as many steps on a random reward.

# %%
temperature, cooled = best_temperature(gold, luck)
chance = Shop(lab.seed, random_score(lab.seed))
train(chance, steps=STEPS, beta=BETA)
random_answers = draw(chance.table.detach(), 500, luck)
rows = [[name, float(gold(a).mean()), float(proxy(a).mean())] for name, a in answers.items()]
rows.append([f"start at temperature {temperature}", cooled, "-"])
rows.append(
    ["random reward", float(gold(random_answers).mean()), float(proxy(random_answers).mean())]
)
lab.table(["policy", "true reward", "reward model"], rows)

truth = {row[0]: row[1] for row in rows}
gain = truth[f"β = {BETA:g}"] - cooled
thanks = answers["β = 0"].counts[:, WORDS.index("thank")].mean()
flat = tethered.drift[-30:]
gap = free_scores[-1] - scores[-1]
control = truth["random reward"] - truth["start"]
lab.expect(
    "KL over the last 30 steps, largest / smallest",
    ratio(max(flat), min(flat)),
    1,
    2.5,
    "seeds 0 to 2: 1.33 to 1.58",
)
lab.expect("true gain over the cooled start", gain, 0.05, 0.4, "seeds 0 to 2: 0.14 to 0.24")
lab.expect("random reward minus the start", control, -0.35, 0.15, "seeds 0 to 2: 0.01 to 0.10")
lab.expect("true reward with β = 0", truth["β = 0"], -12, -2, "seeds 0 to 2: -9.0 to -5.0")
lab.expect(
    "thanks in an answer, β = 0",
    thanks,
    3,
    6,
    "theory: at most 6 of 12 words; seeds 0 to 2: 5 to 6",
)
lab.expect("reward with β = 0 minus that with β = 1", gap, 2, 10, "seeds 0 to 2: 3.5 to 6.7")

# %% [markdown]
# **Question to try.** Stop the run with β = 0 after 8 steps (`STEPS`). Is it then better than the
# tethered one? How would you know when to stop, if you could not see the truth?

# %%
lab.finish(
    "With β = 1 the reward rises while the KL stays in a band, and the truth gains a "
    "little. With β = 0 the reward rises further and the truth collapses: the answers "
    "become the reward model's favourite words."
)
