"""A judge that writes down its reasons before it gives a verdict: chain of thought.

Lee et al. 2023 (RLAIF), https://arxiv.org/abs/2309.00267, section 3.1: the reasons are written first, and the verdict's
probabilities are those of the reply that comes after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tether.core.protocols import ChatModel, PlacedAnswers, Verdict
from tether.core.types import Conversation, Sampling, assistant, user

FIRST = (
    "Do not reply yet. First weigh the material against the rubric: in a few sentences, name what counts for and against, "
    "and say nothing of the verdict."
)
THEN = "Now give the reply that was asked for, and nothing else."
NO_REASONS = "no reasons were written"
AT_A_TIME = 32
"""Questions whose reasons are written in one go: after each go their verdicts are kept, and progress is told."""


class Reasoning:
    """Speaks core.protocols.ChatModel, on top of another: every verdict comes after reasons of `tokens` tokens at most.

    Reasons are greedy, so that equal questions have equal verdicts. Reasons that did not end in time count as they stand; where
    none were written the verdict is missing for that reason.
    """

    def __init__(self, model: ChatModel, tokens: int) -> None:
        self.model, self.sampling = model, Sampling(max_new_tokens=tokens, temperature=0.0)
        self.name = f"{model.name}, reasons of {tokens} tokens"
        self.usage, self.replies = model.usage, model.replies

    def verdicts(
        self, conversations: Sequence[Conversation], options: Sequence[str], *, told: Callable[[int, Verdict], None] | None = None
    ) -> list[Verdict]:
        """See core.protocols.ChatModel."""
        verdicts = PlacedAnswers(told)
        for start in range(0, len(conversations), AT_A_TIME):
            part = conversations[start : start + AT_A_TIME]
            questions = [(*talk[:-1], user(f"{talk[-1].content}\n\n{FIRST}")) for talk in part]
            reasons = self.model.replies(questions, self.sampling, ordinals=[0] * len(part))
            ready: dict[int, Conversation] = {}
            for place, (talk, reason) in enumerate(zip(questions, reasons, strict=True), start):
                if reason.text:
                    ready[place] = (*talk, assistant(reason.text), user(THEN))
                else:
                    verdicts[place] = Verdict(None, reason=reason.reason or NO_REASONS)
            if places := list(ready):
                settle = lambda number, verdict, places=places: verdicts.__setitem__(places[number], verdict)  # noqa: E731
                self.model.verdicts(list(ready.values()), options, told=settle)
        return verdicts.in_order()
