"""Comparing policies with their start: the judges that there may be, and what is refused."""

import json
import re
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from tests.evaluation.oracles import equal_length
from tests.rewards import published
from tests.runner.journeys import LETTERS, Killed, journey, lines, numbered_prompts
from typer.testing import CliRunner

from tether.cli import app
from tether.core.errors import ConfigError, RewardError, RunError
from tether.core.types import Score
from tether.evaluation import length_controlled
from tether.runner.assembly import judges
from tether.runner.methods.evaluate import opening
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.watch.report.narrative import control_of
from tether.watch.report.page import write_report

SHORT = {"epochs": 1, "heldout_fraction": 0.0, "optimizer": {"learning_rate": 1e-2}}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Somebody's own comparisons and held-out prompts: no [sft], no [pairs], a direct method, its
    own start.
    """
    folder = tmp_path_factory.mktemp("own")
    rows = [
        {"prompt": f"question {n}", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(6)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        folder,
        {"data": {"path": str(folder / "pairs.jsonl")}, **SHORT},
        numbered_prompts(folder),
    )


def compared(root, own, judge, **options):
    """The summary of [evaluate]."""
    _, direct, heldout = own
    bare = dict.fromkeys(("sft", "reward", "ppo"))
    pairs = {"prompts": None, "labels": None, "samples_per_prompt": 2}
    evaluate = {"data": heldout, "judge": judge, "temperatures": (0.5, 0.0), **options}
    recipe = journey(root, pairs=pairs, **bare, direct=direct, evaluate=evaluate)
    return run_recipe(recipe, ["direct", "evaluate"])["evaluate"]


def test_a_function_of_ones_own_judges_prompts_of_ones_own(tmp_path, own):
    (tmp_path / "mine.py").write_text(
        "def length(prompts, responses):\n    return [float(len(r)) for r in responses]\n",
    )
    root = tmp_path / "run"
    summary = compared(root, own, {"call": f"{tmp_path}/mine.py:length"}, samples=2)
    policy, rows = summary["policies"]["direct"], lines(root / "evaluate" / "answers.jsonl")
    assert (
        summary["num_prompts"] == 10
        and len(rows) == 20
        and all(row["gold_after"] == len(row["after"]) for row in rows)
    )
    assert policy["gold_after"] == pytest.approx(sum(len(row["after"]) for row in rows) / 20)
    assert policy["gold_gain"]["value"] == pytest.approx(
        policy["gold_after"] - policy["gold_before"],
    )
    assert policy["answers"]["kl"]["value"] > 0 and set(policy["gold_by_temperature"]) == {
        "1",
        "0.5",
        "0",
    }
    assert control_of(policy) and policy["gold_gain"]["count"] == 20


class Vowels(published.Letters):
    """Pays for vowels, breaks where a reply has a q, and reads a column of its task."""

    def reset(self, task):
        assert task["question"].startswith("Tell")
        return super().reset(task)

    def step(self, message):
        if "q" in message["content"]:
            raise OSError("no q")
        return super().step(message)


def played(tmp_path, judge, changed=None, **more):
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"question": f"Tell {n}."}) + "\n" for n in range(10)))
    section = {"data": {"path": str(path)}, "steps": 2, "prompts_per_step": 2}
    section |= {"samples_per_prompt": 2, "max_new_tokens": 12, "reward_source": "environment"}
    section["environment"] = {"call": f"{__file__}:Vowels", "turns": 3, "tokens": 200, "retries": 0}
    evaluate = {"data": section["data"], "judge": judge, "temperatures": (0.5,), **more}
    values = {"run": str(tmp_path / "run"), "model": {"source": "tiny"}}
    section["environment"] |= changed or {}
    run_recipe(build(Recipe, {**values, "grpo": section, "evaluate": evaluate}))
    folder = tmp_path / "run" / "evaluate"
    sides = [
        json.loads((folder / name / "answers.json").read_text()) for name in ("before", "grpo")
    ]
    return json.loads((folder / "summary.json").read_text()), sides


def test_both_sides_play_what_the_policy_was_trained_in(tmp_path, own):
    """A reward is worked out here again from each transcript; a failed episode has none."""
    summary, sides = played(tmp_path, "environment", samples=8)
    failed = 0
    for side in sides:
        for block in (side, *side["decoded"].values()):
            for text, (value, parts, reason) in zip(block["texts"], block["outcomes"], strict=True):
                replies = re.findall(r"^assistant: (.*?)(?=\n\nuser: Turn|\Z)", text, re.S | re.M)
                if any("q" in reply for reply in replies):
                    assert value is None and "no q" in reason
                    failed += 1
                    continue
                assert len(replies) == parts["turns"] <= 3
                vowels = sum(reply.count(one) for reply in replies for one in "aeiou")
                assert value == pytest.approx(vowels / 10)
    assert failed
    figures = summary["policies"]["grpo"]
    rows = lines(tmp_path / "run" / "evaluate" / "answers.jsonl")
    pairs = [
        (one, other)
        for row in rows
        if None not in (one := row["gold_before"], other := row["gold_after"])
    ]
    assert len(pairs) < len(rows) == 80
    assert figures["gold_gain"]["value"] == pytest.approx(
        statistics.fmean(other - one for one, other in pairs),
    )


def test_a_judge_of_texts_reads_the_last_reply_of_an_episode(tmp_path, own):
    (tmp_path / "mine.py").write_text(
        "def one(prompts, responses):\n    return map(len, responses)\n",
    )
    _, sides = played(tmp_path, {"call": f"{tmp_path}/mine.py:one"}, samples=4)
    for row in lines(tmp_path / "run" / "evaluate" / "answers.jsonl"):
        assert row["gold_after"] == (None if "q" in row["after"] else len(row["after"]))
    assert all("assistant:" not in text for side in sides for text in side["texts"])


class Counts(Vowels):
    """Reads a column in which tasks with one text differ."""

    def reset(self, task):
        self.worth = task["worth"]
        return super().reset({**task, "question": "Tell"})

    def step(self, message):
        turns, _, done = super().step({**message, "content": "a"})
        return turns, self.worth, done


def test_tasks_that_ask_the_same_are_told_apart_by_their_columns(tmp_path, own, caplog):
    """One of the held-out tasks is a training row; and answers belong to the tasks as they were."""

    def write(name, worths):
        rows = [{"id": f"{name}{n}", "prompt": "Guess.", "worth": n} for n in worths]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"path": str(tmp_path / f"{name}.jsonl")}

    def judged(worths):
        section = {"data": write("train", (1, 2, 3)), "steps": 1, "prompts_per_step": 2}
        section |= {"samples_per_prompt": 2, "max_new_tokens": 6, "reward_source": "environment"}
        section["environment"] = {"call": f"{__file__}:Counts", "turns": 1, "tokens": 100}
        evaluate = {"data": write("held", worths), "judge": "environment", "temperatures": ()}
        values = {"run": str(tmp_path / "run"), "model": {"source": "tiny"}}
        run_recipe(build(Recipe, {**values, "grpo": section, "evaluate": evaluate}))
        folder = tmp_path / "run" / "evaluate"
        outcomes = json.loads((folder / "before" / "answers.json").read_text())["outcomes"]
        return json.loads((folder / "summary.json").read_text()), [one[0] for one in outcomes]

    summary, outcomes = judged((3, 40, 50))
    assert summary["trained_on"] == {"count": 1, "total": 3, "stages": ["grpo"]}
    assert sum("[evaluate]: 1 of 3 prompts" in message for message in caplog.messages) == 1
    assert sorted(outcomes) == [3, 40, 50]
    (tmp_path / "run" / "evaluate" / "summary.json").unlink()
    summary, outcomes = judged((60, 70, 80))
    assert "trained_on" not in summary
    assert sorted(outcomes) == [60, 70, 80]


def test_answers_belong_to_the_environment_they_were_played_in(tmp_path, own):
    """A policy that was trained again in another one is compared with a start that plays there."""
    _, (before, _) = played(tmp_path, "environment", {"turns": 1}, samples=2)
    for name in ("grpo", "evaluate/grpo"):
        shutil.rmtree(tmp_path / "run" / name)
    (tmp_path / "run" / "evaluate" / "summary.json").unlink()
    _, (again, _) = played(tmp_path, "environment", {"turns": 3}, samples=2)
    assert before["weights"] == again["weights"]
    most = [
        max(parts["turns"] for _, parts, _ in one["outcomes"] if parts) for one in (before, again)
    ]
    assert most[0] == 1 < most[1]


def test_the_reward_of_training_is_no_judge_of_its_own(tmp_path, own):
    played(tmp_path, "environment")
    assert "environment, is the reward that training maximised" in (
        write_report(tmp_path / "run").read_text()
    )


@pytest.mark.parametrize("more", [{"thought_tokens": 4}, {"length_controlled": True}])
def test_settings_of_single_answers_are_refused_for_episodes(tmp_path, own, more):
    with pytest.raises(ConfigError, match="are of single answers"):
        played(tmp_path, "environment", **more)


def test_an_environment_judges_only_where_there_is_one(tmp_path, own):
    with pytest.raises(ConfigError, match=r"evaluate\.judge = 'environment' needs a stage"):
        compared(tmp_path / "run", own, "environment")


def test_a_language_model_judges_each_answer_by_itself(tmp_path, own, monkeypatch):
    asked = []

    def scores(model, rubric, prompts, texts):
        assert rubric.startswith("The better answer")
        asked.extend(texts)
        return [Score(text.count("e") / 10) for text in texts]

    monkeypatch.setattr(judges, "judged_scores", scores)
    monkeypatch.setattr(
        judges,
        "judge_model",
        lambda config, folder: SimpleNamespace(name="planted"),
    )
    summary = compared(tmp_path / "run", own, {"model": "tiny"})
    rows = lines(tmp_path / "run" / "evaluate" / "answers.jsonl")
    assert (
        all(row["gold_before"] == row["before"].count("e") / 10 for row in rows) and len(rows) == 10
    )
    assert len(asked) == 60 and summary["policies"]["direct"]["gold_win_rate"]["count"] == 10


def test_a_judge_that_scores_nothing_is_mended_without_sampling_again(tmp_path, own, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from tether.core.types import Score\n\n"
        "def broken(prompts, responses):\n    return [Score(None, reason='no idea') for r in "
        "responses]\n",
    )
    with pytest.raises(RewardError, match=r"none of 60.*no idea"):
        compared(tmp_path / "run", own, {"call": f"{tmp_path}/mine.py:broken"})
    (tmp_path / "mine.py").write_text(
        "def broken(prompts, responses):\n    return [len(r) for r in responses]\n",
    )
    monkeypatch.setattr("tether.runner.methods.evaluate.load_policy", None)
    assert (
        compared(tmp_path / "run", own, {"call": f"{tmp_path}/mine.py:broken"})["num_prompts"] == 10
    )


def test_answers_belong_to_the_weights_that_gave_them(tmp_path, own, monkeypatch, caplog):
    """A policy that was trained again answers again, also where the comparison was complete; its
    start does not.
    """
    (tmp_path / "mine.py").write_text(
        "def length(prompts, responses):\n    return [float(len(r)) for r in responses]\n",
    )
    judge = {"call": f"{tmp_path}/mine.py:length"}
    compared(tmp_path / "run", own, judge)
    places = [
        tmp_path / "run" / "evaluate" / name / "answers.json" for name in ("before", "direct")
    ]
    start, policy = (json.loads(path.read_text()) for path in places)
    adapter = tmp_path / "run" / "direct" / "policy" / "adapter" / "adapter_model.safetensors"
    weights = {name: tensor + 1.0 for name, tensor in load_file(adapter).items()}
    save_file(weights, adapter, metadata={"format": "pt"})
    again = compared(tmp_path / "run", own, judge)
    now = [json.loads(path.read_text()) for path in places]
    assert now[0] == start and now[1]["texts"] != policy["texts"]
    assert start["weights"] != policy["weights"] != now[1]["weights"]
    assert now[1]["kl"] != policy["kl"]
    assert "direct: of other weights" in caplog.text
    monkeypatch.setattr("tether.runner.methods.evaluate.load_policy", None)
    assert compared(tmp_path / "run", own, judge)["num_prompts"] == again["num_prompts"]


def test_answers_belong_to_the_prompts_that_were_asked(tmp_path, own, caplog):
    """Prompts that were edited behind a comparison that was not finished."""
    (tmp_path / "mine.py").write_text(
        "def length(prompts, responses):\n    return [float(len(r)) for r in responses]\n",
    )
    judge = {"call": f"{tmp_path}/mine.py:length"}
    mine = (*own[:2], numbered_prompts(tmp_path))
    compared(tmp_path / "run", mine, judge)
    (tmp_path / "run/evaluate/summary.json").unlink()
    path = Path(mine[2]["path"])
    path.write_text(path.read_text().replace("number", "other", 3))
    compared(tmp_path / "run", mine, judge)
    assert "before: of other weights, prompts or tools" in caplog.text
    first = json.loads((tmp_path / "run/evaluate/before/answers.json").read_text())
    fresh = compared(tmp_path / "fresh", mine, judge)
    again = json.loads((tmp_path / "fresh/evaluate/before/answers.json").read_text())
    assert first["texts"] == again["texts"] and fresh


@pytest.mark.parametrize("part", ["rows", "held out"])
def test_a_stage_that_was_begun_goes_on_with_no_other_rows(tmp_path, own, part):
    """Held-out scores are paired by their places, and the order of the rows is that of their number."""
    data = numbered_prompts(tmp_path)
    section = {"data": data, "function": {"call": "tests.runner.test_budgets:length"}, "steps": 3}
    section |= {
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_new_tokens": 4,
        "checkpoint_every": 1,
    }
    if part == "held out":
        path = tmp_path / "held_out.txt"
        path.write_text("Tell me about that number.\nAnd of this number.\n")
        section["evaluate"] = {"every": 1, "data": {"path": str(path)}}
    values = {"run": str(tmp_path / "run"), "model": {"source": "tiny"}, "grpo": section}

    def bar(done, total, metrics):
        raise Killed

    made = build(Recipe, values)
    with pytest.raises(Killed):
        run_recipe(made, None, lambda title: bar)
    path = Path(section.get("evaluate", section)["data"]["path"])
    before = path.read_text()
    path.write_text(before + before.replace("number", "other"))
    with pytest.raises(RunError, match="has changed since"):
        run_recipe(made)
    path.write_text(before)
    assert run_recipe(made)["grpo"]["steps"] == 3


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Привет, мир", "привет"),
        ("你好 吗", "你好"),
        ("Été chaud", "été"),
        ("I'm here", "i'm"),
        ("12", ""),
    ],
)
def test_an_opening_is_a_word_of_any_script(text, word):
    assert opening(text) == word


def test_answers_have_a_length_where_no_stage_samples(tmp_path, own, caplog):
    _, direct, heldout = own
    bare = dict.fromkeys(("sft", "reward", "ppo"))
    recipe = journey(
        tmp_path / "run",
        **bare,
        direct=direct,
        evaluate={"data": heldout, "judge": LETTERS},
    )
    without = recipe.model_copy(update={"pairs": None})
    with caplog.at_level("INFO"):
        run_recipe(without, ["direct", "evaluate"])
    assert "128 tokens at temperature" in caplog.text
    written = json.loads((tmp_path / "run" / "evaluate" / "before" / "answers.json").read_text())
    assert set(written["decoded"]) == {"0.5", "0"} and written["length"] > 40


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        ({"judge": LETTERS, "samples": 0}, "evaluate.samples"),
        ({"judge": {}}, "either a model or a server"),
        ({"judge": {"call": "letters", "model": "tiny"}}, "evaluate.judge"),
        ({}, "evaluate.judge"),
    ],
)
def test_a_wrong_judge_or_number_of_samples_is_refused(tmp_path, evaluate, message):
    with pytest.raises(ConfigError, match=message):
        journey(tmp_path / "run", evaluate=evaluate)
    with pytest.raises(
        ConfigError,
        match="evaluate has no effect",
    ):
        journey(tmp_path / "run", ppo=None)


def test_a_policy_is_judged_before_the_first_of_the_recipe_is_trained(tmp_path, own):
    _, direct, heldout = own
    bare = {
        **dict.fromkeys(("sft", "reward", "ppo")),
        "pairs": {"prompts": None, "labels": None, "samples_per_prompt": 2},
    }
    evaluate = {"data": heldout, "judge": LETTERS, "temperatures": (0.5,)}
    recipe = journey(
        tmp_path,
        **bare,
        direct=direct,
        evaluate=evaluate,
        arms={"other": {"direct": {"seed": 5}}},
    )
    run_recipe(recipe, ["direct-other", "evaluate"])
    assert set(json.loads((tmp_path / "summary.json").read_text())["arms"]) == {"direct-other"}


def test_the_command_gives_the_win_rate_at_equal_length(tmp_path, monkeypatch):
    """A judge that likes length, and some quality of a text that is drawn from its letters."""
    monkeypatch.setattr(length_controlled, "REPLICATES", 20)
    for place in (length_controlled, equal_length):  # a strong penalty would hold all at one half
        monkeypatch.setattr(place, "STRENGTHS", np.array([100.0]))
    (tmp_path / "mine.py").write_text(
        "import random\n\n"
        "def liking(prompts, responses):\n"
        "    return [len(r) / 4 + random.Random(r).gauss(0, 2) for r in responses]\n",
    )
    rows = [{"prompt": f"question {n}", "chosen": f"yes {n}", "rejected": "no"} for n in range(52)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.toml").write_text(f"""
run = "{tmp_path}/run"

[model]
source = "tiny"
dtype = "float32"

[direct]
data = {{ path = "{tmp_path}/rows.jsonl", limit = 6 }}
epochs = 1
heldout_fraction = 0.0
optimizer = {{ learning_rate = 1e-2 }}

[evaluate]
data = {{ path = "{tmp_path}/rows.jsonl" }}
judge = {{ call = "{tmp_path}/mine.py:liking" }}
max_new_tokens = 8
temperature = 1.0
temperatures = []
length_controlled = true
""")
    shown = ""
    for command in ("direct", "evaluate"):
        result = CliRunner().invoke(app, [command, str(tmp_path / "recipe.toml")])
        assert result.exit_code == 0, result.output
        shown = result.output
    summary = json.loads((tmp_path / "run" / "evaluate" / "summary.json").read_text())
    rate = summary["policies"]["direct"]["gold_win_rate_at_equal_length"]
    answers = lines(tmp_path / "run" / "evaluate" / "answers.jsonl")
    wins = [
        (r["gold_after"] > r["gold_before"]) + (r["gold_after"] == r["gold_before"]) / 2
        for r in answers
    ]
    differences = np.array([len(r["before"]) - len(r["after"]) for r in answers], float)
    assert rate["value"] == pytest.approx(
        equal_length.at_equal_length(np.array(wins), differences),
        abs=1e-4,
    )
    assert rate["low"] < rate["value"] < rate["high"] and rate["count"] == 52
    assert rate["value"] != pytest.approx(np.mean(wins), abs=1e-3)
    assert abs(rate["value"] - 0.5) > 0.01
    assert f"{rate['value']:.1%} [" in shown
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert f"{rate['value']:.1%}" in page and "equal length" in page
