"""Memory and time of each stage of a recipe, by phase, worked out on models of shapes alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import singledispatchmethod
from math import ceil
from typing import Any

import psutil
import torch

from tether.build.engines import adapter_slots
from tether.core.types import Sampling
from tether.cpu.attention import pick_attention
from tether.cpu.llama import cache_bytes
from tether.data.batches import TokenBatch
from tether.learner import planner
from tether.models.heads import ScalarHead
from tether.models.loading import pick_dtype, plain_attention
from tether.models.trunk import GROUPED, Role
from tether.planning import shape_batches
from tether.planning.devices import Device
from tether.planning.engine_shapes import prefill_bytes, sampler_bytes
from tether.planning.phases import Phase, StagePlan, judge_bytes, own_models, section_judge
from tether.planning.speeds import DISK, LOADING, RowSizes, Speeds, is_gold, reads_answers
from tether.rewards.learned import MICRO_BATCH_TOKENS
from tether.rollout.cache import share_of
from tether.settings.evaluation import EvaluationSection
from tether.settings.pairs import PairsSection
from tether.settings.recipe import BaseRecipe
from tether.settings.reward import RewardSection
from tether.settings.rounds import RoundsSection
from tether.settings.sampling import OnlineSection, PolicySection
from tether.settings.section import PromptedSection, Section
from tether.settings.supervised import (
    DirectSection,
    KTOSection,
    ProcessSection,
    SFTSection,
    SupervisedSection,
)
from tether.settings.workers import ServersConfig

Learning = SupervisedSection | RewardSection | RoundsSection | OnlineSection
"""Sections of the stages that train, as far as they are known here."""
CUDA_CONTEXT = int(0.6e9)
LINK = 25e9
"""Bytes a second from host memory to a GPU, as PCIe 4 reaches them from pageable memory at best."""


class Planner:
    """One recipe on one device.

    Args:
        usual: the rows of stages whose own `sizes` were not measured.
        until: the time (`time.monotonic`) after which memory is no longer measured: that of
            adapters, optimizers and activations is then left out.
    """

    def __init__(
        self,
        recipe: BaseRecipe,
        device: Device,
        config: Any,
        usual: RowSizes,
        sizes: Mapping[str, RowSizes] | None = None,
        *,
        until: float = math.inf,
    ) -> None:
        self.recipe, self.device, self.config = recipe, device, config
        self.until, self.whole = until, True
        self.rows, self.usual, self.sizes = usual, usual, sizes or {}
        place = torch.device("cuda" if device.gpu else "cpu")
        assumed = "bfloat16" if device.gpu and recipe.model.dtype == "auto" else recipe.model.dtype
        self.dtype = pick_dtype(assumed, "cpu")
        text = config.get_text_config()
        self.hidden, self.vocab, self.layers = (
            text.hidden_size,
            text.vocab_size,
            text.num_hidden_layers,
        )
        self.tied = text.tie_word_embeddings
        self.head = text.vocab_size * text.hidden_size
        base = self.base = planner.shape_model(config, self.dtype, "eager")
        self.attention = plain_attention(recipe.model.attention, place, base)
        if recipe.model.cpu_kernels:
            self.attention = pick_attention(recipe.model.attention, place, base)
        self.parameters = base.num_parameters()
        self.trunk = planner.held_bytes(base, recipe.model.quantize)
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
        self.speeds = Speeds(device, self.parameters, self.head, self.tied, self.layers, self.trunk)
        # which has loaded as much
        self.process = CUDA_CONTEXT if device.gpu else psutil.Process().memory_info().rss

    def stages(self, names: Sequence[str] | None = None) -> list[StagePlan]:
        """Of these stages (None: all), those that are known here. A stage that a user added to the
        table is left out.
        """
        plans, opened = [], False
        for name in self.recipe.stages if names is None else names:
            section = self.recipe.section(name)
            self.rows = self.sizes.get(name, self.usual)
            learning = section.direct if isinstance(section, RoundsSection) else section
            rate = learning.optimizer.learning_rate if isinstance(section, Learning) else None
            self.whole = True
            if phases := self.phases(section):
                once, decoded, chosen, each = 0.0, 0.0, 0.0, 0.0
                if isinstance(section, OnlineSection) and section.evaluate is not None:
                    once, decoded, chosen = self.speeds.measurement(section, self.prompt)
                    each = once / section.evaluate.every
                before = self.speeds.opening + once + decoded + chosen
                after = self.speeds.saving + decoded
                if not opened and is_gold(section_judge(section)):
                    opened, seconds = True, self.speeds.gold_opening
                    before += seconds * isinstance(section, OnlineSection)
                    after += seconds * isinstance(section, PromptedSection)
                plans.append(
                    StagePlan(
                        name=name,
                        phases=phases,
                        learning_rate=rate,
                        before=before,
                        each=each,
                        after=after,
                        whole=self.whole,
                    ),
                )
        return plans

    @property
    def prompt(self) -> int:
        """Tokens of a prompt of the stage in hand."""
        return self.rows.prompt

    @singledispatchmethod
    def phases(self, section: Section) -> list[Phase]:
        """The phases of a stage, by its section; what is not known has none."""
        return []

    @phases.register
    def _sft(self, section: SFTSection) -> list[Phase]:
        tokens = section.batch_size * shape_batches.conversation_tokens(self.rows, section)
        cuts = ceil(tokens / (section.row_tokens * section.rows_per_micro_batch))
        seconds = self.speeds.passes(
            tokens,
            tokens // 2,
            3.0 if section.lora is False else 2.0,
            cuts,
        )
        role, held = self._trained(section, "sft")
        return [
            self._update(
                role,
                held,
                shape_batches.packed_batch(self.rows, section, role),
                seconds,
                cuts,
            ),
        ]

    @phases.register
    def _reward(self, section: RewardSection) -> list[Phase]:
        role, held = self._trained(section, "reward", ScalarHead(self.hidden))
        if section.keep_states_gb:
            held["kept states"] = int(section.keep_states_gb * 1e9)
        tokens = self._pair_tokens(section.prompts_per_update)
        cuts = ceil(tokens / section.micro_batch_tokens)
        seconds = self.speeds.passes(tokens, 0, 2.0, cuts)
        return [
            self._update(
                role,
                held,
                shape_batches.pair_batch(self.rows, section, role),
                seconds,
                cuts,
            ),
        ]

    @phases.register
    def _process(self, section: ProcessSection) -> list[Phase]:
        role, held = self._trained(
            section,
            "reward",
            ScalarHead(self.hidden, outputs=section.outputs),
        )
        answer = 2 * self.prompt if self.rows.answer is None else self.rows.answer_tokens
        length = self.prompt + answer
        tokens = section.solutions_per_update * (self.prompt + answer)
        batch = shape_batches.row_batch(
            max(1, section.micro_batch_tokens // length),
            self.prompt,
            answer,
        )
        cuts = ceil(tokens / section.micro_batch_tokens)
        return [self._update(role, held, batch, self.speeds.passes(tokens, 0, 2.0, cuts), cuts)]

    @phases.register
    def _direct(self, section: DirectSection | KTOSection) -> list[Phase]:
        role, held = self._trained(section, "policy")
        if own_models(section):
            held["reference"] = self._frozen(section.offload)
        tokens = self._pair_tokens(section.prompts_per_update)
        cuts = ceil(tokens / section.micro_batch_tokens)
        seconds = self.speeds.passes(
            tokens,
            tokens // 2,
            3.0 if section.needs_reference else 2.0,
            cuts,
        )
        return [
            self._update(
                role,
                held,
                shape_batches.pair_batch(self.rows, section, role),
                seconds,
                cuts,
            ),
        ]

    @phases.register
    def _rounds(self, section: RoundsSection) -> list[Phase]:
        """A round's sampling, beside the reward model on a trunk of its own, and its training."""
        inner = DirectSection.model_validate(
            {**section.direct.model_dump(exclude_unset=True), "lora": section.lora},
        )
        (update,), (rollout,) = self._direct(inner), self._sampling(section)
        if section.scorer is not None:
            rollout.bytes["reward"] = self.trunk
            rows = self._rows_at_once(section.engine_rows, section.max_new_tokens)
            rollout.seconds += self.speeds.reading(rows, self.prompt, section.max_new_tokens)
        return [rollout, update]

    @phases.register
    def _sampling(self, section: PairsSection | EvaluationSection) -> list[Phase]:
        """Answers of a policy that does not learn meanwhile."""
        policies = map(self.recipe.section, self.recipe.policies)
        tokens = section.max_new_tokens or max(
            (s.sampling.max_new_tokens for s in policies if hasattr(s, "sampling")),
            default=0,
        )
        held = {
            "process": self.process,
            "trunk": self.trunk,
            **({} if self.device.gpu else {"engine": self.trunk}),
        }
        rows = self._rows_at_once(section.engine_rows, tokens)
        model = planner.shape_model(self.config, self.dtype, self._attention)
        engine = self._engine(Role(model), rows, rows, Sampling(max_new_tokens=tokens))
        seconds = tokens * self.speeds.decoding(rows)
        if isinstance(section, EvaluationSection):  # answers at one temperature are compared in KL
            comparing = 2 * self.speeds.reading(rows, self.prompt, tokens)
            seconds += comparing / (1 + len(section.temperatures))
        phases = [Phase("rollout", {**held, **engine}, seconds)]
        if not isinstance(section, RoundsSection) and reads_answers(section.judge, section):
            seconds = self.speeds.judging(section.judge, rows, self.prompt, tokens)
            phases.append(Phase("judge", held | judge_bytes(section, self.base), seconds))
        return phases

    @phases.register(OnlineSection)
    def _online(self, section: Any) -> list[Phase]:
        gradient = section if isinstance(section, PolicySection) else None
        critic = gradient is not None and gradient.critic
        shared = section.roles == "shared"
        own_value = critic and (not shared or section.value_init == "reward")
        policy, held = self._trained(section, "policy")
        held |= self._beside(section, held, own_value)
        batch = shape_batches.sample_batch(self.rows, section, section.micro_batch_tokens, policy)
        size = self.dtype.itemsize
        value = Role(policy.model, policy.adapter, ScalarHead(self.hidden).to("meta"))

        def forward() -> Any:
            hidden = policy.hidden(batch)
            logprobs, _ = policy.logprobs_of(hidden, batch)
            return logprobs.sum() + (
                value.values_of(hidden.detach(), batch).sum() if critic else 0.0
            )

        tokens, counted = self._tokens(section, policy)
        parts = gradient.minibatches if gradient else 1
        cuts = max(parts, ceil(tokens / section.micro_batch_tokens))
        forward_pass = self.speeds.passes(tokens, counted, 1.0, cuts)
        scoring_pass = self.speeds.passes(tokens, 0, 1.0, cuts)
        depth = policy.common_depth if shared else 0
        # ids and masks of all micro-batches; the last step's stay until the next one's are made
        held["batches"] = tokens * (64 + batch.ids.shape[1] * (batch.belongs is not None))
        common = {"common layers": tokens * self.hidden * size} if depth else {}
        saved = 1 - depth / self.layers
        answers = section.prompts_per_step * section.samples_per_prompt
        rows = self._rows_at_once(min(section.engine_rows, answers), section.max_new_tokens)
        steps = ceil(answers / rows) * section.max_new_tokens
        prefill = self.speeds.passes(section.prompts_per_step * self.prompt, 0)
        on_policy = gradient is None or (
            not critic
            and gradient.one_update
            and (gradient.kl.place == "loss" or not gradient.kl.coefficient)
        )
        evaluations = (not on_policy) + (saved if section.needs_reference else 0) + own_value
        backward = (3.0 if section.lora is False else 2.0) * saved * (1 + own_value)
        moved = self.on_host * section.offload / LINK * tokens
        slots = rows if section.engine.kind == "local" else section.engine_rows
        engine = self._engine(policy, section.prompts_per_step, slots, section.sampling)
        decoding = self.speeds.decoding(rows, adapted=section.lora is not False)
        phases = self._rollout(section, held, engine, steps * decoding + prefill)
        if section.scorer is not None:
            scoring = shape_batches.sample_batch(self.rows, section, MICRO_BATCH_TOKENS, policy)
            seconds = scoring_pass + moved / MICRO_BATCH_TOKENS
            passes = self._activations(value, lambda: value.scores(scoring))
            if section.reward_servers is None:
                phases.append(Phase("reward", held | passes, seconds))
            else:
                scorer = held.get("policy adapter", 0) + self.trunk
                server, there = self._servers(
                    "reward server",
                    section.reward_servers,
                    {"reward": scorer, **passes},
                    held,
                )
                phases += [Phase("reward", {**held}, seconds / there), server]
        if evaluations:
            seconds = evaluations * forward_pass + moved / section.micro_batch_tokens
            phases.append(
                Phase("evaluate", held | common | self._activations(value, forward), seconds),
            )
        if judge := judge_bytes(section, self.base):
            phases.append(Phase("judge", held | judge))
        seconds = (1 if gradient is None else gradient.epochs) * backward * forward_pass
        return [
            *phases,
            Phase(
                "update",
                held | common | self._learning(value, lambda: forward().backward(), cuts // parts),
                seconds,
            ),
        ]

    def _rollout(
        self,
        section: Any,
        held: dict[str, int],
        engine: Mapping[str, int],
        sampling: float,
    ) -> list[Phase]:
        """Sampling; by servers: what the learner holds meanwhile, each server, and the way of new
        weights to all of them.
        """
        if section.engine.kind == "local":
            return [Phase("rollout", {**held, **engine}, sampling)]
        weights = held.get("policy adapter", self.trunk)
        slots = adapter_slots(section)
        own = {
            "trunk": self.trunk,
            **({f"{slots} adapters": slots * weights} if "policy adapter" in held else {}),
        }
        # a server with several GPUs cuts its weights and its cache into equal parts
        resources = section.engine.resources or {}
        cards = max(1, int(resources.get("GPU", 1)))
        own = {part: size // cards for part, size in {**own, **engine}.items()}
        server, there = self._servers("server", section.engine, own, held)
        count = len(section.engine.addresses) or section.engine.servers
        sending = (1 + count) * weights / DISK + count * LOADING
        return [Phase("rollout", {**held}, sampling / there + sending), server]

    def _servers(
        self,
        name: str,
        config: ServersConfig,
        own: Mapping[str, int],
        held: dict[str, int],
    ) -> tuple[Phase, int]:
        """Memory of each server, and the number of servers that share the work.

        On the learner's machine the memory of all servers is added to `held`, and the number is 1.
        """
        count = len(config.addresses) or config.servers
        server = Phase(f"{name}, each of {count}", {**own, "process": self.process})
        if self.device.gpu or config.addresses or self.recipe.on != "local":
            return server, count
        held[f"{count} {name}s"] = count * server.total
        return server, 1

    def _beside(self, section: Any, held: Mapping[str, int], own_value: bool) -> dict[str, int]:
        """Memory beside the policy: other roles, each an adapter or a model of its own, and the
        engine.
        """
        shared = section.roles == "shared"
        adapter = held.get("policy adapter", 0)
        beside: dict[str, int] = {}
        if own_value:
            beside["value"] = adapter if shared else self.trunk + adapter
            beside["value optimizer"] = held["policy optimizer"]
        if section.scorer is not None and section.reward_servers is None:
            beside["reward"] = adapter if shared else self._frozen(section.offload) + adapter
        if section.needs_reference and not shared:
            beside["reference"] = self._frozen(section.offload)
        if not self.device.gpu and section.engine.kind == "local":  # a second copy of every matrix
            beside["engine"] = self.trunk - (0 if self.tied else self.head * self.dtype.itemsize)
        return beside

    def _trained(
        self,
        section: Any,
        name: str,
        head: ScalarHead | None = None,
    ) -> tuple[Role, dict[str, int]]:
        """A role that learns, on a model of shapes, and what that holds."""
        held = {"process": self.process, "trunk": self.trunk - self.elsewhere}
        if self._is_late():
            learned = ("optimizer",) if section.lora is False else ("adapter", "optimizer")
            return Role(self.base), held | {f"{name} {part}": 0 for part in learned}
        model = planner.shape_model(self.config, self.dtype, self._attention)
        model.recompute = self.recipe.model.recompute
        role = (
            Role(model)
            if section.lora is False
            else Role(planner.shape_adapter(model, name, section.lora), name)
        )
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

    def _update(
        self,
        role: Role,
        held: Mapping[str, int],
        batch: TokenBatch,
        seconds: float,
        cuts: int,
    ) -> Phase:
        """The one phase of a role that learns from rows, in so many micro-batches:
        log-probabilities, or with a head its scores.
        """

        def learn() -> None:
            (role.logprobs(batch)[0] if role.head is None else role.scores(batch)).sum().backward()

        return Phase("update", {**held, **self._learning(role, learn, cuts)}, seconds)

    def _learning(self, role: Role, work: Callable[[], object], cuts: int) -> dict[str, int]:
        """The most that is alive beside weights while a role learns from so many micro-batches."""
        model, learned = role.model, role.parameters()
        return self._measured(
            lambda: planner.measure_learning(model, learned, work, cuts, self.device.gpu),
        )

    @torch.no_grad()
    def _activations(self, role: Role, work: Callable[[], object]) -> dict[str, int]:
        """The most that is alive beside weights while a role does something and learns nothing."""
        extra = role.head.parameters() if role.head else ()
        return self._measured(lambda: planner.measure_pass(role.model, work, extra=extra))

    def _measured(self, peak: Callable[[], int]) -> dict[str, int]:
        """The result of a measurement, while there is time for one."""
        return {} if self._is_late() else {"activations": peak()}

    def _is_late(self) -> bool:
        """True after the time for measurements: what is not counted then is noted."""
        late = time.monotonic() > self.until
        self.whole = self.whole and not late
        return late

    @property
    def _attention(self) -> str:
        """The attention of models of shapes that holds what the real one holds."""
        return {GROUPED: planner.TILED, "sdpa": planner.FUSED}.get(self.attention, self.attention)

    def _frozen(self, offload: bool) -> int:
        return self.trunk - self.on_host * offload

    def _pair_tokens(self, prompts: int) -> int:
        """Tokens of so many prompts, each once, and of the answers to them."""
        return round(prompts * (self.prompt + self.rows.answers * self.rows.answer_tokens))

    def _rows_at_once(self, rows: int, new_tokens: int) -> int:
        """As many of the rows as the local engine decodes together: their cache has a share of the
        memory.
        """
        places = self.rows.longest_tokens[0] + new_tokens
        one = cache_bytes(self.config, 1, places, self.dtype.itemsize)
        return max(1, min(rows, int(self.device.memory) // share_of(self.device.gpu) // one))

    def _engine(self, role: Role, prompts: int, rows: int, sampling: Sampling) -> dict[str, int]:
        """Memory of the engine beside weights: its cache, and logits; on a GPU also the larger of
        prefill and draw.
        """
        size = self.dtype.itemsize
        places = self.rows.longest_tokens[0] + sampling.max_new_tokens
        cache = {"cache": cache_bytes(self.config, rows, places, size)}
        if not self.device.gpu:
            return {**cache, "logits": rows * self.vocab * size}
        drawing = sampler_bytes(rows, self.vocab, self.dtype, sampling)
        longest = self.rows.longest_tokens[0]
        return {
            **cache,
            # what all prompts begin with, at most all of one
            "common prefix": cache_bytes(self.config, 1, longest, size) if prompts > 1 else 0,
            "prefill and draw": drawing
            if self._is_late()
            else max(drawing, prefill_bytes(role, prompts, longest)),
        }

    def _tokens(self, section: Any, policy: Role) -> tuple[int, int]:
        """Of a step: all that are read, where answers in one document share their prompt, and those
        of the answers.
        """
        room = (
            policy.document_tokens(section.micro_batch_tokens) - self.prompt
        ) // section.max_new_tokens
        answers = min(section.samples_per_prompt, max(1, room))
        samples = section.prompts_per_step * section.samples_per_prompt
        return samples * (
            self.prompt + answers * section.max_new_tokens
        ) // answers, samples * section.max_new_tokens
