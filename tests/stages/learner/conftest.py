"""A recipe of several stages for ranks, and what one process makes of it."""

import pytest
from tests.every_stage import recipe
from tests.stages.learner.ranked import STAGES, standing_on, trained


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """A recipe of all these stages, without dropout and with several micro-batches in every
    update.
    """
    values = recipe(tmp_path_factory.mktemp("rows"), "")
    values = {name: values[name] for name in ("model", *STAGES)}
    for name in STAGES:
        # A large epsilon: without it AdamW makes whole steps of the rounding of gradients that are
        # nearly 0.
        optimizer = {"learning_rate": 5e-3, "epsilon": 1e-3}
        values[name] |= {"checkpoint_every": 1, "micro_batch_tokens": 48, "optimizer": optimizer}
        for key in ("lora", "head_dropout"):
            values[name].pop(key, None)
    del values["sft"]["micro_batch_tokens"]
    values["sft"] |= {"batch_size": 6, "epochs": 3, "rows_per_micro_batch": 1, "row_tokens": 24}
    for name, prompts in (("reward", 3), ("direct", 6), ("kto", 6)):
        values[name] |= {"prompts_per_update": prompts, "epochs": 3}
    values["process"] |= {"solutions_per_update": 4, "epochs": 2}
    values["ppo"] |= {
        "evaluate": {
            "every": 2,
            "prompts": 4,
            "keep": "best",
            "best_of": [2],
            "temperatures": [0.0],
        },
    }
    values["grpo"] |= {
        "verifiable": {"kind": "exact", "format_pattern": "^[^a-m]*$"},
        "samples_per_prompt": 4,
    }
    return values


@pytest.fixture(scope="module")
def ready(values, tmp_path_factory):
    """What one process makes of the stages on which those that sample stand."""
    root = tmp_path_factory.mktemp("ready")
    trained(values, root, ["sft", "reward"])
    return root


@pytest.fixture(scope="module")
def alone(values, ready, tmp_path_factory):
    """What one process makes of all stages."""
    root = standing_on(ready, tmp_path_factory.mktemp("alone"))
    trained(values, root, [stage for stage in STAGES if stage not in ("sft", "reward")])
    return root
