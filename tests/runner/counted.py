"""Bytes alive on a GPU while a stage's own code makes one step, counted on shapes alone.

Stage, learner and engine run unchanged on torch's meta device, whose tensors have no numbers:
models of billions of weights need no memory here. Every storage is counted from birth to death, as
`torch.cuda.max_memory_allocated` counts them on a card. What the host reads is zero. Attention
takes the fused kernels that a card would take; the other kernels' own scratch space, the context of
CUDA and gaps between tensors are not in the count.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import LlamaConfig

from tether.core.errors import TrainingError
from tether.core.types import Prompt, user
from tether.data.chat import ChatEncoder, Encoded
from tether.data.prepare import Ranking
from tether.models.heads import ScalarHead
from tether.models.tiny import tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards.learned import LearnedReward
from tether.rollout.cache import Allowance
from tether.rollout.local import LocalEngine
from tether.runner.planning.devices import gpu
from tether.runner.planning.plan import Plan, plan
from tether.runner.planning.shaped_model import CUDA_CONTEXT
from tether.runner.planning.speeds import RowSizes
from tether.settings.reading import build
from tether.settings.recipe import BaseRecipe, Recipe
from tether.stages.direct import Direct
from tether.stages.learner.local import LocalLearner
from tether.stages.learner.planner import LiveBytes, shape_adapter, shape_answers, shape_model
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.reward import RewardModeling
from tether.stages.sft import SFT
from tether.stages.supervised import headline, make_step

SAMPLING = {
    "prompts_per_step": 16,
    "samples_per_prompt": 8,
    "max_new_tokens": 16,
    "engine_rows": 128,
}
META = torch.device("meta")
TEMPLATE = 3
"""Tokens that the tiny model's template adds to a message."""
FIRST_RATIO = "before any update the ratio is off"


class CardBytes(LiveBytes):
    """`LiveBytes` of code that also reads numbers: the host gets zeros.

    An operation that has been seen with arguments of these shapes is not worked out again.
    peaks: the most bytes of each phase that was marked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[str, int] = {}
        self.results: dict[Any, list[Any]] = {}

    def mark(self, phase: str) -> None:
        """All since the last mark was this phase."""
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.peak)
        self.peak = self.current

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0
        if func is torch.ops.aten._to_copy.default and _leaves_card(args[0], options):
            return torch.zeros(args[0].shape, dtype=options.get("dtype") or args[0].dtype)
        if not _makes_tensors(func):
            return super().__torch_dispatch__(func, types, args, options)
        key = func, _described(args), _described(options)
        if key not in self.results:
            output = super().__torch_dispatch__(func, types, args, options)
            if all(isinstance(one, Tensor) and one.is_meta for one in tree_leaves(output)):
                leaves, form = tree_flatten(output)
                self.results[key] = [form, *((t.shape, t.stride(), t.dtype) for t in leaves)]
            return output
        form, *layouts = self.results[key]
        made = [torch.empty_strided(*one[:2], dtype=one[2], device=META) for one in layouts]
        for tensor in made:
            self._count(tensor.untyped_storage())
        return tree_unflatten(made, form)

    def _count(self, storage: Any) -> None:
        if storage.device.type == "meta":
            super()._count(storage)


def _leaves_card(tensor: Tensor, options: dict[str, Any]) -> bool:
    """Whether a copy of it goes to the host."""
    target = options.get("device")
    return tensor.is_meta and target is not None and torch.device(target).type == "cpu"


@cache
def _makes_tensors(func: Any) -> bool:
    """Whether an operation gives new tensors alone: no view, nothing written."""
    return not any(part.alias_info for part in (*func._schema.arguments, *func._schema.returns))


def _described(value: Any) -> Any:
    """What decides the shape of an operation's result."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(part)) for name, part in value.items())
    return type(value), value


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` by the kernel that CUDA takes: flash, with a mask the
    memory-efficient one.
    """
    kernels = torch.ops.aten
    if attn_mask is None:
        return kernels._scaled_dot_product_flash_attention(
            query,
            key,
            value,
            dropout_p,
            is_causal,
            scale=scale,
        )[0]
    bias = attn_mask
    if bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, -torch.inf)
    bias = bias.expand(*query.shape[:-1], key.shape[-2])
    return kernels._scaled_dot_product_efficient_attention(
        query,
        key,
        value,
        bias,
        True,
        dropout_p,
        is_causal,
        scale=scale,
    )[0]


@contextmanager
def pretended_card(memory: float) -> Iterator[CardBytes]:
    """Within this block tensors on meta are counted as those of a card of so many bytes."""
    share = Allowance(int(memory) // 3, int(memory))
    with ExitStack() as stack:
        for name, value in {
            "torch.nn.functional.scaled_dot_product_attention": fused_attention,
            "tether.rollout.cache.allowance": lambda _: share,
            # proven on numbers, which are not there
            "tether.rollout.proof.step_decoder": lambda *_: None,
        }.items():
            stack.enter_context(patch(name, value))
        yield stack.enter_context(CardBytes())


@dataclass
class Bench:
    """A model on a pretended card, and what the stages of a recipe take from it.

    sizes: of the rows; all prompts and all answers have these lengths.
    """

    recipe: BaseRecipe
    shape: dict[str, Any]
    sizes: RowSizes
    live: CardBytes

    def __post_init__(self) -> None:
        self.model = shape_model(LlamaConfig(**self.shape), torch.bfloat16, "sdpa")
        self.model.recompute = self.recipe.model.recompute
        self.encoder = ChatEncoder(tiny_tokenizer(), (1,), None, None)
        # transformers makes the output layer before it ties it to the embeddings
        self.live.peak = self.live.current

    def role(self, section: Any, name: str, head: ScalarHead | None = None) -> Role:
        """A role that learns, or a trained scorer: an adapter on the model, or all of it."""
        if section.lora is False:
            return Role(self.model, None, head and head.to(META))
        self.model = shape_adapter(self.model, name, section.lora)
        return Role(self.model, name, head and head.to(META))

    @property
    def dim(self) -> int:
        return self.shape["hidden_size"]

    def conversations(self, count: int) -> list[Encoded]:
        """So many prompts, each with an answer."""
        answer = self.sizes.answer or self.sizes.prompt
        return [one for (one,) in shape_answers(count, self.sizes.prompt, 1, answer)]

    def rankings(self, count: int) -> list[Ranking]:
        """So many prompts, each with a pair of answers."""
        answer = self.sizes.answer or self.sizes.prompt
        groups = shape_answers(count, self.sizes.prompt, 2, answer)
        return [
            Ranking(str(number), tuple(group), (0,), (1,), (1.0,), (0.0,))
            for number, group in enumerate(groups)
        ]

    def prompts(self, count: int) -> list[Prompt]:
        """So many prompts of the tiny tokenizer, which makes a token of every byte."""
        width = self.sizes.prompt - TEMPLATE
        return [
            Prompt((user(f"question {number}".ljust(width)[:width]),), str(number))
            for number in range(count)
        ]


def warmed(learner: LocalLearner) -> LocalLearner:
    """A learner as it is from its second update on, with the optimizer's moments.

    AdamW on a GPU works on all weights at once, which torch does not do by itself on meta.
    """
    for group in learner.optimizer.param_groups:
        group["foreach"] = True
    for master in learner.masters:
        master.grad = torch.zeros_like(master)
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return learner


def supervised(stage: Any, section: Any, rows: Sequence[Any]) -> None:
    """An update of a stage on rows beside the best weights so far, and an evaluation."""
    role = stage.role
    learner = warmed(LocalLearner(role.parameters(), section.optimizer_for(role.adapter), 2))
    best = [parameter.detach().clone() for parameter in learner.parameters]
    role.train_mode(stage.dropout)
    make_step(stage, learner, rows)
    headline(stage, rows)
    del best


def sft(bench: Bench, section: Any) -> None:
    stage = SFT(section, bench.role(section, "sft"), bench.encoder)
    supervised(stage, section, bench.conversations(section.batch_size))


def reward(bench: Bench, section: Any) -> None:
    role = bench.role(section, "reward", ScalarHead(bench.dim, zero=False))
    stage = RewardModeling(section, role, bench.encoder)
    supervised(stage, section, bench.rankings(section.prompts_per_update))


def direct(bench: Bench, section: Any) -> None:
    role = bench.role(section, "policy")
    stage = Direct(section, role, Role(bench.model), bench.encoder)
    supervised(stage, section, bench.rankings(section.prompts_per_update))


def online(bench: Bench, section: Any) -> None:
    """A step of a policy gradient with a learned reward."""
    scorer = bench.role(bench.recipe.section("reward"), "reward", ScalarHead(bench.dim))
    policy = bench.role(section, "policy")
    model = bench.model
    scorer = Role(model, scorer.adapter, scorer.head)
    value = Role(model, "policy", ScalarHead(bench.dim).to(META)) if section.critic else None
    reference = Role(model) if section.needs_reference else None
    engine = LocalEngine(policy, bench.encoder, max_rows=section.engine_rows)
    stage = PolicyGradient(
        config=section,
        policy=policy,
        reference=reference,
        value=value,
        reward=LearnedReward(scorer, bench.encoder),
        engine=engine,
        encoder=bench.encoder,
    )
    warmed(stage.learner)
    draw = engine.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        bench.live.mark("update")
        groups = draw(*args, **kwargs)
        bench.live.mark("rollout")
        return groups

    with patch.object(engine, "generate", generate):
        try:
            stage.step(bench.prompts(section.prompts_per_step), 0)
        except TrainingError as error:
            # after its updates: the ratio, a number, is 0 here
            if not str(error).startswith(FIRST_RATIO):
                raise
    bench.live.mark("update")


STAGES: dict[str, Callable[[Bench, Any], None]] = {
    "sft": sft,
    "reward": reward,
    "direct": direct,
    "ppo": online,
    "grpo": online,
}


def count(
    recipe: BaseRecipe,
    name: str,
    shape: dict[str, Any],
    sizes: RowSizes,
    memory: float,
) -> dict[str, int]:
    """The most bytes alive on a card of so much memory in each phase of a step of the stage."""
    with pretended_card(memory) as live:
        STAGES[name](Bench(recipe, shape, sizes, live), recipe.section(name))
        live.mark("update")
    return live.peaks


def recipe_of(card: float, **sections: dict[str, Any]) -> BaseRecipe:
    """A recipe with all stages at their defaults but for some keys; short answers, which take few
    steps here, and a card below 40 GB recomputes layers.
    """
    stages: dict[str, dict[str, Any]] = {name: {} for name in STAGES}
    stages["ppo"] = stages["grpo"] = dict(SAMPLING)
    for name, values in sections.items():
        stages[name] = {**stages.get(name, {}), **values}
    model = {"source": "tiny", "recompute": card < 40, **stages.pop("model", {})}
    return build(Recipe, {"run": "unused", "model": model, **stages})


def planned_beside_counted(
    recipe: BaseRecipe,
    name: str,
    shape: dict[str, Any],
    sizes: RowSizes,
    card: float,
) -> tuple[Plan, dict[str, int], dict[str, int]]:
    """The plan of a stage for a card of so many GB; the most bytes of its rollout and of the rest,
    by the plan and counted, without the context of CUDA.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = {**shape, "model_type": "llama"}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        made = plan(recipe, gpu(card), shape=folder, sizes={name: sizes}, stages=[name])
    totals: dict[str, int] = {}
    for phase in made.stages[0].phases:
        kind = "rollout" if phase.name == "rollout" else "update"
        totals[kind] = max(totals.get(kind, 0), phase.total - CUDA_CONTEXT)
    return made, totals, count(recipe, name, shape, sizes, card * 1e9)
