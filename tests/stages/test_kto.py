"""KTO against a double loop over single responses on the plain model; and a tiny model that learns
from verdicts.
"""

import itertools
import json
import math
import random

import pytest
import torch

from tether.core.errors import ConfigError, DataError
from tether.core.rundir import RunDirectory
from tether.core.types import Feedback, assistant, user
from tether.data.chat import ChatEncoder
from tether.data.prepare import Limit, cut_rankings, encode_feedback, mismatched
from tether.data.sources import read
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig
from tether.settings.reading import build
from tether.settings.supervised import KTOConfig
from tether.stages.kto import KTO, separation
from tether.stages.learner.checkpoint import complete_checkpoints
from tether.stages.learner.local import LocalLearner
from tether.stages.supervised import make_step

ENCODER = ChatEncoder(tiny_tokenizer(), (1,))


def verdict(prompt, response, desirable):
    return Feedback((user(prompt),), (assistant(response),), desirable)


ROWS = [
    verdict("a question", "yes", True),
    verdict("a question", "no, never", False),
    verdict("a question", "yes", True),
    verdict("another", "one two three", True),
    verdict("third?", "x", False),
    verdict("a fourth, and a rather longer one", "a rather longer answer than x", True),
]


def make(roles="lora", policy=0, reference=7, **settings):
    config = KTOConfig(
        **{"optimizer": OptimizerConfig(learning_rate=3e-3), "heldout_fraction": 0.0, **settings},
    )
    base = tiny_model(policy).requires_grad_(False).eval()
    if roles == "lora":
        model = add_adapter(base, "policy", LoraConfig(rank=8), seed=1)
        return KTO(config, Role(model, "policy"), Role(model), ENCODER)
    return KTO(config, Role(base.requires_grad_(True)), Role(tiny_model(reference).eval()), ENCODER)


def encoded(rows=ROWS, max_length=500):
    return encode_feedback(rows, ENCODER, Limit(max_length))[0]


def plain_logprob(model, sequence):
    table = model(input_ids=torch.tensor([sequence.ids])).logits[0].log_softmax(-1)
    return sum(table[t - 1, sequence.ids[t]] for t, counts in enumerate(sequence.trained) if counts)


def update_of(stage, judged):
    """Metrics of one update, and the gradient that it took."""
    grabbed = []
    learner = LocalLearner(stage.role.parameters(), stage.config.optimizer, 10)
    original = learner.step
    learner.step = lambda: (grabbed.extend(m.grad.clone() for m in learner.masters), original())[1]
    return make_step(stage, learner, judged), grabbed


@pytest.mark.parametrize("tokens", [40, 10_000])
@pytest.mark.parametrize(("policy", "reference", "above_zero"), [(0, 7, False), (7, 0, True)])
def test_loss_and_gradient_are_those_of_a_double_loop(policy, reference, above_zero, tokens):
    settings = {"desirable_weight": 1.0, "undesirable_weight": 1.7, "beta": 0.2}
    stage = make("whole", policy, reference, micro_batch_tokens=tokens, **settings)
    stage.weights = stage.config.weights(4, 2)
    model, frozen = tiny_model(policy), tiny_model(reference)
    with torch.no_grad():
        pairs = mismatched(encoded(), 500)
        ratios = [
            float(plain_logprob(model, s) - plain_logprob(frozen, s))
            for s, count in pairs
            for _ in range(count)
        ]
    assert len(ratios) == len(ROWS)
    z0 = max(0.0, sum(ratios) / len(ratios))
    assert (z0 > 0) == above_zero
    total = torch.zeros(())
    for row in ROWS:
        sequence = ENCODER.conversation((*row.prompt, *row.response), "last")
        with torch.no_grad():
            before = plain_logprob(frozen, sequence)
        ratio = plain_logprob(model, sequence) - before
        if row.desirable:
            total = total + 1.0 * (1 - 1 / (1 + torch.exp(-0.2 * (ratio - z0))))
        else:
            total = total + 1.7 * (1 - 1 / (1 + torch.exp(-0.2 * (z0 - ratio))))
    (total / len(ROWS)).backward()
    metrics, gradient = update_of(stage, encoded())
    assert metrics["loss"] == pytest.approx(total.item() / len(ROWS), rel=1e-5)
    assert metrics["kl_baseline"] == pytest.approx(z0, rel=1e-4) and metrics["mismatched"] == len(
        ROWS,
    )
    for ours, theirs in zip(gradient, model.parameters(), strict=True):
        torch.testing.assert_close(
            ours,
            theirs.grad,
            atol=max(1e-6, 1e-5 * float(theirs.grad.abs().max())),
            rtol=1e-3,
        )


def test_every_response_meets_one_prompt_that_is_not_its_own_whatever_the_order():
    judged = encoded()
    pairs = mismatched(judged, 500)
    own = {s.ids[s.prompt_length :]: s.ids[: s.prompt_length] for j in judged for s in j.sequences}
    found = {s.ids[s.prompt_length :]: s.ids[: s.prompt_length] for s, _ in pairs}
    assert found.keys() == own.keys() and not any(found[answer] == own[answer] for answer in own)
    # a rotation: no prompt is used up twice
    assert {own[a]: found[a] for a in own}.keys() == set(found.values())
    assert sum(count for _, count in pairs) == len(ROWS) and max(count for _, count in pairs) == 2
    for order in itertools.islice(itertools.permutations(judged), 24):
        assert sorted(mismatched(order, 500), key=lambda p: p[0].ids) == sorted(
            pairs,
            key=lambda p: p[0].ids,
        )


def test_a_pair_that_is_too_long_is_left_out_and_a_lone_prompt_has_none():
    longest = max(len(s) for s, _ in mismatched(encoded(), 500))
    assert len(mismatched(encoded(), longest - 1)) == len(mismatched(encoded(), 500)) - 1
    stage = make("whole", 7, 0)
    assert stage.baseline(encoded(ROWS[:3])) == (0.0, 0)
    with torch.no_grad():
        assert stage.evaluate(encoded(ROWS[:3]))["mismatched"] == 0


def exactly(stage, judged):
    """z0, loss and gradient of an update in float64, micro-batch by micro-batch."""
    for role in (stage.role, stage.likelihoods.reference):
        role.model.double()
    z0, _ = stage.baseline(judged)
    cuts, count = (
        cut_rankings(
            judged,
            stage.config.micro_batch_tokens,
            document_tokens=stage.likelihoods.document_tokens,
        ),
        len(ROWS),
    )
    losses = [stage.loss(micro, z0, count)[0] for micro in cuts]
    for loss in losses:
        loss.backward()
    return (
        len(cuts),
        z0,
        torch.stack(losses).sum().detach(),
        [p.grad for p in stage.role.parameters()],
    )


def test_rows_padding_sharing_and_cuts_change_nothing(monkeypatch):
    """The same update in any order, one prompt a micro-batch or all, prompts shared or written
    out.
    """
    one, z0, loss, gradient = exactly(make("whole", 7, 0), encoded())
    assert z0 > 0
    shuffled = list(ROWS)
    random.Random(3).shuffle(shuffled)
    others = [
        exactly(make("whole", 7, 0), encoded(shuffled)),
        exactly(make("whole", 7, 0, micro_batch_tokens=8), encoded()),
    ]
    monkeypatch.setattr(Role, "document_tokens", lambda self, budget: 0)
    others.append(exactly(make("whole", 7, 0), encoded()))
    assert [one, *(cuts for cuts, *_ in others)] == [1, 1, 4, 1]
    for _, baseline, again, other in others:
        assert baseline == pytest.approx(z0, rel=1e-11)
        torch.testing.assert_close(again, loss, atol=0, rtol=1e-11)
        for ours, theirs in zip(other, gradient, strict=True):
            # Llama's norms compute in float32 whatever their input, and round each token's gradient
            # on its own.
            torch.testing.assert_close(ours, theirs, atol=1e-6 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize("counts", [(10, 10), (30, 10), (10, 40)])
@pytest.mark.parametrize("said", [{}, {"desirable_weight": 2.0}, {"undesirable_weight": 0.5}])
def test_weights_that_are_not_set_balance_the_classes(counts, said):
    desirable, undesirable = KTOConfig(**said).weights(*counts).values()
    assert desirable * counts[0] == pytest.approx(undesirable * counts[1])
    assert {
        "desirable_weight": desirable,
        "undesirable_weight": undesirable,
    }.items() >= said.items()
    if not said:
        assert min(desirable, undesirable) == 1.0


def test_balance_is_reported_and_a_wrong_one_is_warned_of(tmp_path, recwarn):
    summary = make().train(ROWS, RunDirectory.open(tmp_path / "even", {}))
    assert (summary["num_desirable"], summary["num_undesirable"], summary["class_balance"]) == (
        4,
        2,
        pytest.approx(1.0),
    )
    assert summary["desirable_weight"] == 1.0 and summary["undesirable_weight"] == 2.0
    assert not [w for w in recwarn if "kto" in str(w.message)]
    with pytest.warns(UserWarning, match="n_U is 2 with 4 desirable and 2 undesirable"):
        uneven = make(desirable_weight=1.0, undesirable_weight=1.0).train(
            ROWS,
            RunDirectory.open(tmp_path / "uneven", {}),
        )
    assert uneven["class_balance"] == pytest.approx(2.0)


def test_one_sided_or_unusable_verdicts_are_refused(tmp_path):
    cases = [
        ([r for r in ROWS if r.desirable], "all responses to train on are desirable"),
        ([r for r in ROWS if not r.desirable], "all responses to train on are undesirable"),
        (ROWS[:3], "answer one prompt"),
        ([verdict("a", " ", True)], r"none of 1 rows of \[kto\]"),
    ]
    for number, (rows, message) in enumerate(cases):
        with pytest.raises(DataError, match=message):
            make().train(rows, RunDirectory.open(tmp_path / str(number), {}))


def test_comparisons_become_a_verdict_on_each_side(tmp_path):
    pair = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    turns = [
        {"role": role, "content": words}
        for role, words in (("assistant", "a"), ("user", "b"), ("assistant", "c"))
    ]
    rows = [
        pair,
        {**pair, "tie": True},
        {**pair, "prompt": "r", "probability": 0.2},
        {**pair, "chosen": turns},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged, skipped = encode_feedback(
        list(read(tmp_path / "pairs.jsonl", Feedback)),
        ENCODER,
        Limit(500),
    )
    assert skipped == {"a response has several turns": 1}
    found = [
        [ENCODER.decode(j.sequences[i].ids[j.sequences[i].prompt_length :]) for i in j.responses]
        for j in judged
    ]
    assert found == [["good", "bad", "bad"], ["bad", "good"]]
    assert [j.desirable for j in judged] == [(True, False, False), (True, False)]


def test_separation_counts_pairs():
    generator = random.Random(0)
    above, below = ([generator.randint(0, 6) for _ in range(n)] for n in (13, 9))
    pairs = [(a > b) + 0.5 * (a == b) for a in above for b in below]
    assert separation(above, below) == pytest.approx(sum(pairs) / len(pairs))
    assert separation([1.0], [0.0]) == 1.0 and math.isnan(separation([1.0], []))


def feedback(count=64, undesirable_every=2):
    """Answers of consonants are good; the random model happens to like vowels."""
    generator = random.Random(0)

    def text(letters):
        return "".join(generator.choice(letters) for _ in range(generator.randint(4, 15)))

    kinds = [n % undesirable_every > 0 for n in range(count)]
    return [
        verdict(f"question {n}", text("bcdfg" if good else "aeiou"), good)
        for n, good in enumerate(kinds)
    ]


@pytest.mark.parametrize("undesirable_every", [2, 5])
def test_it_learns_what_is_desirable(undesirable_every, tmp_path):
    rows = feedback(96, undesirable_every)
    stage = make(
        epochs=6,
        prompts_per_update=8,
        heldout_fraction=0.3,
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    before = stage.evaluate(encoded(rows))
    assert (
        before["reward_desirable"] == before["reward_undesirable"] == before["kl_baseline"] == 0.0
    )
    assert before["accuracy"] == 0.5 and before["loss"] == pytest.approx(0.5, abs=1e-6)
    summary = stage.train(rows, RunDirectory.open(tmp_path / "run", {}))
    assert summary["heldout_accuracy"] > 0.9 and summary["heldout_loss"] < 0.45
    assert summary["heldout_reward_desirable"] > summary["heldout_reward_undesirable"] + 0.3
    assert summary["num_desirable"] + summary["num_undesirable"] == summary["num_prompts"]


def test_no_update_is_left_with_one_prompt(tmp_path):
    """65 prompts in updates of 8: the last one would have nobody to be mismatched with."""
    run = RunDirectory.open(tmp_path / "run", {})
    summary = make(prompts_per_update=8, epochs=2).train(feedback(65), run)
    assert summary["updates"] == 16
    assert [row["mismatched"] for row in run.metrics()] == [8, 8, 8, 8, 8, 8, 8, 9] * 2


def trained(folder, stop_at=None, rows=None, **settings):
    stage = make(
        **{
            "epochs": 2,
            "prompts_per_update": 8,
            "checkpoint_every": 2,
            "micro_batch_tokens": 150,
            **settings,
        },
    )

    def progress(done, total, metrics):
        if done == stop_at:
            raise KeyboardInterrupt

    rows = rows or feedback(40)
    try:
        stage.train(rows, RunDirectory.open(folder, {}), progress)
    except KeyboardInterrupt:
        return trained(folder, rows=rows, **settings)
    return torch.cat([p.detach().flatten() for p in stage.role.parameters()])


@pytest.mark.parametrize("asked", ["each_update", "precomputed"])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, asked):
    settings = {"reference_logprobs": asked}
    assert torch.equal(
        trained(tmp_path / "whole", **settings),
        trained(tmp_path / "cut", stop_at=5, **settings),
    )


def test_a_reference_asked_beforehand_says_the_same(tmp_path):
    asked = trained(tmp_path / "asked", heldout_fraction=0.3)
    known = trained(tmp_path / "known", heldout_fraction=0.3, reference_logprobs="precomputed")
    torch.testing.assert_close(asked, known, atol=1e-5, rtol=1e-4)


def observed(tmp_path, **settings):
    """All that an option may change: weights, metrics, checkpoints, and how often the reference was
    asked.
    """
    stage = make(
        **{
            "heldout_fraction": 0.3,
            "prompts_per_update": 8,
            "checkpoint_every": 2,
            "keep_checkpoints": 9,
            **settings,
        },
    )
    reference, calls = stage.likelihoods.reference, []
    original = reference.logprobs
    reference.logprobs = lambda *arguments: (calls.append(1), original(*arguments))[1]
    run = RunDirectory.open(tmp_path, {})
    summary = stage.train(feedback(40, 3), run)
    kept = [path.name for path in complete_checkpoints(run.path / "checkpoints")]
    weights = [round(float(p.detach().abs().sum()), 4) for p in stage.role.parameters()]
    metrics = [(round(row["loss"], 6), sorted(row)) for row in run.metrics()]
    return weights, metrics, kept, len(calls), summary["updates"], summary["num_prompts"]


EFFECTS = {
    "beta": 0.5,
    "desirable_weight": 3.0,
    "undesirable_weight": 3.0,
    "reference_logprobs": "precomputed",
    "epochs": 2,
    "prompts_per_update": 4,
    "max_length": 22,
    "too_long": "truncate",
    "micro_batch_tokens": 64,
    "heldout_fraction": 0.6,
    "evaluate_every": 2,
    "checkpoint_every": 1,
    "keep_checkpoints": 1,
    "seed": 5,
    "optimizer": OptimizerConfig(learning_rate=1e-3),
}


def test_every_option_has_an_effect(tmp_path):
    assert EFFECTS.keys() == KTOConfig.model_fields.keys()
    plain = observed(tmp_path / "plain")
    assert observed(tmp_path / "again") == plain
    long = observed(tmp_path / "long", max_length=22)
    for option, value in EFFECTS.items():
        given = {"max_length": 22} if option == "too_long" else {}
        seen = observed(tmp_path / option, **given, **{option: value})
        assert seen != (long if given else plain), option


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prompts_per_update=1", "greater than or equal to 2"),
        ("desirable_weight=0", "greater than 0"),
        ("bta=1", "did you mean"),
    ],
)
def test_wrong_settings_are_one_clear_message(override, message):
    with pytest.raises(ConfigError, match=message):
        build(KTOConfig, {}, [override], where="recipe.toml")
