"""The front door: the same runs as a recipe's, from rows and functions in memory."""

import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tools.dev import stub

import tether
from tether.core.errors import ConfigError, DataError, RunError
from tether.core.rundir import read_json, read_jsonl
from tether.core.types import Comparison, Demonstration, Prompt, assistant, user
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import recipe_type
from tether.settings.stages import STAGES

QUESTIONS = [f"What is {i}?" for i in range(6)]
SHORT = {
    "prompts_per_step": 2,
    "samples_per_prompt": 2,
    "max_new_tokens": 6,
    "optimizer": {"learning_rate": 1e-2},
}
PAIRS = [{"prompt": f"What is {i}?", "chosen": "aaa eee", "rejected": "xxx zzz"} for i in range(12)]


def vowels(prompts, responses):
    return [sum(c in "aeiou" for c in r) / max(1, len(r)) for r in responses]


def records(folder):
    """Its metrics without times and memory."""
    rows = read_jsonl(Path(folder) / "metrics.jsonl")
    return [
        {
            k: v
            for k, v in row.items()
            if "time" not in k and "second" not in k and "memory" not in k
        }
        for row in rows
    ]


def weights(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).rglob("*.safetensors"))}


def test_a_call_and_a_recipe_have_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tether.grpo("tiny", QUESTIONS, vowels, steps=3, **SHORT, run="called", progress=False)
    (tmp_path / "mine.py").write_text(inspect.getsource(vowels))
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS),
    )
    section = {
        **SHORT,
        "steps": 3,
        "data": {"path": "questions.jsonl"},
        "reward_source": "function",
    }
    values = {
        "run": "written",
        "model": {"source": "tiny"},
        "grpo": {**section, "function": {"call": "mine.py:vowels"}},
    }
    run_recipe(build(recipe_type(), values))
    assert records("called/grpo") == records("written/grpo") != []
    assert weights("called/grpo/policy") == weights("written/grpo/policy") != {}
    assert run.path == Path("called") and run.stages == ["grpo"] and run.summary["steps"] == 3
    assert (
        [row["step"] for row in run.metrics()] == [1, 2, 3]
        and run.samples()
        and (run.path / "report.html").is_file()
    )


SCRIPT = """
import sys, tether
def vowels(prompts, responses):
    return [sum(c in "aeiou" for c in r) / max(1, len(r)) for r in responses]
tether.grpo("tiny", [f"What is {i}?" for i in range(6)], vowels, steps=40, checkpoint_every=2, prompts_per_step=2,
            samples_per_prompt=2, max_new_tokens=6, optimizer={"learning_rate": 1e-2}, run=sys.argv[1], progress=False)
"""


@pytest.mark.slow
def test_killed_and_called_again_it_goes_on_to_the_same_bits(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    process = subprocess.Popen([*command, str(tmp_path / "killed")])
    metrics = tmp_path / "killed/grpo/metrics.jsonl"
    while (
        not (metrics.is_file() and len(metrics.read_text().splitlines()) >= 5)
        and process.poll() is None
    ):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert (
        process.wait() == -signal.SIGKILL and not (tmp_path / "killed/grpo/summary.json").exists()
    )
    for name in ("killed", "whole"):
        subprocess.run([*command, str(tmp_path / name)], check=True)
    assert (
        records(tmp_path / "killed/grpo") == records(tmp_path / "whole/grpo")
        and len(records(tmp_path / "whole/grpo")) == 40
    )
    assert weights(tmp_path / "killed/grpo/policy") == weights(tmp_path / "whole/grpo/policy")


def test_a_run_does_not_go_on_with_other_rows_or_another_function(tmp_path):
    def start(rows, reward):
        return tether.grpo(
            "tiny",
            rows,
            reward,
            steps=1,
            **SHORT,
            run=tmp_path / "run",
            progress=False,
        )

    start(QUESTIONS, vowels)
    start(QUESTIONS, vowels)
    with pytest.raises(RunError, match=r"another config: grpo\.data\.path was"):
        start(QUESTIONS[:-1], vowels)
    with pytest.raises(RunError, match=r"grpo\.function\.call was 'python:vowels@"):
        start(QUESTIONS, lambda prompts, responses: [0.0] * len(responses))
    config = read_json(tmp_path / "run/command.json")["config"]
    config["grpo"]["function"]["call"] = "python:gone@0123"
    config = build(recipe_type(), {**config, "run": str(tmp_path / "other")})
    with pytest.raises(
        ConfigError,
        match="run that program again",
    ):
        run_recipe(config)


def test_a_function_goes_by_what_it_does(tmp_path):
    from tether.rewards.loading import register

    def made(weight):
        def scored(prompts, responses):
            # a comment
            return [weight * len(r) for r in responses]

        return scored

    assert register(made(1.0)) == register(made(1.0)) != register(made(2.0))
    assert register(vowels).startswith("python:vowels@")


@pytest.mark.parametrize(
    "rows",
    [
        QUESTIONS,
        [[{"role": "user", "content": q}] for q in QUESTIONS],
        [{"question": q, "level": 3} for q in QUESTIONS],
        [Prompt((user(q),), q) for q in QUESTIONS],
        (q for q in QUESTIONS),
    ],
    ids=["texts", "conversations", "columns", "records", "generator"],
)
def test_prompts_may_come_in_any_shape(tmp_path, rows):
    seen = []

    def reward(prompts, responses):
        seen.extend(prompt.text for prompt in prompts)
        return [0.0] * len(responses)

    tether.grpo("tiny", rows, reward, steps=3, **SHORT, run=tmp_path / "run", progress=False)
    assert {*seen} == {*QUESTIONS}


def test_rows_of_a_data_set_and_of_a_frame(tmp_path):
    import datasets
    import pandas

    for name, rows in (
        ("set", datasets.Dataset.from_list(PAIRS)),
        ("frame", pandas.DataFrame(PAIRS)),
    ):
        run = tether.dpo("tiny", rows, run=tmp_path / name, progress=False)
        assert (
            run.summary["updates"] > 0
            and read_json(run.path / "direct/config.json")["direct"]["loss"] == "dpo"
        )
    records_of = [
        Comparison((user(row["prompt"]),), (assistant("aaa eee"),), (assistant("xxx zzz"),))
        for row in PAIRS
    ]
    own = tether.dpo("tiny", records_of, run=tmp_path / "records", progress=False)
    assert records(own.path / "direct") == records(run.path / "direct") != []


def test_a_reward_in_trl_s_form_sees_what_trl_would_give(tmp_path):
    calls = []

    def reward(completions, answer, **columns):
        calls.append((completions, answer, columns))
        return [float(a in c) for c, a in zip(completions, answer, strict=True)]

    rows = [{"prompt": q, "answer": str(i), "source": "own"} for i, q in enumerate(QUESTIONS)]
    tether.grpo("tiny", rows, reward, steps=1, **SHORT, run=tmp_path / "run", progress=False)
    completions, answer, columns = calls[0]
    assert all(isinstance(c, str) for c in completions) and len(completions) == len(answer) == 4
    assert (
        columns["prompts"] == [f"What is {a}?" for a in answer] and columns["source"] == ["own"] * 4
    )

    def talk(prompts, completions):
        calls.append((prompts, completions))
        return [0.0] * len(completions)

    turns = [[{"role": "user", "content": q}] for q in QUESTIONS]
    tether.grpo("tiny", turns, talk, steps=1, **SHORT, run=tmp_path / "talk", progress=False)
    prompts, completions = calls[-1]
    assert prompts[0][0]["role"] == "user" and [c[0].keys() for c in completions] == [
        {"role", "content"},
    ] * len(completions)


def test_coroutines_and_several_functions_with_weights(tmp_path):
    async def slow(prompts, responses):
        await asyncio.sleep(0.01)
        return [len(r) for r in responses]

    def some(completions, **_):
        return [None if i % 2 else 1.0 for i in range(len(completions))]

    each = {**SHORT, "sample_rows": 4}
    run = tether.grpo(
        "tiny",
        QUESTIONS,
        [slow, some],
        reward_weights=[0.5, 2.0],
        steps=1,
        **each,
        run=tmp_path / "run",
        progress=False,
    )
    values = [row["proxy"] for row in run.samples()]
    lengths = [0.5 * len(row["response"]) for row in run.samples()]
    assert values == [
        pytest.approx(length + (0.0 if i % 2 else 2.0)) for i, length in enumerate(lengths)
    ]
    with pytest.raises(ConfigError, match="1 numbers for 2"):
        tether.grpo(
            "tiny",
            QUESTIONS,
            [slow, some],
            reward_weights=[1.0],
            steps=1,
            run=tmp_path / "x",
            progress=False,
        )
    with pytest.raises(ConfigError, match="reward_weights belong to several"):
        tether.grpo(
            "tiny",
            QUESTIONS,
            "random",
            reward_weights=[1.0],
            steps=1,
            run=tmp_path / "x",
            progress=False,
        )


def test_a_run_and_a_function_together_are_two_rewards(tmp_path):
    """The sum that is trained on is that of the function and of what the run's reward model says by
    itself.
    """
    rows = [{"prompt": q, "chosen": "aaa", "rejected": f"zzz {n}"} for n, q in enumerate(QUESTIONS)]
    judge = tether.reward("tiny", rows, epochs=1, run=tmp_path / "judge", progress=False)
    seen = []

    def length(prompts, responses):
        seen.extend(zip((p.text for p in prompts), responses, strict=True))
        return [float(len(text)) for text in responses]

    run = tether.grpo(
        "tiny",
        QUESTIONS,
        [judge, length],
        reward_weights=[1.0, 0.5],
        steps=1,
        **SHORT,
        run=tmp_path / "run",
        progress=False,
    )
    scores = judge.reward_model.score([prompt for prompt, _ in seen], [text for _, text in seen])
    pairs = zip(scores, seen, strict=True)
    right = [0.5 * len(text) + (0.0 if score is None else score) for score, (_, text) in pairs]
    assert run.metrics()[0]["reward/proxy"] == pytest.approx(sum(right) / len(right), abs=1e-4)
    with pytest.raises(ConfigError, match=r"rewards is 3: .*function"):
        tether.grpo("tiny", QUESTIONS, [length, 3], steps=1, run=tmp_path / "x", progress=False)
    with pytest.raises(ConfigError, match="reward is an empty list"):
        tether.grpo("tiny", QUESTIONS, [], steps=1, run=tmp_path / "x", progress=False)


def test_a_reward_model_gives_none_for_what_cannot_be_read(tmp_path):
    rows = [{"prompt": q, "chosen": "aaa", "rejected": f"zzz {n}"} for n, q in enumerate(QUESTIONS)]
    judge = tether.reward(
        "tiny",
        rows,
        epochs=1,
        run=tmp_path / "judge",
        progress=False,
    ).reward_model
    first, empty, last = judge.score(QUESTIONS[:3], ["a", "", "b"])
    assert empty is None and [first, last] == judge.score([QUESTIONS[0], QUESTIONS[2]], ["a", "b"])


def test_a_run_handed_on_grows_stage_by_stage(tmp_path):
    """SFT, pairs judged by a function, a reward model on them, PPO, and the comparison with the
    start: one recipe's run.
    """
    talks = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": "aaa eee ooo"}]
        for q in QUESTIONS
    ]
    quiet = {"progress": False}
    run = tether.sft("tiny", talks, run=tmp_path / "run", lora=False, **quiet)
    run = tether.pairs(run, QUESTIONS, vowels, max_new_tokens=6, temperature=1.0, **quiet)
    reward = tether.reward(run, run, **quiet)
    run = tether.ppo(reward, QUESTIONS, steps=2, **SHORT, **quiet)
    done = tether.evaluate(run, [f"And {i}?" for i in range(4)], vowels, **quiet)
    assert done.path == run.path == tmp_path / "run" and done.stages == [
        "sft",
        "pairs",
        "reward",
        "ppo",
        "evaluate",
    ]
    assert set(done.summary["policies"]) == {"ppo"} and done.sections().keys() >= {
        "sft",
        "pairs",
        "reward",
        "ppo",
        "evaluate",
    }
    assert read_json(run.path / "ppo/manifest.json")["model"]["source"].endswith("sft/model")
    assert len(run.reward_model.score(QUESTIONS[:2], ["aaa", "zzz"])) == 2
    with pytest.raises(ConfigError, match=r"policy \(ppo\): .*tether export"):
        tether.grpo(run, QUESTIONS, vowels, run=tmp_path / "other", **quiet)
    other = tether.grpo(
        run.path / "sft/model",
        QUESTIONS,
        reward,
        steps=1,
        **SHORT,
        run=tmp_path / "other",
        **quiet,
    )
    assert other.stages == ["grpo"] and read_json(other.path / "grpo/manifest.json")["model"][
        "source"
    ].endswith("sft/model")
    with pytest.raises(ConfigError, match="the model 'tiny'"):
        tether.grpo("somebody/else", QUESTIONS, vowels, steps=1, run=run.path, **quiet)


def test_a_policy_answers_in_the_shape_of_the_question(tmp_path):
    demonstrations = [Demonstration((user(q), assistant("aaa"))) for q in QUESTIONS]
    run = tether.sft("tiny", demonstrations, run=tmp_path / "run", progress=False)
    policy = tether.load(tmp_path / "run").policy
    one = policy.generate("Hi", max_new_tokens=4)
    assert isinstance(one, str) and policy.generate(["Hi"], max_new_tokens=4) == [one]
    assert policy.generate([{"role": "user", "content": "Hi"}], max_new_tokens=4) == one
    assert len(policy.generate("Hi", samples=3, max_new_tokens=4)) == 3
    folder = run.export(tmp_path / "plain")
    assert (folder / "model.safetensors").is_file() and (folder / "README.md").is_file()


def test_steps_are_told_and_a_notebook_shows_the_run(tmp_path):
    steps = []
    run = tether.grpo(
        "tiny", QUESTIONS, vowels, steps=2, **SHORT, run=tmp_path / "run", progress=False,
        on_step=lambda stage, step, metrics: steps.append((stage, step, "loss" in metrics)),
    )  # fmt: skip
    assert steps == [("grpo", 1, True), ("grpo", 2, True)]
    assert (
        "<h4>" in run._repr_html_()
        and "srcdoc" in run.report()._repr_html_()
        and Path(run.report()).is_file()
    )


def test_the_verdict_is_three_lines_and_the_page_a_path(tmp_path):
    run = tether.grpo(
        "tiny", QUESTIONS, vowels, steps=2, **SHORT, run=tmp_path / "run", progress=False,
        evaluate={"prompts": 2, "best_of": (), "temperatures": (0.5,)},
    )  # fmt: skip
    result, interval, control = str(run.verdict).splitlines()
    assert result.endswith("judged by the training's own reward on held-out prompts.")
    assert interval.startswith("On 2 held-out prompts, ") and "at its best temperature" in control
    page = Path(run.report)
    assert page == tmp_path / "run" / "report.html" and page.is_file()
    page.unlink()
    assert run.report() == run.report and page.is_file()


@pytest.mark.parametrize("method", ["dpo", "ipo"])
def test_a_method_goes_by_its_name_and_its_few_updates_are_named(method, tmp_path, capsys):
    """The recipe's section and the folder are called direct; no line is."""
    run = getattr(tether, method)("tiny", PAIRS, run=tmp_path / "run")
    out = capsys.readouterr().out
    lines = [line.strip() for line in out.replace(str(tmp_path), "").splitlines()]
    words = f"{method}: only 1 update. This hardly changes a model."
    assert [line for line in lines if line.startswith(words)]
    assert f"/run: {method} done" in out.replace(str(tmp_path), "")
    assert not [line for line in lines if re.match(r"\W*direct\b", line)]
    assert not re.search(r"(?i)direct (preference )?optimi", out)
    assert f"After {method.upper()} the policy" in run.verdict or "held out" in run.verdict


def test_a_second_start_says_that_nothing_is_left_to_do(tmp_path, capsys):
    def start():
        run = tether.dpo("tiny", PAIRS, run=tmp_path / "run")
        return run, " ".join(capsys.readouterr().out.replace(str(tmp_path), "").split())

    (first, before), (again, after) = start(), start()
    assert "finished already" not in before and "dpo done" in before
    assert "/run: finished already, nothing" in after and "dpo done" not in after
    assert "run=PATH" in after and "updates" not in after.split("nothing")[0]
    model = again.export(tmp_path / "export")
    further = tether.dpo(model, PAIRS, run=tmp_path / "run-2", progress=False)
    assert further.summary["updates"] == first.summary["updates"]


@pytest.mark.slow
def test_a_recipe_is_run_by_its_name_however_the_room_was_imported(tmp_path):
    run = tether.run("smoke", f"run={tmp_path}/run", "ppo.steps=1", progress=False)
    assert {"ppo", "evaluate"} <= set(run.stages) and "quickstart" in tether.recipes()
    for imports in (
        "import tether",
        "import tether, tether.settings.recipe",
        "from tether import run as r; import tether",
    ):
        asked = subprocess.run(
            [sys.executable, "-c", f"{imports}\ntether.run('smok')"],
            check=False,
            capture_output=True,
            text=True,
        )
        assert "did you mean 'smoke'?" in asked.stderr.splitlines()[-1], asked.stderr


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tether.sft("tiny", QUESTIONS, reward=vowels), ConfigError, "tether.sft takes no "
                                                                            "reward"),
        (lambda: tether.grpo("tiny", QUESTIONS), ConfigError, r"needs a \[reward\] section, .* or "
                                                              r"another reward_source"),
        (lambda: tether.grpo(3, QUESTIONS, vowels), ConfigError, "model is a int: give a hub id"),
        (lambda: tether.grpo("tiny", [], vowels), ConfigError, "data holds no row|prompts holds "
                                                               "no row"),
        (lambda: tether.grpo("tiny", [3], vowels), ConfigError, r"prompts\[0\] is 3: a row is a text"),
        (lambda: tether.grpo("tiny", QUESTIONS, 3.0), ConfigError, "reward is a float: give a "
                                                                   "function"),
        (lambda: tether.grpo("tiny", QUESTIONS, vowels, watch={"act": vowels}), ConfigError, r"grpo\.watch\.act is a function"),
        (lambda: tether.dpo("tiny", QUESTIONS), DataError, "looks like prompts .*, not "
                                                           "preferences"),
        (lambda: tether.dpo("tiny", PAIRS, loss="ipo", data=PAIRS), TypeError, "each argument once"),
        (lambda: tether.dpo(data=PAIRS), TypeError, "a model first"),
        (lambda: tether.grpo("tiny", QUESTIONS, vowels, data=QUESTIONS), ConfigError, "give one "
                                                                                      "of them"),
        (
            lambda: tether.grpo("tiny", train_dataset="x.txt", reward_funcs=vowels),
            ConfigError,
            "train_dataset is prompts or data here; reward_funcs is reward here",
        ),
        (
            lambda: tether.ppo("tiny", args=None, per_device_train_batch_size=4, stepz=1, num_generations=2, steps=2),
            ConfigError,
            r"args is its own keys \(steps=, optimizer=\{\.\.\.\}\) here\n  "
            r"unknown key 'per_device_train_batch_size' .*"
            r"prompts_per_step.*\n  unknown key 'stepz' .*'steps'.*\n  unknown key 'num_generations' "
            r".*samples_per_prompt",
        ),
        (lambda: tether.load("nowhere"), FileNotFoundError, "run directory not found: nowhere"),
        (lambda: tether.nothing, AttributeError, "no attribute 'nothing'$"),
        (lambda: tether.GRPOTrainer, AttributeError, "tether.grpo is the function"),
        (lambda: tether.SFTConfig, AttributeError, "tether.sft is the function"),
        (lambda: tether.ORPOConfig, AttributeError, "tether.orpo is the function"),
        (lambda: tether.PRMTrainer, AttributeError, "tether.process is the function"),
        (lambda: tether.GKDTrainer, AttributeError, "tether.distill is the function"),
        (lambda: tether.online_dpo, AttributeError, "tether.online_direct is the function"),
        (
            lambda: tether.dpo("tiny", PAIRS, loss_type="ipo"),
            ConfigError,
            r"^tether.dpo: unknown key 'loss_type' \(did you mean 'loss'\?",
        ),
        (
            lambda: tether.grpo("tiny", QUESTIONS, vowels, beta=0.04),
            ConfigError,
            r"unknown key 'beta' \(did you mean kl=\{'coefficient': \.\.\.\}\? ",
        ),
        (
            lambda: tether.sft("tiny", QUESTIONS, eval_dataset=QUESTIONS),
            ConfigError,
            "eval_dataset is heldout_fraction",
        ),
    ],
)  # fmt: skip
def test_bad_calls_are_one_clear_message(tmp_path, monkeypatch, call, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        call()


def test_editors_know_every_method_and_key():
    assert stub.PLACE.read_text() == stub.text(), "run python -m tools.dev.stub"
    compile(stub.text(), "stub", "exec")
    for name in ("sft", "dpo", "grpo", "rloo", "kto", "prm", "best_of_n", "pairs", "evaluate"):
        assert name in dir(tether) and f"def {name}(" in stub.text()
    learning = [name for name, kind in STAGES.items() if "budget" in kind.section.model_fields]
    assert len(learning) > 9
    for name in learning:  # `budget = 10` and `budget = { minutes = 10 }`
        (own,) = re.findall(rf"^def {name}\(.*?^\)", stub.text(), re.M | re.S)
        assert "    budget: float | Mapping[str, Any] | None = None,\n" in own
    assert [*inspect.signature(tether.grpo).parameters][:3] == ["model", "prompts", "reward"]
    assert "steps" in inspect.signature(tether.grpo).parameters and "GRPO" in tether.grpo.__doc__


STOPPED = """
import os, signal, time, tether
calls = 0
def reward(prompts, responses):
    global calls
    calls += 1
    for _ in range(signals if calls == 2 else 0):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
    return [float(len(r)) for r in responses]
signals = SIGNALS
few = {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4}
tether.grpo("tiny", ["a", "b"], reward, steps=9, run="run", progress=False, **few)
"""


@pytest.mark.parametrize(
    ("signals", "words"),
    [(1, "stopped after step "), (2, "stopped at once. Everything that was saved before stays.")],
)
def test_ctrl_c_in_a_program_ends_in_one_line(tmp_path, signals, words):
    code = STOPPED.replace("SIGNALS", str(signals))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.splitlines()[-1].startswith(
        f"tether: {words}",
    )
