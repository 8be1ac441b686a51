"""Reasons before a verdict: what is asked, in which order, and what happens to reasons that
fail.
"""

from tests.judges.planted_judges import Planted, pair, parts

from tether.core.protocols import ChatModel, Reply, Verdict
from tether.core.types import Prompt, user
from tether.judges.cache import CachedModel
from tether.judges.pairwise import AT_A_TIME, PairJudge, Reasoning, judged_scores

ROWS = [pair(f"q{n}", f"good {n}", f"bad {n}") for n in range(AT_A_TIME)]
"""Two questions each, so more than are asked at a time."""


class Swayed(Planted):
    """Knows nothing of the answers: it follows its own reasons, which name the good answer's
    letter.
    """

    def __init__(self):
        super().__init__(write=self.reasons)

    @staticmethod
    def reasons(conversation, ordinal):
        return "for " + ("A" if parts(conversation)["answer A"].startswith("good") else "B")

    def verdicts(self, conversations, options, *, told=None):
        found = []
        for place, talk in enumerate(conversations):
            self.questions.append(talk)
            odds = 2.0 if talk[-2].content == "for A" else -2.0
            found.append(Verdict((odds, 0.0)))
            told(place, found[-1])
        return found


def test_the_verdict_comes_after_the_models_own_reasons():
    model, told = Swayed(), []
    asked = Reasoning(model, 40)
    judgments = PairJudge(asked, "Be kind.").judge(ROWS, told=told.append)
    assert all(j.log_odds == 2.0 and j.bias == 0.0 for j in judgments) and len(told) == 2 * len(
        ROWS,
    )
    assert isinstance(asked, ChatModel) and len(model.replied) == len(model.questions) == 2 * len(
        ROWS,
    )
    (first,), talk = model.replied[0][0], model.questions[0]
    assert (
        [turn.role for turn in talk] == ["user", "assistant", "user"]
        and talk[0] == first
        and "Be kind." in first.content
    )
    plain = Planted(lambda first, second: 0.0)
    PairJudge(plain, "Be kind.").judge(ROWS[:1])
    assert first.content.startswith(plain.questions[0][0].content)


def test_reasons_that_fail_are_no_verdict_and_those_cut_short_count():
    said = iter([Reply(None, False, "HTTP 500: x"), Reply(""), Reply("for A", finished=False)])
    model = Swayed()
    model.write = lambda conversation, ordinal: next(said)
    told = {}
    found = Reasoning(model, 40).verdicts(
        [(user(f"{n}"),) for n in range(3)],
        ("A", "B"),
        told=told.__setitem__,
    )
    assert [v.reason for v in found[:2]] == ["HTTP 500: x", "no reasons were written"] and [
        v.logprobs for v in found[:2]
    ] == [None] * 2
    assert found[2].logprobs == (2.0, 0.0) and told == dict(enumerate(found))


def test_reasons_are_kept_and_their_length_tells_judges_apart(tmp_path):
    model = Swayed()
    kept = CachedModel(model, tmp_path / "c.sqlite")
    first = PairJudge(Reasoning(kept, 40), "x").judge(ROWS[:3])
    assert (
        PairJudge(Reasoning(kept, 40), "x").judge(ROWS[:3]) == first
        and len(model.replied) == len(model.questions) == 6
    )
    PairJudge(Reasoning(kept, 50), "x").judge(ROWS[:3])
    assert len(model.replied) == 12
    assert Reasoning(model, 40).name != Reasoning(model, 50).name != model.name


def test_scores_come_after_reasons_too():
    model = Planted(lambda answer: Verdict((0.0,) * 9), write=lambda conversation, ordinal: "fine")
    model.verdicts = lambda talks, options, told: [
        told(i, Verdict((-1e9,) * 8 + (0.0,))) for i, _ in enumerate(talks)
    ]
    assert judged_scores(Reasoning(model, 8), "x", [Prompt((user("q"),))], ["a"])[0].value == 9.0
