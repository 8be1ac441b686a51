"""What is read off a served reply, by hand."""

import math

import pytest

from tether.judges.verdicts import read_verdict, soft_verdict, verdict_in


def written_option(text, options):
    """The place of the option that a written reply decides for; None without a decision."""
    verdict = verdict_in(text, options)
    return None if verdict is None else verdict.option


def logs(**shares):
    return [(token, math.log(share)) for token, share in shares.items()]


def test_all_spellings_of_an_option_count_for_it():
    place = [
        ("A", math.log(0.5)),
        ("A", math.log(0.5)),
        (" A", math.log(0.1)),
        ("**B", math.log(0.2)),
        ("Sure", math.log(0.1)),
    ]
    verdict = read_verdict("A", [place], ("A", "B"))
    assert verdict.logprobs == pytest.approx(
        [math.log(0.75), math.log(0.25)],
    ) and verdict.mass == pytest.approx(0.8)
    assert not verdict.parsed


def test_an_option_that_is_not_listed_is_given_the_most_it_can_have():
    # 0.04 are left, less than the least that is listed
    few = read_verdict("A", [logs(A=0.9, Sure=0.06)], ("A", "B"))
    assert few.logprobs == pytest.approx(
        [math.log(0.9 / 0.94), math.log(0.04 / 0.94)],
    ) and few.mass == pytest.approx(0.9)
    # 0.39 are left, but B is no likelier than "Sure"
    many = read_verdict("A", [logs(A=0.6, Sure=0.01)], ("A", "B"))
    assert many.logprobs == pytest.approx([math.log(0.6 / 0.61), math.log(0.01 / 0.61)])
    sure = read_verdict("A", [[("A", 0.0)]], ("A", "B"))
    assert sure.logprobs is not None and math.isfinite(sure.logprobs[1])


def test_options_that_are_not_listed_share_what_is_left():
    place = [("7", math.log(0.55)), ("8", math.log(0.25)), ("6", math.log(0.13))]
    verdict = read_verdict("7", [place], tuple("123456789"))
    listed, each = {6: 0.13, 7: 0.55, 8: 0.25}, 0.07 / 6  # 0.07 are left for six digits together
    by_hand = [listed.get(digit, each) for digit in range(1, 10)]
    assert verdict.logprobs is not None and sum(by_hand) == pytest.approx(1.0)
    assert [math.exp(value) for value in verdict.logprobs] == pytest.approx(by_hand)
    rare = read_verdict("7", [[("7", math.log(0.9)), ("8", math.log(0.001))]], tuple("123456789"))
    assert rare.logprobs is not None and rare.logprobs[0] == pytest.approx(
        rare.logprobs[7],
    )  # none is likelier than the least listed


def test_log_probabilities_that_are_no_numbers_are_no_verdict():
    for broken in (
        [math.nan, -1.0],
        [-1.0, math.nan],
        [math.nan] * 2,
        [-math.inf] * 2,
        [math.inf, 0.0],
    ):
        verdict = soft_verdict(broken, ("A", "B"))
        assert (
            verdict.logprobs is None
            and verdict.reason.startswith("not a number: ")
            and not verdict.parsed
        )
    assert soft_verdict([-math.inf, math.log(0.5)], ("A", "B")) == (
        (-math.inf, 0.0),
        0.5,
        False,
        "",
    )


def test_the_beginning_of_one_option_counts_and_of_two_does_not():
    verdict = read_verdict("Yes", [logs(Y=0.5, N=0.25, x=0.25)], ("Yes", "No"))
    assert verdict.logprobs == pytest.approx([math.log(2 / 3), math.log(1 / 3)])
    unclear = read_verdict("?", [logs(ye=1.0)], ("yes", "yellow"))
    assert unclear.logprobs is None


def test_marks_before_the_option_are_skipped():
    verdict = read_verdict("**B**", [[("**", -0.1), ("A", -3.0)], logs(B=0.8, A=0.2)], ("A", "B"))
    assert verdict.logprobs == pytest.approx([math.log(0.2), math.log(0.8)])


@pytest.mark.parametrize("broken", [math.nan, math.inf, 5.0])
def test_impossible_probabilities_are_not_read(broken):
    verdict = read_verdict("B", [[("A", broken)]], ("A", "B"))
    assert verdict.parsed and verdict.logprobs == (-math.inf, 0.0)


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("A", 0), (" B.", 1), ("**A**", 0), ("(B)", 1), ("Answer: B", 1), ("[A]\nbecause", 0), ("A, because it is", 0),
        ("A\n\nB", None), ("A better answer would be B", 1), ("Aha", None), ("a", None), ("", None), ("Both", None),
        ("A's", None), ("neither A", None),
    ],
)  # fmt: skip
def test_written_replies(text, option):
    assert written_option(text, ("A", "B")) == option


def test_a_reply_without_an_option_is_no_verdict():
    verdict = read_verdict("Sure, here are my thoughts", [], ("A", "B"))
    assert verdict.logprobs is None and verdict.parsed and "Sure, here" in verdict.reason
    cut_off = read_verdict(" **", [], ("A", "B"))  # its first word may have been an option
    assert (cut_off.logprobs, cut_off.parsed, cut_off.reason) == (
        None,
        False,
        "no word in the reply",
    )


WORDS = [
    *(
        "{x}",
        "**{x}**",
        "({x})",
        "[[{x}]]",
        "Answer: {x}",
        "The answer is {x}.",
        "Winner: {x}",
        "**Winner:** Answer {x}",
        "Verdict: **{x}**",
    ),
    *(
        "Final verdict: [[{x}]]",
        "I prefer answer {x}.",
        "I would choose {x}",
        "I'd pick option {x}.",
        "Answer {x} is better.",
    ),
    *(
        "Response {x} is clearly better than {y}.",
        "{x} wins.",
        "{x}, because {y} is vague.",
        "{x}. It is clearer.",
        "{x}\nIt is clearer.",
    ),
    *(
        "Answer {x}: poor. Answer {y}: good. So {y}.|{y}",
        "{x}: vague, short. {y}: exact. Winner: {y}|{y}",
        "My final answer is {x}",
    ),
    *(
        "Answer {x} is long.\nAnswer {y} is short.\n{y}|{y}",
        "The better answer is {x}",
        "\\boxed{{{x}}}",
        '{{"winner": "{x}"}}',
    ),
    *(
        "<answer>{x}</answer>",
        "{x} is a bit better",
        "Both have merits. Overall, {x}.",
        "We go with response {x}.",
    ),
    *(
        "<think>{x} looks good, I prefer {x}</think>{y}|{y}",
        "<think>\nhm {x}\n</think>\n\nWinner: {y}|{y}",
        "[[{x}]] since {y} is better in tone",
    ),
]
UNCLEAR = [
    *(
        "{x}={y}",
        "{x} < {y}",
        "{x}/{y}",
        "{x} or {y}?",
        "{x} and {y} are equal",
        "It is a tie between {x} and {y}.",
        "Neither {x} nor {y}.",
    ),
    *(
        "Answer {x}: poor. Answer {y}: good.",
        "{x}: vague. {y}: exact.",
        "Winner: {x}. Winner: {y}.",
        "Compare answer {x} with answer {y}.",
    ),
    *(
        "I prefer {x}. On second thought, I prefer {y}.",
        "[[{x}]] [[{y}]]",
        "<think>I prefer {x}",
        "Answer {x} has a list.",
        "not {x}",
    ),
    *(
        "{x}'s tone is kind",
        "Grade{x}",
        "{x}{y}",
        "The winner is not {x}",
        "{x}\n\n{y}",
        "Vitamin {x} helps",
    ),
]
TAILS = ["", "\n", " ", "\n\nThat is all."]


def test_thousands_of_worded_verdicts_are_read_as_they_are_meant():
    pairs = [("A", "B"), ("B", "A")]
    count = 0
    for x, y in pairs:
        for before in (
            "",
            "\n",
            "<think>Let me see. Answer A: fine.</think>\n",
            "**Reasoning:** both were read.\n\n",
        ):
            for tail in TAILS:
                for pattern in WORDS:
                    words, _, meant = pattern.partition("|")
                    if "think" in words and before:
                        continue
                    text = before + words.format(x=x, y=y) + tail
                    wanted = ("A", "B").index((meant or "{x}").format(x=x, y=y))
                    if (
                        before.startswith("**")
                        and written_option(words.format(x=x, y=y), ("A", "B")) is not None
                    ):
                        assert written_option(text, ("A", "B")) in (wanted, None), (
                            text
                        )  # an opening may make it unclear, never another
                    else:
                        assert written_option(text, ("A", "B")) == wanted, text
                    count += 1
                for pattern in UNCLEAR:
                    if "think" in pattern and before:
                        continue
                    text = before + pattern.format(x=x, y=y) + tail
                    assert written_option(text, ("A", "B")) is None, text
                    count += 1
    assert count > 1000


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("7", 7), ("Score: 7", 7), ("7/9", 7), ("7 out of 9", 7), ("**7**", 7), ("I'd give it a 7.", 7), ("Rating: 7 - good", 7),
        ("7\n", 7),
        ("10", None), ("10/10", None), ("7/10", None), ("8.5", None), ("7.5/9", None), ("-7", None), ("1. It is accurate.", None),
        ("1. It is accurate.\n2. It is short.\nScore: 6", 6), ("3 aspects "
                                                               "matter", None), ("<think>maybe "
                                                                                 "3</think>6", 6),
        ("12", None),
        ("<think>Score: 3", None), ("Score: 6 or 7", None),
    ],
)  # fmt: skip
def test_scores_of_another_scale_are_no_verdict(text, score):
    scale = tuple("123456789")
    assert written_option(text, scale) == (None if score is None else score - 1)


def test_log_probabilities_are_those_of_the_token_that_names_the_option():
    places = [
        logs(I=1.0),
        logs(**{" prefer": 1.0}),
        [(" B", math.log(0.8)), (" A", math.log(0.2))],
        [(".", 0.0)],
    ]
    verdict = read_verdict("I prefer B.", places, ("A", "B"))
    assert verdict.logprobs == pytest.approx([math.log(0.2), math.log(0.8)])
    ten = [[("1", math.log(0.9)), ("2", math.log(0.1))], [("0", 0.0)]]
    assert read_verdict("10", ten, tuple("123456789")).logprobs is None
    thought = [
        [("<think>", 0.0)],
        [("A", 0.0)],
        [("</think>", 0.0)],
        [("B", math.log(0.7)), ("A", math.log(0.3))],
    ]
    assert read_verdict("<think>A</think>B", thought, ("A", "B")).logprobs == pytest.approx(
        [math.log(0.3), math.log(0.7)],
    )


@pytest.mark.parametrize("text", ["", "<think>First, answer A", "Let me compare the two answers"])
def test_a_reply_that_was_cut_off_says_so(text):
    verdict = read_verdict(text, [], ("A", "B"), finished=False)
    assert (
        verdict.logprobs is None
        and not verdict.parsed
        and "cut off" in verdict.reason
        and "reply_tokens" in verdict.reason
    )


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("I think B.", 1), ("I think it's A", 0), ("I think A is worse than B.", None), ("I say A "
                                                                                         "is vague", None),
        ("I think B is better", 1), ("Overall, A is worse than B.", None),
    ],
)  # fmt: skip
def test_an_opinion_on_an_answer_is_no_vote_for_it(text, option):
    assert written_option(text, ("A", "B")) == option


@pytest.mark.parametrize(
    "text",
    [
        "I cannot say that A is better.",
        "I can't say that A is better than B.",
        "I don't think A is better.",
        "It is not clear that A wins.",
        "It's hard to say whether A is better.",
        "I am not sure that the answer is A.",
        "I would not say that the winner is A.",
        "There is no reason to think A is better.",
        "I doubt that A is better.",
        "One could argue that A is better.",
        "Some say A is better.",
        "Nobody could claim that A wins.",
        "A is better? I am not sure.",
        "Is it true that A is better?",
        "It is not the case that A wins.",
        "A is better in tone, B in facts. I cannot decide.",
        "I can't conclude that, overall, A is better.",
        "I refuse to say the answer is A.",
        "It depends on whether A is better at math.",
        "So the winner is A?",
        "I am unable to choose. A is better in style but I am undecided.",
        "It is false that A is better.",
    ],
)
def test_a_verdict_that_is_denied_doubted_asked_or_left_open_is_none(text):
    assert written_option(text, ("A", "B")) is None


@pytest.mark.parametrize(
    "text",
    [
        "I am not sure, but A is better.",
        "While B is not bad, A is better.",
        "It is hard to say, but I prefer A.",
        "I would say A is better.",
        "If I had to choose, I would choose A.",
        "B is not wrong. A is better.",
        "A. It is not perfect, though.",
        "A is better, although it is not perfect.",
        "I don't like B, so A wins.",
        "Answer A is clearly better than B, which does not say why.",
        "A",
        "Winner: A",
        "No doubt: A is better.",
        "After some thought, I prefer A.",
        "Both could be improved. Overall, A.",
        "I think A is better.",
        "Without doubt, A is better.",
    ],
)
def test_a_verdict_beside_a_doubt_is_read(text):
    assert written_option(text, ("A", "B")) == 0
