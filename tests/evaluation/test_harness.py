"""lm-eval's tasks on a policy: tether's own figures on the same rows, and no generator of the process
is touched.
"""

import copy
import json
import random

import numpy as np
import pytest
import torch
from tests.evaluation.oracles.lm_eval_numbers import METRICS, TASKS, rows, tokenizer

from tether.core.errors import ConfigError, DataError
from tether.data.chat import ChatEncoder
from tether.evaluation.multiple_choice import MultipleChoice, encode_choice
from tether.evaluation.questions import read_questions
from tether.evaluation.suite import MeasuredPolicy, Suite
from tether.models.tiny import tiny_model
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.runner.assembly.evaluation import harness
from tether.runner.assembly.evaluation.suites import evaluate_model
from tether.stats.means import grouped_mean


@pytest.fixture(scope="module")
def policy():
    words = tokenizer()
    encoder = ChatEncoder(words, (words.eos_token_id,))
    role = Role(tiny_model(vocab=360))
    return MeasuredPolicy(role, encoder, LocalEngine(role, encoder))


@pytest.fixture
def task(tmp_path):
    def written(layout, **more):
        path = tmp_path / f"{layout}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows(layout))), encoding="utf-8")
        table = {
            "task": layout,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(path)}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "metric_list": [{"metric": metric} for metric in METRICS],
            **TASKS[layout],
        }
        if layout == "hellaswag":
            table["process_docs"] = pytest.importorskip(
                "lm_eval.tasks.hellaswag.utils",
            ).process_docs
        return path, {**table, **more}

    return written


def states():
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, keys.tolist(), *rest), torch.get_rng_state().tolist()


@pytest.mark.parametrize("layout", TASKS)
def test_the_figures_are_those_of_tethers_own_evaluator(policy, task, layout):
    pytest.importorskip("lm_eval")
    path, table = task(layout)
    theirs = harness.HarnessTasks([table])(policy, 0)
    own = MultipleChoice(read_questions(path))(policy, 0)
    for metric in METRICS:
        assert theirs[f"{layout}/{metric}"] == own[metric]
        measured = [theirs.rows[f"{layout}/{metric}"][str(place)] for place in range(60)]
        assert measured == list(own.rows[metric].values())


def test_no_generator_of_the_process_is_touched(policy, task, tmp_path):
    pytest.importorskip("lm_eval")
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    before = states()
    suite = Suite([harness.HarnessTasks([task("arc")[1]], limit=20)], tmp_path / "run")
    first, second = suite.measure(policy, 0, "before"), suite.measure(policy, 3, "after")
    assert states() == before
    assert second[0]["change"]["arc/acc"]["difference"]["value"] == 0
    assert first[0]["figures"]["arc/acc"]["count"] == 20


def with_examples(path, table):
    files = {"data_files": {"test": str(path), "train": str(path)}}
    return {**table, "dataset_kwargs": files, "fewshot_split": "train"}


@pytest.mark.parametrize("layout", ["arc", "mmlu"])
def test_with_examples_the_rows_are_those_of_lm_evals_own_model(policy, task, layout):
    """The oracle is lm-eval with its own HFLM on the same weights."""
    lm_eval = pytest.importorskip("lm_eval")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    table = with_examples(*task(layout))
    oracle = lm_eval.simple_evaluate(
        model=huggingface.HFLM(
            pretrained=copy.deepcopy(policy.role.causal_model),
            tokenizer=policy.encoder.tokenizer,
            batch_size=4,
            device="cpu",
        ),
        tasks=[table],
        num_fewshot=3,
        limit=24,
        bootstrap_iters=0,
        random_seed=None,
        numpy_random_seed=None,
        torch_random_seed=None,
    )
    own = harness.HarnessTasks([table], num_fewshot=3, limit=24)(policy, 0)
    for metric in METRICS:
        rows = {str(one["doc_id"]): one[metric] for one in oracle["samples"][layout]}
        assert own.rows[f"{layout}/{metric}"] == rows
        assert own[f"{layout}/{metric}"].value == pytest.approx(
            oracle["results"][layout][f"{metric},none"],
        )


def test_a_group_has_the_interval_of_all_its_rows(policy, task, tmp_path):
    tasks = pytest.importorskip("lm_eval.tasks")
    folder = tmp_path / "tasks"
    folder.mkdir()
    names = [f"part_{layout}" for layout in ("arc", "mmlu")]
    both = {
        "group": "both",
        "task": names,
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    tables = [{**task(layout)[1], "task": f"part_{layout}"} for layout in ("arc", "mmlu")]
    for name, table in zip(("both", *names), (both, *tables), strict=True):
        (folder / f"{name}.yaml").write_text(json.dumps(table), encoding="utf-8")
    manager = tasks.TaskManager(include_path=str(folder), include_defaults=False)
    figures = harness.HarnessTasks(["both"], limit=30, task_manager=manager)(policy, 0)
    rows = [
        value for part in ("arc", "mmlu") for value in figures.rows[f"part_{part}/acc"].values()
    ]
    whole = figures["both/acc"]
    assert (whole.count, whole.value) == (60, pytest.approx(np.mean(rows)))
    assert whole == grouped_mean(np.array(rows), None)
    assert set(figures.rows["both/acc"]) == {
        f"part_{part}/{row}" for part in ("arc", "mmlu") for row in range(30)
    }


def test_examples_in_the_prompt_are_the_same_each_time(policy, task):
    pytest.importorskip("lm_eval")
    table = with_examples(*task("arc"))
    figures = [harness.HarnessTasks([table], num_fewshot=2, limit=12)(policy, 0) for _ in range(2)]
    assert figures[0] == figures[1] and figures[0].rows == figures[1].rows


def test_the_likeliest_continuation_is_marked_and_summed_from_the_models_own_logits(policy):
    words, model = policy.encoder.tokenizer, policy.role.causal_model
    ids = words.encode("river stone")
    with torch.no_grad():
        for _ in range(3):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    start = len(ids) - 3
    sums = sum(float(logprobs[t - 1, ids[t]]) for t in range(start, len(ids)))
    other = [*ids[:-1], (ids[-1] + 1) % 300]
    (value, best), (_, less) = harness._read(
        policy,
        [harness._joined(row[:start], row[start:]) for row in (ids, other)],
    )
    assert value == pytest.approx(sums, abs=1e-4)
    assert (best, less) == (True, False)


def test_an_answer_is_the_greedy_one_up_to_the_stop(policy):
    words, model = policy.encoder.tokenizer, policy.role.causal_model
    ids = words.encode("music table")
    start = len(ids)
    with torch.no_grad():
        while len(ids) < start + 6:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    whole = words.decode(ids[start:])
    answer = harness._answer(policy, policy.engine, "music table", {"max_gen_toks": 6})
    assert answer == whole.split("<|end|>")[0]
    stop = answer[2:4]
    assert (
        harness._answer(policy, policy.engine, "music table", {"max_gen_toks": 6, "until": [stop]})
        == (answer.split(stop)[0])
    )


def test_a_long_text_is_read_in_windows_and_a_request_keeps_its_end(policy):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    model = harness.harness_model(policy)
    text = ("river stone cloud " * 400).strip()
    (value,) = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
    count = len(policy.encoder.tokenizer.encode(text))
    assert count > 1024 and value < 0
    long = Instance("loglikelihood", {}, (text, " horse"), 0)
    ((scored, _),) = model.loglikelihood([long])
    kept = encode_choice(policy.encoder.tokenizer, text, " horse").ids[-1024:]
    with torch.no_grad():
        logprobs = policy.role.causal_model(torch.tensor([kept])).logits[0].log_softmax(-1)
    own = len(policy.encoder.tokenizer.encode(text + " horse")) - count
    wanted = sum(float(logprobs[t - 1, kept[t]]) for t in range(1024 - own, 1024))
    assert scored == pytest.approx(wanted, abs=1e-3)


def test_without_lm_eval_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs lm_eval.*pip install 'tether-rlhf\[lm-eval\]'"):
        harness.HarnessTasks(["arc_easy"])


def test_a_seed_cannot_be_set(monkeypatch):
    monkeypatch.setattr(harness, "require", lambda *_: None)
    with pytest.raises(ConfigError, match="torch_random_seed is set"):
        harness.HarnessTasks(["arc_easy"], torch_random_seed=1)


def test_the_suite_lm_eval_takes_files_and_measures_as_multiple_choice_does(task, tmp_path):
    pytest.importorskip("lm_eval")
    path, table = task("arc")
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({**table, "task": "mine"}), encoding="utf-8")
    report = evaluate_model("tiny", "lm_eval", data=[f"lm_eval={file}"], limit=20)
    own = evaluate_model("tiny", "multiple_choice", data=[f"multiple_choice={path}"], limit=20)
    (theirs,), (ours,) = report["evaluators"], own["evaluators"]
    for metric in METRICS:
        assert theirs["figures"][f"mine/{metric}"] == ours["figures"][metric]


def test_an_unknown_task_and_one_whose_rows_are_missing_are_named(tmp_path):
    pytest.importorskip("lm_eval")
    with pytest.raises(ConfigError, match=r"no task 'arc_esy'.*arc_easy"):
        evaluate_model("tiny", "lm_eval", data=["lm_eval=arc_esy"])
    file = tmp_path / "lost.yaml"
    files = {"data_files": {"test": str(tmp_path / "nowhere.jsonl")}}
    lost = {"task": "lost", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    file.write_text(json.dumps(lost), encoding="utf-8")
    with pytest.raises(DataError, match=r"lost.yaml' of lm-eval cannot be loaded \(FileNotFound"):
        evaluate_model("tiny", "lm_eval", data=[f"lm_eval={file}"])


def test_a_file_of_a_task_is_called_a_program_before_it_runs(tmp_path, monkeypatch, caplog):
    (tmp_path / "base.yaml").write_text("include: mine.yaml\nprocess_docs: !function more.docs\n")
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ninclude: 'base.yaml'\nprocess_results: !function utils.score\n",
    )
    (tmp_path / "plain.yaml").write_text("task: plain\ndoc_to_text: '{{question}}'\n")
    loaded = []

    class Manager:
        all_tasks = ("arc_easy",)

        def load(self, task):
            loaded.append((task, caplog.text))
            return {"tasks": {}, "groups": {}}

    monkeypatch.setattr(harness, "require", lambda *_: None)
    monkeypatch.setattr(harness, "_manager", lambda _: Manager())
    harness.once.cache_clear()
    files = [str(tmp_path / name) for name in ("mine.yaml", "plain.yaml")]
    harness.look_at_tasks(["arc_easy", *files])
    said = [words for _, words in loaded]
    assert said[0] == "" and f"{files[0]} is a program" in said[1]
    assert "utils.score, more.docs with your" in said[1]
    assert f"{files[1]} is a program: lm-eval runs its templates with your rights" in said[2]


@pytest.mark.parametrize(
    ("more", "known"),
    [
        ({}, {f"mine/{metric}" for metric in METRICS}),
        ({"output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}, set()),
        ({"filter_list": [{"name": "one", "filter": [{"function": "take_first"}]}]}, set()),
    ],
)
def test_the_names_of_figures_are_known_before_anything_is_measured(task, tmp_path, more, known):
    """Where they are known, they are those of the measurement."""
    pytest.importorskip("lm_eval")
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({**task("arc")[1], **more, "task": "mine"}), encoding="utf-8")
    assert set(harness.look_at_tasks([str(file)])) == known
    report = evaluate_model("tiny", "lm_eval", data=[f"lm_eval={file}"], limit=2)
    (record,) = report["evaluators"]
    assert set(record["figures"]) == (known or set(record["figures"])) != set()
