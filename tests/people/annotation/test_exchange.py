"""What comes out of a store: labels by hand-counted votes, every vote, no names, and the same again
through a file.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.people.annotation.conftest import filled, people

from tether.core.errors import ConfigError
from tether.core.types import Annotation, Comparison, Message, assistant, user
from tether.data.chat import ChatEncoder
from tether.data.prepare import Limit, encode_comparisons
from tether.data.sources import Quarantine, read
from tether.models.tiny import tiny_tokenizer
from tether.people.annotation.exchange import cases, comparisons, gold_answers, votes
from tether.people.annotation.exporting import export_labels, kept_back
from tether.people.annotation.importing import read_cases
from tether.people.annotation.rankings import escalate
from tether.people.annotation.store import Answer, StoreError
from tether.people.annotation.tables import FlagRow, TaskRow
from tether.people.annotation.work import Work
from tether.people.labels.votes import Opinion


def judged(store, *said, needed=None, experts=(), **question):
    """One pair, judged as told by one person each; returns its answers as first and second."""
    number = store.counts()["prompts"]
    sides = [
        Answer(
            (user(f"p{number}"),),
            (assistant(f"{k} of {number}"),),
            model=f"m{k}",
            checkpoint=f"c{k}",
            score=0.5 + k,
            sampling={"t": k},
        )
        for k in range(2)
    ]
    store.add_answers(sides)
    needed = max(1, len(said)) if needed is None else needed
    pair = {"prompt_id": sides[0].prompt_id, "first_id": sides[0].id, "second_id": sides[1].id}
    store.add_tasks([TaskRow(**pair, needed=needed, priority=-number, **question)])
    work = Work(store, gold_every=1 if question.get("known") else 0)
    for role, verdicts in (("annotator", said), ("expert", experts)):
        for name, verdict in zip(
            people(store, max(1, len(verdicts)), role),
            verdicts,
            strict=False,
        ):
            held = work.next(name)
            work.judge(
                held.assignment,
                name,
                verdict if isinstance(verdict, Opinion) else Opinion(verdict),
            )
    return sides


@pytest.mark.parametrize(
    ("how", "said", "expected"),
    # chosen answer, probability, tie; by hand
    [
        ("majority", ("first", "first", "second"), (0, 1.0, False)),
        ("majority", ("second", "second", "first"), (1, 1.0, False)),
        ("majority", ("tie", "both_bad", "second"), (0, 0.5, True)),
        ("soft", ("first", "first", "second"), (0, 2 / 3, False)),
        ("soft", ("second", "second", "tie"), (1, 5 / 6, False)),
        ("soft", ("second", "tie", "both_bad"), (1, 2 / 3, False)),
        ("soft", ("first", "first", "second", "tie", "tie"), (0, 0.6, False)),
        ("soft", ("second", "second", "first", "both_bad"), (1, 5 / 8, False)),
        ("soft", ("first", "second", "tie"), (0, 0.5, True)),
        ("soft", ("first", "second"), (0, 0.5, True)),
        ("soft", ("second",), (1, 1.0, False)),
        ("dawid-skene", ("second", "second", "second"), (1, None, False)),
    ],
)
def test_labels_are_what_the_votes_say(store, how, said, expected):
    sides = judged(store, *said)
    (found,) = comparisons(store, how)
    place, probability, tie = expected
    assert found.chosen == sides[place].response and found.rejected == sides[1 - place].response
    assert found.tie is tie and (
        found.probability == pytest.approx(probability)
        if probability
        else 0.5 < found.probability < 1
    )
    sign = 1 if place == 0 else -1
    assert [a.preference for a in found.annotations] == [
        {"first": sign, "second": -sign}.get(v, 0) for v in said
    ]
    assert found.group == sides[0].prompt_id and found.prompt == sides[0].prompt


def test_soft_labels_are_of_every_pair_with_all_its_votes(store, tmp_path):
    """By hand: 2 to 1 with two ties is 0.6 and trains, 1 to 1 is a tie. Other ways wait for an expert,
    and so does a pair that was flagged or sent to one.
    """
    judged(store, "first", "first", "second", "tie", "tie")
    judged(store, "first", "second")
    judged(store, "first", needed=2)
    judged(store, "first", "first", "second")  # escalated below
    judged(store, "second", "tie")  # flagged below
    assert escalate(store, 0.7) == 4
    with store.transaction() as session:
        for number in (1, 2, 5):
            session.get_one(TaskRow, number).details = {}
        session.add(FlagRow(task_id=5, annotator_id=1, reason="it is empty"))
    for how in ("majority", "dawid-skene"):
        assert list(comparisons(store, how)) == []
    uneven, even = comparisons(store, "soft")
    assert (uneven.probability, uneven.tie, even.tie) == (0.6, False, True)
    assert [one.metadata["state"] for one in (uneven, even)] == ["expert", "expert"]
    encoder = ChatEncoder(tiny_tokenizer(), (1,))
    (ranking,), skipped = encode_comparisons([uneven, even], encoder, Limit(500))
    assert ranking.probability == (0.6,) and skipped == {"tie": 1}
    waiting = {"waiting for an expert": 2, "with too few judgments": 1}
    assert export_labels(store, tmp_path / "soft.jsonl") == 2
    assert kept_back(store, 2) == waiting
    assert kept_back(store, 0, how="majority") == {**waiting, "waiting for an expert": 4}
    assert export_labels(store, tmp_path / "all.jsonl", unfinished=True) == 5


def test_an_expert_wins_over_any_number_of_votes(store):
    sides = judged(store, "first", "second", experts=[Opinion("second", strength=2)])
    (found,) = comparisons(store, "soft")
    assert found.chosen == sides[1].response and found.probability == 1.0 and not found.tie
    assert found.margin == 2.0 and found.metadata["settled_by"] == "annotator-3"
    assert [a.preference for a in found.annotations] == pytest.approx([-1, 1, 2 / 3])


def test_margins_are_mean_strengths_where_all_gave_one(store):
    judged(
        store,
        Opinion("first", strength=3),
        Opinion("first", strength=1),
        Opinion("second", strength=1),
    )
    judged(store, Opinion("first", strength=3), Opinion("first"))
    judged(
        store,
        Opinion("second", strength=1),
        Opinion("second", strength=1),
        Opinion("first", strength=3),
    )
    margins = [c.margin for c in comparisons(store)]
    # the last one's strengths contradict its votes
    assert margins == [pytest.approx(1.0), None, None]


def test_unfinished_withdrawn_and_gold_judgments_stay_out(store):
    judged(store, "first")
    judged(store, "first", needed=2)
    judged(store, "first", "second")  # waits for an expert
    judged(store, "second", known="second")
    Work(store).undo(people(store, 1)[0])  # the gold question's judgment
    assert [c.metadata.get("state") for c in comparisons(store)] == [None]
    states = [c.metadata.get("state") for c in comparisons(store, unfinished=True)]
    assert states == [None, "open", "expert"]
    assert (
        len(list(votes(store))) == len(list(votes(store, gold=True))) == 4
        and len(gold_answers(store)) == 1
    )


def test_provenance_guidelines_and_details_go_along(store):
    store.set_guidelines("be kind")
    judged(
        store,
        Opinion("second", guidelines=1),
        round="r1",
        strategy="uncertain",
        details={"id": "x7", "metadata": {"topic": "law"}},
    )
    (found,) = comparisons(store, round="r1")
    assert found.id == "x7" and not list(comparisons(store, round="r2"))
    assert found.metadata == {
        "topic": "law", "verdict": "chosen", "round": "r1", "strategy": "uncertain", "guidelines": [1],
        "chosen_model": "m1", "chosen_checkpoint": "c1", "chosen_sampling": {"t": 1}, "chosen_reward_score": 1.5,
        "rejected_model": "m0", "rejected_checkpoint": "c0", "rejected_sampling": {"t": 0}, "rejected_reward_score": 0.5,
    }  # fmt: skip


def test_votes_are_undone_sides_and_name_the_pair(store):
    first, second = judged(
        store,
        Opinion("first", strength=2, seconds=9.0),
        "second",
        "both_bad",
        strategy="random",
    )
    low, high = sorted((first.id, second.id))
    found = list(votes(store))
    assert {vote.item for vote in found} == {f"{first.prompt_id}/{low}/{high}"}
    sign = 1 if first.id == low else -1
    assert [vote.value for vote in found] == [
        2.0 * sign,
        "second" if sign > 0 else "first",
        "both_bad",
    ]
    assert (
        found[0].seconds == 9.0
        and found[1].seconds is None
        and found[0].slices == {"strategy": "random"}
    )
    held = {case.item: case for case in cases(store)}[found[0].item]
    lefts = [
        said.left if sign > 0 else {"first": "second", "second": "first"}[said.left]
        for said in held.opinions
    ]
    assert [vote.shown_left for vote in found] == lefts


def awkward(store):
    """Cases that a careless writer of files loses: several turns, odd characters, ties, odd
    metadata, none at all.
    """
    judged(
        store,
        "first",
        "second",
        "second",
        details={
            "metadata": {"topic": "a\nb", "tie": "yes", "n": 3, "deep": {"k": [1]}, "list": ["u"]},
        },
    )
    judged(store, "tie", "both_bad", "both_bad")
    judged(
        store,
        Opinion("second", strength=1, comment="Ada says so", ratings={"helpful": 4}),
        experts=[],
    )
    turns = (
        Message("system", "be «brief»"),
        user('[{"role": "user"}] \u2028 Human: x\n\nAssistant:'),
        assistant("ok"),
        user("more"),
    )
    sides = [
        Answer(
            turns,
            (assistant("call"), Message("tool", "42"), assistant(f"so {k}")),
            group="g",
            details={"x": k},
        )
        for k in range(2)
    ]
    store.add_answers(sides)
    store.add_tasks(
        [TaskRow(prompt_id=sides[0].prompt_id, first_id=sides[0].id, second_id=sides[1].id)],
    )
    work, name = Work(store), people(store, 1)[0]
    work.judge(work.next(name).assignment, name, Opinion("second"))


def unnested(comparison: Comparison) -> Comparison:
    """Objects in metadata as texts, as Parquet has them; a name that means something to the reader
    is another one.
    """
    names = {"tie": "metadata_tie"}
    texts = {
        names.get(k, k): json.dumps(v) if isinstance(v, dict) else v
        for k, v in comparison.metadata.items()
    }
    return replace(comparison, metadata=texts)


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("how", ["majority", "soft", "dawid-skene"])
def test_the_house_reads_back_exactly_what_was_written(store, tmp_path, name, how):
    awkward(store)
    wanted = list(comparisons(store, how))
    assert (
        export_labels(store, tmp_path / name, name.partition(".")[2], how=how) == len(wanted) == 4
    )
    quarantine = Quarantine()
    found = list(read(tmp_path / name, Comparison, quarantine=quarantine))
    assert quarantine.count == 0
    assert found == (wanted if name.endswith("jsonl") else [unnested(c) for c in wanted])
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("target", ["jsonl", "parquet", "label-studio", "argilla"])
def test_every_export_carries_the_calls_of_tools(store, tmp_path, target):
    call = json.dumps(
        {"type": "function", "function": {"name": "rain", "arguments": {"city": "Zürich"}}},
        ensure_ascii=False,
    )
    asking = Message("assistant", "", (call,))
    prompt = (user("Rain?"), asking, Message("tool", "none"), assistant("No."), user("And now?"))
    sides = [
        Answer(prompt, (asking, Message("tool", "some"), assistant(text)))
        for text in ("Yes.", "A little.")
    ]
    store.add_answers(sides)
    store.add_tasks(
        [TaskRow(prompt_id=sides[0].prompt_id, first_id=sides[0].id, second_id=sides[1].id)],
    )
    work, name = Work(store), people(store, 1)[0]
    work.judge(work.next(name).assignment, name, Opinion("first"))
    (case,) = cases(store)
    # the names under which votes and labels meet
    assert {case.first.id, case.second.id} == {side.id for side in sides}
    export_labels(store, tmp_path / "out.file", target)
    path = (tmp_path / "out.file").rename(
        tmp_path / ("out.parquet" if target == "parquet" else "out.jsonl"),
    )
    (case,) = read_cases(path)
    assert (case.first.prompt, {case.first.response, case.second.response}) == (
        prompt,
        {side.response for side in sides},
    )


@pytest.mark.parametrize("target", ["jsonl", "parquet", "label-studio", "argilla"])
def test_no_export_has_a_name_a_comment_or_a_secret(store, tmp_path, target):
    awkward(store)
    secret = store.invite("annotator 0")
    session = store.enter(secret)
    kept = [row.invitation for row in store.annotators()]
    path = tmp_path / "out.file"
    export_labels(store, path, target, unfinished=True)
    written = path.read_bytes()
    for word in ("annotator 0", "Ada says so", secret, session, *filter(None, kept)):
        assert word.encode() not in written
    assert b"annotator-1" in written
    export_labels(store, path, target, names=True)
    assert b"annotator 0" in path.read_bytes() and secret.encode() not in path.read_bytes()


def test_a_failed_export_leaves_the_old_file_and_nothing_beside_it(store, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("before")
    filled(store)
    with pytest.raises(StoreError, match="nothing to export"):
        export_labels(store, path)
    with pytest.raises(ConfigError, match="exported as"):
        export_labels(store, path, "xlsx")
    with pytest.raises(ConfigError, match="labels are made by"):
        list(comparisons(store, "mean"))
    assert path.read_text() == "before" and {p.name for p in tmp_path.iterdir()} <= {
        "out.jsonl",
        "prefs.db",
        "prefs.db-wal",
        "prefs.db-shm",
    }


def test_rows_carry_every_vote_with_what_belongs_to_it(store, tmp_path):
    first, _ = judged(
        store,
        Opinion(
            "first",
            strength=1,
            ratings={"helpful/first": 5, "true": 2},
            seconds=3.5,
            guidelines=2,
        ),
        "both_bad",
        "first",
    )
    export_labels(store, tmp_path / "out.jsonl", names=True)
    row = json.loads((tmp_path / "out.jsonl").read_text())
    votes_of = row["annotations"]
    assert votes_of[0] | {"left": None} == {
        "annotator": "annotator 0", "preference": pytest.approx(1 / 3), "choice": "chosen", "strength": 1,
        "ratings": {"helpful/chosen": 5, "true": 2}, "seconds": 3.5, "guidelines": 2, "left": None, "role": "annotator",
        "at": 1_000_000.0,
    }  # fmt: skip
    assert votes_of[0]["left"] in ("chosen", "rejected") and votes_of[1]["choice"] == "both_bad"
    assert row["chosen"][0]["content"] == first.response[0].content and row[
        "probability"
    ] == pytest.approx(5 / 6)


def test_annotations_of_a_comparison_turn_with_it(store):
    judged(store, "second", "second", "first")
    (found,) = comparisons(store)
    assert found.annotations == (
        Annotation("annotator-1", 1.0),
        Annotation("annotator-2", 1.0),
        Annotation("annotator-3", -1.0),
    )
