"""Settings of the stages that sample, and of every policy-gradient method.

The methods are independent switches, and presets that name their combinations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from tether.core.types import Entries, Facts, Json, Sampling
from tether.settings.config import FromOne, Probability, UpToOne
from tether.settings.kl import KLConfig
from tether.settings.learner import MicroBatchTokens, OptimizerConfig, Rates, TrainedConfig
from tether.settings.needs import Needs
from tether.settings.teacher import TaughtConfig

Algorithm = Literal[
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "reinforce",
    "rloo",
    "reinforce++",
    "reinforce++_baseline",
    "distill",
]

_GROUP = {"baseline": "group", "scale_advantages": True, "epochs": 1}
_GROUP |= {"kl": {"place": "loss", "coefficient": 0.0}}
_PLAIN = {"surrogate": "reinforce", "epochs": 1, "normalize_scores": True}
PRESETS: dict[str, Json] = {
    "ppo": {"critic": True, "whiten_advantages": True, "normalize_scores": True},
    "grpo": _GROUP,
    "dr_grpo": {**_GROUP, "scale_advantages": False, "normalize": "constant"},
    "dapo": {**_GROUP, "minibatches": 4, "clip_range_high": 0.28, "filter_groups": True},
    "gspo": {**_GROUP, "minibatches": 4, "surrogate": "sequence", "normalize": "sequence"}
    | {"clip_range": 3e-4, "clip_range_high": 4e-4},
    "cispo": {**_GROUP, "minibatches": 4, "surrogate": "cispo", "clip_range_high": 4.0},
    "reinforce": {**_PLAIN, "baseline": "running_mean"},
    "rloo": {**_PLAIN, "baseline": "leave_one_out", "kl": {"place": "sequence"}},
    "reinforce++": {
        "whiten_advantages": True,
        "normalize_scores": True,
        "epochs": 1,
        "minibatches": 4,
    },
    "reinforce++_baseline": {
        **_GROUP,
        "scale_advantages": False,
        "whiten_advantages": True,
        "minibatches": 4,
    }
    | {"kl": {"place": "loss", "estimator": "k2", "coefficient": 0.05}},
    "distill": {"epochs": 1, "kl": {"coefficient": 0.0}},
}
"""Settings of each published method. All other keys have the defaults below. Links:
docs/methods.
"""


TO_ZERO = OptimizerConfig(schedule="linear", final_fraction=0.0)
"""The learning rate falls linearly to 0."""


class SampledConfig(TrainedConfig):
    """Settings of every stage that learns from the policy's own samples; lengths are in tokens."""

    steps: FromOne = Field(
        default=100,
        description="of training: each samples, scores and learns",
    )
    prompts_per_step: FromOne = Field(
        default=8,
        description="prompts answered in a step; large machines take 64 and more",
    )
    samples_per_prompt: FromOne = Field(default=4, description="answers to each of them")
    max_new_tokens: FromOne = Field(default=64, description="longest answer")
    thought_tokens: NonNegativeInt = Field(
        default=0,
        description="most tokens of a thought; then the mark that ends it is given, not learned, "
        "and the answer follows; 0: no limit",
    )
    temperature: PositiveFloat = Field(
        default=1.0,
        description="of sampling, and of the distributions in the loss",
    )
    missing_stop_penalty: NonNegativeFloat = Field(
        default=0.0,
        description="taken off the score, after its normalisation, of a response that did not end in time",
    )
    micro_batch_tokens: MicroBatchTokens = 2048
    ema_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="end with a moving average of the policy's trained weights; of an adapter, "
        "both factors are averaged, not "
        "their product",
    )
    checkpoint_every: FromOne = Field(default=5, description="steps between checkpoints")
    sample_rows: NonNegativeInt = Field(default=4, description="texts kept from every step")
    seed: int = Field(default=0, description="of prompts and sampling")

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            thought_tokens=self.thought_tokens,
        )

    def faults(self) -> Iterator[str]:
        if self.thought_tokens >= self.max_new_tokens:
            yield (
                f"thought_tokens = {self.thought_tokens} leaves nothing of max_new_tokens = "
                f"{self.max_new_tokens} for an answer: lower it"
            )
        if self.thought_tokens and (
            vars(self).get("environment") or vars(self).get("max_staleness")
        ):
            yield "thought_tokens is for single answers, without environment and max_staleness"

    def ordinals(self, number: int) -> range:
        """The places of a step's prompts among all prompts of the run."""
        return range(number * self.prompts_per_step, (number + 1) * self.prompts_per_step)


A_CRITIC = Needs("critic", "has no effect without a critic")
A_CLIP = Needs("surrogate = 'clip' or 'sequence'", "has no effect with this surrogate")
UPDATES = Needs(
    "epochs > 1 or minibatches > 1",
    "has no effect with one update a batch: nothing has moved when the ratio is taken. Set epochs "
    "or minibatches above 1",
)
OFF_POLICY = (
    "has no ratio, so that a second update on the same rollouts would be off policy: set "
    "epochs = 1 and minibatches = 1, or take another surrogate"
)


class PolicyConfig(TaughtConfig, SampledConfig):
    """Settings of a policy-gradient stage; lengths are in tokens. `algorithm` fills in what is not
    said.
    """

    rates: ClassVar[Rates] = Rates(5e-4, 3e-6)

    algorithm: Algorithm = "ppo"
    top_p: UpToOne = Field(
        default=1.0,
        description="of sampling; training refuses less than 1",
    )
    epochs: FromOne = Field(default=4, description="passes over a step's answers")
    minibatches: FromOne = Field(
        default=1,
        description="optimizer steps an epoch, each on as many answers; whole "
        "prompts where there are enough",
    )

    normalize_scores: bool = Field(
        default=False,
        description="shift and scale scores to mean 0, deviation 1 on the reference's own "
        "samples: those of the first step in "
        "which scores differ; rewards of steps are only scaled, by the deviation of a response's "
        "sum of them",
    )
    score_clip: float | None = Field(
        default=None,
        gt=0,
        description="scores, or the rewards of steps, are clipped to plus or "
        "minus this, after normalisation",
    )
    overlong_buffer: NonNegativeInt = Field(
        default=0,
        description="last tokens before max_new_tokens over which a penalty grows",
    )
    overlong_penalty: Annotated[PositiveFloat, Needs("overlong_buffer")] = Field(
        default=1.0,
        description="taken off the score at the end of that buffer",
    )
    truncated: Annotated[
        Literal["score", "mask"],
        Needs(
            "not missing_stop_penalty",
            "leaves an answer out, and missing_stop_penalty takes something off its score: choose one",
            "mask",
        ),
    ] = Field(
        default="score",
        description="an answer that did not end in time is scored as it is, less "
        "missing_stop_penalty, or left out of loss and baseline and counted",
    )
    step_rewards: Annotated[
        bool,
        Needs(
            "kl.place != 'sequence'",
            "has no single score that kl.place = 'sequence' could be taken off: use 'token' or "
            "'loss'",
        ),
    ] = Field(
        default=False,
        description="use the rewards of single steps that the source gives, not the score",
    )
    filter_groups: Annotated[
        bool,
        Needs(
            "baseline = 'group' or 'leave_one_out'",
            "has no effect without baseline 'group' or 'leave_one_out'",
        ),
    ] = Field(
        default=False,
        description="leave out prompts whose samples all score the same; no update where all do",
    )
    refill: Annotated[NonNegativeInt, Needs("filter_groups")] = Field(
        default=0,
        description="further batches of prompts that may be sampled to replace those left out",
    )

    baseline: Annotated[
        Literal["none", "running_mean", "group", "leave_one_out"],
        Needs(
            "samples_per_prompt > 1",
            "needs other samples of the same prompt: set samples_per_prompt to 2 or more",
            "group",
        ),
        Needs(
            "samples_per_prompt > 1",
            "needs other samples of the same prompt: set samples_per_prompt to 2 or more",
            "leave_one_out",
        ),
    ] = Field(
        default="none",
        description="taken off each score: past scores' mean, the mean of the prompt's samples, "
        "or that of its others",
    )
    baseline_window: Annotated[FromOne, Needs("baseline = 'running_mean'")] = Field(
        default=1024,
        description="scores that the running mean remembers",
    )
    scale_advantages: Annotated[bool, Needs("baseline = 'group'")] = Field(
        default=False,
        description="divide by the standard deviation of the group's scores",
    )
    critic: bool = Field(
        default=False,
        description="learn a value function and estimate advantages with it (GAE)",
    )
    value_init: Literal["zero", "reward"] = Field(
        default="zero",
        description="a fresh head on the policy's states, or a copy of the reward model on the "
        "scale of its normalised scores",
    )
    gamma: Probability = Field(default=1.0, description="discount of later rewards, a token")
    lam: Annotated[Probability, A_CRITIC] = Field(
        default=0.95,
        description="of GAE: 1 takes the whole return, 0 one token and the value after it",
    )
    whiten_advantages: bool = Field(
        default=False,
        description="mean 0, deviation 1 over all tokens of the step, before teachers add to them",
    )
    normalize: Literal["token", "sequence", "constant"] = Field(
        default="token",
        description="weight of a token: the same for all, its response's share, or one over max_new_tokens",
    )

    surrogate: Annotated[
        Literal["clip", "sequence", "cispo", "reinforce"],
        Needs("epochs = 1", OFF_POLICY, "reinforce"),
        Needs("minibatches = 1", OFF_POLICY, "reinforce"),
        Needs(
            "clip_range_high",
            "truncates weights at 1 + clip_range_high: set clip_range_high",
            "cispo",
        ),
    ] = Field(
        default="clip",
        description="PPO's clipped ratio, that of whole sequences, a truncated weight, or the "
        "bare policy gradient",
    )
    clip_range: Annotated[PositiveFloat, A_CLIP, UPDATES] = Field(
        default=0.2,
        description="how far the ratio of a token's probabilities, new to old, counts: 1 ± this",
    )
    clip_range_high: Annotated[
        float | None,
        Needs("surrogate != 'reinforce'", "has no effect with surrogate = 'reinforce'"),
        UPDATES,
    ] = Field(default=None, gt=0, description="upper clip range; unset: clip_range")
    dual_clip: Annotated[float | None, A_CLIP, UPDATES] = Field(
        default=None,
        gt=1,
        description="bound on the loss of a bad token, in units of its advantage",
    )
    target_kl: Annotated[float | None, UPDATES] = Field(
        default=None,
        gt=0,
        description="KL(old || new) a token beyond which no further update is taken from a step's answers",
    )
    importance: Literal["none", "truncate", "mask"] = Field(
        default="none",
        description="correct for an engine whose numerics differ: cap the weight, "
        "or drop tokens beyond the cap",
    )
    importance_cap: Annotated[
        float,
        Needs("importance != 'none'", "has no effect without importance"),
    ] = Field(
        default=2.0,
        ge=1,
        description="bound of the importance weight between engine and trainer",
    )
    max_staleness: Annotated[
        NonNegativeInt,
        Needs(
            "importance != 'none'",
            "above 0 learns from answers of earlier weights: correct for that, with importance = "
            "'truncate' or 'mask'",
        ),
        Needs(
            "not filter_groups",
            "asks for a step's answers before it is known which groups teach something: leave "
            "filter_groups out",
        ),
    ] = Field(
        default=0,
        description="how many updates old the weights that sample may be: engine servers sample "
        "while the learner learns",
    )
    entropy_coefficient: NonNegativeFloat = Field(
        default=0.0,
        description="weight of the entropy bonus",
    )
    value_clip_range: Annotated[float | None, A_CRITIC, UPDATES] = Field(
        default=0.2,
        gt=0,
        description="how far a value may move in an update; unset: as far as it likes",
    )
    value_coefficient: Annotated[NonNegativeFloat, A_CRITIC] = Field(
        default=0.5,
        description="weight of the value loss",
    )
    value_trains_trunk: Annotated[bool, A_CRITIC] = Field(
        default=False,
        description="let the value loss change the policy's own weights where both share one pass",
    )
    kl: KLConfig = Field(
        default=KLConfig(),
        description="the penalty for going away from the reference",
    )

    optimizer: OptimizerConfig = Field(default=TO_ZERO, description="AdamW and its learning rate")

    @classmethod
    def preset(cls, given: Entries) -> Facts:
        """Settings of the published method."""
        name = given.get("algorithm", cls.model_fields["algorithm"].default)
        return PRESETS.get(name, {}) if isinstance(name, str) else {}

    def faults(self) -> Iterator[str]:
        if self.top_p < 1.0:
            yield (
                "top_p < 1 samples from a distribution whose log-probabilities the update does "
                "not have (its ratios would be of another policy). Train with top_p = 1; use "
                "temperature to sharpen, and top_p when generating afterwards"
            )
        answers = self.prompts_per_step * self.samples_per_prompt
        if self.kl.mode == "adaptive" and answers >= 5 * self.kl.horizon:
            yield (
                f"kl.horizon = {self.kl.horizon:g} is too short for steps of {answers} answers: set "
                f"it above {answers / 5:g}"
            )
        if self.minibatches > answers:
            yield (
                "minibatches is above prompts_per_step x samples_per_prompt, the answers of a "
                "step: a minibatch needs at least one"
            )
        if self.overlong_buffer > self.max_new_tokens:
            yield "overlong_buffer is longer than max_new_tokens"

    @property
    def one_update(self) -> bool:
        """One optimizer step a batch of rollouts: the old policy is the policy."""
        return self.epochs * self.minibatches == 1

    @property
    def grouped(self) -> bool:
        """True if samples of a prompt are compared with each other."""
        return self.baseline in ("group", "leave_one_out")

    @property
    def needs_reference(self) -> bool:
        return self.kl.coefficient > 0 or self.kl.report
