"""The in-process engine: samples from a policy role with the weights that are being trained.

Continuous batching: a finished row leaves, and a waiting prompt takes its slot. A prompt is
prefilled once for all of its samples. Rows of different ages start at place 0 of their slots, so
there is no padding between a prompt and its answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from tether.algorithms.transfer import to_device
from tether.core.protocols import DrawArguments
from tether.core.types import Prompt, RolloutGroup, Sampling, StopReason
from tether.data.chat import ChatEncoder
from tether.models.cpu.llama import KeysAndValues
from tether.models.trunk import Role
from tether.rollout.drawn import Drawn, Draws, Ids, as_groups, drawn_of, draws_of, has_stop_string
from tether.rollout.sampling import check_distributions, counter_uniform, sample_tokens

PREFILL_TOKENS, ACCELERATOR_PREFILL_TOKENS = {"cpu": 2**10}, 2**12
"""Tokens of one prefill pass, by device. On a CPU small passes of prompts of one length waste
least. A GPU needs some thousands, and each costs up to half a megabyte of a model of 8 billion
weights.
"""
REFILL = 8
"""New prompts are prefilled together when 1/REFILL of the slots are free."""


class LocalEngine:
    """Has the interface of core.protocols.Engine.

    Args:
        max_rows: number of responses that are decoded at once, at least the samples of one prompt.
            Fewer, if the cache would exceed its share of the memory (cache.Allowance). Results
            depend on it only by rounding.
        context_length: the model's limit; a prompt that leaves no room for its response is refused.
        cpu_kernels: decode and sample with them on a CPU, if available.

    A model that cannot use slots (recurrent states, ALiBi) is sampled from by `rollout.in_step`.

    Raises:
        ModelError: the model computes other states token by token than at once.
    """

    def __init__(
        self,
        role: Role,
        encoder: ChatEncoder,
        *,
        max_rows: int = 64,
        context_length: int = 2**31,
        cpu_kernels: bool = True,
    ) -> None:
        from tether.rollout.cache import allowance
        from tether.rollout.decoding import engine_decoder
        from tether.rollout.proof import step_decoder

        self.role = role
        self.encoder = encoder
        self.decoder = engine_decoder(role, cpu_kernels=cpu_kernels)
        self.cpu_kernels = cpu_kernels
        self.in_step = step_decoder(role, self.decoder)
        self.max_rows = max_rows
        self.context_length = context_length
        self.allowed = allowance(role.device)
        self.policy_version = 0

    def update_weights(self, version: int) -> None:
        """Stamp what is sampled from now on. The tensors are the learner's own, or copies that
        `generate` brings up to date.
        """
        self.policy_version = version

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        **how: Unpack[DrawArguments],
    ) -> list[RolloutGroup]:
        """See core.protocols.Engine.generate.

        Raises:
            DataError: a prompt and its response do not fit the model's context.
        """
        if sampling.thought_tokens:
            from tether.rollout.thinking import generate_within

            return generate_within(self, prompts, sampling, **how)
        draws = draws_of(self, prompts, sampling, **how)
        return as_groups(self.encoder, prompts, draws, self.draw(draws), self.policy_version)

    @torch.no_grad()
    def draw(self, draws: Draws) -> list[list[Drawn]]:
        """The responses to each row of prompt ids: `generate` in tokens."""
        if self.in_step is not None:
            from tether.rollout.in_step import draw_in_step

            return draw_in_step(self, self.in_step, draws)
        for product in self.decoder.products:
            product.refresh()
        decoding = SlotDecoding(self, draws)
        while decoding.busy:
            decoding.admit()
            decoding.step()
            if draws.progress:
                draws.progress(len(decoding.finished))
        count = draws.num_samples
        return [
            [decoding.finished[n * count + sample] for sample in range(count)]
            for n in range(len(draws.rows))
        ]


class SlotDecoding:
    """One call of `generate`. Slots 0 .. rows - 1 are decoded. A free slot among them waits for a
    prompt, or for the last row to move.

    Requests are numbered prompt by prompt, sample by sample. Host and device follow the same rules,
    so the host reads the device once a token.

    State of a slot on the host: `request` (-1: free), `cached` tokens, and the response so far.
    State on the device, each (slots,): `active`, `steps` (tokens drawn), `lengths` (tokens in the
    cache), `drawn` (the last token). Further: `uniforms` (slots, new tokens); `hidden` (slots,
    dim), which predicts the next token; `report` (3, slots), which the host reads.
    """

    def __init__(self, engine: LocalEngine, draws: Draws, capacity: int = 0) -> None:
        from tether.rollout.cache import SlotCache, rows_that_fit
        from tether.rollout.graphs import Graphs

        prompts = draws.rows
        sampling = draws.sampling
        num_samples = draws.num_samples
        self.engine = engine
        self.role = engine.role
        self.sampling = sampling
        self.seed = draws.seed
        self.decoder = engine.decoder
        self.prefix = _common_prefix(prompts)
        self.prompts = prompts
        self.prompt_ordinals = draws.ordinals
        self.num_samples = num_samples
        self.device = self.role.device
        stays = capacity > 0
        capacity = capacity or max(map(len, prompts), default=0) + sampling.max_new_tokens
        count = len(prompts) * num_samples
        wanted = count if stays else min(max(engine.max_rows, num_samples), count)
        slots = min(
            wanted,
            max(
                num_samples,
                rows_that_fit(self.role.causal_model, capacity, wanted, engine.allowed),
            ),
        )
        # Long prompts first: the last rows to finish then began with the fewest tokens.
        self.waiting = deque(sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i)))
        self.cache = SlotCache(
            self.role.causal_model.config,
            slots,
            capacity,
            in_place=self.decoder.in_place,
        )
        self.prefix_layers: KeysAndValues = []
        self.request = [-1] * slots
        self.cached = [0] * slots
        self.responses: list[list[tuple[int, float]]] = [[] for _ in range(slots)]
        self.active = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self.steps = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.lengths = torch.zeros_like(self.steps)
        self.drawn = torch.zeros_like(self.steps)
        self.uniforms = torch.zeros(
            slots,
            sampling.max_new_tokens,
            dtype=torch.float64,
            device=self.device,
        )
        self.hidden: Tensor | None = None
        self.stop_ids = torch.tensor(engine.encoder.stop_ids, device=self.device)
        self.report = torch.zeros(3, slots, dtype=torch.float64, device=self.device)
        self.graphs = Graphs(self.device)
        self.rows = 0
        self.finished: dict[int, Drawn] = {}

    @property
    def busy(self) -> bool:
        return bool(self.waiting) or any(request >= 0 for request in self.request)

    def admit(self) -> None:
        """Fill free slots with waiting prompts, once enough are free to make a prefill worth its
        weights.
        """
        free = [slot for slot, request in enumerate(self.request) if request < 0]
        groups = min(len(free) // self.num_samples, len(self.waiting))
        if not groups or (len(free) < len(self.request) // REFILL and len(self.waiting) > groups):
            return
        budget = PREFILL_TOKENS.get(self.device.type, ACCELERATOR_PREFILL_TOKENS)
        # every row of a pass has its own copy of the prefix, for which an accelerator needs room
        shared = len(self.prefix) if self.device.type in PREFILL_TOKENS else 0
        while groups:
            count = min(groups, max(1, budget // (len(self.prompts[self.waiting[0]]) - shared)))
            self._enter(count, free[: count * self.num_samples])
            free = free[count * self.num_samples :]
            groups = groups - count

    def _enter(self, groups: int, slots: list[int]) -> None:
        """The next `groups` prompts take these slots, each for all of its samples."""
        numbers = [self.waiting.popleft() for _ in range(groups)]
        count = self.num_samples
        places = self._sent(slots)
        hidden = self._prefill([self.prompts[i] for i in numbers], places)
        if self.hidden is None:
            self.hidden = hidden.new_zeros(len(self.request), hidden.shape[-1])
        self.hidden[places] = hidden.repeat_interleave(count, 0)
        counters = [
            (self.prompt_ordinals[i], sample, len(self.prompts[i]))
            for i in numbers
            for sample in range(count)
        ]
        ordinals, samples, lengths = self._sent(counters).T
        positions = torch.arange(self.sampling.max_new_tokens, device=self.device).expand(
            len(slots),
            -1,
        )
        self.uniforms[places] = counter_uniform(
            self.seed,
            ordinals[:, None].expand_as(positions),
            samples[:, None].expand_as(positions),
            positions,
        )
        self.active[places] = True
        self.steps[places] = 0
        self.lengths[places] = lengths
        requests = [number * count + sample for number in numbers for sample in range(count)]
        for slot, request, (_, _, length) in zip(slots, requests, counters, strict=True):
            self.request[slot] = request
            self.cached[slot] = length
            self.responses[slot] = []
        self.rows = max(self.rows, max(slots) + 1)

    def _prefill(self, prompts: list[Ids], slots: Tensor) -> Tensor:
        """Keys and values of some prompts into the slots of all their samples; the state after each
        prompt, (prompts, dim).
        """
        shared = len(self.prefix)
        places = torch.arange(len(prompts), device=self.device)
        width = max(map(len, prompts)) - shared
        ids = torch.full((len(prompts), width), self.engine.encoder.pad_id)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt) - shared] = torch.tensor(prompt[shared:])
        # what all prompts begin with (a template's system message), computed once
        if self.prefix and not self.prefix_layers:
            _, self.prefix_layers = self.decoder.prefill(self._sent([self.prefix]), [])
        # Padding stands on the right, where causal attention hides it, and is overwritten by the
        # answer.
        lengths = self._sent([len(prompt) - shared for prompt in prompts])
        states, layers = self.decoder.prefill(
            to_device(ids, self.device),
            self.prefix_layers,
            lengths,
        )
        owner = places[:, None].expand(-1, self.num_samples).flatten()
        for slot, (keys, values) in zip(self.cache.slots, layers, strict=True):
            slot.fill(slots, keys[owner], values[owner], self.cache.capacity)
        return states[places, lengths - 1]

    def step(self) -> None:
        """One token for every row, then the state that predicts the next."""
        self.graphs.run(("draw", self.rows), self._draw)
        # The one place where the host waits for the device.
        self._release(*self.report[:, : self.rows].tolist())
        if not self.busy:
            return
        if not self.waiting:
            self._close_up()
        self._advance()

    def _draw(self) -> None:
        """Draw a token of each row into `drawn`. Write the token, its log-probability and whether
        it stops the row into `report`. A double holds any id and any float32 exactly.
        """
        assert self.hidden is not None
        rows = self.rows
        active = self.active[: self.rows]
        uniforms = self.uniforms[torch.arange(rows, device=self.device), self.steps[:rows]]
        logits = self.role.logits(self.hidden[:rows], self.decoder.head)
        tokens, logprobs = sample_tokens(
            logits,
            uniforms,
            self.sampling,
            cpu_kernels=self.engine.cpu_kernels,
        )
        self.drawn[:rows] = tokens
        self.steps[:rows] += active
        # `isin` sorts where there are many stop tokens, and then the host waits
        stopped = (tokens[:, None] == self.stop_ids).any(-1)
        ended = stopped | (self.steps[:rows] >= self.sampling.max_new_tokens)
        self._leave(active & ended)
        for line, values in zip(self.report, (tokens, logprobs, stopped), strict=True):
            line[:rows] = values

    def _leave(self, ended: Tensor) -> None:
        """Free slots on the device; `ended` (rows,)."""
        rows = len(ended)
        self.active[:rows] &= ~ended
        self.steps[:rows].masked_fill_(ended, 0)
        self.lengths[:rows].masked_fill_(ended, 0)

    def _release(self, tokens: list[float], logprobs: list[float], stopped: list[float]) -> None:
        """Take down what was drawn and the rows that ended with it, and free their slots."""
        check_distributions([logprobs[row] for row in range(self.rows) if self.request[row] >= 0])
        cut = [False] * self.rows
        for row in range(self.rows):
            if self.request[row] < 0:
                continue
            response = self.responses[row]
            response.append((int(tokens[row]), logprobs[row]))
            reason = StopReason.STOP_TOKEN if stopped[row] else StopReason.LENGTH
            if not stopped[row] and has_stop_string(
                self.engine.encoder,
                self.sampling,
                [token for token, _ in response],
            ):
                reason = StopReason.STOP_STRING
                cut[row] = True
            if reason is not StopReason.LENGTH or len(response) == self.sampling.max_new_tokens:
                self.finished[self.request[row]] = drawn_of(response, reason)
                self._free(row)
        if any(cut):  # the device cannot read text
            self._leave(self._sent(cut))

    def _free(self, row: int) -> None:
        """The host's side of a slot that is left."""
        self.request[row] = -1
        self.cached[row] = 0

    def _close_up(self) -> None:
        """Without waiting prompts, the last rows move into free slots, and fewer are decoded."""
        request = self.request
        going = [row for row in range(self.rows) if request[row] >= 0]
        rows = min(self.rows, self.graphs.rows(len(going)))
        sources = [row for row in going if row >= rows]
        free = [row for row in range(rows) if request[row] < 0]
        self._move(sources, free[: len(sources)])
        self.rows = rows

    def _move(self, sources: list[int], targets: list[int]) -> None:
        """Rows into free slots; the slots change their places, since those who talk go on in theirs."""
        responses = self.responses
        request = self.request
        if not sources:
            return
        old, new = self._sent([sources + targets, targets + sources])
        for layer in self.cache.slots:
            layer.move(old, new)
        for state in (self.active, self.steps, self.lengths, self.uniforms, self.drawn):
            state[new] = state[old]
        for a, b in zip(sources, targets, strict=True):
            request[a], request[b] = request[b], request[a]
            self.cached[a], self.cached[b] = self.cached[b], self.cached[a]
            responses[a], responses[b] = responses[b], responses[a]

    def _advance(self, reads: Sequence[bool] = ()) -> None:
        """The drawn tokens go through the model. Results of free rows are ignored.

        Args:
            reads: for each row whether it goes on; unset: those of a request do.
        """
        rows = self.rows
        cache = self.cache
        cache.lengths = self.lengths[:rows]
        cache.width = self.graphs.width(max(self.cached[:rows]) + 1, cache.capacity)
        self.graphs.run(("decode", rows, cache.width), self._decode)
        for row in range(rows):
            self.cached[row] += reads[row] if reads else self.request[row] >= 0

    def _decode(self) -> None:
        assert self.hidden is not None
        rows = self.rows
        self.hidden[:rows] = self.decoder.decode(self.drawn[:rows], self.cache)
        self.lengths[:rows] += self.active[:rows]

    def _sent(self, values: object) -> Tensor:
        """A list of numbers as a tensor of the device."""
        return to_device(torch.tensor(values), self.device)


def _common_prefix(prompts: Sequence[Ids]) -> Ids:
    """Common beginning of several prompts, short of the last token of the shortest."""
    if len(prompts) < 2:
        return ()
    first = min(prompts)
    last = max(prompts)  # in the order of the alphabet these two differ first
    limit = min(map(len, prompts)) - 1
    same = next((i for i in range(limit) if first[i] != last[i]), limit)
    return first[:same]
