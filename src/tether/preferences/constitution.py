"""Constitutional AI: a model criticises and rewrites its answers by principles, and compares answers by them.

Bai et al. 2022, https://arxiv.org/abs/2212.08073. The rewritten answers are demonstrations for supervised fine-tuning (section
3), the comparisons train a reward model (section 4).
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from tether.core.config import Config, load_recipe
from tether.core.errors import DataError, MissingFileError
from tether.core.protocols import ChatModel, Reply
from tether.core.types import Comparison, Conversation, Demonstration, Prompt, Sampling, assistant, user
from tether.preferences.judge import Rubric

PACKAGED = Path(__file__).resolve().parent.parent / "recipes" / "judge"


class Principle(Config):
    """What answers should be like, as two requests to the model and as a rubric."""

    name: str = Field(min_length=1)
    critique: str = Field(min_length=1, description="asks what is wrong with the last answer")
    revision: str = Field(min_length=1, description="asks for the answer without that")
    compare: str = Field(min_length=1, description="what makes one of two answers better")


class Constitution(Config):
    """Principles; each use draws one, by the content it is used on and so always the same."""

    principles: tuple[Principle, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Constitution:
        names = [principle.name for principle in self.principles]
        if len(set(names)) < len(names):
            raise ValueError(f"two principles have one name: {max(names, key=names.count)!r}")
        return self

    def draw(self, *content: str) -> Principle:
        return self.principles[_number(*content) % len(self.principles)]

    def rubric(self, comparison: Comparison) -> str:
        """The words of the principle for this comparison, in whichever order its sides stand."""
        sides = sorted(_words(side) for side in (comparison.chosen, comparison.rejected))
        return self.draw(_words(comparison.prompt), *sides).compare


def read_constitution(name: str | Path) -> Constitution:
    """The principles in a TOML file, or those that come with tether: `constitution`.

    Raises:
        MissingFileError: there is no such file.
        ConfigError: it is no list of principles.
    """
    return load_recipe(_file(name), Constitution)


def read_rubric(name: str | Path) -> Rubric:
    """A rubric from a text file or of those that come with tether (`helpful`, `harmless`); from a TOML file a principle for each
    comparison.

    Raises:
        MissingFileError: there is no such file.
        DataError: it is empty or not UTF-8.
        ConfigError: it is a TOML file, but no list of principles.
    """
    path = _file(name)
    if path.suffix == ".toml":
        return read_constitution(path).rubric
    try:
        words = path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: no rubric can be read: byte {error.start} is not UTF-8. Save the file as UTF-8") from None
    if not words:
        raise DataError(f"{path} is empty: write down what makes an answer better")
    return words


def _file(name: str | Path) -> Path:
    path = Path(name).expanduser()
    found = [path, *(PACKAGED / f"{name}{suffix}" for suffix in (".md", ".toml") if path.name == str(name))]
    for candidate in found:
        if candidate.is_file():
            return candidate
    names = ", ".join(sorted(p.stem for p in PACKAGED.iterdir() if p.suffix in (".md", ".toml")))
    raise MissingFileError(f"no rubric named {name!s}: give the path of a text file or one of {names}")


@dataclass
class Revisions:
    """What came of critique and revision; prompts without a usable result are counted by what went wrong."""

    demonstrations: list[Demonstration] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


@dataclass
class _Draft:
    """A prompt's answer as it stands, what is said next, and how it came about."""

    prompt: Prompt
    talk: Conversation
    answer: str = ""
    initial: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)
    wrong: str = ""

    def hear(self, what: str, reply: Reply) -> None:
        if reply.text is None:
            self.wrong = f"{what}: {reply.reason.partition(': ')[0]}"
        elif not reply.text:
            self.wrong = f"{what}: empty"
        elif not reply.finished and what != "critique":  # what a critique has said by then is said
            self.wrong = f"{what}: did not end in time"
        elif what == "answer":
            self.initial = self.answer = reply.text
        else:
            self.steps[-1][what] = reply.text
            self.answer = self.steps[-1].get("revision", self.answer)


def revise(
    model: ChatModel,
    constitution: Constitution,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    rounds: int = 1,
    seed: int = 0,
    told: Callable[[int], None] | None = None,
) -> Revisions:
    """Answer each prompt, then criticise and rewrite the answer `rounds` times, each time by a principle drawn for it.

    A demonstration holds the prompt and the last version, its metadata the first answer (`initial`) and all that was said on the
    way (`steps`). A prompt of which a reply failed or was empty, or an answer did not end in time, gives none.

    Args:
        told: hears how many of the `len(prompts) * (1 + 2 * rounds)` replies are done, those that need not be asked included.
    """
    drafts, done = [_Draft(prompt, prompt.messages) for prompt in prompts], itertools.count(1)

    def heard(*_: object) -> None:
        if told:
            told(next(done))

    for number, what in enumerate(("answer", *("critique", "revision") * rounds)):
        waiting = [draft for draft in drafts if not draft.wrong]
        for draft in waiting if what != "answer" else ():
            asked = draft.prompt.messages
            principle = constitution.draw(str(seed), str((number - 1) // 2), _words(asked))
            draft.talk = (*asked, assistant(draft.answer), user(principle.critique))
            if what == "critique":
                draft.steps.append({"principle": principle.name})
            else:
                draft.talk += (assistant(draft.steps[-1]["critique"]), user(principle.revision))
        for _ in range(len(drafts) - len(waiting)):
            heard()
        for draft, reply in zip(waiting, _ask(model, [d.talk for d in waiting], sampling, seed, told=heard), strict=True):
            draft.hear(what, reply)
    result = Revisions(failures=Counter(draft.wrong for draft in drafts if draft.wrong))
    for draft in drafts:
        if not draft.wrong:
            metadata = {**draft.prompt.metadata, "initial": draft.initial, "steps": draft.steps, "model": model.name}
            messages = (*draft.prompt.messages, assistant(draft.answer))
            result.demonstrations.append(Demonstration(messages, draft.prompt.id, metadata))
    return result


def sampled_pairs(
    model: ChatModel, prompts: Sequence[Prompt], sampling: Sampling, *, seed: int = 0
) -> tuple[list[Comparison], Counter[str]]:
    """Two answers to each prompt, not yet judged (`probability` 0.5), and why some prompts have no pair.

    Raises:
        DataError: the sampling is greedy, so that both answers would be the same.
    """
    if not sampling.temperature:
        raise DataError("two greedy answers are one answer: sample at a temperature above 0")
    conversations = [prompt.messages for prompt in prompts for _ in range(2)]
    replies = _ask(model, conversations, sampling, seed, samples=[i % 2 for i in range(len(conversations))])
    pairs, failures = [], Counter[str]()
    for prompt, a, b in zip(prompts, replies[::2], replies[1::2], strict=True):
        if not a.text or not b.text:
            failures["answer: " + ((a if not a.text else b).reason.partition(": ")[0] or "empty")] += 1
        elif not (a.finished and b.finished):
            failures["answer: did not end in time"] += 1
        elif a.text == b.text:
            failures["two equal answers"] += 1
        else:
            sides = ((assistant(a.text),), (assistant(b.text),))
            pairs.append(Comparison(prompt.messages, *sides, id=prompt.id, probability=0.5, metadata=dict(prompt.metadata)))
    return pairs, failures


def _ask(
    model: ChatModel,
    conversations: Sequence[Conversation],
    sampling: Sampling,
    seed: int,
    *,
    samples: Sequence[int] | None = None,
    told: Callable[[int, Reply], None] | None = None,
) -> list[Reply]:
    """Replies whose randomness depends on what is asked and not on its place: other prompts before it change nothing."""
    samples = samples or [0] * len(conversations)
    ordinals = [_number(_words(c), str(sample)) for c, sample in zip(conversations, samples, strict=True)]
    return model.replies(conversations, sampling, seed=seed, ordinals=ordinals, told=told) if conversations else []


def _words(conversation: Conversation) -> str:
    return "\x1e".join(f"{turn.role}\x1f{turn.content}" for turn in conversation)


def _number(*content: str) -> int:
    return int.from_bytes(hashlib.sha256("\x1d".join(content).encode(errors="replace")).digest()[:7], "big")
