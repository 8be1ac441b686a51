"""`tether export`: a result or a checkpoint as a plain folder of transformers or peft, checked
against what tether computes.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tether.cli.tools.export_gguf import FILE, NO_MODELFILE, TYPES, write_gguf
from tether.cli.tools.export_source import find_source, load_source
from tether.cli.tools.export_transformers import (
    classifier,
    merged,
    save_adapter,
    settle_padding,
    whole_template,
)
from tether.cli.tools.model_card import TASKS, base_name, model_card
from tether.core.errors import ConfigError, DataError, ModelError
from tether.core.keeping import durable
from tether.core.types import Conversation, Ids, Json, Message, assistant, user
from tether.data.batches import make_batch
from tether.data.chat import Encoded
from tether.models.carried import (
    Rounding,
    carriers,
    factors_of,
    fold_in,
    read_change,
    rounding_of,
    stacked,
)
from tether.models.cpu.memory import free_memory
from tether.models.heads import ScalarHead
from tether.models.loading import LoadedModel
from tether.models.older_readers import write_for_older_readers
from tether.models.precision import cast
from tether.models.pretrained import gguf_faults, loader_of, quiet, read_gguf
from tether.models.quantized import dequantized
from tether.models.speech import declare_ends
from tether.models.trunk import Role
from tether.rewards.classifier import OFFSET
from tether.runner.assembly.roles import encoder_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

DTYPES = ("auto", "float32", "bfloat16", "float16")
PROBES: tuple[Conversation, ...] = (
    (user("What is the capital of France?"), assistant("Paris.")),
    (
        user("Hi! Who are you?"),
        assistant("A model.\n\nAnd you?"),
        user("Guess:  a person, 人?"),
        assistant("Then be\n\nwelcome, 人 :-)"),
    ),
    (Message("system", "Be brief."), user("Count to three."), assistant("1\n2\n3")),
)
logger = logging.getLogger(__name__)
KEPT = 0.99
"""The share of a merged change below which an export says what rounding lost."""
APART = 0.01
"""Nats, or units of a score: what no rounding in float32 explains."""


def export_model(
    source: str,
    output: Path,
    *,
    adapter: bool = False,
    dtype: str = "auto",
    shard_size: str = "5GB",
    gguf: str | None = None,
) -> Json:
    """Write `output`, a new folder with weights, tokenizer, chat template and model card; all of it
    or nothing.

    Policies become causal language models, reward models classifiers of sequences, process reward
    models classifiers of tokens.

    Args:
        source: the folder of a run, a stage, a role or a checkpoint, or a model source such as
            `tiny`.
        adapter: a folder of peft with the adapter alone, instead of merged weights.
        dtype: of the weights; `auto` is what the model was trained in.
        gguf: a type of weights of llama.cpp; a GGUF file comes beside them, in `output/gguf`.

    Returns:
        The kind, the folder, and a comparison of the written model with tether's own. `difference`
        is the largest difference, in nats of a token's log-probability or units of a score.
        `same_ids` is true if the token ids are equal. `constant` is the part of a score for which a
        classifier of sequences has no weight. `share_kept` is the share of the adapters' change
        that rounded weights still hold (None: nothing was merged). `gguf` is the largest difference
        that the rounding in the GGUF file makes, in nats.

    Raises:
        ConfigError: `output` exists, or there is no adapter to keep.
        ModelError: it cannot be written in the library's terms, or what was written computes
            something else.
    """
    if output.exists():
        raise ConfigError(f"{output} exists. Export into a new folder, or delete that one first.")
    if not re.fullmatch(r"\d+ ?([KMGT]i?B|B)", shard_size):
        raise ConfigError(f"shard size {shard_size!r} is not a size such as 500MB or 5GB")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    origin = find_source(source)
    if gguf is not None and (gguf not in TYPES or adapter or origin.kind != "policy"):
        raise ConfigError(
            f"--gguf {gguf}: a GGUF file is written of a whole policy, in {', '.join(TYPES)}",
        )
    role, loaded = load_source(origin, dtype)
    if adapter and role.adapter is None:
        raise ConfigError(
            f"{source} was trained whole: there is no adapter to keep. Export it without --adapter.",
        )
    weights = loaded.model.dtype if dtype == "auto" else getattr(torch, dtype)
    with durable(output) as folder:
        base = base_name(loaded.source)
        writer = Writer(origin.kind, role, loaded, adapter)
        measured = writer.write(folder, weights, shard_size, gguf)
        outputs = 1 if role.head is None else role.head.outputs
        measured["rounding"] = _rounding(measured["share_kept"], adapter=adapter)
        if measured["rounding"]:
            logger.warning("%s", measured["rounding"])
        card = model_card(
            origin,
            base,
            str(weights).removeprefix("torch."),
            measured,
            adapter=adapter,
            outputs=outputs,
            auto=writer.loader.__name__,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
    return {
        "kind": origin.kind,
        "folder": str(output),
        "source": str(origin.stage or source),
        **measured,
    }


def _rounding(share: float | None, *, adapter: bool) -> str:
    """A sentence on what rounded weights have lost of a merged change; empty where nothing is."""
    if share is None or share > KEPT:
        return ""
    what = "fine-tuning changed, in the base of this adapter" if adapter else "adapters changed"
    return (
        f"Rounded weights hold {share:.0%} of what {what}. --dtype float32 without --adapter holds "
        'all of it; in Python, run.export(folder, dtype="float32").'
    )


def _on_host(role: Role) -> Role:
    """The same role in host memory: written in float32 and read again, a model takes four times its
    16 bits.
    """
    role.model.to("cpu")
    if role.head is not None:
        role.head.to("cpu")
    free_memory()
    return role


def _apart(ours: list[Tensor], theirs: list[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


class Writer:
    """Writes one role, and reads it again with other libraries' loaders. The role is used up by it."""

    def __init__(self, kind: str, role: Role, loaded: LoadedModel, adapter: bool) -> None:
        self.kind = kind
        self.role = _on_host(dequantized(role))
        self.loader = loader_of(TASKS[kind][1], self.role.causal_model.config)
        self.adapter = adapter
        self.tokenizer = loaded.tokenizer
        self.encoder = encoder_of(loaded)
        self.base = base_name(loaded.source)
        self.context = loaded.context_length
        self.held: torch.dtype = self.role.model.dtype
        self.share: float | None = None
        before = None if any(carriers(self.role.model)) else read_change(Path(loaded.source))
        self.before = before.factors if before is not None else {}
        """Factors of the change that was merged into the base's weights; empty if layers carry the
        change beside their weights.
        """

    @torch.no_grad()
    def write(self, folder: Path, dtype: torch.dtype, shard_size: str, gguf: str | None) -> Json:
        """Weights, tokenizer and template; returns their part of `export_model`."""
        cast(self.role.model, torch.float32)
        probes = self._probes()
        expected = [self._expected(ids) for _, ids in probes]
        constant = self._save(folder, dtype, shard_size)
        written = self._read(folder)
        same = all(self._foreign_ids(folder, talk) == list(ids) for talk, ids in probes)
        computed = [self._computed(written, ids) + constant for _, ids in probes]
        difference = _apart(expected, computed)
        if not difference < (APART if dtype == torch.float32 else 100 * APART):
            raise ModelError(
                f"what was written differs by {difference:.3g} from what tether computes: "
                "transformers does not compute "
                "this model as tether does, or its weights are not finite. Nothing was kept.",
            )
        return {
            "difference": difference,
            "same_ids": same,
            "constant": constant,
            "share_kept": self.share,
            "gguf": self._gguf(folder, written, gguf) if gguf else None,
        }

    def _gguf(self, folder: Path, written: PreTrainedModel | PeftModel, kind: str) -> float:
        """Write a GGUF file and read it again. Its log-probabilities are those of rounded weights."""
        rows = [ids for _, ids in self._probes()]
        exact = [self._computed(written, ids) for ids in rows]
        if not write_gguf(written, folder, kind, self.encoder.stop_ids):
            logger.warning("%s", NO_MODELFILE)
        with gguf_faults(folder / "gguf" / FILE):
            again = read_gguf(folder / "gguf" / FILE, torch.float32)
        rounded = [self._computed(written, ids) for ids in rows]
        off = _apart(rounded, [self._computed(again, ids) for ids in rows])
        if not off < APART:
            raise ModelError(
                f"transformers reads the GGUF file as a model that differs by {off:.3g} nats, so "
                "its architecture has what GGUF does not hold. Nothing was kept.",
            )
        return _apart(exact, rounded)

    def _save(self, folder: Path, dtype: torch.dtype, shard_size: str) -> float:
        """Returns the constant that the scores lack."""
        head = self.role.head
        stop_ids = self.encoder.stop_ids
        own = None if self.adapter else self.role.adapter
        factors = stacked(self.before, factors_of(self.role.model, own))
        rounding = Rounding(self.held if self.adapter else dtype)
        causal = self.role.causal_model if self.adapter else merged(self.role, rounding)
        self.share = rounding_of(causal, factors, rounding.dtype, rounding).share
        model = (
            causal if head is None else classifier(causal, head, each_token=self.kind == "process")
        )
        if head is None:
            declare_ends(causal, self.tokenizer, stop_ids, self.encoder.templates)
            if unused := list(
                range(self.role.num_tokens, len(causal.get_output_embeddings().weight)),
            ):
                causal.generation_config.suppress_tokens = unused  # rows that stand for no token
        else:
            settle_padding(model, self.tokenizer, stop_ids, may_grow=not self.adapter)
        self.tokenizer.chat_template = whole_template(self.encoder, to_the_end=head is not None)
        with quiet():
            if self.adapter:
                assert self.role.adapter is not None
                save_adapter(
                    self.role.model,
                    self.role.adapter,
                    folder,
                    None if head is None else model,
                    dtype,
                    self.base,
                )
            else:
                cast(model, dtype).save_pretrained(folder, max_shard_size=shard_size)
            self.tokenizer.save_pretrained(folder)
        write_for_older_readers(folder, self.tokenizer)
        return getattr(model.config, OFFSET, 0.0)

    def _read(self, folder: Path) -> PreTrainedModel | PeftModel:
        """Model that another program loads from the folder, in float32. So a comparison shows the
        rounding of the saved weights alone.
        """
        from peft import PeftModel

        with quiet():
            if self.adapter:
                base = self.role.model.unload()
                head = self.role.head
                if any(carriers(base)):  # a stranger's base is the folder, merged and rounded
                    cast(cast(fold_in(base), self.held), torch.float32)
                if head is not None:
                    base = classifier(
                        base,
                        ScalarHead(head.linear.in_features, outputs=head.outputs),
                        each_token=self.kind == "process",
                    )
                return PeftModel.from_pretrained(base, str(folder)).float().eval()
            return self.loader.from_pretrained(folder, dtype=torch.float32).eval()

    def _probes(self) -> list[tuple[Conversation, Ids]]:
        """A few conversations that the template takes, and their ids; of a policy those of the
        prompt.
        """
        probes = []
        reason = ""
        for talk in PROBES:
            try:
                ids = (
                    self.encoder.prompt(talk[:-1])
                    if self.kind == "policy"
                    else self.encoder.conversation(talk, "last").ids
                )
                probes += [(talk, ids)] if len(ids) <= self.context else []
            except DataError as error:
                reason = str(error)
        if not probes:
            raise ModelError(
                f"no conversation can be tried: {reason or 'all are longer than the context'}. "
                "Mend model.chat_template.",
            )
        return probes

    def _foreign_ids(self, folder: Path, talk: Conversation) -> list[int]:
        """The ids of one who tokenizes what the exported template renders."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        waiting = self.kind == "policy"
        rows = [turn.as_row() for turn in (talk[:-1] if waiting else talk)]
        return tokenizer.apply_chat_template(rows, add_generation_prompt=waiting, return_dict=True)[
            "input_ids"
        ]

    def _expected(self, ids: Ids) -> Tensor:
        """tether's numbers: of each token but the first its log-probability, the score, or each
        token's logits.
        """
        batch = make_batch(
            [Encoded(ids, (False, *[True] * (len(ids) - 1)))],
            self.encoder.pad_id,
        ).to(self.role.device)
        if self.kind == "policy":
            return self.role.logprobs(batch)[0].cpu()
        if self.kind == "reward":
            return self.role.scores(batch).cpu()
        places = torch.arange(len(ids), device=self.role.device)
        return self.role.values_at(self.role.hidden(batch), places).view(len(ids), -1).cpu()

    def _computed(self, model: PreTrainedModel | PeftModel, ids: Ids) -> Tensor:
        """The same of another's model."""
        row = torch.tensor([ids], device=model.device)
        logits = model(input_ids=row).logits[0].float()
        logits = logits[:, : self.role.num_tokens] if self.kind == "policy" else logits
        return (
            logits[:-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
            if self.kind == "policy"
            else logits
        ).cpu()
