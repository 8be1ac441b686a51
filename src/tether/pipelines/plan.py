"""What a recipe will need before it is run: memory by role and phase, time, and what to switch on where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from tether.assemble import (
    DirectSection,
    KTOSection,
    OnlineSection,
    PolicySection,
    ProcessSection,
    Recipe,
    RewardSection,
    RoundsSection,
    SFTSection,
    describe_sections,
)
from tether.core.errors import ModelError
from tether.data.batches import TokenBatch, cut_batches
from tether.data.comparisons import cut_rankings
from tether.learner.planner import (
    FUSED,
    TILED,
    cache_bytes,
    largest_batch,
    measure,
    shape_answers,
    shape_batch,
    shape_model,
    training_bytes,
    weight_bytes,
    with_adapter,
)
from tether.models.attention import GROUPED
from tether.models.config import TINY, ModelConfig
from tether.models.fused import fuse
from tether.models.heads import ScalarHead
from tether.models.kernels import library
from tether.models.loading import pick_attention, pick_dtype
from tether.models.pretrained import resolve
from tether.models.trunk import Role
from tether.pipelines.devices import Device

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    "qwen2.5-1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "llama-2-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 32, "vocab_size": 32000},
    "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128256},
    "llama-3.1-70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    | {"num_key_value_heads": 8, "vocab_size": 128256},
}
"""Shapes of well-known models, in the terms of a Llama configuration (from their published config.json)."""
SCORING_TOKENS = 4096
"""LearnedReward's micro-batch."""
CUDA_CONTEXT = int(0.6e9)
LINK = 25e9
"""Bytes a second from host memory to a GPU, as PCIe 4 reaches them from pageable memory at best."""


@dataclass
class Phase:
    """Bytes by what holds them, and seconds an update or step."""

    name: str
    bytes: dict[str, int]
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass
class StagePlan:
    name: str
    phases: list[Phase]
    learning_rate: float | None = None

    @property
    def peak(self) -> int:
        return max(phase.total for phase in self.phases)


@dataclass
class Plan:
    device: Device
    parameters: int
    stages: list[StagePlan]
    advice: list[tuple[str, int]] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return max(stage.peak for stage in self.stages)

    @property
    def fits(self) -> bool:
        return self.peak <= self.device.memory


def shape_config(model: ModelConfig, shape: str | None = None) -> Any:
    """A transformers configuration: a name of `SHAPES`, a config.json or a folder with one, or the recipe's own model.

    Raises:
        ModelError: nothing of that kind.
    """
    from transformers import AutoConfig, LlamaConfig

    if shape in SHAPES:
        return LlamaConfig(**SHAPES[shape])
    if shape is not None:
        path = Path(shape).expanduser()
        if not path.exists():
            raise ModelError(f"no shape is called {shape!r}, and no such file exists. There are: {', '.join(SHAPES)}")
        return AutoConfig.from_pretrained(path)
    if model.source == TINY:
        from tether.models.tiny import tiny_model

        return tiny_model(0).config
    return AutoConfig.from_pretrained(resolve(model)[0], trust_remote_code=model.trust_remote_code)


def plan(recipe: Recipe, device: Device, *, shape: str | None = None, prompt_tokens: int = 128, advise: bool = False) -> Plan:
    """Predict every stage of a recipe; where it does not fit, try what would make it fit.

    Args:
        shape: see `shape_config`.
        prompt_tokens: length of the prompts; how long they really are is in the data.
        advise: try it where it fits, too.
    """
    config = shape_config(recipe.model, shape)
    planner = _Planner(recipe, device, config, prompt_tokens)
    made = Plan(device, planner.parameters, planner.stages())
    if advise or not made.fits:
        for what, changed in _changes(recipe):
            made.advice.append((what, max(s.peak for s in _Planner(changed, device, config, prompt_tokens).stages())))
        made.advice.sort(key=lambda row: row[1])
    return made


def _changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """One change of a recipe at a time that trades something for memory."""
    if not recipe.model.recompute:
        yield "model.recompute=true", recipe.model_copy(update={"model": recipe.model.model_copy(update={"recompute": True})})
    for name in describe_sections(recipe):
        section = getattr(recipe, name)

        def changed(values: dict[str, Any], name: str = name, section: Any = section) -> tuple[str, Recipe]:
            text = " ".join(f"{name}.{key}={value if not hasattr(value, 'rank') else '{}'}" for key, value in values.items())
            return text.lower(), recipe.model_copy(update={name: section.model_copy(update=values)})

        if isinstance(section, SFTSection) and section.rows_per_micro_batch > 1:
            yield changed({"rows_per_micro_batch": 1})
        if not isinstance(section, SFTSection):
            yield changed({"micro_batch_tokens": max(8, section.micro_batch_tokens // 4)})
        apart = isinstance(section, OnlineSection) and section.roles == "separate"
        apart = apart or (isinstance(section, (DirectSection, KTOSection)) and section.lora is False and section.needs_reference)
        offloaded = {"offload": False} if getattr(section, "offload", False) else {}  # it would be refused with what comes next
        if apart and not offloaded:
            yield changed({"offload": True})
        if section.lora is False:
            from tether.models.config import LoraConfig

            yield changed({"lora": LoraConfig(), **({} if isinstance(section, OnlineSection) else offloaded)})
        if isinstance(section, OnlineSection):
            if apart and section.lora is not False:
                yield changed({"roles": "shared", **offloaded})
            yield changed({"engine_rows": max(1, section.engine_rows // 4)})


class _Planner:
    """One recipe on one device."""

    def __init__(self, recipe: Recipe, device: Device, config: Any, prompt_tokens: int) -> None:
        self.recipe, self.device, self.config, self.prompt = recipe, device, config, prompt_tokens
        self.dtype = pick_dtype(recipe.model.dtype, "cpu") if not device.gpu else _gpu_dtype(recipe.model.dtype)
        self.hidden = config.get_text_config().hidden_size
        self.vocab = config.get_text_config().vocab_size
        base = shape_model(config, self.dtype, "eager")
        self.attention = pick_attention(recipe.model.attention, torch.device("cuda" if device.gpu else "cpu"), base)
        self.parameters = base.num_parameters()
        self.trunk = weight_bytes(base.parameters())
        layers = [weight_bytes(layer.parameters()) for layer in getattr(base.get_decoder(), "layers", ())]
        self.on_host = sum(layers) - max(layers, default=0) if device.gpu else 0  # of a frozen model with `offload`
        # On a CPU a training process has loaded what this one has.
        self.process = CUDA_CONTEXT if device.gpu else psutil.Process().memory_info().rss

    def stages(self) -> list[StagePlan]:
        makers = {"sft": self._sft, "reward": self._reward, "process": self._process, "direct": self._direct, "kto": self._direct}
        makers["rounds"] = self._rounds
        names = describe_sections(self.recipe)
        sections = {name: getattr(self.recipe, name) for name in names}
        rates = {name: getattr(s, "direct", s).optimizer.learning_rate for name, s in sections.items()}
        return [StagePlan(name, makers.get(name, self._online)(s), rates[name]) for name, s in sections.items()]

    def _model(self) -> Any:
        model = shape_model(self.config, self.dtype, {GROUPED: TILED, "sdpa": FUSED}.get(self.attention, self.attention))
        model.recompute = self.recipe.model.recompute
        return model if self.device.gpu or library() is None else fuse(model)

    def _trained(self, lora: Any, name: str) -> tuple[Any, Role, dict[str, int]]:
        """A model whose role `name` learns, and what that holds."""
        model = self._model()
        if lora is not False:
            model = with_adapter(model, name, lora)
        role = Role(model, name if lora is not False else None)
        parameters = role.parameters()
        for parameter in parameters:
            parameter.requires_grad_(True)
        held = {"process": self.process, "trunk": self.trunk}
        if lora is not False:
            held[f"{name} adapter"] = weight_bytes(parameters)
        held[f"{name} optimizer"] = training_bytes(parameters)
        return model, role, held

    def _frozen(self, offload: bool) -> int:
        return self.trunk - self.on_host * offload

    def _seconds(self, tokens: int, counted: int, passes: float) -> float:
        """`passes` forward passes' worth of products over tokens; the output layer over counted ones only."""
        head = self.vocab * self.hidden
        body = self.parameters - head * (1 if self.config.get_text_config().tie_word_embeddings else 2)
        return 2 * passes * (body * tokens + head * counted) / self.device.products

    def _sft(self, section: SFTSection) -> list[Phase]:
        model, role, held = self._trained(section.lora, "sft")
        half = section.row_tokens // 2
        batch = shape_batch([s for one in shape_answers(section.rows_per_micro_batch, half, 1, half) for s in one.sequences])

        def update() -> None:
            role.logprobs(batch)[0].sum().backward()

        used = measure(model, update)
        # A guess: conversations fill half of what a packed row may hold.
        tokens = section.batch_size * section.row_tokens // 2
        seconds = self._seconds(tokens, tokens // 2, 3.0 if section.lora is False else 2.0)
        return [Phase("update", {**held, "activations": used.peak}, seconds)]

    def _reward(self, section: RewardSection) -> list[Phase]:
        model, role, held = self._trained(section.lora, "reward")
        role.head = ScalarHead(self.hidden).to("meta")
        batch = self._pairs(section.prompts_per_update, section.micro_batch_tokens, role)
        used = measure(model, lambda: role.scores(batch).sum().backward(), extra=role.head.parameters())
        seconds = self._seconds(section.prompts_per_update * 3 * self.prompt, 0, 2.0)
        if section.keep_states_gb:
            held["kept states"] = int(section.keep_states_gb * 1e9)
        return [Phase("update", {**held, "activations": used.peak}, seconds)]

    def _process(self, section: ProcessSection) -> list[Phase]:
        model, role, held = self._trained(section.lora, "reward")
        role.head = ScalarHead(self.hidden, outputs=section.outputs).to("meta")
        length = 2 * self.prompt
        rows = max(1, section.micro_batch_tokens // (self.prompt + length))
        batch = shape_batch([s for one in shape_answers(rows, self.prompt, 1, length) for s in one.sequences])
        used = measure(model, lambda: role.scores(batch).sum().backward(), extra=role.head.parameters())
        seconds = self._seconds(section.solutions_per_update * (self.prompt + length), 0, 2.0)
        return [Phase("update", {**held, "activations": used.peak}, seconds)]

    def _direct(self, section: DirectSection | KTOSection) -> list[Phase]:
        model, role, held = self._trained(section.lora, "policy")
        reference = section.needs_reference
        if reference and section.lora is False:
            held["reference"] = self._frozen(section.offload)
        batch = self._pairs(section.prompts_per_update, section.micro_batch_tokens, role)
        used = measure(model, lambda: role.logprobs(batch)[0].sum().backward())
        tokens = section.prompts_per_update * 3 * self.prompt
        seconds = self._seconds(tokens, tokens // 2, 3.0 if reference else 2.0)
        return [Phase("update", {**held, "activations": used.peak}, seconds)]

    def _rounds(self, section: RoundsSection) -> list[Phase]:
        """A round's sampling, beside the reward model on a trunk of its own, and its training."""
        inner = DirectSection.model_validate({**section.direct.model_dump(exclude_unset=True), "lora": section.lora})
        (update,) = self._direct(inner)
        width, size = self.prompt + section.max_new_tokens, self.dtype.itemsize
        held = {"process": self.process, "trunk": self.trunk} | ({"reward": self.trunk} if section.method == "iterative" else {})
        if not self.device.gpu:
            held["engine"] = self.trunk
        cache = cache_bytes(self.config, section.engine_rows, width, size) + section.engine_rows * self.vocab * size
        decoding = max(self.trunk / self.device.bandwidth, self._seconds(section.engine_rows, section.engine_rows, 1.0))
        return [Phase("rollout", {**held, "cache": cache}, section.max_new_tokens * decoding), update]

    def _pairs(self, prompts: int, budget: int, role: Role) -> TokenBatch:
        """Micro-batch of pairs, answers as long as the prompt: a guess."""
        limit = role.document_tokens(budget)
        groups = shape_answers(min(prompts, 2 + budget // self.prompt), self.prompt, 2, self.prompt)
        cuts = cut_rankings(groups, budget, document_tokens=limit)
        return largest_batch(([s for one in cut for s in one.sequences] for cut in cuts), limit)

    def _samples(self, section: Any, budget: int, role: Role) -> TokenBatch:
        """Micro-batch of a minibatch of samples."""
        parts = section.minibatches if isinstance(section, PolicySection) else 1
        prompts = min(-(-section.prompts_per_step // parts), 2 + 2 * budget // self.prompt)  # more would make no larger one
        groups = shape_answers(prompts, self.prompt, section.samples_per_prompt, section.max_new_tokens)
        sequences, limit = [s for group in groups for s in group.sequences], role.document_tokens(budget)
        cuts = cut_batches(sequences, budget, document_tokens=limit)
        return largest_batch(([sequences[i] for i in cut] for cut in cuts), limit)

    def _online(self, section: Any) -> list[Phase]:
        model, policy, held = self._trained(section.lora, "policy")
        shared, size = section.roles == "shared", self.dtype.itemsize
        adapter = held.get("policy adapter", 0)
        gradient = isinstance(section, PolicySection)
        learned, needs_reference = section.reward_source in ("learned", "process"), section.needs_reference
        critic = gradient and section.critic
        own_value = critic and (not shared or section.value_init == "reward")
        if own_value:
            held["value"] = adapter if shared else self.trunk + adapter
            held["value optimizer"] = held["policy optimizer"]
        if learned:
            held["reward"] = adapter if shared else self._frozen(section.offload) + adapter
        if not shared and needs_reference:
            held["reference"] = self._frozen(section.offload)
        width = self.prompt + section.max_new_tokens
        answers = min(
            section.samples_per_prompt,
            max(1, (policy.document_tokens(section.micro_batch_tokens) - self.prompt) // section.max_new_tokens),
        )
        document = self.prompt + answers * section.max_new_tokens
        batch = self._samples(section, section.micro_batch_tokens, policy)
        value = Role(model, policy.adapter, ScalarHead(self.hidden).to("meta"))
        samples = section.prompts_per_step * section.samples_per_prompt
        tokens, counted = samples * document // answers, samples * section.max_new_tokens

        def forward() -> Any:
            hidden = policy.hidden(batch)
            logprobs, _ = policy.logprobs_of(hidden, batch)
            return logprobs.sum() + (value.values_of(hidden.detach(), batch).sum() if critic else 0.0)

        head = list(value.head.parameters()) if value.head else []
        with torch.no_grad():
            evaluated = measure(model, forward, extra=head)
            scoring = self._samples(section, SCORING_TOKENS, policy)
            scored = measure(model, lambda: value.scores(scoring), extra=head)
        trained = measure(model, lambda: forward().backward(), extra=head)
        depth = policy.common_depth if shared else 0
        common = {"common layers": tokens * self.hidden * size} if depth else {}
        layers = self.config.get_text_config().num_hidden_layers
        saved = 1 - depth / layers
        rows = min(section.engine_rows, samples)
        embedding = 0 if self.config.get_text_config().tie_word_embeddings else self.vocab * self.hidden * size
        engine = {} if self.device.gpu else {"engine": self.trunk - embedding}  # a second copy of every matrix
        cache = {"cache": cache_bytes(self.config, rows, width, size), "logits": rows * self.vocab * size}
        steps = -(-samples // rows) * section.max_new_tokens
        decoding = max(self.trunk / self.device.bandwidth, self._seconds(rows, rows, 1.0))
        rollout = steps * decoding + self._seconds(section.prompts_per_step * self.prompt, 0, 1.0)
        on_policy = not gradient or (
            not critic and section.one_update and (section.kl.place == "loss" or not section.kl.coefficient)
        )
        evaluations = (0 if on_policy else 1) + (saved if needs_reference else 0) + (1 if own_value else 0)
        backward = (2.0 if section.lora is not False else 3.0) * saved * (2 if own_value else 1)
        held = {**held, **engine}
        forward_pass = self._seconds(tokens, counted, 1.0)
        scoring_pass = self._seconds(tokens, 0, 1.0)
        moved = self.on_host * section.offload / LINK
        visits = moved * tokens / section.micro_batch_tokens
        phases = [
            Phase("rollout", {**held, **cache}, rollout),
            Phase("reward", {**held, "activations": scored.peak}, scoring_pass + moved * tokens / SCORING_TOKENS),
            Phase("evaluate", {**held, **common, "activations": evaluated.peak}, evaluations * forward_pass + visits),
            Phase(
                "update",
                {**held, **common, "activations": trained.peak},
                getattr(section, "epochs", 1) * backward * forward_pass,
            ),
        ]
        unused = {"reward": not learned, "evaluate": not evaluations}
        return [phase for phase in phases if not unused.get(phase.name)]


def _gpu_dtype(dtype: str) -> torch.dtype:
    return torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
