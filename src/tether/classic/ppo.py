"""PPOTrainer: generate, score yourself, step. The update is tether's policy-gradient step."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tether.classic.config import PPOConfig, Row
from tether.classic.log import Log
from tether.classic.models import AutoModelForCausalLMWithValueHead, TrainableRole, create_reference_model, on_device
from tether.classic.update import ClassicStep, classic_statistics, deviation
from tether.core.errors import ConfigError, DataError, ModelError
from tether.core.types import Json, Prompt, Rollout, Sampling, Score, StopReason, user
from tether.data.chat import ChatEncoder
from tether.models.loading import eos_ids, pick_device
from tether.models.trunk import Role
from tether.stages.rollouts import Clock

PURE: Json = {
    **{"do_sample": True, "num_beams": 1, "min_length": 0, "min_new_tokens": None, "no_repeat_ngram_size": 0},
    **{"top_k": 0, "top_p": 1.0, "min_p": None, "typical_p": 1.0, "repetition_penalty": 1.0},
}
"""Sampling from the policy itself, whatever a model's generation_config.json recommends for chatting."""
Tokens = Sequence[Tensor]
Scores = Sequence[Tensor | float]


class PPOTrainer:
    """One policy with its value head, and its frozen reference.

    Args:
        ref_model: None: a frozen copy of the model, or with an adapter the model without it.
        dataset: rows for `dataloader`; their `input_ids` become a list of tensors.
        optimizer: over all trainable parameters, in float32, at one learning rate, which is then the one that counts; None: AdamW
            without weight decay.
        num_shared_layers: see create_reference_model.
    """

    def __init__(
        self,
        config: PPOConfig,
        model: AutoModelForCausalLMWithValueHead,
        ref_model: Any = None,
        tokenizer: Any = None,
        dataset: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        num_shared_layers: int | None = None,
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
        self.ref_model = self._reference(ref_model, num_shared_layers)
        self.encoder = ChatEncoder(tokenizer, eos_ids(tokenizer, model.generation_config))
        self.stage = self._stage()
        if optimizer is not None:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if held != {id(m) for m in self.stage.learner.masters} or len({g["lr"] for g in optimizer.param_groups}) != 1:
                raise ConfigError("optimizer must hold exactly the trainable parameters, in float32, at one learning rate")
            self.stage.learner.optimizer = optimizer
        self.optimizer = self.stage.learner.optimizer
        self.temperature, self.prompts_returned, self.past_scores = 1.0, False, torch.zeros(0)
        started = config.tracker_kwargs.get(config.log_with or "", {})
        options = {"project": config.tracker_project_name, **started, **config.project_kwargs}
        self.log = Log(config.output_dir, {"trainer": "PPO", **config.to_dict()}, config.log_with, options)

    def _reference(self, ref_model: Any, num_shared_layers: int | None) -> Any:
        if ref_model is None:
            return None if self.model.is_peft_model else create_reference_model(self.model, num_shared_layers)
        if num_shared_layers is not None:
            raise ConfigError("num_shared_layers has no effect with a ref_model; leave one of them out")
        trained = {p.data_ptr() for p in self.model.parameters() if p.requires_grad}
        if trained & {p.data_ptr() for p in ref_model.parameters()}:
            raise ModelError("ref_model shares weights that are trained, so it would move along and the KL would always be 0")
        return on_device(ref_model).requires_grad_(False).eval()

    @property
    def _reference_trunk(self) -> Any:
        """Without a reference of its own the policy's model, whose adapter is switched off for it."""
        model = self.model if self.ref_model is None else self.ref_model
        return model.pretrained_model if isinstance(model, AutoModelForCausalLMWithValueHead) else model

    def _stage(self) -> ClassicStep:
        trunk = self.model.pretrained_model
        adapter = trunk.active_adapter if self.model.is_peft_model else None
        policy, value = TrainableRole(trunk, adapter), TrainableRole(trunk, adapter, self.model.v_head)
        policy.causal_model.recompute = self.config.gradient_checkpointing
        return ClassicStep(self.config, policy, Role(self._reference_trunk), value, self.encoder)

    @property
    def dataloader(self) -> DataLoader[Any]:
        """Shuffled batches of the dataset, the last incomplete one dropped.

        Raises:
            DataError: there is no dataset, or less than a batch.
        """
        size = self.config.batch_size
        if self.dataset is None or len(self.dataset) < size:
            given = "no dataset" if self.dataset is None else f"a dataset of {len(self.dataset)} rows"
            raise DataError(f"PPOTrainer was given {given} and needs batch_size = {size} rows: give dataset=...")
        order = torch.Generator().manual_seed(self.config.seed + self.current_step)
        return DataLoader(self.dataset, size, shuffle=True, drop_last=True, collate_fn=self.data_collator, generator=order)

    def generate(
        self,
        query_tensor: Tensor | Tokens,
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Sample a response to each query with transformers' own generate, from the bare policy unless told otherwise.

        `step` divides the logits by the temperature that the latest call used.

        Returns:
            For a list of queries (time,) a list of tensors (time,), each cut after its stop token; tensors (1, time) for queries
            of that shape and for a single query outside a list. With `generate_ref_response` also the reference's.

        Raises:
            DataError: a query holds more than one sequence.
        """
        queries = [query_tensor] if isinstance(query_tensor, Tensor) else list(query_tensor)
        if any(q.dim() > 1 and len(q) > 1 for q in queries):
            raise DataError("each query is one sequence without padding: give a list of tensors of shape (time,)")
        stops = {"pad_token_id": self.encoder.pad_id, "eos_token_id": list(self.encoder.stop_ids)}
        settings = {**PURE, "temperature": 1.0, **stops, **generation_kwargs}
        settings["min_length"] = max(0, settings["min_length"] or 0)
        self.temperature = float(settings["temperature"] or 1.0) if settings["do_sample"] else 1.0
        self.prompts_returned = return_prompt
        other = {name: settings[name] for name, pure in PURE.items() if settings[name] not in (pure, None)}
        if other:
            warnings.warn(
                f"generate was called with {other}: its responses come from another distribution than the policy whose ratios "
                "and KL step() computes. Leave this out to sample from the policy itself (docs/classic.md)",
                stacklevel=2,
            )

        def responses(model: Any) -> Any:
            rows: list[Tensor] = []
            for start in range(0, len(queries), batch_size):
                length = {"max_new_tokens": length_sampler()} if length_sampler else {}
                rows += self._respond(model, queries[start : start + batch_size], return_prompt, {**settings, **length})
            return rows[0].reshape(1, -1) if isinstance(query_tensor, Tensor) else rows

        own = responses(self.model.pretrained_model)
        if not generate_ref_response:
            return own
        with self.model.disable_adapter() if self.ref_model is None else contextlib.nullcontext():
            return own, responses(self._reference_trunk)

    def _respond(self, model: Any, queries: Tokens, return_prompt: bool, settings: Row) -> list[Tensor]:
        flat = [q.reshape(-1).to(self.current_device) for q in queries]
        pad = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        ids, mask = pad(flat, padding_value=self.encoder.pad_id), pad([torch.ones_like(q) for q in flat])
        answers = model.eval().generate(input_ids=ids, attention_mask=mask, **settings)[:, ids.shape[1] :]
        stops = torch.tensor(settings["eos_token_id"], device=answers.device).reshape(-1)
        rows: list[Tensor] = []
        for query, given, answer in zip(flat, queries, answers, strict=True):
            ends = torch.isin(answer, stops).nonzero()
            answer = answer[: int(ends[0]) + 1] if len(ends) else answer
            answer = torch.cat([query, answer]) if return_prompt else answer
            rows.append(answer[None] if given.dim() == 2 else answer)
        return rows

    def step(self, queries: Tokens, responses: Tokens, scores: Scores, response_masks: Sequence[Tensor] | None = None) -> Json:
        """One PPO step on these responses; returns statistics under their classic names.

        Args:
            queries, responses: tensors of token ids. Responses that generate() returned with their prompts lose them here.
            scores: one number each; one that is not finite counts as missing and teaches nothing.
            response_masks: 0 for response tokens that the policy did not choose, such as a tool's.

        Raises:
            DataError: the lists do not fit each other or the batch size, or a response is empty.
        """
        clock, stage, limit = Clock(), self.stage, self.config.batch_size
        if not 0 < len(queries) == len(responses) == len(scores) <= limit:
            given = f"{len(queries)} queries, {len(responses)} responses and {len(scores)} scores"
            raise DataError(f"step needs one of each for every response and at most batch_size = {limit}; got {given}")
        prompts, answers = ([t.reshape(-1).tolist() for t in tensors] for tensors in (queries, responses))
        if self.prompts_returned and all(a[: len(p)] == p for p, a in zip(prompts, answers, strict=True)):
            warnings.warn(
                "the responses begin with their queries, as generate() returns them unless return_prompt=False; the queries are "
                "taken off, since the policy did not choose their tokens",
                stacklevel=2,
            )
            answers = [answer[len(prompt) :] for prompt, answer in zip(prompts, answers, strict=True)]
        masks = [torch.ones(len(a)) for a in answers] if response_masks is None else [m.reshape(-1) for m in response_masks]
        if [len(m) for m in masks] != [len(a) for a in answers] or not all(m.any() for m in masks):
            raise DataError("every response needs at least one token of the policy's own, and a mask of its own length")
        # What follows the policy's own last token is not conditioned on by any that counts.
        stage.response_masks = [mask[: int(mask.nonzero()[-1]) + 1].bool() for mask in masks]
        rollouts = [self._rollout(p, a[: len(m)]) for p, a, m in zip(prompts, answers, stage.response_masks, strict=True)]
        values = self._scaled([float(s.detach().reshape(()) if isinstance(s, Tensor) else s) for s in scores])
        stage.config = stage.config.model_copy(update={"temperature": self.temperature})
        stage.learner.rate = self.optimizer.param_groups[0]["lr"]
        rated = [Score(v) if math.isfinite(v) else Score(None, reason=f"the score is {v}") for v in values]
        metrics = stage.learn(rollouts, rated, self.current_step, clock)
        clock.lap("update")
        self.current_step += 1
        stats = classic_statistics(stage, metrics, values)
        stats["time/ppo/forward_pass"], stats["time/ppo/optimize_step"] = clock.laps["time/evaluate"], clock.laps["time/update"]
        return {**stats, "time/ppo/total": time.perf_counter() - clock.start}

    def _rollout(self, prompt: list[int], answer: list[int]) -> Rollout:
        reason = StopReason.STOP_TOKEN if answer[-1] in self.encoder.stop_ids else StopReason.LENGTH
        text, sampling = self.encoder.decode(answer), Sampling(temperature=self.temperature)
        query = Prompt((user(self.encoder.decode(prompt)),))
        return Rollout(tuple(prompt), tuple(answer), (), reason, text, 0, self.current_step, sampling, query)

    def _scaled(self, scores: list[float]) -> list[float]:
        """Over the standard deviation of all scores so far; with use_score_norm also less their mean."""
        if not self.config.use_score_scaling:
            return scores
        new = torch.tensor(scores, dtype=torch.float64)
        self.past_scores = torch.cat([self.past_scores, new[new.isfinite()]])
        mean = self.past_scores.mean() if self.config.use_score_norm else 0.0
        return ((new - mean) / self.past_scores.std().clamp(min=1e-8)).tolist()

    def log_stats(self, stats: Row, batch: Row, rewards: Scores, columns_to_log: Iterable[str] = ("query", "response")) -> None:
        """Write the numbers to run directory and tracker, and of the batch the columns that it has to samples.jsonl."""
        values = torch.tensor([float(r) for r in rewards])
        moments = {"env/reward_mean": float(values.mean()), "env/reward_std": float(deviation(values))}
        self.log.log({**stats, **moments}, self.current_step)
        columns = [name for name in columns_to_log if name in batch]
        if self.log.run and columns:
            rows = zip(*(batch[name] for name in columns), values.tolist(), strict=True)
            self.log.run.sample({"step": self.current_step, **dict(zip((*columns, "proxy"), row, strict=True))} for row in rows)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """The model as its own save_pretrained writes it, and the tokenizer."""
        self.model.save_pretrained(save_directory)
        self.tokenizer.save_pretrained(save_directory)


def _lists(rows: list[Row]) -> dict[str, list[Any]]:
    """Columns as lists; token ids as tensors, each as long as it is."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if "input_ids" in columns:
        columns["input_ids"] = [torch.as_tensor(ids) for ids in columns["input_ids"]]
    return columns
