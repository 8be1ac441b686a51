"""Constitutional AI: a model criticises and rewrites its answers by principles, and compares
answers by them.

Bai et al. 2022, https://arxiv.org/abs/2212.08073. The rewritten answers are demonstrations for
supervised fine-tuning (section 3), the comparisons train a reward model (section 4).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import Field

from tether.core.errors import DataError, MissingFileError
from tether.core.protocols import ChatModel, Finished, Reply, counting
from tether.core.types import (
    Comparison,
    Conversation,
    Demonstration,
    Json,
    Prompt,
    Sampling,
    assistant,
    user,
)
from tether.judges.pairwise import Rubric
from tether.settings.config import Config
from tether.settings.reading import load_recipe

PACKAGED = Path(__file__).resolve().parent.parent / "settings" / "recipes" / "judge"


class Principle(Config):
    """A quality of good answers, as two requests to the model and as a rubric."""

    name: str = Field(min_length=1)
    critique: str = Field(min_length=1, description="asks what is wrong with the last answer")
    revision: str = Field(min_length=1, description="asks for the answer without that")
    compare: str = Field(min_length=1, description="what makes one of two answers better")


class Constitution(Config):
    """Principles; each use draws one, by the content it is used on and so always the same."""

    principles: tuple[Principle, ...] = Field(min_length=1)

    def faults(self) -> Iterator[str]:
        names = [principle.name for principle in self.principles]
        if len(set(names)) < len(names):
            yield f"two principles have one name: {max(names, key=names.count)!r}"

    def draw(self, *content: str) -> Principle:
        return self.principles[_number(*content) % len(self.principles)]

    def rubric(self, comparison: Comparison) -> str:
        """The words of the principle for this comparison, in either order of its sides."""
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
    """A rubric from a text file or of those that come with tether (`helpful`, `harmless`); from a
    TOML file a principle for each comparison.

    Raises:
        MissingFileError: there is no such file.
        DataError: it is empty or not UTF-8.
        ConfigError: it is a TOML file without a list of principles.
    """
    path = _file(name)
    if path.suffix == ".toml":
        return read_constitution(path).rubric
    try:
        words = path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: no rubric can be read: byte {error.start} is not UTF-8. Save "
            "the file as UTF-8",
        ) from None
    if not words:
        raise DataError(f"{path} is empty: write down what makes an answer better")
    return words


def _file(name: str | Path) -> Path:
    path = Path(name).expanduser()
    packaged = [
        PACKAGED / f"{name}{suffix}" for suffix in (".md", ".toml") if path.name == str(name)
    ]
    for file in (path, *packaged):
        if file.is_file():
            return file
    names = ", ".join(sorted(p.stem for p in PACKAGED.iterdir() if p.suffix in (".md", ".toml")))
    raise MissingFileError(
        f"no rubric named {name!s}: give the path of a text file or one of {names}",
    )


def revise(
    model: ChatModel,
    constitution: Constitution,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    rounds: int = 1,
    seed: int = 0,
    told: Finished = None,
) -> tuple[list[Demonstration], Counter[str]]:
    """Answer each prompt, then criticise and rewrite the answer `rounds` times, each time by a
    principle drawn for it.

    A demonstration holds the prompt and the last version; its metadata the first answer (`initial`)
    and every critique and revision (`steps`). A prompt gives none if a reply failed or was empty,
    or if an answer did not end in time. These are counted by the reason.

    Args:
        told: called with the number of finished replies out of `len(prompts) * (1 + 2 * rounds)`,
            cached ones included.
    """
    report = counting(told) or (lambda *_: None)
    problems = dict[int, str]()

    def ask(kind: str, talks: Mapping[int, Conversation]) -> dict[int, str]:
        """The texts of the replies that can be used, by the places of their prompts."""
        for _ in range(len(prompts) - len(talks)):
            report()
        waiting = list(talks.values())
        texts = dict[int, str]()
        replies = model.replies(
            waiting,
            sampling,
            seed=seed,
            ordinals=_ordinals(waiting),
            told=report,
        )
        for place, reply in zip(talks, replies, strict=True):
            if problem := _problem(reply, may_be_cut=kind == "critique"):
                problems[place] = f"{kind}: {problem}"
            else:
                texts[place] = reply.text or ""
        return texts

    initial = answers = ask(
        "answer",
        {place: prompt.messages for place, prompt in enumerate(prompts)},
    )
    steps: dict[int, list[Json]] = {place: [] for place in initial}
    for number in range(rounds):
        drawn = {
            place: constitution.draw(str(seed), str(number), _words(prompts[place].messages))
            for place in answers
        }
        talks = {
            p: (*prompts[p].messages, assistant(text), user(drawn[p].critique))
            for p, text in answers.items()
        }
        critiques = ask("critique", talks)
        talks = {
            p: (*talks[p], assistant(text), user(drawn[p].revision))
            for p, text in critiques.items()
        }
        answers = ask("revision", talks)
        for place, text in answers.items():
            steps[place].append(
                {"principle": drawn[place].name, "critique": critiques[place], "revision": text},
            )
    demonstrations = []
    for place, text in answers.items():
        prompt = prompts[place]
        drafts = {"initial": initial[place], "steps": steps[place], "model": model.name}
        demonstrations.append(
            Demonstration(
                (*prompt.messages, assistant(text)),
                prompt.id,
                {**prompt.metadata, **drafts},
            ),
        )
    return demonstrations, Counter(problem for _, problem in sorted(problems.items()))


def sampled_pairs(
    model: ChatModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    seed: int = 0,
) -> tuple[list[Comparison], Counter[str]]:
    """Two answers to each prompt, not yet judged (`probability` 0.5), and the reasons why some
    prompts have no pair.

    Raises:
        DataError: the sampling is greedy, so that both answers would be the same.
    """
    if not sampling.temperature:
        raise DataError("two greedy answers are one answer: sample at a temperature above 0")
    talks = [prompt.messages for prompt in prompts]
    first, second = (
        model.replies(talks, sampling, seed=seed, ordinals=_ordinals(talks, sample))
        for sample in (0, 1)
    )
    pairs = []
    failures = Counter[str]()
    for prompt, a, b in zip(prompts, first, second, strict=True):
        if problem := _problem(a) or _problem(b):
            failures[f"answer: {problem}"] += 1
        elif a.text == b.text:
            failures["two equal answers"] += 1
        else:
            sides = ((assistant(a.text or ""),), (assistant(b.text or ""),))
            pairs.append(
                Comparison(
                    prompt.messages,
                    *sides,
                    id=prompt.id,
                    probability=0.5,
                    metadata=dict(prompt.metadata),
                ),
            )
    return pairs, failures


def _problem(reply: Reply, *, may_be_cut: bool = False) -> str:
    """The reason why a reply cannot be used; empty where it can."""
    if not reply.text:
        return reply.reason.partition(": ")[0] or "empty"
    return "" if reply.finished or may_be_cut else "did not end in time"


def _ordinals(conversations: Sequence[Conversation], sample: int = 0) -> list[int]:
    """Numbers that depend on the question alone: other prompts before it change nothing."""
    return [_number(_words(conversation), str(sample)) for conversation in conversations]


def _words(conversation: Conversation) -> str:
    return "\x1e".join(f"{turn.role}\x1f{turn.content}" for turn in conversation)


def _number(*content: str) -> int:
    return int.from_bytes(
        hashlib.sha256("\x1d".join(content).encode(errors="replace")).digest()[:7],
        "big",
    )
