"""Any sequence classifier of the hub as a reward: encoders with a CLS state and decoders alike,
with a tokenizer of their own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tether.core.errors import ModelError
from tether.core.types import Conversation, Rollout, Score, assistant
from tether.models.loading import pick_dtype
from tether.models.pretrained import check_model_folder, from_pretrained
from tether.models.sources import check_model_source
from tether.models.trunk import setting
from tether.rewards.parts import RewardParts
from tether.settings.model import ModelConfig
from tether.settings.reading import build
from tether.settings.rewards import ClassifierConfig
from tether.settings.sampling import RewardedSection

if TYPE_CHECKING:
    from transformers import (
        BatchEncoding,
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

OFFSET = "score_offset"
"""A key of config.json: what sequence classifiers have no weight for, and tether adds again."""


class ClassifierReward:
    """Implements core.protocols.RewardSource, on text: its tokenizer need not be the policy's.

    A conversation goes through the tokenizer's chat template; without one, a prompt and its
    response are the two segments that encoders were trained on (https://arxiv.org/abs/1810.04805).

    Raises:
        ModelError: the model cannot be loaded, or has several outputs without a choice.
    """

    name = "classifier"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: ClassifierConfig,
    ) -> None:
        own = model.config
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = config
        self.output = output_of(own, config)
        self.constant = vars(own).get(OFFSET, 0.0)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise ModelError(
                f"{config.source}: its tokenizer has neither a padding token nor an EOS. Set one "
                "there, and save it.",
            )
        if own.pad_token_id is None:
            own.pad_token_id = tokenizer.pad_token_id
        tokenizer.truncation_side = "left"
        self.reads_last = isinstance(setting(model, "score"), torch.nn.Module)
        """True for a decoder, whose score is read at the last token."""
        if self.reads_last:  # padding before a text would move its tokens to other positions
            tokenizer.padding_side = "right"

    @classmethod
    def load(cls, config: ClassifierConfig, device: torch.device | str = "cpu") -> ClassifierReward:
        """From the hub or a folder, in float32, on a GPU in what it multiplies fastest; no code
        that comes with it is run.
        """
        dtype = (
            torch.float32
            if torch.device(device).type == "cpu"
            else pick_dtype(config.dtype, str(device))
        )
        settings = build(ModelConfig, {"source": config.source}, where="classifier")
        check_model_source(settings)
        model, tokenizer, _ = from_pretrained("SequenceClassification", settings, dtype)
        return cls(model.to(device), tokenizer, config)

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        return self.score_conversations([(*r.prompt.messages, assistant(r.text)) for r in rollouts])

    @torch.no_grad()
    def score_conversations(self, conversations: Sequence[Conversation]) -> list[Score]:
        """One score a conversation, whose last turn is judged; a number that is not finite is a
        failed score.
        """
        scores: list[Score] = []
        for start in range(0, len(conversations), self.config.batch):
            batch = self._encoded(conversations[start : start + self.config.batch]).to(
                self.model.device,
            )
            if self.reads_last:
                self._settle_padding(batch)
            values = self.model(**batch).logits[:, self.output].float().add(self.constant).tolist()
            scores += [Score(value).finite("the classifier", value) for value in values]
        return scores

    def _settle_padding(self, batch: BatchEncoding) -> None:
        """Pad with an id that no text of the batch has, and name it to the library.

        The library takes the last token that is not padding for the last of a text. Where the EOS
        pads, or where config.json and tokenizer name different tokens, that is another place than
        the attention mask says.
        """
        ids = batch["input_ids"]
        counts = batch["attention_mask"].bool()
        present = torch.zeros(int(ids.max()) + 2, dtype=torch.bool, device=ids.device)
        present[ids[counts]] = True
        rows = self.model.get_input_embeddings().get_parameter("weight").shape[0]
        free = int((~present).nonzero()[0, 0])
        if free >= rows:
            raise ModelError(
                f"{self.config.source}: a batch has all of its {rows} tokens, and "
                "none is left for padding",
            )
        batch["input_ids"] = ids.masked_fill(~counts, free)
        self.model.config.pad_token_id = self.model.config.get_text_config().pad_token_id = free

    def _encoded(self, conversations: Sequence[Conversation]) -> BatchEncoding:
        tokenizer = self.tokenizer
        positions = (
            setting(self.model.config.get_text_config(), "max_position_embeddings")
            or self.config.max_length
        )
        longest = min(self.config.max_length, tokenizer.model_max_length, positions)
        how = {"padding": True, "truncation": True, "max_length": longest, "return_tensors": "pt"}
        if tokenizer.chat_template:
            turns = [[m.as_row() for m in messages] for messages in conversations]
            texts = [str(tokenizer.apply_chat_template(each, tokenize=False)) for each in turns]
            return tokenizer(texts, add_special_tokens=False, **how)
        prompts = ["\n\n".join(m.content for m in messages[:-1]) for messages in conversations]
        return tokenizer(prompts, [messages[-1].content for messages in conversations], **how)


def classifier_reward(parts: RewardParts) -> ClassifierReward:
    """The reward by a recipe's classifier."""
    return ClassifierReward.load(parts.settings, parts.device)


def check_classifier(name: str, section: RewardedSection) -> None:
    """Check the folder of a section's classifier, before any stage begins.

    Raises:
        TetherError: it holds no model, or none that gives the reward.
    """
    from transformers import PretrainedConfig

    config: ClassifierConfig = vars(section)["classifier"]
    settings = build(ModelConfig, {"source": config.source}, where=f"{name}.classifier")
    check_model_source(settings)
    if os.path.isdir(source := os.path.expanduser(config.source)):
        check_model_folder("SequenceClassification", settings)
        output_of(PretrainedConfig.from_pretrained(source), config)


def output_of(config: PretrainedConfig, settings: ClassifierConfig) -> int:
    """The place of the output that is the reward.

    Raises:
        ModelError: the settings name none that there is.
    """
    labels = {int(number): str(name) for number, name in (config.id2label or {}).items()}
    names = ", ".join(labels.values())
    if settings.label is None and len(labels) > 1:
        raise ModelError(
            f"{settings.source} has {len(labels)} outputs ({names}). Set label to "
            "the one that is a reward.",
        )
    for number, name in labels.items():
        if settings.label in (None, number, name):
            return number
    raise ModelError(
        f"{settings.source} has no output {settings.label!r}; it has {names}. Set "
        "label to one of them.",
    )
