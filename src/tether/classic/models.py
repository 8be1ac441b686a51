"""A causal language model with a value head, under the names that the classic interface gave it."""

from __future__ import annotations

import copy
from itertools import takewhile
from pathlib import Path
from typing import Any

from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tether.core.errors import ModelError
from tether.models.heads import ScalarHead
from tether.models.loading import pick_device, quiet
from tether.models.trunk import Role

HEAD_FILE = "v_head.safetensors"


class AutoModelForCausalLMWithValueHead(nn.Module):
    """`pretrained_model`, and `v_head` on its last hidden states; what this class lacks is looked up on the model."""

    def __init__(self, pretrained_model: Any) -> None:
        super().__init__()
        output = pretrained_model.get_output_embeddings()
        if output is None:
            raise ModelError(f"{type(pretrained_model).__name__} has no language model head. Give a causal language model.")
        self.pretrained_model = pretrained_model
        self.v_head = ScalarHead(output.weight.shape[-1]).to(output.weight.device)

    @classmethod
    def from_pretrained(
        cls, name_or_model: Any, *, peft_config: Any = None, v_head_init_strategy: str | None = None, **kwargs: Any
    ) -> AutoModelForCausalLMWithValueHead:
        """A folder, a hub id or a loaded model; a head saved beside the model is taken up.

        Args:
            peft_config: put a new adapter of peft's on the model and train that alone.
            v_head_init_strategy: None starts a new head at zero; "normal" at N(0, v_head_initializer_range), by default 0.2.
            kwargs: for transformers' from_pretrained.
        """
        spread = kwargs.pop("v_head_initializer_range", 0.2)
        model = cls(with_new_adapter(load(name_or_model, **kwargs), peft_config))
        saved = None if isinstance(name_or_model, nn.Module) else Path(name_or_model) / HEAD_FILE
        if v_head_init_strategy not in (None, "normal"):
            raise ModelError(f"v_head_init_strategy is {v_head_init_strategy!r}; give 'normal', or leave it out for zeros.")
        if saved is not None and saved.is_file():
            model.v_head.load_state_dict(load_file(saved))
        elif v_head_init_strategy == "normal":
            nn.init.normal_(model.v_head.linear.weight, std=spread)
        return model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "pretrained_model":  # of a model that is not built yet
                raise
            return getattr(self.pretrained_model, name)

    @property
    def is_peft_model(self) -> bool:
        return isinstance(self.pretrained_model, PeftModel)

    def forward(self, input_ids: Tensor | None = None, *, return_past_key_values: bool = False, **kwargs: Any) -> tuple[Any, ...]:
        """(logits in float32, loss or None, values (batch, time)), and the cache if asked for."""
        output = self.pretrained_model(input_ids=input_ids, output_hidden_states=True, **kwargs)
        result = (output.logits.float(), output.loss, self.v_head(output.hidden_states[-1]))
        return (*result, output.past_key_values) if return_past_key_values else result

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """A plain transformers folder (for an adapter peft's), with the value head in a file beside it."""
        with quiet():
            self.pretrained_model.save_pretrained(save_directory, **kwargs)
        save_file(self.v_head.state_dict(), Path(save_directory) / HEAD_FILE)


def create_reference_model(
    model: AutoModelForCausalLMWithValueHead, num_shared_layers: int | None = None
) -> AutoModelForCausalLMWithValueHead:
    """A frozen copy. With `num_shared_layers` the embeddings and so many first layers are the model's own, and frozen there too.

    Raises:
        ModelError: the model has not more layers than `num_shared_layers`.
    """
    shared: list[nn.Parameter] = []
    if num_shared_layers is not None:
        decoder = model.pretrained_model.get_decoder()
        layers = next(child for child in decoder.children() if isinstance(child, nn.ModuleList))
        if not 0 < num_shared_layers < len(layers):
            raise ModelError(f"num_shared_layers is {num_shared_layers}; this model has {len(layers)} layers, share fewer.")
        border = next(layers[num_shared_layers].parameters())
        shared = list(takewhile(lambda parameter: parameter is not border, model.parameters()))
        for parameter in shared:
            parameter.requires_grad_(False)
    return copy.deepcopy(model, {id(p): p for p in shared}).requires_grad_(False).eval()


class TrainableRole(Role):
    """A role in which users have frozen parameters themselves, as this interface lets them: those stay as they are."""

    def parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for p in super().parameters() if p.requires_grad))


def load(name_or_model: Any, **kwargs: Any) -> Any:
    """A causal language model, or with an adapter what peft makes of it; safetensors only."""
    if isinstance(name_or_model, nn.Module):
        return name_or_model
    has_adapter = (Path(name_or_model) / "adapter_config.json").is_file()
    kind = AutoPeftModelForCausalLM if has_adapter else AutoModelForCausalLM
    with quiet():
        return kind.from_pretrained(name_or_model, use_safetensors=True, **kwargs)


def with_new_adapter(model: Any, peft_config: Any) -> Any:
    """The model with a new adapter in its own dtype; the learner keeps float32 masters."""
    return model if peft_config is None else get_peft_model(model, peft_config, autocast_adapter_dtype=False)


def on_device(model: Any, device: str = "auto") -> Any:
    """The model there, unless accelerate has spread it over several."""
    return model if hasattr(model, "hf_device_map") else model.to(pick_device(device))
