"""A model in this process that is asked: how probable its reply begins with each of some options,
or what it writes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import torch

from tether.core.errors import DataError
from tether.core.protocols import Engine, PlacedAnswers, Reply, Told, Verdict
from tether.core.types import Conversation, Prompt, Sampling, assistant
from tether.data.batches import cut_batches, make_batch
from tether.data.chat import ChatEncoder, Encoded
from tether.judges.verdicts import UNASKABLE, soft_verdict
from tether.models.trunk import Role

MICRO_BATCH_TOKENS = {"cpu": 2**11}
"""Padded tokens of one forward pass, by device; elsewhere 2**14."""


@dataclass(frozen=True)
class _Branch:
    """A question with the first tokens that several options share; the next token, by option,
    decides.
    """

    question: int
    encoded: Encoded
    ends: Mapping[int, int]


class RoleEngine(Engine, Protocol):
    """An engine in this process that samples from a role (rollout.local.LocalEngine)."""

    role: Role
    encoder: ChatEncoder
    max_rows: int
    context_length: int


class LocalChat:
    """Implements core.protocols.ChatModel: the log-probabilities are those of sampling at
    temperature 1 from this very engine.

    A prompt is computed once for all options of one token: the state after it has the probabilities
    of all of them. Options of several tokens share it where the model can (data.batches).

    Args:
        name: of these weights and this encoding, different from all others.
        micro_batch_tokens: padded tokens of a forward pass, unset by device; results do not depend
            on it beyond rounding.
    """

    def __init__(
        self,
        name: str,
        engine: RoleEngine,
        *,
        micro_batch_tokens: int | None = None,
    ) -> None:
        self.name = name
        self.engine = engine
        self.role = engine.role
        self.encoder = engine.encoder
        self.micro_batch_tokens = micro_batch_tokens or MICRO_BATCH_TOKENS.get(
            self.role.device.type,
            2**14,
        )
        self.spent: Counter[str] = Counter()
        tokenizer = self.encoder.tokenizer
        control = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        control |= {
            *tokenizer.all_special_tokens,
            *tokenizer.convert_ids_to_tokens(list(self.encoder.stop_ids)),
        }
        self.control = sorted((token for token in control if len(token) > 1), key=len, reverse=True)

    def usage(self) -> Mapping[str, int]:
        return self.spent

    @torch.no_grad()
    def verdicts(
        self,
        talks: Sequence[Conversation],
        options: Sequence[str],
        *,
        told: Told[Verdict] = None,
    ) -> list[Verdict]:
        """See core.protocols.ChatModel. Answers come batch by batch, short questions first."""
        self.role.train_mode(False)
        verdicts = PlacedAnswers(told)
        logprobs: dict[int, dict[int, float]] = defaultdict(dict)
        branches: list[_Branch] = []
        for question, conversation in enumerate(talks):
            try:
                branches += self._branches(question, conversation, options)
            except DataError as error:
                verdicts[question] = Verdict(None, reason=f"{UNASKABLE}: {error}")
        sequences = [branch.encoded for branch in branches]
        size = self.micro_batch_tokens
        limit = self.role.document_tokens(size)
        for part in cut_batches(sequences, size, document_tokens=limit) if branches else ():
            chosen = [branches[i] for i in part]
            for branch, ends in zip(chosen, self._ends(chosen, limit), strict=True):
                of_options = logprobs[branch.question]
                of_options.update(zip(branch.ends, ends, strict=True))
                if len(of_options) == len(options):
                    verdicts[branch.question] = soft_verdict(
                        [of_options[i] for i in range(len(options))],
                        options,
                    )
        self.spent.update(questions=len(talks), prompt_tokens=sum(map(len, sequences)))
        return verdicts.in_order()

    def _branches(
        self,
        question: int,
        conversation: Conversation,
        options: Sequence[str],
    ) -> list[_Branch]:
        messages = self._as_data(conversation)
        encoded = [
            self.encoder.conversation((*messages, assistant(option)), "last") for option in options
        ]
        head = encoded[0].prompt_length
        self._check_length(max(map(len, encoded)))
        together: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
        for option, one in enumerate(encoded):
            # The stop token stands last: a reply that begins with an option may go on.
            *shared, end = one.ids[head:-1] or one.ids[head:]
            together[tuple(shared)][option] = end
        prompt = encoded[0].ids[:head]
        return [
            _Branch(
                question,
                self.encoder.rollout(prompt, (*shared, next(iter(ends.values())))),
                ends,
            )
            for shared, ends in together.items()
        ]

    def _ends(self, branches: Sequence[_Branch], limit: int) -> list[list[float]]:
        """The log-probability of each branch's options, its shared tokens included."""
        role = self.role
        sequences = [branch.encoded for branch in branches]
        batch = make_batch(sequences, self.encoder.pad_id, document_tokens=limit).to(
            role.device,
        )
        places = batch.scatter(batch.predict).tolist()
        wanted = [_wanted(row, branch) for row, branch in zip(places, branches, strict=True)]
        predict, targets = torch.tensor(
            [pair for row in wanted for pair in row],
            device=role.device,
        ).unbind(-1)
        questions = replace(batch, predict=predict, targets=targets)
        logprobs = []
        values = iter(role.logprobs_of(role.hidden(batch), questions)[0].tolist())
        for row, branch in zip(wanted, branches, strict=True):
            shared = sum(islice(values, len(row) - len(branch.ends)))
            logprobs.append([shared + value for value in islice(values, len(branch.ends))])
        return logprobs

    def replies(
        self,
        talks: Sequence[Conversation],
        sampling: Sampling,
        *,
        seed: int,
        ordinals: Sequence[int],
        told: Told[Reply] = None,
    ) -> list[Reply]:
        """See core.protocols.ChatModel; as many at a time as the engine decodes at once."""
        answers = PlacedAnswers(told)
        prompts = {}
        for place, conversation in enumerate(talks):
            messages = self._as_data(conversation)
            try:
                self._check_length(len(self.encoder.prompt(messages)) + sampling.max_new_tokens)
                prompts[place] = Prompt(messages)
            except DataError as error:
                answers[place] = Reply(None, False, f"{UNASKABLE}: {error}")
        places = sorted(prompts)
        for start in range(0, len(places), self.engine.max_rows):
            part = places[start : start + self.engine.max_rows]
            groups = self.engine.generate(
                [prompts[i] for i in part],
                sampling,
                seed=seed,
                ordinals=[ordinals[i] for i in part],
            )
            for place, group in zip(part, groups, strict=True):
                rollout = group.rollouts[0]
                self.spent.update(
                    questions=1,
                    prompt_tokens=len(rollout.prompt_ids),
                    reply_tokens=len(rollout.response_ids),
                )
                answers[place] = Reply(rollout.text, rollout.finished)
        return answers.in_order()

    def _check_length(self, length: int) -> None:
        if length > self.engine.context_length:
            raise DataError(
                f"{length} tokens do not fit the model's context of {self.engine.context_length}",
            )

    def _as_data(self, conversation: Conversation) -> Conversation:
        """The same words without control tokens: an answer that spells one must not end its turn."""
        turns = []
        for turn in conversation:
            text = turn.content
            for token in self.control:
                text = text.replace(token, f"{token[0]} {token[1:]}")
            turns.append(replace(turn, content=text))
        return tuple(turns)


def _wanted(places: Sequence[int], branch: _Branch) -> list[tuple[int, int]]:
    """(place of the state, token) for each shared token, then for each option's last."""
    shared = branch.encoded.num_trained - 1
    targets = branch.encoded.ids[len(branch.encoded) - shared - 1 : -1]
    return [
        *zip(places[:shared], targets, strict=True),
        *((places[shared], end) for end in branch.ends.values()),
    ]
