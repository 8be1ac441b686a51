"""Memory and time of each stage of a recipe, by phase, worked out on shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import singledispatchmethod
from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from tether.core.types import Sampling
from tether.data.batches import TokenBatch
from tether.models.heads import ScalarHead
from tether.models.trunk import Role
from tether.rewards.learned import MICRO_BATCH_TOKENS
from tether.runner.assembly.engines import adapter_slots
from tether.runner.assembly.roles import newest_policy
from tether.runner.planning import shape_batches
from tether.runner.planning.devices import Device
from tether.runner.planning.phases import Phase, StagePlan, judge_bytes, named_bytes
from tether.runner.planning.shaped_model import ShapedModel
from tether.runner.planning.speeds import DISK, LOADING, RowSizes, Speeds, is_gold, reads_answers
from tether.settings.evaluation import UNTRAINED, EvaluationSection
from tether.settings.pairs import PairsSection
from tether.settings.recipe import BaseRecipe
from tether.settings.reward import RewardSection
from tether.settings.rounds import RoundsSection
from tether.settings.sampling import OnlineSection, PolicySection, SamplingSection
from tether.settings.section import Counts, Section
from tether.settings.supervised import DirectSection, KTOSection, ProcessSection, SFTSection
from tether.settings.teacher import START
from tether.settings.workers import ServersConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Answering = PairsSection | EvaluationSection | RoundsSection
SectionT = TypeVar("SectionT", bound=Section)
LINK = 25e9
"""Bytes a second from host memory to a GPU, as PCIe 4 reaches them from pageable memory at best."""


class Planner:
    """One recipe on one device.

    Args:
        usual: the rows of stages whose own `sizes` were not measured.
        measured: False for the time alone: memory of adapters, optimizers and activations is not
            measured.
    """

    def __init__(
        self,
        recipe: BaseRecipe,
        device: Device,
        config: PretrainedConfig,
        usual: RowSizes,
        sizes: Mapping[str, RowSizes] | None = None,
        *,
        measured: bool = True,
    ) -> None:
        self.recipe = recipe
        self.device = device
        model = self.model = ShapedModel(recipe, device, config, measured=measured)
        self.rows = usual
        self.usual = usual
        self.sizes = sizes or {}
        self.speeds = Speeds(
            device=device,
            parameters=model.parameters,
            head=model.head,
            tied=model.tied,
            layers=model.layers,
            trunk=model.trunk,
        )

    def stages(self, names: Sequence[str] | None = None) -> list[StagePlan]:
        """Of these stages (None: all), those that are known here. A stage that a user added to the
        table is left out.
        """
        recipe = self.recipe
        speeds = self.speeds
        plans = []
        opened = False
        for name in recipe.stages if names is None else names:
            section = recipe.section(name)
            self.rows = self.sizes.get(name, self.usual)
            rows = self.rows
            counts = Counts(rows.count, rows.groups, len(recipe.policies), self.sampling)
            usual, longest = usual_and_longest(section)
            if not (phases := self.phases(usual)):
                continue
            if longest is not usual:
                bounds = zip(phases, self.phases(longest), strict=True)
                phases = [replace(most, seconds=phase.seconds) for phase, most in bounds]
            stage = StagePlan(
                name=name,
                phases=phases,
                work=section.work(counts),
                learning_rate=learning_rate(section),
                beside=speeds.opening + speeds.saving,
                rounds=(recipe.repeat or 1) if name != "sft" else 1,
            )
            along = section.measurement
            if along is not None and along is not section:
                once, controls = speeds.measurement(section, self.prompt)
                stage.each = once / along.every
                stage.beside += once + controls
            if not opened and any(is_gold(judge) for judge, _ in section.judges()):
                opened = True
                stage.beside += speeds.gold_opening
            plans.append(stage)
        return plans

    @property
    def sampling(self) -> Sampling:
        """The sampling of the first stage that samples, which an evaluation takes by default."""
        sections = map(self.recipe.section, (*self.recipe.policies, "pairs"))
        usual = (usual_and_longest(section)[0] for section in sections if section)
        return next((one.sampling for one in usual if hasattr(one, "sampling")), UNTRAINED)

    @property
    def prompt(self) -> int:
        """Tokens of a prompt of the stage in hand."""
        return self.rows.prompt

    @property
    def longest(self) -> int:
        """Tokens of its longest prompt."""
        return self.rows.longest_tokens[0]

    @singledispatchmethod
    def phases(self, section: Section) -> list[Phase]:
        """The phases of a stage, by its section; what is not known has none."""
        return []

    @phases.register
    def _sft(self, section: SFTSection) -> list[Phase]:
        tokens = section.batch_size * shape_batches.conversation_tokens(self.rows, section)
        role, held = self.model.trained(section, "sft")
        batch = shape_batches.packed_batch(self.rows, section, role)
        room = section.row_tokens * section.rows_per_micro_batch
        return self._update(role, held, batch, tokens, room, 2.0 + (section.lora is False))

    @phases.register
    def _reward(self, section: RewardSection) -> list[Phase]:
        role, held = self.model.trained(section, "reward", ScalarHead(self.model.hidden))
        if section.keep_states_gb:
            held["kept states"] = int(section.keep_states_gb * 1e9)
        return self._compared(section, role, held)

    @phases.register
    def _process(self, section: ProcessSection) -> list[Phase]:
        head = ScalarHead(self.model.hidden, outputs=section.outputs)
        role, held = self.model.trained(section, "reward", head)
        answer = 2 * self.prompt if self.rows.answer is None else self.rows.answer
        self.rows = replace(self.rows, answer=answer, answers=1.0)
        return self._compared(section, role, held)

    @phases.register
    def _direct(self, section: DirectSection | KTOSection) -> list[Phase]:
        role, held = self.model.trained(section, "policy")
        if section.own_models:
            held["reference"] = self.model.frozen(section.offload)
        return self._compared(section, role, held, 2.0 + section.needs_reference)

    @phases.register
    def _rounds(self, section: RoundsSection) -> list[Phase]:
        """A round's sampling, beside the reward model on a trunk of its own, and its training."""
        inner = DirectSection.model_validate(
            {**section.direct.model_dump(exclude_unset=True), "lora": section.lora},
        )
        (update,), (rollout,) = self._direct(inner), self._answering(section, section.sampling)
        if section.scorer is not None:
            rollout.bytes["reward"] = self.model.trunk
            rows = self._rows(section, section.max_new_tokens)
            rollout.seconds += self.speeds.reading(rows, self.prompt, section.max_new_tokens)
        return [rollout, update]

    @phases.register
    def _pairs(self, section: PairsSection) -> list[Phase]:
        return self._answering(section, section.sampling, section.samples_per_prompt)

    @phases.register
    def _evaluation(self, section: EvaluationSection) -> list[Phase]:
        tokens = section.max_new_tokens or self.sampling.max_new_tokens
        each = section.samples * (1 + len(section.temperatures))
        rollout, *judge = self._answering(section, Sampling(max_new_tokens=tokens), each)
        # answers at one temperature are compared in KL
        comparing = 2 * self.speeds.reading(self._rows(section, tokens), self.prompt, tokens)
        rollout.seconds += comparing / (1 + len(section.temperatures))
        return [rollout, *judge]

    def _rows(self, section: Answering, tokens: int) -> int:
        """Answers of so many tokens that are decoded at once."""
        return self.model.rows_at_once(section.engine_rows, self.longest + tokens)

    def _answering(self, section: Answering, sampling: Sampling, each: int = 1) -> list[Phase]:
        """Answers of a policy that does not learn meanwhile, `each` to a prompt, and their judge's
        reading: the gold judge reads a prompt once for all of them.
        """
        model = self.model
        tokens = sampling.max_new_tokens
        held = {"process": model.process, "trunk": model.trunk}
        if not self.device.gpu:
            held["engine"] = model.trunk
        rows = self._rows(section, tokens)
        engine = model.engine(model.role(), rows, rows, self.longest, sampling)
        phases = [Phase("rollout", {**held, **engine}, tokens * self.speeds.decoding(rows))]
        for judge, _ in section.judges():
            if reads_answers(judge, section):
                prompt = self.prompt // (each if is_gold(judge) else 1)
                seconds = self.speeds.judging(judge, rows, prompt, tokens)
                phases.append(Phase("judge", held | judge_bytes(judge, model.base), seconds))
        return phases

    @phases.register(OnlineSection)
    def _online(self, section: SamplingSection) -> list[Phase]:
        gradient = section if isinstance(section, PolicySection) else None
        shared = section.roles == "shared"
        critic = own_value = False
        if gradient is not None and gradient.critic:
            critic = True
            own_value = not shared or gradient.value_init == "reward"
        model = self.model
        policy, held = model.trained(section, "policy")
        held |= self._beside(section, held, own_value)
        batch = shape_batches.sample_batch(self.rows, section, section.micro_batch_tokens, policy)
        size = model.dtype.itemsize
        value = Role(policy.model, policy.adapter, ScalarHead(model.hidden).to("meta"))

        def forward() -> Tensor:
            hidden = policy.hidden(batch)
            logprobs, _ = policy.logprobs_of(hidden, batch)
            return logprobs.sum() + (
                value.values_of(hidden.detach(), batch).sum() if critic else 0.0
            )

        tokens, counted = self._tokens(section, policy)
        parts = dict(section).get("minibatches", 1)
        cuts = max(parts, ceil(tokens / section.micro_batch_tokens))
        passes = self.speeds.passes
        forward_pass = passes(tokens, counted, 1.0, cuts)
        scoring_pass = passes(tokens, 0, 1.0, cuts)
        depth = policy.common_depth if shared else 0
        # ids and masks of all micro-batches; the last step's stay until the next one's are made
        held["batches"] = tokens * (64 + batch.ids.shape[1] * (batch.belongs is not None))
        common = {"common layers": tokens * model.hidden * size} if depth else {}
        saved = 1 - depth / model.layers
        answers = section.prompts_per_step * section.samples_per_prompt
        rows = model.rows_at_once(
            min(section.engine_rows, answers),
            self.longest + section.max_new_tokens,
        )
        steps = ceil(answers / rows) * section.max_new_tokens
        prefill = passes(section.prompts_per_step * self.prompt, 0)
        on_policy = gradient is None or (
            not critic
            and gradient.one_update
            and (gradient.kl.place == "loss" or not gradient.kl.coefficient)
            and not gradient.by_token
        )
        evaluations = (not on_policy) + (saved if section.needs_reference else 0) + own_value
        for teacher in gradient.teacher if gradient is not None else ():
            if teacher.model:
                evaluations += named_bytes(teacher.model, model.base) / model.trunk
        backward = (3.0 if section.lora is False else 2.0) * saved * (1 + own_value)
        moved = model.on_host * section.offload / LINK * tokens
        slots = rows if section.engine.kind == "local" else section.engine_rows
        prompts = section.prompts_per_step
        engine = model.engine(policy, prompts, slots, self.longest, section.sampling)
        decoding = self.speeds.decoding(rows, adapted=section.lora is not False)
        phases = self._rollout(section, held, engine, steps * decoding + prefill)
        if section.scorer is not None:
            seconds = scoring_pass + moved / MICRO_BATCH_TOKENS
            phases += self._scoring(section, held, value, seconds)
        if evaluations:
            seconds = evaluations * forward_pass + moved / section.micro_batch_tokens
            activations = model.activations(value, forward)
            phases.append(Phase("evaluate", held | common | activations, seconds))
        for judge, _ in section.judges():
            if weights := judge_bytes(judge, model.base):
                phases.append(Phase("judge", held | weights))
        seconds = (1 if gradient is None else gradient.epochs) * backward * forward_pass
        learning = model.learning(value, lambda: forward().backward(), cuts // parts)
        return [*phases, Phase("update", held | common | learning, seconds)]

    def _rollout(
        self,
        section: SamplingSection,
        held: dict[str, int],
        engine: Mapping[str, int],
        sampling: float,
    ) -> list[Phase]:
        """Sampling; by servers: what the learner holds meanwhile, each server, and the way of new
        weights to all of them.
        """
        if section.engine.kind == "local":
            return [Phase("rollout", {**held, **engine}, sampling)]
        config = section.engine
        trunk = self.model.trunk
        weights = held.get("policy adapter", trunk)
        slots = adapter_slots(section)
        own = {"trunk": trunk, **engine}
        if "policy adapter" in held:
            own[f"{slots} adapters"] = slots * weights
        # a server with several GPUs cuts its weights and its cache into equal parts
        cards = max(1, int((config.resources or {}).get("GPU", 1)))
        own = {part: size // cards for part, size in own.items()}
        server, there = self._servers("server", config, own, held)
        count = len(config.addresses) or config.servers
        sending = (1 + count) * weights / DISK + count * LOADING
        return [Phase("rollout", {**held}, sampling / there + sending), server]

    def _scoring(
        self,
        section: SamplingSection,
        held: dict[str, int],
        value: Role,
        seconds: float,
    ) -> list[Phase]:
        """Scores of a reward model; by servers: what the learner holds meanwhile, and each server."""
        batch = shape_batches.sample_batch(self.rows, section, MICRO_BATCH_TOKENS, value)
        passes = self.model.activations(value, lambda: value.scores(batch))
        if section.reward_servers is None:
            return [Phase("reward", held | passes, seconds)]
        scorer = held.get("policy adapter", 0) + self.model.trunk
        own = {"reward": scorer, **passes}
        server, there = self._servers("reward server", section.reward_servers, own, held)
        return [Phase("reward", {**held}, seconds / there), server]

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
        server = Phase(f"{name}, each of {count}", {**own, "process": self.model.process})
        if self.device.gpu or config.addresses or self.recipe.on != "local":
            return server, count
        held[f"{count} {name}s"] = count * server.total
        return server, 1

    def _beside(
        self,
        section: SamplingSection,
        held: Mapping[str, int],
        own_value: bool,
    ) -> dict[str, int]:
        """Memory beside the policy: other roles, each an adapter or a model of its own, and the
        engine.
        """
        model = self.model
        shared = section.roles == "shared"
        adapter = held.get("policy adapter", 0)
        frozen = model.frozen(section.offload)
        beside: dict[str, int] = {}
        if own_value:
            beside["value"] = adapter if shared else model.trunk + adapter
            beside["value optimizer"] = held["policy optimizer"]
        if section.scorer is not None and section.reward_servers is None:
            beside["reward"] = adapter if shared else frozen + adapter
        if section.needs_reference and not shared:
            beside["reference"] = frozen
        for place, teacher in enumerate(dict(section).get("teacher", ())):
            if not (source := teacher.model):
                continue
            trained = source != START and newest_policy(Path(source).expanduser())
            if teacher.follow or (shared and trained):
                beside[f"teacher {place + 1}"] = adapter
            elif source != START or not shared:
                beside[f"teacher {place + 1}"] = named_bytes(source, model.base)
        if not self.device.gpu and section.engine.kind == "local":  # a second copy of every matrix
            table = 0 if model.tied else model.head * model.dtype.itemsize
            beside["engine"] = model.trunk - table
        return beside

    def _compared(
        self,
        section: shape_batches.Answered,
        role: Role,
        held: Mapping[str, int],
        passes: float = 2.0,
    ) -> list[Phase]:
        """`_update` on prompts, each once, with the answers to them."""
        count = dict(section)[section.batch_key]
        batch = shape_batches.pair_batch(self.rows, section, role, count)
        each = self.prompt + self.rows.answers * self.rows.answer_tokens
        room = section.micro_batch_tokens
        return self._update(role, held, batch, round(count * each), room, passes)

    def _update(
        self,
        role: Role,
        held: Mapping[str, int],
        batch: TokenBatch,
        tokens: int,
        room: int,
        passes: float,
    ) -> list[Phase]:
        """The one phase of a role that learns from rows: log-probabilities, or with a head its
        scores.

        Args:
            tokens, room: of an update, and of a micro-batch.
        """

        def learn() -> None:
            (role.logprobs(batch)[0] if role.head is None else role.scores(batch)).sum().backward()

        cuts = ceil(tokens / room)
        counted = tokens // 2 if role.head is None else 0
        seconds = self.speeds.passes(tokens, counted, passes, cuts)
        return [Phase("update", {**held, **self.model.learning(role, learn, cuts)}, seconds)]

    def _tokens(self, section: SamplingSection, policy: Role) -> tuple[int, int]:
        """Of a step: all that are read, where answers in one document share their prompt, and those
        of the answers.
        """
        length = section.max_new_tokens
        room = (policy.document_tokens(section.micro_batch_tokens) - self.prompt) // length
        answers = min(section.samples_per_prompt, max(1, room))
        samples = section.prompts_per_step * section.samples_per_prompt
        return samples * (self.prompt + answers * length) // answers, samples * length


def usual_and_longest(section: SectionT) -> tuple[SectionT, SectionT]:
    """A stage with answers as long as a usual episode of its environment, and as its longest one.
    Usual is the geometric mean of one reply and the longest: a guess.
    """
    environment = dict(section).get("environment")
    if not environment:
        return section, section
    usual = round(sqrt(dict(section)["max_new_tokens"] * environment.tokens))
    return (
        section.model_copy(update={"max_new_tokens": usual}),
        section.model_copy(update={"max_new_tokens": environment.tokens}),
    )


def learning_rate(section: Section) -> float | None:
    """Of the training in a stage; None where there is none."""
    optimizer = dict(section.learning).get("optimizer")
    return optimizer and optimizer.learning_rate
