"""SFTTrainer and RewardTrainer: the classic calls over tether's own supervised stages."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.trainer_utils import TrainOutput

from tether.classic.config import RewardConfig, SFTConfig, TrainingConfig
from tether.classic.log import Log
from tether.classic.models import TrainableRole, load, stop_ids, to_device, with_adapter
from tether.core.errors import DataError, ModelError
from tether.core.types import Demonstration
from tether.data.chat import ChatEncoder, Encoded
from tether.data.comparisons import Ranking
from tether.data.formats.registry import detect, kind_reader
from tether.learner.config import SupervisedConfig
from tether.learner.local import LocalLearner
from tether.learner.loop import SupervisedLoop, plan_updates
from tether.models.heads import ScalarHead
from tether.models.loading import pick_device, quiet
from tether.stages.reward import RewardConfig as RewardStageConfig
from tether.stages.reward import RewardModeling
from tether.stages.sft import SFT
from tether.stages.sft import SFTConfig as SFTStageConfig

Row = Mapping[str, Any]


class SFTTrainer:
    """Fine-tunes on rows of texts (every token counts), or of conversations and prompts with responses (the assistant's count).

    Args:
        model: a causal language model, or the folder or id of one.
        args: SFTConfig or transformers' TrainingArguments.
        tokenizer, processing_class: two names of one thing; neither: the one that belongs to the model's name.
        peft_config: train a new adapter of peft's instead of the model.
        settings: of SFTConfig, over those in `args`.
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
        *,
        train_dataset: Iterable[Any],
        eval_dataset: Iterable[Any] = (),
        tokenizer: Any = None,
        processing_class: Any = None,
        peft_config: Any = None,
        **settings: Any,
    ) -> None:
        self.args: SFTConfig = SFTConfig.of(args, **settings)
        self.tokenizer = tokenizer or processing_class or _tokenizer_of(model)
        self.model = _placed(with_adapter(load(model), peft_config), self.args)
        encoder = ChatEncoder(self.tokenizer, stop_ids(self.model, self.tokenizer))
        stage = SFTStageConfig(
            packing=self.args.packing,
            row_tokens=self.args.max_seq_length,
            rows_per_micro_batch=self.args.per_device_train_batch_size,
        )
        adapter = None if peft_config is None else self.model.active_adapter
        self.stage = SFT(stage, TrainableRole(self.model, adapter), encoder)
        self.train_rows, self.eval_rows = (_usable(rows, self._encode) for rows in (train_dataset, eval_dataset))

    def train(self) -> TrainOutput:
        return _fit(self.stage, self.train_rows, self.args)

    def evaluate(self) -> dict[str, float]:
        """Mean negative log-likelihood a counted token of `eval_dataset`."""
        return self.stage.evaluate(self.eval_rows)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """A transformers folder (for an adapter peft's) with its tokenizer."""
        _save(self, output_dir)

    def _encode(self, row: Row) -> Encoded:
        """Token ids of a row, cut at max_seq_length."""
        limit, field = self.args.max_seq_length, self.args.dataset_text_field
        if field in row:
            # A text that a chat template rendered carries its BOS already.
            begun = bool(self.tokenizer.bos_token) and row[field].startswith(self.tokenizer.bos_token)
            ids = tuple(self.tokenizer(row[field], add_special_tokens=not begun)["input_ids"])
            encoded = Encoded(ids, (False, *(True for _ in ids[1:])))
        else:
            layout = detect([dict(row)], Demonstration, "this row")
            (found,) = kind_reader(layout, Demonstration, "this row", dict(row))(dict(row))
            encoded = self.stage.encoder.conversation(found.messages)
        encoded = Encoded(encoded.ids[:limit], encoded.trained[:limit])
        if not encoded.num_trained:
            raise DataError(f"nothing to learn within max_seq_length = {limit} tokens")
        return encoded


class RewardTrainer:
    """Fits a sequence classifier with one label to pairs: whole texts `chosen` and `rejected`, or their token ids.

    Texts are tokenized as they stand, so that the saved model scores a text just as it was trained on it.

    Args:
        model: AutoModelForSequenceClassification with num_labels=1 over a decoder.
        args: RewardConfig or transformers' TrainingArguments.
        settings: of RewardConfig, over those in `args`.
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
        *,
        train_dataset: Iterable[Any],
        eval_dataset: Iterable[Any] = (),
        tokenizer: Any = None,
        processing_class: Any = None,
        **settings: Any,
    ) -> None:
        if getattr(getattr(model, "score", None), "out_features", 0) != 1:
            call = "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
            raise ModelError(f"a reward model is a decoder with one score: load it with {call}")
        self.args: RewardConfig = RewardConfig.of(args, **settings)
        self.tokenizer = tokenizer or processing_class or _tokenizer_of(model)
        self.model = _placed(model, self.args)
        model.score.float()
        model.config.problem_type = "regression"  # else the text-classification pipeline reports sigmoid(score)
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self.tokenizer.pad_token_id
        head = ScalarHead(model.score.in_features)
        head.linear = model.score
        head.to(model.device)
        self.train_rows, self.eval_rows = (_usable(rows, self._encode) for rows in (train_dataset, eval_dataset))
        stage = RewardStageConfig(
            micro_batch_tokens=2 * self.args.per_device_train_batch_size * self.args.max_length,
            use_margin=any(row.margin[0] for row in self.train_rows),
            centering=self.args.center_rewards_coefficient,
        )
        encoder = ChatEncoder(self.tokenizer, stop_ids(None, self.tokenizer))
        self.stage = RewardModeling(stage, TrainableRole(model, head=head), encoder)

    def train(self) -> TrainOutput:
        return _fit(self.stage, self.train_rows, self.args)

    def evaluate(self) -> dict[str, float]:
        """Loss and accuracy on `eval_dataset`."""
        found = self.stage.evaluate(self.eval_rows)
        return {"eval_loss": found["loss"], "eval_accuracy": found["accuracy"]["value"]}

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """A transformers folder that AutoModelForSequenceClassification and the text-classification pipeline load."""
        self.model.score.to(self.model.dtype)
        _save(self, output_dir)

    def _encode(self, row: Row) -> Ranking:
        """One pair; what stands after the common beginning counts as the response."""
        chosen, rejected = (self._ids(row, side) for side in ("chosen", "rejected"))
        if max(len(chosen), len(rejected)) > self.args.max_length:
            raise DataError(f"longer than max_length = {self.args.max_length} tokens")
        if chosen == rejected:
            raise DataError("both sides are the same tokens")
        shared = next(
            (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(map(len, (chosen, rejected)))
        )
        sides = tuple(Encoded(ids, tuple(i >= max(1, shared) for i in range(len(ids)))) for ids in (chosen, rejected))
        return Ranking("", sides, (0,), (1,), (1.0,), (float(row.get("margin") or 0.0),))

    def _ids(self, row: Row, side: str) -> tuple[int, ...]:
        if isinstance(row.get(side), str):
            ids = self.tokenizer(row[side])["input_ids"]
        elif f"input_ids_{side}" in row:
            ids = row[f"input_ids_{side}"]
            ids = [i for i, real in zip(ids, row.get(f"attention_mask_{side}") or [1] * len(ids), strict=True) if real]
        else:
            raise DataError(f"no text in column {side}, and no column input_ids_{side}")
        # The classifier's own forward pass reads the last token that is not its padding token.
        while ids and ids[-1] == self.model.config.pad_token_id:
            ids = ids[:-1]
        if not ids:
            raise DataError(f"{side} is empty")
        return tuple(ids)


def _fit(stage: SFT | RewardModeling, rows: list[Any], args: TrainingConfig) -> TrainOutput:
    """All epochs over the rows, in a new run directory under `output_dir`.

    Raises:
        DataError: there are no rows.
    """
    if not rows:
        raise DataError("train_dataset has no row that can be used")
    start, named = time.perf_counter(), [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    tracker = next((name for name in named if name != "none"), None)
    log = Log(args.output_dir, {"trainer": type(args).__name__, **args.to_dict()}, tracker, {"name": args.run_name})
    assert log.run is not None
    plan = plan_updates(len(rows), args.rows_per_update, args.num_train_epochs, args.seed)
    stage.learner = LocalLearner(stage.role.parameters(), args.optimizer(len(plan)), len(plan))
    losses: list[float] = []

    def progress(done: int, total: int, metrics: Mapping[str, float]) -> None:
        losses.append(metrics["loss"])
        if log.send:
            log.send(dict(metrics), done)
        if done % args.logging_steps == 0:
            epoch = round(args.num_train_epochs * done / total, 2)
            print({"loss": round(metrics["loss"], 4), "learning_rate": metrics["learning_rate"], "epoch": epoch})

    stage.role.train_mode(True)
    saving = SupervisedConfig(checkpoint_every=args.save_steps, seed=args.seed)
    SupervisedLoop(log.run, stage.learner, stage.step, saving, progress=progress).train(rows, plan)
    stage.role.train_mode(False)
    metrics = {"train_runtime": time.perf_counter() - start, "train_loss": sum(losses) / len(losses)}
    log.run.finish(metrics)
    return TrainOutput(len(plan), metrics["train_loss"], metrics)


def _save(trainer: SFTTrainer | RewardTrainer, folder: str | Path | None) -> None:
    with quiet():
        trainer.model.save_pretrained(folder or trainer.args.output_dir)
        trainer.tokenizer.save_pretrained(folder or trainer.args.output_dir)


def _tokenizer_of(model: Any) -> Any:
    name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
    if not name:
        raise ModelError("a model that was not loaded by name needs its tokenizer: give tokenizer=...")
    return AutoTokenizer.from_pretrained(name)


def _placed(model: Any, args: TrainingConfig) -> Any:
    model = to_device(model, pick_device("cpu" if args.use_cpu else "auto"))
    return model.to(torch.bfloat16) if args.bf16 else model


def _usable(rows: Iterable[Row], encode: Callable[[Row], Any]) -> list[Any]:
    """The encoded rows; those that cannot be used are counted in one warning."""
    encoded: list[Any] = []
    skipped: dict[str, int] = {}
    for row in rows:
        try:
            encoded.append(encode(row))
        except DataError as error:
            skipped[str(error)] = skipped.get(str(error), 0) + 1
    if skipped:
        warnings.warn(f"{sum(skipped.values())} rows are left out: {skipped}", stacklevel=4)
    return encoded
