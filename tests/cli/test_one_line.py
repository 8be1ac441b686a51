"""A method as one line of the shell: the recipe of the same call in Python, and a run that grows."""

import json

import pytest
from tests.cli.test_commands import tether as command

import tether
from tether.api import methods
from tether.settings.recipe import read_recipe
from tether.settings.synonyms import METHODS

PAIRS = [{"prompt": f"What is {i}?", "chosen": "aaa eee", "rejected": "xxx zzz"} for i in range(12)]
SHORT = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 6}
CALLS = {
    "sft": ("demonstrations.jsonl", {"epochs": 2}),
    "dpo": ("pairs.jsonl", {"beta": 0.2, "optimizer": {"learning_rate": 1e-4}}),
    "reward": ("owner/pairs", {"lora": {"rank": 4}}),
    "kto": ("pairs.jsonl", {}),
    "grpo": ("prompts.txt", {**SHORT, "reward": "mine.py:vowels"}),
    "distill": ("prompts.txt", {**SHORT, "teacher": "owner/larger"}),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = [{"prompt": row["prompt"], "response": row["chosen"]} for row in PAIRS]
    for name, lines in (("pairs", PAIRS), ("demonstrations", rows)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    (tmp_path / "prompts.txt").write_text("".join(row["prompt"] + "\n" for row in PAIRS))
    (tmp_path / "mine.py").write_text(
        "def vowels(prompts, responses):\n    return [float(len(r)) for r in responses]\n",
    )
    return tmp_path


def words_of(name, settings):
    """Settings as a shell writes them."""
    section = METHODS[name][0] if name in METHODS else name
    for key, value in settings.items():
        if key in ("reward", "teacher"):
            yield from (f"--{key}", value)
        elif isinstance(value, dict):
            yield from (f"{section}.{key}.{inner}={one}" for inner, one in value.items())
        else:
            yield f"{section}.{key}={value}"


@pytest.mark.parametrize("name", CALLS)
def test_the_same_arguments_make_the_same_recipe(folder, monkeypatch, name):
    rows, settings = CALLS[name]
    monkeypatch.setattr(methods, "_run", lambda recipe, *_: recipe)
    monkeypatch.setattr("tether.runner.assembly.data.sources.check_sources", lambda _: None)
    theirs = getattr(tether, name)("tiny", rows, **settings)
    words = [name, "tiny", rows, *words_of(name, settings)]
    written = command(*words, "--recipe", "mine.toml", cwd=folder)
    assert written.returncode == 0, written.stderr
    assert "tether run mine.toml" in written.stdout and not (folder / "runs").exists()
    ours = read_recipe("mine.toml")
    assert ours.model_dump() == theirs.model_dump()
    assert ours.model_dump(exclude_unset=True) == theirs.model_dump(exclude_unset=True)
    assert command(*words, "--recipe", "mine.toml", cwd=folder).returncode == 2


def test_a_line_trains_and_prints_the_recipe_that_it_is(folder):
    done = command("sft", "tiny", "demonstrations.jsonl", "--run", "runs/a b", cwd=folder)
    assert done.returncode == 0, done.stderr
    shown = done.stdout[: done.stdout.index('data = { path = "demonstrations.jsonl" }')]
    assert 'run = "runs/a b"' in shown and "[sft]" in shown
    grown = command("dpo", "runs/a b", "pairs.jsonl", "direct.epochs=1", cwd=folder)
    assert grown.returncode == 0, grown.stderr
    assert tether.load("runs/a b").stages == ["sft", "direct"]
    other = command("kto", "runs/a b", "pairs.jsonl", "run=runs/b", cwd=folder)
    assert other.returncode == 2 and "tether export" in other.stderr


def test_a_recipe_stays_what_it_was(folder):
    line = ("grpo", "tiny", "prompts.txt", *words_of("grpo", CALLS["grpo"][1]))
    assert command(*line, "--recipe", "r.toml", cwd=folder).returncode == 0
    for words in (("grpo", "r.toml", "--dry-run"), (*line, "--dry-run", "run=runs/grpo")):
        listed = command(*words, cwd=folder)
        assert listed.returncode == 0 and "1 jobs in runs/grpo" in listed.stdout, listed.stderr
    both = command(*line, "--recipe", "both.toml", "--dry-run", cwd=folder)
    assert both.returncode == 0 and "1 jobs in runs/" in both.stdout, both.stderr
    assert (folder / "both.toml").read_bytes() == (folder / "r.toml").read_bytes()
    for words in (("--reward", "mine.py:vowels"), ("--recipe", "x.toml")):
        assert command("grpo", "r.toml", *words, cwd=folder).returncode == 2
    assert not (folder / "runs").exists()
    assert command("dpo", "tiny", "pairs.jsonl", "--reward", "x", cwd=folder).returncode == 2
    for name in ("dpo", "sft"):
        refused = command(name, "tiny", "pairs.jsonl", "--teacher", "x", cwd=folder)
        assert refused.returncode == 2 and "distill" in refused.stderr
    lost = command("dpo", "gpt2", cwd=folder)
    assert lost.returncode == 2 and "tether sft gpt2 ROWS" in lost.stderr
