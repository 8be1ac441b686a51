"""SFTTrainer and RewardTrainer: the classic calls over tether's own supervised stages."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoTokenizer
from transformers.trainer_utils import TrainOutput

from tether.classic.config import RewardConfig, Row, SFTConfig, TrainingConfig
from tether.classic.log import Log
from tether.classic.models import TrainableRole, load, on_device, with_new_adapter
from tether.core.errors import DataError, ModelError
from tether.core.types import Demonstration
from tether.data.chat import ChatEncoder, Encoded
from tether.data.formats.registry import detect, kind_reader
from tether.data.prepare import Ranking, Split, encode_rows, within
from tether.learner.config import SupervisedConfig
from tether.learner.loop import plan_updates
from tether.models.heads import ScalarHead
from tether.models.loading import eos_ids, quiet
from tether.stages import reward, sft
from tether.stages.supervised import fit, headline


class _Trainer:
    """The calls of transformers' Trainer over a stage; subclasses say which one, and encode a row for it.

    Args:
        model: on the CPU or a GPU.
        args: settings, or transformers' TrainingArguments.
        tokenizer, processing_class: two names of one thing; neither: the one that belongs to the model's name.
        settings: over those in `args`.
    """

    config: ClassVar[type[TrainingConfig]]

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
        self.args, name = self.config.of(args, **settings), model.config._name_or_path
        self.tokenizer: Any = tokenizer or processing_class or (AutoTokenizer.from_pretrained(name) if name else None)
        if self.tokenizer is None:
            raise ModelError("a model that was not loaded by name needs its tokenizer: give tokenizer=...")
        self.model = on_device(model, "cpu" if self.args.use_cpu else "auto")
        if self.args.bf16:
            self.model = self.model.to(torch.bfloat16)
        generation = model.generation_config if model.can_generate() else None
        self.encoder = ChatEncoder(self.tokenizer, eos_ids(self.tokenizer, generation))
        self.train_rows, self.eval_rows = self._usable(train_dataset), self._usable(eval_dataset)
        self.stage = self._stage()

    def _stage(self) -> Any:
        raise NotImplementedError

    def _encode(self, row: Row) -> Any:
        raise NotImplementedError

    def _usable(self, rows: Iterable[Row]) -> list[Any]:
        """The encoded rows; those that cannot be used are counted in one warning."""
        encoded, skipped = encode_rows(rows, self._encode)
        if skipped:
            warnings.warn(f"{sum(skipped.values())} rows are left out: {skipped}", stacklevel=3)
        return encoded

    def train(self) -> TrainOutput:
        """All epochs over the rows, in a new run directory under `output_dir`.

        Raises:
            DataError: there are no rows.
        """
        args, rows, start = self.args, self.train_rows, time.perf_counter()
        if not rows:
            raise DataError("train_dataset has no row that can be used")
        log = Log(args.output_dir, {"trainer": type(args).__name__, **args.to_dict()}, args.tracker, {"name": args.run_name})
        assert log.run is not None
        rows_per_update = args.per_device_train_batch_size * args.gradient_accumulation_steps
        plan = plan_updates(len(rows), rows_per_update, args.num_train_epochs, args.seed)
        config = SupervisedConfig(optimizer=args.optimizer(len(plan)), checkpoint_every=args.save_steps, seed=args.seed)

        def progress(done: int, total: int, metrics: Mapping[str, float]) -> None:
            if done % args.logging_steps == 0:
                epoch = round(args.num_train_epochs * done / total, 2)
                print({"loss": round(metrics["loss"], 4), "learning_rate": metrics["learning_rate"], "epoch": epoch})

        loop = fit(self.stage, Split(rows, (), {}), plan, config, log.run, progress=progress)
        metrics = {"train_runtime": time.perf_counter() - start, "train_loss": statistics.fmean(loop.losses)}
        log.run.finish(metrics)
        return TrainOutput(len(plan), metrics["train_loss"], metrics)

    def evaluate(self) -> dict[str, float]:
        """The loss on `eval_dataset`, for texts in nats a counted token, and of pairs the accuracy."""
        return headline(self.stage, self.eval_rows)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """A transformers folder (for an adapter peft's) with its tokenizer."""
        with quiet():
            self.model.save_pretrained(output_dir or self.args.output_dir)
            self.tokenizer.save_pretrained(output_dir or self.args.output_dir)


class SFTTrainer(_Trainer):
    """Fine-tunes on rows of texts (every token counts), or of conversations and prompts with responses (the assistant's count).

    Args:
        model: a causal language model, or the folder or id of one.
        args: SFTConfig or transformers' TrainingArguments; more keywords are settings of SFTConfig over those in it.
        peft_config: train a new adapter of peft's instead of the model.
        data: train_dataset, eval_dataset, tokenizer or processing_class.
    """

    config = SFTConfig

    def __init__(self, model: Any, args: Any = None, *, peft_config: Any = None, **data: Any) -> None:
        self.new_adapter = peft_config is not None
        super().__init__(with_new_adapter(load(model), peft_config), args, **data)

    def _stage(self) -> sft.SFT:
        config = sft.SFTConfig(
            packing=self.args.packing,
            row_tokens=self.args.max_seq_length,
            rows_per_micro_batch=self.args.per_device_train_batch_size,
        )
        return sft.SFT(config, TrainableRole(self.model, self.model.active_adapter if self.new_adapter else None), self.encoder)

    def _encode(self, row: Row) -> Encoded:
        """Token ids of a row, cut at max_seq_length."""
        limit, field, bos = self.args.max_seq_length, self.args.dataset_text_field, self.tokenizer.bos_token
        if field in row:
            rendered = bool(bos) and row[field].startswith(bos)  # by a chat template, which has put the BOS there
            ids = tuple(self.tokenizer(row[field], add_special_tokens=not rendered)["input_ids"])
            encoded = Encoded(ids, (False, *(True for _ in ids[1:])))
        else:
            layout = detect([dict(row)], Demonstration, "this row")
            (demonstration,) = kind_reader(layout, Demonstration, "this row", dict(row))(dict(row))
            encoded = self.encoder.conversation(demonstration.messages)
        encoded = Encoded(encoded.ids[:limit], encoded.trained[:limit])
        if not encoded.num_trained:
            raise DataError(f"nothing to learn within max_seq_length = {limit} tokens")
        return encoded


class RewardTrainer(_Trainer):
    """Fits a sequence classifier with one label to pairs: whole texts `chosen` and `rejected`, or their token ids.

    Texts are tokenized as they stand, so that the saved model scores a text just as it was trained on it.

    Args:
        model: AutoModelForSequenceClassification with num_labels=1 over a decoder.
        args: RewardConfig or transformers' TrainingArguments; more keywords are settings of RewardConfig over those in it.
        data: train_dataset, eval_dataset, tokenizer or processing_class.
    """

    config = RewardConfig

    def __init__(self, model: Any, args: Any = None, **data: Any) -> None:
        score = dict(model.named_children()).get("score")
        if not isinstance(score, nn.Linear) or score.out_features != 1:
            call = "AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
            raise ModelError(f"a reward model is a decoder with one score: load it with {call}")
        super().__init__(model, args, **data)

    def _stage(self) -> reward.RewardModeling:
        model, settings = self.model, self.args
        model.config.problem_type = "regression"  # else the text-classification pipeline reports sigmoid(score)
        model.config.pad_token_id = self._pad_id
        head = ScalarHead(model.score.in_features)
        head.linear = model.score.float()
        config = reward.RewardConfig(
            micro_batch_tokens=2 * settings.per_device_train_batch_size * settings.max_length,
            use_margin=any(row.margin[0] for row in self.train_rows),
            centering=settings.center_rewards_coefficient,
        )
        return reward.RewardModeling(config, TrainableRole(model, head=head.to(model.device)), self.encoder)

    @property
    def _pad_id(self) -> int | None:
        """The classifier's own forward pass reads the last token that is not this one."""
        own = self.model.config.pad_token_id
        return self.tokenizer.pad_token_id if own is None else own

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """A transformers folder that AutoModelForSequenceClassification and the text-classification pipeline load."""
        self.model.score.to(self.model.dtype)
        super().save_model(output_dir)

    def _encode(self, row: Row) -> Ranking:
        """One pair; what stands after the common beginning counts as the response."""
        texts = [self._ids(row, side) for side in ("chosen", "rejected")]
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
        sides = tuple(Encoded(ids, tuple(i >= max(1, shared) for i in range(len(ids)))) for ids in texts)
        within(max(sides, key=len), self.args.max_length, "max_length")
        if texts[0] == texts[1]:
            raise DataError("both sides are the same tokens")
        return Ranking("", sides, (0,), (1,), (1.0,), (float(row.get("margin") or 0.0),))

    def _ids(self, row: Row, side: str) -> tuple[int, ...]:
        if isinstance(row.get(side), str):
            ids = self.tokenizer(row[side])["input_ids"]
        elif f"input_ids_{side}" in row:
            ids = row[f"input_ids_{side}"]
            ids = [i for i, real in zip(ids, row.get(f"attention_mask_{side}") or [1] * len(ids), strict=True) if real]
        else:
            raise DataError(f"no text in column {side}, and no column input_ids_{side}")
        while ids and ids[-1] == self._pad_id:
            ids = ids[:-1]
        if not ids:
            raise DataError(f"{side} is empty")
        return tuple(ids)
