"""Checks for faulty set-ups of reinforcement learning from human feedback, on live objects; doctor_log has those on a log's rows.

Every check takes what it looks at and nothing else, and says what it saw: a finding, a clean bill, or that it could not tell.
The live ones leave weights as they were, to the bit. Thresholds stand far outside what healthy runs showed (docs/doctor.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from tether.core.types import Conversation, Rollout, Score, StopReason, assistant, user
from tether.data.chat import ChatEncoder
from tether.models.trunk import Role

TYPICAL_KL = 10.0
"""Nats a response that a policy commonly ends at, to weigh a KL coefficient before there is a KL."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, the numbers that say so, and what to do. A warning may be meant so; an error is not."""

    check: str
    severity: Literal["error", "warning"]
    message: str
    evidence: str
    advice: str


@dataclass(frozen=True, slots=True)
class Healthy:
    """What was examined and found to be in order."""

    check: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Untold:
    """What could not be examined here, and why."""

    check: str
    reason: str


Result = Finding | Healthy | Untold
SAME_START = "Load policy and reference from the same SFT checkpoint."


def wrong_reference(policy: Tensor, reference: Tensor, mask: Tensor, digests: tuple[str, str] | None = None) -> Result:
    """Before training the policy is the reference: both say the same about every token.

    Args:
        policy, reference, mask: (sequences, time) log-probabilities, and which of them count.
        digests: of the weights that the reference runs, and of the model that training starts from.
    """
    name, gap = "reference", float((policy - reference).abs()[mask].mean())
    evidence = f"mean |log pi - log pi_ref| = {gap:.4g} over {int(mask.sum())} tokens"
    if gap > 0.02:
        return Finding(name, "error", "The reference is not the policy's start.", evidence, SAME_START)
    if digests is not None and digests[0] != digests[1]:
        evidence = f"weights {digests[0]}, those of the start are {digests[1]}"
        return Finding(name, "error", "The reference is not the model that training starts from.", evidence, SAME_START)
    return Healthy(name, evidence + ("" if digests is None else ", and its weights are those of the start"))


def shared_weights(
    trainable: Sequence[nn.Parameter], reference: Role, policy_logprobs: Callable[[], Tensor], logprobs: Callable[[], Tensor]
) -> Result:
    """The reference stands still when everything that the optimizer changes is moved; the policy does not.

    Args:
        trainable: what the optimizer will change.
        policy_logprobs, logprobs: of policy and reference on a probe batch, asked anew at each call.
    """
    name, before, policy_before = "shared weights", logprobs(), policy_logprobs()
    with nudged(trainable):
        moved = float((logprobs() - before).abs().max())
        policy_moved = float((policy_logprobs() - policy_before).abs().max())
    evidence = f"weights nudged: the policy moves by {policy_moved:.3g} nats a token, the reference by {moved:.3g}"
    if moved > 0:
        storages = {p.untyped_storage().data_ptr() for p in trainable}
        shared = [n for n, p in reference.model.named_parameters() if p.untyped_storage().data_ptr() in storages]
        return Finding(
            name,
            "error",
            "Training the policy changes its reference, so that the KL to it means nothing.",
            f"{evidence}; {len(shared)} tensors of the reference's model are trained, such as {shared[0] if shared else '?'}",
            "Give the reference weights of its own, or run it with the policy's adapter off.",
        )
    if policy_moved == 0:
        advice = "Give the optimizer the parameters of the policy's role."
        return Finding(name, "error", "What the optimizer changes does not move the policy.", evidence, advice)
    return Healthy(name, evidence)


@contextmanager
def nudged(parameters: Sequence[nn.Parameter], seed: int = 0) -> Iterator[None]:
    """All parameters moved a little at random; afterwards they are what they were, to the bit, and so is the random state."""
    saved = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for parameter in parameters:
                size = 0.05 * float(parameter.float().square().mean().sqrt()) + 0.01
                noise = size * torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.device, parameter.dtype))
        yield
    finally:
        with torch.no_grad():
            for parameter, old in zip(parameters, saved, strict=True):
                parameter.copy_(old)


def kl_sign(change: float, coefficient: float, place: Literal["reward", "loss"]) -> Result:
    """A policy that drifts up against its reference must be paid less, or lose more.

    Args:
        change: of the total reward, or of the loss, when the policy's log-probabilities rise against the reference's.
    """
    name = "KL sign"
    evidence = f"coefficient {coefficient:g}: drift changes the {place} by {change:+.4g}"
    if change == 0:
        return Finding(
            name,
            "error",
            f"The KL never reaches the {place}.",
            evidence,
            "Take coefficient x (log pi - log pi_ref) off the reward.",
        )
    if (change > 0) == (place == "reward"):
        message = "The KL has the wrong sign: the policy is paid to leave its reference."
        return Finding(name, "error", message, evidence, "The reward is score - coefficient x (log pi - log pi_ref).")
    return Healthy(name, evidence)


def score_once(rewards: Tensor, lengths: Sequence[int]) -> Result:
    """Without KL a response has one reward, at its last real token.

    Args:
        rewards: (sequences, time) shaped without KL, from scores that differ.
        lengths: tokens of each response.
    """
    name, most = "score placement", int((rewards != 0).sum(-1).max())
    last = torch.tensor(lengths, device=rewards.device)[:, None] - 1
    elsewhere = int(rewards.scatter(1, last, 0.0).count_nonzero())
    evidence = f"at most {most} rewarded tokens a response, {elsewhere} of them not the last, in {len(lengths)} responses"
    if most == 0:
        return Finding(name, "error", "The score reaches no token.", evidence, "Add it at each response's last real token.")
    if elsewhere:
        advice = "Add it once, at the last real token: on every token, long answers are paid by the token."
        return Finding(name, "error", "The score lands on more than the last token.", evidence, advice)
    return Healthy(name, evidence)


def planned_epochs(epochs: int, minibatches: int, target_kl: float | None) -> Result:
    """How often a batch of rollouts is to be used."""
    name, evidence = "epochs", f"{epochs} epochs x {minibatches} minibatches a batch of rollouts"
    if target_kl is None and (epochs > 10 or epochs * minibatches > 64):
        message = "Many updates on the same samples: the policy leaves the one that drew them."
        return Finding(name, "warning", message, evidence, "Take 1 to 4 epochs, or set target_kl to end them in time.")
    return Healthy(name, evidence)


def encodings(policy: ChatEncoder, reward: ChatEncoder, conversations: Sequence[Conversation]) -> Result:
    """Policy and reward model read the same tokens in the same conversation."""
    name = "encoding"
    differing = [key for key, value in policy.describe().items() if reward.describe()[key] != value]
    if policy.tokenizer.get_vocab() != reward.tokenizer.get_vocab():
        differing.append("vocabulary")
    talks = [(*talk, assistant("Certainly, here is one.")) for talk in conversations]
    unequal = sum(policy.conversation(talk).ids != reward.conversation(talk).ids for talk in talks)
    evidence = f"{len(talks) - unequal} of {len(talks)} conversations have the same ids"
    if differing or unequal:
        return Finding(
            name,
            "error",
            "The reward model was trained on another encoding than it scores.",
            evidence + (f"; they differ in {', '.join(differing)}" if differing else ""),
            "Train the reward model on this policy's base, or let it encode the text anew (LearnedReward(foreign=True)).",
        )
    return Healthy(name, evidence)


def empty_or_endless(ordinary: Sequence[float], odd: Mapping[str, Sequence[float]]) -> list[Result]:
    """An answer that says nothing, or the same without end, is not among the best.

    Args:
        ordinary: what training would make of the scores of the policy's own samples, penalties taken off.
        odd: the same of answers that nobody wants, by what they are.
    """
    name = "empty or endless answers"
    high = statistics.quantiles(ordinary, n=10, method="inclusive")[-1]
    results: list[Result] = []
    for kind, scores in odd.items():
        mean = statistics.fmean(scores)
        evidence = f"{kind}: {mean:.3g} on average; own samples {statistics.fmean(ordinary):.3g}, one in ten above {high:.3g}"
        if mean > high:
            advice = "Train the reward model on such answers as rejected ones, or penalise them (ppo.missing_stop_penalty)."
            results.append(Finding(name, "error", f"The reward prefers {kind} answers to nearly all others.", evidence, advice))
        else:
            results.append(Healthy(name, evidence))
    return results


def odd_answers(rollouts: Sequence[Rollout], encoder: ChatEncoder, limit: int) -> dict[str, list[Rollout]]:
    """An empty answer and an endless one in the place of each rollout; the endless one repeats the beginning of its own words."""
    stop, result = encoder.stop_ids[0], {"empty": [], "endless": []}
    for rollout in rollouts:
        words = [token for token in rollout.response_ids if token not in encoder.stop_ids][:8] or [stop]
        ids = tuple((words * limit)[:limit])
        ends: dict[str, tuple[tuple[int, ...], StopReason]] = {
            "empty": ((stop,), StopReason.STOP_TOKEN),
            "endless": (ids, StopReason.LENGTH),
        }
        for kind, (response, reason) in ends.items():
            text = encoder.decode(response)
            result[kind].append(replace(rollout, response_ids=response, logprobs=(), stop_reason=reason, text=text))
    return result


def dropout(role_name: str, role: Role, forward: Callable[[], Tensor]) -> Result:
    """No dropout while a role samples, scores or is compared: two passes over one batch are equal."""
    name = "dropout"
    modules = [*role.model.named_modules(), *(() if role.head is None else role.head.named_modules())]
    active = [path for path, m in modules if isinstance(m, nn.Dropout) and m.training and m.p > 0]
    devices = [role.device] if role.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        difference = float((forward() - forward()).abs().max())
    evidence = f"{role_name}: two passes differ by {difference:.3g}; {len(active)} dropout layers are on"
    if active or difference > 1e-4:
        where = f", such as {active[0]}" if active else ""
        advice = "Call role.train_mode(False): old and new log-probabilities must come from the same network."
        return Finding(name, "error", f"Dropout is on in the {role_name}.", evidence + where, advice)
    return Healthy(name, evidence)


def temperature(
    engine: Tensor | None,
    logprobs_at: Callable[[float], Tensor],
    entropy: Tensor,
    mask: Tensor,
    asked: float,
    tolerance: float,
) -> Result:
    """Samples come from the distribution that the learner takes them for.

    Args:
        engine: (sequences, time) what the engine said of its tokens, if it did.
        logprobs_at: the learner's log-probabilities at a temperature.
        entropy: the learner's, at the temperature asked for; on average minus a sampled token's log-probability is equal to it.
        tolerance: nats a token by which two numerics may differ.
    """
    name, own = "temperature", logprobs_at(asked)
    excess = (-own - entropy)[mask].double()
    mean, error = float(excess.mean()), float(excess.std()) / math.sqrt(len(excess))
    evidence = f"surprise less entropy {mean:+.3f} ± {error:.3f} nats a token"
    advice = "Divide the logits by the sampling temperature wherever they are scored, and sample without top-k and top-p."
    if engine is not None:
        gap = float((engine - own).abs()[mask].mean())
        evidence = f"engine and learner differ by {gap:.3g} nats a token; {evidence}"
        if gap > tolerance:
            gaps = {t / 10: float((engine - logprobs_at(t / 10)).abs()[mask].mean()) for t in range(2, 21)}
            best = min(gaps, key=lambda t: gaps[t])
            evidence += f"; temperature {best:g} would fit to {gaps[best]:.3g}, the recipe says {asked:g}"
            return Finding(name, "error", "Engine and learner disagree about what was sampled.", evidence, advice)
    if abs(mean) > 0.1 and abs(mean) > 5 * error:
        direction = "sharper" if mean < 0 else "flatter"
        message = f"Samples come from a {direction} distribution than the learner's."
        return Finding(name, "error", message, evidence, advice)
    return Healthy(name, evidence)


def lost_updates(optimizer: torch.optim.Optimizer) -> Result:
    """A step of the learning rate changes a weight, in the dtype that the optimizer keeps it in.

    Adam's steps are about as long as the rate; those of other optimizers are rate x gradient, where a gradient is at hand.
    """
    name, lost, total, unknown = "bf16", 0, 0, 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype == torch.float32 or parameter.dtype == torch.float64:
                continue
            if "betas" in group:
                step: Tensor | float = float(group["lr"])
            elif parameter.grad is not None:
                step = group["lr"] * parameter.grad.float().abs()
            else:
                unknown += 1
                continue
            weights = parameter.detach().float()
            lost += int((((weights + step).to(parameter.dtype) == parameter) & (weights != 0)).sum())
            total += parameter.numel()
    if unknown:
        return Untold(name, f"{unknown} tensors in low precision have no gradient that would tell their step")
    if not total:
        return Healthy(name, "the optimizer changes float32 tensors alone")
    evidence = f"{lost / total:.0%} of {total:,} weights in low precision would not change"
    if lost > total / 2:
        message = "The learning rate is lost in rounding: most weights cannot take its steps."
        return Finding(name, "error", message, evidence, "Keep float32 masters of trainable weights (learner.local does).")
    return Healthy(name, evidence)


def stop_tokens(encoder: ChatEncoder, engine_stops: Sequence[int]) -> Result:
    """The engine stops at the token that ends a turn in training, and at the tokenizer's EOS if the template writes none."""
    name, tokenizer = "stop tokens", encoder.tokenizer
    turn = encoder.conversation((user("Hello."), assistant("Yes")))
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | set(tokenizer.all_special_ids)
    written = [token for token, trained in zip(turn.ids, turn.trained, strict=True) if trained and token in special]
    ending = written[0] if written else tokenizer.eos_token_id
    shown = "none" if ending is None else repr(tokenizer.decode([ending]))
    evidence = f"a turn ends with {shown}; the engine stops at {[tokenizer.decode([i]) for i in engine_stops]}"
    if ending is not None and ending not in engine_stops:
        message = "The engine does not stop where a turn ends: answers run on to the limit."
        return Finding(name, "error", message, evidence, "Name the token in model.stop_tokens.")
    if set(engine_stops) != set(encoder.stop_ids):
        message = "Engine and learner end turns at different tokens."
        return Finding(name, "error", message, evidence, "Build the engine with the stage's own encoder.")
    return Healthy(name, evidence)


def stop_counted(mask: Tensor, rollouts: Sequence[Rollout], pad_id: int) -> Result:
    """The sampled stop token is scored and trained, also where padding is the same id."""
    name = "stop tokens"
    missing = sum(int(row.sum()) != len(r.response_ids) for row, r in zip(mask, rollouts, strict=True))
    evidence = f"{len(rollouts) - missing} of {len(rollouts)} finished responses count to their stop token (padding is {pad_id})"
    if missing:
        message = "The stop token is masked: the policy never learns when to end."
        return Finding(name, "error", message, evidence, "Make masks from lengths, never from token ids.")
    return Healthy(name, evidence)


def scores(found: Sequence[Score], *, checked: bool = False) -> Result:
    """Scores that can be learned from.

    Args:
        checked: the reward is right or wrong, and a short probe may be all wrong.
    """
    name, known = "scores", [s.value for s in found if s.value is not None and math.isfinite(s.value)]
    failed = len(found) - len(known)
    reasons = "; ".join(sorted({s.reason for s in found if s.value is None and s.reason})[:2])
    evidence = f"{len(known)} scores, {failed} failed" + (f" ({reasons})" if reasons else "")
    if failed:
        severity = (
            "error" if failed > len(found) / 2 or any(s.value is not None and math.isnan(s.value) for s in found) else "warning"
        )
        return Finding(
            name, severity, "Rewards fail.", evidence, "Look at the reasons; a failed score must be None, never NaN or 0."
        )
    spread = statistics.pstdev(known)
    evidence += f", {statistics.fmean(known):.3g} ± {spread:.3g}"
    if spread < 1e-6:
        severity = "warning" if checked else "error"
        return Finding(
            name, severity, "All scores are the same.", evidence, "Nothing can be learned from them: look at the reward."
        )
    return Healthy(name, evidence)


def kl_scale(coefficient: float, kl: float, spread: float) -> Result:
    """What the tether costs is of the size of what the score can give.

    Args:
        kl: nats a response.
        spread: deviation of the scores as they are trained on.
    """
    name, share = "KL scale", coefficient * kl / spread if spread else math.inf
    evidence = f"coefficient {coefficient:g} x {kl:.3g} nats = {share:.3g} deviations of the score ({spread:.3g})"
    if share > 20:
        return Finding(name, "warning", "The KL dwarfs the score.", evidence, "Lower kl.coefficient, or set normalize_scores.")
    if share < 1e-3:
        return Finding(name, "warning", "The KL is too light to hold anything.", evidence, "Raise kl.coefficient.")
    return Healthy(name, evidence)
