"""Rows of the output layer that stand for no token (vocabularies filled up to a round size) are
neither sampled nor scored.
"""

import pytest
import torch
import transformers

from tether.cli.tools.export import export_model
from tether.core.types import Prompt, Sampling, assistant, user
from tether.data.batches import make_batch
from tether.models.tiny import tiny_tokenizer
from tether.models.trunk import Role
from tether.rollout.drawn import score_ids
from tether.rollout.wire import as_request
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, local_engine, new_role
from tether.settings.model import LoraConfig, ModelConfig

TOKENS, ROWS = 261, 320
PROMPTS = [Prompt((user("one two"),)), Prompt((user("three"),))]


@pytest.fixture(scope="module", params=["tied", "apart"])
def folder(request, tmp_path_factory):
    """A model that would draw a row without a token most of the time."""
    place = tmp_path_factory.mktemp(request.param)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": ROWS,
    }
    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "initializer_range": 0.1}
    config = transformers.LlamaConfig(
        **sizes,
        **ends,
        num_key_value_heads=2,
        tie_word_embeddings=request.param == "tied",
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.get_output_embeddings().weight[TOKENS:].mul_(8.0)
    model.save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return str(place)


def opened(folder, **how):
    return open_model(ModelConfig(source=folder, dtype="float32", **how))


@torch.no_grad()
def by_hand(folder, ids, temperature=1.0):
    """The library's logits of the tokens alone, as a distribution."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    row = torch.tensor([ids])
    logits = model(input_ids=row).logits[0, :-1]
    assert (logits.softmax(-1)[:, TOKENS:].sum(-1)).mean() > 0.5, (
        "rows without a token are too seldom for this test"
    )
    return (logits[:, :TOKENS] / temperature).log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, max_new_tokens=24),
        Sampling(temperature=0.7, max_new_tokens=24),
        Sampling(temperature=0.0, max_new_tokens=24),
        Sampling(temperature=1.0, top_p=0.9, top_k=50, max_new_tokens=24),
    ],
)
def test_samples_are_tokens_and_their_log_probabilities_are_the_learners(folder, kernels, sampling):
    loaded = opened(folder, cpu_kernels=kernels)
    role = new_role(loaded, "policy", LoraConfig(), seed=0)
    groups = local_engine(role, loaded).generate(PROMPTS, sampling, num_samples=4, seed=3)
    for rollout in (one for group in groups for one in group.rollouts):
        assert max(rollout.response_ids) < TOKENS
        if sampling.truncates:
            continue
        temperature, count = sampling.temperature or 1.0, len(rollout.response_ids)
        batch = make_batch(
            [encoder_of(loaded).rollout(rollout.prompt_ids, rollout.response_ids)],
            0,
        )
        with torch.no_grad():
            learner = role.logprobs(batch, temperature)[0]
        expected = by_hand(folder, rollout.prompt_ids + rollout.response_ids, temperature)[-count:]
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=2e-4, rtol=0)
        torch.testing.assert_close(learner, expected, atol=2e-4, rtol=0)


def test_training_moves_no_row_without_a_token_by_its_probability(folder):
    loaded = opened(folder)
    role = Role(loaded.model)
    head = loaded.model.get_output_embeddings().weight.requires_grad_(True)
    batch = make_batch([encoder_of(loaded).conversation((user("a"), assistant("bcd")))], 0)
    logprobs, entropies = role.logprobs(batch)
    (logprobs.sum() + entropies.sum()).backward()
    assert head.grad[:TOKENS].abs().sum() > 0 and head.grad[TOKENS:].abs().sum() == 0


def test_a_server_of_vllms_is_told_what_not_to_draw_and_its_probe_has_all_rows(folder):
    how = {"stop_ids": (1,), "ours": False}
    body = as_request(
        (5, 6),
        Sampling(max_new_tokens=4),
        2,
        0,
        0,
        unused=range(TOKENS, ROWS),
        **how,
    )
    assert body["sampling_params"]["logit_bias"] == {str(i): -100.0 for i in range(TOKENS, ROWS)}
    assert (
        "logit_bias"
        not in as_request((5, 6), Sampling(max_new_tokens=4), 2, 0, 0, **how)["sampling_params"]
    )
    ids = (3, 40, 50, 60, 70)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        row = torch.tensor([ids])
        whole = (
            model(input_ids=row).logits[0, :-1].log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]
        )
    role = Role(opened(folder).model)
    torch.testing.assert_close(
        torch.tensor(score_ids(role, ids, padded=True)),
        whole,
        atol=2e-4,
        rtol=0,
    )
    torch.testing.assert_close(
        torch.tensor(score_ids(role, ids)),
        by_hand(folder, ids),
        atol=2e-4,
        rtol=0,
    )


def test_an_export_draws_none_of_them_either(folder, tmp_path):
    assert export_model(folder, tmp_path / "out", dtype="float32")["difference"] < 1e-3
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.suppress_tokens == list(range(TOKENS, ROWS))
    torch.manual_seed(0)
    ids = model.generate(
        torch.tensor([[3, 40, 50]]),
        do_sample=True,
        max_new_tokens=40,
        num_return_sequences=4,
    )
    assert int(ids.max()) < TOKENS


def test_a_tokenizer_of_the_same_size_leaves_all_rows():
    loaded = open_model(ModelConfig(source="tiny"))
    assert (
        Role(loaded.model).num_tokens == len(loaded.model.get_output_embeddings().weight) == TOKENS
    )
