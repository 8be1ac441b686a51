"""PPOTrainer: generate, score yourself, step. The update is tether's policy-gradient step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tether.classic.config import PPOConfig, Row
from tether.classic.log import numbered_run
from tether.classic.models import AutoModelForCausalLMWithValueHead, TrainableRole, create_reference_model, on_device
from tether.core.errors import ConfigError, DataError, ModelError
from tether.core.rundir import RunDirectory
from tether.core.types import Json, Prompt, Rollout, Sampling, Score, StopReason, user
from tether.data.batches import padded_tokens
from tether.data.chat import ChatEncoder
from tether.models.loading import eos_ids, pick_device
from tether.models.trunk import Role
from tether.stages.policy_gradient import PolicyGradient

PURE: Json = {
    **{"do_sample": True, "num_beams": 1, "min_length": 0, "min_new_tokens": None, "no_repeat_ngram_size": 0},
    **{"top_k": 0, "top_p": 1.0, "min_p": None, "typical_p": 1.0, "repetition_penalty": 1.0},
}
"""Sampling from the policy itself, whatever a model's generation_config.json recommends for chatting."""
CLASSIC = {
    "objective/kl": "kl/policy_reference_k1",
    "objective/kl_coef": "kl/coefficient",
    "ppo/mean_scores": "reward/proxy",
    "ppo/std_scores": "reward/proxy_std",
    "ppo/loss/policy": "policy/loss",
    "ppo/loss/value": "value/loss",
    "ppo/loss/total": "loss",
    "ppo/policy/entropy": "policy/entropy",
    "ppo/policy/approxkl": "policy/approximate_kl",
    "ppo/policy/clipfrac": "policy/clip_fraction",
    "ppo/val/clipfrac": "value/clip_fraction",
    "ppo/val/mean": "value/mean",
    "ppo/val/var_explained": "value/explained_variance",
    "ppo/learning_rate": "learning_rate",
    "tokens/responses_len_mean": "response/length",
}
"""Statistics of `step`, by the metrics of tether's own that they are."""
Tokens = Sequence[Tensor]
Scores = Sequence[Tensor | float]


class PPOTrainer:
    """One policy with its value head, and its frozen reference.

    Args:
        ref_model: None: a frozen copy of the model, or with an adapter the model without it.
        dataset: rows for `dataloader`; their `input_ids` become a list of tensors.
    """

    def __init__(
        self,
        config: PPOConfig,
        model: AutoModelForCausalLMWithValueHead,
        ref_model: Any = None,
        tokenizer: Any = None,
        dataset: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if not isinstance(model, AutoModelForCausalLMWithValueHead):
            raise ModelError("PPOTrainer trains a value head too: load the model with AutoModelForCausalLMWithValueHead")
        if tokenizer is None:
            raise ConfigError("PPOTrainer needs the model's tokenizer: give tokenizer=...")
        torch.manual_seed(config.seed)
        self.config, self.tokenizer, self.dataset, self.data_collator = config, tokenizer, dataset, data_collator or _lists
        self.current_device, self.current_step = pick_device("auto"), 0
        self.accelerator = SimpleNamespace(device=self.current_device, num_processes=1, is_main_process=True)
        self.model = on_device(model)
        self.ref_model = self._reference(ref_model)
        self.encoder = ChatEncoder(tokenizer, eos_ids(tokenizer, model.generation_config))
        self.stage = self._stage()
        self.temperature, self.prompts_returned = 1.0, False

    def _reference(self, ref_model: Any) -> Any:
        if ref_model is None:
            return None if self.model.is_peft_model else create_reference_model(self.model)
        trained = {p.data_ptr() for p in self.model.parameters() if p.requires_grad}
        if trained & {p.data_ptr() for p in ref_model.parameters()}:
            raise ModelError("ref_model shares weights that are trained, so it would move along and the KL would always be 0")
        return on_device(ref_model).requires_grad_(False).eval()

    def _stage(self) -> PolicyGradient:
        """Without a reference of its own the policy's model plays it, its adapter switched off."""
        absent = cast(Any, None)  # sampling and scoring are the caller's
        policy, value = (TrainableRole(self.model.pretrained_model, head) for head in (None, self.model.v_head))
        other = self.model if self.ref_model is None else self.ref_model
        reference = Role(other.pretrained_model if isinstance(other, AutoModelForCausalLMWithValueHead) else other)
        return PolicyGradient(self.config.policy_config(), policy, reference, value, absent, absent, self.encoder)

    @cached_property
    def run(self) -> RunDirectory:
        """Made when it is first written to."""
        return numbered_run(self.config.output_dir, self.config, self.config.log_with)

    @property
    def dataloader(self) -> DataLoader[Any]:
        """Shuffled batches of the dataset, the last incomplete one dropped.

        Raises:
            DataError: there is no dataset, or less than a batch.
        """
        size = self.config.batch_size
        if len(self.dataset or ()) < size:
            raise DataError(f"dataloader needs at least batch_size = {size} rows: give PPOTrainer a dataset of them")
        order = torch.Generator().manual_seed(self.config.seed + self.current_step)
        return DataLoader(self.dataset, size, shuffle=True, drop_last=True, collate_fn=self.data_collator, generator=order)

    def generate(self, query_tensor: Tensor | Tokens, *, batch_size: int = 4, return_prompt: bool = True, **options: Any) -> Any:
        """Sample a response to each query with transformers' own generate, from the bare policy unless told otherwise.

        `step` divides the logits by the temperature that the latest call used.

        Returns:
            For a list of queries (time,) a list of tensors (time,), each cut after its stop token; tensors (1, time) for queries
            of that shape and for a single query outside a list.

        Raises:
            DataError: a query holds more than one sequence.
        """
        queries = [query_tensor] if isinstance(query_tensor, Tensor) else list(query_tensor)
        if any(q.dim() > 1 and len(q) > 1 for q in queries):
            raise DataError("each query is one sequence without padding: give a list of tensors of shape (time,)")
        stops = {"pad_token_id": self.encoder.pad_id, "eos_token_id": list(self.encoder.stop_ids)}
        settings = {**PURE, "temperature": 1.0, **stops, **options}
        settings["min_length"] = max(0, settings["min_length"] or 0)
        self.temperature = float(settings["temperature"] or 1.0) if settings["do_sample"] else 1.0
        self.prompts_returned = return_prompt
        if other := {name: settings[name] for name, pure in PURE.items() if settings[name] not in (pure, None)}:
            warnings.warn(
                f"{other} samples from another distribution than the policy whose ratios and KL step() has: docs/classic.md",
                stacklevel=2,
            )
        rows: list[Tensor] = []
        for start in range(0, len(queries), batch_size):
            rows += self._respond(queries[start : start + batch_size], return_prompt, settings)
        return rows[0].reshape(1, -1) if isinstance(query_tensor, Tensor) else rows

    def _respond(self, queries: Tokens, return_prompt: bool, settings: Row) -> list[Tensor]:
        flat = [q.reshape(-1).to(self.current_device) for q in queries]
        pad = partial(pad_sequence, batch_first=True, padding_side="left")
        ids, mask = pad(flat, padding_value=self.encoder.pad_id), pad([torch.ones_like(q) for q in flat])
        model = self.model.pretrained_model.eval()
        answers = model.generate(input_ids=ids, attention_mask=mask, **settings)[:, ids.shape[1] :]
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
            queries, responses: tensors of token ids. Responses that generate() returned with their prompts lose them here.
            scores: one number each; one that is not finite counts as missing and teaches nothing.

        Raises:
            DataError: the lists do not fit each other or the batch size, or a response is empty.
        """
        stage, limit = self.stage, self.config.batch_size
        if not 0 < len(queries) == len(responses) == len(scores) <= limit:
            given = f"{len(queries)} queries, {len(responses)} responses and {len(scores)} scores"
            raise DataError(f"step needs one of each for every response and at most batch_size = {limit}; got {given}")
        prompts, answers = ([tuple(t.reshape(-1).tolist()) for t in tensors] for tensors in (queries, responses))
        if self.prompts_returned and all(a[: len(p)] == p for p, a in zip(prompts, answers, strict=True)):
            warnings.warn(
                "responses of generate() begin with their queries unless return_prompt=False: here the queries are taken off",
                stacklevel=2,
            )
            answers = [answer[len(prompt) :] for prompt, answer in zip(prompts, answers, strict=True)]
        if not all(answers):
            raise DataError("every response needs at least one token")
        values = [float(torch.as_tensor(score).item()) for score in scores]
        rated = [Score(value).finite("the caller", value) for value in values]
        widest = max(padded_tokens([self.encoder.rollout(p, a)]) for p, a in zip(prompts, answers, strict=True))
        changes = {"temperature": self.temperature, "micro_batch_tokens": self.config.mini_batch * widest}
        stage.config = stage.config.model_copy(update=changes)
        metrics = stage.learn([*map(self._rollout, prompts, answers)], rated, self.current_step)
        self.current_step += 1
        return {name: metrics[own] for name, own in CLASSIC.items() if own in metrics}

    def _rollout(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Rollout:
        reason = StopReason.STOP_TOKEN if answer[-1] in self.encoder.stop_ids else StopReason.LENGTH
        text, sampling = self.encoder.decode(answer), Sampling(temperature=self.temperature)
        query = Prompt((user(self.encoder.decode(prompt)),))
        return Rollout(prompt, answer, (), reason, text, 0, self.current_step, sampling, query)

    def log_stats(self, stats: Row, batch: Row, rewards: Scores, columns_to_log: Iterable[str] = ("query", "response")) -> None:
        """Write the numbers to run directory and tracker, and of the batch the columns that it has to samples.jsonl."""
        values = torch.tensor([float(r) for r in rewards])
        moments = {"env/reward_mean": float(values.mean()), "env/reward_std": float(values.std(correction=0))}
        numbers = {name: value for name, value in stats.items() if isinstance(value, (int, float))}
        self.run.log({**numbers, **moments}, self.current_step)
        if columns := [name for name in columns_to_log if name in batch]:
            rows = zip(*(batch[name] for name in columns), values.tolist(), strict=True)
            self.run.sample({"step": self.current_step, **dict(zip((*columns, "proxy"), row, strict=True))} for row in rows)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """The model as its own save_pretrained writes it, and the tokenizer."""
        self.model.save_pretrained(save_directory)
        self.tokenizer.save_pretrained(save_directory)


def _lists(rows: list[Row]) -> dict[str, list[Any]]:
    """Columns as lists; token ids as tensors, each as long as it is."""
    return {name: [torch.as_tensor(row[name]) if name == "input_ids" else row[name] for row in rows] for name in rows[0]}
