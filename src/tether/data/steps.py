"""Solutions as token ids with the place of every step's last token, found in the ids themselves.

One function, `step_ends`, finds the steps by reading ids. So it finds those of a sampled response
exactly like those of the training, for every way in which the tokenizer joins a delimiter.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tether.core.errors import DataError
from tether.core.types import Conversation, StepLabels, assistant
from tether.data.batches import TokenBatch
from tether.data.chat import ChatEncoder, Encoded
from tether.data.formats.fields import missing, number, sequence
from tether.data.prepare import Encoding, encode_rows, limit_of, warn_left_out, within
from tether.data.sources import group_of
from tether.settings.supervised import ProcessRewardConfig

Target = Literal["process", "outcome"]


@dataclass(frozen=True)
class Solution:
    """One solution in tokens.

    - id: the row's
    - group: the problem of the row
    - pieces: the steps' texts, cut at each delimiter
    - ends: for each piece, the index of its last token within the response
    - labels: for each piece, its correctness; None without a judgement
    - targets: for each piece, its training target: a probability, the number of a class, or None
    """

    id: str
    group: str
    prompt: Conversation
    pieces: tuple[str, ...]
    sequence: Encoded
    ends: tuple[int, ...]
    labels: tuple[bool | None, ...]
    targets: tuple[float | None, ...]

    @property
    def judged(self) -> list[int]:
        """Indices of the pieces that have a label."""
        return [k for k, label in enumerate(self.labels) if label is not None]

    @property
    def num_targets(self) -> int:
        return sum(target is not None for target in self.targets)


@dataclass(frozen=True)
class StepEncoder:
    """Finds the ends of steps, in labelled texts and in sampled ids.

    Args:
        delimiters: texts that end a step; the first one separates the steps of labelled solutions.
            The last step of a response ends with its stop token.
        target: label every step, or the last one alone: whether the whole solution is right.
        classes: 2: right or wrong, or a probability. 3: ratings -1, 0, 1, as the classes 0, 1, 2.
        label_column: the metadata column with targets of every step; empty: the row's own labels.
        problem_column: the metadata column that names the problem; empty: the prompt's own text.
    """

    encoder: ChatEncoder
    delimiters: tuple[str, ...] = ("\n\n",)
    target: Target = "process"
    classes: Literal[2, 3] = 2
    label_column: str = ""
    problem_column: str = ""

    @classmethod
    def of(cls, config: ProcessRewardConfig, encoder: ChatEncoder) -> StepEncoder:
        """With the settings of a stage."""
        return cls(
            encoder,
            config.delimiters,
            config.target,
            config.classes,
            config.label_column,
            config.problem_column,
        )

    def encode(self, row: StepLabels) -> Solution:
        """Text to tokens. A delimiter inside a step cuts it, and the pieces before its last one are
        unjudged.

        Raises:
            DataError: no step has a label, the row lacks a column, or the tokens do not give back
                the steps.
        """
        pieces = []
        owners = []
        for position, step in enumerate(row.steps):
            parts = self._cut(step)
            pieces += parts
            owners += [None] * (len(parts) - 1) + [position] * bool(parts)
        if not pieces:
            raise DataError("no step has any text")
        targets = self._targets(row, owners)
        if all(target is None for target in targets):
            raise DataError("no label to train on")
        tokens = self.encoder.conversation(
            (*row.prompt, assistant(self.delimiters[0].join(pieces))),
            "last",
        )
        ends = self.step_ends(tokens.ids[tokens.prompt_length :])
        if len(ends) != len(pieces):
            raise DataError(
                "the template or the tokenizer changes the steps: other ones are "
                "found in the tokens",
            )
        labels = tuple(None if k is None else row.labels[k] for k in owners)
        return Solution(
            row.id,
            self._problem(row),
            row.prompt,
            tuple(pieces),
            sequence=tokens,
            ends=ends,
            labels=labels,
            targets=targets,
        )

    def prefix(self, solution: Solution, count: int) -> Encoded:
        """The solution as if it ended after its first `count` pieces."""
        return self.encoder.conversation(
            (*solution.prompt, assistant(self.delimiters[0].join(solution.pieces[:count]))),
            "last",
        )

    def step_ends(self, response_ids: Sequence[int]) -> tuple[int, ...]:
        """Index of every step's last token: the one that completes the delimiter, and for the last
        step the response's last.

        Delimiters with nothing but white space before them end no step.
        """
        ids = list(response_ids)
        body = ids[:-1] if ids and ids[-1] in self.encoder.stop_ids else ids
        text = self._decode(body)
        ends = []
        start = 0
        for delimiter in self._pattern.finditer(text):
            if text[start : delimiter.start()].strip():
                ends.append(self._completes(body, text[: delimiter.end()], ends[-1] if ends else 0))
            start = delimiter.end()
        return (*ends, len(ids) - 1) if text[start:].strip() else tuple(ends)

    @property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(
            "|".join(re.escape(d) for d in sorted(self.delimiters, key=len, reverse=True)),
        )

    def _cut(self, text: str) -> list[str]:
        return [part.strip() for part in self._pattern.split(text) if part.strip()]

    def _completes(self, ids: list[int], head: str, low: int) -> int:
        """The first token, from `low` on, with which the decoded text begins with `head`: a token
        may be half a letter.
        """
        return bisect_left(
            range(len(ids)),
            True,
            low,
            key=lambda k: self._decode(ids[: k + 1]).startswith(head),
        )

    def _decode(self, ids: list[int]) -> str:
        return self.encoder.tokenizer.decode(
            ids,
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )

    def _targets(self, row: StepLabels, owners: Sequence[int | None]) -> tuple[float | None, ...]:
        if self.target == "outcome":
            right = False if False in row.labels else None if None in row.labels else True
            return (*[None] * (len(owners) - 1), None if right is None else float(right))
        given = (
            self._column(row)
            if self.label_column
            else [None if x is None else float(x) for x in row.labels]
        )
        return tuple(None if k is None else given[k] for k in owners)

    def _column(self, row: StepLabels) -> list[float | None]:
        cells = sequence(row.metadata.get(self.label_column), self.label_column)
        if len(cells) != len(row.steps):
            raise DataError(
                f"uneven lists: {len(row.steps)} steps but {len(cells)} in column "
                f"{self.label_column}",
            )
        given = [None if missing(cell) else number(cell, self.label_column) for cell in cells]
        if any(
            x is not None and (not 0 <= x <= 1 if self.classes == 2 else x not in (-1, 0, 1))
            for x in given
        ):
            wanted = "between 0 and 1" if self.classes == 2 else "-1, 0 or 1"
            raise DataError(
                f"label out of range: column {self.label_column} must hold numbers "
                f"that are {wanted}",
            )
        return [None if x is None else x + (self.classes == 3) for x in given]

    def _problem(self, row: StepLabels) -> str:
        if not self.problem_column:
            return group_of(row)
        name = row.metadata.get(self.problem_column)
        if missing(name):
            raise DataError(f"no column {self.problem_column}, which names the problem")
        return " ".join(str(name).casefold().split())


def encode_solutions(
    rows: Sequence[StepLabels],
    encoder: StepEncoder,
    config: ProcessRewardConfig,
) -> Encoding[Solution]:
    """The usable rows encoded, and the others counted by reason; many of them are a warning."""
    limit = limit_of(encoder.encoder, config, "process")

    def encode(row: StepLabels) -> Solution:
        solution = encoder.encode(row)
        within([solution.sequence], limit)
        return solution

    solutions, skipped = encode_rows(rows, encode)
    warn_left_out({"skipped": skipped}, len(rows), "solutions")
    return solutions, skipped


def step_states(batch: TokenBatch, ends: Sequence[Sequence[int]]) -> Tensor:
    """Flat indices into rows × time of the tokens that end steps, sequence by sequence: where their
    hidden states are.

    The state at a counted token is the one that predicts the next; the last of a sequence predicts
    nothing and has its own index.
    """
    states = torch.cat([batch.scatter(batch.predict)[:, 1:], batch.last[:, None]], 1)
    rows = torch.arange(len(batch.last), device=states.device)
    states[rows, batch.mask.sum(-1) - 1] = batch.last
    wanted = [(row, place) for row, places in enumerate(ends) for place in places]
    return states[tuple(torch.tensor(wanted, dtype=torch.long, device=states.device).view(-1, 2).T)]
