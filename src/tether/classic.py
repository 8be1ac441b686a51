"""The interface of the textbooks (TRL 0.7 to 0.11) over tether's own learner and steps:
docs/guides/classic.md.
"""

from tether.api.classic.config import PPOConfig, RewardConfig, SFTConfig
from tether.api.classic.models import AutoModelForCausalLMWithValueHead, create_reference_model
from tether.api.classic.ppo import PPOTrainer
from tether.api.classic.supervised import RewardTrainer, SFTTrainer

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "PPOConfig",
    "PPOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "create_reference_model",
]
