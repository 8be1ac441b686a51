# %% [markdown]
# # 5. The KL-shaped reward, and four classic mistakes
#
# **Question:** Which mistakes in the KL penalty raise no error, and how are they found?
#
# **Goal.** Put a score and a KL penalty together into one reward for each token.
# Then make the four mistakes that everybody makes once, and let tether's doctor find them.
#
# **Chapter:** the KL penalty as a part of the reward, and how it goes wrong.
#
# **Time:** 6 seconds.

# %%
import torch
from torch import Tensor

from tether.api.labs import Lab, line, ratio
from tether.api.labs.ppo import shaped, train
from tether.api.labs.words import Answers, Shop, base, draw, exact_kl, gold, logprobs_of
from tether.watch.monitoring.doctor import Finding, kl_sign, score_once, wrong_reference
from tether.watch.monitoring.doctor_log import check_rows

lab = Lab("05_kl_shaped_reward")
BETA = 0.3
STEPS = 30

# %% [markdown]
# ## The reward of a token
#
#     r_t = −β (log π(y_t) − log π_ref(y_t)) + score · [t is the last token]
#
# - y_t is the token at place t. In these labs a token is a word.
# - π is the policy, and π_ref the reference: a frozen copy of the fine-tuned (SFT) model.
# - β is the strength of the penalty. The bracket is 1 at the last token and 0 elsewhere.
#
# The log ratios of an answer add up to an estimate of the KL: how far the policy has moved. Its mean
# over the policy's answers is the KL. The unit is the nat, as the logarithm is the natural one.
#
# Two ways to charge for the KL give the same total: a little at each token, or all of it at the end
# (terminal). Per token is better for learning, since each token pays for its own change.
#
# The policy is the assistant of a shop that answers in eleven words (`labs/words.py`). `gold` is
# the truth about an answer: 1 point for a promise, 1 for thanks, and −1 for each repeated word. We
# draw 200 answers, change their log-probabilities a little, and compare the two totals.

# %%
lab.source(shaped)
luck = torch.Generator().manual_seed(lab.seed)
shop = Shop(lab.seed, gold)
answers = draw(shop.start, 200, luck)
reference = logprobs_of(shop.start, answers)
moved = reference + 0.1 * torch.randn(reference.shape, generator=luck) * answers.mask
scores = gold(answers)
rewards = shaped(scores, moved, reference, answers.mask, BETA)
terminal = scores - BETA * ((moved - reference) * answers.mask).sum(1)
gap = float((rewards.sum(1) - terminal).abs().max())
lab.expect("per token minus terminal, in total", gap, 0, 1e-4, "theory: the same sum")

# %% [markdown]
# ## Four mistakes
#
# 1. **Sign.** +β instead of −β: the policy is paid to leave its reference.
# 2. **Broadcast.** The score at every token instead of the last: long answers are paid by the word.
# 3. **Moving reference.** The reference shares the policy's weights, so the KL is always 0.
# 4. **Base instead of SFT.** The reference is the model before fine-tuning: the KL pulls the
#    policy towards the wrong model.
#
# The score here is the truth itself. At the end of the first three wrong runs it is as high as that
# of the right run, or higher (table below). So a look at the reward does not find these mistakes.


# %%
def wrong_sign(
    scores: Tensor, policy: Tensor, reference: Tensor, mask: Tensor, beta: float
) -> Tensor:
    return shaped(scores, policy, reference, mask, -beta)


def broadcast(
    scores: Tensor, policy: Tensor, reference: Tensor, mask: Tensor, beta: float
) -> Tensor:
    nothing = torch.zeros_like(scores)
    return shaped(nothing, policy, reference, mask, beta) + scores[:, None] * mask


class MovingShop(Shop):
    """A shop whose reference is its own policy."""

    def reference_logprobs(self, answers: Answers) -> Tensor:
        return logprobs_of(self.table.detach(), answers)


variants = {
    "right": (Shop(lab.seed, gold), shaped),
    "sign": (Shop(lab.seed, gold), wrong_sign),
    "broadcast": (Shop(lab.seed, gold), broadcast),
    "moving reference": (MovingShop(lab.seed, gold), shaped),
    "base": (Shop(lab.seed, gold, reference=base()), shaped),
}
logs = {}
for name, (game, shape) in variants.items():
    logs[name] = train(game, steps=STEPS, beta=BETA, shape=shape)

# %%
lab.plot(
    "The true KL to the start, the SFT model",
    [line(game.drift, name) for name, (game, _) in variants.items()],
    x="step",
    y="KL, nats an answer",
    look_at="the right run levels off lowest. The wrong sign pays for KL, and a moving "
    "reference charges nothing. Broadcast pays the score several times, so the same β weighs less. "
    "The base pulls the policy away from what SFT taught.",
    leads=True,
)
lab.plot(
    "The KL that each run reports about itself",
    [line([step.kl for step in log], name) for name, log in logs.items()],
    x="step",
    y="KL to its own reference, nats an answer",
    look_at="two lines show their fault. The line of the moving reference is 0 throughout. The line "
    "of the base starts high, and every run with the right reference starts at 0.",
)

# %% [markdown]
# ## The doctor
#
# `tether doctor` looks at a stage before training and at its log afterwards. Its checks are plain
# functions. Four of them are enough here:
#
# - KL sign: if the policy's log-probabilities rise by 1, the reward must fall.
# - Score placement: each answer must have its score once, at its last token.
# - Reference: before training, policy and reference must have the same log-probabilities.
# - Reference, in the log: the KL must start at 0, and must not stay there.


# %%
REFERENCE = {"wrong_reference", "moving_reference"}


def diagnose(name: str) -> list[str]:
    """The checks that find something in a variant."""
    game, shape = variants[name]
    batch = draw(game.start, 100, torch.Generator().manual_seed(1))
    policy = logprobs_of(game.start, batch)
    own = logprobs_of(game.reference, batch)
    scores = torch.linspace(1.0, 2.0, len(policy))
    lengths = batch.mask.sum(1).tolist()
    before = shape(scores, policy, policy, batch.mask, BETA).sum()
    lifted = shape(scores, policy + 1, policy, batch.mask, BETA).sum()
    rows = [
        {"step": number, "grad_norm": 1.0, "kl/policy_reference_k1": step.kl}
        for number, step in enumerate(logs[name], start=1)
    ]
    checks = {
        "KL sign": kl_sign(float(lifted - before), BETA, "reward"),
        "score placement": score_once(shape(scores, policy, policy, batch.mask, 0.0), lengths),
        "reference": wrong_reference(policy, own, batch.mask),
    }
    found = [check for check, result in checks.items() if isinstance(result, Finding)]
    in_log = {one.check for one in check_rows(rows, {}) if isinstance(one, Finding)}
    return [*found, *["reference, in the log"] * bool(in_log & REFERENCE)]


findings = {name: diagnose(name) for name in variants}
last = {name: draw(game.table.detach(), 1000, luck) for name, (game, _) in variants.items()}
lab.table(
    ["run", "true reward", "true KL, nats", "words an answer", "found by the doctor"],
    [
        ["start", float(scores.mean()), 0.0, float(answers.mask.sum(1).float().mean()), "-"],
        *(
            [
                name,
                float(gold(last[name]).mean()),
                exact_kl(game.table.detach(), game.start),
                float(last[name].mask.sum(1).float().mean()),
                " and ".join(findings[name]) or "nothing",
            ]
            for name, (game, _) in variants.items()
        ),
    ],
)
meant = {
    "right": [],
    "sign": ["KL sign"],
    "broadcast": ["score placement"],
    "moving reference": ["reference, in the log"],
    "base": ["reference", "reference, in the log"],
}
agreed = sum(findings[name] == meant[name] for name in variants)
lab.expect("runs that the doctor judges rightly, of 5", agreed, 5, 5, "theory: each has one fault")
drift = {name: game.drift[-1] for name, (game, _) in variants.items()}
reported = max(abs(step.kl) for step in logs["moving reference"])
lab.expect("KL that the moving reference reports", reported, 0, 1e-6, "theory: 0")
against = {name: ratio(kl, drift["right"]) for name, kl in drift.items()}
lab.expect(
    "KL with the wrong sign, over the right one",
    against["sign"],
    1.8,
    5,
    "seeds 0 to 2: 2.7 to 2.9",
)
lab.expect(
    "KL of the moving reference, over the right one",
    against["moving reference"],
    1.5,
    4,
    "seeds 0 to 2: 2.2 to 2.6",
)
lab.expect(
    "KL with the base, over the right one", against["base"], 3, 9, "seeds 0 to 2: 4.6 to 5.2"
)

# %% [markdown]
# **Question to try.** The broadcast run ends with a good reward here, since repeated words cost.
# Let each word earn 0.1: use `lambda answers: gold(answers) + 0.1 * answers.mask.sum(1)` as the
# score of the right and of the broadcast run. In which of the two do the answers grow more, and
# what happens to their true reward? Why?

# %%
lab.finish(
    "Four wrong penalties train without an error, and all of them let the policy go further "
    "than the right one. The KL that a run reports shows two of them at most; the doctor "
    "names all four."
)
