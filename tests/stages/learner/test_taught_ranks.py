"""Two ranks with teachers learn what one process learns, whole or with half of every layer each."""

import pytest
from tests.every_stage import recipe
from tests.stages.learner.ranked import assert_same, trained

SERVED = {"engine": {"kind": "served"}}


@pytest.mark.parametrize(
    ("divergence", "shard"),
    [
        ("token", False),
        ("jsd", True),
        pytest.param("jsd", False, marks=pytest.mark.slow),
        pytest.param("token", True, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_learn_from_teachers_what_one_process_learns(tmp_path, divergence, shard):
    own = recipe(tmp_path, "")
    distill = {
        **own["distill"],
        "divergence": divergence,
        "steps": 6,
        "prompts_per_step": 3,
        "checkpoint_every": 1,
        "micro_batch_tokens": 48,
        "optimizer": {"learning_rate": 5e-3, "epsilon": 1e-3},
        "evaluate": {"every": 2, "prompts": 5},
    }
    if shard:
        distill |= {
            "ema_decay": None,
            "teacher": {"model": "start", "system": "shout"},
            "evaluate": {**distill["evaluate"], "keep": "best"},
            **SERVED,
        }
    for key in ("lora", "head_dropout"):
        distill.pop(key, None)
    values = {"model": own["model"], "distill": distill}
    trained(values, tmp_path / "1", ["distill"])
    trained(values, tmp_path / "2", ["distill"], 2, **({"shard": True} if shard else {}))
    assert_same(tmp_path / "1" / "distill", tmp_path / "2" / "distill")
