"""SFTTrainer and RewardTrainer: the classic calls over tether's own supervised stages."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, repeat, takewhile
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import PeftConfig
from torch import nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import TrainOutput

from tether.api.classic.config import RewardConfig, Row, SFTConfig, TrainingConfig
from tether.api.classic.log import numbered_run
from tether.api.classic.models import CausalModel, TrainableRole, causal_model, on_device
from tether.api.classic.time import AnnouncedLimit
from tether.core.budget import limited_by
from tether.core.errors import DataError, ModelError
from tether.core.keeping import added_to
from tether.core.types import Demonstration
from tether.data.chat import ChatEncoder, Encoded
from tether.data.formats.registry import detect, kind_reader
from tether.data.prepare import Limit, Ranking, Split, encode_rows, within
from tether.models.heads import ScalarHead
from tether.models.precision import cast
from tether.models.pretrained import quiet
from tether.models.speech import eos_ids
from tether.settings.learner import SupervisedConfig
from tether.stages import reward, sft
from tether.stages.learner.loop import plan_updates
from tether.stages.supervised import SupervisedLoop, headline


class _Trainer:
    """The calls of transformers' Trainer over a stage; subclasses say which one, and encode a row
    for it.

    Args:
        model: on the CPU or a GPU.
        args: settings, or transformers' TrainingArguments.
        tokenizer, processing_class: two names of one thing. Without either, the tokenizer of the
            model's name.
        settings: over those in `args`.
    """

    config: ClassVar[type[TrainingConfig]]
    section: ClassVar[str]

    def __init__(
        self,
        model: CausalModel,
        args: TrainingConfig | TrainingArguments | None = None,
        *,
        train_dataset: Iterable[Row],
        eval_dataset: Iterable[Row] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        **settings: object,
    ) -> None:
        self.args = self.config.of(args, **settings)
        self.tokenizer: PreTrainedTokenizerBase = (
            tokenizer
            or processing_class
            or AutoTokenizer.from_pretrained(model.config._name_or_path)
        )
        self.model = on_device(
            cast(model, torch.bfloat16) if self.args.bf16 else model,
            "cpu" if self.args.use_cpu else "auto",
        )
        ends = eos_ids(self.tokenizer, model.generation_config if model.can_generate() else None)
        self.encoder = ChatEncoder(
            self.tokenizer,
            ends,
            context_length=TrainableRole(self.model).context_length,
        )
        self.stage = self._stage()
        self.train_rows = self._usable(train_dataset)
        self.eval_rows = self._usable(eval_dataset)

    def _stage(self) -> sft.SFT | reward.RewardModeling: ...
    def _encode(self, row: Row, /) -> Sequence[Encoded | Ranking]: ...

    def _usable(self, rows: Iterable[Row]) -> list[Encoded | Ranking]:
        """The encoded rows; those that cannot be used are counted in one warning."""
        encoded, skipped = encode_rows(rows, self._encode)
        if skipped:
            warnings.warn(f"{sum(skipped.values())} rows are left out: {skipped}", stacklevel=3)
        return [part for parts in encoded for part in parts]

    def train(self) -> TrainOutput:
        """All epochs over the rows, in a new run directory under `output_dir`.

        Raises:
            DataError: there are no rows.
        """
        args = self.args
        rows = self.train_rows
        start = time.perf_counter()
        if not rows:
            raise DataError("train_dataset has no row that can be used")
        run = numbered_run(
            args.output_dir,
            args,
            args.report_to,
            {self.section: self.stage.config},
            self.model,
        )
        rows_per_update = args.per_device_train_batch_size * args.gradient_accumulation_steps
        plan = plan_updates(len(rows), rows_per_update, args.num_train_epochs, args.seed)
        config = SupervisedConfig(
            optimizer=args.optimizer(len(plan)),
            checkpoint_every=args.save_steps,
            seed=args.seed,
        )

        clock = AnnouncedLimit(self.section, args.budget)
        passes = "1 pass" if args.num_train_epochs == 1 else f"{args.num_train_epochs} passes"
        clock.begin(f"{len(rows):,} rows × {passes} in {len(plan):,} updates")

        def progress(done: int, total: int, metrics: Mapping[str, float]) -> None:
            clock.step(done, total, metrics["time/step"])
            if done % args.logging_steps == 0:
                epoch = round(args.num_train_epochs * done / total, 2)
                print(
                    {
                        "loss": round(metrics["loss"], 4),
                        "learning_rate": metrics["learning_rate"],
                        "epoch": epoch,
                    },
                )

        with limited_by(clock.limit):
            loop = SupervisedLoop(
                objective=self.stage,
                split=Split(rows, (), {}),
                plan=plan,
                config=config,
                run=run,
                progress=progress,
            ).train()
        clock.end(loop.made)
        metrics = {
            "train_runtime": time.perf_counter() - start,
            "train_loss": statistics.fmean(loop.losses),
        }
        run.finish({**metrics, **clock.limit.summary()})
        return TrainOutput(loop.made, metrics["train_loss"], metrics)

    def evaluate(self) -> dict[str, float]:
        """The loss on `eval_dataset`, for texts in nats a counted token, and of pairs the
        accuracy.
        """
        return headline(self.stage, self.eval_rows)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """A transformers folder (for an adapter peft's) with its tokenizer."""
        with added_to(output_dir or self.args.output_dir) as folder, quiet():
            self.model.save_pretrained(str(folder))
            self.tokenizer.save_pretrained(folder)


class SFTTrainer(_Trainer):
    """Fine-tunes on rows of texts (every token counts), or of conversations and prompts with
    responses (the assistant's count).

    Args:
        model: a causal language model, or the folder or id of one.
        args: SFTConfig or transformers' TrainingArguments. Keywords override its settings.
        peft_config: train a new adapter of peft's instead of the model.
        data: train_dataset, eval_dataset, tokenizer or processing_class.
    """

    config = SFTConfig
    section = "sft"
    args: SFTConfig

    def __init__(
        self,
        model: str | Path | CausalModel,
        args: TrainingConfig | TrainingArguments | None = None,
        *,
        peft_config: PeftConfig | None = None,
        **data: Any,
    ) -> None:
        super().__init__(causal_model(model, peft_config), args, **data)

    def _stage(self) -> sft.SFT:
        settings = self.args
        rows = self.args.per_device_train_batch_size
        config = sft.SFTConfig(
            packing=settings.packing,
            row_tokens=settings.max_seq_length,
            rows_per_micro_batch=rows,
        )
        return sft.SFT(config, TrainableRole(self.model), self.encoder)

    def _encode(self, row: Row) -> list[Encoded]:
        """Token ids of a row, cut at max_seq_length; some templates need several sequences, see
        `ChatEncoder.conversations`.
        """
        limit = min(self.args.max_seq_length, self.encoder.context_length)
        field = self.args.dataset_text_field
        bos = self.tokenizer.bos_token
        if field in row:
            # by a chat template, which has put the BOS there
            rendered = bool(bos) and row[field].startswith(bos)
            ids = tuple(self.tokenizer(row[field], add_special_tokens=not rendered)["input_ids"])
            sequences = [Encoded(ids, (False, *(True for _ in ids[1:])))]
        else:
            layout = detect([dict(row)], Demonstration, "this row")
            (demonstration,) = kind_reader(layout, Demonstration, "this row", [dict(row)])(
                dict(row),
            )
            if isinstance(demonstration, DataError):
                raise demonstration
            sequences = self.encoder.conversations(demonstration.messages)
        if not any(sequence.num_trained for sequence in sequences):
            raise DataError("nothing to learn")
        return within(sequences, Limit(limit, "max_seq_length", Counter()))


class RewardTrainer(_Trainer):
    """Fits a sequence classifier with one label to pairs: whole texts `chosen` and `rejected`, or
    their token ids.

    Texts are tokenized without a template, so the saved model scores a text exactly as in
    training.

    Args:
        model: AutoModelForSequenceClassification with num_labels=1 over a decoder.
        args: RewardConfig or transformers' TrainingArguments. Keywords override its settings.
        data: train_dataset, eval_dataset, tokenizer or processing_class.
    """

    config = RewardConfig
    section = "reward"
    args: RewardConfig

    def _stage(self) -> reward.RewardModeling:
        model = self.model
        settings = self.args
        score = dict(model.named_children()).get("score")
        if not isinstance(score, nn.Linear) or score.out_features != 1:
            raise ModelError(
                "a reward model is a decoder with one score: load a sequence "
                "classifier with num_labels=1",
            )
        # else the text-classification pipeline reports sigmoid(score)
        model.config.problem_type = "regression"
        # the classifier's own forward pass reads the last token that is not this one
        if model.config.pad_token_id is None:
            model.config.pad_token_id = self.tokenizer.pad_token_id
        head = ScalarHead(score.in_features)
        head.linear = score.float()
        tokens = 2 * settings.per_device_train_batch_size * settings.max_length
        centering = settings.center_rewards_coefficient
        config = reward.RewardConfig(
            micro_batch_tokens=tokens,
            use_margin=True,
            centering=centering,
        )
        return reward.RewardModeling(
            config,
            TrainableRole(model, head.to(model.device)),
            self.encoder,
        )

    def _encode(self, row: Row) -> list[Ranking]:
        """One pair; the tokens after the common beginning count as the response."""
        texts = [self._ids(row, side) for side in ("chosen", "rejected")]
        shared = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
        )
        sides = tuple(
            Encoded(ids, tuple(i >= max(1, shared) for i in range(len(ids)))) for ids in texts
        )
        context = self.encoder.context_length
        within(sides, Limit(min(self.args.max_length, context), "max_length", context=context))
        if texts[0] == texts[1]:
            raise DataError("both sides are the same tokens")
        return [Ranking("", sides, (0,), (1,), (1.0,), (float(row.get("margin") or 0.0),))]

    def _ids(self, row: Row, side: str) -> tuple[int, ...]:
        """Of a side's text or token ids, without padding."""
        if side not in row and f"input_ids_{side}" not in row:
            raise DataError(f"no text in column {side}, and no column input_ids_{side}")
        ids = (
            row[f"input_ids_{side}"]
            if f"input_ids_{side}" in row
            else self.tokenizer(row[side])["input_ids"]
        )
        ids = [*compress(ids, row.get(f"attention_mask_{side}") or repeat(1))]
        while ids and ids[-1] == self.model.config.pad_token_id:
            ids.pop()
        if not ids:
            raise DataError(f"{side} is empty")
        return tuple(ids)
