"""The interface of the textbooks (TRL 0.7 to 0.11) over tether's own learner and steps:
docs/guides/classic.md.
"""

from tether.classic.config import PPOConfig, RewardConfig, SFTConfig
from tether.classic.models import AutoModelForCausalLMWithValueHead, create_reference_model
from tether.classic.ppo import PPOTrainer
from tether.classic.supervised import RewardTrainer, SFTTrainer

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
