"""A model whose answers are kept in a file: what was asked once is never asked again, by this run
or by a later one.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tether.core.errors import DataError
from tether.core.keeping import make_folder
from tether.core.protocols import AnswerT, ChatModel, PlacedAnswers, Reply, Told, Verdict
from tether.core.types import Conversation, JsonValue, Message, Sampling

WAIT_FOR_CACHE = 10.0
"""Seconds for which another process may keep the file to itself."""


class CachedModel:
    """Implements core.protocols.ChatModel, on top of another.

    An answer's key is a digest of the model's name and of the whole question. The question has the
    conversation (rubric, prompt, tools, answers and their order), the options, or the sampling. Each
    answer is committed as soon as it is known, so killing the process loses at most those under
    way. Failures are asked again. A reply that names none of the options is kept, since the same
    question would get it again.

    Args:
        path: an SQLite file, made where there is none; several processes may share it.

    Raises:
        DataError: the file is something else.
    """

    def __init__(self, model: ChatModel, path: str | Path) -> None:
        self.model = model
        self.name = model.name
        self.path = Path(path)
        self.spent: Counter[str] = Counter()
        try:
            make_folder(self.path.parent)
            # Answers may be told from another thread than this one, but only by one at a time.
            self._file = sqlite3.connect(
                self.path,
                timeout=WAIT_FOR_CACHE,
                isolation_level=None,
                check_same_thread=False,
            )
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer "
                "TEXT NOT NULL) WITHOUT ROWID",
            )
        except (OSError, sqlite3.DatabaseError) as error:
            raise DataError(
                f"{self.path} cannot keep answers ({error}). Delete it, or name another file",
            ) from error

    def usage(self) -> Mapping[str, int]:
        """The cost of the model beneath, and the number of answers that came from the file:
        `recalled`.
        """
        return {**self.model.usage(), **self.spent}

    def verdicts(
        self,
        talks: Sequence[Conversation],
        options: Sequence[str],
        *,
        told: Told[Verdict] = None,
    ) -> list[Verdict]:
        """See core.protocols.ChatModel; equal questions are asked once."""

        def ask(places: Sequence[int], told: Told[Verdict]) -> object:
            return self.model.verdicts([talks[place] for place in places], options, told=told)

        keys = [self._key("verdict", talk, list(options)) for talk in talks]
        return self._answers(Verdict, keys, ask, told)

    def replies(
        self,
        talks: Sequence[Conversation],
        sampling: Sampling,
        *,
        seed: int,
        ordinals: Sequence[int],
        told: Told[Reply] = None,
    ) -> list[Reply]:
        """See core.protocols.ChatModel."""

        def ask(places: Sequence[int], told: Told[Reply]) -> object:
            new = [talks[place] for place in places]
            own = [ordinals[place] for place in places]
            return self.model.replies(new, sampling, seed=seed, ordinals=own, told=told)

        how = {name: getattr(sampling, name) for name in Sampling.__slots__}
        keys = [
            self._key("reply", talk, [how, seed, number])
            for talk, number in zip(talks, ordinals, strict=True)
        ]
        return self._answers(Reply, keys, ask, told)

    def _run(self, command: str, *values: str) -> tuple[str, ...] | None:
        """The first row of what a command gives."""
        try:
            return self._file.execute(command, values).fetchone()
        except sqlite3.DatabaseError as error:
            raise DataError(
                f"{self.path} cannot keep answers ({error}). Wait until no other program holds "
                "the file, or delete it, and start the same command again",
            ) from error

    def _key(self, kind: str, conversation: Conversation, more: object) -> str:
        question = [kind, self.name, [_keyed(turn) for turn in conversation], more]
        return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()

    def _answers(
        self,
        kind: type[AnswerT],
        keys: Sequence[str],
        ask: Callable[[Sequence[int], Told[AnswerT]], object],
        told: Told[AnswerT],
    ) -> list[AnswerT]:
        """The answers under these keys: from the file where they are worth keeping, else asked and
        written there.
        """
        places: dict[str, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(key, []).append(place)
        answers = PlacedAnswers(told)
        new = list[str]()

        def settle(key: str, answer: AnswerT) -> None:
            for place in places[key]:
                answers[place] = answer

        for key in places:
            row = self._run("SELECT answer FROM answers WHERE key = ?", key)
            fields: list[JsonValue] = (
                [tuple(v) if isinstance(v, list) else v for v in json.loads(row[0])] if row else []
            )
            if row and _lasts(answer := kind(*fields)):
                settle(key, answer)
            else:
                new.append(key)
        self.spent["recalled"] += len(places) - len(new)

        def heard(number: int, answer: AnswerT) -> None:
            if _lasts(answer):
                self._run(
                    "INSERT OR REPLACE INTO answers VALUES (?, ?)",
                    new[number],
                    json.dumps(answer),
                )
            settle(new[number], answer)

        if new:
            ask([places[key][0] for key in new], heard)
        return answers.in_order()


def _keyed(turn: Message) -> list[object]:
    """A turn for the key; fields that it lacks are left out, so that keys of former versions
    hold.
    """
    further = {
        name: text
        for name in ("tools", "reasoning", "name", "tool_call_id", "template")
        if (text := getattr(turn, name))
    }
    return [turn.role, turn.content, *turn.tool_calls, *([further] if further else ())]


def _lasts(answer: Verdict | Reply) -> bool:
    """True for an answer that the same question would get again, and that holds no NaN."""
    if isinstance(answer, Reply):
        return answer.text is not None
    return answer.parsed if answer.logprobs is None else not any(map(math.isnan, answer.logprobs))
