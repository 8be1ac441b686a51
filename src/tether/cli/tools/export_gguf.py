"""A policy in one file of llama.cpp's format GGUF, and the Modelfile by which Ollama takes it."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import torch
from gguf import GGMLQuantizationType, TokenType
from jinja2 import Environment, TemplateError

from tether.core.errors import ModelError
from tether.core.rundir import read_json
from tether.core.tables import table_beside
from tether.core.types import Ids, Json
from tether.models.pretrained import ROPE_SCALES, rope_frequencies

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAMES = table_beside(__file__, "gguf.toml")
TYPES = ("q8_0", "bf16", "f16", "f32")
FILE = "model.gguf"
NO_MODELFILE = (
    "No Modelfile was written: Ollama's templates cannot do what the chat template does. "
    "`llama-server --jinja` renders it as it is."
)


def write_gguf(
    model: PreTrainedModel | PeftModel,
    folder: Path,
    weights: str,
    stop_ids: Ids,
) -> bool:
    """Write `folder/gguf` of an exported folder and its model, in float32. The model gets the
    rounded weights; true if Ollama can render its chat template.

    Raises:
        ModelError: a part of it has no name in `gguf.toml`.
    """
    from transformers import AutoTokenizer

    shape = model.config
    names = NAMES["architectures"]
    if shape.model_type not in names:
        raise _unknown(f"{shape.model_type!r}, only of {', '.join(names)}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    place = folder / "gguf"
    place.mkdir()
    writer = gguf.GGUFWriter(place / FILE, names[shape.model_type])
    _settings(writer, model)
    _words(writer, folder, shape.vocab_size, stop_ids[0])
    _weights(writer, model, GGMLQuantizationType[weights.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if parts := _parts(tokenizer):
        tags = Environment("[%", "%]", "[[", "]]", trim_blocks=True, keep_trailing_newline=True)
        text = Path(__file__).with_name("Modelfile.jinja").read_text(encoding="utf-8")
        quoted = {name: json.dumps(part, ensure_ascii=False) for name, part in parts.items()}
        stops = tokenizer.convert_ids_to_tokens(stop_ids)
        (place / "Modelfile").write_text(
            tags.from_string(text).render(quoted, stops=stops),
            encoding="utf-8",
        )
    return bool(parts)


def _unknown(part: str) -> ModelError:
    return ModelError(
        f"no GGUF is written of {part}. Export without --gguf, and try the converter of llama.cpp.",
    )


def _settings(writer: gguf.GGUFWriter, model: PreTrainedModel | PeftModel) -> None:
    shape = model.config
    rope = shape.rope_parameters
    rope = rope.get("full_attention", rope)
    if (rope["rope_type"], writer.arch) == ("llama3", "llama"):
        scaled = rope_frequencies(model)
        plain = rope["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
        writer.add_tensor(ROPE_SCALES, (plain / scaled).numpy())
    elif rope["rope_type"] != "default":
        raise _unknown(f"positions of the kind {rope['rope_type']!r}")
    values = shape.to_dict() | rope
    if not values.get("head_dim"):
        values["head_dim"] = shape.hidden_size // shape.num_attention_heads
    for add, kind in ((writer.add_uint32, "whole"), (writer.add_float32, "real")):
        for key, name in NAMES[kind].items():
            if values.get(name) is not None:
                add(f"{writer.arch}.{key}", values[name])


def _words(writer: gguf.GGUFWriter, folder: Path, rows: int, stop_id: int) -> None:
    """Tokens, merges, special ids and the chat template. Rows without a token get an unused name."""
    state = read_json(folder / "tokenizer.json")
    model = state["model"]
    names = {index: word for word, index in model["vocab"].items()}
    types = [TokenType.NORMAL if row in names else TokenType.UNUSED for row in range(rows)]
    for token in state["added_tokens"]:
        names[token["id"]] = token["content"]
        types[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    words = [names.get(row, f"[PAD{row}]") for row in range(rows)]
    if model["type"] == "BPE" and model["byte_fallback"]:
        writer.add_tokenizer_model("llama")
        writer.add_add_space_prefix("Prepend" in str(state))
        ranks = {left + right: n for n, (left, right) in reversed([*enumerate(model["merges"])])}
        writer.add_token_scores([-float(ranks.get(word, 0)) for word in words])
        for row, word in enumerate(words):
            if re.fullmatch("<0x..>", word):
                types[row] = TokenType.BYTE
    else:
        writer.add_tokenizer_model("gpt2")
        first: Json = state["pre_tokenizer"] or {"type": "nothing"}
        steps = first.get("pretokenizers", [first])
        split = " ".join(step.get("pattern", {}).get("Regex", step["type"]) for step in steps)
        if split not in NAMES["splits"]:
            raise _unknown(f"a tokenizer that splits text by {split}")
        writer.add_tokenizer_pre(NAMES["splits"][split])
    writer.add_token_list(words)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=rows)
    special.special_token_ids["eos"] = stop_id
    special.add_special_token = {"bos": False}  # the template writes it
    special.add_to_gguf(writer, quiet=True)


def _weights(
    writer: gguf.GGUFWriter,
    model: PreTrainedModel | PeftModel,
    kind: GGMLQuantizationType,
) -> None:
    shape = model.config
    places = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[writer.arch.upper()],
        shape.num_hidden_layers,
    )
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and shape.tie_word_embeddings:
            continue
        layer, _, end = name.rpartition(".")
        held = kind if weight.ndim > 1 else GGMLQuantizationType.F32
        values = gguf.quantize(weight.numpy(), held)
        weight.copy_(torch.from_numpy(gguf.dequantize(values, held)))
        if writer.arch == "llama" and (part := re.search("([qk])_proj", name)):
            # the two halves of a head, which turn together, become neighbours
            heads = shape.num_attention_heads if part[1] == "q" else shape.num_key_value_heads
            halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if "gemma" in writer.arch and "norm" in name:
            values = values + 1
        writer.add_tensor(f"{places[layer]}.{end}", values, raw_dtype=held)


def _parts(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Texts that a chat template writes around contents; empty if it does more than that."""
    roles = ("system", *("user", "assistant") * 2, "user")
    talk = [{"role": role, "content": f"Q{n}Q"} for n, role in enumerate(roles)]

    def cut(begin: int, end: int) -> list[str]:
        rows = talk[begin:end]
        text = tokenizer.apply_chat_template(rows, add_generation_prompt=True, tokenize=False)
        return re.split("Q.Q", str(text))

    try:
        start, middle, between, _, _, reply = cut(1, 6)
        lead = middle.removeprefix(reply)
        heads = {1: [start]}
        with contextlib.suppress(TemplateError):  # some take no system message
            heads[0] = cut(0, 6)[:2]
        for begin, head in heads.items():
            for turns in range(3):
                whole = [*head, *[reply + lead, between] * turns, reply]
                if cut(begin, 2 * turns + 2) != whole:
                    return {}
    except (TemplateError, ValueError):
        return {}
    parts = {"start": start, "reply": reply, "lead": lead, "between": between}
    return parts | dict(zip(("system", "after"), heads.get(0, ()), strict=False))
