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

from pydantic import Field, model_validator

from tether.core.config import Config, load_recipe
from tether.core.errors import DataError, MissingFileError
from tether.core.protocols import ChatModel, Reply
from tether.core.types import Comparison, Conversation, Demonstration, Prompt, Sampling, assistant, user
from tether.preferences.judge import Rubric

PACKAGED = Path(__file__).resolve().parent.parent / "recipes" / "judge"


class Principle(Config):
    """A quality of good answers, as two requests to the model and as a rubric."""

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
    packaged = [PACKAGED / f"{name}{suffix}" for suffix in (".md", ".toml") if path.name == str(name)]
    if file := next((candidate for candidate in (path, *packaged) if candidate.is_file()), None):
        return file
    names = ", ".join(sorted(p.stem for p in PACKAGED.iterdir() if p.suffix in (".md", ".toml")))
    raise MissingFileError(f"no rubric named {name!s}: give the path of a text file or one of {names}")


@dataclass
class Revisions:
    """Demonstrations from critique and revision; prompts without a usable result are counted by the reason."""

    demonstrations: list[Demonstration] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


@dataclass
class _Draft:
    """The versions of a prompt's answer, the steps between them, and the reason why there will be no further one."""

    prompt: Prompt
    versions: list[str] = field(default_factory=list)
    steps: list[dict[str, str]] = field(default_factory=list)
    problem: str = ""

    def question(self, kind: str, principle: Principle) -> Conversation:
        if kind == "answer":
            return self.prompt.messages
        critique = (*self.prompt.messages, assistant(self.versions[-1]), user(principle.critique))
        return critique if kind == "critique" else (*critique, assistant(self.steps[-1]["critique"]), user(principle.revision))

    def take(self, kind: str, principle: Principle, reply: Reply) -> None:
        text, problem = reply.text or "", _problem(reply, may_be_cut=kind == "critique")
        if problem:
            self.problem = f"{kind}: {problem}"
        elif kind == "critique":
            self.steps.append({"principle": principle.name, "critique": text})
        else:
            self.versions.append(text)
            if kind == "revision":
                self.steps[-1]["revision"] = text


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

    A demonstration holds the prompt and the last version; its metadata the first answer (`initial`) and every critique and
    revision (`steps`). A prompt of which a reply failed or was empty, or an answer did not end in time, gives none.

    Args:
        told: hears how many of the `len(prompts) * (1 + 2 * rounds)` replies are done, those that need not be asked included.
    """
    drafts, done = [_Draft(prompt) for prompt in prompts], itertools.count(1)
    report = (lambda *_: told(next(done))) if told else lambda *_: None
    for number, kind in enumerate(("answer", *("critique", "revision") * rounds)):
        waiting = [draft for draft in drafts if not draft.problem]
        principles = [constitution.draw(str(seed), str((number - 1) // 2), _words(draft.prompt.messages)) for draft in waiting]
        questions = [draft.question(kind, principle) for draft, principle in zip(waiting, principles, strict=True)]
        for _ in range(len(drafts) - len(waiting)):
            report()
        replies = _ask(model, questions, sampling, seed, told=report)
        for draft, principle, reply in zip(waiting, principles, replies, strict=True):
            draft.take(kind, principle, reply)
    result = Revisions(failures=Counter(draft.problem for draft in drafts if draft.problem))
    for prompt, draft in ((draft.prompt, draft) for draft in drafts if not draft.problem):
        metadata = {**prompt.metadata, "initial": draft.versions[0], "steps": draft.steps, "model": model.name}
        result.demonstrations.append(Demonstration((*prompt.messages, assistant(draft.versions[-1])), prompt.id, metadata))
    return result


def sampled_pairs(
    model: ChatModel, prompts: Sequence[Prompt], sampling: Sampling, *, seed: int = 0
) -> tuple[list[Comparison], Counter[str]]:
    """Two answers to each prompt, not yet judged (`probability` 0.5), and the reasons why some prompts have no pair.

    Raises:
        DataError: the sampling is greedy, so that both answers would be the same.
    """
    if not sampling.temperature:
        raise DataError("two greedy answers are one answer: sample at a temperature above 0")
    first, second = (_ask(model, [prompt.messages for prompt in prompts], sampling, seed, sample) for sample in (0, 1))
    pairs, failures = [], Counter[str]()
    for prompt, a, b in zip(prompts, first, second, strict=True):
        if problem := _problem(a) or _problem(b):
            failures[f"answer: {problem}"] += 1
        elif a.text == b.text:
            failures["two equal answers"] += 1
        else:
            sides = ((assistant(a.text or ""),), (assistant(b.text or ""),))
            pairs.append(Comparison(prompt.messages, *sides, id=prompt.id, probability=0.5, metadata=dict(prompt.metadata)))
    return pairs, failures


def _problem(reply: Reply, *, may_be_cut: bool = False) -> str:
    """The reason why a reply cannot be used; empty where it can."""
    if not reply.text:
        return reply.reason.partition(": ")[0] or "empty"
    return "" if reply.finished or may_be_cut else "did not end in time"


def _ask(
    model: ChatModel,
    conversations: Sequence[Conversation],
    sampling: Sampling,
    seed: int,
    sample: int = 0,
    told: Callable[[int, Reply], None] | None = None,
) -> list[Reply]:
    """Replies whose randomness depends on what is asked and not on its place: other prompts before it change nothing."""
    ordinals = [_number(_words(conversation), str(sample)) for conversation in conversations]
    return model.replies(conversations, sampling, seed=seed, ordinals=ordinals, told=told) if conversations else []


def _words(conversation: Conversation) -> str:
    return "\x1e".join(f"{turn.role}\x1f{turn.content}" for turn in conversation)


def _number(*content: str) -> int:
    return int.from_bytes(hashlib.sha256("\x1d".join(content).encode(errors="replace")).digest()[:7], "big")
