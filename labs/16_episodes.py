# %% [markdown]
# # 16. Episodes: what is trained, and what is only read
#
# **Question:** What of a conversation with a tool may a policy learn?
#
# **Goal.** Play episodes and train on them with and without the mask over what the environment
# says. Then see why a conversation must not be rendered again, and what a price per call does.
#
# **Chapter:** tools, environments and episodes of several turns.
#
# **Time:** 10 seconds.

# %%
import json
import math
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.algorithms.advantages import leave_one_out_baseline
from tether.api.labs import Lab, level, line
from tether.core.types import Json, Prompt, Rollout, Sampling, user
from tether.data.chat import ChatEncoder
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards.environments import EnvironmentThreads
from tether.rollout.episodes import EpisodeEngine
from tether.rollout.local import LocalEngine
from tether.settings.environment import EpisodeLimits

lab = Lab("16_episodes")
luck = torch.Generator().manual_seed(lab.seed)
STEPS = 20

# %% [markdown]
# ## An episode
#
# A tiny random model writes a few letters. The environment wants one of a to m: then it pays 1, says
# "Right, go on." and asks for more; otherwise the episode is over. The policy samples its replies,
# and the words of the environment are appended to them as ids.

# %%
PRAISE = "Right, go on."
STOPS = (1, *range(40, 70), *range(150, 261))
"""Ids that end a reply: a random model would seldom end one by the mark of the end alone."""


class Letters:
    """Pays 1 for each reply with a letter from a to m; three replies at most."""

    def reset(self, task: Json) -> None:
        self.turns = 0

    def step(self, message: Json) -> tuple[str, float, bool]:
        self.turns += 1
        right = any(letter in message["content"] for letter in "abcdefghijklm")
        return PRAISE, float(right), self.turns == 3 or not right


tasks = [Prompt((user(f"{n}"),), f"{n}") for n in range(4)]
sampling = Sampling(max_new_tokens=8)
encoder = ChatEncoder(tiny_tokenizer(), STOPS)


def player(model: PreTrainedModel) -> EpisodeEngine:
    engine = LocalEngine(Role(model), encoder)
    return EpisodeEngine(engine, EnvironmentThreads(Letters), encoder, EpisodeLimits())


def score_of(rollout: Rollout) -> float:
    """The sum of what the environment paid."""
    assert rollout.outcome is not None and rollout.outcome.value is not None
    return rollout.outcome.value


def played(engine: EpisodeEngine, step: int) -> list[Rollout]:
    groups = engine.generate(tasks, sampling, num_samples=8, seed=1000 * lab.seed + step)
    return [rollout for group in groups for rollout in group.rollouts]


first = played(player(tiny_model(lab.seed)), 0)
longest = max(first, key=lambda rollout: len(rollout.response_ids))
edges = [0, *(edge for span in longest.spans for edge in span)]
lab.table(
    ["ids", "who", "text"],
    [
        [stop - start, "policy" if number % 2 else "environment", repr(text)]
        for number, (start, stop) in enumerate(pairwise(edges))
        if (text := encoder.decode(longest.response_ids[start:stop]))
    ],
)
read = sum(len(r.response_ids) - r.num_written for r in first)
share = read / sum(len(r.response_ids) for r in first)
lab.text(f"{share:.0%} of the tokens of all episodes come from the environment or the template.")

# %% [markdown]
# ## With and without the mask
#
# REINFORCE with the mean of the other episodes of a group as the baseline. With the mask the loss
# has the tokens that the policy sampled. Without it every token has the advantage of its episode, as
# if the policy had written what the environment said. Episodes in which it says more are better ones
# here, so the policy learns to say "Right, go on." itself. We measure how likely it holds the
# environment's words; there is a gap where no episode of a step has any.


# %%
def logprobs_of(model: torch.nn.Module, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """The log-probability of each token behind the prompt, and whether the policy wrote it."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
    logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    behind = logprobs.gather(1, ids[0, 1:, None])[len(rollout.prompt_ids) - 1 :, 0]
    written = torch.zeros(len(behind), dtype=torch.bool)
    for start, stop in rollout.spans:
        written[start:stop] = True
    return behind, written


def trained(*, masked: bool) -> tuple[list[float], list[float | None]]:
    """By step the reward, and the mean log-probability of a token of the environment."""
    model = tiny_model(lab.seed)
    engine = player(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rewards: list[float] = []
    likely: list[float | None] = []
    for step in range(STEPS):
        rollouts = played(engine, step)
        scores = torch.tensor([score_of(rollout) for rollout in rollouts])
        groups = torch.arange(len(rollouts)) // 8
        advantages = scores - leave_one_out_baseline(scores, groups)
        pairs = [logprobs_of(model, rollout) for rollout in rollouts]
        counted = [written if masked else torch.ones_like(written) for _, written in pairs]
        losses = [
            -(logprobs * mask).sum() * advantage
            for (logprobs, _), mask, advantage in zip(pairs, counted, advantages, strict=True)
        ]
        read = torch.cat([logprobs[~written] for logprobs, written in pairs])
        rewards.append(float(scores.mean()))
        likely.append(float(read.detach().mean()) if len(read) else None)
        optimizer.zero_grad()
        (torch.stack(losses).sum() / sum(int(mask.sum()) for mask in counted)).backward()
        optimizer.step()
        engine.update_weights(step + 1)
    return rewards, likely


runs = {name: trained(masked=name == "masked") for name in ("masked", "not masked")}

# %%
lab.plot(
    "How likely the policy holds the environment's words",
    [line(likely, name) for name, (_, likely) in runs.items()],
    x="step",
    y="log-probability a token, nats",
    look_at="without the mask the policy learns the lines of the environment.",
    leads=True,
)
rise: dict[str, float] = {}
for name, (_, likely) in runs.items():
    seen = [value for value in likely if value is not None]
    rise[name] = seen[-1] - seen[0] if seen else 0.0
lab.table(
    [
        "",
        "reward, first 5 steps",
        "reward, last 5",
        "rise of the environment's words, nats a token",
    ],
    [[name, sum(r[:5]) / 5, sum(r[-5:]) / 5, rise[name]] for name, (r, _) in runs.items()],
)

# %% [markdown]
# ## Rendered again
#
# A call that was read and is written again has the template's spelling. Policies have their own: with
# or without a space, the arguments in another order. All four below are the same call. If the policy
# writes them with the probabilities of the table, and the conversation is rendered again, the ids that
# are trained were not sampled: the ratio of an untrained policy, which must be 1, is p(template's) /
# p(sampled), with the mean 4 p(template's).

# %%
SPELLINGS = {
    '{"a": 6, "b": 7}': 0.4,
    '{"a":6,"b":7}': 0.3,
    '{"b": 7, "a": 6}': 0.2,
    '{"a": 6,  "b": 7}': 0.1,
}
chances = torch.tensor([*SPELLINGS.values()])
again = [json.dumps(dict(sorted(json.loads(text).items()))) for text in SPELLINGS]
same_call = len(set(again))
ids = [encoder.tokenizer(text)["input_ids"] for text in SPELLINGS]
ids_again = [encoder.tokenizer(text)["input_ids"] for text in again]
differs = torch.tensor([a != b for a, b in zip(ids, ids_again, strict=True)])
drawn = torch.multinomial(chances, 4000, replacement=True, generator=luck)
drift = float(differs[drawn].float().mean())
ratios = chances[0] / chances[drawn]
lab.table(
    ["spelling", "probability", "ids", "ids rendered again", "ratio"],
    [
        [text, chance, len(one), len(other), float(chances[0]) / chance]
        for (text, chance), one, other in zip(SPELLINGS.items(), ids, ids_again, strict=True)
    ],
)
lab.text(f"{drift:.0%} of the calls have other ids when they are rendered again.")

# %% [markdown]
# ## A price for each call
#
# A policy may answer a question at once, or call a tool that is always right. Alone it is right with
# probability 0.9, 0.6 or 0.2, by the kind of question. The reward is 1 for a right answer, less the
# price of a call. So a call pays where the price is below 1 − that probability.

# %%
ALONE = torch.tensor([0.9, 0.6, 0.2])
PRICES = (0.0, 0.05, 0.2, 0.3, 0.5, 0.7, 0.9)


def calls_at(price: float) -> Tensor:
    """By kind of question the probability of a call after the training."""
    table = torch.zeros(len(ALONE), requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.1)
    groups = torch.arange(96) // 8
    kinds = groups % len(ALONE)
    for _ in range(150):
        chance = torch.sigmoid(table)[kinds]
        called = torch.rand(len(kinds), generator=luck) < chance.detach()
        right = torch.rand(len(kinds), generator=luck) < ALONE[kinds]
        scores = torch.where(called, 1 - price, right.float())
        advantages = scores - leave_one_out_baseline(scores, groups)
        logprobs = torch.where(called, chance.log(), (1 - chance).log())
        optimizer.zero_grad()
        (-(advantages * logprobs).mean()).backward()
        optimizer.step()
    return torch.sigmoid(table).detach()


shares = torch.stack([calls_at(price) for price in PRICES])

# %%
lab.plot(
    "Calls by the price of one",
    [
        *(
            line(shares[:, kind].tolist(), f"alone right in {alone:.0%}", PRICES)
            for kind, alone in enumerate(ALONE.tolist())
        ),
        level(0.5, "half of the questions", PRICES),
    ],
    x="price of a call",
    y="share of questions with a call",
    look_at="each kind of question gives up its calls where the price passes 1 − its own chance.",
)
worth = (1 - ALONE)[None] - torch.tensor(PRICES)[:, None]
clear = worth.abs() > 0.06
agrees = ((shares > 0.5) == (worth > 0))[clear].float().mean()

# %% [markdown]
# ## The numbers

# %%
lab.expect(
    "rise of the environment's words, masked",
    rise["masked"],
    -1.5,
    1.5,
    "seeds 0 to 4: −0.98 to 0.60",
)
lab.expect(
    "rise of the environment's words, not masked",
    rise["not masked"],
    2.5,
    6,
    "seeds 0 to 4: 3.76 to 4.58",
)
lab.expect(
    "calls that are one and the same",
    same_call,
    1,
    1,
    "theory: 1",
)
lab.expect(
    "share of calls with other ids, rendered again",
    drift,
    0.6 - 4 * math.sqrt(0.24 / 4000),
    0.6 + 4 * math.sqrt(0.24 / 4000),
    "theory: 0.6, with 4 standard errors",
)
lab.expect("mean ratio at rest, rendered again", ratios.mean(), 1.5, 1.7, "theory: 1.6")
lab.expect("prices at which a call is made where it pays", agrees, 1, 1, "theory: 1")

# %% [markdown]
# **Question to try.** Let the environment say "Wrong." before a failed episode ends, and go on once
# more (`Letters`). Whose words does the policy without the mask learn then, and whose does it unlearn?

# %%
lab.finish(
    "A policy may learn the tokens that it sampled. Trained on the words of the environment, it learns "
    "to say them itself. Rendered again, a call has ids that nobody sampled, and a ratio that is not "
    "1. A price per call leaves the calls that earn more than they cost."
)
