"""Models whose verdicts and replies are set by hand."""

from __future__ import annotations

import math
import re
from collections import Counter

from tether.core.protocols import Reply, Verdict
from tether.core.types import Comparison, assistant, user

HEADING = re.compile(r"^\[([^\n\]]+) ([0-9a-f]{6,})\]\n", re.MULTILINE)


def pair(prompt, chosen, rejected, **more):
    return Comparison((user(prompt),), (assistant(chosen),), (assistant(rejected),), **more)


def parts(conversation):
    """The texts of a judge's question by their headings, cut at the mark of its last line but
    one.
    """
    text = conversation[-1].content
    mark = re.findall(r"\[end ([0-9a-f]{6})\]", text)[-1]
    material = text.split(f"\n\n[end {mark}]\n\n")[0]
    places = [(m.start(), m.end(), m[1]) for m in HEADING.finditer(material) if m[2] == mark]
    ends = [start - 2 for start, _, _ in places[1:]] + [len(material)]
    return {name: material[begin:end] for (_, begin, name), end in zip(places, ends, strict=True)}


def softly(odds):
    """A verdict with these log-odds of A against B."""
    return Verdict((-math.log1p(math.exp(-odds)), -math.log1p(math.exp(odds))), 0.9)


class Planted:
    """Speaks core.protocols.ChatModel: `odds(first, second)` of the first answer, or a whole
    verdict; `write(...)` a reply.
    """

    def __init__(self, odds=None, write=None, name="planted"):
        self.name, self.odds, self.write = name, odds, write
        self.questions, self.replied, self.options = [], [], []

    def verdicts(self, conversations, options, *, told=None):
        self.options.append(tuple(options))
        found = []
        for place, conversation in enumerate(conversations):
            self.questions.append(conversation)
            said = parts(conversation)
            answers = [said["answer"]] if "answer" in said else [said["answer A"], said["answer B"]]
            verdict = self.odds(*answers)
            found.append(verdict if isinstance(verdict, Verdict) else softly(verdict))
            if told:
                told(place, found[-1])
        return found

    def replies(self, conversations, sampling, *, seed=0, ordinals=None, told=None):
        found = []
        for place, conversation in enumerate(conversations):
            self.replied.append((conversation, seed, ordinals[place] if ordinals else place))
            said = self.write(conversation, self.replied[-1][2])
            found.append(said if isinstance(said, Reply) else Reply(said))
            if told:
                told(place, found[-1])
        return found

    def usage(self):
        return Counter(questions=len(self.questions) + len(self.replied))
