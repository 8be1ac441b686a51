"""Log-probabilities and entropy from hidden states, without the matrix of all logits."""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

CPU_STRIP_ELEMENTS = 2**20
"""Number of logits that the softmax takes at a time on a CPU. Two float32 buffers of 4 MB stay in
its caches.
"""


def token_logprobs(
    hidden: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "vocab dim"],
    targets: Int64[Tensor, " tokens"],
    *,
    temperature: float = 1.0,
    bias: Float[Tensor, " vocab"] | None = None,
    softcap: float | None = None,
    chunk_size: int = 256,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Compute the log-probability of each target and the entropy of its whole distribution.

    Equation: ``z = c(W h + b) / T``, with ``c(x) = cap · tanh(x / cap)`` when there is a softcap;
    ``log p_j = z_j − lse(z)``; ``H = lse(z) − Σ_j p_j z_j``. Gradients: ``∂ log p_target / ∂z_j =
    [j = target] − p_j``, ``∂H / ∂z_j = −p_j (log p_j + H)``.
    Paper: the recomputation comes from Cut Your Losses, https://arxiv.org/abs/2411.09009. The
    gradient that is computed with the result comes from Liger Kernel,
    https://arxiv.org/abs/2410.10989. The softcap comes from Gemma 2,
    https://arxiv.org/abs/2408.00118.
    Shapes: hidden (tokens, dim), weight (vocab, dim), targets (tokens,) -> two of (tokens,) in
    nats, float32 (float64 for float64 states). The product is computed in the type of ``hidden``,
    everything after it in float32. At most ``chunk_size`` rows of logits exist at a time. Both
    results carry gradient to ``hidden``, and to ``weight`` and ``bias`` if they require it, summed
    in float32. If only log-probabilities are differentiated and the output layer is frozen,
    ``∂ log p_target / ∂h`` comes with the result and backward is a multiplication. Otherwise
    backward computes the logits again, chunk by chunk. Values are bit-equal with and without
    gradients.
    Raises: ``ValueError`` on shapes that do not fit, or a temperature, softcap or chunk size that
        is not positive.
    Trap: targets are the *next* tokens, already shifted, and every row is computed. Select the
    counted rows before the call instead of marking the others with −100.
    """
    if hidden.shape[0] != targets.shape[0] or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets "
            f"{tuple(targets.shape)} do not fit; "
            "expected (tokens, dim), (vocab, dim) and (tokens,)",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")
    if not temperature > 0 or chunk_size < 1 or (softcap is not None and not softcap > 0):
        raise ValueError(
            f"temperature {temperature}, softcap {softcap} and chunk_size "
            f"{chunk_size} must be positive",
        )
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    slopes = torch.is_grad_enabled() and hidden.requires_grad and not trained and softcap is None
    return _TokenLogprobs.apply(
        hidden,
        weight,
        bias,
        targets,
        temperature,
        softcap,
        chunk_size,
        slopes,
    )


class _Logits:
    """The logits of one chunk of rows at a time, scaled strip by strip, always in the same buffers.

    The product wants many rows, the softmax few enough to stay in a CPU's cache; on an accelerator
    a strip is a whole chunk. Buffers are allocated once, because first touching a fresh one costs
    as much as the softmax.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        softcap: float | None,
        chunk_size: int,
    ) -> None:
        self.hidden = hidden
        self.weight = weight.to(hidden.dtype)
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.bias = None if bias is None else bias.to(self.dtype)
        self.temperature = temperature
        self.softcap = softcap
        self.num_tokens = hidden.shape[0]
        vocab = weight.shape[0]
        self.chunk_rows = max(1, min(chunk_size, self.num_tokens))
        on_cpu = hidden.device.type == "cpu"
        self.strip_rows = (
            min(self.chunk_rows, max(1, CPU_STRIP_ELEMENTS // vocab)) if on_cpu else self.chunk_rows
        )
        self.product = hidden.new_empty(self.chunk_rows, vocab)
        self.scaled, self.spare = (
            hidden.new_empty(self.strip_rows, vocab, dtype=self.dtype) for _ in range(2)
        )

    def chunks(self) -> Iterator[slice]:
        """Fill ``product`` with ``W h`` of one chunk after another, and yield which rows of
        ``hidden`` it holds.
        """
        for start in range(0, self.num_tokens, self.chunk_rows):
            chunk = slice(start, min(start + self.chunk_rows, self.num_tokens))
            torch.mm(self.hidden[chunk], self.weight.T, out=self.product[: chunk.stop - start])
            yield chunk

    def strips(self, chunk: slice) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield the strips of a chunk: their rows of ``hidden`` and of ``product``, their ``z``,
        and a spare buffer like it.
        """
        for start in range(chunk.start, chunk.stop, self.strip_rows):
            strip = slice(start, min(start + self.strip_rows, chunk.stop))
            product = self.product[start - chunk.start : strip.stop - chunk.start]
            scaled = self.scaled[: strip.stop - start].copy_(product)
            if self.bias is not None:
                scaled.add_(self.bias)
            if self.softcap is not None:
                scaled.mul_(1.0 / self.softcap).tanh_().mul_(self.softcap / self.temperature)
            elif self.temperature != 1.0:
                scaled.mul_(1.0 / self.temperature)
            yield strip, product, scaled, self.spare[: strip.stop - start]


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps a normalizer, an entropy and perhaps a slope (the states' shape) per token,
    never logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        chunk_size: int,
        slopes: bool,
    ) -> tuple[Tensor, Tensor]:
        logits = _Logits(hidden, weight, bias, temperature, softcap, chunk_size)
        logprobs, entropy, normalizer = (
            hidden.new_empty(hidden.shape[0], dtype=logits.dtype) for _ in range(3)
        )
        slope = torch.empty_like(hidden) if slopes else None
        for chunk in logits.chunks():
            for strip, product, scaled, spare in logits.strips(chunk):
                largest = scaled.amax(1, keepdim=True)
                shifted = scaled.sub_(largest)
                exponentials = torch.exp(shifted, out=spare)
                total = exponentials.sum(1)
                log_total = total.log()
                logprobs[strip] = shifted.gather(1, targets[strip, None]).squeeze(1) - log_total
                normalizer[strip] = log_total + largest.squeeze(1)
                # H = lse - sum p z, both counted from the largest logit: no digits are lost when
                # all logits are large.
                entropy[strip] = log_total - shifted.mul_(exponentials).sum(1) / total
                # the strip's logits are used up; their gradient takes their place
                if slope is not None:
                    grad = exponentials.mul_((-1.0 / temperature / total)[:, None])
                    product.copy_(
                        grad.scatter_add_(
                            1,
                            targets[strip, None],
                            torch.full_like(total, 1.0 / temperature)[:, None],
                        ),
                    )
            if slope is not None:
                torch.mm(
                    logits.product[: chunk.stop - chunk.start],
                    logits.weight,
                    out=slope[chunk],
                )
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy, slope)
        ctx.settings = (temperature, softcap, chunk_size)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grad_outputs
        hidden, weight, bias, targets, normalizer, entropy, slope = ctx.saved_tensors
        if slope is not None and grad_entropy is None:
            grad_hidden = slope * (0.0 if grad_logprobs is None else grad_logprobs[:, None])
            return grad_hidden.to(hidden.dtype), None, None, None, None, None, None, None
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_logprobs = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs
        logits = _Logits(hidden, weight, bias, *ctx.settings)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=logits.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=logits.dtype) if needs_bias else None
        for chunk in logits.chunks():
            for strip, product, scaled, spare in logits.strips(chunk):
                softened = _softcap_slope(scaled, ctx.settings)
                all_logprobs = scaled.sub_(normalizer[strip, None])
                grad = torch.exp(all_logprobs, out=spare)
                if grad_entropy is None:
                    grad.mul_(-grad_logprobs[strip, None])
                else:
                    # -p_j (g + g_H (log p_j + H))
                    offset = grad_logprobs[strip] + grad_entropy[strip] * entropy[strip]
                    grad.mul_(all_logprobs.mul_(-grad_entropy[strip, None]).sub_(offset[:, None]))
                grad.scatter_add_(1, targets[strip, None], grad_logprobs[strip, None])
                if softened is not None:
                    grad.mul_(softened)
                if grad_bias is not None:
                    grad_bias += grad.sum(0)
                # The strip's logits are used up; their gradient takes their place.
                product.copy_(grad)
            grad_chunk = logits.product[: chunk.stop - chunk.start]
            if grad_hidden is not None:
                torch.mm(grad_chunk, logits.weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight += grad_chunk.T @ hidden[chunk]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _softcap_slope(
    scaled: Tensor,
    settings: tuple[float, float | None, int],
) -> Tensor | float | None:
    """``∂z / ∂(W h + b)``: ``c'(x) / T`` with ``c'(x) = 1 − tanh²(x / cap)``, where ``tanh(x / cap)
    = z T / cap``.
    """
    temperature, softcap, _ = settings
    if softcap is not None:
        return (scaled * (temperature / softcap)).square_().neg_().add_(1.0).mul_(1.0 / temperature)
    return None if temperature == 1.0 else 1.0 / temperature
