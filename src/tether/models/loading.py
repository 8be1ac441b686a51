"""Models and tokenizers from a local folder, the hub, a package that carries weights, or code."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tether.core.errors import ConfigError, ModelError, one_line, require
from tether.core.keeping import durable
from tether.core.once import once
from tether.core.rundir import cpuinfo
from tether.core.types import Ids, Json, Texts
from tether.models.carried import (
    MERGED_ADAPTER,
    MergedChange,
    carriers,
    carry,
    factors_of,
    fold_in,
    merged_weights,
    write_change,
)
from tether.models.older_readers import write_for_older_readers
from tether.models.precision import cast
from tether.models.pretrained import check_model_folder, from_pretrained, quiet
from tether.models.quantized import LIBRARY, quantize
from tether.models.sources import check_model_source, template_of
from tether.models.speech import Speech, declare_ends, eos_ids, read_speech
from tether.models.targets import kept_layers, target_names
from tether.models.trunk import Role
from tether.settings.model import TINY, LoraConfig, ModelConfig

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tether.models.trunk import Trunk

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class LoadedModel:
    """A causal language model, frozen, with all settings that decide how text becomes tokens.

    `template` None means the tokenizer's own. `stop_ids` are the ids that end a turn, the EOS
    first. `digest` is that of the weights in the dtype in which they are held, `rounded_digest`
    that of the same weights in bfloat16. `cpu_kernels` names the changes of `cpu.speed_up`. `seed`
    is that of random weights. `mesh` is set where the weights are cut over ranks.
    """

    config: ModelConfig

    model: Any
    tokenizer: PreTrainedTokenizerBase
    stop_ids: Ids
    template: str | Texts | None
    system_prompt: str | None
    source: str
    digest: str
    rounded_digest: str
    cpu_kernels: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    seed: int = 0
    mesh: DeviceMesh | None = None

    def note(self, sentence: str) -> None:
        """Log once, and keep for the run's summary, what is done otherwise with this model than
        with most.
        """
        once(logger.warning, "%s", sentence)
        if sentence not in self.notes:
            self.notes.append(sentence)

    def noted(self, summary: Json) -> Json:
        """A stage's summary, with what was noted."""
        return {**summary, "notes": self.notes} if self.notes else summary

    def manifest(self) -> dict[str, object]:
        """Entries of a run's manifest on the model and its machine."""
        device = self.model.device
        dtype = str(self.model.dtype).removeprefix("torch.")
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        model = {"source": self.source, "digest": self.digest, "dtype": dtype, "device": name}
        return {
            "model": model,
            "cpu_kernels": list(self.cpu_kernels),
            "threads": torch.get_num_threads(),
        }

    @property
    def context_length(self) -> int:
        return Role(self.model).context_length


def load_model(config: ModelConfig, *, seed: int = 0, on_host: bool = False) -> LoadedModel:
    """The model that `config` names as transformers makes it, frozen and in evaluation mode.
    build.models opens it for a stage.

    Args:
        on_host: leave it in host memory, in all else made for the device that `config` names;
            `keep_on_host` comes next.

    Raises:
        MissingFileError, ConfigError: see `check_model_source`.
        ModelError: it cannot be found or loaded; the message says what was tried.
    """
    check_model_source(config)
    dtype = pick_dtype(config.dtype, config.device)
    device = pick_device(config.device)
    if config.quantize:
        require(LIBRARY, "model.quantize", "quantize")
    if config.source == TINY:
        from tether.models.tiny import tiny_model, tiny_tokenizer

        model = cast(tiny_model(seed), dtype)
        tokenizer = tiny_tokenizer()
        source = TINY
    else:
        model, tokenizer, source = from_pretrained("CausalLM", config, dtype)
    model.to("cpu" if on_host or config.quantize else device).eval().requires_grad_(False)
    model.set_attn_implementation(plain_attention(config.attention, device, model))
    if (
        device.type == "cuda"
        and torch.are_deterministic_algorithms_enabled()
        and model._can_set_experts_implementation()
    ):
        # grouped products count the tokens of experts by a kernel without an order
        model.set_experts_implementation("eager")
    model.recompute = config.recompute
    generation = model.generation_config
    stop_ids, template, system_prompt = speech_of(config, tokenizer, generation, source)
    rows = Role(model).vocabulary
    if not stop_ids:
        raise ModelError(
            f"{source}: the tokenizer has no EOS token, so no response could ever "
            "end. Set model.stop_tokens.",
        )
    # Tokens that were added to a tokenizer may be for others than this model: a text that needs one
    # is refused.
    if rows < tokenizer.vocab_size or any(not 0 <= stop < rows for stop in stop_ids):
        raise ModelError(
            f"{source}: the tokenizer has {len(tokenizer)} tokens, {list(stop_ids)} end a turn, "
            f"the embedding has {rows} rows. "
            "Model and tokenizer do not belong together: take both from one place.",
        )
    model.num_tokens = min(rows, 1 + max(tokenizer.get_vocab().values()))
    _check_template(source, tokenizer, template)
    # of the weights before they are packed into 4 bits
    digest = weights_digest(model.state_dict())
    rounded = weights_digest(model.state_dict(), torch.bfloat16)
    change: MergedChange | None = vars(model).pop("change", None)
    exact = dtype == torch.float32 and config.quantize is None
    if change is not None and not (exact and change.stored == torch.float32):
        carry(model, change)
    if exact:
        fold_in(model)
    if config.quantize:
        quantize(model, device)
    return LoadedModel(
        config=config,
        model=model,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        template=template,
        system_prompt=system_prompt,
        source=source,
        digest=digest,
        rounded_digest=rounded,
        seed=seed,
    )


def check_model(config: ModelConfig) -> None:
    """Look for the faults of a model that show before its weights are loaded. Sources elsewhere
    than in a local folder are left for when they are needed; their template is read.

    Raises:
        MissingFileError, ConfigError, ModelError: see `load_model`.
    """
    from tether.models.tiny import tiny_tokenizer

    check_model_source(config)
    is_local = os.path.isdir(os.path.expanduser(config.source))
    tokenizer = check_model_folder("CausalLM", config) if is_local else tiny_tokenizer()
    if config.stop_tokens and (is_local or config.source == TINY):
        _stop_ids(config, tokenizer, None, None)
    _check_template(config.source, tokenizer, template_of(config))


def speech_of(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    generation: object,
    source: str,
) -> tuple[Ids, str | None, str | None]:
    """The ids that end a turn, the template and the system message of a model under these settings.

    Args:
        generation: a configuration with the model's own `eos_token_id`.
    """
    speech = read_speech(source)
    system = speech["system_prompt"] if speech else None
    return (
        _stop_ids(config, tokenizer, generation, speech),
        template_of(config),
        system if config.system_prompt is None else config.system_prompt,
    )


def _check_template(source: str, tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    """Check that a chat template can be parsed. Its rendering is checked with the first
    conversation."""
    from jinja2 import TemplateSyntaxError

    if template is None and not tokenizer.chat_template:
        return
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}],
            chat_template=template,
            tokenize=False,
        )
    except TemplateSyntaxError as error:
        fault = f"line {error.lineno}: {error.message}".rstrip(".")
        raise ModelError(
            f"{source}: the chat template is not valid Jinja ({fault}). Mend it, or set "
            "model.chat_template.",
        ) from error
    except Exception:  # noqa: BLE001  (a template may refuse any conversation: that is seen when there is one)
        return


def _stop_ids(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    generation_config: object,
    speech: Speech | None,
) -> Ids:
    if config.stop_tokens:
        ids = tokenizer.get_vocab()
        none = tokenizer.unk_token_id
        unknown = [token for token in config.stop_tokens if ids.get(token, none) == none]
        if unknown:
            raise ModelError(
                f"model.stop_tokens: the tokenizer of {config.source} does not know {unknown}. "
                "Take tokens that it has.",
            )
        return tuple(ids[token] for token in config.stop_tokens)
    return tuple(speech["stop_ids"]) if speech else eos_ids(tokenizer, generation_config)


def pick_device(device: str) -> torch.device:
    """`auto` is the first GPU if there is one."""
    return torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device,
    )


def pick_dtype(dtype: str, device: str = "auto") -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it faster, float32 elsewhere;
    TETHER_CPU_DTYPE overrules what a CPU says.

    Raises:
        ConfigError: TETHER_CPU_DTYPE names another type.
    """
    if dtype != "auto":
        return getattr(torch, dtype)
    if pick_device(device).type == "cuda":
        return (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float32
        )
    if wanted := os.environ.get("TETHER_CPU_DTYPE"):
        if wanted not in ("float32", "bfloat16"):
            raise ConfigError(
                f"TETHER_CPU_DTYPE is {wanted!r}: set it to float32 or bfloat16, or unset it",
            )
        return getattr(torch, wanted)
    return torch.bfloat16 if multiplies_bfloat16_fast("\n".join(cpuinfo())) else torch.float32


def multiplies_bfloat16_fast(cpuinfo: str) -> bool:
    """True if a processor multiplies bfloat16 faster than float32: one with a matrix unit, or AMD's
    with AVX-512.

    Trap: Intel's AVX-512 products of bfloat16 take about twice the time of those of float32; the
    instruction alone says nothing.
    """
    return "amx_bf16" in cpuinfo or ("avx512_bf16" in cpuinfo and "AuthenticAMD" in cpuinfo)


def plain_attention(attention: str, device: torch.device, model: PreTrainedModel) -> str:
    """transformers' own attention of that name; by default sdpa on an accelerator, where the model
    has it, and eager on a CPU.

    Raises:
        ModelError: sdpa is named, and transformers has none for this model.
    """
    if attention == "sdpa" and not model._supports_sdpa:
        raise ModelError(
            "model.attention = 'sdpa': transformers has no such attention for "
            f"{type(model).__name__}. Take 'auto' or 'eager'.",
        )
    if attention in ("sdpa", "eager"):
        return attention
    return "eager" if device.type == "cpu" or not model._supports_sdpa else "sdpa"


def keep_on_host(model: PreTrainedModel, device: torch.device) -> Any:
    """Leave a frozen model's layers in host memory: each comes to `device` when it is used, and
    goes again.

    Embeddings, norm and output layer move there: they are read as tensors, and may be tied. Returns
    the model. Later changes of the layers' weights are not seen.
    """
    from accelerate import cpu_offload

    layers = Role(model).decoder_layers
    inside = {id(module) for layer in layers for module in layer.modules()}
    for layer in layers:
        cpu_offload(layer, execution_device=device)
    for module in model.modules():
        if id(module) not in inside:
            module._apply(lambda tensor: tensor.to(device), recurse=False)
    return model


def add_adapter(
    model: Trunk,
    name: str,
    lora: LoraConfig,
    *,
    seed: int = 0,
    scores: bool = False,
) -> Any:
    """`model` with one more LoRA adapter called `name`, in the dtype of its layer's weights.

    peft would keep adapters in float32, which makes a bfloat16 model on a CPU several times slower.
    The optimizer holds the float32 masters that small learning rates need (learner.local).

    Args:
        scores: a head alone reads the states, and the output layer is not used.

    Raises:
        ModelError: `lora.targets` fits no layer, or a layer that cannot have an adapter
            (models.targets).
    """
    from peft import LoraConfig as PeftLora

    targets, others = target_names(model, lora, scores=scores)
    peft_config = PeftLora(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  (peft scales with any number)
        lora_dropout=lora.dropout,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=targets,
        exclude_modules=others or None,
        layers_to_transform=kept_layers(model.config, lora),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        model = with_adapter(model, name, peft_config)
    return with_dtype_of_base(model, name)


def with_adapter(model: Any, name: str, settings: PeftConfig) -> PeftModel:
    """`model` with one more adapter called `name`, as peft makes it from its own `settings`."""
    from peft import PeftModel, get_peft_model

    try:
        if not isinstance(model, PeftModel):
            return get_peft_model(model, settings, adapter_name=name, autocast_adapter_dtype=False)
        model.add_adapter(name, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        kind = type(Role(model).causal_model).__name__
        raise ModelError(
            f"lora: peft cannot adapt {kind} so ({one_line(error)}). Choose other lora.targets.",
        ) from error
    return model


def with_dtype_of_base(model: PeftModel, adapter: str) -> PeftModel:
    """`model` in evaluation mode, its adapter in the dtype of its layer's weights."""
    for name, parameter in model.named_parameters():
        if f".{adapter}." in name:
            parameter.data = parameter.data.to(model.dtype)
    return model.eval()


def weights_digest(weights: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> str:
    """A short digest of a model's weights by name: shapes, and a hash of a few values of every
    tensor, rounded to `dtype`.
    """
    hasher = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        flat = tensor.detach().flatten()
        picked = flat[:: max(1, flat.numel() // 512)].to(dtype or flat.dtype).float().cpu()
        hasher.update(json.dumps([name, list(tensor.shape)]).encode())
        hasher.update(picked.numpy().tobytes())
    return hasher.hexdigest()[:16]


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    template: str | dict[str, str],
    folder: Path,
    *,
    stop_ids: Ids = (),
) -> None:
    """A plain transformers folder: weights in safetensors, tokenizer, and the template in use.

    The changes that layers carry are merged into the weights, and are also in `merged_adapter`.

    Args:
        stop_ids: the ids that end a turn; empty: those that model and tokenizer declare.
    """
    tokenizer.chat_template = template
    if stop_ids:
        declare_ends(model, tokenizer, stop_ids, template)
    change: MergedChange | None = vars(model).pop("change", None)
    if any(carriers(model)):
        change = MergedChange(factors_of(model), model.dtype)
    with durable(folder, over=True) as unfinished:
        with quiet():
            model.save_pretrained(unfinished, state_dict=merged_weights(model))
            tokenizer.save_pretrained(unfinished)
        if change is not None and change.factors:
            write_change(unfinished / MERGED_ADAPTER, change)
        write_for_older_readers(unfinished, tokenizer)
