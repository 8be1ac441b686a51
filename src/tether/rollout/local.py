"""The in-process engine: samples from a policy role with the very weights that are being trained.

Continuous batching: a row that has finished leaves, and a waiting prompt takes its slot. A prompt is prefilled once for all
of its samples. Rows of different ages stand in slots from place 0 on, so there is no padding between a prompt and its answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tether.core.types import Prompt, RolloutGroup, Sampling, StopReason
from tether.cpu.llama import KeysAndValues
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role
from tether.rollout.drawn import Drawn, Draws, Ids, as_group, encode_prompts, has_stop_string
from tether.rollout.sampling import counter_uniform, sample_tokens

ROWS = 16
"""With nobody waiting, row counts fall in multiples of this: every new shape costs a CPU's matrix kernels a set-up."""
PREFILL_TOKENS = {"cpu": 2**10}
"""Tokens of one prefill pass, by device: on a CPU small passes of prompts of one length waste least. Elsewhere 2**14."""
REFILL = 8
"""New prompts are prefilled together when 1/REFILL of the slots are free."""


class LocalEngine:
    """Speaks core.protocols.Engine.

    Args:
        max_rows: how many responses are decoded at once, at least the samples of one prompt, and fewer where the cache would not
            fit into memory; results do not depend on it beyond rounding.
        context_length: the model's limit; a prompt that leaves no room for its response is refused.
        cpu_kernels: decode and sample with them on a CPU, where they can be had.

    A model whose rows cannot stand in slots (recurrent states, ALiBi) is sampled from by `rollout.in_step`.

    Raises:
        ModelError: the model computes other states token by token than at once.
    """

    def __init__(
        self, role: Role, encoder: ChatEncoder, *, max_rows: int = 64, context_length: int = 2**31, cpu_kernels: bool = True
    ) -> None:
        from tether.rollout.decoding import engine_decoder
        from tether.rollout.proof import step_decoder

        self.role, self.encoder = role, encoder
        self.decoder, self.cpu_kernels = engine_decoder(role, cpu_kernels=cpu_kernels), cpu_kernels
        self.in_step = step_decoder(role, self.decoder)
        self.max_rows, self.context_length = max_rows, context_length
        self.policy_version = 0

    def update_weights(self, version: int) -> None:
        """Stamp what is sampled from now on. The tensors are the learner's own, or copies that `generate` brings up to date."""
        self.policy_version = version

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        num_samples: int = 1,
        seed: int = 0,
        ordinals: Sequence[int] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[RolloutGroup]:
        """See core.protocols.Engine.generate.

        Raises:
            DataError: a prompt and its response do not fit the model's context.
        """
        rows = encode_prompts(self.encoder, prompts, sampling, self.context_length)
        ordinals = range(len(prompts)) if ordinals is None else ordinals
        drawn = self.draw(rows, ordinals, sampling, num_samples, seed, progress)
        return [
            as_group(self.encoder, prompt, ids, samples, sampling, self.policy_version)
            for prompt, ids, samples in zip(prompts, rows, drawn, strict=True)
        ]

    @torch.no_grad()
    def draw(
        self,
        rows: list[Ids],
        ordinals: Sequence[int],
        sampling: Sampling,
        num_samples: int,
        seed: int,
        progress: Callable[[int], None] | None = None,
    ) -> list[list[Drawn]]:
        """`num_samples` responses to each row of prompt ids: `generate` in tokens."""
        if self.in_step is not None:
            from tether.rollout.in_step import draw_in_step

            responses = Draws(rows, ordinals, sampling, num_samples, seed)
            return draw_in_step(self.in_step, self.encoder, responses, self.max_rows, progress)
        for product in self.decoder.products:
            product.refresh()
        decoding = _Decoding(self, rows, list(ordinals), sampling, num_samples, seed)
        while decoding.busy:
            decoding.admit()
            decoding.step()
            if progress:
                progress(len(decoding.finished))
        return [[decoding.finished[n * num_samples + sample] for sample in range(num_samples)] for n in range(len(rows))]


class _Decoding:
    """One call of `generate`. Slots 0 .. rows - 1 are decoded; a free one among them waits for a prompt, or for the last to move.

    Requests are numbered prompt by prompt, sample by sample. State of a slot, each (slots,): `request` (-1: free), `ordinals`,
    `samples`, `steps` (tokens drawn so far), `cache_lengths`; `hidden` (slots, dim) predicts its next token.
    """

    def __init__(
        self, engine: LocalEngine, prompts: list[Ids], ordinals: list[int], sampling: Sampling, num_samples: int, seed: int
    ) -> None:
        from tether.rollout.cache import SlotCache, rows_that_fit

        self.engine, self.role, self.sampling, self.seed = engine, engine.role, sampling, seed
        self.decoder, self.prefix = engine.decoder, _common_prefix(prompts)
        self.prompts, self.prompt_ordinals, self.num_samples = prompts, ordinals, num_samples
        device = self.role.device
        capacity = max(map(len, prompts), default=0) + sampling.max_new_tokens
        rows = min(engine.max_rows, rows_that_fit(self.role.causal_model, capacity))
        slots = min(max(rows, num_samples), len(prompts) * num_samples)
        # Long prompts first: the last rows to finish then began with the fewest tokens.
        self.waiting = deque(sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i)))
        self.cache = SlotCache(self.role.causal_model.config, slots, capacity, in_place=self.decoder.in_place)
        self.prefix_layers: KeysAndValues = []
        self.request = torch.full((slots,), -1, device=device)
        self.ordinals, self.samples, self.steps, self.cache_lengths = (torch.zeros_like(self.request) for _ in range(4))
        self.hidden: Tensor | None = None
        self.tokens = torch.zeros(slots, sampling.max_new_tokens, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(slots, sampling.max_new_tokens, device=device)
        self.stop_ids = torch.tensor(engine.encoder.stop_ids, device=device)
        self.rows = 0
        self.finished: dict[int, Drawn] = {}

    @property
    def busy(self) -> bool:
        return len(self.finished) < len(self.prompts) * self.num_samples

    def admit(self) -> None:
        """Fill free slots with waiting prompts, once enough are free to make a prefill worth its weights."""
        free = (self.request < 0).nonzero()[:, 0]
        groups = min(len(free) // self.num_samples, len(self.waiting))
        if not groups or (len(free) < len(self.request) // REFILL and len(self.waiting) > groups):
            return
        budget = PREFILL_TOKENS.get(self.role.device.type, 2**14)
        while groups:
            count = min(groups, max(1, budget // (len(self.prompts[self.waiting[0]]) - len(self.prefix))))
            self._enter(count, free[: count * self.num_samples])
            free, groups = free[count * self.num_samples :], groups - count

    def _enter(self, groups: int, slots: Tensor) -> None:
        """The next `groups` prompts take these slots, each for all of its samples."""
        numbers, count = [self.waiting.popleft() for _ in range(groups)], self.num_samples
        hidden = self._prefill([self.prompts[i] for i in numbers], slots)
        if self.hidden is None:
            self.hidden = hidden.new_zeros(len(self.request), hidden.shape[-1])
        states = [(i * count, self.prompt_ordinals[i], len(self.prompts[i])) for i in numbers]
        first, ordinals, lengths = torch.tensor(states, device=slots.device).repeat_interleave(count, 0).T
        samples = torch.arange(count, device=slots.device).repeat(groups)
        self.request[slots], self.samples[slots] = first + samples, samples
        self.ordinals[slots], self.cache_lengths[slots], self.steps[slots] = ordinals, lengths, 0
        self.hidden[slots] = hidden.repeat_interleave(count, 0)
        self.rows = max(self.rows, int(slots.max()) + 1)

    def _prefill(self, prompts: list[Ids], slots: Tensor) -> Tensor:
        """Keys and values of some prompts into the slots of all their samples; the state after each prompt, (prompts, dim)."""
        shared, device = len(self.prefix), self.role.device
        width = max(map(len, prompts)) - shared
        ids = torch.full((len(prompts), width), self.engine.encoder.pad_id)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt) - shared] = torch.tensor(prompt[shared:])
        if self.prefix and not self.prefix_layers:  # what all prompts begin with (a template's system message), computed once
            _, self.prefix_layers = self.decoder.prefill(torch.tensor([self.prefix], device=device), [])
        # Padding stands on the right, where causal attention hides it, and is overwritten by the answer.
        lengths = torch.tensor([len(p) - shared for p in prompts], device=device)
        states, layers = self.decoder.prefill(ids.to(device), self.prefix_layers, lengths)
        owner = torch.arange(len(prompts), device=device).repeat_interleave(self.num_samples)
        for slot, (keys, values) in zip(self.cache.slots, layers, strict=True):
            slot.fill(slots, keys[owner], values[owner], self.cache.capacity)
        return states[torch.arange(len(prompts), device=device), lengths - 1]

    def step(self) -> None:
        """One token for every row, then the state that predicts the next."""
        assert self.hidden is not None
        rows, request = self.rows, self.request[: self.rows]
        uniforms = counter_uniform(self.seed, self.ordinals[:rows], self.samples[:rows], self.steps[:rows])
        logits = self.role.logits(self.hidden[:rows], self.decoder.head)
        tokens, logprobs = sample_tokens(logits, uniforms, self.sampling, cpu_kernels=self.engine.cpu_kernels)
        places = torch.arange(rows, device=tokens.device), self.steps[:rows]
        self.tokens[places], self.logprobs[places] = tokens, logprobs
        self.steps[:rows] += request >= 0
        self._release(tokens, request)
        if not self.busy:
            return
        if not self.waiting:
            self._close_up()
        self._advance()

    def _release(self, tokens: Tensor, request: Tensor) -> None:
        """Take down the rows that ended with these tokens, and free their slots."""
        stopped = torch.isin(tokens, self.stop_ids)
        ended = ((stopped | (self.steps[: self.rows] >= self.sampling.max_new_tokens)) & (request >= 0)).tolist()
        stopped, numbers = stopped.tolist(), request.tolist()
        for row in range(self.rows):
            if numbers[row] < 0:
                continue
            reason = StopReason.STOP_TOKEN if stopped[row] else StopReason.LENGTH
            if not stopped[row] and has_stop_string(self.engine.encoder, self.sampling, self.tokens[row, : int(self.steps[row])]):
                reason, ended[row] = StopReason.STOP_STRING, True
            if ended[row]:
                length = int(self.steps[row])
                ids, logprobs = tuple(self.tokens[row, :length].tolist()), tuple(self.logprobs[row, :length].tolist())
                self.finished[numbers[row]] = Drawn(ids, logprobs, reason)
                self.request[row], self.steps[row], self.cache_lengths[row] = -1, 0, 0

    def _close_up(self) -> None:
        """With nobody waiting, the last rows move into free slots, and fewer rows are decoded."""
        going = self.request[: self.rows] >= 0
        rows = min(self.rows, -(-int(going.sum()) // ROWS) * ROWS)
        source = going[rows:].nonzero()[:, 0] + rows
        target = (~going[:rows]).nonzero()[: len(source), 0]
        if len(source):
            for layer in self.cache.slots:
                layer.move(source, target)
            for state in (self.request, self.ordinals, self.samples, self.steps, self.cache_lengths, self.tokens, self.logprobs):
                state[target] = state[source]
            self.request[source] = -1
        self.rows = rows

    def _advance(self) -> None:
        """The tokens just drawn go through the model; a free row computes along, and nobody looks."""
        assert self.hidden is not None
        rows, cache = self.rows, self.cache
        drawn = self.tokens[torch.arange(rows, device=self.tokens.device), (self.steps[:rows] - 1).clamp(min=0)]
        cache.lengths = self.cache_lengths[:rows]
        self.hidden[:rows] = self.decoder.decode(drawn, cache)
        self.cache_lengths[:rows] += self.request[:rows] >= 0


def _common_prefix(prompts: Sequence[Ids]) -> Ids:
    """What several prompts begin with, short of the last token of the shortest."""
    if len(prompts) < 2:
        return ()
    first, last = min(prompts), max(prompts)  # in the order of the alphabet these two differ first
    limit = min(map(len, prompts)) - 1
    same = next((i for i in range(limit) if first[i] != last[i]), limit)
    return first[:same]
