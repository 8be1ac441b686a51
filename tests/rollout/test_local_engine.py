"""The engine against transformers.generate and against one-row-at-a-time sampling by hand."""

import math
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
import transformers
from scipy import stats

from tether.core.errors import DataError
from tether.core.once import once
from tether.core.types import Prompt, Sampling, StopReason, user
from tether.data.chat import ChatEncoder
from tether.models.cpu.llama import cache_bytes
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.rollout.sampling import counter_uniform, sample_tokens

PROMPTS = [
    Prompt((user(text),), str(n))
    for n, text in enumerate(["a", "what is it?", "tell me a much longer story", "no"])
]


def engine(seed=0, **options):
    return LocalEngine(Role(tiny_model(seed)), ChatEncoder(tiny_tokenizer(), (1,)), **options)


@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_greedy_equals_transformers_generate(max_rows):
    ours = engine(max_rows=max_rows)
    groups = ours.generate(PROMPTS, Sampling(max_new_tokens=20, temperature=0.0))
    for group in groups:
        ids = torch.tensor([group.rollouts[0].prompt_ids])
        expected = ours.role.model.generate(
            ids,
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=0,
        )[0, ids.shape[1] :]
        assert list(group.rollouts[0].response_ids) == expected.tolist()


def test_samples_and_logprobs_equal_a_loop_without_cache_or_batch():
    ours, sampling = engine(), Sampling(max_new_tokens=12, temperature=0.8)
    groups = ours.generate(PROMPTS, sampling, num_samples=3, seed=11, ordinals=[5, 9, 2, 7])
    for group, ordinal in zip(groups, [5, 9, 2, 7], strict=True):
        for rollout in group.rollouts:
            ids = list(rollout.prompt_ids)
            for position, (token, logprob) in enumerate(
                zip(rollout.response_ids, rollout.logprobs, strict=True),
            ):
                logits = ours.role.model(input_ids=torch.tensor([ids])).logits[0, -1].double() / 0.8
                uniform = float(
                    counter_uniform(
                        11,
                        torch.tensor([ordinal]),
                        torch.tensor([rollout.sample_index]),
                        torch.tensor([position]),
                    ),
                )
                cumulative = logits.softmax(-1).cumsum(-1)
                assert token == int((cumulative <= uniform).sum())
                assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=2e-5)
                ids.append(token)


def test_samples_do_not_depend_on_the_batch_around_them():
    sampling = Sampling(max_new_tokens=16)
    together = engine(max_rows=64).generate(PROMPTS, sampling, num_samples=4, seed=3)
    alone = [
        engine(max_rows=2).generate([p], sampling, num_samples=4, seed=3, ordinals=[n])[0]
        for n, p in enumerate(PROMPTS)
    ]
    assert [[r.response_ids for r in g.rollouts] for g in together] == [
        [r.response_ids for r in g.rollouts] for g in alone
    ]


MANY = [Prompt((user("x" * (1 + 7 * n % 23)),), f"m{n}") for n in range(40)]


def ends_early(model):
    """Make the stop token likely, so that rows end at different times."""
    with torch.no_grad():
        model.get_output_embeddings().weight[1] *= 0
    return model


@pytest.mark.parametrize(("max_rows", "num_samples"), [(5, 1), (16, 2), (24, 3), (64, 1), (200, 4)])
def test_rows_that_enter_and_leave_at_any_time_sample_what_they_would_alone(max_rows, num_samples):
    sampling = Sampling(max_new_tokens=120)
    ours = engine(max_rows=max_rows)
    ends_early(ours.role.model)
    groups = ours.generate(MANY, sampling, num_samples=num_samples, seed=3)
    lengths = {len(r.response_ids) for g in groups for r in g.rollouts}
    assert len(lengths) > 10 and [g.prompt.id for g in groups] == [p.id for p in MANY]
    for number in (0, 17, 39):
        alone = ours.generate(
            [MANY[number]],
            sampling,
            num_samples=num_samples,
            seed=3,
            ordinals=[number],
        )[0]
        for one, other in zip(alone.rollouts, groups[number].rollouts, strict=True):
            assert (one.response_ids, one.stop_reason, one.sample_index) == (
                other.response_ids,
                other.stop_reason,
                other.sample_index,
            )
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_many_rows_that_end_early_are_transformers_greedy_rows():
    """More rows than slots and early stops: slots are refilled, and rows move when nobody waits any
    more.
    """
    ours = engine(max_rows=40)
    model = ours.role.model
    prompts = [Prompt((user(f"{n} {'xyz' * (n % 5)}"),), str(n)) for n in range(90)]
    groups = ours.generate(prompts, Sampling(max_new_tokens=24, temperature=0.0))
    # tokens that greedy rows do reach, at many ages
    ends = [r.response_ids[7] for g in groups[:20] for r in g.rollouts]
    stops = (1, *sorted(set(ends))[:6])
    ours = LocalEngine(Role(model), ChatEncoder(tiny_tokenizer(), stops), max_rows=40)
    groups = ours.generate(prompts, Sampling(max_new_tokens=24, temperature=0.0))
    assert len({len(g.rollouts[0].response_ids) for g in groups}) > 5
    for group in groups:
        ids = torch.tensor([group.rollouts[0].prompt_ids])
        expected = model.generate(
            ids,
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=list(stops),
            pad_token_id=0,
        )
        assert list(group.rollouts[0].response_ids) == expected[0, ids.shape[1] :].tolist()


def test_nothing_asked_nothing_answered():
    assert engine().generate([], Sampling()) == []


def windowed_model(kind, window=8):
    """Small models whose layers see a window of 8 tokens, all of them or every second."""
    common = {
        "vocab_size": 261,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "sliding_window": window,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "mistral":
            return transformers.MistralForCausalLM(transformers.MistralConfig(**common))
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        config = transformers.Gemma3TextConfig(
            **common,
            layer_types=kinds,
            head_dim=16,
            query_pre_attn_scalar=16,
        )
        return transformers.Gemma3ForCausalLM(config)


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_windows_are_kept(kind):
    model = windowed_model(kind).eval()
    ours = LocalEngine(Role(model), ChatEncoder(tiny_tokenizer(), (1,)), max_rows=3)
    wide = LocalEngine(Role(windowed_model(kind, 250).eval()), ours.encoder)
    sampling = Sampling(max_new_tokens=20, temperature=1.0)
    assert [g.rollouts[0].logprobs for g in ours.generate(MANY[:6], sampling)] != [
        g.rollouts[0].logprobs for g in wide.generate(MANY[:6], sampling)
    ]  # the window matters
    for group in ours.generate(MANY[:6], Sampling(max_new_tokens=20, temperature=0.0)):
        ids = torch.tensor([group.rollouts[0].prompt_ids])
        expected = model.generate(
            ids,
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=0,
            use_cache=False,
        )
        assert list(group.rollouts[0].response_ids) == expected[0, ids.shape[1] :].tolist()


def test_the_stop_token_is_kept_and_the_reason_told():
    ours = engine()
    ends_early(ours.role.model)
    rollouts = [
        r
        for g in ours.generate(PROMPTS * 8, Sampling(max_new_tokens=400), num_samples=4)
        for r in g.rollouts
    ]
    ended = [r for r in rollouts if r.stop_reason is StopReason.STOP_TOKEN]
    assert ended and all(r.response_ids[-1] == 1 and 1 not in r.response_ids[:-1] for r in ended)
    assert all(
        len(r.response_ids) == 400 and 1 not in r.response_ids for r in rollouts if not r.finished
    )
    assert all(len(r.logprobs) == len(r.response_ids) for r in rollouts)
    assert len({len(r.response_ids) for r in ended}) > 5


def test_stop_strings_end_a_response():
    ours = engine()
    first = ours.generate(PROMPTS[:1], Sampling(max_new_tokens=30), seed=4)[0].rollouts[0]
    piece = first.text[3:5]
    again = ours.generate(PROMPTS[:1], Sampling(max_new_tokens=30, stop_strings=(piece,)), seed=4)[
        0
    ].rollouts[0]
    assert again.stop_reason is StopReason.STOP_STRING
    assert again.text == first.text.split(piece)[0] and len(again.response_ids) < len(
        first.response_ids,
    )


def test_stop_strings_of_many_bytes_in_many_rows(monkeypatch):
    """The byte tokenizer spends three tokens a letter here; every row writes the same scripted
    text.
    """
    ours, stop = engine(), "终止生成符号"
    script = iter(ours.encoder.tokenizer(f"well, {stop} more")["input_ids"])

    def scripted(logits, uniforms, sampling, **_):
        token = next(script)
        return torch.full((len(logits),), token), torch.zeros(len(logits))

    monkeypatch.setattr("tether.rollout.local.sample_tokens", scripted)
    groups = ours.generate(
        PROMPTS,
        Sampling(max_new_tokens=60, stop_strings=("never", stop)),
        num_samples=3,
    )
    rollouts = [r for g in groups for r in g.rollouts]
    assert all(r.stop_reason is StopReason.STOP_STRING and r.text == "well, " for r in rollouts)
    assert {len(r.response_ids) for r in rollouts} == {len(f"well, {stop}".encode())}


def test_a_prompt_beyond_the_context_is_one_clear_error():
    with pytest.raises(DataError, match="context of 20"):
        engine(context_length=20).generate(PROMPTS, Sampling(max_new_tokens=10))


def test_uniforms_are_uniform_and_independent_of_neighbours():
    n = 20_000
    zeros = torch.zeros(n, dtype=torch.long)
    counters = torch.arange(n)
    for arguments in ((counters, zeros, zeros), (zeros, counters, zeros), (zeros, zeros, counters)):
        draws = counter_uniform(0, *arguments).numpy()
        assert stats.kstest(draws, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 4 / math.sqrt(n)
    assert len(set(counter_uniform(0, counters, zeros, zeros).tolist())) == n
    assert not torch.equal(
        counter_uniform(0, counters, zeros, zeros),
        counter_uniform(1, counters, zeros, zeros),
    )
    assert not torch.equal(
        counter_uniform(0, counters, zeros, zeros),
        counter_uniform(0, zeros, counters, zeros),
    )


@pytest.mark.parametrize(
    ("sampling", "support"),
    [
        (Sampling(), [0, 1, 2, 3, 4]),
        (Sampling(top_k=2), [0, 1]),
        (Sampling(top_p=0.7), [0, 1]),
        (Sampling(min_p=0.3), [0, 1, 2]),
        (Sampling(temperature=2.0), [0, 1, 2, 3, 4]),
    ],
)
def test_sampling_has_the_distribution_it_says(sampling, support):
    probabilities = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, [700, 3, 999, 255, 256]] = probabilities.log()
    n = 8000
    tokens, logprobs = sample_tokens(
        logits.expand(n, -1),
        torch.arange(n, dtype=torch.float64).add(0.5) / n,
        sampling,
    )
    expected = probabilities ** (1 / sampling.temperature)
    expected = torch.where(torch.isin(torch.arange(5), torch.tensor(support)), expected, 0.0)
    expected = expected / expected.sum()
    for place, index in enumerate([700, 3, 999, 255, 256]):
        hit = tokens == index
        assert float(hit.float().mean()) == pytest.approx(float(expected[place]), abs=2 / n)
        if hit.any():
            assert float(logprobs[hit][0]) == pytest.approx(math.log(expected[place]), abs=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(temperature=0.0), Sampling(top_p=0.8, temperature=0.7)],
)
def test_many_rows_are_sampled_as_each_alone(sampling):
    logits = torch.randn(70, 30_000, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
    uniforms = torch.rand(70, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = sample_tokens(logits, uniforms, sampling)
    alone = [sample_tokens(logits[i : i + 1], uniforms[i : i + 1], sampling) for i in range(70)]
    assert tokens.tolist() == [int(t) for t, _ in alone]
    torch.testing.assert_close(logprobs, torch.cat([p for _, p in alone]), atol=1e-6, rtol=0)


GIGABYTE = 10**9
PLACES = 46
"""The longest of the prompts, 30 tokens, and 16 of its answer."""


def memory_of(monkeypatch, total, free):
    """A machine of so many bytes, of which so many are free."""
    monkeypatch.setattr(
        psutil,
        "virtual_memory",
        lambda: SimpleNamespace(total=int(total), available=int(free)),
    )


def sampled_here(monkeypatch, caplog, total, free):
    """Answers with their log-probabilities, the row counts of decoding passes, the decoder, and
    what was logged.
    """
    once.cache_clear()
    caplog.clear()
    memory_of(monkeypatch, total, free)
    ours, counts = engine(), []
    decode = ours.decoder.decode
    ours.decoder.decode = lambda tokens, cache: counts.append(len(tokens)) or decode(tokens, cache)
    groups = ours.generate(PROMPTS, Sampling(max_new_tokens=16), num_samples=4, seed=3)
    answers = [(r.response_ids, r.logprobs) for group in groups for r in group.rollouts]
    return (
        answers,
        max(counts),
        type(ours.decoder),
        [record.getMessage() for record in caplog.records],
    )


def test_the_memory_that_others_leave_decides_nothing(monkeypatch, caplog):
    """The same passes with 12 GB free as with 3 MB, in which a quarter would hold few rows and
    weights would have no copy.
    """
    alone = sampled_here(monkeypatch, caplog, 24 * GIGABYTE, 12 * GIGABYTE)
    weights = sum(p.numel() * p.element_size() for p in tiny_model(0).parameters())
    row = cache_bytes(tiny_model(0).config, 1, PLACES, 4)
    crowded = sampled_here(monkeypatch, caplog, 24 * GIGABYTE, 16 * row)
    assert 16 * row < 4 * weights and alone[1] == 16
    assert crowded == alone and alone[3] == []


def test_a_small_machine_decodes_fewer_rows_and_logs_so(monkeypatch, caplog):
    row = cache_bytes(tiny_model(0).config, 1, PLACES, 4)
    _, rows, _, logged = sampled_here(monkeypatch, caplog, 4 * 9 * row, 4 * 9 * row)
    assert rows == 8, "two prompts of four samples: nine rows fit into a quarter"
    assert len(logged) == 1 and "do not fit into" in logged[0]
    _, rows, _, logged = sampled_here(monkeypatch, caplog, 24 * GIGABYTE, 9 * row)
    assert rows == 8 and len(logged) == 1 and "programs leave 0.0 GB" in logged[0]
