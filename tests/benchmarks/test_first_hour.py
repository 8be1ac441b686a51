"""The first hour of a newcomer: the documents' own examples, as their texts stand there."""

import sys

import pytest
from benchmarks.first_hour import MODEL, ROOT, examples, prepare, run, watched

from tether.settings.stages import STAGES

SAMPLED = ("ppo", "grpo", "reinforce", "online_direct", "best_of_n")


def test_examples_are_the_texts_of_the_pages():
    found = list(examples())
    readme = (ROOT / "README.md").read_text()
    assert [e.is_recipe for e in found if e.name.startswith("README.md")] == [False, True]
    assert all(e.text in readme for e in found if e.name.startswith("README.md"))
    calls = [
        line
        for e in found
        for line in e.text.splitlines()
        if "tether.grpo(" in line or "tether.evaluate(" in line
    ]
    assert len(calls) == 3 and MODEL in found[0].text
    for example in found:
        if not example.is_recipe:
            compile(example.text, example.name, "exec")


@pytest.mark.parametrize("name", SAMPLED)
def test_a_step_of_the_defaults_is_small(name):
    """At most 64 answers of 64 tokens: a quarter of an hour would be a hundred times that on two
    cores.
    """
    fields = STAGES[name].section.model_fields
    assert fields["prompts_per_step"].default == 8
    answers = fields["prompts_per_step"].default * fields["samples_per_prompt"].default
    assert answers <= 64 and answers * fields["max_new_tokens"].default <= 4096


def test_lines_are_timed_without_a_terminal(tmp_path):
    code = (
        "import "
        "time\ntime.sleep(0.3)\nprint('one')\ntime.sleep(0.9)\nprint('two')\ntime.sleep(0.1)\nraise SystemExit(3)"
    )
    measured = watched([sys.executable, "-c", code], tmp_path)
    assert measured.code == 3 and measured.output == "one\ntwo\n"
    assert 0.3 <= measured.first_line <= measured.seconds - 1.0
    assert 0.9 <= measured.longest_silence <= measured.seconds - 0.4


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [e for e in examples() if e.name.startswith("README.md")],
    ids=lambda e: e.name,
)
def test_the_readme_runs_as_it_stands(tmp_path, example):
    prepare(tmp_path)
    measured = run(example, tmp_path, tiny=True)
    assert measured.code == 0, measured.output
    reports = list((tmp_path / "runs").glob("*/report.html"))
    assert len(reports) == 1
    if not example.is_recipe:
        assert (tmp_path / "brief-model" / "config.json").is_file()
