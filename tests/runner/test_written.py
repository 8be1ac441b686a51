"""Fine-tuning on what a teacher writes: its answers, those that are left out, and a run that goes on."""

import json
from pathlib import Path

import pytest
from tests.every_stage import differences, everything

import tether
from tether.core.errors import ConfigError, DataError
from tether.core.rundir import read_json, read_jsonl
from tether.core.types import Message, Prompt, Sampling
from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
from tether.runner.planning.devices import gpu
from tether.runner.planning.plan import plan
from tether.runner.planning.sizes import row_sizes
from tether.settings.model import ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.watch.report.doubts import not_trained
from tether.watch.report.reading import read_journey

MODEL = {"source": "tiny", "dtype": "float32"}
LONGEST = 100
TEACHER = {"model": "start", "system": "About {topic}.", "max_new_tokens": LONGEST}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"say {c}", "topic": c * 3} for c in "aeioubcdfghk"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reads.py").write_text(
        "def hint(prompt):\n"
        "    return [{'role': 'user', 'content': f'{prompt.text}! {prompt.row[\"topic\"]}'}]\n",
    )
    return tmp_path


def recipe(teacher, run="run", model=None, **settings):
    learned = {"batch_size": 4, "heldout_fraction": 0.0, "epochs": 1, **settings}
    data = {"path": "rows.jsonl", "teacher": teacher}
    return {"run": run, "model": {**MODEL, **(model or {})}, "sft": {"data": data, **learned}}


def by_hand(turns, samples=1):
    """What the start answers to these turns, prompt by prompt, in the places of the rows."""
    engine = local_engine(*load_policy("tiny", build(ModelConfig, MODEL)))
    return [
        group.rollouts
        for place, one in enumerate(turns)
        for group in engine.generate(
            [Prompt(one)],
            Sampling(LONGEST),
            num_samples=samples,
            seed=0,
            ordinals=[place],
        )
    ]


def texts(run="run"):
    rows = read_jsonl(f"{run}/sft/written.jsonl")
    return [[text for text, _ in row["answers"]] for row in rows]


@pytest.mark.parametrize("samples", [1, 3])
def test_the_demonstrations_are_the_answers_to_what_the_teacher_reads(folder, samples):
    tether.run(recipe({**TEACHER, "samples_per_prompt": samples}), progress=False)
    turns = [
        (Message("system", f"About {c * 3}."), Message("user", f"say {c}")) for c in "aeioubcdfghk"
    ]
    expected = by_hand(turns, samples)
    assert texts() == [[one.text for one in rollouts] for rollouts in expected]
    summary = read_json("run/sft/summary.json")
    usable = sum(one.finished and bool(one.text.strip()) for row in expected for one in row)
    assert 0 < usable < 12 * samples
    assert summary["num_train"] == usable
    assert summary["quarantine"]["count"] == 12 * samples - usable


def test_the_share_that_does_not_train_is_of_the_answers(folder):
    """Four answers to each of twelve prompts, of which those beyond 64 tokens are left out; the page
    counts the prompts of the file.
    """
    teacher = {**TEACHER, "samples_per_prompt": 4}
    tether.run(recipe(teacher, max_length=64), progress=False)
    turns = [
        (Message("system", f"About {c * 3}."), Message("user", f"say {c}")) for c in "aeioubcdfghk"
    ]
    groups = by_hand(turns, 4)
    usable = sum(one.finished and bool(one.text.strip()) for row in groups for one in row)
    summary = read_json("run/sft/summary.json")
    left = sum(summary["skipped"].values())
    assert summary["num_train"] == usable - left and left == 6
    words = not_trained(read_journey(Path("run")).stage("sft"))
    assert words.startswith(f"{left} of {usable} rows ({left / usable:.0%}) do not train")
    assert read_json("run/sft/manifest.json")["rows"] == 12


def test_a_teacher_that_writes_reads_the_system_message_of_its_model_behind_its_own(folder):
    tether.run(recipe(TEACHER, model={"system_prompt": "Be odd."}), progress=False)
    turns = [
        (Message("system", f"About {c * 3}.\n\nBe odd."), Message("user", f"say {c}"))
        for c in "aeioubcdfghk"
    ]
    assert texts() == [[one.text for one in rollouts] for rollouts in by_hand(turns)]


def test_a_function_gives_what_the_teacher_reads_and_a_run_teaches(folder):
    teacher = {**TEACHER, "system": None, "samples_per_prompt": 4}
    tether.run(recipe({**teacher, "call": "reads.py:hint"}), progress=False)
    turns = [(Message("user", f"say {c}! {c * 3}"),) for c in "aeioubcdfghk"]
    assert texts() == [[one.text for one in rollouts] for rollouts in by_hand(turns, 4)]
    tether.run(recipe({**teacher, "model": "run"}, "second"), progress=False)
    assert texts("second") != texts()  # what has learned answers otherwise


def test_a_run_with_another_template_writes_by_its_own(folder):
    (folder / "loud.jinja").write_text(
        "{% for m in messages %}<|{{ m.role }}|>LOUD {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    )
    speech = {**MODEL, "chat_template": "loud.jinja", "system_prompt": "Be odd."}
    speech["stop_tokens"] = ["<|end|>", *"aeiou"]
    steps = {"steps": 1, "prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 8}
    random = {"data": {"path": "rows.jsonl"}, "reward_source": "random", **steps}
    tether.run({"run": "loud", "model": speech, "grpo": random}, progress=False)
    tether.run(recipe({"model": "loud", "max_new_tokens": LONGEST}), progress=False)
    role, loaded = load_policy("loud")
    assert encoder_of(loaded).prompt((Message("user", "a"),)) == tuple(
        loaded.tokenizer("<|system|>LOUD Be odd.<|end|><|user|>LOUD a<|end|><|assistant|>")[
            "input_ids"
        ],
    )
    engine = local_engine(role, loaded)
    prompts = [Prompt((Message("user", f"say {c}"),)) for c in "aeioubcdfghk"]
    groups = engine.generate(prompts, Sampling(LONGEST), num_samples=1, seed=0, ordinals=range(12))
    assert texts() == [[one.text for one in group.rollouts] for group in groups]


def test_a_run_that_was_killed_while_the_teacher_wrote_ends_the_same(folder):
    tether.run(recipe(TEACHER), progress=False)
    whole = everything(folder / "run")
    lines = (folder / "run/sft/written.jsonl").read_text().splitlines(keepends=True)
    (folder / "run").rename(folder / "before")
    sft = folder / "run/sft"
    sft.mkdir(parents=True)
    for name in ("config.json", "manifest.json"):
        (sft / name).write_bytes((folder / "before/sft" / name).read_bytes())
    (sft / "written.jsonl").write_text("".join(lines[:5]) + lines[5][:9])
    tether.run(recipe(TEACHER), progress=False)
    again = everything(folder / "run")
    assert (
        differences(
            {name: value for name, value in whole.items() if name.startswith("sft/")},
            {name: value for name, value in again.items() if name.startswith("sft/")},
        )
        == []
    )


@pytest.mark.parametrize(
    ("teacher", "says"),
    [
        ("start", "teaches itself nothing"),
        ({"system": "shout"}, "set model"),
        ("http://10.0.0.5:8000", "no server is asked for texts.*give that file as data"),
        ({"addresses": ["http://10.0.0.5:8000"]}, "no server is asked for texts"),
        ({"model": "nowhere/at-all-x", "system": "x"}, "nowhere/at-all-x"),
        ({**TEACHER, "system": "{colour}"}, "colour"),
    ],
)
def test_what_no_teacher_can_do_is_refused(folder, teacher, says):
    with pytest.raises((ConfigError, DataError, tether.TetherError), match=says):
        tether.run(recipe(teacher), progress=False)


def test_answers_that_never_end_are_named(folder):
    with pytest.raises(DataError, match=r"does not end .*max_new_tokens"):
        tether.run(recipe({**TEACHER, "max_new_tokens": 1}), progress=False)


def test_the_plan_counts_the_answers_that_will_be_written(folder):
    built = build(Recipe, recipe({**TEACHER, "samples_per_prompt": 3}))
    stage = plan(built, gpu(80, "a100"), sizes=row_sizes(built, ["sft"])).stages[0]
    assert "36 rows × 1 pass in 9 updates" in stage.work.words and "not priced" in stage.work.words
