"""Attention for training on a CPU: only what is seen is computed, heads share keys without copies,
no scores are kept.

The eager attention of transformers scores every query against every key. It repeats keys and values
for every query head, and it keeps the probabilities twice. The fused kernel of torch has a slow
backward pass on a CPU.

Here, queries are cut into tiles. A tile is multiplied only by the keys that one of its queries sees
(https://arxiv.org/abs/2412.05496). These are half of the keys in a causal row. In a document with
eight answers to one prompt, they are a fifth. All query heads of a key head form one product. The
backward pass computes the probabilities again (Rabe and Staats 2021,
https://arxiv.org/abs/2112.05682).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tether.algorithms.autograd import AutogradContext
from tether.core.errors import ModelError
from tether.models.cpu.kernels import Ragged, attend, attend_back, library_for
from tether.models.independence import agrees
from tether.models.loading import plain_attention
from tether.models.trunk import GROUPED, Role, additive_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TILE = 64
"""Queries a tile for torch, and what the number of keys beside it is rounded up to, so that few
shapes occur.
"""
KERNEL_TILE = 16
"""The same for our kernel, to which every shape is alike: small tiles see few keys in vain."""


class Tiles:
    """Keys that each of M tiles of `side` queries sees, by an additive mask (batch, 1, queries,
    keys).
    """

    def __init__(self, mask: Tensor) -> None:
        batch, _, _, width = mask.shape
        self.side = TILE if library_for(mask) is None else KERNEL_TILE
        self.mask, self.lowest = mask.detach(), torch.finfo(mask.dtype).min
        self.seen = (self._rows() > self.lowest / 2).any(1)
        self.first = (
            torch.arange(batch, device=mask.device).repeat_interleave(len(self.seen) // batch)[
                :,
                None,
            ]
            * width
        )

    def _rows(self) -> Tensor:
        """(M, side, keys) of the mask, padded."""
        _, _, time, width = self.mask.shape
        return pad(self.mask[:, 0], (0, 0, 0, -time % self.side), value=self.lowest).reshape(
            -1,
            self.side,
            width,
        )

    def _number(self, multiple: int) -> Tensor:
        """(M,) the number of keys, rounded up: a few unused keys cost less than many shapes."""
        seen = self.seen.sum(1).clamp(min=1)
        return (
            (seen + multiple - 1)
            .div(multiple, rounding_mode="floor")
            .mul(multiple)
            .clamp(max=self.seen.shape[1])
        )

    @cached_property
    def _order(self) -> Tensor:
        """(M, keys) the seen ones first, in their order."""
        return self.seen.byte().sort(dim=1, descending=True, stable=True).indices

    @cached_property
    def buckets(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Tiles with one number S of keys together, for torch: which (M',), flat keys (M', S), mask
        (M', 1, 1, side, S).
        """
        sizes = self._number(TILE)
        rows = self._rows()
        buckets = []
        for size in sizes.unique().tolist():
            index = (sizes == size).nonzero().squeeze(1)
            keys = self._order[index, :size]
            visible = rows[index].gather(2, keys[:, None].expand(-1, self.side, -1))
            buckets.append((index, keys + self.first[index], visible[:, None, None]))
        return buckets

    @cached_property
    def ragged(self) -> Ragged:
        """The same tile after tile, for our kernel."""
        sizes = self._number(KERNEL_TILE)
        rows = self._rows()
        starts = pad(sizes.cumsum(0), (1, 0))
        chosen = torch.arange(self.seen.shape[1]) < sizes[:, None]
        masks = rows.gather(2, self._order[:, None].expand_as(rows))[
            chosen[:, None].expand_as(rows)
        ]
        return Ragged(starts, (self._order + self.first)[chosen], masks.float())


class _Context(AutogradContext, Protocol):
    tiles: Tiles
    scale: float
    by_kernel: bool


class _Grouped(torch.autograd.Function):
    """query (B·n, K, G, side, D) in tiles, key and value (B·S, K, D) -> like query."""

    @staticmethod
    def forward(
        ctx: _Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tiles: Tiles,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.tiles = tiles
        ctx.scale = scale
        ctx.by_kernel = tiles.side == KERNEL_TILE and library_for(query) is not None
        if ctx.by_kernel:
            return attend(query, key, value, tiles.ragged, scale)
        out = torch.empty_like(query)
        for index, keys, mask in tiles.buckets:
            part = query[index]
            seen = _probabilities(part, _heads(key, keys), mask, scale) @ _heads(value, keys)
            out[index] = seen.view_as(part)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        if ctx.by_kernel:
            grad, *wide = attend_back(
                query,
                key,
                value,
                ctx.tiles.ragged,
                ctx.scale,
                grads[0].contiguous(),
            )
            return grad, *(w.to(key.dtype) for w in wide), None, None
        grad_query = torch.empty_like(query)
        # A key is seen by many tiles: their shares are added up in float32.
        wide = torch.promote_types(key.dtype, torch.float32)
        grad_key = torch.zeros_like(key, dtype=wide)
        grad_value = torch.zeros_like(value, dtype=wide)
        for index, keys, mask in ctx.tiles.buckets:
            part = query[index]
            grad = grads[0][index].flatten(2, 3)
            some_keys = _heads(key, keys)
            some_values = _heads(value, keys)
            probabilities = _probabilities(part, some_keys, mask, ctx.scale)
            _add_heads(grad_value, keys, probabilities.transpose(-1, -2) @ grad)
            # d score = p (d p - sum p d p)
            inner = grad @ some_values.transpose(-1, -2)
            inner.sub_(
                (probabilities * inner).sum(-1, keepdim=True, dtype=wide).to(inner.dtype),
            ).mul_(probabilities)
            _add_heads(
                grad_key,
                keys,
                (inner.transpose(-1, -2) @ part.flatten(2, 3)).mul_(ctx.scale),
            )
            grad_query[index] = (inner @ some_keys).mul_(ctx.scale).view_as(part)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _heads(tensor: Tensor, keys: Tensor) -> Tensor:
    """(B·S, K, D) at (M, S') -> (M, K, S', D)."""
    return tensor[keys].transpose(1, 2).contiguous()


def _add_heads(total: Tensor, keys: Tensor, share: Tensor) -> None:
    total.index_add_(0, keys.flatten(), share.transpose(1, 2).flatten(0, 1).to(total.dtype))


def _probabilities(query: Tensor, key: Tensor, mask: Tensor, scale: float) -> Tensor:
    """(M, K, G, side, D), (M, K, S, D) -> (M, K, G·side, S) in the queries' type.

    The softmax is computed in float32 at least.
    """
    scores = query.flatten(2, 3) @ key.transpose(-1, -2)
    if scale != 1.0:
        scores.mul_(scale)
    scores.view(*query.shape[:4], -1).add_(mask)
    return torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(
        query.dtype,
    )


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (B, H, T, D), key and value (B, K, S, D) -> (B, T,
    H, D).

    attention_mask: (B or 1, 1, T, S) additive; None: causal.

    Raises:
        NotImplementedError: soft caps, sinks or dropout inside attention, values of another width
            than keys, several types; pick_attention gives such models the eager one.
    """
    if options.get("softcap") or options.get("s_aux") is not None or options.get("dropout"):
        raise NotImplementedError(
            "grouped attention knows no soft cap, sinks or dropout; set model.attention = 'eager'",
        )
    if value.shape != key.shape or len({query.dtype, key.dtype, value.dtype}) > 1:
        raise NotImplementedError(
            "grouped attention wants keys and values of one shape and type; "
            "set model.attention = 'eager'",
        )
    (batch, heads, time, dim), (kv_heads, width) = query.shape, key.shape[1:3]
    if attention_mask is None:
        attention_mask = additive_mask(
            query.new_ones(time, width, dtype=torch.bool).tril(width - time),
            query.dtype,
        )
    tiles = _tiles(attention_mask, (batch, 1, time, width))
    side = tiles.side
    tiled = pad(query, (0, 0, 0, -time % side)).view(
        batch,
        kv_heads,
        heads // kv_heads,
        -1,
        side,
        dim,
    )
    out = _Grouped.apply(
        tiled.permute(0, 3, 1, 2, 4, 5).flatten(0, 1).contiguous(),
        key.transpose(1, 2).flatten(0, 1).contiguous(),
        value.transpose(1, 2).flatten(0, 1).contiguous(),
        tiles,
        options.get("scaling") or dim**-0.5,
    )
    out = out.view(batch, -1, heads, side, dim).transpose(2, 3).flatten(1, 2)
    return out[:, :time].contiguous(), None


def _tiles(mask: Tensor, shape: tuple[int, int, int, int]) -> Tiles:
    """The tiles of a mask, kept with it: every layer of a pass is given the same one."""
    if mask.shape != shape:
        return Tiles(mask[..., : shape[3]].expand(shape))
    if "tiles" not in vars(mask):
        vars(mask)["tiles"] = Tiles(mask)
    return vars(mask)["tiles"]


UNLIKE_GROUPED = (
    # not computed
    *("attn_logit_softcapping", "attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
    *("kv_lora_rank", "v_head_dim"),  # values of another width than keys
)


def pick_attention(attention: str, device: torch.device, model: PreTrainedModel) -> str:
    """`auto` on a CPU is our own grouped attention where the model's needs allow it, else eager; on
    an accelerator it is sdpa.

    Raises:
        ModelError: grouped attention was asked for and the model needs more than it does.
    """
    if attention not in ("auto", "grouped") or (attention == "auto" and device.type != "cpu"):
        return plain_attention(attention, device, model)
    config = model.config.get_text_config().to_dict()
    foreign = [name for name in UNLIKE_GROUPED if config.get(name)]
    foreign += [type(m).__name__ for m in model.modules() if hasattr(m, "sinks")][:1]
    foreign += [] if model._supports_attention_backend else ["an attention of its own"]
    if attention == "grouped" and foreign:
        raise ModelError(
            "model.attention = 'grouped' cannot be had for this model "
            f"({foreign[0]}); use 'eager' or 'sdpa'",
        )
    return plain_attention(attention, device, model) if foreign else GROUPED


@torch.no_grad()
def computes_alike(model: PreTrainedModel) -> bool:
    """True if grouped attention gives this model the states of eager attention: compared on a few
    tokens, once a kind.
    """
    config = model.config.get_text_config()
    key = (model.dtype, config.to_json_string(use_diff=False))
    if key not in _ALIKE:
        ids = Role(model).few_ids(9)
        states = []
        for attention in ("eager", GROUPED):
            model.set_attn_implementation(attention)
            try:
                states.append(model(input_ids=ids, use_cache=False).logits[0])
            except Exception:  # noqa: BLE001  (a model of any author may want anything of its attention)
                return _ALIKE.setdefault(key, False)
        _ALIKE[key] = agrees(states[1].to(model.dtype), states[0].to(model.dtype))
    return _ALIKE[key]


_ALIKE: dict[tuple[torch.dtype, str], bool] = {}
ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, eager_mask)
