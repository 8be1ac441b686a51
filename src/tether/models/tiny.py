"""A small random model with a byte tokenizer, built in code: for tests and smoke runs, with no
download.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% "
    "endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
NUL, NO_BYTE = "Ā", "<|nul|>"
"""The byte 0 as byte-level tokenizers write it, and the special token that has its place."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and special tokens; pad and EOS differ.

    No token is the byte 0: readers refuse texts that hold one, and a random model would write them.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    vocabulary[NO_BYTE] = vocabulary.pop(NUL)
    inner = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token=NO_BYTE))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token=NO_BYTE,
        additional_special_tokens=list(SPECIAL[2:]),
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = 1024
    return tokenizer


def tiny_model(
    seed: int = 0,
    *,
    layers: int = 2,
    dim: int = 64,
    vocab: int = len(SPECIAL) + 256,
) -> Any:
    """A two-layer Llama with random weights that depend on `seed` alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=2 * dim,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
