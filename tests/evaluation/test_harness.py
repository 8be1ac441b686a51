"""lm-eval's tasks on a policy: tether's own figures on the same rows, and no generator of the process
is touched.
"""

import json
import random

import numpy as np
import pytest
import torch
from tests.evaluation.oracles.lm_eval_numbers import METRICS, TASKS, rows, tokenizer

from tether.core.errors import ConfigError
from tether.data.chat import ChatEncoder
from tether.evaluation.multiple_choice import MultipleChoice, encode_choice
from tether.evaluation.questions import read_questions
from tether.evaluation.suite import MeasuredPolicy, Suite
from tether.models.tiny import tiny_model
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.tools import harness


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
                "lm_eval.tasks.hellaswag.utils"
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
    first, second = suite.before(policy), suite.after(policy, 3)
    assert states() == before
    assert second[0]["change"]["arc/acc"]["difference"]["value"] == 0
    assert first[0]["figures"]["arc/acc"]["count"] == 20


def test_examples_in_the_prompt_are_the_same_each_time(policy, task):
    pytest.importorskip("lm_eval")
    path, table = task("arc")
    table |= {"dataset_kwargs": {"data_files": {"test": str(path), "train": str(path)}},
              "fewshot_split": "train"}  # fmt: skip
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
        policy, [harness._joined(row[:start], row[start:]) for row in (ids, other)]
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
    answer = harness._answer(policy, "music table", {"max_gen_toks": 6})
    assert answer == whole.split("<|end|>")[0]
    stop = answer[2:4]
    assert (
        harness._answer(policy, "music table", {"max_gen_toks": 6, "until": [stop]})
        == (answer.split(stop)[0])
    )


def test_a_long_text_is_read_in_windows_and_a_request_keeps_its_end(policy):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    model = harness.harness_model(policy)
    text = "river stone cloud " * 400
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
    with pytest.raises(ConfigError, match="torch_random_seed is set by tether"):
        harness.HarnessTasks(["arc_easy"], torch_random_seed=1)
