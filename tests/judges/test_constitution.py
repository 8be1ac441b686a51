"""Critique, revision and comparison by principles, with a model that answers by script."""

import json
from collections import Counter

import pytest
from tests.judges.planted_judges import Planted, pair

from tether.core.errors import ConfigError, DataError, MissingFileError
from tether.core.protocols import Reply
from tether.core.types import Comparison, Demonstration, Prompt, Sampling, assistant, user
from tether.data.rows import write_rows
from tether.data.sources import read
from tether.judges.constitution import read_constitution, read_rubric, revise, sampled_pairs
from tether.judges.pairwise import PairJudge

PRINCIPLES = "".join(
    (
        f'[[principles]]\nname = "{n}"\ncritique = "critique {n}"\nrevision = "revise '
        f'{n}"\ncompare = '
        f'"compare {n}"\n'
    )
    for n in "abcd"
)
HOW = Sampling(20)


@pytest.fixture
def principles(tmp_path):
    (tmp_path / "p.toml").write_text(PRINCIPLES)
    return read_constitution(tmp_path / "p.toml")


def script(conversation, ordinal):
    """Answers `x`, criticises `-x`, revises to `x'`; what it is asked decides which."""
    asked = conversation[-1].content
    if asked.startswith("critique"):
        return f"{asked[-1]}: -{conversation[-2].content}"
    return f"{conversation[-4].content}'" if asked.startswith("revise") else f"re {asked}"


def prompts(*texts):
    return [Prompt((user(text),), id=text, metadata={"topic": "t"}) for text in texts]


def test_an_answer_is_criticised_and_rewritten_by_one_principle(principles):
    model = Planted(write=script)
    ((made,), _) = revise(model, principles, prompts("hello"), HOW)
    assert made.messages == (user("hello"), assistant("re hello'")) and made.id == "hello"
    ((answer, *_), (critique, *_), (revision, *_)) = model.replied
    (step,) = made.metadata["steps"]
    name = step["principle"]
    assert answer == (user("hello"),) and critique == (
        *answer,
        assistant("re hello"),
        user(f"critique {name}"),
    )
    assert revision == (*critique, assistant(f"{name}: -re hello"), user(f"revise {name}"))
    assert step == {"principle": name, "critique": f"{name}: -re hello", "revision": "re hello'"}
    assert (
        made.metadata["initial"] == "re hello"
        and made.metadata["model"] == "planted"
        and made.metadata["topic"] == "t"
    )


def test_rounds_build_on_each_other(principles):
    heard = []
    found, _ = revise(
        Planted(write=script),
        principles,
        prompts("a", "b"),
        HOW,
        rounds=3,
        told=heard.append,
    )
    assert [d.messages[-1].content for d in found] == ["re a'''", "re b'''"]
    steps = found[0].metadata["steps"]
    assert [s["revision"] for s in steps] == ["re a'", "re a''", "re a'''"] and steps[1][
        "critique"
    ].endswith("-re a'")
    assert heard == list(range(1, 15))


def test_drawn_principles_depend_on_prompt_and_seed_alone(principles):
    texts = [f"prompt {n}" for n in range(200)]

    def drawn(asked, seed=0):
        found = revise(Planted(write=script), principles, prompts(*asked), HOW, seed=seed)[0]
        return {d.id: d.metadata["steps"][0]["principle"] for d in found}

    one, other = drawn(texts), drawn(texts[::-2])
    assert all(one[name] == principle for name, principle in other.items())
    assert one != drawn(texts, seed=1)
    assert (
        all(30 < count < 70 for count in Counter(one.values()).values())
        and len(set(one.values())) == 4
    )
    model = Planted(write=script)
    revise(model, principles, prompts("x", "y"), HOW)
    again = Planted(write=script)
    revise(again, principles, prompts("y"), HOW)
    # with its seed and ordinal, so that what is kept is found again
    assert set(again.replied) < set(model.replied)


@pytest.mark.parametrize(
    ("stage", "said", "reason"),
    [
        ("re", Reply(None, False, "HTTP 500: x"), "answer: HTTP 500"),
        ("re", Reply("cut off", False), "answer: did not end in time"),
        ("critique", Reply(""), "critique: empty"),
        ("revise", Reply("cut off", False), "revision: did not end in time"),
    ],
)
def test_a_failed_revision_is_counted_and_gives_no_demonstration(principles, stage, said, reason):
    def write(conversation, ordinal):
        asked = conversation[-1].content
        wrong = "bad" in conversation[0].content and (
            asked.startswith(stage) or (stage == "re" and len(conversation) == 1)
        )
        return said if wrong else script(conversation, ordinal)

    heard = []
    found, failures = revise(
        Planted(write=write),
        principles,
        prompts("good", "bad"),
        HOW,
        told=heard.append,
    )
    assert [d.id for d in found] == ["good"] and failures == {reason: 1}
    assert heard == list(range(1, 7))  # what need not be asked is told as done


def test_a_critique_may_be_cut_off(principles):
    def write(conversation, ordinal):
        said = script(conversation, ordinal)
        return Reply(said, not conversation[-1].content.startswith("critique"))

    assert len(revise(Planted(write=write), principles, prompts("a"), HOW)[0]) == 1


def test_pairs_are_two_different_finished_answers():
    def write(conversation, ordinal):
        text = conversation[0].content
        if text == "equal":
            return "same"
        if text == "broken":
            return Reply(None, False, "HTTP 500")
        return Reply(f"{text} {ordinal}", text != "long")

    model = Planted(write=write)
    pairs, failures = sampled_pairs(model, prompts("one", "equal", "long", "broken", "two"), HOW)
    assert [p.prompt[0].content for p in pairs] == ["one", "two"] and all(
        p.probability == 0.5 for p in pairs
    )
    assert pairs[0].chosen[0].content != pairs[0].rejected[0].content
    assert failures == {
        "two equal answers": 1,
        "answer: did not end in time": 1,
        "answer: HTTP 500": 1,
    }
    with pytest.raises(DataError, match="greedy"):
        sampled_pairs(model, prompts("one"), Sampling(20, temperature=0.0))


def test_a_comparison_has_one_principle_whichever_way_it_stands(principles):
    rows = [pair(f"q{n}", f"good {n}", f"bad {n}") for n in range(100)]
    assert all(principles.rubric(row) == principles.rubric(row.swap()) for row in rows)
    assert len({principles.rubric(row) for row in rows}) == 4
    model = Planted(lambda first, second: 1.0)
    PairJudge(model, principles.rubric).judge(rows[:1])
    assert all(
        f"\n\n{principles.rubric(rows[0])}\n\n" in question[0].content
        for question in model.questions
    )


def test_written_principles_are_read_back_equal(principles, tmp_path):
    made = revise(Planted(write=script), principles, prompts("hello", "you"), HOW)[0]
    write_rows(tmp_path / "d.jsonl", made)
    assert list(read(tmp_path / "d.jsonl", Demonstration, strict=True)) == made
    judge = PairJudge(
        Planted(lambda first, second: 1.0 + len(first) - len(second)),
        principles.rubric,
    )
    rows = [pair("a", "x", "long", id="1", group="g"), pair("b", "same", "size", id="2", group="h")]
    labels = judge.label(rows, judge.judge(rows))
    write_rows(tmp_path / "c.jsonl", labels)
    assert list(read(tmp_path / "c.jsonl", Comparison, strict=True)) == labels
    assert [label.tie for label in labels] == [False, True]


def test_packaged_rubrics_and_principles():
    for name in ("helpful", "harmless"):
        rubric = read_rubric(name)
        assert isinstance(rubric, str) and "better answer" in rubric
    packaged = read_constitution("constitution")
    assert len(packaged.principles) >= 4 and callable(read_rubric("constitution"))
    assert all("only the new answer" in principle.revision for principle in packaged.principles)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "principles"),
        ("principles = []", "at least 1 item"),
        (PRINCIPLES + PRINCIPLES, "two principles have one name"),
        ('[[principles]]\nname = "a"\ncritique = "c"\nrevision = "r"\n', "compare"),
        (PRINCIPLES + "[other]\nx = 1", "unknown key 'other'"),
        ("[[principles", "not a valid TOML file"),
    ],
)
def test_bad_principles(tmp_path, text, message):
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_constitution(tmp_path / "p.toml")


def test_principles_that_are_not_utf8(tmp_path):
    (tmp_path / "p.toml").write_bytes(PRINCIPLES.encode() + 'x = "schön"'.encode("latin-1"))
    for reader in (read_constitution, read_rubric):
        with pytest.raises(
            ConfigError,
            match=(
                rf"p\.toml: .*byte {len(PRINCIPLES) + 8} is not "
                r"UTF-8\. Save the file as UTF-8"
            ),
        ):
            reader(tmp_path / "p.toml")


def test_bad_rubrics(tmp_path):
    with pytest.raises(
        MissingFileError,
        match=r"nowhere.*constitution, harmless, helpful",
    ):
        read_rubric("nowhere")
    (tmp_path / "r.md").write_text(" \n")
    with pytest.raises(DataError, match="is empty"):
        read_rubric(tmp_path / "r.md")
    (tmp_path / "latin.md").write_bytes("Sei schön.".encode("latin-1"))
    with pytest.raises(
        DataError,
        match=r"latin\.md: .*byte 7 .*UTF-8",
    ):
        read_rubric(tmp_path / "latin.md")
    assert json.dumps(read_rubric("helpful"))
