"""Slips of beginners: what they meant is named, and nothing is said that does not help them."""

import json
import logging

import numpy as np
import pytest
from tests.cli.test_commands import tether

from tether.cli.tools.doctor_run import _checks_of_rows
from tether.cli.tools.machine import _threads
from tether.core.errors import MissingFileError
from tether.core.rundir import missing_run
from tether.core.threads import THREADS, WAITING, spin_while_waiting
from tether.core.types import Comparison
from tether.data.chat import ChatEncoder
from tether.data.sources import Quarantine, read
from tether.models.sources import near_model
from tether.models.tiny import tiny_tokenizer
from tether.settings.supervised import DirectSection
from tether.settings.synonyms import alike
from tether.stats.shares import grouped_share
from tether.watch.monitoring.doctor import Finding
from tether.watch.report.doubts import length_warning
from tether.watch.report.reading import SubRun


def test_of_two_words_equally_near_the_one_with_the_same_first_letter_is_meant():
    assert alike("bata", ["data", "beta"]) == alike("bata", DirectSection.model_fields)
    assert "'beta'" in alike("bata", ["data", "beta"])
    assert "'data'" in alike("dcta", ["data", "beta"])


@pytest.mark.parametrize(
    ("word", "meant"),
    [("traim", "tether run"), ("inspct", "tether data inspect"), ("expotr", "'export'")],
)
def test_a_misspelt_command_leads_to_the_one_that_there_is(tmp_path, word, meant):
    said = tether(word, cwd=tmp_path)
    assert said.returncode == 2 and meant in said.stderr


def test_a_misspelt_model_and_a_missing_run_name_what_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "'tiny'" in near_model("tyni") and "'openai-community/gpt2'" in near_model("gpt2")
    for name in ("first", "second", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        if name != "other":
            (tmp_path / "runs" / name / "command.json").write_text("{}")
    for run in ("runs/frist", "frist"):
        error = missing_run(tmp_path.joinpath(run).relative_to(tmp_path))
        assert isinstance(error, MissingFileError)
        assert str(error).endswith("runs/first, runs/second.")
    assert "runs/first" in near_model("runs/frist")
    for words in (("watch",), ("resume",), ("report",), ("chat",)):
        said = tether(*words, "runs/frist", cwd=tmp_path)
        assert said.returncode == 2 and "runs/first" in said.stderr, said.stderr


@pytest.mark.parametrize("key", ["evaluate.judge", "pairs.judge", "grpo.evaluate.judge"])
def test_a_judge_that_is_a_name_is_told_the_way_to_a_server(tmp_path, key):
    (tmp_path / "r.toml").write_text('run = "r"\nmodel = { source = "tiny" }\n')
    said = tether("run", "r.toml", f"{key}=gpt-4", cwd=tmp_path)
    assert said.returncode == 2 and f"'{key}'" in said.stderr and "server = {" in said.stderr
    assert "Input" not in said.stderr


@pytest.mark.parametrize(("threads", "spins"), [("1", False), ("4", True)])
def test_one_thread_does_not_spin(monkeypatch, threads, spins):
    monkeypatch.setenv(THREADS, threads)
    monkeypatch.delenv(WAITING, raising=False)
    assert spin_while_waiting() == spins == ("spin" in _threads())
    monkeypatch.setenv(WAITING, "PASSIVE")
    assert not spin_while_waiting()


def test_a_text_longer_than_the_model_is_encoded_without_a_warning_of_the_library(caplog):
    encoder = ChatEncoder(tiny_tokenizer(), (0,))
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        encoder._tokenize("word " * 3000)
    finally:
        library.removeHandler(caplog.handler)
    assert not caplog.records


def test_an_export_of_votes_leaves_no_column_unused(tmp_path):
    votes = [{"annotator": name, "preference": 1.0} for name in ("ann", "ben")]
    rows = [
        {"prompt": f"{i}?", "chosen": "yes", "rejected": "no", "annotations": votes}
        for i in range(3)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for words in (("import", "p.db", "pairs.jsonl"), ("export", "p.db", "out.jsonl")):
        assert tether("prefs", *words, cwd=tmp_path).returncode == 0
    assert "seconds" in (tmp_path / "out.jsonl").read_text()
    bad = Quarantine()
    assert len(list(read(str(tmp_path / "out.jsonl"), Comparison, quarantine=bad))) == 3
    assert not bad.unused


def test_inspection_doctor_and_bench_say_one_thing_of_length():
    groups = [str(number) for number in range(40)]
    for share, which in ((1.0, "longer"), (0.0, "shorter"), (0.5, "")):
        longer = np.array([number < 40 * share for number in range(40)], dtype=np.float64)
        figures = {"longer_chosen": grouped_share(longer, groups).as_dict()}
        said = {length_warning(key, "it", figures) for key in ("bench", "direct", "reward")}
        assert all((f"the {which} answer" in text) == bool(which) for text in said)
        stage = SubRun("reward", summary=figures, config={"reward": {}})
        assert [type(found) for found in _checks_of_rows(stage)] == [Finding] * bool(which)
    assert length_warning("sft", "it", {"longer_chosen": figures["longer_chosen"]}) == ""
