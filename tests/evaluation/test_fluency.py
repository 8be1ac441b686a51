"""Fluency against the model's own logits, one text at a time."""

import math

import pytest
import torch

from tether.core.types import Prompt, assistant, user
from tether.data.chat import ChatEncoder
from tether.evaluation.likelihood import Fluency
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role


def test_it_is_the_mean_logprob_of_the_words_without_the_stop_token():
    model, encoder = tiny_model(2).eval(), ChatEncoder(tiny_tokenizer(), (1,))
    prompts = [Prompt((user(text),), text) for text in ("one", "one", "a longer question", "two")]
    responses = ["yes", "no, not at all", "perhaps so", "   "]
    values = Fluency(Role(model), encoder, micro_batch_tokens=60)(prompts, responses)
    assert values[3] == -math.inf
    for prompt, response, value in list(zip(prompts, responses, values, strict=True))[:3]:
        encoded = encoder.conversation((*prompt.messages, assistant(response)), "last")
        with torch.no_grad():
            table = model(input_ids=torch.tensor([encoded.ids])).logits[0].double().log_softmax(-1)
        words = [
            float(table[t - 1, encoded.ids[t]])
            for t, counts in enumerate(encoded.trained)
            if counts
        ][:-1]
        assert encoded.ids[-1] == 1 and len(words) > 1
        assert value == pytest.approx(sum(words) / len(words), abs=1e-5)
