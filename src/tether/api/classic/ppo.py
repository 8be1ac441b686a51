"""PPOTrainer: generate, score yourself, step. The update is tether's policy-gradient step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from tether.api.classic.config import PPOConfig, Row
from tether.api.classic.log import numbered_run
from tether.api.classic.models import (
    AutoModelForCausalLMWithValueHead,
    CausalModel,
    TrainableRole,
    create_reference_model,
    on_device,
)
from tether.api.classic.time import AnnouncedLimit, TimedLoader
from tether.core.errors import ConfigError, DataError, ModelError
from tether.core.keeping import added_to
from tether.core.rundir import RunDirectory
from tether.core.types import Alarm, Json, Prompt, Rollout, Sampling, Score, StopReason, user
from tether.data.batches import padded_tokens
from tether.data.chat import ChatEncoder
from tether.models.loading import pick_device
from tether.models.speech import eos_ids
from tether.models.trunk import Role
from tether.stages.policy_gradient import PolicyGradient
from tether.watch.monitoring.watch import Watch

PURE: Json = {
    **{
        "do_sample": True,
        "num_beams": 1,
        "min_length": 0,
        "min_new_tokens": None,
        "no_repeat_ngram_size": 0,
    },
    **{"top_k": 0, "top_p": 1.0, "min_p": None, "typical_p": 1.0, "repetition_penalty": 1.0},
}
"""Sampling from the policy itself, whatever a model's generation_config.json recommends for
chatting.
"""
FAR = 0.4, 0.15
"""Of a single step's updates: tokens that are clipped, and nats a token, from which it went too far."""
_CLASSIC = """
objective/kl kl/policy_reference_k1
objective/kl_coef kl/coefficient
ppo/mean_scores reward/proxy
ppo/std_scores reward/proxy_std
ppo/loss/policy policy/loss
ppo/loss/value value/loss
ppo/loss/total loss
ppo/policy/entropy policy/entropy
ppo/policy/approxkl policy/approximate_kl
ppo/policy/clipfrac policy/clip_fraction
ppo/val/clipfrac value/clip_fraction
ppo/val/mean value/mean
ppo/val/var_explained value/explained_variance
ppo/learning_rate learning_rate
tokens/responses_len_mean response/length
objective/scores_missing reward/failed
"""
CLASSIC = dict(map(str.split, _CLASSIC.strip().splitlines()))
"""Statistics of `step`, by the metrics of tether's own that they are."""
Tokens = Sequence[Tensor]
Scores = Sequence[Tensor | float]


class Unlogged(NamedTuple):
    """Measurements of the last steps that are still to be logged: the numbers of the last one, and
    all alarms.
    """

    metrics: Json
    alarms: list[Alarm]


class PPOTrainer:
    """One policy with its value head, and its frozen reference.

    Args:
        ref_model: None: a frozen copy of the model, or with an adapter the model without it.
        dataset: rows for `dataloader`; their `input_ids` become a list of tensors.
        data_collator: makes a batch of rows; unset: lists by column.
    """

    def __init__(
        self,
        config: PPOConfig,
        model: AutoModelForCausalLMWithValueHead,
        ref_model: CausalModel | AutoModelForCausalLMWithValueHead | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: object = None,
        data_collator: Callable[[list[Any]], object] | None = None,
    ) -> None:
        if not isinstance(model, AutoModelForCausalLMWithValueHead):
            raise ModelError(
                "PPOTrainer trains a value head too: load the model with "
                "AutoModelForCausalLMWithValueHead",
            )
        if tokenizer is None:
            raise ConfigError("PPOTrainer needs the model's tokenizer: give tokenizer=...")
        torch.manual_seed(config.seed)
        self.warned_of_updates = False
        self.config = config
        self.tokenizer = tokenizer
        self.dataset = dataset
        self.collate = data_collator or _lists
        self.current_device = pick_device("auto")
        self.current_step = 0
        self.accelerator = SimpleNamespace(
            device=self.current_device,
            num_processes=1,
            is_main_process=True,
        )
        self.model = on_device(model)
        self.ref_model = self._reference(ref_model)
        self.encoder = ChatEncoder(tokenizer, eos_ids(tokenizer, model.generation_config))
        self.stage = self._stage()
        self.temperature = 1.0
        self.prompts_returned = False
        self.watch, self.unlogged = Watch(), Unlogged({}, [])
        self.clock = AnnouncedLimit("ppo", config.budget)

    def _reference(self, ref_model: nn.Module | None) -> nn.Module | None:
        if ref_model is None:
            return None if self.model.is_peft_model else create_reference_model(self.model)
        trained = {p.data_ptr() for p in self.model.parameters() if p.requires_grad}
        if trained & {p.data_ptr() for p in ref_model.parameters()}:
            raise ModelError(
                "ref_model shares weights that are trained, so it would move along "
                "and the KL would always be 0",
            )
        return on_device(ref_model).requires_grad_(False).eval()

    def _stage(self) -> PolicyGradient:
        """Without a reference of its own the policy's model plays it, its adapter switched off."""
        absent = cast(Any, None)  # sampling and scoring are the caller's
        policy, value = (
            TrainableRole(self.model.pretrained_model, head) for head in (None, self.model.v_head)
        )
        other = self.model if self.ref_model is None else self.ref_model
        reference = Role(
            other.pretrained_model
            if isinstance(other, AutoModelForCausalLMWithValueHead)
            else other,
        )
        return PolicyGradient(
            config=self.config.policy_config(),
            policy=policy,
            reference=reference,
            value=value,
            reward=absent,
            engine=absent,
            encoder=self.encoder,
        )

    @cached_property
    def run(self) -> RunDirectory:
        """Made when it is first written to."""
        return numbered_run(
            self.config.output_dir,
            self.config,
            self.config.log_with,
            {"ppo": self.stage.config},
            self.model,
        )

    @property
    def dataloader(self) -> DataLoader[Row]:
        """Shuffled batches of the dataset, the last incomplete one dropped; none after the budget.

        Raises:
            DataError: there is no dataset, or less than a batch.
        """
        size = self.config.batch_size
        rows: Any = () if self.dataset is None else self.dataset
        if len(rows) < size:
            raise DataError(
                f"dataloader needs at least batch_size = {size} rows: give PPOTrainer "
                "a dataset of them",
            )
        order = torch.Generator().manual_seed(self.config.seed + self.current_step)
        loader = TimedLoader(
            rows,
            size,
            shuffle=True,
            drop_last=True,
            collate_fn=self.collate,
            generator=order,
        )
        loader.clock = self.clock
        return loader

    def generate(
        self,
        query_tensor: Tensor | Tokens,
        *,
        batch_size: int = 4,
        return_prompt: bool = True,
        **options: object,
    ) -> Any:
        """Sample a response to each query with transformers' own generate. The default is the bare
        policy.

        `step` divides the logits by the temperature that the latest call used.

        Returns:
            For a list of queries (time,) a list of tensors (time,), each cut after its stop token.
            For queries (1, time), and for a single query outside a list, tensors (1, time).

        Raises:
            DataError: a query holds more than one sequence.
        """
        queries = [query_tensor] if isinstance(query_tensor, Tensor) else list(query_tensor)
        if any(q.dim() > 1 and len(q) > 1 for q in queries):
            raise DataError(
                "each query is one sequence without padding: give a list of tensors "
                "of shape (time,)",
            )
        for place, query in enumerate(queries):
            self._ids(query, f"query_tensor[{place}]")
        stops = {"pad_token_id": self.encoder.pad_id, "eos_token_id": list(self.encoder.stop_ids)}
        settings: Json = {**PURE, "temperature": 1.0, **stops, **options}
        settings["min_length"] = max(0, settings["min_length"] or 0)
        self.temperature = float(settings["temperature"] or 1.0) if settings["do_sample"] else 1.0
        self.prompts_returned = return_prompt
        if other := {
            name: settings[name]
            for name, pure in PURE.items()
            if settings[name] not in (pure, None)
        }:
            warnings.warn(
                f"{other} samples from another distribution than the policy whose ratios and KL "
                "step() has: docs/guides/classic.md",
                stacklevel=2,
            )
        rows: list[Tensor] = []
        for start in range(0, len(queries), batch_size):
            rows += self._respond(queries[start : start + batch_size], return_prompt, settings)
        return rows[0].reshape(1, -1) if isinstance(query_tensor, Tensor) else rows

    def _respond(self, queries: Tokens, return_prompt: bool, settings: Row) -> list[Tensor]:
        flat = [q.reshape(-1).to(self.current_device) for q in queries]
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        ids = pad(flat, padding_value=self.encoder.pad_id)
        mask = pad([torch.ones_like(q) for q in flat])
        self.model.pretrained_model.eval()
        answers = self.model.generate(input_ids=ids, attention_mask=mask, **settings)[
            :,
            ids.shape[1] :,
        ]
        stops = torch.tensor(settings["eos_token_id"], device=answers.device).reshape(-1)
        rows: list[Tensor] = []
        for query, given, answer in zip(flat, queries, answers, strict=True):
            ends = torch.isin(answer, stops).nonzero()
            answer = answer[: int(ends[0]) + 1] if len(ends) else answer
            answer = torch.cat([query, answer]) if return_prompt else answer
            rows.append(answer[None] if given.dim() == 2 else answer)
        return rows

    def step(self, queries: Tokens, responses: Tokens, scores: Scores) -> Json:
        """One PPO step on these responses; returns statistics under their classic names.

        Args:
            queries, responses: tensors of token ids. If responses from generate() contain their
                prompts, this call removes the prompts.
            scores: one number each. A score that is not finite gives a warning, and training
                ignores its response.

        Raises:
            DataError: the lists differ in length, or from the batch size. A query or a response is
                empty or holds an invalid token id. Scores are not numbers.
        """
        stage = self.stage
        limit = self.config.batch_size
        if not 0 < len(queries) == len(responses) == len(scores) <= limit:
            given = f"{len(queries)} queries, {len(responses)} responses and {len(scores)} scores"
            raise DataError(
                "step needs one of each for every response and at most batch_size = "
                f"{limit}; got {given}",
            )
        if len(queries) < limit:
            warnings.warn(
                f"step got {len(queries)} rows, and batch_size is {limit}: this update has fewer "
                "to learn from than the others",
                stacklevel=2,
            )
        prompts = [self._ids(query, f"queries[{place}]") for place, query in enumerate(queries)]
        answers = [
            self._ids(response, f"responses[{place}]") for place, response in enumerate(responses)
        ]
        if self.prompts_returned and all(
            a[: len(p)] == p for p, a in zip(prompts, answers, strict=True)
        ):
            warnings.warn(
                "responses of generate() begin with their queries unless return_prompt=False: "
                "here the queries are taken off",
                stacklevel=2,
            )
            answers = [
                answer[len(prompt) :] for prompt, answer in zip(prompts, answers, strict=True)
            ]
        if not all(answers):
            raise DataError(
                f"responses[{answers.index(())}] is its query alone: a response needs "
                "at least one token",
            )
        rated = self._rated(scores)
        widest = max(
            padded_tokens([self.encoder.rollout(p, a)])
            for p, a in zip(prompts, answers, strict=True)
        )
        changes = {
            "temperature": self.temperature,
            "micro_batch_tokens": self.config.mini_batch * widest,
        }
        stage.config = stage.config.model_copy(update=changes)
        rollouts = [*map(self._rollout, prompts, answers)]
        metrics = stage.learn(rollouts, rated, self.current_step)
        self.current_step += 1
        self._look(metrics, rollouts, rated)
        return {name: metrics[own] for name, own in CLASSIC.items() if own in metrics}

    def _ids(self, tokens: object, name: str) -> tuple[int, ...]:
        """Token ids of one sequence.

        Raises:
            DataError: there are none, or one is not of the vocabulary.
        """
        values = torch.as_tensor(tokens).reshape(-1)
        if not len(values):
            raise DataError(f"{name} is empty: it needs at least one token")
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise DataError(
                f"{name} holds {values.dtype} and not token ids: give integers, as "
                "the tokenizer makes them",
            )
        size = self.stage.policy.vocabulary
        ids = tuple(values.tolist())
        if wrong := [i for i in ids if not 0 <= i < size]:
            raise DataError(
                f"{name} holds the id {wrong[0]}, and the model's vocabulary ends at {size - 1}: "
                "tokenize with the model's own "
                "tokenizer, and take padding and labels such as -100 off",
            )
        return ids

    def _rated(self, scores: Scores) -> list[Score]:
        """The scores; those that are not finite as missing, with a warning.

        Raises:
            DataError: one is no number, or none is finite.
        """
        values = [_number(score, f"scores[{place}]") for place, score in enumerate(scores)]
        rated = [Score(value).finite("the caller", value) for value in values]
        if missing := [place for place, score in enumerate(rated) if score.value is None]:
            which = (
                f"{len(missing)} of {len(rated)} scores are not finite: scores[{missing[0]}] "
                f"is {values[missing[0]]}"
            )
            if len(missing) == len(rated):
                raise DataError(f"{which}. There is nothing to learn from: look at the reward")
            warnings.warn(
                f"{which}. Their responses teach nothing in step {self.current_step + 1}",
                stacklevel=3,
            )
        return rated

    def _look(self, metrics: Json, rollouts: list[Rollout], rated: list[Score]) -> None:
        """Note what `log_stats` writes beside the statistics, and warn of what the detectors find
        and of updates too long.
        """
        alarms = self.watch.observe(self.current_step, metrics, rollouts, rated)
        self.unlogged = Unlogged(metrics, [*self.unlogged.alarms, *alarms])
        for alarm in alarms:
            warnings.warn(
                f"step {self.current_step}: {alarm.message}. {alarm.advice}",
                stacklevel=3,
            )
        clipped, kl = (metrics.get(f"policy/{n}", 0.0) for n in ("clip_fraction", "approximate_kl"))
        if (clipped > FAR[0] or kl > FAR[1]) and not self.warned_of_updates:
            self.warned_of_updates = True
            advice = "lower ppo_epochs or learning_rate, or set early_stopping=True"
            warnings.warn(
                f"step {self.current_step}: too many or too long updates on the same samples: "
                f"{clipped:.1%} of tokens clipped, KL(old || new) {kl:.2g} nats a token: {advice}",
                stacklevel=3,
            )

    def _rollout(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Rollout:
        reason = StopReason.STOP_TOKEN if answer[-1] in self.encoder.stop_ids else StopReason.LENGTH
        text = self.encoder.decode(answer)
        sampling = Sampling(temperature=self.temperature)
        query = Prompt((user(self.encoder.decode(prompt)),))
        return Rollout(prompt, answer, (), reason, text, 0, self.current_step, sampling, query)

    def log_stats(
        self,
        stats: Row,
        batch: Row,
        rewards: Scores,
        columns_to_log: Iterable[str] = ("query", "response"),
    ) -> None:
        """Write the numbers to run directory and tracker, and the columns of the batch to
        samples.jsonl.

        The numbers have their classic names and tether's names, which `tether report` and
        `tether doctor` read.
        """
        values = torch.tensor(
            [_number(reward, f"rewards[{place}]") for place, reward in enumerate(rewards)],
        )
        finite = values[values.isfinite()]
        moments = {
            "env/reward_mean": float(finite.mean()),
            "env/reward_std": float(finite.std(correction=0)),
        }
        numbers = {name: value for name, value in stats.items() if isinstance(value, (int, float))}
        self.run.log({**self.unlogged.metrics, **numbers, **moments}, self.current_step)
        self.run.alarm(self.unlogged.alarms)
        self.unlogged = Unlogged({}, [])
        if columns := [name for name in columns_to_log if name in batch]:
            names = ("prompt" if name == "query" else name for name in columns)
            rows = zip(*(batch[name] for name in columns), values.tolist(), strict=True)
            keys = (*names, "proxy")
            self.run.sample(
                {"step": self.current_step, **dict(zip(keys, row, strict=True))} for row in rows
            )

    def save_pretrained(self, save_directory: str | Path) -> None:
        """The model as its own save_pretrained writes it, and the tokenizer; what was logged so far
        counts as a finished run.
        """
        with added_to(save_directory) as folder:
            self.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        if "run" in vars(self):
            self.run.finish({"steps": self.current_step, "alarms": self.run.alarms()})


def _number(value: object, name: str) -> float:
    """A score as a number.

    Raises:
        DataError: it is none, or several.
    """
    try:
        tensor = torch.as_tensor(value)
        if tensor.numel() == 1 and not tensor.is_complex():
            return float(tensor.item())
        what = f"a tensor of shape {tuple(tensor.shape)}"
    except (TypeError, ValueError, RuntimeError):
        what = f"{value!r:.60}"
    raise DataError(
        f"{name} is {what}: give one number for each response; float('nan') is one "
        "that could not be scored",
    )


def _lists(rows: list[Row]) -> dict[str, list[object]]:
    """Columns as lists; token ids as tensors, each as long as it is."""
    return {
        name: [torch.as_tensor(row[name]) if name == "input_ids" else row[name] for row in rows]
        for name in rows[0]
    }
