import json

import pytest
from pydantic import Field

from tether.core.digest import digest
from tether.core.errors import ConfigError, MissingFileError, RunError
from tether.core.rundir import RunDirectory, read_json, read_jsonl, write_json
from tether.settings.config import Config
from tether.settings.learner import OptimizerConfig
from tether.settings.reading import build, load_recipe, packaged_recipe
from tether.settings.sampling import GRPOSection, PPOSection
from tether.settings.supervised import SFTSection


class Inner(Config):
    rate: float = Field(default=0.1, gt=0)
    name: str = "x"


class Outer(Config):
    steps: int = 3
    inner: Inner = Inner()
    required: str


def test_overrides_reach_nested_keys_and_keep_types():
    config = build(
        Outer,
        {"required": "a", "inner": {"rate": 0.5}},
        ["steps=7", "inner.name=plain text", "inner.rate=1e-3"],
    )
    assert (config.steps, config.inner.rate, config.inner.name) == (7, 1e-3, "plain text")


@pytest.mark.parametrize(
    ("values", "overrides", "message"),
    [
        ({"required": "a", "stepz": 1}, [], "unknown key 'stepz' .did you mean 'steps'"),
        (
            {"required": "a", "inner": {"rat": 1}},
            [],
            "unknown key 'inner.rat' .did you mean 'rate'",
        ),
        ({"required": "a", "zzzzz": 1}, [], "known keys: inner, required, steps"),
        ({}, [], "key 'required' is required"),
        ({"required": "a"}, ["steps=many"], "key 'steps': .*got 'many'"),
        ({"required": "a"}, ["inner.rate=-1"], "key 'inner.rate': .*greater than 0"),
        ({"required": "a"}, ["steps"], "not of the form key.sub=value"),
        ({"required": "a"}, ["steps.more=1"], "'steps' is a value, not a table"),
    ],
)
def test_every_mistake_is_named(values, overrides, message):
    if overrides == ["steps.more=1"]:
        values = {**values, "steps": 3}
    with pytest.raises(ConfigError, match=message):
        build(Outer, values, overrides)


def test_recipes_from_files(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('required = "a"\n[inner]\nrate = 0.25\n', encoding="utf-8-sig")
    assert load_recipe(path, Outer).inner.rate == 0.25
    path.write_text("required = \n")
    with pytest.raises(ConfigError, match=r"r\.toml: not a valid TOML file"):
        load_recipe(path, Outer)
    with pytest.raises(MissingFileError, match="recipe not found"):
        load_recipe(tmp_path / "no.toml", Outer)
    with pytest.raises(MissingFileError, match=r"Packaged recipes: .*quickstart"):
        packaged_recipe("nonsense")


def test_configs_are_frozen_and_digests_follow_content():
    config = build(Outer, {"required": "a"})
    with pytest.raises(Exception, match="frozen"):
        config.steps = 4
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


def test_a_run_directory_continues_only_its_own_config(tmp_path):
    run = RunDirectory.open(tmp_path / "run", {"a": {"b": 1}})
    run.log({"loss": 0.5, "bad": float("nan")}, 1)
    run.log({"loss": 0.25}, 2)
    assert [r["loss"] for r in RunDirectory.open(tmp_path / "run", {"a": {"b": 1}}).metrics()] == [
        0.5,
        0.25,
    ]
    assert run.metrics()[0]["bad"] is None  # JSON has no NaN
    with pytest.raises(RunError, match=r"a\.b was 1 and is now 2"):
        RunDirectory.open(tmp_path / "run", {"a": {"b": 2}})
    assert not run.complete
    run.finish({"done": True})
    assert run.complete and run.summary() == {"done": True}


def test_a_run_that_made_nothing_may_begin_otherwise(tmp_path):
    RunDirectory.open(tmp_path / "run", {"a": 1})
    assert read_json(tmp_path / "run" / "config.json") == {"a": 1}
    RunDirectory.open(tmp_path / "run", {"a": 2})
    assert read_json(tmp_path / "run" / "config.json") == {"a": 2}
    (tmp_path / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-000001" / "COMPLETE").write_text("{}")
    with pytest.raises(RunError, match="a was 2 and is now 3"):
        RunDirectory.open(tmp_path / "run", {"a": 3})


def test_a_key_that_an_older_run_lacks_is_equal_at_its_default(tmp_path):
    RunDirectory.open(tmp_path / "run", {"outer": {"required": "a", "inner": {}}}).log({}, 1)
    RunDirectory.open(tmp_path / "run", {"outer": Outer(required="a")})
    with pytest.raises(RunError, match=r"outer\.steps was None and is now 9"):
        RunDirectory.open(tmp_path / "run", {"outer": Outer(required="a", steps=9)})


def test_paths_are_compared_as_they_lie_to_the_run(tmp_path):
    old, new = tmp_path / "a" / "ppo", tmp_path / "b" / "ppo"
    RunDirectory.open(old, {"source": f"{tmp_path}/a/sft/model", "more": [f"{tmp_path}/a/x"]}).log(
        {},
        1,
    )
    (tmp_path / "a").rename(tmp_path / "b")
    RunDirectory.open(new, {"source": f"{tmp_path}/b/sft/model", "more": [f"{tmp_path}/b/x"]})
    with pytest.raises(RunError, match="source was"):
        RunDirectory.open(new, {"source": f"{tmp_path}/c/sft/model", "more": [f"{tmp_path}/b/x"]})


def test_settings_that_are_read_back_say_what_was_said(tmp_path):
    said = {
        "prompt": "Work token by token: be brief. Answer key: letters.",
        "call": "my.answer_key:score",
        "store": "x://me:pw@h/d",
    }
    run = RunDirectory.open(tmp_path / "run", said)
    assert read_json(run.path / "config.json") == {**said, "store": "x://me:***@h/d"}


def test_a_foreign_folder_is_not_taken_over(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "love.txt").write_text("dear")
    with pytest.raises(RunError, match="not a run directory"):
        RunDirectory.open(tmp_path / "letters", {})
    assert (tmp_path / "letters" / "love.txt").read_text() == "dear"


def test_truncation_forgets_what_a_resumed_run_will_write_again(tmp_path):
    run = RunDirectory.open(tmp_path / "run", {})
    for step in range(1, 6):
        run.log({"loss": step}, step)
        run.sample([{"step": step, "text": str(step)}])
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": ')  # killed while writing
    run.truncate(3)
    assert [r["step"] for r in run.metrics()] == [1, 2, 3]
    assert [r["step"] for r in read_jsonl(tmp_path / "run" / "samples.jsonl")] == [1, 2, 3]


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="Circular"):
        write_json(path, endless)
    assert read_json(path) == {"a": 1}
    write_json(path, {"a": 1, "deep": [{"x": float("nan")}, float("inf")]})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "a": 1,
        "deep": [{"x": None}, None],
    }
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    path.write_text("{")
    with pytest.raises(RunError, match="damaged"):
        read_json(path)
    assert json.loads("1") == 1


@pytest.mark.parametrize(
    ("section", "schedule", "final"),
    [(SFTSection, "cosine", 0.1), (PPOSection, "linear", 0.0), (GRPOSection, "linear", 0.0)],
)
def test_an_optimizer_object_counts_by_its_set_fields(section, schedule, final):
    def optimizer(**fields):
        return section.model_validate(
            {"data": {"path": "x"}, "optimizer": OptimizerConfig(**fields)},
        ).optimizer

    part = optimizer(learning_rate=3e-3, schedule=schedule)
    assert (part.learning_rate, part.schedule, part.final_fraction) == (3e-3, schedule, final)
    for named in ("cosine", "linear"):  # the class's own default counts where it was set
        every = OptimizerConfig().model_dump() | {"learning_rate": 3e-3, "schedule": named}
        assert optimizer(**every).model_dump() == every
