"""`tether export`: a result or a checkpoint as a plain folder of transformers or peft, checked
against what tether computes.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether.build.models import open_model
from tether.build.roles import (
    encoder_of,
    load_policy,
    load_scorer,
    new_head,
    new_role,
    newest_policy,
)
from tether.core.errors import ConfigError, DataError, MissingFileError, ModelError, RunError
from tether.core.locks import unfinished_folder
from tether.core.rundir import read_json
from tether.core.types import Conversation, Json, Message, assistant, user
from tether.cpu.memory import free_memory
from tether.data.batches import make_batch
from tether.data.chat import Encoded
from tether.learner.checkpoint import complete_checkpoints, load_checkpoint, unnumbered
from tether.models.adapter_folders import holds_adapter
from tether.models.carried import (
    Rounding,
    carriers,
    factors_of,
    fold_in,
    read_change,
    rounding_of,
    stacked,
)
from tether.models.heads import ScalarHead
from tether.models.loading import LoadedModel, make_readable
from tether.models.older_readers import write_for_older_readers
from tether.models.precision import cast
from tether.models.pretrained import quiet
from tether.models.quantized import dequantized
from tether.models.saving import base_noted, is_role, member_folders, read_role
from tether.models.speech import declare_ends
from tether.models.trunk import Role
from tether.report.reading import mapping, read_sub_run
from tether.rewards.classifier import OFFSET
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.reading import build
from tether.settings.stages import STAGES, making
from tether.tools.export_transformers import (
    classifier,
    merged,
    save_adapter,
    settle_padding,
    whole_template,
)
from tether.tools.model_card import TASKS, Source, base_name, model_card, section_of

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

    Returns:
        The kind, the folder, and a comparison of the written model with tether's own. `difference`
        is the largest difference, in nats of a token's log-probability or units of a score.
        `same_ids` is true if the token ids are equal. `constant` is the part of a score for which a
        classifier of sequences has no weight. `share_kept` is the share of the adapters' change
        that rounded weights still hold (None: nothing was merged).

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
    role, loaded = load_source(origin)
    if adapter and role.adapter is None:
        raise ConfigError(
            f"{source} was trained whole: there is no adapter to keep. Export it without --adapter.",
        )
    weights = loaded.model.dtype if dtype == "auto" else getattr(torch, dtype)
    with unfinished_folder(output) as temporary:
        folder = temporary / "model"
        base = base_name(loaded.source)
        measured = Writer(origin.kind, role, loaded, adapter).write(folder, weights, shard_size)
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
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        make_readable(folder)
        folder.rename(output)
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


def find_source(source: str) -> Source:
    """Find the trained model that a path or a model source names.

    Raises:
        MissingFileError, RunError, ModelError: nothing, something unfinished, or several models.
    """
    path = Path(source).expanduser()
    if not path.exists():
        return Source(kind="policy", source=source)
    if (path.name.startswith("step-") and path.parent.name in ("checkpoints", "best")) or (
        path / "state.safetensors"
    ).is_file():
        return _checkpoint(path)
    policy = newest_policy(path)
    for place in (
        (policy,)
        if policy
        else (path, *(path / name / "model" for name in ("", *making("sft", "reward"))))
    ):
        if (members := member_folders(place)) != [place]:
            raise ModelError(
                f"{place} names several reward models. Export them one by one: "
                f"{', '.join(map(str, members))}",
            )
        if is_role(place):
            return Source(
                kind=read_role(place)["kind"],
                source=source,
                folder=place,
                stage=stage_of(place),
            )
        if holds_adapter(place) or (
            (place / "config.json").is_file() and "model_type" in read_json(place / "config.json")
        ):
            return Source(kind="policy", source=str(place), folder=None, stage=stage_of(place))
    unfinished = sorted(path.glob("**/checkpoints/step-*"))
    if unfinished:
        raise RunError(
            f"{path} is not finished. Let it go on, or export a checkpoint of it: {unfinished[-1]}",
        )
    raise MissingFileError(
        f"{path} holds neither a trained role nor a model. Give the folder of a run, a stage, a "
        "role or a checkpoint.",
    )


def stage_of(folder: Path) -> Path | None:
    """The run directory of a result's stage."""
    for parent in list(folder.resolve().parents)[:2]:
        if (parent / "config.json").is_file() and section_of(
            read_json(parent / "config.json"),
        ) is not None:
            return parent
    return None


def standing(source: str) -> str:
    """Run, stage and step of the policy that `source` names; `source` itself if no run made it."""
    place = find_source(source)
    if place.stage is None:
        return source
    roots = (folder for folder in place.stage.parents[:3] if (folder / "command.json").is_file())
    root = next(roots, place.stage.parent)
    summary = read_sub_run(place.stage, []).summary
    measured = next(
        (
            summary[name]
            for name in ("gold", "test", "heldout")
            if "kept_step" in mapping(summary.get(name))
        ),
        {},
    )
    steps = (*(summary.get(name) for name in ("best_update", "steps", "updates")), 0)
    # -1: no update was measured, so that the last one is the result
    step = measured.get("kept_step", next(s for s in steps if s is not None and s >= 0))
    return f"Run {root.name}, stage {place.stage.relative_to(root)}, after step {step}"


def _checkpoint(path: Path) -> Source:
    if not (path / "COMPLETE").is_file():
        whole = ", ".join(other.name for other in complete_checkpoints(path.parent))
        raise RunError(
            f"{path} is not a whole checkpoint. "
            f"{f'There are {whole}.' if whole else 'There is no other.'}",
        )
    stage = path.resolve().parent.parent
    section = section_of(read_json(stage / "config.json"))
    if section is None:
        raise RunError(
            f"{stage / 'config.json'} is not that of a stage of tether, so nobody knows what "
            f"{path} is a checkpoint of.",
        )
    kind = section if STAGES[section].scores else "policy"
    return Source(kind=kind, source=str(path), folder=None, stage=stage, checkpoint=path)


def load_source(source: Source) -> tuple[Role, LoadedModel]:
    """The role, on its base.

    Raises:
        ModelError, MissingFileError, RunError: a part is missing or does not fit.
    """
    if source.checkpoint is not None and source.stage is not None:
        config = read_json(source.stage / "config.json")
        if (base := base_noted(source.stage)) is not None:
            config["model"] |= {"source": base, "fallback": None}
        return role_of_checkpoint(source.checkpoint, config)
    if source.kind != "policy":
        assert source.folder is not None
        (role,), loaded = load_scorer(source.folder)
        return role, loaded
    role, loaded = load_policy(str(source.folder or source.source))
    # SFT's result: its system message stands in the recipe
    if source.stage is not None and source.folder is None:
        loaded = replace(
            loaded,
            system_prompt=read_json(source.stage / "config.json")["model"].get("system_prompt"),
        )
    return role, loaded


def role_of_checkpoint(path: Path, config: Json) -> tuple[Role, LoadedModel]:
    """The role as if its stage had ended at this step. A supervised stage that compares weights has
    the best so far. Others have the moving average, if one is kept, else the step's own.

    A checkpoint holds its parameters by number, in the order of `Role.parameters`; what other parts
    learned comes after them.

    Raises:
        RunError: it does not fit the model of its run.
    """
    name = section_of(config)
    assert name is not None
    tensors, _ = load_checkpoint(path)
    weights = (
        unnumbered("best", tensors) or unnumbered("ema", tensors) or unnumbered("master", tensors)
    )
    loaded = open_model(
        build(ModelConfig, config["model"], where=f"{path}: model"),
        seed=config["seed"],
    )
    lora = LoraConfig.model_validate(config[name]["lora"]) if config[name].get("lora") else False
    trains_head = STAGES[name].scores  # whose bias is the last of its weights
    head = new_head(loaded, outputs=len(weights[-1]) if weights else 1) if trains_head else None
    role = new_role(loaded, "own", lora, seed=0, head=head)
    parameters = role.parameters()
    if [tensor.shape for tensor in weights[: len(parameters)]] != [
        parameter.shape for parameter in parameters
    ]:
        raise RunError(
            f"{path} does not fit the model of its run, {loaded.source}. Has that changed since?",
        )
    with torch.no_grad():
        for parameter, tensor in zip(parameters, weights, strict=False):
            parameter.copy_(tensor)
    if head is not None and name == "reward" and head.outputs > 1:
        role.head = head.only(0)  # quality, without length
    role.train_mode(False)
    return role, loaded


def _on_host(role: Role) -> Role:
    """The same role in host memory: written in float32 and read again, a model takes four times its
    16 bits.
    """
    role.model.to("cpu")
    if role.head is not None:
        role.head.to("cpu")
    free_memory()
    return role


class Writer:
    """Writes one role, and reads it again with other libraries' loaders. The role is used up by it."""

    def __init__(self, kind: str, role: Role, loaded: LoadedModel, adapter: bool) -> None:
        self.kind, self.role, self.adapter, self.tokenizer = (
            kind,
            _on_host(dequantized(role)),
            adapter,
            loaded.tokenizer,
        )
        self.encoder, self.base, self.context = (
            encoder_of(loaded),
            base_name(loaded.source),
            loaded.context_length,
        )
        self.held: torch.dtype = self.role.model.dtype
        self.share: float | None = None
        before = None if any(carriers(self.role.model)) else read_change(Path(loaded.source))
        self.before = before.factors if before is not None else {}
        """Factors of the change that was merged into the base's weights; empty if layers carry the
        change beside their weights.
        """

    @torch.no_grad()
    def write(self, folder: Path, dtype: torch.dtype, shard_size: str) -> Json:
        """Weights, tokenizer and template; returns their part of `export_model`."""
        cast(self.role.model, torch.float32)
        probes = self._probes()
        expected = [self._expected(ids) for _, ids in probes]
        constant = self._save(folder, dtype, shard_size)
        written = self._read(folder)
        same = all(self._foreign_ids(folder, talk) == list(ids) for talk, ids in probes)
        pairs = zip(expected, probes, strict=True)
        difference = max(
            float((self._computed(written, ids) + constant - value).abs().max())
            for value, (_, ids) in pairs
        )
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
        }

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
            declare_ends(model, self.tokenizer, stop_ids, self.encoder.templates)
            if unused := list(
                range(self.role.num_tokens, len(model.get_output_embeddings().weight)),
            ):
                model.generation_config.suppress_tokens = unused  # rows that stand for no token
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

    def _read(self, folder: Path) -> Any:
        """Model that another program loads from the folder, in float32. So a comparison shows the
        rounding of the saved weights alone.
        """
        import transformers
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
            read = getattr(transformers, TASKS[self.kind][1]).from_pretrained(
                folder,
                dtype=torch.float32,
            )
        return read.eval()

    def _probes(self) -> list[tuple[Conversation, tuple[int, ...]]]:
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

    def _expected(self, ids: tuple[int, ...]) -> Tensor:
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

    def _computed(self, model: Any, ids: tuple[int, ...]) -> Tensor:
        """The same of another's model."""
        row = torch.tensor([ids], device=model.device)
        logits = model(input_ids=row).logits[0].float()
        logits = logits[:, : self.role.num_tokens] if self.kind == "policy" else logits
        return (
            logits[:-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
            if self.kind == "policy"
            else logits
        ).cpu()
