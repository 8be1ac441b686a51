"""A causal language model with a value head, under the names that the classic interface gave it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeVar

from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tether.core.errors import ModelError
from tether.core.keeping import added_to
from tether.models.heads import ScalarHead
from tether.models.loading import pick_device, quiet, with_adapter
from tether.models.trunk import Role

CausalModel = PreTrainedModel | PeftModel
"""A model of transformers, or what peft makes of one."""
ModelT = TypeVar("ModelT", bound=nn.Module)
HEAD_FILE = "v_head.safetensors"


class AutoModelForCausalLMWithValueHead(nn.Module):
    """`pretrained_model`, and `v_head` on its last hidden states; what this class lacks is looked
    up on the model.
    """

    def __init__(self, pretrained_model: CausalModel) -> None:
        super().__init__()
        output = pretrained_model.get_output_embeddings()
        if output is None:
            raise ModelError(
                f"{type(pretrained_model).__name__} has no language model head. Give "
                "a causal language model.",
            )
        self.pretrained_model = pretrained_model
        self.v_head = ScalarHead(output.weight.shape[-1]).to(output.weight.device)

    @classmethod
    def from_pretrained(
        cls,
        name_or_model: str | Path | CausalModel,
        *,
        peft_config: PeftConfig | None = None,
        **kwargs: object,
    ) -> AutoModelForCausalLMWithValueHead:
        """A folder, a hub id or a loaded model; a head saved beside the model is taken up, a new
        one starts at zero.

        Args:
            peft_config: put a new adapter of peft's on the model and train that alone.
            kwargs: for transformers' from_pretrained.
        """
        model = cls(causal_model(name_or_model, peft_config, **kwargs))
        saved = None if isinstance(name_or_model, nn.Module) else Path(name_or_model) / HEAD_FILE
        if saved is not None and saved.is_file():
            model.v_head.load_state_dict(load_file(saved))
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

    def forward(
        self,
        input_ids: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """(logits in float32, loss or None, values (batch, time))."""
        output = self.pretrained_model(input_ids=input_ids, output_hidden_states=True, **kwargs)
        return output.logits.float(), output.loss, self.v_head(output.hidden_states[-1])

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """A plain transformers folder (for an adapter peft's), with the value head in a file beside
        it.
        """
        with added_to(save_directory) as folder, quiet():
            self.pretrained_model.save_pretrained(str(folder), **kwargs)
            save_file(self.v_head.state_dict(), folder / HEAD_FILE)


def create_reference_model(
    model: AutoModelForCausalLMWithValueHead,
) -> AutoModelForCausalLMWithValueHead:
    """A frozen copy."""
    return copy.deepcopy(model).requires_grad_(False).eval()


class TrainableRole(Role):
    """A model, or the adapter of one that peft has wrapped. Weights that users have frozen stay as
    they are.
    """

    def __init__(self, model: object, head: ScalarHead | None = None) -> None:
        super().__init__(
            model,
            model.active_adapters[0] if isinstance(model, PeftModel) else None,
            head,
        )

    def parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for p in super().parameters() if p.requires_grad))


def causal_model(
    name_or_model: str | Path | CausalModel,
    peft_config: PeftConfig | None = None,
    **kwargs: Any,
) -> CausalModel:
    """A causal language model, or with an adapter what peft makes of it; safetensors only.

    Args:
        peft_config: of a new adapter, which comes in the model's own dtype: the learner keeps
            float32 masters.
    """
    if isinstance(name_or_model, nn.Module):
        model = name_or_model
    else:
        has_adapter = (Path(name_or_model) / "adapter_config.json").is_file()
        kind = AutoPeftModelForCausalLM if has_adapter else AutoModelForCausalLM
        with quiet():
            model = kind.from_pretrained(name_or_model, use_safetensors=True, **kwargs)
    return model if peft_config is None else with_adapter(model, "default", peft_config)


def on_device(model: ModelT, device: str = "auto") -> ModelT:
    """The model there, unless accelerate has spread it over several."""
    return model if hasattr(model, "hf_device_map") else model.to(pick_device(device))
