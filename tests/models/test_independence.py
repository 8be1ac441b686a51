"""Texts in company are what they are alone, on every kind of architecture, or they are not put
together.
"""

import pytest
import torch
from tests.models.architectures import small_model
from tests.models.test_passes import answers, brute_force_logprobs, sequences

from tether.data.batches import batches_for, make_batch
from tether.models.heads import ScalarHead
from tether.models.trunk import Role, context_length
from tether.settings.supervised import SFTConfig
from tether.stages.sft import SFT

NOTHING, ROWS, MASKS = (False, False), (True, False), (True, True)
KEPT = {
    "llama": MASKS,
    "gpt2": MASKS,
    "opt": MASKS,
    "mistral": ROWS,  # a window
    "gpt_neo": ROWS,  # a window under another name
    "olmo3": ROWS,
    "llama4_text": NOTHING,  # attention in chunks of places
    "gpt_oss": NOTHING,  # its masks see no positions
    "qwen3_5_text": NOTHING,  # a recurrent state
    "lfm2": NOTHING,  # convolutions
    "mamba": NOTHING,
    "falcon_h1": NOTHING,
    "bloom": NOTHING,  # ALiBi counts places
    "falcon-rw": NOTHING,
    "mpt": NOTHING,
    "bart": NOTHING,
}
"""Whether documents in one row, and answers behind one prompt, are kept apart."""


class Tokens:
    pad_id = 0


@pytest.mark.parametrize("kind", KEPT)
def test_log_probabilities_in_company_are_those_of_each_text_alone(kind):
    model, rows = small_model(kind), sequences()
    role = Role(model, head=ScalarHead(Role(model).width, zero=False))
    assert (role.independence.packing, role.independence.masks) == KEPT[kind]
    expected = brute_force_logprobs(model, rows)
    stage = SFT(SFTConfig(row_tokens=64), role, Tokens())
    with torch.no_grad():
        total = -stage.evaluate(rows)["loss"] * len(expected)
    assert total == pytest.approx(float(expected.sum()), abs=2e-4 * len(expected))
    texts = answers()
    with torch.no_grad():
        alone = torch.cat([role.scores(make_batch([text], 0)) for text in texts])
        for cut, batch in batches_for(role, texts, 0, 500):
            torch.testing.assert_close(role.scores(batch), alone[cut], atol=2e-3, rtol=1e-3)


def test_a_trial_sees_what_leaks_in_any_type_of_numbers():
    for dtype in (torch.float32, torch.bfloat16):
        for attention in ("eager", "sdpa"):
            for kind in ("llama", "mistral", "qwen3_5_text", "bloom"):
                model = small_model(kind).to(dtype)
                model.set_attn_implementation(attention)
                kept = Role(model).independence
                assert (kept.causal, kept.rows) == (True, True)
                assert (kept.packing, kept.masks) == KEPT[kind], (kind, dtype, attention)


def test_a_trial_draws_no_random_numbers_and_keeps_the_mode():
    model = small_model("qwen3", seed=5)
    model.train()
    state = torch.get_rng_state()
    assert Role(model).independence.masks
    assert model.training and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "llama", "bart"])
def test_padding_beyond_the_last_position_is_not_computed(kind):
    """A context of 21 tokens, and rows padded to 24: learned positions end at 21."""
    model = small_model(kind, max_position_embeddings=21, n_positions=21)
    role = Role(model)
    assert role.context_length == 21
    rows = [row for row in sequences() if len(row) <= 21]
    assert max(map(len, rows)) == 21
    expected = brute_force_logprobs(model, rows)
    batch = make_batch(rows, 0)
    order = torch.argsort(batch.sequence * 1000 + batch.step)
    torch.testing.assert_close(role.logprobs(batch)[0].detach()[order], expected, atol=1e-4, rtol=0)


class Settings:
    def __init__(self, **values):
        vars(self).update(values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({}, 2**31),
        ({"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "default"}}, 32768),
        (
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            16384,
        ),
        # Qwen 2.5 with YaRN as its card asks for it; DeepSeek, whose number is the stretched one
        # already.
        (
            {
                "max_position_embeddings": 32768,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 163840,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 40.0,
                    "original_max_position_embeddings": 4096,
                },
            },
            163840,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
    ],
)
def test_the_context_is_what_positions_reach(values, expected):
    assert context_length(Settings(**values)) == expected
