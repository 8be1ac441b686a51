"""SFT and reward modelling: learning, held-out evaluation, resume, and the losses against plain
autograd.
"""

import math
from dataclasses import replace
from random import Random

import pytest
import torch

from tether.core.errors import DataError
from tether.core.rundir import RunDirectory
from tether.core.types import Annotation, Comparison, Demonstration, assistant, user
from tether.data.batches import make_batch
from tether.data.chat import ChatEncoder
from tether.data.prepare import by_votes, pairs_of
from tether.data.sources import split_by_group
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig
from tether.settings.reward import RewardConfig
from tether.settings.supervised import SFTConfig
from tether.stages.direct import preferred
from tether.stages.learner.local import LocalLearner
from tether.stages.reward import Distillation, RewardModeling, evaluate_members
from tether.stages.sft import SFT
from tether.stages.supervised import make_step

ENCODER = ChatEncoder(tiny_tokenizer(), (1,))
DEMONSTRATIONS = [
    Demonstration((user(f"say {w}"), assistant(f"{w} {w}!")), w)
    for w in ("red", "blue", "green", "grey", "pink", "teal") * 4
]


def sft(role=None, **settings):
    settings = {
        "epochs": 3,
        "batch_size": 6,
        "heldout_fraction": 0.25,
        "optimizer": OptimizerConfig(learning_rate=3e-3),
        **settings,
    }
    return SFT(SFTConfig(**settings), role or Role(tiny_model().requires_grad_(False)), ENCODER)


def reward(seed=0, **settings):
    settings = {
        "epochs": 4,
        "prompts_per_update": 8,
        "heldout_fraction": 0.25,
        "optimizer": OptimizerConfig(learning_rate=3e-3),
        **settings,
    }
    model = add_adapter(tiny_model().requires_grad_(False), "reward", LoraConfig(rank=8), seed=seed)
    return RewardModeling(
        RewardConfig(**settings),
        Role(model, "reward", ScalarHead(64, zero=False)),
        ENCODER,
    )


def comparisons(count=48):
    rows = []
    for n in range(count):
        for pair in range(3):  # three pairs a prompt; the better answer shouts
            rows.append(
                Comparison(
                    (user(f"q{n}"),),
                    (assistant(f"yes {n}!{pair}!!"),),
                    (assistant(f"no {n}.{pair}.."),),
                    id=f"{n}-{pair}",
                    group=f"g{n}",
                ),
            )
    return rows


@pytest.mark.parametrize("packing", [True, False])
def test_sft_learns_and_keeps_the_best(tmp_path, packing):
    stage = sft(packing=packing)
    summary = stage.train(DEMONSTRATIONS, RunDirectory.open(tmp_path / "run", {}))
    # of words that no training row has
    assert summary["eval_loss"] < 0.6 * summary["eval_loss_before"]
    heldout = [ENCODER.conversation(d.messages) for d in split_by_group(DEMONSTRATIONS, 0.25, 0)[1]]
    assert stage.evaluate(heldout)["loss"] == pytest.approx(summary["eval_loss"], rel=1e-4)


class Watched(SFT):
    """Takes down the questions of the conversations that it trains on and of those that it
    evaluates by.
    """

    def update(self, conversations):
        self.trained = getattr(self, "trained", []) + [
            self.encoder.decode(c.prompt) for c in conversations
        ]
        return super().update(conversations)

    def evaluate(self, conversations):
        self.judged_by = [self.encoder.decode(c.prompt) for c in conversations]
        return super().evaluate(conversations)


def watched(tmp_path, rows, name="run"):
    stage = Watched(
        SFTConfig(epochs=1, batch_size=64, rows_per_micro_batch=64),
        Role(tiny_model()),
        ENCODER,
    )
    stage.train(rows, RunDirectory.open(tmp_path / name, {}))
    return stage.trained, stage.judged_by


@pytest.mark.audit
def test_sft_holds_out_prompts_whatever_the_order_of_the_file(tmp_path):
    """Poems, sums, the same poems again: a first tenth would be poems alone, nearly all of which
    are trained on as well.
    """
    poems = [Demonstration((user(f"poem {n}"), assistant(f"rose {n}"))) for n in range(20)]
    sums = [Demonstration((user(f"{n} and {n}"), assistant(f"{2 * n}"))) for n in range(180)]
    trained, judged_by = watched(tmp_path, [*poems, *sums, *poems])
    assert not set(trained) & set(judged_by)
    assert len(trained) + len(judged_by) == 220
    # 200 prompts, each held out with probability 0.1: of both kinds, within four standard
    # deviations of 20.
    assert abs(len(set(judged_by)) - 20) < 4 * (200 * 0.1 * 0.9) ** 0.5
    assert (
        any("poem" in prompt for prompt in judged_by)
        and sum("poem" not in prompt for prompt in judged_by) > 10
    )
    again = watched(tmp_path, [*sums[::-1], *poems, *poems], "sorted otherwise")
    assert sorted(again[1]) == sorted(judged_by)


@pytest.mark.audit
def test_sft_keeps_conversations_with_one_opening_together(tmp_path):
    """All replies of a conversation are learned, so a held-out one may not share its first exchange
    with a training row.
    """
    rows = [
        Demonstration(
            (
                user(f"opening {n}"),
                assistant("yes"),
                user(f"then {turn}"),
                assistant(f"well {turn}"),
            ),
        )
        for turn in range(3)
        for n in range(40)
    ]
    trained, judged_by = watched(tmp_path, rows)
    assert judged_by and len(trained) + len(judged_by) == 120
    assert not set(trained) & set(judged_by)
    assert all(judged_by.count(prompt) == 3 for prompt in judged_by)


def test_sft_loss_is_the_mean_over_counted_tokens():
    stage, rows = sft(), [ENCODER.conversation(d.messages) for d in DEMONSTRATIONS[:5]]
    model, total, count = tiny_model(), 0.0, 0
    for row in rows:
        table = model(input_ids=torch.tensor([row.ids])).logits[0].log_softmax(-1)
        total -= sum(
            float(table[t - 1, row.ids[t]].detach()) for t in range(len(row)) if row.trained[t]
        )
        count += row.num_trained
    for training in (False, True):  # evaluation has no dropout and leaves the mode as it found it
        stage.role.train_mode(training)
        assert stage.evaluate(rows)["loss"] == pytest.approx(total / count, rel=1e-5)
        assert stage.role.model.training is training


def test_sft_resumed_equals_uninterrupted(tmp_path):
    def final(run, kill_at=None):
        stage = sft(checkpoint_every=1)
        calls = []

        def progress(done, total, metrics):
            calls.append(done)
            if done == kill_at:
                raise KeyboardInterrupt

        try:
            stage.train(DEMONSTRATIONS, run, progress)
        except KeyboardInterrupt:
            return None
        return torch.cat([p.detach().flatten() for p in stage.role.parameters()]), [
            r["loss"] for r in run.metrics()
        ]

    whole, losses = final(RunDirectory.open(tmp_path / "a", {}))
    run = RunDirectory.open(tmp_path / "b", {})
    assert final(run, kill_at=4) is None
    resumed, again = final(run)
    assert torch.equal(whole, resumed) and losses == again


def test_unusable_rows_are_counted_and_nothing_left_is_an_error(tmp_path):
    rows = [
        *DEMONSTRATIONS,
        Demonstration((user("q"), assistant("")), "empty"),
        Demonstration((user("q"), assistant("x" * 2000)), "long"),
    ]
    summary = sft(epochs=1).train(rows, RunDirectory.open(tmp_path / "run", {}))
    assert sum(summary["skipped"].values()) == 2 and any(
        "max_length" in reason for reason in summary["skipped"]
    )
    with pytest.raises(DataError, match=r"none of 1 rows of \[sft\]"):
        sft().train(rows[-1:], RunDirectory.open(tmp_path / "other", {}))


def test_reward_learns_to_rank_unseen_prompts_and_is_centred(tmp_path):
    stage = reward()
    summary = stage.train(comparisons(), RunDirectory.open(tmp_path / "run", {}))
    assert summary["heldout_accuracy"]["value"] > 0.9 and summary["heldout_accuracy"]["low"] > 0.7
    assert 0 < summary["num_heldout_pairs"] < summary["num_pairs"] == 3 * summary["num_prompts"]
    train = stage.rankings(comparisons())[0]
    scores = [s for row in stage.scores(train) for s in row]
    assert abs(sum(scores) / len(scores)) < 0.3 * (max(scores) - min(scores))


@pytest.mark.parametrize("tokens", [40, 300, 100_000])
@pytest.mark.parametrize(("use_margin", "smoothing"), [(False, 0.0), (True, 0.0), (False, 0.2)])
def test_reward_gradient_is_that_of_the_pairwise_sum_however_it_is_cut(
    tokens,
    use_margin,
    smoothing,
):
    rows = list(comparisons(5))
    rows = [
        Comparison(c.prompt, c.chosen, c.rejected, c.id, c.group, margin=0.5 * (i % 3))
        for i, c in enumerate(rows)
    ]
    stage = reward(
        micro_batch_tokens=tokens,
        use_margin=use_margin,
        label_smoothing=smoothing,
        centering=0.02,
    )
    learner = LocalLearner(stage.role.parameters(), stage.config.optimizer, 4)
    grabbed = []
    original = learner.step
    learner.step = lambda: (grabbed.extend(m.grad.clone() for m in learner.masters), original())[1]
    other = reward(use_margin=use_margin)
    for parameter in other.role.parameters():
        parameter.requires_grad_(True)

    def score(row, side):
        ids = ENCODER.conversation((*row.prompt, *side), "last").ids
        other.role.activate()
        hidden = other.role.decoder(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        return other.role.head(hidden)

    loss = 0.0
    for row in rows:
        chosen, rejected = score(row, row.chosen), score(row, row.rejected)
        difference = chosen - rejected - (row.margin if use_margin else 0.0)
        right, wrong = torch.log1p(torch.exp(-difference)), torch.log1p(torch.exp(difference))
        loss = loss + (
            (1 - smoothing) * right + smoothing * wrong + 0.02 * (chosen + rejected) ** 2
        ) / len(rows)
    loss.backward()
    metrics = make_step(stage, learner, stage.rankings(rows)[0])
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for ours, theirs in zip(grabbed, other.role.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, atol=2e-6, rtol=1e-3)


def test_each_response_is_scored_once_and_pairs_find_their_scores():
    a, b, c = ((assistant(t),) for t in ("first", "second", "third"))
    prompt = (user("q"),)
    rows = [
        Comparison(prompt, x, y, id=i, group="g")
        for i, (x, y) in enumerate([(a, b), (a, c), (b, c)])
    ]
    ranking = reward().rankings(
        [
            *rows,
            Comparison(prompt, a, a, "same", "g"),
            Comparison(prompt, a, b, "tie", "g", tie=True),
        ],
    )
    (only,), skipped = ranking
    assert len(only.sequences) == 3 and only.chosen == (0, 0, 1) and only.rejected == (1, 2, 2)
    assert skipped == {"tie": 1, "both sides are the same tokens": 1}


def test_evaluation_numbers_by_hand(monkeypatch):
    stage = reward()
    rankings = stage.rankings(comparisons(4))[0]
    monkeypatch.setattr(
        stage,
        "scores",
        lambda rows: [[1.0, 0.0, 0.0, 2.0, 1.0, 1.0] for _ in rows],
    )
    result = stage.evaluate(rankings)
    pairs = [(1.0, 0.0), (0.0, 2.0), (1.0, 1.0)]
    assert result["accuracy"]["value"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert result["loss"] == pytest.approx(sum(math.log1p(math.exp(r - c)) for c, r in pairs) / 3)
    assert result["margin_mean"] == pytest.approx(-1 / 3)


LABELS = (0.5, 0.6, 0.7, 0.8)


def soft_rankings(stage, leads, monkeypatch):
    """Eight prompts with a pair of each label, scored so that the chosen side is ahead by the lead
    of its label.
    """
    rows = [
        Comparison(
            (user(f"q{n}"),),
            (assistant(f"a{k}"),),
            (assistant(f"b{k}"),),
            f"{n}-{k}",
            f"g{n}",
            probability=p,
        )
        for n in range(8)
        for k, p in enumerate(LABELS)
    ]
    monkeypatch.setattr(
        stage,
        "scores",
        lambda some: [[x for lead in leads for x in (lead, 0.0)] for _ in some],
    )
    return stage.rankings(rows)[0]


@pytest.mark.audit
def test_labels_that_are_not_sure_are_evaluated_as_such(monkeypatch):
    """The model that gave the labels loses their entropy and is calibrated; one that is surer loses
    more, with equal accuracy.
    """
    stage = reward()
    entropy = sum(-p * math.log(p) - (1 - p) * math.log(1 - p) for p in LABELS) / 4
    true = stage.evaluate(
        soft_rankings(stage, [math.log(p / (1 - p)) for p in LABELS], monkeypatch),
    )
    assert true["loss"] == pytest.approx(entropy) and true["calibration_error"] == pytest.approx(
        0.0,
        abs=1e-9,
    )
    sure = stage.evaluate(soft_rankings(stage, [6.0] * 4, monkeypatch))
    assert sure["loss"] == pytest.approx(
        sum(math.log1p(math.exp(-6)) + (1 - p) * 6 for p in LABELS) / 4,
    )
    assert sure["loss"] > 3 * true["loss"] and sure["calibration_error"] > 0.3
    assert (
        true["accuracy"]["value"] == sure["accuracy"]["value"] == 1.0
        and true["accuracy"]["count"] == 24
    )
    # The even pair has no right side: a model that has only that one "wrong" is as good, and one
    # that turns all is all wrong.
    even = stage.evaluate(soft_rankings(stage, [-1.0, 1.0, 1.0, 1.0], monkeypatch))
    assert even["accuracy"]["value"] == 1.0
    wrong = stage.evaluate(soft_rankings(stage, [0.0, -1.0, -1.0, -1.0], monkeypatch))
    assert wrong["accuracy"]["value"] == 0.0
    assert wrong["calibration_error"] == pytest.approx(
        (3 / (1 + math.exp(-1)) - (0.4 + 0.3 + 0.2)) / 4,
    )


@pytest.mark.audit
def test_even_labels_are_in_no_accuracy_of_members_students_and_direct_methods(monkeypatch):
    members = [reward(seed=seed) for seed in (0, 1)]
    rankings, _ = (
        soft_rankings(member, [-2.0 - n, 1.0, 1.0 + n, 1.0], monkeypatch)
        for n, member in enumerate(members)
    )
    found = evaluate_members(members, rankings)
    assert (
        found["accuracy"]["value"] == 1.0
        and found["accuracy"]["count"] == 24
        and found["member_accuracy"] == [1.0, 1.0]
    )
    student = Distillation(members[0].config, members[0].role, ENCODER)
    student.targets = {s.ids: 0.0 for ranking in rankings for s in ranking.sequences}
    learner = LocalLearner(student.role.parameters(), student.config.optimizer, 2)
    places = pairs_of(rankings)
    scores = torch.zeros(len(rankings) * 8)
    scores[places.chosen] = torch.tensor([-1.0 if p == 0.5 else 1.0 for p in places.probability])
    known = {
        s.ids: value
        for s, value in zip((s for r in rankings for s in r.sequences), scores, strict=True)
    }
    weight = next(iter(student.role.parameters()))
    monkeypatch.setattr(
        student,
        "heads",
        lambda some: torch.stack([known[s.ids] for s in some])[:, None] + 0 * weight.sum(),
    )
    assert make_step(student, learner, rankings)["accuracy"] == 1.0
    assert preferred([-1.0, 2.0, -3.0], [0.5, 0.9, 0.8])["accuracy"] == 0.5
    assert preferred([-1.0], [0.5])["accuracy"] == 0.5


@pytest.mark.parametrize("tokens", [40, 100_000])
def test_the_gradient_that_parts_quality_from_length_is_that_of_the_whole_update(tokens):
    """Against one graph over all responses, with numpy's idea of a correlation; however the update
    is cut.
    """
    rows = [
        row
        for i, row in enumerate(comparisons(5))
        for row in [replace(row, rejected=(assistant("no" + "." * i),))]
    ]
    stage = reward(micro_batch_tokens=tokens, disentangle_length=0.7)
    stage.role.head = ScalarHead(64, zero=False, outputs=2)
    learner = LocalLearner(stage.role.parameters(), stage.config.optimizer, 4)
    grabbed = []
    original = learner.step
    learner.step = lambda: (grabbed.extend(m.grad.clone() for m in learner.masters), original())[1]
    rankings = stage.rankings(rows)[0]
    role = Role(stage.role.model, "reward", stage.role.head)
    batch = make_batch([s for r in rankings for s in r.sequences], ENCODER.pad_id)
    both, places = role.scores(batch), pairs_of(rankings)
    lengths = torch.tensor([float(s.num_trained) for r in rankings for s in r.sequences])
    total = both.sum(-1)
    loss = -torch.nn.functional.logsigmoid(total[places.chosen] - total[places.rejected]).mean()
    quality, length = (torch.corrcoef(torch.stack([both[:, i], lengths]))[0, 1] for i in (0, 1))
    weights = role.head.linear.weight
    whole = loss + 0.7 * (quality.abs() - length + (weights[0] @ weights[1]).abs())
    expected = torch.autograd.grad(whole, stage.role.parameters())
    metrics = make_step(stage, learner, rankings)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for ours, theirs in zip(grabbed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-6, rtol=1e-3)


def test_quality_apart_from_length_is_less_correlated_with_it_and_knows_the_rest(tmp_path):
    """Two in three of the better answers are longer: a plain reward model learns length beside the
    shouting.
    """

    def rows(seed):
        random = Random(seed)
        for n in range(64):
            for pair in range(2):
                mark = "!" * (1 if random.random() < 0.33 else 6)
                other = "." * (7 - len(mark))
                yield Comparison(
                    (user(f"q{n}"),),
                    (assistant(f"a{mark}"),),
                    (assistant(f"a{other}"),),
                    id=f"{n}-{pair}",
                    group=f"g{n}",
                )

    train = list(rows(0))
    found = {}
    for weight in (0.0, 1.0):
        stage = reward(disentangle_length=weight, prompts_per_update=32, epochs=12)
        stage.role.head = ScalarHead(64, zero=False, outputs=stage.config.outputs)
        summary = stage.train(train, RunDirectory.open(tmp_path / f"run-{weight}", {}))
        assert stage.role.head.outputs == 1
        found[weight] = summary
    assert all(summary["heldout_accuracy"]["value"] > 0.95 for summary in found.values())
    assert abs(found[1.0]["length_correlation"]["pearson"]) < abs(
        found[0.0]["length_correlation"]["pearson"],
    )


def test_labels_by_votes():
    prompt, sides = (user("q"),), ((assistant("a"),), (assistant("b"),))
    votes = lambda *values: tuple(Annotation(str(i), v) for i, v in enumerate(values))  # noqa: E731
    rows = [
        Comparison(prompt, *sides, "0", "g", annotations=votes(1, 1, -1, 0)),
        Comparison(prompt, *sides, "1", "g", tie=True, annotations=votes(1, -1)),
        Comparison(prompt, *sides, "2", "g", annotations=votes(-1, -0.2, -1)),
        Comparison(prompt, *sides, "3", "g", probability=0.8),
    ]
    found = by_votes(rows)
    assert [row.probability for row in found] == [0.625, 0.5, 0.0, 0.8] and not any(
        row.tie for row in found
    )
    (ranking,), skipped = (
        reward(labels="votes").split(rows).train,
        reward(labels="votes").split(rows).counts["skipped"],
    )
    assert ranking.probability == (0.625, 0.5, 1.0, 0.8) and not skipped
    with pytest.raises(DataError, match="no comparison has any"):
        by_votes(comparisons(2))
