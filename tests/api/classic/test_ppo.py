"""The classic step against a plain one written out in torch, its options by hand, and what generate
returns.
"""

import functools
import operator

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from tether.classic import (
    AutoModelForCausalLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
)
from tether.core.errors import ConfigError, DataError, ModelError

QUERIES = [torch.tensor(ids) for ids in ([70, 71, 72], [80], [90, 91], [100, 101, 102, 103])]
RESPONSES = [torch.tensor(ids) for ids in ([200, 201, 202, 203], [210, 211, 1], [220], [230, 231])]
SCORES = [torch.tensor(s) for s in (1.5, -0.5, 0.25, 2.0)]


def make(folder, tokenizer, head=0.05, **settings):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    with torch.no_grad():
        model.v_head.linear.weight.copy_(
            head * torch.randn(1, 64, generator=torch.Generator().manual_seed(1)),
        )
    config = PPOConfig(
        **{
            "batch_size": 4,
            "ppo_epochs": 2,
            "learning_rate": 1e-3,
            "init_kl_coef": 0.1,
            **settings,
        },
    )
    return PPOTrainer(config, model, tokenizer=tokenizer)


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def drift(trainer):
    """Move the policy off its reference, so that there is a KL."""
    with torch.no_grad():
        noise = torch.Generator().manual_seed(2)
        for parameter in trainer.model.pretrained_model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=noise)
    return trainer


def table(model, query, response, temperature=1.0):
    """Log-probabilities (time, vocab) and values (time,) of a response, from the wrapper's own
    forward pass.
    """
    logits, _, values = model(torch.cat([query, response])[None])
    places = slice(len(query) - 1, -1)
    return (logits[0, places] / temperature).log_softmax(-1), values[0, places]


def plain_step(
    model,
    reference,
    *,
    epochs,
    rate,
    beta,
    temperature,
    clip=0.2,
    value_clip=0.2,
    vf_coef=0.1,
    lam=0.95,
):
    """PPO as the papers have it: one sum a response, one loop a token, torch's own Adam."""
    old, targets, advantages = [], [], []
    with torch.no_grad():
        for query, response, score in zip(QUERIES, RESPONSES, SCORES, strict=True):
            (ours, values), (theirs, _) = (
                table(m, query, response, temperature) for m in (model, reference)
            )
            picked = ours.gather(-1, response[:, None])[:, 0]
            rewards = -beta * (picked - theirs.gather(-1, response[:, None])[:, 0])
            rewards[-1] += score
            advantage, estimates = 0.0, []
            for t in reversed(range(len(response))):
                following = values[t + 1] if t + 1 < len(response) else 0.0
                advantage = rewards[t] + following - values[t] + lam * advantage
                estimates.insert(0, advantage)
            estimates = torch.stack(estimates)
            old.append((picked, values))
            targets.append(estimates + values)
            advantages.append(estimates)
    every = torch.cat(advantages)
    advantages = [(a - every.mean()) / (every.var(correction=0) + 1e-8).sqrt() for a in advantages]
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(epochs):
        loss = 0.0
        for n, (query, response) in enumerate(zip(QUERIES, RESPONSES, strict=True)):
            ours, values = table(model, query, response, temperature)
            ratio = (ours.gather(-1, response[:, None])[:, 0] - old[n][0]).exp()
            gain = torch.minimum(
                ratio * advantages[n],
                ratio.clamp(1 - clip, 1 + clip) * advantages[n],
            )
            near = torch.maximum(
                torch.minimum(values, old[n][1] + value_clip),
                old[n][1] - value_clip,
            )
            error = torch.maximum((values - targets[n]) ** 2, (near - targets[n]) ** 2)
            loss = loss + (-gain + vf_coef * 0.5 * error).sum() / len(every)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_step_is_the_plain_one(folder, tokenizer, temperature):
    ours, theirs = (drift(make(folder, tokenizer, ppo_epochs=3)) for _ in range(2))
    ours.temperature = temperature
    start = weights(ours.model)
    stats = ours.step(QUERIES, RESPONSES, SCORES)
    plain_step(
        theirs.model,
        theirs.ref_model,
        epochs=3,
        rate=1e-3,
        beta=0.1,
        temperature=temperature,
    )
    assert (weights(ours.model) - start).abs().max() > 2e-3
    # A gradient next to nothing may round to either sign, and Adam's step is the sign: nearly all
    # weights must agree.
    apart = (weights(ours.model) - weights(theirs.model)).abs()
    assert apart.quantile(0.999) < 1e-5 and apart.max() < 1e-4
    assert stats["ppo/learning_rate"] == 1e-3 and stats["objective/kl_coef"] == 0.1


def test_accumulation_does_not_change_the_step(folder, tokenizer):
    whole, halves = (
        make(folder, tokenizer),
        make(folder, tokenizer, mini_batch_size=1, gradient_accumulation_steps=4),
    )
    for trainer in (whole, halves):
        trainer.step(QUERIES, RESPONSES, SCORES)
    assert (weights(whole.model) - weights(halves.model)).abs().quantile(0.999) < 1e-5
    quarters = make(folder, tokenizer, mini_batch_size=1)
    quarters.step(QUERIES, RESPONSES, SCORES)
    assert (
        quarters.stage.learner.updates == 8
        and whole.stage.learner.updates == halves.stage.learner.updates == 2
    )


def test_statistics_by_hand(folder, tokenizer):
    trainer = drift(make(folder, tokenizer, ppo_epochs=1))
    with torch.no_grad():
        pairs = list(zip(QUERIES, RESPONSES, strict=True))
        logs = [
            [table(m, q, r)[0].gather(-1, r[:, None])[:, 0] for q, r in pairs]
            for m in (trainer.model, trainer.ref_model)
        ]
        values = torch.cat([table(trainer.model, q, r)[1] for q, r in pairs])
        tables = torch.cat([table(trainer.model, q, r)[0] for q, r in pairs])
    stats = trainer.step(QUERIES, RESPONSES, SCORES)
    kl = torch.stack([(a - b).sum() for a, b in zip(*logs, strict=True)])
    expected = {
        "objective/kl": kl.mean(),
        "ppo/mean_scores": 3.25 / 4,
        "ppo/std_scores": torch.stack(SCORES).std(correction=0),
        "ppo/val/mean": values.mean(),
        "ppo/policy/entropy": -(tables.exp() * tables).sum(-1).mean(),
        "ppo/policy/approxkl": 0.0,  # one pass of one epoch, before its update
        "ppo/policy/clipfrac": 0.0,
        "tokens/responses_len_mean": 2.5,
    }
    for name, value in expected.items():
        assert stats[name] == pytest.approx(float(value), abs=2e-5), name
    error = min(max(float(kl.mean()) / 6.0 - 1, -0.2), 0.2)
    assert trainer.stage.kl_coefficient == pytest.approx(0.1 * (1 + error * 4 / 10_000))


def test_rewards_are_the_score_at_the_end_and_the_kl_of_each_token(folder, tokenizer):
    trainer = drift(make(folder, tokenizer, adap_kl_ctrl=False, score_clip=1.0))
    with torch.no_grad():
        query, response = QUERIES[0], RESPONSES[0]
        ours, theirs = (table(m, query, response)[0] for m in (trainer.model, trainer.ref_model))
        difference = (ours - theirs).gather(-1, response[:, None])[:, 0]
    trainer.step(QUERIES, RESPONSES, SCORES)
    rewards = -0.1 * difference + torch.tensor([0, 0, 0, 1.0])
    torch.testing.assert_close(trainer.stage.experience.rewards[0], rewards, atol=1e-5, rtol=0)


def test_early_stopping_ends_the_epochs(folder, tokenizer):
    settings = {"learning_rate": 1e-2, "ppo_epochs": 6}
    patient, hasty = (
        make(folder, tokenizer, **settings),
        make(folder, tokenizer, early_stopping=True, target_kl=1e-6, **settings),
    )
    for trainer in (patient, hasty):
        trainer.step(QUERIES, RESPONSES, SCORES)
    assert patient.stage.learner.updates == 6 > hasty.stage.learner.updates


def test_scores_that_are_no_numbers_teach_nothing(folder, tokenizer):
    trainer = make(folder, tokenizer)
    stats = trainer.step(QUERIES, RESPONSES, [1.0, float("nan"), 2.0, 3.0])
    assert (
        trainer.stage.experience.mask.any(-1).tolist() == [True, False, True, True]
        and stats["ppo/mean_scores"] == 2.0
    )


def test_gradients_are_clipped_in_every_update(folder, tokenizer):
    free, bound = make(folder, tokenizer), make(folder, tokenizer, max_grad_norm=1e-12)
    before = weights(bound.model)
    for trainer in (free, bound):
        trainer.step(QUERIES, RESPONSES, SCORES)
    # Adam divides the scale of a gradient out, but for its epsilon: 1e-8 beside gradients that are
    # below 1e-12.
    assert (
        0
        < (weights(bound.model) - before).abs().max()
        < 1e-6
        < (weights(free.model) - before).abs().max()
    )


def test_generate_returns_what_the_classic_did(folder, tokenizer):
    trainer = make(folder, tokenizer)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    greedy = [plain.generate(q[None], max_new_tokens=6, do_sample=False)[0] for q in QUERIES]
    with pytest.warns(UserWarning, match="'do_sample': False"):
        found = trainer.generate(QUERIES, batch_size=3, max_new_tokens=6, do_sample=False)
    # whatever the padding beside it
    assert all(torch.equal(a, b) for a, b in zip(found, greedy, strict=True))
    bare = trainer.generate(
        QUERIES,
        return_prompt=False,
        max_new_tokens=6,
        top_k=0.0,
        top_p=1.0,
        min_length=-1,
    )
    assert [r.dim() for r in bare] == [1] * 4 and all(len(r) <= 6 for r in bare)
    assert trainer.generate(QUERIES[0], max_new_tokens=3).shape == (1, 6)
    sampled = trainer.generate(
        QUERIES,
        batch_size=2,
        return_prompt=False,
        max_new_tokens=3,
        eos_token_id=-1,
    )
    assert [len(r) for r in sampled] == [3, 3, 3, 3]
    for removed in ({"length_sampler": lambda: 3}, {"generate_ref_response": True}):
        with pytest.raises(ValueError, match="are not used by the model"):
            trainer.generate(QUERIES, **removed)
    with pytest.raises(DataError, match="one sequence without padding"):
        trainer.generate(torch.ones(2, 5, dtype=torch.long), max_new_tokens=3)


def test_a_stop_token_ends_a_response_and_not_its_prompt(folder, tokenizer):
    trainer, query = make(folder, tokenizer), torch.tensor([70, 1, 71])
    (response,) = trainer.generate([query], max_new_tokens=40, eos_token_id=list(range(5, 120)))
    assert response[:3].tolist() == [70, 1, 71]
    answer = response[3:]
    assert (
        1 <= len(answer) < 40
        and 5 <= answer[-1] < 120
        and not ((answer[:-1] >= 5) & (answer[:-1] < 120)).any()
    )


def test_generation_ignores_a_models_taste_for_chatting(folder, tokenizer):
    trainer = make(folder, tokenizer)
    trainer.model.generation_config.update(do_sample=True, top_k=1, repetition_penalty=1.5)
    many = trainer.generate([QUERIES[0]] * 16, batch_size=16, return_prompt=False, max_new_tokens=2)
    assert len({tuple(r.tolist()) for r in many}) > 8


def test_step_names_what_does_not_fit(folder, tokenizer):
    trainer = make(folder, tokenizer)
    with pytest.raises(DataError, match="batch_size = 4; got 5"):
        trainer.step([*QUERIES, QUERIES[0]], [*RESPONSES, RESPONSES[0]], [*SCORES, SCORES[0]])
    with pytest.raises(DataError, match="at least one token"):
        trainer.step(QUERIES[:1], [torch.tensor([], dtype=torch.long)], SCORES[:1])
    # the last batch of a data set may be smaller
    trainer.step(QUERIES[:3], RESPONSES[:3], SCORES[:3])


def test_forward_gives_logits_loss_and_values(folder):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    torch.nn.init.normal_(model.v_head.linear.weight)
    ids = torch.tensor([[70, 71, 72, 73]])
    logits, loss, values = model(ids, labels=ids, attention_mask=torch.ones_like(ids))
    plain = AutoModelForCausalLM.from_pretrained(folder)(ids, labels=ids, output_hidden_states=True)
    assert torch.equal(logits, plain.logits) and torch.equal(loss, plain.loss)
    head = model.v_head.linear
    torch.testing.assert_close(
        values,
        (plain.hidden_states[-1] @ head.weight.T + head.bias)[..., 0],
    )
    assert model.config.vocab_size == 261 and model.device.type in ("cpu", "cuda")


def test_saved_models_reload_to_the_same_numbers(folder, tokenizer, tmp_path):
    trainer = make(folder, tokenizer)
    trainer.step(QUERIES, RESPONSES, SCORES)
    trainer.save_pretrained(tmp_path)
    ids = torch.tensor([[70, 71, 72, 73]])
    logits, _, values = trainer.model(ids)
    again = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path))(ids)
    assert torch.equal(again[0], logits) and torch.equal(again[2], values)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, logits)
    fresh = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    fresh.load_state_dict(trainer.model.state_dict())
    assert torch.equal(fresh(ids)[2], values)


def test_an_adapter_is_the_policy_and_its_absence_the_reference(folder, tokenizer, tmp_path):
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder, peft_config=lora)
    trainer = PPOTrainer(
        PPOConfig(batch_size=4, ppo_epochs=2, learning_rate=1e-2),
        model,
        tokenizer=tokenizer,
    )
    base = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    first, second = (trainer.step(QUERIES, RESPONSES, SCORES) for _ in range(2))
    assert trainer.ref_model is None and abs(first["objective/kl"]) < 1e-5 < abs(
        second["objective/kl"],
    )
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters() if n in base)
    trainer.generate(QUERIES, max_new_tokens=3)
    trainer.save_pretrained(tmp_path)
    again = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path))
    ids = torch.tensor([[70, 71, 72, 73]])
    torch.testing.assert_close(again(ids)[0], model(ids)[0])
    torch.testing.assert_close(again(ids)[2], model(ids)[2])


def test_a_reference_never_holds_what_is_trained(folder, tokenizer):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    for parameter in model.pretrained_model.model.layers[0].parameters():
        parameter.requires_grad_(False)  # by the user, and so it stays
    trainer = PPOTrainer(
        PPOConfig(batch_size=4, ppo_epochs=2),
        model,
        create_reference_model(model),
        tokenizer,
    )
    layers, copies = (m.pretrained_model.model.layers for m in (model, trainer.ref_model))
    before = [layer.mlp.up_proj.weight.detach().clone() for layer in layers]
    trainer.step(QUERIES, RESPONSES, SCORES)
    assert torch.equal(layers[0].mlp.up_proj.weight, before[0]) and not torch.equal(
        layers[1].mlp.up_proj.weight,
        before[1],
    )
    assert torch.equal(copies[1].mlp.up_proj.weight, before[1])
    with pytest.raises(ModelError, match="the KL would always be 0"):
        PPOTrainer(PPOConfig(batch_size=4), model, model, tokenizer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_range": 0.2}, "did you mean 'cliprange'"),
        ({"batch_size": 10, "mini_batch_size": 4}, "must be a multiple of mini_batch_size"),
        ({"adap_kl_ctrl": False, "target": 3.0}, "no effect with adap_kl_ctrl=False"),
        ({"learning_rate": -1.0}, "key 'learning_rate': Input should be greater than 0"),
        ({"kl_penalty": "full"}, "key 'kl_penalty': Input should be 'kl'"),
    ],
)
def test_settings_that_cannot_be_had_are_refused_in_one_sentence(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        PPOConfig(**settings)
    assert "\n" not in str(caught.value)


REMOVED = (
    "steps exp_name task_name query_dataset reward_model remove_unused_columns tracker_kwargs "
    "tracker_project_name "
    "project_kwargs accelerator_kwargs dataset_num_proc forward_batch_size optimize_cuda_cache "
    "optimize_device_cache "
    "gradient_checkpointing push_to_hub_if_best_kwargs compare_steps world_size is_peft_model "
    "is_encoder_decoder "
    "backward_batch_size global_batch_size global_backward_batch_size ratio_threshold "
    "use_score_scaling "
    "use_score_norm whiten_rewards"
)


@pytest.mark.parametrize("name", REMOVED.split())
def test_removed_keys_of_the_classic_are_refused_by_name(name):
    with pytest.raises(
        ConfigError,
        match=(f"^PPOConfig: unknown key '{name}' .*; see docs/guides/classic.md$"),
    ):
        PPOConfig(**{name: True})


def test_arguments_that_the_classic_had_beside_are_refused(folder, tokenizer):
    trainer = make(folder, tokenizer)
    for call, name in [
        (
            lambda **given: PPOTrainer(trainer.config, trainer.model, tokenizer=tokenizer, **given),
            "optimizer",
        ),
        (
            lambda **given: PPOTrainer(trainer.config, trainer.model, tokenizer=tokenizer, **given),
            "num_shared_layers",
        ),
        (lambda **given: trainer.step(QUERIES, RESPONSES, SCORES, **given), "response_masks"),
        (lambda **given: create_reference_model(trainer.model, **given), "num_shared_layers"),
        (
            lambda **given: AutoModelForCausalLMWithValueHead.from_pretrained(folder, **given),
            "v_head_init_strategy",
        ),
    ]:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            call(**{name: None})


def test_batches_and_passes():
    config = PPOConfig(batch_size=64, model_name="gpt2")
    assert config.mini_batch == 64 and PPOConfig(batch_size=256).mini_batch == 128
    # the string cut: nothing to adapt
    assert PPOConfig(init_kl_coef=0.0).policy_config().kl.mode == "fixed"


def batches(folder, tokenizer, collator):
    """Batches of the numbers 0 to 5, two each."""
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    config = PPOConfig(batch_size=2, mini_batch_size=2)
    trainer = PPOTrainer(
        config,
        model,
        tokenizer=tokenizer,
        dataset=list(range(6)),
        data_collator=collator,
    )
    return list(trainer.dataloader)


def test_a_batch_is_what_the_collator_made(folder, tokenizer):
    plain = batches(folder, tokenizer, list)
    assert sorted(functools.reduce(operator.iadd, plain, [])) == list(range(6))
    huge = batches(folder, tokenizer, lambda rows: {"ids": [10**400 for _ in rows]})
    assert huge == [{"ids": [10**400] * 2}] * 3
    with pytest.raises(ZeroDivisionError):
        batches(folder, tokenizer, lambda rows: 1 / 0)
