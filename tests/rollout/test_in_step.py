"""Models whose rows cannot stand in slots, against a loop over the whole model without cache or
batch.
"""

import pytest
import torch
from tests.models.architectures import small_model

from tether.core.types import Prompt, Sampling, StopReason, user
from tether.data.chat import ChatEncoder
from tether.models.cpu.kernels import draw_tokens
from tether.models.tiny import tiny_tokenizer
from tether.models.trunk import Role
from tether.rollout import proof
from tether.rollout.local import LocalEngine
from tether.rollout.sampling import counter_uniform

WAYS = {
    "llama4_text": proof.IN_STEP,  # attention in chunks of places
    "qwen3_5_text": proof.IN_STEP,
    "lfm2": proof.IN_STEP,
    "mamba": proof.IN_STEP,
    "falcon_h1": proof.IN_STEP,
    "bloom": proof.IN_STEP,
    "gpt_neo": proof.IN_STEP,  # a window that slots know nothing of
    "rwkv": proof.WHOLE,
    "gemma4_text": proof.SLOTS,
    "gpt_oss": proof.SLOTS,
}
PROMPTS = [
    Prompt((user(text),), str(n))
    for n, text in enumerate(["a", "what is it?", "b", "tell me a much longer story"])
]
ORDINALS = [5, 9, 2, 7]


def engine(kind, stops=(1,), **options):
    return LocalEngine(Role(small_model(kind)), ChatEncoder(tiny_tokenizer(), stops), **options)


def way_of(ours):
    return (
        proof.SLOTS
        if ours.in_step is None
        else proof.WHOLE
        if ours.in_step.name is None
        else proof.IN_STEP
    )


@pytest.mark.parametrize("kind", WAYS)
@torch.no_grad()
def test_samples_and_log_probabilities_equal_a_loop_without_cache_or_batch(kind):
    ours, sampling = engine(kind, max_rows=4), Sampling(max_new_tokens=14, temperature=0.8)
    assert way_of(ours) == WAYS[kind]
    groups = ours.generate(PROMPTS, sampling, num_samples=2, seed=11, ordinals=ORDINALS)
    assert [group.prompt.id for group in groups] == [prompt.id for prompt in PROMPTS]
    for group, ordinal in zip(groups, ORDINALS, strict=True):
        for rollout in group.rollouts:
            ids = list(rollout.prompt_ids)
            for step, (token, logprob) in enumerate(
                zip(rollout.response_ids, rollout.logprobs, strict=True),
            ):
                logits = (
                    ours.role.causal_model(input_ids=torch.tensor([ids])).logits[0, -1].double()
                    / 0.8
                )
                uniform = counter_uniform(
                    11,
                    *(torch.tensor([n]) for n in (ordinal, rollout.sample_index, step)),
                )
                assert token == int((logits.softmax(-1).cumsum(-1) <= float(uniform)).sum())
                assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-3)
                ids.append(token)


def test_responses_end_by_token_string_or_length_and_depend_on_nobody():
    sampling = Sampling(max_new_tokens=40)
    free = engine("qwen3_5_text").generate(PROMPTS, sampling, num_samples=3, seed=2)
    common = [r.response_ids[6] for g in free for r in g.rollouts][:4]
    stops = (1, *common)
    together = engine("qwen3_5_text", stops, max_rows=64).generate(
        PROMPTS,
        sampling,
        num_samples=3,
        seed=2,
    )
    alone = engine("qwen3_5_text", stops, max_rows=1)
    for number, group in enumerate(together):
        (single,) = alone.generate(
            [PROMPTS[number]],
            sampling,
            num_samples=3,
            seed=2,
            ordinals=[number],
        )
        assert [(r.response_ids, r.stop_reason) for r in single.rollouts] == [
            (r.response_ids, r.stop_reason) for r in group.rollouts
        ]
        for cut, rollout in zip(group.rollouts, free[number].rollouts, strict=True):
            assert rollout.response_ids[: len(cut.response_ids)] == cut.response_ids
            ended = [place for place, token in enumerate(rollout.response_ids) if token in stops]
            assert len(cut.response_ids) == (ended[0] + 1 if ended else 40)
            assert cut.stop_reason is (StopReason.STOP_TOKEN if ended else StopReason.LENGTH)
    texts = [rollout.text for group in free for rollout in group.rollouts]
    piece = next(letter for letter in texts[0][2:] if letter.isascii() and letter.isalnum())
    ours = engine("qwen3_5_text", max_rows=64)
    again = ours.generate(
        PROMPTS,
        Sampling(max_new_tokens=40, stop_strings=(piece,)),
        num_samples=3,
        seed=2,
    )
    for rollout, text in zip(
        (rollout for group in again for rollout in group.rollouts),
        texts,
        strict=True,
    ):
        assert (rollout.stop_reason is StopReason.STOP_STRING) == (piece in text)
        assert rollout.text == text.split(piece)[0]


@pytest.mark.parametrize("kind", ["mamba", "olmo2"])
def test_kernels_draw_tokens_only_where_the_engine_may_use_them(kind, monkeypatch):
    calls = []

    def counted(*given):
        calls.append(given)
        return draw_tokens(*given)

    monkeypatch.setattr("tether.rollout.sampling.draw_tokens", counted)
    texts = []
    for cpu_kernels in (False, True):
        ours = engine(kind, cpu_kernels=cpu_kernels)
        assert way_of(ours) == WAYS.get(kind, proof.SLOTS)
        groups = ours.generate(PROMPTS, Sampling(max_new_tokens=3), num_samples=2, seed=3)
        texts.append([rollout.text for group in groups for rollout in group.rollouts])
        assert bool(calls) == cpu_kernels
    assert texts[0] == texts[1]


def test_slots_that_are_wrong_are_seen(monkeypatch):
    """A cache whose rows all stand at one place: whoever trusts it draws from another distribution
    than is trained.
    """
    from tether.rollout.cache import SlotLayer

    monkeypatch.setattr(proof, "_WAYS", {})
    fill = SlotLayer.fill

    def shifted(layer, slots, keys, values, capacity):
        fill(layer, slots, keys.roll(1, 2), values, capacity)

    monkeypatch.setattr(SlotLayer, "fill", shifted)
    assert way_of(engine("olmo2")) == proof.IN_STEP
