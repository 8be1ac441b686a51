"""What strangers need of an exported model: the template that gives tether's ids, padding that ends
nothing, the same numbers.
"""

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tether.cli.tools.export_transformers import OFFSET, classifier, settle_padding, whole_template
from tether.core.errors import ModelError
from tether.core.types import Message, assistant, user
from tether.data.chat import ChatEncoder
from tether.data.templates import PLAIN_TEMPLATE
from tether.models.heads import ScalarHead
from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer

CHATML = """{%- for message in messages %}
{{- '<|im|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im|>assistant\\n' }}
{%- endif %}
"""
ODD = """
  {% set ns = namespace(first=true) %}{% for m in messages %}{% if loop.first and m['role'] != 'system' %}[be good]<|end|>
{% endif %}{% set text = m['content'] %}<|{{ m['role'] }}|>{{ text | trim }}{% if m['role'] == 'user' %}<|end|>{% endif %}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}

"""
"""Writes no token after a reply, trims, and begins and ends with white space."""
TALKS = [
    (user("a b"), assistant("c d")),
    (user("a"), assistant("b"), user("c"), assistant("ends <|end|> in the middle")),
    (Message("system", "s"), user("hi"), assistant("x\n")),
]
SMALL = {
    "vocab_size": 50,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    "template",
    [TEMPLATE, PLAIN_TEMPLATE, CHATML, ODD],
    ids=["tiny", "plain", "chatml", "odd"],
)
@pytest.mark.parametrize("system", [None, 'You\'re "it" {{ x }} %} {% raw %} 😀\n'])
@pytest.mark.parametrize("stop_ids", [(1,), (1, 2), (2, 1)])
def test_the_text_of_the_template_gives_the_ids_that_are_trained_on(template, system, stop_ids):
    tokenizer = tiny_tokenizer()
    encoder = ChatEncoder(tokenizer, stop_ids, template, system)
    for talk in TALKS:
        rows = [{"role": m.role, "content": m.content} for m in talk]
        for whole in (True, False):
            tokenizer.chat_template = whole_template(encoder, to_the_end=whole)
            asked = tokenizer.apply_chat_template(
                rows[:-1],
                tokenize=False,
                add_generation_prompt=True,
            )
            assert tuple(tokenizer(asked, add_special_tokens=False).input_ids) == encoder.prompt(
                talk[:-1],
            )
        tokenizer.chat_template = whole_template(encoder, to_the_end=True)
        told = tokenizer.apply_chat_template(rows, tokenize=False)
        assert (
            tuple(tokenizer(told, add_special_tokens=False).input_ids)
            == encoder.conversation(talk).ids
        )


def head(outputs, dim=32):
    made = ScalarHead(dim, zero=False, outputs=outputs)
    torch.nn.init.normal_(made.linear.bias)
    made.offset, made.scale = torch.tensor(0.7), torch.tensor(2.5)
    return made


@torch.no_grad()
@pytest.mark.parametrize(("outputs", "each_token"), [(1, False), (1, True), (3, True)])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma2", "GPT2"])
def test_a_classifier_gives_the_heads_numbers(family, outputs, each_token, tmp_path):
    sizes = (
        {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 50} if family == "GPT2" else SMALL
    )
    more = {
        "Gemma2": {"num_key_value_heads": 2, "head_dim": 8},
        "Qwen2": {"num_key_value_heads": 2},
    }.get(family, {})
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **sizes,
        **more,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    causal = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids, scorer = torch.tensor([[5, 7, 9, 1]]), head(outputs)
    expected = scorer(causal.get_decoder()(input_ids=ids).last_hidden_state[0])
    classifier(causal, scorer, each_token=each_token).save_pretrained(tmp_path)
    kind = "TokenClassification" if each_token else "SequenceClassification"
    model = (
        getattr(transformers, f"AutoModelFor{kind}")
        .from_pretrained(tmp_path, dtype=torch.float32)
        .eval()
    )
    given = model(input_ids=ids).logits[0].float()
    if each_token:
        torch.testing.assert_close(given, expected.view(4, outputs), atol=1e-5, rtol=1e-5)
    else:
        torch.testing.assert_close(
            given + getattr(model.config, OFFSET),
            expected[-1:],
            atol=1e-5,
            rtol=1e-5,
        )


def test_a_family_without_a_classifier_is_refused():
    config = transformers.MambaConfig(
        vocab_size=50,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=1,
    )
    with pytest.raises(ModelError, match=r"classifier .*MambaForCausalLM"):
        classifier(transformers.MambaForCausalLM(config), head(1, 16))


@pytest.mark.parametrize(("rows", "grown"), [(4, True), (8, False)])
def test_padding_that_ends_nothing_is_found_or_made(rows, grown):
    inner = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<eos>",
        pad_token="<eos>",
    )
    model = tiny_model(vocab=rows)
    if grown:
        with pytest.raises(ModelError, match="Export without --adapter"):
            settle_padding(model, tokenizer, (0,), may_grow=False)
    settle_padding(model, tokenizer, (0,), may_grow=True)
    assert tokenizer.pad_token_id == model.config.pad_token_id == 4
    assert model.get_input_embeddings().weight.shape[0] == max(rows, 5)
    other = tiny_tokenizer()
    settle_padding(tiny_model(), other, (0, 1), may_grow=False)
    assert other.pad_token_id not in (0, 1)


def test_named_templates_are_exported_by_name():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": "{{ tools | tojson }}" + TEMPLATE}
    encoder = ChatEncoder(tokenizer, (1,))
    exported = whole_template(encoder, to_the_end=True)
    tokenizer.chat_template = exported
    rows, tools = (
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"type": "function"}],
    )
    plain = tokenizer.apply_chat_template(rows, tokenize=False)
    assert plain == "<|user|>a<|end|><|assistant|>b<|end|>"
    assert (
        tokenizer.apply_chat_template(rows, tools=tools, tokenize=False)
        == ('[{"type": "function"}]') + plain
    )
