"""Messages between the engine of servers and a server: vLLM's endpoints, a request and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from tether.core.received import Count, Received, received
from tether.core.types import Json, JsonValue, Sampling, StopReason
from tether.rollout.drawn import Drawn, Ids, Top
from tether.scale.servers.pool import RefusedError

GENERATE = "/inference/v1/generate"
REPLACE = (
    "/pause?mode=wait",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/resume",
)
"""vLLM's words for whole weights that come in place of others, in this order."""
NEEDED = {
    **dict.fromkeys(
        (*REPLACE, "/weight_info"),
        "Whole weights (lora = false) need VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config: "
        "docs/guides/scale.md has the words.",
    ),
    GENERATE: "Tokens in and out need vLLM 0.32 or later, started with --enable-scale-out.",
    "/v1/load_lora_adapter": "It must see that folder; vLLM needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora.",
    "/v1/unload_lora_adapter": "vLLM needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.",
}
"""Requirements on a server for each path."""


LIMIT = 2**63
"""Seeds and ordinals are smaller."""


class _Likelihood(Received):
    logprob: Annotated[float, Field(gt=-1e3, le=1e-3)]
    decoded_token: str | None = None


class _Places(Received):
    content: list[_Likelihood]


class _Span(Received):
    version: str


class _Choice(Received):
    index: int
    token_ids: list[Count] = Field(min_length=1)
    logprobs: _Places
    finish_reason: str
    stop_reason: int | str | None = None
    weight_versions: list[_Span] = Field(default_factory=list)


class DrawnAnswer(Received):
    """An answer with samples that a policy can have drawn, apart from their lengths."""

    choices: list[_Choice]
    model: str | None = None


class ScoredAnswer(Received):
    """An answer with the log-probabilities of a prompt, by the ids of its tokens."""

    prompt_logprobs: list[dict[str, _Likelihood] | None]


class Model(Received):
    """A model or an adapter that a server offers."""

    id: str
    max_model_len: Annotated[int, Field(ge=1)] | None = None


class Models(Received):
    """All of them, the base first."""

    data: list[Model] = Field(min_length=1)


DRAWN = TypeAdapter(DrawnAnswer)
SCORED = TypeAdapter(ScoredAnswer)
MODELS = TypeAdapter(Models)
WEIGHTS = TypeAdapter(dict[str, JsonValue])


class _Words(BaseModel):
    """A part of a request; what it does not know it leaves to vLLM."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class OwnWords(_Words):
    """tether's additions to vLLM's words."""

    seed: int | None = Field(default=None, gt=-LIMIT, lt=LIMIT)
    ordinal: int = Field(default=0, gt=-LIMIT, lt=LIMIT)


class SamplingWords(_Words):
    """The way to sample, in vLLM's words."""

    n: int = Field(default=1, ge=1, le=4096)
    max_tokens: int = Field(default=1, ge=1, le=2**20)
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=0, ge=-1, le=2**31)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    stop: tuple[str, ...] = Field(default=(), max_length=64)
    stop_token_ids: tuple[int, ...] = Field(default=(), max_length=256)
    seed: int = Field(default=0, gt=-LIMIT, lt=LIMIT)
    extra_args: OwnWords = OwnWords()
    prompt_logprobs: int | None = None


class GenerateRequest(_Words):
    """A request for samples, or for the log-probabilities of a prompt."""

    model: str = Field(max_length=1000)
    token_ids: tuple[int, ...] = Field(min_length=1, max_length=2**22)
    sampling_params: SamplingWords


class AdapterRequest(_Words):
    """A request to load an adapter or a model, or to unload one."""

    lora_name: str = Field(min_length=1, max_length=1000)
    lora_path: str = Field(default="", max_length=4096)


def as_request(
    ids: Ids,
    sampling: Sampling,
    count: int,
    seed: int,
    ordinal: int,
    *,
    stop_ids: Sequence[int],
    ours: bool,
    unused: Sequence[int] = (),
) -> Json:
    """`count` samples of a prompt, in vLLM's format. Seeds of vLLM's samples are this one and the
    following ones.

    Args:
        ours: the server is tether's own, which takes seed and ordinal directly. vLLM gets a seed
            made of both.
        unused: ids without a token, which must not be sampled.
    """
    own = {"extra_args": {"seed": seed, "ordinal": ordinal}} if ours else {}
    params = {
        "n": count,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "logprobs": 0,
        **own,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop_strings),
        "stop_token_ids": list(stop_ids),
        "seed": (seed * 1_000_003 + ordinal) * 4096 % 2**62,
    }
    if unused:
        params["logit_bias"] = {str(i): -100.0 for i in unused}  # the lowest that vLLM takes
    return {"token_ids": ids, "sampling_params": params}


def read_drawn(
    answer: DrawnAnswer,
    version: str,
    asked: Json,
    *,
    spans: bool,
    tokens: int,
) -> list[Drawn]:
    """The responses of an answer.

    Args:
        spans: each response names the version of each of its tokens; else the answer has the
            version for a model's name.
        tokens: of the vocabulary.

    Raises:
        ValueError: it is of another version, or nothing that a policy can have sampled.
    """
    choices = sorted(answer.choices, key=lambda one: one.index)
    named = (
        {span.version for one in choices for span in one.weight_versions}
        if spans
        else {answer.model or version}
    )
    if named != {version} or len(choices) != asked["n"]:
        raise ValueError(
            f"asked {version} for {asked['n']} samples, got {len(choices)} of "
            f"{', '.join(named)[:200]}",
        )
    drawn = []
    for one in choices:
        ids = tuple(one.token_ids)
        logprobs = tuple(row.logprob for row in one.logprobs.content)
        if not len(ids) == len(logprobs) <= asked["max_tokens"] or max(ids) >= tokens:
            raise ValueError(
                f"{len(ids)} ids up to {max(ids)} and {len(logprobs)} log-probabilities that no "
                "policy gives",
            )
        stopped = isinstance(one.stop_reason, str)
        reason = StopReason.STOP_STRING if stopped else StopReason.STOP_TOKEN
        drawn.append(
            Drawn(ids, logprobs, StopReason.LENGTH if one.finish_reason == "length" else reason),
        )
    return drawn


def scored_request(model: str, ids: Ids, top: int = 0) -> Json:
    """A request for the log-probabilities of ids, and of the `top` likeliest in the place of each."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": top}
    return {"model": model, "token_ids": ids, "sampling_params": sampling}


def likelihoods_of(answer: bytes, ids: Ids) -> list[float]:
    """The log-probability of every token but the first, in nats; see `scored_tokens`."""
    return [one.logprob for one in scored_tokens(answer, ids)]


def scored_tokens(answer: bytes, ids: Ids) -> list[_Likelihood]:
    """The log-probability and the text of every token but the first, as a server gives them.

    Raises:
        RefusedError: it leaves one out.
    """
    rows = received(answer, SCORED).prompt_logprobs
    likelihoods = [(row or {}).get(str(i)) for i, row in zip(ids, rows, strict=True)][1:]
    if None in likelihoods:
        raise RefusedError("it leaves out the log-probability of a token that it was given")
    return [one for one in likelihoods if one]


def likeliest_of(answer: bytes, ids: Ids, top: int, vocabulary: int) -> list[Top]:
    """The likeliest tokens of a vocabulary in the place of every token but the first; output layers
    have rows without a token.

    Raises:
        RefusedError: they are fewer than `top`.
    """
    rows = received(answer, SCORED).prompt_logprobs
    if len(rows) != len(ids):
        raise RefusedError(f"it answers for {len(rows)} tokens of {len(ids)}")
    tops: list[Top] = []
    for row in rows[1:]:
        given = {
            int(i): one.logprob
            for i, one in (row or {}).items()
            if i.isdecimal() and int(i) < vocabulary
        }
        best = sorted(given, key=given.__getitem__, reverse=True)[:top]
        if len(best) < top:
            raise RefusedError(
                f"it gives {len(best)} likeliest tokens where {top} are asked for. vLLM's "
                "--max-logprobs allows more; else set teacher.top_k lower",
            )
        tops.append((best, [given[i] for i in best]))
    return tops
