"""Process rewards: where steps end under any tokenizer, the loss against plain autograd, the
metrics by hand, and learning.
"""

import itertools
import math
import random
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from tether.core.errors import DataError
from tether.core.rundir import RunDirectory, read_json
from tether.core.types import Prompt, Rollout, Sampling, StepLabels, StopReason, assistant, user
from tether.data.batches import make_batch
from tether.data.chat import ChatEncoder
from tether.data.steps import StepEncoder, step_states
from tether.evaluation.process import (
    FAMILIES,
    best_rate,
    best_threshold,
    compare_with_chance,
    count_blind,
    count_calls,
    first_error_f1,
    step_estimates,
    step_f1,
)
from tether.models.heads import ScalarHead
from tether.models.tiny import SPECIAL, TEMPLATE, tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards import learned
from tether.rewards.learned import ProcessReward
from tether.settings.learner import OptimizerConfig
from tether.settings.supervised import ProcessRewardConfig
from tether.stages.learner.local import LocalLearner
from tether.stages.process_reward import ProcessRewardModeling
from tether.stages.supervised import make_step

ENCODER = ChatEncoder(tiny_tokenizer(), (1,))
TEXTS = (
    "We add 1 and 2.\n\nSo it is 3.\n\nThe answer: 3",
    "naïve Größe €5 🙂.\n\nSo 🙂\n\nдвак",
    "one.\nstill one.\n\n\nSo two\n\n\n\nthree\n\n",
    "aкибки вки конец",
    "first<step>second <step>third",
)


def bpe_tokenizer():
    """Byte-level BPE that merges across every border: white space, words and delimiters."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False,
        use_regex=False,
        trim_offsets=False,
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, "<step>"],
        initial_alphabet=alphabet,
        show_progress=False,
        min_frequency=2,
    )
    inner.train_from_iterator([".\n\nSo it", "é.\n\nSo", "3.\n\nThe ", "кибки в"] * 8, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        eos_token="<|end|>",
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def solution(steps, labels, problem="q", **metadata):
    return StepLabels(
        (user(problem),),
        tuple(steps),
        tuple(labels),
        id=f"{problem}:{steps}",
        metadata=metadata,
    )


def stage(model=None, **settings):
    settings = {
        "epochs": 1,
        "solutions_per_update": 8,
        "optimizer": OptimizerConfig(learning_rate=3e-3),
        **settings,
    }
    config = ProcessRewardConfig(**settings)
    head = ScalarHead(64, zero=False, outputs=config.outputs)
    return ProcessRewardModeling(
        config,
        Role((model or tiny_model()).requires_grad_(False), head=head),
        ENCODER,
    )


def puzzles(count, seed=0):
    """A step is wrong where it contains an x; every problem has three solutions."""
    draw, rows = random.Random(seed), []
    for n in range(count):
        for _ in range(3):
            steps = ["".join(draw.choices("abcd", k=3)) for _ in range(draw.randint(2, 4))]
            steps = [s[:1] + "x" + s[2:] if draw.random() < 0.25 else s for s in steps]
            rows.append(solution(steps, ["x" not in s for s in steps], f"q{n}", name=str(n)))
    return rows


def ends_by_offsets(tokenizer, text, delimiter):
    """The last token that overlaps each delimiter's end, and the stop token behind the last step,
    by the tokenizer's offsets.
    """
    encoded = tokenizer(text + "<|end|>", add_special_tokens=False, return_offsets_mapping=True)
    spans, ends, start = encoded["offset_mapping"], [], 0
    while (found := text.find(delimiter, start)) >= 0:
        if text[start:found].strip():
            final = found + len(delimiter) - 1
            ends.append(
                max(i for i, (first, behind) in enumerate(spans) if first <= final < behind),
            )
        start = found + len(delimiter)
    if text[start:].strip():
        ends.append(len(spans) - 1)
    return encoded["input_ids"], tuple(ends), spans


@pytest.mark.parametrize("make", [tiny_tokenizer, bpe_tokenizer])
@pytest.mark.parametrize("delimiter", ["\n\n", "\n", "ки", "<step>", "б"])
def test_steps_end_where_the_offsets_say(make, delimiter):
    tokenizer = make()
    encoder = StepEncoder(ChatEncoder(tokenizer, (1,)), (delimiter,))
    for text in TEXTS:
        ids, expected, _ = ends_by_offsets(tokenizer, text, delimiter)
        assert encoder.step_ends(ids) == expected


def test_a_delimiter_inside_a_longer_token_is_found():
    tokenizer = bpe_tokenizer()
    ids, ends, spans = ends_by_offsets(tokenizer, TEXTS[0], "\n\n")
    first = TEXTS[0].index("\n\n")
    # the token begins before it and goes on behind it
    assert spans[ends[0]][0] < first and spans[ends[0]][1] > first + 2
    assert StepEncoder(ChatEncoder(tokenizer, (1,))).step_ends(ids) == ends


def test_sampled_ids_need_not_be_those_of_the_tokenizer():
    tokenizer = bpe_tokenizer()
    steps = StepEncoder(ChatEncoder(tokenizer, (1,)))
    letters = [
        i for c in "3.\n\nSo it\n\nё" for i in tokenizer(c, add_special_tokens=False)["input_ids"]
    ]
    assert steps.step_ends([*letters, 1]) == (3, 10, len(letters))
    assert steps.step_ends(letters) == (3, 10, len(letters) - 1)
    assert steps.step_ends(letters[:11]) == (3, 10)
    assert steps.step_ends([1]) == steps.step_ends([]) == ()


def test_several_delimiters_and_the_longer_one_first():
    steps = StepEncoder(ENCODER, ("\n", "\n\n", ";"))
    assert steps.step_ends(
        list(map(ENCODER.tokenizer.convert_tokens_to_ids, ["a", "Ċ", "Ċ", "b", ";", "c"])),
    ) == (2, 4, 5)


@pytest.mark.parametrize("make", [tiny_tokenizer, bpe_tokenizer])
def test_labels_stand_at_the_ends_of_their_steps(make):
    encoder = ChatEncoder(make(), (1,))
    row = solution(
        ["We add.", " So it is 3\n\nor 4.\n\n", "", "The end"],
        [True, False, True, None],
        name=" A  b",
    )
    found = StepEncoder(encoder, problem_column="name").encode(row)
    assert found.pieces == ("We add.", "So it is 3", "or 4.", "The end") and found.group == "a b"
    assert (
        found.labels == (True, None, False, None)
        and found.targets == (1.0, None, 0.0, None)
        and found.judged == [0, 2]
    )
    response = found.sequence.ids[found.sequence.prompt_length :]
    text = "We add.\n\nSo it is 3\n\nor 4.\n\nThe end"
    assert (
        list(response) == encoder.tokenizer(text + "<|end|>", add_special_tokens=False)["input_ids"]
    )
    assert found.ends == ends_by_offsets(encoder.tokenizer, text, "\n\n")[1]
    assert found.sequence == encoder.conversation((user("q"), assistant(text)))


def test_targets_of_every_kind():
    row = solution(["a", "b", "c"], [True, None, False], share=[1, 0.25, None], rating=[1, 0, -1])
    assert StepEncoder(ENCODER, label_column="share").encode(row).targets == (1.0, 0.25, None)
    assert StepEncoder(ENCODER, label_column="rating", classes=3).encode(row).targets == (
        2.0,
        1.0,
        0.0,
    )
    outcome = StepEncoder(ENCODER, target="outcome")
    assert outcome.encode(row).targets == (None, None, 0.0)
    assert outcome.encode(solution(["a", "b\n\nc"], [True, True])).targets == (None, None, 1.0)
    for bad, message in (
        ({"label_column": "rating"}, "between 0 and 1"),
        ({"label_column": "share", "classes": 3}, "-1, 0 or 1"),
        ({"label_column": "none"}, "none"),
        ({"problem_column": "none"}, "names the problem"),
    ):
        with pytest.raises(DataError, match=message):
            StepEncoder(ENCODER, **bad).encode(row)
    with pytest.raises(DataError, match="no label"):
        outcome.encode(solution(["a", "b"], [True, None]))


@pytest.mark.parametrize("layout", [{}, {"capacity": 400}, {"document_tokens": 400}])
def test_states_are_those_of_the_tokens_that_end_steps(layout):
    rows = [solution(s, [True] * len(s)) for s in (["ab", "c"], ["defg", "h", "ij"], ["k"])]
    found = [StepEncoder(ENCODER).encode(row) for row in rows]
    role, batch = Role(tiny_model()), make_batch([s.sequence for s in found], 0, **layout)
    places = step_states(batch, [s.ends for s in found])
    states = iter(role.hidden(batch)[places])
    for s in found:
        alone = role.decoder(input_ids=torch.tensor([s.sequence.ids])).last_hidden_state[0]
        for end in s.ends:
            torch.testing.assert_close(
                next(states),
                alone[s.sequence.prompt_length + end],
                atol=1e-5,
                rtol=1e-4,
            )


def naive_loss(rows, classes=2, target="process"):
    """The mean of -log p(label), from a forward pass a solution; the gradient of everything
    trainable.
    """
    other = stage(
        target=target,
        **({"classes": 3, "label_column": "rating"} if classes == 3 else {}),
    )
    for parameter in other.role.parameters():
        parameter.requires_grad_(True)
    losses = []
    for row in rows:
        text = "\n\n".join(row.steps)
        ids = ENCODER.conversation((*row.prompt, assistant(text))).ids
        hidden = other.role.decoder(input_ids=torch.tensor([ids])).last_hidden_state[0]
        stop = len(ids) - 1 - len(text.encode())
        for step, verdict in zip(row.steps, row.labels, strict=True):
            stop += len(step) + 2
            logits = other.head(hidden[min(stop, len(ids)) - 1])
            if classes == 3:
                losses.append(
                    -logits.log_softmax(-1)[row.metadata["rating"][row.steps.index(step)] + 1],
                )
            elif target == "process" and verdict is not None:
                losses.append(-torch.log(torch.sigmoid(logits if verdict else -logits)))
        if target == "outcome":
            losses.append(-torch.log(torch.sigmoid(logits if all(row.labels) else -logits)))
    loss = sum(losses) / len(losses)
    loss.backward()
    return float(loss.detach()), [p.grad for p in other.role.parameters()]


@pytest.mark.parametrize("tokens", [20, 120, 100_000])
@pytest.mark.parametrize("kind", ["process", "outcome", "ratings"])
def test_the_gradient_is_that_of_the_sum_over_steps_however_it_is_cut(tokens, kind):
    rows = [
        solution(["ab", "cx", "d"], [True, False, True], rating=[1, -1, 0]),
        solution(["e"], [True], rating=[0]),
        solution(["longer one", "f", "gx", "h"], [True, True, False, False], rating=[1, 1, -1, -1]),
    ]
    settings = {
        "ratings": {"classes": 3, "label_column": "rating"},
        "outcome": {"target": "outcome"},
        "process": {},
    }[kind]
    trained = stage(micro_batch_tokens=tokens, **settings)
    learner = LocalLearner(trained.role.parameters(), trained.config.optimizer, 4)
    grabbed, original = [], learner.step
    learner.step = lambda: (grabbed.extend(m.grad.clone() for m in learner.masters), original())[1]
    solutions = [trained.encoder.encode(row) for row in rows]
    expected, gradients = naive_loss(
        rows,
        3 if kind == "ratings" else 2,
        "outcome" if kind == "outcome" else "process",
    )
    assert trained.evaluate(solutions)["loss"] == pytest.approx(expected, rel=1e-5)
    solutions = solutions[::-1] if tokens == 120 else solutions
    assert make_step(trained, learner, solutions)["loss"] == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(grabbed, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-3)


def test_only_the_ends_of_judged_steps_are_trained(monkeypatch):
    trained = stage()
    row = trained.encoder.encode(solution(["ab", "c", "d"], [True, None, False]))
    learner = LocalLearner(trained.role.parameters(), trained.config.optimizer, 1)
    seen, hidden = [], trained.role.hidden

    def watched(batch):
        seen.append(hidden(batch))
        seen[-1].retain_grad()
        return seen[-1]

    monkeypatch.setattr(trained.role, "hidden", watched)
    make_step(trained, learner, [row])
    touched = seen[0].grad.abs().sum(-1).nonzero().flatten().tolist()
    # the second line feed behind "ab", and the stop
    assert touched == [row.sequence.prompt_length + 3, len(row.sequence) - 1]


@pytest.mark.parametrize("reads_masks", [True, False])
def test_the_outcome_model_is_asked_as_if_each_step_were_the_last(monkeypatch, reads_masks):
    trained = stage(target="outcome", micro_batch_tokens=200)
    # attention sharp enough for a position that is wrong by one to show
    for layer in trained.role.decoder.layers:
        layer.self_attn.q_proj.weight.mul_(5), layer.self_attn.k_proj.weight.mul_(5)
    monkeypatch.setattr(Role, "reads_masks", property(lambda role: reads_masks))
    rows = [
        solution(s, labels)
        for s, labels in (
            (["ab", "cd", "e"], [True, False, None]),
            (["f"], [True]),
            (["g", "h"], [True] * 2),
        )
    ]
    found = trained.probabilities([trained.encoder.encode(row) for row in rows])
    assert [len(r) for r in found] == [2, 1, 2]
    for row, given in zip(rows, found, strict=True):
        for count, probability in enumerate(given, 1):
            ids = ENCODER.conversation((*row.prompt, assistant("\n\n".join(row.steps[:count])))).ids
            hidden = trained.role.decoder(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            assert probability == pytest.approx(
                torch.sigmoid(trained.head(hidden)).item(),
                abs=1e-5,
            )


TRUTH = [[True, False, False, True], [True, True], [False], [True, True, True]]
GIVEN = [[0.9, 0.2, 0.7, 0.4], [0.8, 0.9], [0.6], [0.9, 0.1, 0.9]]


def test_metrics_by_hand():
    # At 0.5 the second and fourth step of the first solution are called wrong, and the second of
    # the last one.
    counts = [count_calls(r, p, 0.5) for r, p in zip(TRUTH, GIVEN, strict=True)]
    found = step_estimates(
        counts,
        ["a", "b", "b", "c"],
        [m for family in FAMILIES.values() for m in family],
    )
    precision, recall = 1 / 3, 1 / 3  # of the wrong steps
    wrong = 2 * precision * recall / (precision + recall)
    right = 2 * (5 / 7) * (5 / 7) / (10 / 7)
    assert found["step_f1"].value == pytest.approx(wrong) and found["step_f1"].count == 10
    assert found["macro_f1"].value == pytest.approx((wrong + right) / 2)
    # not the single step
    assert found["accuracy_erroneous"].value == 0.5 and found["accuracy_erroneous"].count == 2
    assert found["accuracy_flawless"].value == 0.5 and found["first_error_f1"].value == 0.5
    alone = step_estimates(counts, ["a"] * 4, [step_f1])["step_f1"]
    assert alone.low == -math.inf and alone.reason == "too few problems: 1 of equal size bear on it"
    with pytest.raises(ValueError, match="2 steps"):
        count_calls([True, False], [0.1], 0.5)
    with pytest.raises(ValueError, match="NaN"):
        count_calls([True], [math.nan], 0.5)


def test_an_error_called_too_early_or_never_is_not_found():
    for calls, located in (
        ([1, 0, 0], 0),
        ([0, 0, 1], 0),
        ([0, 1, 1], 1),
        ([0, 0, 0], 0),
        ([1, 1, 0], 0),
    ):
        assert count_calls([True, False, True], [1 - c for c in calls], 0.5).located == located


def test_intervals_come_from_resampled_problems():
    counts = [count_calls([False], [p], 0.5) for p in (0.1, 0.9) * 30]
    each = step_estimates(counts, list(range(60)), [FAMILIES["first_error"][1]])[
        "accuracy_erroneous"
    ]
    pairs = step_estimates(
        [c for c in counts for _ in range(10)],
        [g for g in range(60) for _ in range(10)],
        [FAMILIES["first_error"][1]],
    )
    # ten copies of a problem are one observation
    assert pairs["accuracy_erroneous"][:3] == pytest.approx(each[:3], rel=0.01)
    assert each.low == pytest.approx(0.5 - 1.96 * math.sqrt(0.25 / 60), abs=0.02)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_chance_is_the_mean_over_all_ways_to_call(rate):
    for right in TRUTH:
        expected = [0.0] * 8
        for calls in itertools.product([0, 1], repeat=len(right)):
            weight = math.prod(rate if c else 1 - rate for c in calls)
            for place, number in enumerate(count_calls(right, [1.0 - c for c in calls], 0.5)):
                expected[place] += weight * number
        assert list(count_blind(right, rate)) == pytest.approx(expected)


def test_thresholds_are_the_best_there_are():
    def score(metric, threshold):
        return float(
            metric(
                sum(
                    torch.tensor(count_calls(r, p, threshold))
                    for r, p in zip(TRUTH, GIVEN, strict=True)
                ).numpy(),
            ),
        )

    for metric in (step_f1, first_error_f1):
        chosen = best_threshold(TRUTH, GIVEN, metric)
        assert score(metric, chosen) == max(score(metric, t / 100) for t in range(101))
    # With a share p of wrong steps, calling at rate q gives 2pq / (p + q), which is largest at q =
    # 1.
    assert best_rate(TRUTH, step_f1) == 1.0
    result = compare_with_chance(TRUTH, GIVEN, ["a", "b", "c", "d"], (TRUTH, GIVEN))
    assert result["random"]["step_f1"]["value"] == pytest.approx(0.3)
    assert result["blind"]["step_f1"]["value"] == pytest.approx(2 * 0.3 / 1.3)
    with pytest.raises(ValueError, match="with and without an error"):
        best_threshold([[True]], [[0.5]], first_error_f1)


def test_the_process_model_learns_and_no_problem_is_on_two_sides(tmp_path):
    trained = stage(epochs=3, problem_column="name", evaluate_every=15, calibration_fraction=0.2)
    rows = puzzles(60)
    train, calibration, test, _ = trained.prepare(rows)
    groups = [{s.group for s in part} for part in (train, calibration, test)]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 60 and all(groups)
    run = RunDirectory.open(tmp_path / "run", {})
    model = (found := trained.train(rows, run)["heldout"])["model"]
    assert (
        model["step_f1"]["value"] > 0.95
        and model["macro_f1"]["value"] > 0.95
        and model["first_error_f1"]["value"] > 0.95
    )
    assert (
        found["random"]["step_f1"]["value"] < 0.4
        and found["blind"]["first_error_f1"]["value"] < 0.6
    )
    written = read_json(run.path / "heldout.json")
    steps, threshold = defaultdict(int), found["thresholds"]["step"]
    for row in written:
        for right, p in zip(row["right"], row["probabilities"], strict=True):
            steps[right, p < threshold] += 1
    f1 = 2 * steps[False, True] / (2 * steps[False, True] + steps[True, True] + steps[False, False])
    assert (
        f1 == pytest.approx(model["step_f1"]["value"])
        and {r["problem"] for r in written} == groups[2]
    )


def test_judged_solutions_that_are_all_held_out_leave_no_threshold(tmp_path, caplog):
    """The others have targets from roll-outs alone."""
    trained = stage(label_column="share")
    rows = [
        replace(row, metadata={"share": [float(right) for right in row.labels]})
        for row in puzzles(20)
    ]
    held_out = {s.id for s in trained.prepare(rows)[2]}
    rows = [
        row if row.id in held_out else replace(row, labels=(None,) * len(row.steps)) for row in rows
    ]
    summary = trained.train(rows, RunDirectory.open(tmp_path / "run", {}))
    assert summary["num_heldout"] and "heldout" not in summary
    assert "every judged solution is held out" in caplog.text


def test_the_outcome_model_learns_from_one_label(tmp_path):
    trained = stage(epochs=2, target="outcome", heldout_fraction=0.3)
    model = trained.train(puzzles(60, seed=1), RunDirectory.open(tmp_path / "run", {}))["heldout"][
        "model"
    ]
    assert model["first_error_f1"]["value"] > 0.95
    # it cannot say that a step after an error is right again
    assert 0.5 < model["step_f1"]["value"] < 0.9


def test_unusable_solutions_are_counted_and_nothing_left_is_an_error(tmp_path):
    rows = [solution(["x" * 2000], [True]), solution(["a"], [None]), solution([" "], [True])]
    with pytest.raises(
        DataError,
        match=r"none of 3 solutions.*process\.max_length.*no label.*no step",
    ):
        stage().train(rows, RunDirectory.open(tmp_path / "run", {}))


def rollout(response_ids, prompt="q", stop=StopReason.STOP_TOKEN):
    ids = tuple(response_ids)
    prompt_ids = ENCODER.prompt((user(prompt),))
    return Rollout(
        prompt_ids,
        ids,
        (0.0,) * len(ids),
        stop,
        "",
        0,
        0,
        Sampling(),
        Prompt((user(prompt),)),
    )


def test_the_reward_is_what_was_trained(monkeypatch):
    trained = stage()
    monkeypatch.setattr(learned, "MICRO_BATCH_TOKENS", 150)
    source = ProcessReward(trained.role, ENCODER, aggregate="product")
    rows = [
        solution(s, [True] * len(s), p)
        for p in "qr"
        for s in (["ab", "cd", "e"], ["f"], ["g", "hij"])
    ]
    solutions = [trained.encoder.encode(row) for row in rows]
    rollouts = [
        rollout(s.sequence.ids[s.sequence.prompt_length :], s.prompt[0].content) for s in solutions
    ]
    for score, s, expected in zip(
        source.score(rollouts),
        solutions,
        trained.probabilities(solutions),
        strict=True,
    ):
        assert [end for end, _ in score.steps] == list(s.ends)
        assert [p for _, p in score.steps] == pytest.approx(expected, abs=1e-5)
        assert score.value == pytest.approx(math.prod(expected), abs=1e-5)
        assert score.parts == {
            "num_steps": len(expected),
            "weakest_step": expected.index(min(expected)),
        }


def test_a_response_that_was_cut_off_or_is_empty():
    trained = stage()
    whole = [*ENCODER.tokenizer("ab\n\ncd", add_special_tokens=False)["input_ids"]]
    source = ProcessReward(trained.role, ENCODER, aggregate="last")
    cut, finished, empty = source.score(
        [rollout(whole, stop=StopReason.LENGTH), rollout([*whole, 1]), rollout([1])],
    )
    assert [end for end, _ in cut.steps] == [3, 5] and [end for end, _ in finished.steps] == [3, 6]
    # both are read at a stop token
    assert cut.value == pytest.approx(finished.value) == finished.steps[-1][1]
    assert empty.value is None and "no step" in empty.reason and empty.steps == ()
    with torch.no_grad():
        trained.head.linear.bias.fill_(math.nan)
    assert source.score([rollout(whole)])[0].value is None


def test_options_without_effect_are_errors():
    for settings, message in (
        ({"target": "outcome", "label_column": "x"}, "no effect"),
        ({"classes": 3}, "label_column"),
        ({"delimiters": ("",)}, "empty text"),
        ({"evaluate_every": 5, "calibration_fraction": 0}, "calibration_fraction"),
    ):
        with pytest.raises(ValueError, match=message):
            ProcessRewardConfig(**settings)
    config = ProcessRewardConfig(classes=3, label_column="rating")
    with pytest.raises(ValueError, match="3 outputs"):
        ProcessRewardModeling(config, Role(tiny_model(), head=ScalarHead(64)), ENCODER)


def test_a_head_of_three_classes_comes_back_from_disk(tmp_path):
    from safetensors.torch import save_file

    from tether.models.saving import load_head

    head = ScalarHead(8, zero=False, outputs=3)
    save_file(head.state_dict(), tmp_path / "head.safetensors")
    states = torch.randn(5, 8)
    assert torch.equal(load_head(tmp_path, torch.device("cpu"))(states), head(states)) and head(
        states,
    ).shape == (5, 3)
