"""Sentences that break a rule of docs/dev/style.md, counted by hand."""

import pytest

from benchmarks import prose

LONG = " ".join(["word"] * 26) + "."


@pytest.mark.parametrize(
    ("sentence", "rules"),
    [
        ("What it holds is lost.", ["question_openings"]),
        ("How many are there?", []),
        ("Whole weights are sent.", []),
        ("The engine is told of new weights.", ["persons"]),
        ("It lies in a folder, and nobody reads it.", ["persons", "negative_halves"]),
        ("The row is read, and nothing is changed.", ["negative_halves"]),
        ("Nothing is changed.", []),
        (LONG, ["long_sentences"]),
        (LONG.removeprefix("word "), []),
        (f"Whoever {LONG}", ["question_openings", "persons", "long_sentences"]),
    ],
)
def test_a_sentence_is_held_to_four_rules(sentence, rules):
    assert list(prose.broken(sentence)) == rules


def test_sentences_are_taken_from_markdown_without_code_tables_and_headings():
    text = """# What a heading says

    make check    # told

A first [sentence](told.md). (A second one.) A third,
on two lines: `nobody told` it. <!-- told -->

- An item
- **Another**. ε is small.

| told | nobody |
|---|---|

```
told
```
"""
    assert list(prose.sentences(text)) == [
        "A first sentence.",
        "(A second one.)",
        "A third, on two lines: `code` it.",
        "An item",
        "Another.",
        "ε is small.",
    ]


def test_each_argument_of_a_docstring_is_a_text_of_its_own():
    text = "It runs.\n\nArgs:\n    first, second: both\n        sides.\n    third: another.\n"
    assert list(prose.sentences(text)) == [
        "It runs.",
        "Args:",
        "first, second: both sides.",
        "third: another.",
    ]


def test_docstrings_and_pages_are_counted_each_by_itself(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("What is told is lost. Nobody reads on, and nothing comes.\n")
    source = (
        '"""Whether it holds.\n\nAs here:\n\n    told\n"""\nx = "told"\n\n\ndef f():\n    "Who."\n'
    )
    assert {name: count for name, count in prose.counts([source], [page]).items() if count} == {
        "docstring_question_openings": 2,
        "docs_question_openings": 1,
        "docs_persons": 2,
        "docs_negative_halves": 1,
    }


def test_the_guide_keeps_its_own_rules():
    guide = prose.REPOSITORY / "docs" / "dev" / "style.md"
    assert guide in prose.documents() and prose.REPOSITORY / "README.md" in prose.documents()
    assert prose.counts([], [guide]) == dict.fromkeys(prose.counts([], []), 0)
    assert not any(page.name == "lab.md" or "decisions" in page.parts for page in prose.documents())
