"""What a later stage would be refused for is found before an earlier one is trained."""

import json
import re

import pytest
from transformers import LlamaForSequenceClassification

from tether.cli import app
from tether.core.errors import TetherError
from tether.models.saving import save_role
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards.loading import load_function
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, new_head
from tether.runner.run import run_recipe
from tether.settings.model import ModelConfig
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
        "printing": [
            {"id": f"p{n}", "prompt": "Square", "answer": "print(f(2))"} for n in range(4)
        ],
        "times": [{"id": f"t{n}", "prompt": "When?", "answer": f"10:3{n}"} for n in range(4)],
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


def role_of(kind, folder):
    """A folder that describes a trained role, as far as it is read before a run."""
    loaded = open_model(ModelConfig(source="tiny", dtype="float32"))
    head = None if kind == "policy" else new_head(loaded)
    role = Role(loaded.model, head=head)
    save_role(role, loaded, folder / kind, kind=kind, encoding=encoder_of(loaded).describe())
    return folder / kind


def classifier(folder):
    config = tiny_model(0).config
    config.num_labels = 3
    model = LlamaForSequenceClassification(config)
    model.save_pretrained(folder / "classifier")
    tiny_tokenizer().save_pretrained(folder / "classifier")
    return folder / "classifier"


def later(data, folder, monkeypatch):
    """Sections that are refused, by name, with what the refusal says."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    grpo = {"data": data["prompts"], "reward_source": "random", **SMALL}
    pairs = {"data": data["prompts"], "max_new_tokens": 2, "judge": LETTERS}
    evaluate = {"prompts": 2}
    served = {"server": {"url": "https://api.openai.com/v1", "model": "m"}}
    broken = f"{folder / 'broken.py'}:score"
    (folder / "trl.py").write_text("def score(completions, answer): return answer\n")
    (folder / "text.gguf").write_text("no weights")
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
        "tests that assert nothing": (
            {"grpo": {**grpo, **programs, "data": data["printing"]}},
            "prompt 'p0': the tests of a problem assert nothing",
        ),
        "a known answer that is no number": (
            {
                "grpo": {
                    **grpo,
                    "reward_source": "verifiable",
                    "verifiable": {"kind": "numeric"},
                    "data": data["times"],
                },
            },
            "prompt 't0': the known answer '10:30' is no number",
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
        "a package of weights": ({"model": {"source": "package:nothing==1"}}, "of the packages"),
        "a file of weights": (
            {"model": {"source": "models/none.gguf"}},
            "'models/none.gguf' has no",
        ),
        "a file of something else": (
            {"model": {"source": str(folder / "text.gguf")}},
            "text.gguf cannot be read",
        ),
        "a figure that is not measured": (
            {"grpo": {**grpo, "evaluate": {**evaluate, "keep": "best", "keep_by": "kl.size"}}},
            "kl has no figure 'size'. Figures: kl",
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
        "states of a model with too few layers": (
            {
                "reward": {
                    "data": data["pairs"],
                    "keep_states_gb": 1.0,
                    "lora": {"last_layers": 2},
                },
            },
            "in this model of 2 layers",
        ),
        "an adapter on layers that are not there": (
            {"reward": {"data": data["pairs"], "lora": {"targets": ["c_attn"]}}},
            "reward: lora.targets: no layer of LlamaForCausalLM is called 'c_attn'",
        ),
        "an adapter on the output layer": (
            {"grpo": {**grpo, "lora": {"targets": ["lm_head"]}}},
            "grpo: lora.targets: 'lm_head' is the output layer",
        ),
        "an adapter on a tied embedding": (
            {"direct": {"data": data["pairs"], "lora": {"targets": ["embed_tokens"]}}},
            "direct: lora.targets: 'embed_tokens' is also the output layer",
        ),
        "an embedding that is in no last layer": (
            {
                "reward": {
                    "data": data["pairs"],
                    "lora": {"targets": ["embed_tokens"], "last_layers": 1},
                },
            },
            "stands in no numbered layer",
        ),
        "answers longer than the context": (
            {"grpo": {**grpo, "max_new_tokens": 4096}},
            "grpo.max_new_tokens = 4096 leaves no room",
        ),
        "answers of pairs longer than the context": (
            {"pairs": {**pairs, "max_new_tokens": 4096}},
            "pairs.max_new_tokens = 4096 leaves no room",
        ),
        "a policy as a reward model": (
            {
                "grpo": {
                    **grpo,
                    "reward_source": "learned",
                    "reward_model": str(role_of("policy", folder)),
                },
            },
            "is a policy model",
        ),
        "a judge of steps as a reward model": (
            {
                "grpo": {
                    **grpo,
                    "reward_source": "learned",
                    "reward_model": str(role_of("process", folder)),
                },
            },
            "is a process model",
        ),
        "a whole reward model on the policy's base": (
            {
                "grpo": {
                    **grpo,
                    "reward_source": "learned",
                    "roles": "shared",
                    "reward_model": str(role_of("reward", folder)),
                },
            },
            "Use grpo.roles = 'separate'",
        ),
        "a classifier of several outputs": (
            {
                "grpo": {
                    **grpo,
                    "reward_source": "classifier",
                    "classifier": {"source": str(classifier(folder))},
                },
            },
            "has 3 outputs",
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
    "tests that assert nothing",
    "a known answer that is no number",
    "tests of held-out prompts",
    "a column that a judge takes",
    "a column of the data",
    "a template",
    "a package of weights",
    "a file of weights",
    "a file of something else",
    "a figure that is not measured",
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
    "states of a model with too few layers",
    "an adapter on layers that are not there",
    "an adapter on the output layer",
    "an adapter on a tied embedding",
    "an embedding that is in no last layer",
    "answers longer than the context",
    "answers of pairs longer than the context",
    "a policy as a reward model",
    "a judge of steps as a reward model",
    "a whole reward model on the policy's base",
    "a classifier of several outputs",
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
