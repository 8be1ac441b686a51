"""Exported models as strangers load them: the same ids, the same log-probabilities, the same
scores; and nothing half-written.
"""

import ast
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file

from tether.cli.tools import export as exporting
from tether.cli.tools.export import export_model
from tether.cli.tools.export_source import Source
from tether.cli.tools.reward_bench import bench_rewards
from tether.cli.trained import export
from tether.core.errors import ConfigError, MissingFileError, ModelError, RunError
from tether.core.rundir import read_json, write_json
from tether.core.types import Message, Prompt, Rollout, Sampling, StopReason, assistant, user
from tether.data.batches import make_batch
from tether.data.chat import Encoded
from tether.models.saving import save_ensemble
from tether.models.tiny import TEMPLATE, tiny_model, tiny_tokenizer
from tether.rewards.classifier import ClassifierReward
from tether.runner.assembly.roles import encoder_of, load_policy, load_scorer
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.rewards import ClassifierConfig
from tether.stages.learner.checkpoint import save_checkpoint

FAST = {"optimizer": {"learning_rate": 1e-2}, "heldout_fraction": 0.0}
TALKS = [
    (user("one"), assistant("two")),
    (user("a"), assistant("b"), user("c"), assistant("a longer one,\n\nwith steps")),
    (Message("system", "short"), user("x"), assistant("y z")),
]
NEWLINE = TEMPLATE.replace("<|end|>{% endfor", "<|end|>\n{% endfor")
"""Like ChatML: something stands after the token that ends a turn."""


@pytest.fixture(autouse=True, scope="module")
def exact():
    """Differences of 1e-4 are looked for: a folder that names no type is loaded in float32,
    wherever the tests run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TETHER_CPU_DTYPE", "float32")
        yield


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of every kind of result, with a system message, a template with a tail, and padding
    that ends turns.
    """
    folder = tmp_path_factory.mktemp("exporting")
    tiny_model(3).save_pretrained(folder / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, NEWLINE
    tokenizer.save_pretrained(folder / "base")
    words = ["one", "two", "three", "four", "five", "six"]
    pairs = [{"prompt": w, "chosen": w + "!", "rejected": "no " + w} for w in words]
    steps = [
        {"prompt": w, "completions": [w, "so"], "labels": [True, n % 2 == 0]}
        for n, w in enumerate(words)
    ]
    talks = [
        {"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": w}]}
        for w in words
    ]
    values = {
        "run": str(folder / "run"),
        "model": {
            "source": str(folder / "base"),
            "dtype": "float32",
            "system_prompt": ('Be "kind" {{ and }} 人.'),
        },
        "sft": {"data": lines(folder / "sft.jsonl", talks), "epochs": 1, **FAST},
        "reward": {"data": lines(folder / "pairs.jsonl", pairs), **FAST},
        "process": {
            "data": lines(folder / "steps.jsonl", steps),
            "delimiters": ["\n\n"],
            **FAST,
            "heldout_fraction": 0.3,
        },
        "direct": {"data": lines(folder / "again.jsonl", pairs), **FAST},
        "kto": {
            "data": lines(
                folder / "kto.jsonl",
                [{"prompt": w, "completion": w, "label": w < "o"} for w in words],
            ),
            "lora": False,
            **FAST,
        },
    }
    recipe = build(Recipe, values)
    run_recipe(recipe, ["sft", "reward", "process", "direct", "kto"])
    return Path(recipe.run)


def loaded_as(kind, folder):
    return (
        getattr(transformers, f"AutoModelFor{kind}")
        .from_pretrained(folder, dtype=torch.float32)
        .eval()
    )


def foreign_ids(folder, talk):
    """What somebody makes of a conversation who has the folder and transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in talk],
        tokenize=False,
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def logprobs(role, ids):
    return role.logprobs(make_batch([Encoded(tuple(ids), (False, *[True] * (len(ids) - 1)))], 0))[0]


@torch.no_grad()
def foreign_logprobs(model, ids):
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]


@torch.no_grad()
@pytest.mark.parametrize("stage", ["sft", "sft/model", "direct", "direct/policy", "kto", ""])
def test_a_policy_gives_strangers_the_same_log_probabilities(run, tmp_path, stage):
    found = export_model(str(run / stage), tmp_path / "out")
    model = loaded_as("CausalLM", tmp_path / "out")
    role, loaded = load_policy(str(run / stage))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for talk in TALKS:
        rows = [{"role": m.role, "content": m.content} for m in talk[:-1]]
        ids = tokenizer(
            tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True),
            add_special_tokens=False,
        ).input_ids
        with_system = (
            talk
            if talk[0].role == "system"
            else (Message("system", 'Be "kind" {{ and }} 人.'), *talk)
        )
        assert tuple(ids) == encoder_of(loaded).prompt(with_system[:-1])
        torch.testing.assert_close(
            foreign_logprobs(model, ids),
            logprobs(role, ids),
            atol=1e-4,
            rtol=0,
        )
    assert found["kind"] == "policy" and found["same_ids"] and found["difference"] < 1e-4
    assert model.generation_config.eos_token_id == [1]
    again, own = load_policy(str(tmp_path / "out"))
    assert encoder_of(own).prompt((user("x"),)) == tuple(
        encoder_of(loaded).prompt((Message("system", 'Be "kind" {{ and }} 人.'), user("x"))),
    )
    torch.testing.assert_close(
        logprobs(again, range(5, 40)),
        foreign_logprobs(model, list(range(5, 40))),
        atol=1e-4,
        rtol=0,
    )


@torch.no_grad()
def test_a_reward_model_gives_strangers_its_scores_and_tether_too(run, tmp_path):
    found = export_model(str(run / "reward"), tmp_path / "out")
    (role,), loaded = load_scorer(run / "reward" / "model")
    encoded = [encoder_of(loaded).conversation(talk, "last") for talk in TALKS]
    expected = torch.cat([role.scores(make_batch([one], 0)) for one in encoded])
    tokenizer, model = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out"),
        loaded_as("SequenceClassification", tmp_path / "out"),
    )
    assert [foreign_ids(tmp_path / "out", talk) for talk in TALKS] == [
        list(one.ids) for one in encoded
    ]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in talk],
            tokenize=False,
        )
        for talk in TALKS
    ]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    assert (
        tokenizer.pad_token_id not in (None, 1)
        and (batch.input_ids == tokenizer.pad_token_id).any()
    )
    torch.testing.assert_close(
        model(**batch).logits[:, 0] + found["constant"],
        expected,
        atol=1e-4,
        rtol=0,
    )
    assert abs(found["constant"]) > 1e-3, "a reward of zero offset tests nothing"
    source = ClassifierReward.load(ClassifierConfig(source=str(tmp_path / "out")))
    assert [s.value for s in source.score_conversations(TALKS)] == pytest.approx(
        expected.tolist(),
        abs=1e-4,
    )
    pairs = lines(
        tmp_path / "p.jsonl",
        [{"prompt": w, "chosen": w + "!", "rejected": "no"} for w in "abc"],
    )["path"]
    ours, theirs = (
        bench_rewards(str(f), [pairs])["p.jsonl"] for f in (run / "reward", tmp_path / "out")
    )
    assert ours["accuracy"] == theirs["accuracy"] and ours["loss"] == pytest.approx(
        theirs["loss"],
        abs=1e-4,
    )


@torch.no_grad()
def test_a_process_model_becomes_a_classifier_of_tokens(run, tmp_path):
    found = export_model(str(run / "process"), tmp_path / "out")
    (role,), loaded = load_scorer(run / "process" / "model")
    ids = encoder_of(loaded).conversation(TALKS[1], "last").ids
    expected = role.values_at(
        role.hidden(make_batch([Encoded(ids, (False, *[True] * (len(ids) - 1)))], 0)),
        torch.arange(len(ids)),
    )
    logits = loaded_as("TokenClassification", tmp_path / "out")(
        input_ids=torch.tensor([ids]),
    ).logits[0, :, 0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert found["constant"] == 0.0 and foreign_ids(tmp_path / "out", TALKS[1]) == list(ids)


@torch.no_grad()
@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        ("direct", "CausalLM"),
        ("reward", "SequenceClassification"),
        ("process", "TokenClassification"),
    ],
)
def test_an_adapter_stands_on_the_base_as_peft_loads_it(run, tmp_path, stage, kind):
    found = export_model(str(run / stage), tmp_path / "out", adapter=True)
    export_model(str(run / stage), tmp_path / "merged")
    export_model(str(run / "sft"), tmp_path / "base")
    more = {} if kind == "CausalLM" else {"num_labels": 1}
    base = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        tmp_path / "base",
        dtype=torch.float32,
        **more,
    )
    base.config.pad_token_id = transformers.AutoTokenizer.from_pretrained(
        tmp_path / "out",
    ).pad_token_id
    model = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    ids = torch.tensor([[5, 80, 90, 100, 1]])
    torch.testing.assert_close(
        model(input_ids=ids).logits,
        loaded_as(kind, tmp_path / "merged")(input_ids=ids).logits,
        atol=1e-4,
        rtol=0,
    )
    assert found["difference"] < 1e-4 and not (tmp_path / "out" / "model.safetensors").exists()
    assert (
        read_json(tmp_path / "out" / "adapter_config.json")["base_model_name_or_path"]
        == "./sft/model"
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        f'AutoModelFor{kind}.from_pretrained("BASE"' in card
        and "`tether export RUN/sft BASE`" in card
    )


def test_bfloat16_costs_what_rounding_costs_and_says_so(run, tmp_path):
    exact = export_model(str(run / "direct"), tmp_path / "exact")["difference"]
    rounded = export_model(
        str(run / "direct"),
        tmp_path / "out",
        dtype="bfloat16",
        shard_size="50KB",
    )
    assert read_json(tmp_path / "out" / "config.json")["dtype"] == "bfloat16"
    assert 10 * exact < rounded["difference"] < 0.5
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    load_policy(str(tmp_path / "out"))


@pytest.mark.parametrize("kind", ["sft", "reward", "direct"])
@torch.no_grad()
def test_a_checkpoint_is_what_the_stage_would_have_left(run, tmp_path, kind):
    """The finished role's own weights, laid down as the learner numbers them, come out as the
    finished role.
    """
    stage = tmp_path / "run" / kind
    write_json(stage / "config.json", read_json(run / kind / "config.json"))
    if kind == "sft":
        role, _ = load_policy(str(run / "sft"))
        values = {**read_json(stage / "config.json")}
        values["sft"]["lora"] = False
        write_json(stage / "config.json", values)
    else:
        role = (
            load_policy(str(run / kind))[0]
            if kind == "direct"
            else load_scorer(run / kind / "model")[0][0]
        )
    masters = {f"master.{i}": p for i, p in enumerate(role.parameters())}
    extra = {f"master.{len(masters)}": torch.zeros(3, 3)} if kind == "direct" else {}  # a critic's
    path = save_checkpoint(
        stage / "checkpoints",
        10,
        {**masters, **extra, "exp_avg.0": torch.zeros(2)},
        {"updates": 10},
    )
    shifted = {name.replace("master", "ema"): p + 1 for name, p in masters.items()}
    export_model(str(path), tmp_path / "out")
    whole = "SequenceClassification" if kind == "reward" else "CausalLM"
    export_model(str(run / kind), tmp_path / "whole")
    ids = torch.tensor([[5, 80, 90, 100, 1]])
    got, expected = (
        loaded_as(whole, tmp_path / name)(input_ids=ids).logits for name in ("out", "whole")
    )
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "at the checkpoint `step-000010`" in card and "not of these weights" in card
    averaged = save_checkpoint(stage / "checkpoints", 11, {**masters, **shifted}, {"updates": 11})
    export_model(str(averaged), tmp_path / "averaged")
    assert not torch.allclose(
        loaded_as(whole, tmp_path / "averaged")(input_ids=ids).logits,
        expected,
        atol=1e-2,
    )
    with pytest.raises(RunError, match="does not fit the model"):
        export_model(
            str(
                save_checkpoint(
                    stage / "checkpoints",
                    12,
                    {"master.0": torch.zeros(1)},
                    {"updates": 1},
                ),
            ),
            tmp_path / "no",
        )


def test_a_failed_export_is_one_message_and_leaves_nothing(run, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "empty").mkdir()
    save_ensemble(tmp_path / "several", [run / "reward" / "model"])
    half = tmp_path / "sft" / "checkpoints" / "step-000003"
    half.mkdir(parents=True)
    cases = [
        (run / "sft", "there", {}, ConfigError, "exists"),
        (run / "sft", "out", {"dtype": "int8"}, ConfigError, "not one of auto, float32"),
        (run / "sft", "out", {"adapter": True}, ConfigError, "no adapter to keep"),
        (run / "kto", "out", {"adapter": True}, ConfigError, "trained whole"),
        (tmp_path / "empty", "out", {}, MissingFileError, "neither a trained role nor a model"),
        (
            tmp_path / "several",
            "out",
            {},
            ModelError,
            "several reward models. Export them one by one: .*reward/model",
        ),
        (
            tmp_path / "sft",
            "out",
            {},
            RunError,
            "not finished. Let it go on, or export a checkpoint",
        ),
        (half, "out", {}, RunError, "not a whole checkpoint. There is no other"),
        (tmp_path / "nowhere", "out", {}, MissingFileError, r"no config\.json"),
    ]
    for source, name, more, kind, message in cases:
        with pytest.raises(kind, match=message):
            export_model(str(source), tmp_path / name, **more)
    with monkeypatch.context() as patch:
        patch.setattr(exporting.Writer, "_computed", lambda self, model, ids: torch.tensor(3.0))
        with pytest.raises(ModelError, match=r"differs by .* Nothing was kept"):
            export_model(str(run / "direct"), tmp_path / "out")
    monkeypatch.setattr(exporting, "model_card", lambda *about, **more: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_model(str(run / "sft"), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "several", "sft", "there"]


def test_the_card_tells_what_was_measured_and_nothing_of_the_machine(run, tmp_path):
    alarm = {
        "step": 7,
        "detector": "length_growth",
        "message": f"see {run}/ppo/x.json | then",
        "advice": "",
        "evidence": [],
    }
    (run / "direct" / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    export_model(str(run / "direct"), tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    card = ModelCard(text)
    assert (
        card.data.pipeline_tag == "text-generation"
        and card.data.base_model is None
        and "direct" in card.data.tags
    )
    assert "from `./" in text and "/base`" in text
    assert "## Stage `direct`" in text and "## Stage `sft`" in text  # what it stands on, too
    assert "again.jsonl | `" in text and "see x.json &#124; then" in text
    summary = read_json(run / "direct" / "summary.json")
    assert any(
        f"| {key.replace('_', ' ')} |" in text
        for key in summary
        if "loss" in key or "accuracy" in key
    )
    assert "was not trained on" in text and "What people think" in text
    assert str(run.parent) not in text and str(Path.home()) + "/" not in text
    for stage in ("reward", "process"):
        export_model(str(run / stage), tmp_path / stage)
        told = (tmp_path / stage / "README.md").read_text()
        assert f"stage `{stage}`" in told and ("Pairs or solutions" in told) == (stage == "reward")
    export_model("tiny", tmp_path / "tiny")
    assert "not made by a" in (tmp_path / "tiny" / "README.md").read_text()


def test_a_card_loads_the_base_with_as_many_outputs_as_the_head_has():
    check = {"difference": 0.0, "same_ids": True, "constant": 0.0}
    text = exporting.model_card(
        Source(kind="process", source=""),
        "./sft/model",
        "float32",
        check,
        adapter=True,
        outputs=3,
        auto="AutoModelForTokenClassification",
    )
    assert 'AutoModelForTokenClassification.from_pretrained("BASE", num_labels=3)' in text


HOSTILE = "x`\n\n# Owned | <img src=http://evil.example/a> ![a](http://evil.example/b) \x1b[31m"


def test_no_name_in_a_card_acts(tmp_path):
    """Names of a stranger's run folder: of the model, of files and figures, of versions, of alarms."""
    stage = tmp_path / "ppo"
    for name, content in {
        "config.json": {"ppo": {}, "model": {"source": HOSTILE}, "seed": 0},
        "manifest.json": {
            "model": {"source": HOSTILE},
            "data": {HOSTILE: HOSTILE},
            "tether": HOSTILE,
            "code_digest": HOSTILE,
            "packages": {HOSTILE: HOSTILE},
        },
        "summary.json": {HOSTILE: 0.5, "reward": {"value": 1.0, "reason": HOSTILE}},
    }.items():
        write_json(stage / name, content)
    alarm = {"step": 1, "detector": HOSTILE, "message": HOSTILE}
    (stage / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    (stage / "metrics.jsonl").write_text(json.dumps({"step": 1, "alarms": 1}) + "\n")
    source = Source(kind="policy", source="", folder=stage / "policy", stage=stage)
    check = {"difference": 0.0, "same_ids": True, "constant": 0.0}
    base = 'a"); import os; os.abort("'
    how = {"adapter": True, "outputs": 0, "auto": "AutoModelForCausalLM"}
    text = exporting.model_card(source, base, "float32", check, **how)
    _, _, prose = text.split("---\n", 2)
    (code,) = re.findall(r"```python\n(.*?)```", prose, re.DOTALL)
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    texts = {arg.value for node in calls for arg in node.args if isinstance(arg, ast.Constant)}
    assert base in texts and "abort" not in {ast.unparse(node.func)[-5:] for node in calls}
    shown = re.sub(r"```.*?```", "", prose, flags=re.DOTALL)
    assert not re.search(r"^# Owned", shown, re.MULTILINE) and "\x1b" not in shown
    outside = re.sub(r"`[^`\n]*`", "", shown)
    assert "Owned" in outside and "`" not in outside
    assert "<img" not in outside and "](" not in outside
    for line in filter(lambda line: line.startswith("|"), outside.splitlines()):
        assert line.count("|") in (3, 4), line


def test_a_cards_recipe_has_no_secrets():
    from tether.cli.tools.model_card import _public

    given = {
        "api_key": "sk-1",
        "judge": {"url": "http://me:pw@h/v1", "hub_token": "t"},
        "path": "/a/b/c.jsonl",
        "x": ["~/d/e", "/f/"],
    }
    told = {
        "api_key": "***",
        "judge": {"url": "http://h/v1", "hub_token": "***"},
        "path": "c.jsonl",
        "x": ["e", "/f/"],
    }
    assert _public(given) == told
    assert (
        _public("see /home/me/run/a.json and C:\\Users\\me\\b.txt, https://x.org/a/b")
        == "see a.json and b.txt, https://x.org/a/b"
    )


def test_scored_rollouts_are_the_policys_own(run, tmp_path):
    """The exported reward model as reward_source = "classifier": what the learned one scores by
    ids, it scores by text.
    """
    from tether.rewards.learned import LearnedReward

    export_model(str(run / "reward"), tmp_path / "out")
    (role,), loaded = load_scorer(run / "reward" / "model")
    encoder = encoder_of(loaded)
    rollouts = []
    for word in ("abc", "de", "longer one"):
        prompt = Prompt((user("hello"),))
        ids = (*tiny_tokenizer()(word)["input_ids"], 1)
        rollouts.append(
            Rollout(
                encoder.prompt(prompt.messages),
                ids,
                (),
                StopReason.STOP_TOKEN,
                word,
                0,
                0,
                Sampling(),
                prompt,
            ),
        )
    ours = [s.value for s in LearnedReward(role, encoder).score(rollouts)]
    theirs = [
        s.value
        for s in ClassifierReward.load(ClassifierConfig(source=str(tmp_path / "out"))).score(
            rollouts,
        )
    ]
    assert theirs == pytest.approx(ours, abs=1e-4) and len(set(ours)) == 3


def test_the_command_says_what_it_wrote_and_how_far_off_it_is(run, tmp_path, capsys):
    export(str(run / "reward"), tmp_path / "out")
    told = " ".join(capsys.readouterr().out.split())
    assert (
        told.startswith(
            f"reward of {run / 'reward'}: {tmp_path / 'out'} Loaded again, the exported model differs ",
        )
        and "lack a constant of" in told
    )


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_model_no_run_made_is_not_rounded_on_the_way(tmp_path, monkeypatch, dtype):
    """Also on a processor that multiplies bfloat16 faster."""
    monkeypatch.setenv("TETHER_CPU_DTYPE", "bfloat16")
    tiny_model(3).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    export_model(str(tmp_path / "model"), tmp_path / "out", dtype=dtype)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
