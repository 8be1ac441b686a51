"""A recipe's base model on a device, as shapes: bytes of its weights, of what roles on it hold, and
of passes that are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import torch

from tether.core.types import Sampling
from tether.models.cpu.attention import pick_attention
from tether.models.cpu.llama import cache_bytes
from tether.models.heads import ScalarHead
from tether.models.loading import pick_dtype, plain_attention
from tether.models.trunk import GROUPED, Role
from tether.rollout.cache import share_of
from tether.rollout.decoding import TreeDecoder
from tether.rollout.local import ACCELERATOR_PREFILL_TOKENS
from tether.rollout.sampling import sample_tokens
from tether.runner.planning.devices import Device
from tether.settings.recipe import BaseRecipe
from tether.settings.reward import RewardSection
from tether.settings.sampling import SamplingSection
from tether.settings.supervised import SupervisedSection
from tether.stages.learner import planner

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CUDA_CONTEXT = int(0.6e9)


class ShapedModel:
    """The base model, and the roles that are made on copies of it.

    Args:
        measured: see `Planner`.
    """

    def __init__(
        self,
        recipe: BaseRecipe,
        device: Device,
        config: PretrainedConfig,
        *,
        measured: bool = True,
    ) -> None:
        settings = recipe.model
        self.device = device
        self.config = config
        self.recompute = settings.recompute
        self.measured = measured
        place = torch.device("cuda" if device.gpu else "cpu")
        assumed = "bfloat16" if device.gpu and settings.dtype == "auto" else settings.dtype
        self.dtype = pick_dtype(assumed, "cpu")
        text = config.get_text_config()
        self.hidden = text.hidden_size
        self.vocab = text.vocab_size
        self.layers = text.num_hidden_layers
        self.tied = text.tie_word_embeddings
        self.head = text.vocab_size * text.hidden_size
        base = self.base = planner.shape_model(config, self.dtype, "eager")
        pick = pick_attention if settings.cpu_kernels else plain_attention
        self.attention = pick(settings.attention, place, base)
        self.parameters = base.num_parameters()
        self.trunk = planner.held_bytes(base, settings.quantize)
        layers = [
            planner.weight_bytes(layer.parameters())
            for layer in getattr(base.get_decoder(), "layers", ())
        ]
        # of a frozen model with `offload`
        resting = sum(layers) - max(layers, default=0)
        self.on_host = resting if device.gpu else 0
        # on other ranks, of a learner's trunk: a layer is whole while it runs
        learner = recipe.learner
        self.elsewhere = resting - resting // learner.ranks if learner.shard else 0
        # which has loaded as much
        self.process = CUDA_CONTEXT if device.gpu else psutil.Process().memory_info().rss

    def role(self) -> Role:
        """A role on a copy, with the attention that holds what the real one holds."""
        shaped = {GROUPED: planner.TILED, "sdpa": planner.FUSED}
        attention = shaped.get(self.attention, self.attention)
        return Role(planner.shape_model(self.config, self.dtype, attention))

    def trained(
        self,
        section: SupervisedSection | RewardSection | SamplingSection,
        name: str,
        head: ScalarHead | None = None,
    ) -> tuple[Role, dict[str, int]]:
        """A role that learns, on a model of shapes, and what that holds."""
        held = {"process": self.process, "trunk": self.trunk - self.elsewhere}
        if not self.measured:
            learned = ("optimizer",) if section.lora is False else ("adapter", "optimizer")
            return Role(self.base, None, head), held | {f"{name} {part}": 0 for part in learned}
        role = self.role()
        role.model.recompute = self.recompute
        if section.lora is not False:
            role = Role(planner.shape_adapter(role.model, name, section.lora), name)
        parameters = role.parameters()
        for parameter in parameters:
            parameter.requires_grad_(True)
        if role.adapter is not None:
            held[f"{name} adapter"] = planner.weight_bytes(parameters)
        held[f"{name} optimizer"] = planner.training_bytes(parameters, section.optimizer.kind)
        if dict(section).get("heldout_fraction"):
            held[f"{name}, best so far"] = planner.weight_bytes(parameters)
        role.head = head and head.to("meta")
        return role, held

    def learning(self, role: Role, work: Callable[[], object], cuts: int) -> dict[str, int]:
        """The most that is alive beside weights while a role learns from so many micro-batches."""
        model = role.model
        learned = role.parameters()
        return self._measured(
            lambda: planner.measure_learning(model, learned, work, cuts, self.device.gpu),
        )

    @torch.no_grad()
    def activations(self, role: Role, work: Callable[[], object]) -> dict[str, int]:
        """The most that is alive beside weights while a role does something and learns nothing."""
        extra = role.head.parameters() if role.head else ()
        return self._measured(lambda: planner.measure_pass(role.model, work, extra=extra))

    def _measured(self, peak: Callable[[], int]) -> dict[str, int]:
        return {"activations": peak()} if self.measured else {}

    def frozen(self, offload: bool) -> int:
        return self.trunk - self.on_host * offload

    def rows_at_once(self, rows: int, length: int) -> int:
        """As many of the rows as the local engine decodes together: their cache has a share of the
        memory.
        """
        one = cache_bytes(self.config, 1, length, self.dtype.itemsize)
        return max(1, min(rows, int(self.device.memory) // share_of(self.device.gpu) // one))

    def engine(
        self,
        role: Role,
        prompts: int,
        rows: int,
        longest: int,
        sampling: Sampling,
    ) -> dict[str, int]:
        """Memory of the engine beside weights: its cache, and logits; on a GPU also the larger of
        prefill and draw.

        Args:
            longest: tokens of the longest prompt.
        """
        size = self.dtype.itemsize
        cache = {"cache": cache_bytes(self.config, rows, longest + sampling.max_new_tokens, size)}
        if not self.device.gpu:
            return {**cache, "logits": rows * self.vocab * size}
        drawing = sampler_bytes(rows, self.vocab, self.dtype, sampling)
        return {
            **cache,
            # what all prompts begin with, at most all of one
            "common prefix": cache_bytes(self.config, 1, longest, size) if prompts > 1 else 0,
            "prefill and draw": drawing
            if not self.measured
            else max(drawing, prefill_bytes(role, prompts, longest)),
        }


@torch.no_grad()
def prefill_bytes(role: Role, prompts: int, length: int) -> int:
    """The most bytes alive in a prefill pass of the role, which is on shapes, over prompts of
    `length` tokens.
    """
    decoder = TreeDecoder(role, packed=False)
    rows = max(1, min(prompts, ACCELERATOR_PREFILL_TOKENS // length))
    ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
    return planner.measure_pass(role.model, lambda: decoder.prefill(ids, []))


@torch.no_grad()
def sampler_bytes(rows: int, vocabulary: int, dtype: torch.dtype, sampling: Sampling) -> int:
    """The most bytes alive while a token of every row is drawn, logits included."""
    uniforms = torch.zeros(rows, dtype=torch.float64, device="meta")
    with planner.LiveBytes() as live:
        logits = torch.zeros(rows, vocabulary, dtype=dtype, device="meta")
        sample_tokens(logits, uniforms, sampling)
    return live.peak
