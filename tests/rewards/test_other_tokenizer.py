"""A reward model that does not read a policy's ids as the policy writes them is given the text, or
refused.
"""

import random
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import tether
from tether.core.errors import ModelError
from tether.core.types import Prompt, Rollout, Sampling, Score, StopReason, assistant, user
from tether.data.chat import ChatEncoder
from tether.models.tiny import SPECIAL, TEMPLATE, tiny_model, tiny_tokenizer
from tether.rewards.learned import LearnedReward, TextReward
from tether.runner.assembly.rewards import learned_reward
from tether.runner.assembly.roles import reader_beside, trained_scorer
from tether.settings.model import ModelConfig

PAIRS = [
    {"prompt": f"Q{i}", "chosen": "aeiou" * (1 + i % 3), "rejected": "bcdfg" * (1 + i % 3)}
    for i in range(24)
]
TRAIN = {"epochs": 2, "prompts_per_update": 8, "optimizer": {"learning_rate": 3e-3}}
SAMPLE = {
    "steps": 1,
    "max_new_tokens": 8,
    "prompts_per_step": 3,
    "samples_per_prompt": 4,
    "roles": "separate",
}


def renumbered():
    """The same bytes, numbered otherwise."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    random.Random(0).shuffle(alphabet)
    inner = Tokenizer(
        BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *alphabet])}, merges=[]),
    )
    inner.pre_tokenizer, inner.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    special = {
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "additional_special_tokens": list(SPECIAL[2:]),
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def reworded():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ message['content'] }}",
        " : {{ message['content'] }}",
    )
    return tokenizer


OTHERS = {"another tokenizer": renumbered, "another template": reworded}


@pytest.fixture(scope="module", params=OTHERS)
def judge(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    tiny_model(3).save_pretrained(folder / "model")
    OTHERS[request.param]().save_pretrained(folder / "model")
    return tether.reward(
        {"source": str(folder / "model"), "dtype": "float32"},
        PAIRS,
        run=str(folder / "rm"),
        **TRAIN,
    )


def assert_scores_are_of_the_texts(run, judge):
    rows = run.samples()
    meant = judge.reward_model.score(
        [row["prompt"] for row in rows],
        [row["response"] for row in rows],
    )
    scored = [
        (row["proxy"], value) for row, value in zip(rows, meant, strict=True) if value is not None
    ]
    assert len(scored) >= 3
    for used, value in scored:
        assert used == pytest.approx(value, abs=1e-3)


def test_fewer_tokens_than_the_policy_wrote_and_all_turns_are_read():
    """A reward model whose tokenizer has one id for two of the policy's; an episode is read whole."""
    seen = []

    class Source:
        name = "seen"

        def score(self, rollouts):
            seen.extend(rollouts)
            return [Score(1.0)] * len(rollouts)

    reader = ChatEncoder(tiny_tokenizer(), (1,), TEMPLATE)
    long = Rollout(
        prompt=Prompt((user("q"),)),
        prompt_ids=(5,),
        response_ids=tuple(range(20, 60)),
        logprobs=(),
        stop_reason=StopReason.STOP_TOKEN,
        text="ab",
        sample_index=0,
        policy_version=0,
        sampling=Sampling(max_new_tokens=64),
    )
    turns = (assistant("one"), user("and?"), assistant("two"))
    episode = replace(long, text="two", turns=turns, spans=((0, 10), (20, 40)), forks=(20,))
    assert [one.value for one in TextReward(Source(), reader).score([long, episode])] == [1.0, 1.0]
    assert len(seen[0].response_ids) < 40 and seen[0].spans == ((0, len(seen[0].response_ids)),)
    read = reader.decode(seen[1].prompt_ids + seen[1].response_ids)
    assert read.index("one") < read.index("and?") < read.index("two") and not seen[1].forks


def test_answers_are_scored_as_the_reward_model_reads_them(judge, tmp_path):
    model = {"source": "tiny", "dtype": "float32"}
    run = tether.grpo(
        model,
        prompts=["a", "b", "c"],
        reward=judge,
        run=str(tmp_path / "grpo"),
        **SAMPLE,
    )
    assert_scores_are_of_the_texts(run, judge)


@pytest.mark.parametrize(
    "asked",
    [
        {"reward_per_token": True, "step_rewards": True, "value_init": "zero"},
        {"value_init": "reward"},
        {"roles": "shared"},
    ],
)
def test_options_by_the_policys_tokens_are_refused_before_training(judge, tmp_path, asked):
    with pytest.raises(
        ModelError,
        match=(
            f"was trained with another tokenizer, template.*{next(iter(asked))}.*policy's tokens"
        ),
    ):
        tether.ppo(
            "tiny",
            prompts=["a", "b", "c"],
            reward=judge,
            run=str(tmp_path / "ppo"),
            **{**SAMPLE, **asked},
        )
    assert not (tmp_path / "ppo" / "ppo").exists()


def test_a_reward_model_on_a_trunk_of_its_own_reads_texts_too(judge, tmp_path):
    folder = tmp_path / "other"
    place = trained_scorer(str(judge.path))
    assert isinstance(learned_reward(place, ModelConfig(source="tiny")), TextReward)
    assert reader_beside(place, ModelConfig(source="tiny")) is not None
    tiny_model(0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    own = tether.reward(str(folder), PAIRS, run=str(tmp_path / "same"), **TRAIN)
    assert isinstance(
        learned_reward(trained_scorer(str(own.path)), ModelConfig(source="tiny")),
        LearnedReward,
    )
