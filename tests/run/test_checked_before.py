"""What a later stage would be refused for is found before an earlier one is trained."""

import json
import re

import pytest

from tether.cli import app
from tether.core.errors import TetherError
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.rewards.loading import load_function
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

TALKS = [{"prompt": f"question {n}", "response": "an answer"} for n in range(6)]
SMALL = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 2}
LETTERS = {"call": "tether.quickstart.judges:letters"}


@pytest.fixture
def data(tmp_path):
    rows = {
        "talks": TALKS,
        "prompts": [{"prompt": row["prompt"]} for row in TALKS],
        "good": [
            {"prompt": row["prompt"], "completion": "an answer", "label": True} for row in TALKS
        ],
        "programs": [
            {
                "id": f"p{n}",
                "prompt": "Square",
                "answer": "assert f( ==" if n == 2 else "assert f(2) == 4",
            }
            for n in range(4)
        ],
        "good_programs": [
            {"id": f"p{n}", "prompt": f"Square {n}", "answer": "assert f(2) == 4"} for n in range(4)
        ],
        "pairs": [{"prompt": row["prompt"], "chosen": "good", "rejected": "bad"} for row in TALKS],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines),
            encoding="utf-8",
        )
    (tmp_path / "broken.py").write_text("import nothing_of_the_kind\n", encoding="utf-8")
    return {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in rows}


def later(data, folder, monkeypatch):
    """Sections that are refused, by name, with what the refusal says."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    grpo = {"data": data["prompts"], "reward_source": "random", **SMALL}
    pairs = {"data": data["prompts"], "max_new_tokens": 2, "judge": LETTERS}
    evaluate = {"prompts": 2}
    served = {"server": {"url": "https://api.openai.com/v1", "model": "m"}}
    broken = f"{folder / 'broken.py'}:score"
    (folder / "trl.py").write_text("def score(completions, answer): return answer\n")
    (folder / "bare.jinja").write_text("{% if messages %}")
    own = {"reward_source": "function", "function": {"call": f"{folder / 'trl.py'}:score"}}
    programs = {"reward_source": "verifiable", "verifiable": {"kind": "code"}}
    for name in ("bare", "adapter"):
        tiny_tokenizer().save_pretrained(folder / name)
    tiny_model(0).config.save_pretrained(folder / "bare")
    settings = {"base_model_name_or_path": str(folder / "bare"), "peft_type": "LORA"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    return {
        "a column that a reward takes": ({"grpo": {**grpo, **own}}, "needs 'answer'"),
        "tests that are no tests": (
            {"grpo": {**grpo, **programs, "data": data["programs"]}},
            "prompt 'p2': the tests of a problem are no Python",
        ),
        "tests of held-out prompts": (
            {
                "grpo": {
                    **grpo,
                    **programs,
                    "data": data["good_programs"],
                    "evaluate": {**evaluate, "data": data["programs"]},
                },
            },
            "prompt 'p2': the tests of a problem are no Python",
        ),
        "a column that a judge takes": (
            {"grpo": {**grpo, "evaluate": {**evaluate, "judge": own["function"]}}},
            "needs 'answer'",
        ),
        "a column of the data": (
            {"reward": {"data": {**data["pairs"], "columns": {"chosen": "nothing"}}}},
            "nothing",
        ),
        "a template": (
            {"model": {"source": "tiny", "chat_template": str(folder / "bare.jinja")}},
            "not valid Jinja",
        ),
        "a token that ends a turn": (
            {"model": {"source": "tiny", "stop_tokens": ["<nothing>"]}},
            "does not know ['<nothing>']",
        ),
        "a model without weights": (
            {"model": {"source": str(folder / "bare")}},
            "it has no weights",
        ),
        "an adapter without weights": (
            {"model": {"source": str(folder / "adapter")}},
            "adapter_model.safetensors is missing",
        ),
        "a judge's folder without weights": (
            {"pairs": {**pairs, "judge": {"model": str(folder / "bare")}}},
            "it has no weights",
        ),
        "a function that cannot be imported": (
            {"grpo": {**grpo, "reward_source": "function", "function": {"call": broken}}},
            "nothing_of_the_kind",
        ),
        "a function that is not there": (
            {"grpo": {**grpo, "reward_source": "function", "function": {"call": "json:nothing"}}},
            "no function",
        ),
        "a judge of held-out answers": (
            {"grpo": {**grpo, "evaluate": {**evaluate, "judge": {"call": "json:nothing"}}}},
            "no function",
        ),
        "a judge's key": ({"pairs": {**pairs, "judge": served}}, "OPENAI_API_KEY"),
        "a judge's model": (
            {"pairs": {**pairs, "judge": {"model": str(folder / "no model")}}},
            "no model",
        ),
        "a folder without a classifier": (
            {
                "grpo": {
                    **grpo,
                    "reward_source": "classifier",
                    "classifier": {"source": str(folder)},
                },
            },
            "config.json",
        ),
        "vLLM that is not installed": (
            {"grpo": {**grpo, "engine": {"kind": "vllm", "python": str(folder / "python")}}},
            "needs a Python that has vLLM",
        ),
        "too many held-out prompts": (
            {"grpo": {**grpo, "evaluate": {"prompts": 6}}},
            "data has 6 prompts: none would be left",
        ),
        "premises in one file alone": (
            {
                "grpo": {
                    **grpo,
                    "evaluate": {
                        **evaluate,
                        "sycophancy": {"paths": [data["prompts"]["path"], data["talks"]["path"]]},
                    },
                },
            },
            "row 1",
        ),
        "too many prompts of pairs": ({"pairs": {**pairs, "prompts": 7}}, "there are 6 to use"),
        "agreement with no comparisons": (
            {"pairs": {**pairs, "judge": {"model": "tiny"}, "agreement": data["prompts"]["path"]}},
            "Preferences need two responses",
        ),
        "a store that cannot be opened": (
            {"pairs": {**pairs, "judge": "people", "store": str(folder)}},
            "store",
        ),
        "answers of one kind": (
            {"kto": {"data": data["good"]}},
            "are desirable: KTO learns from both kinds",
        ),
        "an objective that holds out nothing": (
            {
                "reward": {
                    "objectives": {"kind": data["pairs"], "safe": data["pairs"]},
                    "heldout_fraction": 1e-9,
                },
            },
            "reward.objectives.kind: no row is held out",
        ),
        "states of layers that all learn": (
            {"reward": {"data": data["pairs"], "keep_states_gb": 1.0}},
            "lora.last_layers",
        ),
        "a test model that nobody trains": (
            {
                "reward": {"data": data["pairs"]},
                "grpo": {
                    **grpo,
                    "reward_source": "learned",
                    "evaluate": {**evaluate, "judge": "test"},
                },
            },
            "reward.test_share",
        ),
        "a test model without a reward stage": (
            {"grpo": {**grpo, "evaluate": {**evaluate, "judge": "test"}}},
            "Give the recipe a [reward] section with reward.test_share above 0",
        ),
    }


CASES = (
    "a column that a reward takes",
    "tests that are no tests",
    "tests of held-out prompts",
    "a column that a judge takes",
    "a column of the data",
    "a template",
    "a token that ends a turn",
    "a model without weights",
    "an adapter without weights",
    "a judge's folder without weights",
    "a function that cannot be imported",
    "a function that is not there",
    "a judge of held-out answers",
    "a judge's key",
    "a judge's model",
    "a folder without a classifier",
    "vLLM that is not installed",
    "too many held-out prompts",
    "premises in one file alone",
    "too many prompts of pairs",
    "agreement with no comparisons",
    "a store that cannot be opened",
    "answers of one kind",
    "an objective that holds out nothing",
    "states of layers that all learn",
    "a test model that nobody trains",
    "a test model without a reward stage",
)


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def recipe_file(folder, values):
    path = folder / "recipe.toml"
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in values.items()))
    return str(path)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_trained_before_the_refusal(case, data, tmp_path, monkeypatch):
    """Nor planned: what a run would refuse, a plan and a dry run refuse."""
    cases = later(data, tmp_path, monkeypatch)
    assert set(cases) == set(CASES)
    sections, words = cases[case]
    values = {
        "run": str(tmp_path / "run"),
        "model": {"source": "tiny"},
        "sft": {"data": data["talks"], "epochs": 1},
        **sections,
    }
    path = recipe_file(tmp_path, values)
    starts = (
        lambda: run_recipe(build(Recipe, values)),
        lambda: app(["plan", path], standalone_mode=False),
        lambda: app(["run", path, "--dry-run"], standalone_mode=False),
    )
    for start in starts:
        with pytest.raises(TetherError, match=re.escape(words)):
            start()
    assert not (tmp_path / "run" / "sft").exists()


def test_a_plan_refuses_a_folder_that_holds_another_run(data, tmp_path):
    values = {"run": str(tmp_path / "run"), "model": {"source": "tiny"}, "seed": 1}
    values["sft"] = {"data": data["talks"], "epochs": 1}
    run_recipe(build(Recipe, values))
    path = recipe_file(tmp_path, {**values, "sft": {**values["sft"], "epochs": 2}})
    with pytest.raises(TetherError, match=r"another config: sft\.epochs"):
        app(["run", path, "--dry-run"], standalone_mode=False)
    app(["run", recipe_file(tmp_path, values), "--dry-run"], standalone_mode=False)


def test_a_file_of_functions_is_executed_once_until_it_changes(tmp_path):
    path, count = tmp_path / "mine.py", tmp_path / "count"
    path.write_text(f"open({str(count)!r}, 'a').write('x')\nscore = len\n", encoding="utf-8")
    load_function(f"{path}:score")
    load_function(f"{path}:score")
    assert count.read_text() == "x"
    path.write_text(
        f"open({str(count)!r}, 'a').write('y')\nscore = sum  # another\n",
        encoding="utf-8",
    )
    load_function(f"{path}:score")
    assert count.read_text() == "xy"
