"""Prompts that no model can answer are left out and counted before the first step, in every stage
that samples.
"""

import json
import logging

import pytest
from tests.every_stage import differences, results
from tests.runner.journeys import FEW, LETTERS, VALUES, Killed, dying_after, journey, lines

import tether
from tether.cli.tools.doctor import examine_recipe
from tether.core.errors import DataError
from tether.models.tiny import tiny_tokenizer
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe

CONTEXT, NEW = 1024, 3
TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn, please') }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
SMALL = {
    "steps": 2,
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "max_new_tokens": NEW,
    "progress": False,
}


def turn(text):
    return [{"role": "user", "content": text}]


def tokens(text):
    """The length of a prompt by transformers alone."""
    return len(
        tiny_tokenizer().apply_chat_template(
            turn(text),
            chat_template=TEMPLATE,
            add_generation_prompt=True,
        )["input_ids"],
    )


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return {"source": "tiny", "chat_template": str(path)}


def longest():
    """The longest prompt that fits with its answer: one character more, which is one token more,
    does not.
    """
    text = "x"
    text *= CONTEXT - NEW - tokens(text) + 1
    assert tokens(text) + NEW == CONTEXT and tokens(text + "x") + NEW == CONTEXT + 1
    return text


@pytest.mark.parametrize("stage", ["ppo", "grpo", "reinforce", "best_of_n", "online_direct"])
def test_the_others_are_sampled_and_these_are_named(stage, model, tmp_path, caplog):
    fits = longest()
    prompts = [turn("a"), turn(fits + "x"), turn("b"), turn(fits), SYSTEM]
    seen = []

    def reward(prompts, responses):
        seen.extend(str(prompt) for prompt in prompts)
        return [float(len(r)) for r in responses]

    method = getattr(tether, stage)
    with caplog.at_level(logging.WARNING):
        run = method(
            model,
            prompts=prompts,
            reward=reward,
            run=tmp_path / "run",
            **{**SMALL, "prompts_per_step": 3},
        )
    left_out = run.summary["quarantine"]
    assert left_out["count"] == 2
    assert left_out["reasons"] == {
        f"does not fit the model's context of {CONTEXT}": 1,
        "the chat template refuses this conversation": 1,
    }
    (file,) = (tmp_path / "run").glob("*/quarantine-*.jsonl")
    rows = lines(file)
    assert [row["id"].rpartition(":")[2] for row in rows] == ["2", "5"]
    assert (
        "no system turn, please" in rows[1]["reason"]
        and (f"{CONTEXT - NEW + 1} tokens") in rows[0]["reason"]
    )
    assert "2 of 5 prompts" in caplog.text
    words = " ".join(seen)
    assert fits in words and fits + "x" not in words


def test_a_run_that_goes_on_finds_the_same_prompts(model, tmp_path):
    prompts = [*(turn(f"question {n}") for n in range(5)), turn("x" * 2000), SYSTEM]
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"messages": prompt}) + "\n" for prompt in prompts),
        encoding="utf-8",
    )
    section = {"data": {"path": str(path)}, "reward_source": "random", "checkpoint_every": 1}
    section |= {"steps": 4, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": NEW}
    recipe = {
        name: build(Recipe, {"run": str(tmp_path / name), "model": model, "grpo": section})
        for name in ("whole", "cut")
    }
    run_recipe(recipe["whole"])
    with pytest.raises(Killed):
        run_recipe(recipe["cut"], progress=dying_after(2))
    run_recipe(recipe["cut"])
    whole, cut = (results(tmp_path / name / "grpo") for name in ("whole", "cut"))
    assert differences(whole, cut) == []
    assert len(lines(tmp_path / "cut" / "grpo" / "quarantine-grpo.jsonl")) == 2


@pytest.mark.parametrize("own", [True, False])
def test_held_out_prompts_are_looked_at_too(own, model, tmp_path):
    good, bad = [turn(f"question {n}") for n in range(6)], [turn("x" * 2000), SYSTEM]
    evaluate = {"prompts": 2, "every": 1, "temperatures": (), "best_of": ()}
    more = {"data": [*(turn(f"other {n}") for n in range(2)), *bad]} if own else {}
    run = tether.grpo(
        model,
        prompts=good if own else [*good, *bad],
        reward="random",
        run=tmp_path / "run",
        evaluate=evaluate | more,
        **SMALL,
    )
    assert run.summary["quarantine"]["count"] == 2 and run.summary["heldout"]["num_prompts"] == 2


def test_without_a_usable_prompt_nothing_begins(model, tmp_path):
    with pytest.raises(
        DataError,
        match=r"\[grpo\]: none of 2.*template",
    ) as error:
        tether.grpo(model, prompts=[SYSTEM, SYSTEM], reward="random", run=tmp_path / "run", **SMALL)
    assert "no system turn, please" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run" / "grpo" / "metrics.jsonl").is_file()


def long_prompts(folder, name, count):
    path = folder / f"{name}.jsonl"
    texts = [*(f"{name} {n}?" for n in range(count)), "x" * 2000]
    path.write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in texts),
        encoding="utf-8",
    )
    return {"path": str(path)}


def test_pairs_and_the_last_comparison_leave_them_out(tmp_path):
    pairs = {"data": long_prompts(tmp_path, "asked", 8), "prompts": None}
    recipe = journey(
        tmp_path / "run",
        sft=None,
        pairs=pairs,
        evaluate={"data": long_prompts(tmp_path, "held", 5), "judge": LETTERS},
    )
    run_recipe(recipe)
    summaries = {
        name: json.loads((tmp_path / "run" / name / "summary.json").read_text())
        for name in ("pairs", "ppo", "evaluate")
    }
    assert [summary["quarantine"]["count"] for summary in summaries.values()] == [1, 1, 1]
    assert summaries["pairs"]["num_prompts"] == 8 and summaries["evaluate"]["num_prompts"] == 5
    assert len(lines(tmp_path / "run" / "evaluate" / "answers.jsonl")) == 5


@pytest.mark.parametrize("stage", ["pairs", "rounds", "evaluate"])
def test_data_that_were_mended_are_looked_at_anew(stage, tmp_path):
    """A first start notes which prompts are left out; it ended since that was all of them."""
    data = tmp_path / "prompts.jsonl"
    data.write_text(json.dumps({"prompt": "x" * 2000}) + "\n", encoding="utf-8")
    own = {"data": {"path": str(data)}, "max_new_tokens": 8}
    sections = {
        "pairs": {"judge": LETTERS, **own},
        "rounds": {"reward_source": "random", "rounds": 1, **own},
        "evaluate": {"judge": LETTERS, "temperature": 1.0, **own},
    }
    policy = {**VALUES["ppo"], "data": FEW["prompts"], "reward_source": "random"}
    values = {"run": str(tmp_path / "run"), "model": VALUES["model"], stage: sections[stage]}
    recipe = build(Recipe, values | ({"ppo": policy} if stage == "evaluate" else {}))
    with pytest.raises(DataError, match="none of 1 prompts"):
        run_recipe(recipe)
    data.write_text(
        "".join(json.dumps({"prompt": f"a {n}"}) + "\n" for n in range(4)),
        encoding="utf-8",
    )
    summary = run_recipe(recipe)[stage]
    assert summary["quarantine"]["count"] == 0


def test_pairs_that_wait_need_no_model_to_know_them(tmp_path, monkeypatch):
    """People judge: the second start finds answers and what was left out in files."""
    from tether.runner.methods import pairs as module

    asked = {
        "data": long_prompts(tmp_path, "asked", 4),
        "prompts": None,
        "labels": 6,
        "judge": "people",
    }
    recipe = journey(
        tmp_path / "run",
        sft=None, reward=None, ppo=None, evaluate=None, pairs={**asked, "store": str(tmp_path / "store.db")},
    )  # fmt: skip
    with pytest.raises(module.WaitingError):
        run_recipe(recipe)
    monkeypatch.setattr(module, "load_policy", None)
    with pytest.raises(module.WaitingError):
        run_recipe(recipe)
    assert [row["id"] for row in lines(tmp_path / "run" / "pairs" / "quarantine-pairs.jsonl")] == [
        "asked:5",
    ]


def test_rounds_leave_them_out(tmp_path):
    direct = {"epochs": 1, "heldout_fraction": 0.0, "optimizer": {"learning_rate": 1e-2}}
    rounds = {"rounds": 2, "samples_per_prompt": 2, "max_new_tokens": 4, "direct": direct}
    recipe = journey(
        tmp_path / "run",
        "reward.epochs=1",
        "seed=0",
        **{"sft": None, "ppo": None, "evaluate": None, "pairs": {"prompts": 4, "labels": 6}},
        rounds={"data": long_prompts(tmp_path, "asked", 4), **rounds},
    )
    run_recipe(recipe)
    summary = json.loads((tmp_path / "run" / "rounds" / "summary.json").read_text())
    assert summary["quarantine"]["count"] == 1 and len(summary["rounds"]) == 2


def test_spin_counts_a_demonstration_whose_prompt_is_too_long(tmp_path):
    path = tmp_path / "shown.jsonl"
    # fits with its reply, and not with a sample
    rows = [*((f"q {n}", "an answer") for n in range(4)), ("x" * 990, "y")]
    path.write_text(
        "".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in rows),
        encoding="utf-8",
    )
    direct = {"epochs": 1, "heldout_fraction": 0.0, "max_length": 2048}
    rounds = {
        "method": "spin",
        "rounds": 1,
        "max_new_tokens": 64,
        "direct": direct,
        "data": {"path": str(path)},
    }
    results = run_recipe(
        build(
            Recipe,
            {"run": str(tmp_path / "run"), "model": {"source": "tiny"}, "rounds": rounds},
        ),
    )
    sampling = results["rounds"]["rounds"][0]["sampling"]
    assert (sampling["pairs"], sampling["unusable"], sampling["too_long"]) == (4, 1, 0)


def test_pairs_of_premises_that_do_not_fit_are_left_out(tmp_path):
    files = []
    for kind in ("cats", "dogs"):
        texts = [f"I like {kind}. Is it {n}?\n (A) yes\n (B) no" for n in (1, 1, 1, 2, 2, 2)]
        texts[1] = f"I like {kind}. {'z' * 2000}. Is it 1?\n (A) yes\n (B) no"
        path = tmp_path / f"{kind}.jsonl"
        path.write_text(
            "".join(json.dumps({"prompt": text}) + "\n" for text in texts),
            encoding="utf-8",
        )
        files.append(str(path))
    evaluate = {
        "prompts": 2,
        "every": 1,
        "temperatures": (),
        "best_of": (),
        "sycophancy": {"paths": files, "pairs": 5},
    }
    prompts = [f"question {n}" for n in range(6)]
    run = tether.grpo(
        "tiny",
        prompts=prompts,
        reward="random",
        run=tmp_path / "run",
        evaluate=evaluate,
        **SMALL,
    )
    assert run.summary["quarantine"]["reasons"] == {
        (f"does not fit the model's context of {CONTEXT}"): 1,
    }
    assert run.summary["heldout"]["sycophancy"]["after"]["shift"]["count"] == 5


def test_the_doctor_examines_the_others(model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"messages": p}) + "\n" for p in (SYSTEM, turn("a"), turn("b"))),
        encoding="utf-8",
    )
    section = {
        "data": {"path": str(path)},
        "reward_source": "random",
        "max_new_tokens": 4,
        "prompts_per_step": 2,
    }
    results = examine_recipe(
        build(Recipe, {"run": str(tmp_path / "run"), "model": model, "grpo": section}),
    )
    assert results["grpo"]
