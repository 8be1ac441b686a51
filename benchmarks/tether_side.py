"""tether's side of every benchmark: the stages' own steps on rows that were encoded beforehand."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import torch
from contestant import serve, settings

from tether.core.types import Prompt, Sampling, Score, user
from tether.data.batches import make_batch, pack
from tether.data.chat import ChatEncoder, Encoded
from tether.data.prepare import Ranking
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.trunk import Role
from tether.rewards.learned import LearnedReward
from tether.rollout.local import LocalEngine
from tether.runner.assembly.models import open_model
from tether.settings.kl import KLConfig
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.policy import PolicyConfig
from tether.settings.reward import RewardConfig
from tether.settings.supervised import DirectConfig, SFTConfig
from tether.stages.direct import Direct
from tether.stages.learner.local import LocalLearner
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.reward import RewardModeling
from tether.stages.sft import SFT
from tether.stages.supervised import make_step

TASK = settings()
LORA = LoraConfig(rank=16, alpha=32, targets="attention")
OPTIMIZER = OptimizerConfig(learning_rate=1e-5, schedule="constant", warmup_fraction=0)
loaded = open_model(ModelConfig(source=TASK["model"], dtype=TASK.get("dtype", "bfloat16")))
# Every side samples to the limit: a stop token that is as good as never drawn.
encoder = ChatEncoder(
    loaded.tokenizer,
    (TASK.get("stop", 10**9),),
    loaded.template,
    loaded.system_prompt,
)


def adapted(name: str) -> Any:
    return add_adapter(loaded.model, name, LORA, seed=0)


def rows() -> Any:
    return cycle(TASK["rows"])


def encoded(ids: list[int], prompt: int) -> Encoded:
    return Encoded(tuple(ids), tuple(n >= prompt for n in range(len(ids))))


def supervised(stage: Any, convert: Any, amount: Any, metric: str = "loss") -> None:
    learner = LocalLearner(stage.role.parameters(), OPTIMIZER, 10**6)
    source = rows()

    def work() -> dict[str, Any]:
        total, losses = 0, []
        for _ in range(TASK["updates"]):
            chosen = [convert(row) for row in islice(source, TASK["batch"])]
            losses.append(make_step(stage, learner, chosen)[metric])
            total += sum(map(amount, chosen))
        return {"amount": total, "losses": losses}

    serve(work, trainable=sum(p.numel() for p in learner.parameters))


def sft() -> None:
    config = SFTConfig(
        row_tokens=TASK["row_tokens"],
        rows_per_micro_batch=TASK["rows_per_micro_batch"],
    )
    stage = SFT(config, Role(adapted("sft"), "sft"), encoder)
    supervised(stage, lambda row: encoded(row["ids"], row["prompt"]), len)


def ranking(row: dict[str, Any]) -> Ranking:
    sides = tuple(
        encoded(row["prompt"] + row[side], len(row["prompt"])) for side in ("chosen", "rejected")
    )
    return Ranking(row["id"], sides, (0,), (1,), (1.0,), (0.0,))


def reward() -> None:
    role = Role(
        adapted("reward"),
        "reward",
        ScalarHead(loaded.model.config.hidden_size, zero=False),
    )
    stage = RewardModeling(
        RewardConfig(micro_batch_tokens=TASK["micro_batch_tokens"]),
        role,
        encoder,
    )
    supervised(stage, ranking, lambda _: 1)


def dpo() -> None:
    model = adapted("policy")
    stage = Direct(
        DirectConfig(micro_batch_tokens=TASK["micro_batch_tokens"]),
        Role(model, "policy"),
        Role(model),
        encoder,
    )
    supervised(stage, ranking, lambda _: 1)


def logprobs() -> None:
    role = Role(adapted("policy"), "policy")
    learner = LocalLearner(role.parameters(), OPTIMIZER, 10**6)
    sequences = [encoded(row["ids"], row["prompt"]) for row in TASK["rows"][: TASK["batch"]]]
    micro = pack([len(s) for s in sequences], TASK["row_tokens"])
    batches = [
        make_batch([sequences[i] for i in row], encoder.pad_id, capacity=TASK["row_tokens"])
        for row in micro
    ]
    counted = sum(s.num_trained for s in sequences)

    def work() -> dict[str, Any]:
        for _ in range(TASK["updates"]):
            total = 0.0
            for batch in batches:
                values, entropy = role.logprobs(batch)
                learner.backward(-(values.sum() + entropy.sum()) / counted)
                total -= float(values.detach().sum())
            learner.optimizer.zero_grad()
        return {"amount": TASK["updates"] * sum(map(len, sequences)), "losses": [total / counted]}

    serve(work)


class EvenTokens:
    """A reward that costs nothing: the share of even token ids."""

    name = "even"

    def score(self, rollouts: Any) -> list[Score]:
        return [
            Score(sum(i % 2 == 0 for i in r.response_ids) / len(r.response_ids)) for r in rollouts
        ]


def online(stage: Any, samples: int) -> None:
    prompts = cycle(Prompt((user(row["text"]),), str(n)) for n, row in enumerate(TASK["rows"]))
    count = iter(range(10**9))

    def work() -> dict[str, Any]:
        phases: dict[str, float] = {}
        for _ in range(TASK["updates"]):
            metrics, _, _ = stage.step(list(islice(prompts, TASK["batch"] // samples)), next(count))
            for name, value in metrics.items():
                if name.startswith("time/"):
                    phases[name] = phases.get(name, 0.0) + value
        return {"amount": TASK["updates"] * TASK["batch"], "phases": phases}

    serve(work, trainable=sum(p.numel() for p in stage.learner.parameters))


def grpo() -> None:
    model = adapted("policy")
    policy = Role(model, "policy")
    config = PolicyConfig(
        algorithm="grpo",
        steps=10**6,
        prompts_per_step=TASK["batch"] // TASK["group"],
        samples_per_prompt=TASK["group"],
        max_new_tokens=TASK["tokens"],
        micro_batch_tokens=TASK["micro_batch_tokens"],
        optimizer=OPTIMIZER,
        kl=KLConfig(report=False),  # the peers run no reference either
    )
    engine = LocalEngine(policy, encoder, max_rows=TASK["batch"])
    online(
        PolicyGradient(
            config=config,
            policy=policy,
            reference=None,
            value=None,
            reward=EvenTokens(),
            engine=engine,
            encoder=encoder,
        ),
        TASK["group"],
    )


def ppo() -> None:
    """value: "adapter" gives the critic an adapter and passes of its own, "head" a head on the
    policy's states.
    """
    model, dim = adapted("policy"), loaded.model.config.hidden_size
    model = add_adapter(model, "reward", LORA, seed=1)
    if TASK["value"] == "adapter":
        model = add_adapter(model, "value", LORA, seed=2)
    policy = Role(model, "policy")
    value = Role(model, "value" if TASK["value"] == "adapter" else "policy", ScalarHead(dim))
    source = LearnedReward(Role(model, "reward", ScalarHead(dim, zero=False)), encoder)
    config = PolicyConfig(
        steps=10**6,
        prompts_per_step=TASK["batch"],
        samples_per_prompt=1,
        max_new_tokens=TASK["tokens"],
        epochs=4,
        micro_batch_tokens=TASK["micro_batch_tokens"],
        optimizer=OPTIMIZER,
    )
    engine = LocalEngine(policy, encoder, max_rows=TASK["batch"])
    online(
        PolicyGradient(
            config=config,
            policy=policy,
            reference=Role(model),
            value=value,
            reward=source,
            engine=engine,
            encoder=encoder,
        ),
        1,
    )


def rollout() -> None:
    prompts = [Prompt((user(row["text"]),), str(n)) for n, row in enumerate(TASK["rows"])][
        : TASK["batch"]
    ]
    engine = LocalEngine(Role(loaded.model), encoder, max_rows=TASK["batch"])
    engine.generate(prompts[:1], Sampling(max_new_tokens=1))

    def work() -> dict[str, Any]:
        groups = engine.generate(
            prompts,
            Sampling(max_new_tokens=TASK["tokens"], temperature=1.0),
            seed=1,
        )
        return {"amount": sum(len(r.response_ids) for g in groups for r in g.rollouts)}

    serve(work)


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[TASK["task"]]()
