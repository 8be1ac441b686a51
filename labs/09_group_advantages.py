# %% [markdown]
# # 9. Group advantages: GRPO against PPO with and without a critic
#
# **Question:** Can the mean of a group of answers replace the critic?
#
# **Goal.** Replace the value model by the mean of a group of answers to the same prompt, and
# measure the variance of the gradient. Then train PPO with a critic, PPO without a critic, and
# GRPO on the same number of answers, and count the memory of each.
#
# **Chapter:** GRPO, and the loop that is compared with PPO in memory and stability.
#
# **Time:** 9 seconds.

# %%
import math
from statistics import fmean as mean

import torch
from torch import Tensor

from tether.algorithms.advantages import (
    group_relative,
    leave_one_out_baseline,
    returns_to_go,
    zero_signal,
)
from tether.algorithms.kl import kl_policy_reference_k2
from tether.algorithms.masked import masked_sum
from tether.algorithms.policy_losses import ppo_clip_loss, reinforce_loss, value_loss
from tether.api.labs import Lab, level, line, points
from tether.api.labs.ppo import train as train_ppo
from tether.api.labs.words import (
    LENGTH,
    TEMPERATURES,
    WORDS,
    Answers,
    Score,
    Shop,
    draw,
    exact_kl,
    fine_tuned,
    gold,
    logprobs_of,
    random_score,
)

lab = Lab("09_group_advantages")
luck = torch.Generator().manual_seed(lab.seed)
ANSWERS = 64
STEPS = 50
BETA = 0.3

# %% [markdown]
# ## The advantage, by hand
#
# A_i = (r_i − mean of the group) / deviation of the group. For the rewards 0.8, 0.2, 0.9, 0.1 of
# the chapter:

# %%
example = torch.tensor([0.8, 0.2, 0.9, 0.1])
one_group = torch.zeros(4, dtype=torch.int64)
advantage = group_relative(example, one_group)
lab.text("group_relative: " + ", ".join(f"{value:+.3f}" for value in advantage))
lab.expect("A of the reward 0.9", advantage[2], 0.9795, 0.9799, "theory: 0.4 / 0.4082 minus 1e-4")

# %% [markdown]
# Another chapter prints "mean=0.45, std=0.2217, advantages=[-1.13 1.58 0.23 -0.68]" below code of a
# PPO step. That code prints nothing and has no groups. The four numbers are also inconsistent: the
# mean square of such advantages is 1, or 3/4 if the deviation divides by n − 1. Here it is 1.07.

# %%
printed = torch.tensor([-1.13, 1.58, 0.23, -0.68])
square = float(printed.square().mean())
ours = float(advantage.square().mean())
lab.expect("mean square of the printed advantages", square, 1.07, 1.08, "arithmetic")
lab.expect("mean square of group_relative, 4 answers", ours, 0.749, 0.751, "theory: 3/4")

# %% [markdown]
# ## The variance of the gradient
#
# A shop answers in words (`labs/words.py`). Each of four prompts is the word before the answer:
# "hello", "sorry", "we" or "wait". The score is the true reward of the answer (1 point for a
# promise, 1 for thanks, −1 for each repeated word) plus a constant of the prompt (`LIKED`).
# Reward models behave like this: some prompts get high scores for every answer.
#
# A batch has 64 answers, G to each prompt. The policy is not updated. Four baselines:
#
# - none;
# - the mean of all other answers of the batch;
# - the mean of the other answers of the group (`leave_one_out_baseline`);
# - a critic: V(prompt, place, word before), fitted to 30,000 answers.

# %%
PROMPTS = torch.tensor([WORDS.index(word) for word in ("hello", "sorry", "we", "wait")])
LIKED = torch.tensor([0.0, 1.0, 2.0, 3.0])
GROUPS = (2, 4, 8, 16, 32)


class Prompted(Shop):
    """A shop with four prompts, groups of answers, and a critic that sees the prompt (or no critic)."""

    def __init__(self, seed: int, score: Score, *, group: int, critic: bool) -> None:
        super().__init__(seed, score)
        self.group, self.critic = group, critic
        self.values = torch.zeros(len(PROMPTS), LENGTH, len(WORDS) + 1, requires_grad=True)
        trained = [self.table, self.values] if critic else [self.table]
        self.optimizer = torch.optim.Adam(trained, lr=0.05)

    def prompts_of_batch(self) -> Tensor:
        """The numbers of the prompts of a batch, in groups."""
        drawn = torch.randint(len(PROMPTS), (self.answers // self.group,), generator=self.luck)
        return drawn.repeat_interleave(self.group)

    def sample(self, step: int) -> tuple[Answers, Tensor]:
        table = self.table.detach()
        self.which = self.prompts_of_batch()
        answers = draw(table, self.answers, self.luck, prompts=PROMPTS[self.which])
        self.truth.append(float(gold(answers).mean()))
        self.drift.append(mean_kl(table))
        return answers, self.score(answers) + LIKED[self.which]

    def evaluate(self, answers: Answers) -> tuple[Tensor, Tensor]:
        logprobs = logprobs_of(self.table, answers)
        if not self.critic:
            return logprobs, torch.zeros_like(logprobs)
        places = torch.arange(LENGTH).expand_as(answers.tokens)
        return logprobs, self.values[self.which[:, None], places, answers.before]


def mean_kl(table: Tensor) -> float:
    """KL to the start in nats an answer, mean of the four prompts."""
    kls = [exact_kl(table, fine_tuned(), prompt) for prompt in PROMPTS.tolist()]
    return sum(kls) / len(kls)


def at_every_word(scores: Tensor, mask: Tensor) -> Tensor:
    """The score of an answer as the return of each of its words."""
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(scores)), mask.sum(1) - 1] = scores
    return returns_to_go(rewards, mask)


still = Prompted(lab.seed, gold, group=1, critic=True)
still.table.requires_grad_(False)
still.answers = 200
for _ in range(150):
    answers, scores = still.sample(0)
    _, values = still.evaluate(answers)
    loss, _ = value_loss(
        values, values, at_every_word(scores, answers.mask), answers.mask,
        clip_range=None, denominator=int(answers.mask.sum()),
    )  # fmt: skip
    still.update(loss, 0)


# %%
def spreads(group: int, batches: int = 120) -> dict[str, float]:
    """By baseline the trace of the gradient's covariance; all see the same answers."""
    still.group, still.answers = group, ANSWERS
    table = fine_tuned().requires_grad_()
    groups = torch.arange(ANSWERS) // group
    rows: dict[str, list[Tensor]] = {}
    for _ in range(batches):
        answers, scores = still.sample(0)
        logprobs = table.log_softmax(1)[answers.before, answers.tokens]
        returns = at_every_word(scores, answers.mask)
        everything = torch.zeros_like(groups)
        baselines = {
            "none": torch.zeros_like(returns),
            "batch": leave_one_out_baseline(scores, everything)[:, None].expand_as(returns),
            "group": leave_one_out_baseline(scores, groups)[:, None].expand_as(returns),
            "critic": still.evaluate(answers)[1].detach(),
        }
        for name, baseline in baselines.items():
            loss = reinforce_loss(logprobs, returns - baseline, answers.mask, denominator=ANSWERS)
            (gradient,) = torch.autograd.grad(loss, table, retain_graph=True)
            rows.setdefault(name, []).append(gradient.flatten())
    return {name: float(torch.stack(drawn).var(0).sum()) for name, drawn in rows.items()}


noise = {group: spreads(group) for group in GROUPS}
doublings = [math.log2(group) for group in GROUPS]

# %%
lab.plot(
    "The variance of the gradient, 64 answers a batch",
    [
        line([noise[g][name] for g in GROUPS], name, doublings, mode="both")
        for name in ("batch", "group", "critic")
    ],
    x="log₂ G, with G the group size",
    y="variance (trace of the covariance)",
    look_at="a group of 2 is a poor baseline. A group of 8 is nearly as good as the critic, which "
    "learned from 30,000 answers. The table shows the variance without a baseline: it is several "
    "times as high.",
)
lab.table(["G", "none", "batch", "group", "critic"], [[g, *noise[g].values()] for g in GROUPS])
over = {name: noise[8][name] / noise[8]["group"] for name in ("none", "batch", "critic")}
pair = noise[2]["group"] / noise[2]["critic"]
lab.expect("G = 8, none over group", over["none"], 4, 9, "seeds 0 to 4: 5.7 to 6.6")
lab.expect("G = 8, batch over group", over["batch"], 1.6, 2.6, "seeds 0 to 4: 2.0 to 2.2")
lab.expect(
    "G = 8, critic over group",
    over["critic"],
    0.65,
    1,
    "theory: about 7/8; seeds 0 to 4: 0.84 to 0.92",
)
lab.expect(
    "G = 2, group over critic", pair, 1.5, 2.5, "theory: about 2; seeds 0 to 4: 1.73 to 1.92"
)

# %% [markdown]
# The mean of the other G − 1 answers is an estimate with an error of its own. So the variance is
# about G/(G − 1) times that of a perfect baseline. Here the critic is nearly perfect. With large
# groups, the variance rises again, because 64 answers then belong to few prompts.
#
# GRPO's mean contains the answer itself. This only multiplies each advantage by (G − 1)/G:

# %%
scores = torch.randn(64, generator=luck)
groups = torch.arange(64) // 8
own = group_relative(scores, groups, scale=False)
others = scores - leave_one_out_baseline(scores, groups)
gap = float((own - 7 / 8 * others).abs().max())
lab.expect("group mean minus 7/8 of leave-one-out, G = 8", gap, 0, 1e-6, "theory: the same")

# %% [markdown]
# ## Groups without a signal
#
# One chapter says that a hard prompt, where all answers score low, still shows which one was best.
# With rewards of 0 and 1 this is wrong: if all answers are wrong, all advantages are 0. At a success
# rate p, all answers of a group have the same reward with probability p^G + (1 − p)^G.

# %%
RATES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
SILENT = (2, 8, 32)


def silent_share(size: int, rate: float) -> float:
    """The share of 1,000 groups whose answers all have one reward."""
    groups = torch.arange(1000 * size) // size
    rewards = (torch.rand(len(groups), generator=luck) < rate).float()
    return float(zero_signal(rewards, groups).float().mean())


silent = {size: [silent_share(size, rate) for rate in RATES] for size in SILENT}
expected = {size: [rate**size + (1 - rate) ** size for rate in RATES] for size in SILENT}

# %%
lab.plot(
    "Groups whose answers all have the same reward, 0 or 1",
    [
        *(points(silent[size], f"G = {size}", RATES) for size in SILENT),
        line(
            [value for size in SILENT for value in (*expected[size], None)],
            "theory",
            [rate for _ in SILENT for rate in (*RATES, RATES[-1])],
            colour="muted",
        ),
    ],
    x="share of answers that are right",
    y="share of groups without a signal",
    look_at="if 2 of 100 answers to a prompt are right, most groups of 8 have no signal.",
)
off = max(abs(a - b) for size in SILENT for a, b in zip(silent[size], expected[size], strict=True))
lab.expect("share of silent groups, largest distance", off, 0, 0.065, "theory: 4 standard errors")

# %% [markdown]
# ## Three trainings
#
# Each step draws 64 answers and makes four updates. PPO is that of lab 6: the KL penalty is in the
# reward. Without a critic, the values are 0. In GRPO the KL penalty is a term of the loss,
# by the estimator k2, tether's default. TRL's GRPO takes k3.


# %%
def train_grpo(game: Prompted) -> None:
    """GRPO: group advantages, PPO's clip, and the KL as a loss."""
    for step in range(STEPS):
        batch, scores = game.sample(step)
        tokens = int(batch.mask.sum())
        old = game.evaluate(batch)[0].detach()
        reference = game.reference_logprobs(batch)
        groups = torch.arange(len(scores)) // game.group
        advantages = group_relative(scores, groups)[:, None].expand_as(old)
        for _ in range(4):
            logprobs, _ = game.evaluate(batch)
            surrogate, _ = ppo_clip_loss(
                logprobs, old, advantages, batch.mask, clip_range=0.2, denominator=tokens
            )
            kl = masked_sum(kl_policy_reference_k2(logprobs, reference), batch.mask) / tokens
            game.update(surrogate + BETA * kl, step + 1)


def trained(score: Score = gold, *, group: int = 1, critic: bool = False) -> Prompted:
    """A shop after PPO, or after GRPO if it has groups."""
    game = Prompted(lab.seed, score, group=group, critic=critic)
    if group > 1:
        train_grpo(game)
    else:
        train_ppo(game, steps=STEPS, beta=BETA)
    return game


runs = {
    "PPO": trained(critic=True),
    "PPO without a critic": trained(),
    "GRPO, G = 8": trained(group=8),
    "GRPO, random reward": trained(random_score(lab.seed), group=8),
}


def truth_of(table: Tensor, temperature: float = 1.0) -> float:
    """The mean truth of 2,000 answers to the four prompts."""
    prompts = PROMPTS.repeat(500)
    return float(gold(draw(table, len(prompts), luck, temperature, prompts=prompts)).mean())


cooled = max(truth_of(fine_tuned(), temperature) for temperature in TEMPERATURES)

# %%
lab.plot(
    "True reward",
    [
        *(line(game.truth, name) for name, game in runs.items()),
        level(cooled, "the start at its best temperature", [1, STEPS]),
    ],
    x="step",
    y="true reward of the answers",
    look_at="PPO without a critic raises the answers to prompts with a high constant, and learns "
    "more slowly. GRPO ends highest. The plot at the top shows its KL.",
)
lab.plot(
    "True reward against KL",
    [
        points(game.truth, name, [kl**0.5 for kl in game.drift], size=6)
        for name, game in runs.items()
    ],
    x="√KL to the start, with the KL in nats an answer",
    y="true reward of the answers",
    look_at="the marks lie nearly on one curve: at the same KL, the gain is the same with and "
    "without a critic. GRPO moves further along the curve, although β is the same.",
    leads=True,
)
ends = {name: truth_of(game.table.detach()) for name, game in runs.items()}
lab.table(
    ["", "true reward", "KL, nats an answer"],
    [
        ["start", truth_of(fine_tuned()), 0.0],
        ["start at its best temperature", cooled, "-"],
        *([name, ends[name], mean_kl(game.table.detach())] for name, game in runs.items()),
    ],
)
start = truth_of(fine_tuned())
kls = {name: mean_kl(game.table.detach()) for name, game in runs.items()}
for name, low, high, seen in (
    ("PPO", 0.55, 1.1, "0.81 to 0.84"),
    ("PPO without a critic", 0.3, 0.95, "0.61 to 0.67"),
    ("GRPO, G = 8", 0.85, 1.3, "1.09 to 1.11"),
):
    gain = ends[name] - cooled
    lab.expect(f"{name} minus the cooled start", gain, low, high, f"seeds 0 to 4: {seen}")
control = ends["GRPO, random reward"] - start
lab.expect(
    "GRPO on a random reward minus the start", control, -0.3, 0.2, "seeds 0 to 4: -0.06 to 0.07"
)
further = kls["GRPO, G = 8"] / kls["PPO"]
lab.expect("KL of GRPO over that of PPO", further, 1.4, 3, "seeds 0 to 4: 2.0 to 2.1")
grpo, ppo = runs["GRPO, G = 8"], runs["PPO"]
near = [step for step in range(STEPS) if abs(grpo.drift[step] - mean(ppo.drift[-10:])) < 0.4]
same = mean(grpo.truth[step] for step in near) - mean(ppo.truth[-10:])
lab.expect("GRPO minus PPO at about the same KL", same, -0.35, 0.3, "seeds 0 to 4: -0.14 to 0.07")

# %% [markdown]
# GRPO divides by the group's deviation. While the policy improves, its answers become similar and
# the deviation of their rewards falls. The advantages keep their size of about 1, so the same β
# weighs less against them. A good β for PPO may be a poor β for GRPO. Compare two methods at the
# same KL.

# %% [markdown]
# ## Memory
#
# A trained weight in mixed precision needs 18 bytes: 2 for itself, 4 for its gradient, and 12 for a
# master copy and Adam's two moments. A frozen weight needs 2 bytes. The table has the sums, without
# activations and caches:

# %%
TRAINED, FROZEN = 18, 2
BYTES = {
    "SFT": TRAINED,
    "GRPO: policy, reference, reward": TRAINED + 2 * FROZEN,
    "PPO with a critic on the policy's body": TRAINED + 2 * FROZEN,
    "PPO with a critic of its own": 2 * TRAINED + 2 * FROZEN,
}
lab.table(
    ["", "bytes a parameter", "7B model, GB", "over SFT"],
    [[name, size, 7.0 * size, size / TRAINED] for name, size in BYTES.items()],
)
share = BYTES["GRPO: policy, reference, reward"] / BYTES["PPO with a critic of its own"]
worst = BYTES["PPO with a critic of its own"] / TRAINED
lab.expect("memory of GRPO over PPO with a critic of its own", share, 0.5, 0.6, "arithmetic")
lab.expect("memory of PPO with four models, over SFT", worst, 2, 2.5, "arithmetic")

# %% [markdown]
# "GRPO needs about half the memory of PPO" is right if the critic is a separate model. In tether and
# in many trainers the critic is one more output layer of the policy. Then GRPO saves one vector of
# weights. "Four models need four times the memory of SFT" counts frozen models like trained ones:
# the factor is 2.2. `tether plan` also counts activations and caches.
#
# **Question to try.** Set all constants in `LIKED` to 0. With which of the baselines does the
# variance fall most? Which training gains most, and which one stays exactly as it was?

# %%
lab.finish(
    "A group of 8 answers is nearly as good a baseline as a critic, without a second model. "
    "At one β GRPO goes about twice as far from the start as PPO, on the same curve of "
    "truth against KL."
)
