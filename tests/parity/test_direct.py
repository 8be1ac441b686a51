"""The direct methods against TRL's own trainers: the same tiny models and token ids, losses and
gradients.

TRL comes with the `dev` extra; without it these tests are skipped. What TRL does otherwise on
purpose of ours stands in docs/methods/direct.md.
"""

from __future__ import annotations

import pytest
import torch
import trl

from tether.core.types import Comparison, Feedback, assistant, user
from tether.data.chat import ChatEncoder
from tether.data.prepare import Limit, encode_comparisons, encode_feedback, mismatched
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.settings.supervised import DirectConfig, KTOConfig
from tether.stages.direct import Direct
from tether.stages.kto import KTO

ENCODER = ChatEncoder(tiny_tokenizer(), (1,))
TEXTS = [
    ("a question", "yes", "no, never"),
    ("another", "one two three", "four"),
    ("third?", "x", "a rather longer answer"),
]
EVEN = [
    ("a question", "yes, I think", "no, never"),
    ("another", "one two four", "four"),
    ("third?", "twelve signs", "no"),
]
TRAINING = {
    "use_cpu": True,
    "report_to": [],
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_dropout": True,
}


def rankings_of(texts):
    rows = [
        Comparison((user(p),), (assistant(c),), (assistant(r),), group=str(n))
        for n, (p, c, r) in enumerate(texts)
    ]
    return encode_comparisons(rows, ENCODER, Limit(500))[0]


def ours(texts, **settings):
    config = DirectConfig(**settings)
    policy, frozen = (
        Role(tiny_model(0)),
        None if config.loss in ("orpo", "simpo") else Role(tiny_model(7).requires_grad_(False)),
    )
    loss, _ = Direct(config, policy, frozen, ENCODER).pairs(rankings_of(texts), len(texts))
    loss.backward()
    return loss, policy.model


def same(ours, theirs):
    """Loss and gradients, to the rounding of float32."""
    (loss, model), (their_loss, their_model) = ours, theirs
    their_loss.backward()
    torch.testing.assert_close(loss, their_loss, atol=1e-6, rtol=1e-5)
    gradients = {name: p.grad for name, p in their_model.named_parameters()}
    for name, parameter in model.named_parameters():
        limit = 1e-5 * float(gradients[name].abs().max())
        assert limit > 0
        torch.testing.assert_close(
            parameter.grad,
            gradients[name],
            atol=max(limit, 1e-7),
            rtol=1e-3,
        )


def dataset(*columns):
    from datasets import Dataset

    return Dataset.from_list([{name: True if name == "label" else f" {name}" for name in columns}])


def pieces(ranking):
    """Prompt, chosen and rejected ids of a pair."""
    head = ranking.sequences[0].prompt_length
    return [list(ranking.sequences[0].ids[:head])] + [
        list(ranking.sequences[i].ids[head:]) for i in (0, 1)
    ]


def dpo(tmp_path, texts, **settings):
    config = trl.DPOConfig(output_dir=str(tmp_path), **TRAINING, **settings)
    model = tiny_model(0)
    trainer = trl.DPOTrainer(
        model=model,
        ref_model=tiny_model(7),
        args=config,
        train_dataset=dataset("prompt", "chosen", "rejected"),
        processing_class=tiny_tokenizer(),
    )
    examples = [
        dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), pieces(r), strict=True))
        for r in rankings_of(texts)
    ]
    return trainer.compute_loss(trainer.model, trainer.data_collator(examples)), trainer.model


@pytest.mark.parametrize(
    ("settings", "theirs", "texts"),
    [
        ({"loss": "dpo", "beta": 0.3}, {"loss_type": ["sigmoid"], "beta": 0.3}, TEXTS),
        ({"loss": "ipo", "beta": 0.3, "average": True}, {"loss_type": ["ipo"], "beta": 0.3}, TEXTS),
        (
            {"loss": "robust", "beta": 0.3, "label_smoothing": 0.1},
            {"loss_type": ["robust"], "beta": 0.3, "label_smoothing": 0.1},
            TEXTS,
        ),
        # One pair sorts into itself, and is then the conservative loss that TRL has under no name
        # of its own.
        (
            {"loss": "dpo", "beta": 0.3, "label_smoothing": 0.1},
            {"loss_type": ["aot"], "beta": 0.3, "label_smoothing": 0.1},
            TEXTS[:1],
        ),
        # Chosen responses of one length: TRL's likelihood is a mean over tokens, ours over
        # responses.
        (
            {"loss": "dpo", "beta": 0.3, "likelihood_weight": 0.5},
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.3},
            EVEN,
        ),
    ],
    ids=["dpo", "ipo", "robust", "cdpo", "rpo"],
)
def test_pairs_with_a_reference(settings, theirs, texts, tmp_path):
    same(ours(texts, **settings), dpo(tmp_path, texts, **theirs))


def test_the_sum_in_ipo_is_not_trls_mean(tmp_path):
    """The deviation itself: summed log ratios, as the paper has them."""
    loss, _ = ours(TEXTS, loss="ipo", beta=0.3)
    assert loss.item() > 2 * dpo(tmp_path, TEXTS, loss_type=["ipo"], beta=0.3)[0].item()


def batch(texts):
    """What TRL's older trainers take."""
    from torch.nn.utils.rnn import pad_sequence

    made = {}
    for side, index in (("chosen", 0), ("rejected", 1)):
        sequences = [r.sequences[index] for r in rankings_of(texts)]
        ids = [torch.tensor(s.ids) for s in sequences]
        labels = [
            torch.where(torch.tensor(s.trained), torch.tensor(s.ids), -100) for s in sequences
        ]
        made[f"{side}_input_ids"] = pad_sequence(ids, batch_first=True, padding_value=0)
        made[f"{side}_attention_mask"] = pad_sequence(
            [torch.ones_like(i) for i in ids],
            batch_first=True,
        )
        made[f"{side}_labels"] = pad_sequence(labels, batch_first=True, padding_value=-100)
    return made


def test_simpo(tmp_path):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    settings = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}
    config = CPOConfig(output_dir=str(tmp_path), max_length=500, **TRAINING, **settings)
    model = tiny_model(0)
    trainer = CPOTrainer(
        model,
        args=config,
        train_dataset=dataset("prompt", "chosen", "rejected"),
        processing_class=tiny_tokenizer(),
    )
    same(
        ours(TEXTS, loss="simpo", beta=2.0, margin=0.5),
        (trainer.get_batch_loss_metrics(model, batch(TEXTS))[0], model),
    )


def test_odds_ratio(tmp_path):
    """The odds term alone: beside it TRL takes the likelihood of prompts too."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    config, model = (
        ORPOConfig(output_dir=str(tmp_path), max_length=500, beta=0.3, **TRAINING),
        tiny_model(0),
    )
    trainer = ORPOTrainer(
        model,
        args=config,
        train_dataset=dataset("prompt", "chosen", "rejected"),
        processing_class=tiny_tokenizer(),
    )
    chosen, rejected, *_ = trainer.concatenated_forward(model, batch(TEXTS))
    theirs = -trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    same(ours(TEXTS, loss="orpo", beta=0.3, likelihood_weight=0.0), (theirs, model))


@pytest.mark.parametrize(("policy", "reference"), [(0, 7), (7, 0)])
def test_kto(policy, reference, tmp_path):
    """With the same mismatched pairs in one batch; once z0 is clamped at 0, once it is above."""
    rows = [Feedback((user(p),), (assistant(c),), n != 1) for n, (p, c, _) in enumerate(TEXTS)]
    judged = encode_feedback(rows, ENCODER, Limit(500))[0]
    weights = {"beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 2.0}
    stage = KTO(
        KTOConfig(**weights),
        Role(tiny_model(policy)),
        Role(tiny_model(reference).requires_grad_(False)),
        ENCODER,
    )
    stage.weights = {"desirable_weight": 1.0, "undesirable_weight": 2.0}
    z0, _ = stage.baseline(judged)
    loss, _ = stage.loss(judged, z0, 3)
    loss.backward()
    trainer = trl.KTOTrainer(
        model=tiny_model(policy),
        ref_model=tiny_model(reference),
        args=trl.KTOConfig(output_dir=str(tmp_path), **TRAINING, **weights),
        train_dataset=dataset("prompt", "completion", "label"),
        processing_class=tiny_tokenizer(),
    )
    others = {
        s.ids[: s.prompt_length]: s.ids[s.prompt_length :] for s, _ in mismatched(judged, 500)
    }
    examples = []
    for one in judged:
        (sequence,), (desirable,) = one.sequences, one.desirable
        prompt, answer = (
            sequence.ids[: sequence.prompt_length],
            sequence.ids[sequence.prompt_length :],
        )
        ids = {
            "prompt_ids": list(prompt),
            "completion_ids": list(answer),
            "KL_completion_ids": list(others[prompt]),
        }
        examples.append({**ids, "label": desirable})
    theirs = trainer.compute_loss(trainer.model, trainer.data_collator(examples))
    same((loss, stage.role.model), (theirs, trainer.model))
    assert (z0 > 0) == (policy == 7)
    assert trainer._metrics["train"]["kl"] == [pytest.approx(z0, rel=1e-5, abs=1e-6)]
