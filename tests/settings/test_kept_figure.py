"""`evaluate.keep_by` names what the settings say is measured, or is refused as they are read."""

import json

import pytest

from tether.core.errors import ConfigError
from tether.settings.reading import build
from tether.settings.recipe import Recipe

CHECKED = {"reward_source": "verifiable", "verifiable": {"kind": "numeric"}}
FORMAT = {"kind": "numeric", "format": "boxed"}
FUNCTION = {"reward_source": "function", "function": {"call": "own.py:f"}}
OBJECTIVES = {
    "reward": {"objectives": {name: {"path": f"{name}.jsonl"} for name in ("kind", "brief")}},
    "objectives": {"kind": {"weight": 1.0}, "brief": {"weight": 1.0}},
}
MEMBERS = {"reward": {"data": {"path": "pairs.jsonl"}, "members": 3}}
FIGURES = [
    (CHECKED, "score correct", "format proxy beauty answer_tokens kl"),
    ({**CHECKED, "verifiable": FORMAT}, "score correct format", "agreement"),
    ({**CHECKED, "verifiable": FORMAT, "reward_source": "majority"}, "correct format", "agreement"),
    ({"reward_source": "random"}, "score", "correct spread"),
    ({"reward_source": "process"}, "score num_steps weakest_step", "correct"),
    ({"classifier": {"source": "x"}}, "score", "label"),
    (FUNCTION, "score anything", "proxy"),
    ({**FUNCTION, "judge": {"call": "own.py:g"}}, "score proxy anything", ""),
    ({**FUNCTION, "judge": {"model": "x"}}, "score proxy", "anything"),
    ({"reward": {"data": {"path": "pairs.jsonl"}}}, "score", "spread member_0"),
    (MEMBERS, "score spread member_0 member_2", "member_3"),
    ({"reward": {**MEMBERS["reward"], "average": True}}, "score", "spread member_0"),
    (OBJECTIVES, "score kind brief", "spread long"),
]


def made(values, figure, sign=""):
    stage = {"data": {"path": "rows.jsonl"}, **values}
    reward = {"reward": stage.pop("reward")} if "reward" in stage else {}
    judge = {"judge": stage.pop("judge")} if "judge" in stage else {}
    stage["evaluate"] = {"keep": "best", "keep_by": f"{sign}held_out.{figure}", **judge}
    process = {"process": {"data": {"path": "steps.jsonl"}}}
    rest = process if stage.get("reward_source") == "process" else reward
    return build(Recipe, {"run": "run", "model": {"source": "tiny"}, **rest, "grpo": stage})


@pytest.mark.parametrize(("values", "there", "absent"), FIGURES, ids=lambda it: json.dumps(it)[:40])
def test_a_figure_that_no_score_has_is_refused_as_the_recipe_is_read(values, there, absent):
    for figure in there.split():
        section = made(values, figure, "-").section("grpo")
        assert section.evaluate.kept_figure == (-1, "held_out", figure)
    for figure in absent.split():
        with pytest.raises(ConfigError, match=f"held_out has no figure '{figure}'"):
            made(values, figure)
