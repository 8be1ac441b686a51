"""Rows that do not train: one sentence with their share, the key, and the limit that helps."""

import pytest

from tether.core.left_out import left_out_words, too_long


def counted(lengths, limit=512, key="direct.max_length", context=2**31):
    skipped = {}
    for length in lengths:
        if length > limit:
            reason = too_long(length, limit, key, context)
            skipped[reason] = skipped.get(reason, 0) + 1
    return skipped


@pytest.mark.parametrize(
    ("lengths", "remedy"),
    [
        ([100] * 49 + [900] * 67 + [1500] * 4, "; 1,024 would keep all but 4"),
        ([100] * 49 + [900] * 41 + [1500] * 30, "; 2,048 would keep all"),
        ([100] * 49 + [1024] * 71, "; 1,024 would keep all"),
        ([100] * 49 + [1025] * 71, "; 2,048 would keep all"),
    ],
)
def test_the_limit_that_keeps_nearly_all_is_named(lengths, remedy):
    words = left_out_words({"skipped": counted(lengths)}, len(lengths))
    assert words.startswith(
        "71 of 120 rows (59%) do not train: 71 longer than direct.max_length = 512",
    )
    assert remedy in words


@pytest.mark.parametrize(
    ("long", "limit", "context", "reasons"),
    [
        ([1500] * 71, 1024, 1024, "71 longer than the model's context of 1024 tokens."),
        ([1500] * 71, 512, 1024, "71 longer than the model's context of 1024 tokens."),
        ([900] * 71, 512, 1000, "71 longer than {key} = 512 tokens; 1,000 would keep all."),
        (
            [900] * 41 + [1500] * 30,
            512,
            1024,
            "41 longer than {key} = 512 tokens; 1,024 would keep all, "
            "30 longer than the model's context of 1024 tokens.",
        ),
    ],
)
def test_no_limit_is_named_that_the_model_cannot_read(long, limit, context, reasons):
    """A row beyond the context does not train whatever max_length is."""
    words = left_out_words({"skipped": counted(long, limit, context=context)}, 120)
    reasons = reasons.format(key="direct.max_length")
    assert words == f"71 of 120 rows (59%) do not train: {reasons}"


def test_other_reasons_count_too_and_a_few_rows_are_no_warning():
    words = left_out_words({"skipped": {"tie": 6, **counted([600] * 4)}}, 100)
    assert words.startswith("10 of 100 rows (10%)") and words.endswith("would keep all, 6 tie.")
    assert left_out_words({"skipped": {"tie": 4}}, 100) == ""
    assert left_out_words({"skipped": {"tie": 4}}, None) == left_out_words({}, 100) == ""
    assert left_out_words({"skipped": {"tie": 5}}, 100)


def test_cut_rows_have_a_sentence_of_their_own():
    both = left_out_words({"skipped": {"tie": 6}, "cut": counted([600] * 7)}, 100)
    assert both.startswith("6 of 100 rows (6%) do not train: 6 tie. 7 of 100 rows (7%) are cut: 7 ")
    assert (
        left_out_words({"skipped": {"tie": 6}, "cut": counted([600] * 4)}, 100).count("rows") == 1
    )
