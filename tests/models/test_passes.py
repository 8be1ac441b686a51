"""Packing, padding, micro-batches and accumulation must not change what is computed."""

import pytest
import torch
import transformers

from tether.algorithms.preference_losses import negative_log_likelihood
from tether.data.batches import cut_batches, document_length, documents_of, make_batch
from tether.data.chat import Encoded
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model
from tether.models.trunk import Role
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig
from tether.stages.learner.local import LocalLearner


def sequences(count: int = 7) -> list[Encoded]:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number in range(count):
        length = 5 + 4 * number
        ids = torch.randint(5, 200, (length,), generator=generator).tolist()
        rows.append(Encoded(tuple(ids), tuple(t >= 2 and t % 3 != 0 for t in range(length))))
    return rows


def brute_force_logprobs(model, rows):
    """One sequence at a time through the whole model, full softmax: no batch, no padding, no
    chunking.
    """
    result = []
    with torch.no_grad():
        for row in rows:
            logits = model(input_ids=torch.tensor([row.ids])).logits[0].double()
            table = logits.log_softmax(-1)
            result += [
                float(table[t - 1, row.ids[t]]) for t, counts in enumerate(row.trained) if counts
            ]
    return torch.tensor(result)


@pytest.mark.parametrize("capacity", [None, 40, 64, 500])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logprobs_equal_those_of_each_sequence_alone(capacity, attention):
    model, rows = tiny_model(1), sequences()
    expected = brute_force_logprobs(model, rows)
    model.set_attn_implementation(attention)
    batch = make_batch(rows, 0, capacity=capacity)
    logprobs, _ = Role(model).logprobs(batch)
    order = torch.argsort(batch.sequence * 1000 + batch.step)
    torch.testing.assert_close(
        logprobs.detach()[order].double(),
        expected.double(),
        atol=2e-6,
        rtol=0,
    )


def test_no_document_of_a_packed_row_sees_another():
    model, rows = tiny_model(1), sequences(3)
    changed = [rows[0], Encoded((7,) * len(rows[1]), rows[1].trained), rows[2]]
    for which in (rows, changed):
        batch = make_batch(which, 0, capacity=500)
        assert batch.ids.shape[0] == 1
        hidden = Role(model).hidden(batch)
        result = hidden[batch.last[[0, 2]]]
        if which is rows:
            first = result
    torch.testing.assert_close(first, result, atol=0, rtol=0)


def answers(groups: int = 3, each: int = 3) -> list[Encoded]:
    """Several answers of different lengths to each of some prompts, prompt by prompt turn."""
    generator = torch.Generator().manual_seed(4)
    prompts = [
        torch.randint(5, 200, (4 + 5 * g,), generator=generator).tolist() for g in range(groups)
    ]
    rows = []
    for answer in range(each):
        for number, prompt in enumerate(prompts):
            reply = torch.randint(
                5,
                200,
                (1 + 3 * answer + 2 * number,),
                generator=generator,
            ).tolist()
            rows.append(
                Encoded(tuple(prompt + reply), (False,) * len(prompt) + (True,) * len(reply)),
            )
    return rows


@pytest.mark.parametrize("capacity", [None, 60, 500])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_answers_that_share_their_prompt_are_what_they_are_alone(capacity, attention):
    model, rows = tiny_model(1), answers()
    expected = brute_force_logprobs(model, rows)
    model.set_attn_implementation(attention)
    batch = make_batch(rows, 0, capacity=capacity, document_tokens=500)
    # each prompt stands there once
    assert int((batch.positions == 0).logical_and(batch.ids > 0).sum()) == 3
    role = Role(model, head=ScalarHead(64, zero=False))
    logprobs, _ = role.logprobs(batch)
    order = torch.argsort(batch.sequence * 1000 + batch.step)
    torch.testing.assert_close(
        logprobs.detach()[order].double(),
        expected.double(),
        atol=2e-6,
        rtol=0,
    )
    alone = torch.cat([role.scores(make_batch([row], 0)) for row in rows])
    torch.testing.assert_close(role.scores(batch), alone, atol=2e-6, rtol=0)


@pytest.mark.parametrize("budget", [70, 500])
@pytest.mark.parametrize("attention", ["eager", "tether_grouped"])
def test_prompts_that_begin_alike_share_that_too(budget, attention):
    """Three prompts behind one system message: it stands there once a document, and nobody computes
    anything else for it.
    """
    model, system = tiny_model(1), tuple(range(20, 32))
    rows = [Encoded((*system, *row.ids), (False,) * 12 + row.trained) for row in answers()]
    expected = brute_force_logprobs(model, rows)
    model.set_attn_implementation(attention)
    documents = documents_of(rows, budget)
    assert sorted(i for d in documents for i in d) == list(range(9))
    lengths = [document_length([rows[i] for i in d]) for d in documents]
    assert max(lengths) <= budget and (len(documents) == 1) == (budget == 500)
    if budget == 500:  # the system message, three prompts, nine answers
        assert lengths == [12 + sum(4 + 5 * g for g in range(3)) + sum(r.num_trained for r in rows)]
    batch = make_batch(rows, 0, document_tokens=budget)
    assert int((batch.positions == 0).logical_and(batch.ids > 0).sum()) == len(documents)
    role = Role(model, head=ScalarHead(64, zero=False))
    logprobs, _ = role.logprobs(batch)
    order = torch.argsort(batch.sequence * 1000 + batch.step)
    torch.testing.assert_close(
        logprobs.detach()[order].double(),
        expected.double(),
        atol=5e-6,
        rtol=0,
    )
    alone = torch.cat([role.scores(make_batch([row], 0)) for row in rows])
    torch.testing.assert_close(role.scores(batch), alone, atol=5e-6, rtol=0)


def test_a_prompt_may_be_what_another_begins_with():
    model, shared = tiny_model(1), tuple(range(20, 30))
    rows = [
        Encoded((*shared, 7, 9), (False,) * 10 + (True,) * 2),
        Encoded((*shared, 8, 7), (False,) * 11 + (True,)),
    ]
    expected = brute_force_logprobs(model, rows)
    batch = make_batch(rows, 0, document_tokens=100)
    assert batch.ids.shape[0] == 1 and document_length(rows) == 14
    torch.testing.assert_close(
        Role(model).logprobs(batch)[0].detach().double(),
        expected.double(),
        atol=5e-6,
        rtol=0,
    )


def test_no_answer_sees_another():
    model, rows = tiny_model(1), answers(1, 3)
    start = rows[1].prompt_length
    changed = [
        rows[0],
        Encoded(rows[1].ids[:start] + (7,) * (len(rows[1]) - start), rows[1].trained),
        rows[2],
    ]
    results = [
        Role(model).hidden(batch)[batch.last]
        for batch in (make_batch(r, 0, document_tokens=500) for r in (rows, changed))
    ]
    assert torch.equal(results[0][[0, 2]], results[1][[0, 2]])
    assert not torch.allclose(results[0][1], results[1][1], atol=1e-3)


def test_a_model_with_windows_keeps_its_rows_apart():
    model = tiny_model(1)
    assert Role(model).reads_masks
    model.config.sliding_window = 8
    assert not Role(model).reads_masks


def test_documents_keep_to_their_budget():
    rows = answers(4, 5)
    for budget in (80, 200):
        cuts = cut_batches(rows, budget, document_tokens=budget)
        assert sorted(i for cut in cuts for i in cut) == list(range(len(rows))) and len(cuts) > 1
        for cut in cuts:
            batch = make_batch([rows[i] for i in cut], 0, document_tokens=budget)
            documents = documents_of([rows[i] for i in cut], budget)
            assert batch.ids.shape[0] == len(documents) <= len(cut)
            assert batch.ids.numel() <= budget or len(documents) == 1
            assert all(
                len(d) == 1 or document_length([rows[cut[i]] for i in d]) <= budget
                for d in documents
            )


def test_a_batch_of_answers_that_share_and_of_one_that_does_not():
    """A lone sequence, answers of one prompt and a sequence of which nothing counts, in float32 and
    in bfloat16.
    """
    rows = [*answers(1, 3), sequences(2)[1], Encoded((9, 8, 7), (False,) * 3)]
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 0.06)):
        model = tiny_model(1).to(dtype)
        batch = make_batch(rows, 0, document_tokens=500)
        assert batch.ids.shape[0] == 3 and batch.scatter(batch.targets.float())[4].sum() == 0
        logprobs, _ = Role(model).logprobs(batch)
        order = torch.argsort(batch.sequence * 1000 + batch.step)
        expected = brute_force_logprobs(model, rows)
        torch.testing.assert_close(
            logprobs.detach()[order].double(),
            expected.double(),
            atol=tolerance,
            rtol=0,
        )


def test_padding_stands_at_no_position_that_learned_ones_lack():
    """Four answers in a row are wider than a model of 64 learned positions may look up; each by
    itself is not.
    """
    config = transformers.GPT2Config(
        vocab_size=261,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        eos_token_id=1,
        bos_token_id=1,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt = list(range(10, 40))
    rows = [
        Encoded(tuple(prompt + [50 + n] * (20 + n)), (False,) * 30 + (True,) * (20 + n))
        for n in range(4)
    ]
    batch = make_batch([*rows, Encoded((5, 6), (False, True))], 0, document_tokens=500)
    assert batch.ids.shape[1] > 64
    role = Role(model)
    order = torch.argsort(batch.sequence * 1000 + batch.step)
    expected = brute_force_logprobs(model, [*rows, Encoded((5, 6), (False, True))])
    torch.testing.assert_close(
        role.logprobs(batch)[0].detach()[order].double(),
        expected.double(),
        atol=2e-5,
        rtol=0,
    )
    assert role.common_depth == 0


def test_logits_carry_the_models_own_scale_and_cap():
    config = transformers.GraniteConfig(
        vocab_size=261,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        logits_scaling=4.0,
    )
    for model in (transformers.GraniteForCausalLM(config).eval(), tiny_model(1)):
        rows, role = sequences(4), Role(model)
        batch = make_batch(rows, 0)
        order = torch.argsort(batch.sequence * 1000 + batch.step)
        expected = brute_force_logprobs(model, rows)
        torch.testing.assert_close(
            role.logprobs(batch)[0].detach()[order].double(),
            expected.double(),
            atol=2e-5,
            rtol=0,
        )
        with torch.no_grad():
            ours, theirs = (
                role.logits(role.hidden(batch)),
                model(input_ids=batch.ids).logits.flatten(0, 1),
            )
        torch.testing.assert_close(ours[batch.predict], theirs[batch.predict], atol=2e-5, rtol=0)


def gradient(rows, cuts, capacity=None, lora=False, document_tokens=0):
    model = tiny_model(1).requires_grad_(False)
    role = Role(add_adapter(model, "a", LoraConfig(rank=4), seed=5), "a") if lora else Role(model)
    learner = LocalLearner(role.parameters(), OptimizerConfig(learning_rate=1e-3), 10)
    total = sum(r.num_trained for r in rows)
    for cut in cuts:
        logprobs, _ = role.logprobs(
            make_batch(
                [rows[i] for i in cut],
                0,
                capacity=capacity,
                document_tokens=document_tokens,
            ),
        )
        learner.backward(
            negative_log_likelihood(
                logprobs,
                torch.ones_like(logprobs, dtype=torch.bool),
                denominator=total,
            ),
        )
    return torch.cat([m.grad.flatten() for m in learner.masters])


@pytest.mark.parametrize("lora", [False, True])
def test_gradient_does_not_depend_on_how_the_step_is_cut(lora):
    rows = sequences()
    whole = gradient(rows, [range(7)], lora=lora)
    assert whole.abs().max() > 1e-4
    for cuts, capacity in (
        ([[i] for i in range(7)], None),
        ([[6, 0], [3, 2, 1], [5, 4]], None),
        ([range(7)], 64),
        ([[0, 1, 2], [3, 4, 5, 6]], 90),
    ):
        torch.testing.assert_close(
            gradient(rows, cuts, capacity, lora),
            whole,
            atol=3e-7,
            rtol=2e-4,
        )


def test_sharing_a_prompt_does_not_change_the_gradient():
    rows = answers()
    apart = gradient(rows, [[i] for i in range(9)], lora=True)
    uneven = [[0, 3], [6, 1, 4], [7, 2, 5, 8]]
    for cuts, capacity, limit in (
        ([range(9)], None, 500),
        (uneven, None, 500),
        ([range(9)], 90, 90),
        ([range(9)], None, 26),
    ):
        torch.testing.assert_close(
            gradient(rows, cuts, capacity, True, document_tokens=limit),
            apart,
            atol=3e-7,
            rtol=2e-4,
        )


def test_layers_below_the_adapters_are_computed_once():
    model = add_adapter(
        tiny_model(1, layers=3).requires_grad_(False).eval(),
        "policy",
        LoraConfig(rank=4, last_layers=1),
        seed=1,
    )
    policy, base = Role(model, "policy"), Role(model)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05)
    batch = make_batch(answers(), 0, document_tokens=500)
    whole = [role.hidden(batch) for role in (policy, base)]
    assert policy.common_depth == base.common_depth == 2
    common = policy.common(batch)
    calls = []
    hooks = [
        layer.mlp.register_forward_hook(lambda *_: calls.append(1))
        for layer in policy.decoder.layers
    ]
    assert all(
        torch.equal(role.hidden(batch, common), hidden)
        for role, hidden in zip((policy, base), whole, strict=True)
    )
    assert len(calls) == 2  # the top layer, once a role
    for hook in hooks:
        hook.remove()
    assert torch.equal(policy.hidden(batch), whole[0])  # and nothing is left behind
    trained = [p.requires_grad_(True) for p in policy.parameters()]
    gradients = [
        torch.autograd.grad(policy.logprobs(batch, common=c)[0].sum(), trained)
        for c in (None, common)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    policy.train_mode(True)
    assert policy.common(batch) is None


def test_a_model_trained_whole_has_nothing_in_common():
    model = tiny_model(1)
    assert Role(model).common_depth == 0 and Role(model).common(make_batch(sequences(2), 0)) is None
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    assert Role(model).common_depth == 1
    model.get_input_embeddings().requires_grad_(True)
    assert Role(model).common_depth == 0


def test_bfloat16_weights_take_small_steps_through_their_masters():
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    learner = LocalLearner(
        [weight],
        OptimizerConfig(
            learning_rate=1e-4,
            warmup_fraction=0,
            schedule="constant",
            weight_decay=0.0,
        ),
        1000,
    )
    for _ in range(100):
        learner.backward((weight.float() * torch.tensor([1.0, -1.0, 1.0, 1.0])).sum())
        learner.step()
    assert weight.dtype == torch.bfloat16
    torch.testing.assert_close(
        learner.masters[0].detach(),
        torch.tensor([0.99, 1.01, 0.99, 0.99]),
        atol=2e-4,
        rtol=0,
    )
    # 1e-4 a step alone would never have moved a bfloat16 weight of 1
    assert (weight.float() - 1).abs().min() > 0.005


def test_accumulation_in_float32_keeps_what_bfloat16_would_lose():
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    learner = LocalLearner([weight], OptimizerConfig(learning_rate=1e-5), 10)
    learner.backward((weight * 256.0).sum().float())
    for _ in range(64):
        learner.backward((weight * 0.5).sum().float())
    assert float(learner.masters[0].grad) == 256.0 + 32.0


def test_learner_state_continues_exactly():
    def fresh():
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(5, 3).to(torch.bfloat16))
        return weight, LocalLearner(
            [weight],
            OptimizerConfig(learning_rate=1e-2, weight_decay=0.1),
            6,
        )

    def advance(weight, learner, steps):
        for _ in range(steps):
            learner.backward(((weight.float() - 1) ** 2).sum() * (1 + learner.updates))
            learner.step()

    weight, learner = fresh()
    advance(weight, learner, 6)
    first, half = fresh()
    advance(first, half, 2)
    tensors, values = half.state()
    tensors = {k: v.clone() for k, v in tensors.items()}
    other, resumed = fresh()
    resumed.load_state(tensors, values)
    advance(other, resumed, 4)
    assert torch.equal(other, weight)
    assert torch.equal(resumed.masters[0], learner.masters[0])


def test_adapters_stand_beside_each_other_and_the_base_is_the_reference():
    model = tiny_model(1).requires_grad_(False)
    batch = make_batch(sequences(4), 0)
    reference = Role(model).logprobs(batch)[0]
    model = add_adapter(model, "policy", LoraConfig(rank=4), seed=1)
    model = add_adapter(model, "reward", LoraConfig(rank=4), seed=2)
    policy, base, reward = Role(model, "policy"), Role(model), Role(model, "reward")
    # B starts at zero: the policy starts as the reference, to the bit
    assert torch.equal(policy.logprobs(batch)[0], reference)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05)
    assert not torch.allclose(policy.logprobs(batch)[0], reference, atol=1e-3)
    assert torch.equal(base.logprobs(batch)[0], reference)
    assert torch.equal(reward.logprobs(batch)[0], reference)
    names = {id(p) for p in policy.parameters()} & {id(p) for p in reward.parameters()}
    assert not names
