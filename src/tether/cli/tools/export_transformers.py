"""Trained roles as plain models of transformers and peft, for programs that know nothing of
tether.
"""

from __future__ import annotations

import copy
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from tether.core.errors import ModelError
from tether.core.types import Ids
from tether.data.chat import ChatEncoder
from tether.models.carried import Rounding, fold_in, order_settings, settle
from tether.models.heads import ScalarHead
from tether.models.precision import cast
from tether.models.pretrained import quiet
from tether.models.trunk import Role
from tether.rewards.classifier import OFFSET

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD = "<|pad|>"


def merged(role: Role, rounding: Rounding | None = None) -> Any:
    """The role's whole causal model in float32, its own adapter merged; the role is not to be used
    any more.

    In float32 because a bfloat16 weight near 1 cannot take up a change below 0.004, and an
    adapter's are often smaller.

    Args:
        rounding: counts what no layer can carry beside its weights.
    """
    with quiet():
        return fold_in(settle(cast(role.model, torch.float32), role.adapter, rounding))


def classifier(
    causal: PreTrainedModel,
    head: ScalarHead,
    *,
    each_token: bool = False,
) -> PreTrainedModel:
    """The library's classifier of sequences, or of tokens, around the decoder of `causal`, without
    a copy of it.

    The head's offset and scale go into its weights. Classifiers of sequences mostly have no bias.
    `score_offset` of the config has the missing constant. Differences between scores are right
    without it.

    Raises:
        ModelError: the library has no such classifier for this architecture.
    """
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    auto = AutoModelForTokenClassification if each_token else AutoModelForSequenceClassification
    config = copy.deepcopy(causal.config)
    config.num_labels = head.outputs
    try:
        with torch.device("meta"):
            model = auto.from_config(config)
        getattr(model, model.base_model_prefix)
        name, _ = score_layer(model)
    except (ValueError, AttributeError, StopIteration):
        what = "tokens" if each_token else "sequences"
        raise ModelError(
            f"transformers has no classifier of {what} for {type(causal).__name__}, so this "
            "reward model cannot leave tether. "
            "Serve it from tether, or train one on a model of another family.",
        ) from None
    setattr(model, model.base_model_prefix, getattr(causal, causal.base_model_prefix))
    has_bias = getattr(model, name).bias is not None
    layer = nn.Linear(
        head.linear.in_features,
        head.outputs,
        bias=has_bias,
        device=head.linear.weight.device,
    )
    constant = (head.linear.bias - head.offset) * head.scale
    with torch.no_grad():
        layer.weight.copy_(head.linear.weight * head.scale)
        if has_bias:
            layer.bias.copy_(constant)
        else:
            setattr(model.config, OFFSET, float(constant))
    setattr(model, name, layer)
    return model.eval()


def score_layer(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """The last layer of a classifier that `classifier` made, and its name."""
    children = dict(model.named_children())
    return next(
        (name, layer)
        for name in ("score", "classifier")
        if isinstance(layer := children.get(name), nn.Linear)
    )


def save_adapter(
    model: Any,
    name: str,
    folder: Path,
    scorer: PreTrainedModel | None,
    dtype: torch.dtype,
    base: str,
) -> None:
    """Write the adapter called `name` in peft's format, as one for the class of `scorer`, with its
    last layer, if that is given.

    Args:
        base: the name of the base model in adapter_config.json.
    """
    from peft import get_peft_model_state_dict

    config = copy.deepcopy(model.peft_config[name])
    state = get_peft_model_state_dict(model, adapter_name=name)
    config.base_model_name_or_path = base
    config.inference_mode = True
    if scorer is not None:
        layer, linear = score_layer(scorer)
        config.task_type = "TOKEN_CLS" if "Token" in type(scorer).__name__ else "SEQ_CLS"
        config.modules_to_save = [layer]
        state |= {
            f"base_model.model.{layer}.{key}": value for key, value in linear.state_dict().items()
        }
    config.save_pretrained(str(folder))
    order_settings(folder)
    tensors = {key: value.detach().to(dtype).contiguous().cpu() for key, value in state.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def settle_padding(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Ids,
    *,
    may_grow: bool,
) -> None:
    """Give a classifier a padding token that ends no turn.

    The library takes the last token that is not padding for the end of a sequence. If padding is
    the EOS, as in many chat models, it would score the token before the trained one.

    Raises:
        ModelError: there is none, and the vocabulary may not grow.
    """
    special = [
        tokenizer.pad_token,
        tokenizer.unk_token,
        tokenizer.bos_token,
        *tokenizer.all_special_tokens,
    ]
    fit = [
        token
        for token in special
        if token is not None and tokenizer.convert_tokens_to_ids(token) not in stop_ids
    ]
    if not fit:
        has_room = len(tokenizer) < model.get_input_embeddings().weight.shape[0]
        if not has_room and not may_grow:
            raise ModelError(
                "every special token may end a turn, so none is left for padding, and an adapter "
                "brings none of its own. Export without --adapter.",
            )
        tokenizer.add_special_tokens({"pad_token": PAD})
        if not has_room:
            model.resize_token_embeddings(len(tokenizer))
        fit = [PAD]
    tokenizer.pad_token = fit[0]
    tokenizer.padding_side = "right"
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


def whole_template(encoder: ChatEncoder, *, to_the_end: bool) -> str | dict[str, str]:
    """A chat template that renders what the encoder encodes, for those who tokenize its text; by
    name where there are several.

    Args:
        to_the_end: a whole conversation ends with the last reply's stop token, where a reward model
            reads its score. The text after it goes. If the template writes none, one comes, as in
            data.chat.
    """
    templates = encoder.templates
    if isinstance(templates, str):
        return _whole(encoder, templates, to_the_end)
    return {name: _whole(encoder, template, to_the_end) for name, template in templates.items()}


def _whole(encoder: ChatEncoder, template: str, to_the_end: bool) -> str:
    start = ""
    stops = [encoder.tokenizer.decode([i]) for i in encoder.stop_ids]
    if encoder.system_prompt is not None:
        system = f"[{{'role': 'system', 'content': {encoder.system_prompt!a}}}]"
        start = (
            f"{{%- if messages[0]['role'] != 'system' -%}}{{%- set messages = {system} + messages "
            f"-%}}{{%- endif -%}}{{{{ '' }}}}"
        )
    if not to_the_end:
        return start + template
    # The quiet expressions keep white space that tags beside it would swallow.
    whole = "{{ '' }}" + template.removesuffix("\n") + "{{ '' }}"
    end = encoder.tokenizer.decode([encoder.end_id])
    around = (
        (Path(__file__).parent / "whole_template.jinja")
        .read_text(encoding="utf-8")
        .removesuffix("\n")
    )
    return Template(around).substitute(
        WHOLE=whole,
        START=start,
        STOPS=ascii(stops),
        STOP=ascii(end),
    )
