"""Collecting preferences: who judges which pairs, what is kept where a collection is interrupted,
and what is refused.
"""

import contextlib
import json
import math
import zlib
from dataclasses import replace
from unittest import mock

import pytest
from sqlalchemy import select
from tests.runner.journeys import (
    LETTERS,
    AlphabetJudge,
    Killed,
    collection,
    journey,
    lines,
    numbered_prompts,
)

from tether.core.errors import ConfigError, RewardError, RunError
from tether.core.rundir import read_json
from tether.core.types import Comparison, Message, assistant, user
from tether.data.prepare import Limit, encode_comparisons
from tether.data.rows import write_rows
from tether.data.sources import Quarantine, read
from tether.judges.cache import CachedModel
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.people.annotation.store import Store
from tether.people.annotation.tables import TaskRow
from tether.people.annotation.work import Work
from tether.people.labels.annotators import in_true_order, true_orders
from tether.people.labels.votes import Opinion
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, load_policy
from tether.runner.methods import judge_agreement, pairs
from tether.runner.methods.pairs import WaitingError, comparisons_of, feedback_of
from tether.runner.run import run_recipe
from tether.settings.model import ModelConfig


def collected(root, **section):
    """The summary of [pairs], and the labels."""
    (summary,) = run_recipe(collection(root, **section)).values()
    labels = list(comparisons_of(root / "pairs"))
    assert len(labels) == summary["num_pairs"]
    return summary, labels


def test_judged_pairs_keep_the_tools_of_their_prompt(tmp_path):
    schema = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}
    asked = Message("user", "Rain in Bern?", tools=json.dumps([schema]))
    sides = (assistant("yes"),), (assistant("no"),)
    judged = [Comparison((asked,), *sides, id="1"), Comparison((user("a"),), *sides, id="2")]
    write_rows(tmp_path / "pairs.jsonl", judged)
    assert list(comparisons_of(tmp_path)) == judged
    quarantine = Quarantine()
    found = read(tmp_path / "pairs.jsonl", Comparison, quarantine=quarantine)
    assert [replace(pair, group="") for pair in found] == judged
    assert not quarantine.unused
    first, second = lines(tmp_path / "pairs.jsonl")
    assert json.loads(first["tools"]) == [schema] and "tools" not in second
    assert first["prompt"] == [{"role": "user", "content": "Rain in Bern?"}]


def test_simulated_annotators_follow_the_judge_as_often_as_is_asked(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import zlib\n\ndef lot(prompts, responses):\n    return [zlib.crc32(r.encode()) % 1000 "
        "for r in responses]\n",
    )
    judge = {"call": f"{tmp_path}/mine.py:lot"}  # two answers hardly ever tie
    summary, labels = collected(
        tmp_path / "run",
        prompts=12,
        labels=None,
        judge=judge,
        annotator_agreement=0.9,
    )
    assert (
        summary["annotator_agreement"] == pytest.approx(0.9, abs=0.06)
        and summary["annotator_gold_agreement"] > 0.9
    )
    assert all(len(c.annotations) == 3 and "gold_difference" in c.metadata for c in labels)
    score = lambda text: zlib.crc32(text.encode()) % 1000  # noqa: E731
    right = [score(c.chosen[0].content) > score(c.rejected[0].content) for c in labels]
    assert (
        sum(right) / len(right) == pytest.approx(summary["majority_gold_agreement"])
        and len(labels) > 40
    )
    assert "asked" not in summary and len(feedback_of(labels)) == 2 * len(labels)


def test_a_judge_may_be_ones_own_function_on_ones_own_prompts(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def longest(prompts, responses):\n    return [len(r) for r in responses]\n",
    )
    judge = {"call": f"{tmp_path}/mine.py:longest"}
    options = {"data": numbered_prompts(tmp_path), "judge": judge, "annotator_agreement": 0.99}
    summary, labels = collected(tmp_path / "run", **options)
    assert summary["asked"] == 12 and all(
        c.prompt[-1].content.startswith("Tell me about") for c in labels
    )
    longer = [len(c.chosen[0].content) >= len(c.rejected[0].content) for c in labels]
    assert sum(longer) >= 0.8 * len(longer)


def test_a_judge_that_scores_nothing_says_why(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from tether.core.types import Score\n\n"
        "def broken(prompts, responses):\n    return [Score(None, reason='no idea') for r in "
        "responses]\n\n"
        "def short(prompts, responses):\n    return [1.0]\n",
    )
    for name, message in (
        ("broken", "scored none of 32 answers: no idea"),
        ("short", "returned 1 scores for 8 responses"),
    ):
        with pytest.raises(RewardError, match=message):
            run_recipe(collection(tmp_path / "run", judge={"call": f"{tmp_path}/mine.py:{name}"}))
    collected(tmp_path / "run", judge=LETTERS)  # another judge goes on with the same answers


def test_an_answer_whose_score_failed_stands_in_no_pair(tmp_path):
    """A failed score is not a gold of 0: it is counted, and its answer is left out."""
    (tmp_path / "mine.py").write_text(
        "import zlib\nfrom tether.core.types import Score\n\n"
        "def odd(prompts, responses):\n"
        "    numbers = [zlib.crc32(r.encode()) % 1000 for r in responses]\n"
        "    return [Score(None, reason='odd') if n % 2 else Score(-5.0 - n) for n in numbers]\n",
    )
    judge = {"call": f"{tmp_path}/mine.py:odd"}
    summary, labels = collected(tmp_path / "run", prompts=12, labels=None, judge=judge)
    answers = [
        text for row in lines(tmp_path / "run/pairs/answers.jsonl") for text in row["responses"]
    ]
    number = lambda text: zlib.crc32(text.encode()) % 1000  # noqa: E731
    even = [text for text in answers if number(text) % 2 == 0]
    assert 0 < len(even) < len(answers) and summary["failed_scores"] == len(answers) - len(even)
    assert labels and all(
        number(side[0].content) % 2 == 0 for c in labels for side in (c.chosen, c.rejected)
    )
    assert summary["gold_of_answers"] == pytest.approx(
        sum(-5.0 - number(text) for text in even) / len(even),
    )


@pytest.mark.parametrize("labels", [None, 12])
@pytest.mark.parametrize("judge", [LETTERS, {"model": "tiny"}], ids=["function", "model"])
def test_an_answer_that_no_reader_takes_is_named_and_stands_in_no_pair(
    tmp_path,
    monkeypatch,
    judge,
    labels,
):
    """A model with byte tokens may sample the byte 0."""
    root, file = tmp_path / "run", tmp_path / "run/pairs/pairs.jsonl"
    chosen = {"labels": labels, "judge": judge}
    monkeypatch.setattr(pairs, "judge_model", lambda *_: AlphabetJudge(1000))
    with monkeypatch.context() as patch:
        patch.setattr(pairs, "write_rows", lambda *_: (_ for _ in ()).throw(RunError("stop")))
        with pytest.raises(RunError, match="stop"):
            run_recipe(collection(root, **chosen))
    answers = root / "pairs" / "answers.jsonl"
    first, *rest = lines(answers)
    first["responses"][:2] = ["nul\0", ""]
    answers.write_text("".join(json.dumps(row) + "\n" for row in (first, *rest)))
    summary, labelled = collected(root, **chosen)
    assert summary["quarantine"]["reasons"] == {"NUL character": 1}
    assert summary["quarantine"]["examples"][0]["id"] == first["id"]
    refused = Quarantine()
    assert len(list(read([file], Comparison, quarantine=refused))) == len(labelled) > 8
    assert refused.count == 0


def test_the_tiny_model_writes_what_readers_take():
    """Every token but specials is one byte, and none is the byte 0."""
    tokenizer = tiny_tokenizer()
    texts = [tokenizer.decode([token], skip_special_tokens=True) for token in range(len(tokenizer))]
    assert not any("\0" in text for text in texts)
    assert texts[5 : 5 + 94] == [chr(code) for code in range(33, 127)]
    every = "".join(map(chr, range(1, 0x250)))
    assert tokenizer.decode(tokenizer(every)["input_ids"]) == every
    (unknown,) = tokenizer("\0")["input_ids"]
    assert unknown == tokenizer.unk_token_id


def test_answers_that_are_there_are_not_given_again_and_none_is_mixed_with_others(
    tmp_path,
    monkeypatch,
):
    root = tmp_path / "run"

    def nobody(*_):
        raise ConfigError("nobody judges")

    with monkeypatch.context() as patch:
        patch.setattr(pairs, "text_judge", nobody)
        with pytest.raises(ConfigError, match="nobody"):
            run_recipe(collection(root))
    answers = root / "pairs" / "answers.jsonl"
    first, *_ = rows = lines(answers)
    assert len(rows) == 8
    answers.write_text(json.dumps(first) + "\n")
    with pytest.raises(RunError, match=r"drawn otherwise, by .*'temperature': 1\.0"):
        run_recipe(collection(root, temperature=0.5))
    assert lines(answers) == [first]
    collected(root)
    assert lines(answers) == rows
    monkeypatch.setattr(pairs, "load_policy", None)
    collected(root)


def test_the_model_answers_in_its_own_chat_template(tmp_path):
    """Where no [sft] folder carries the template, what samples pairs and held-out answers speaks as
    what trains does.
    """
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    settings = ModelConfig(source="tiny", chat_template=str(template))
    _, loaded = load_policy("tiny", settings)
    assert encoder_of(loaded).describe() == encoder_of(open_model(settings)).describe()
    assert "<{{ m.role }}>" in str(encoder_of(loaded).describe()["template"])


def test_pairs_of_the_same_run_are_the_same_and_of_another_seed_are_not(tmp_path):
    texts = [[(c.chosen, c.rejected) for c in collected(tmp_path / name)[1]] for name in ("a", "b")]
    assert texts[0] == texts[1]


def judged_by(path, *names, opinion):
    """Invite these people, and let each judge all that is theirs."""
    store = Store(path)
    for name in names:
        store.invite(name)
    work = Work(store)
    for person in store.annotators():
        turn = 0
        while held := work.next(person.id):
            turn += 1
            longer = len(held.first[0].content) >= len(held.second[0].content)
            work.judge(
                held.assignment,
                person.id,
                Opinion("first" if longer == opinion(person.name, turn) else "second"),
            )
    store.close()


def test_people_are_waited_for_and_their_labels_are_taken(tmp_path):
    path, root = tmp_path / "prefs.db", tmp_path / "run"
    asked = {"judge": "people", "store": str(path)}
    for _ in range(2):
        with pytest.raises(
            WaitingError,
            match=(
                r"0 of 12 comparisons are judged(.|\n)*tether "
                r"prefs serve .*prefs.db"
            ),
        ):
            run_recipe(collection(root, **asked))
    judged_by(path, "Ada", opinion=lambda *_: True)
    summary, labels = collected(root, **asked)
    assert summary["num_pairs"] == 12 and summary["store"] == str(path)
    assert all(len(c.chosen[0].content) >= len(c.rejected[0].content) for c in labels)
    assert collected(root, **asked)[0] == summary


def test_people_are_not_asked_again_where_the_run_has_moved(tmp_path):
    path = tmp_path / "prefs.db"
    asked = {"judge": "people", "store": str(path)}
    with pytest.raises(WaitingError):
        run_recipe(collection(tmp_path / "run", **asked))
    judged_by(path, "Ada", opinion=lambda *_: True)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert collected(tmp_path / "elsewhere", **asked)[0]["num_pairs"] == 12


@pytest.mark.parametrize(
    ("how", "low", "high"),
    [("majority", 1.0, 1.0), ("soft", 0.66, 0.67), ("dawid-skene", 0.8, 1.0)],
)
def test_several_people_are_believed_as_far_as_they_are_reliable(tmp_path, how, low, high):
    """Two follow length, the third nothing: where he disagrees, a share of votes doubts, and Dawid
    and Skene hardly do.
    """
    path = tmp_path / "prefs.db"
    asked = {"judge": "people", "store": str(path), "ask": 3, "how": how}
    with pytest.raises(WaitingError):
        run_recipe(collection(tmp_path / "run", **asked))
    judged_by(
        path,
        "Ada",
        "Bob",
        "Cleo",
        opinion=lambda name, turn: not (name == "Cleo" and turn % 2),
    )
    _, labels = collected(tmp_path / "run", **asked)
    assert len(labels) == 12 and all(
        len(c.chosen[0].content) >= len(c.rejected[0].content) for c in labels
    )
    split = [c.probability for c in labels if len({a.preference for a in c.annotations}) > 1]
    assert 4 <= len(split) <= 8 and all(low <= p <= high for p in split)


def without_a_majority(folder, how, *, flag):
    """A run in whose store two people contradict each other about all of its 12 pairs; where `flag`,
    one of them flags the first.
    """
    path = folder / "prefs.db"
    asked = {"judge": "people", "store": str(path), "ask": 2, "how": how}
    with pytest.raises(WaitingError, match="0 of 12 comparisons are judged, 0 wait"):
        run_recipe(collection(folder / "run", **asked))
    with contextlib.closing(Store(path)) as store:
        store.invite("Ada")
        (ada,) = store.annotators()
        if flag:
            held = Work(store).next(ada.id)
            Work(store).flag(held.assignment, ada.id, "both answers are empty talk")
    judged_by(path, "Bob", opinion=lambda name, _: name == "Ada")
    return asked


def test_soft_labels_wait_for_no_majority(tmp_path):
    _, labels = collected(tmp_path / "run", **without_a_majority(tmp_path, "soft", flag=False))
    assert len(labels) == 12
    assert all(c.tie and c.probability == 0.5 and len(c.annotations) == 2 for c in labels)


@pytest.mark.parametrize(
    ("how", "flag", "judged"),
    [("soft", True, 11), ("majority", False, 0), ("dawid-skene", False, 0)],
)
def test_a_pair_waits_for_an_expert_where_its_label_needs_one(tmp_path, how, flag, judged):
    asked = without_a_majority(tmp_path, how, flag=flag)
    text = f"{judged} of 12 comparisons are judged, {12 - judged} wait for an expert"
    with pytest.raises(WaitingError, match=text):
        run_recipe(collection(tmp_path / "run", **asked))


def test_two_runs_of_one_name_share_a_store_and_no_labels(tmp_path):
    path = tmp_path / "prefs.db"
    for place, temperature in (("x", 1.0), ("y", 0.9)):
        with pytest.raises(WaitingError, match="0 of 12"):
            run_recipe(
                collection(
                    tmp_path / place / "run",
                    judge="people",
                    store=str(path),
                    temperature=temperature,
                ),
            )
    with Store(path).reading() as session:
        tasks = session.execute(select(TaskRow.round, TaskRow.strategy)).all()
    assert len({name for name, _ in tasks}) == 2 and {strategy for _, strategy in tasks} == {
        "random",
    }


def test_a_model_judges_prompts_of_ones_own(tmp_path, monkeypatch):
    # a random model's judgements differ by less than bfloat16 tells apart
    monkeypatch.setenv("TETHER_CPU_DTYPE", "float32")
    summary, labels = collected(
        tmp_path / "run",
        judge={"model": "tiny"},
        data=numbered_prompts(tmp_path),
    )
    assert summary["num_pairs"] == len(labels) == 12
    assert all(
        c.prompt[-1].content.startswith("Tell me about") and 0 < c.probability < 1 for c in labels
    )
    assert len({c.probability for c in labels}) > 6


def test_a_judge_whose_budget_is_spent_ends_the_stage_and_loses_nothing(tmp_path, monkeypatch):
    judges, root = [AlphabetJudge(9), AlphabetJudge(100)], tmp_path / "run"
    monkeypatch.setattr(
        pairs,
        "judge_model",
        lambda config, folder: CachedModel(judges.pop(0), folder / "judge.sqlite"),
    )
    asked = {"judge": {"model": "tiny"}, "data": numbered_prompts(tmp_path)}
    with pytest.raises(
        RunError,
        match=r"8 of 12.*budget spent \(8\)",
    ):
        run_recipe(collection(root, **asked))
    cache, (second,) = root / "judge.sqlite", judges
    assert cache.is_file() and not (root / "pairs" / "pairs.jsonl").exists()
    # where answers are kept is no other run
    asked["judge"] = {"model": "tiny", "cache": str(cache)}
    summary, _ = collected(root, **asked)
    assert summary["num_pairs"] == 12 and second.budget == 100 - (24 - 9)
    assert summary["judge"] == "planted" and summary["position"]["bias"]["value"] == pytest.approx(
        0.3,
    )
    assert summary["num_judged"] == 12


def test_a_judge_by_principles_is_measured_against_people_first(tmp_path, monkeypatch):
    rows = [
        {"prompt": f"q{n}", "chosen": "yes" * (1 + n % 2), "rejected": "yes" * (2 - n % 2)}
        for n in range(8)
    ]
    (tmp_path / "people.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = AlphabetJudge(1000)
    monkeypatch.setattr(pairs, "judge_model", lambda config, folder: judge)
    asked = {
        "data": numbered_prompts(tmp_path),
        "agreement": str(tmp_path / "people.jsonl"),
        "judge": {"model": "tiny", "rubric": "constitution", "temperature": 2.0},
    }
    _, labels = collected(tmp_path / "run", **asked)
    report = json.loads((tmp_path / "run" / "judge.json").read_text())
    # people like short and long alike
    assert report["judge"] == "planted" and report["agreement"]["accuracy"]["value"] == 0.5
    assert len(labels) == 12 and all(c.chosen[0].content < c.rejected[0].content for c in labels)
    assert all(c.probability == pytest.approx(1 / (1 + math.exp(-0.5))) for c in labels)


def test_another_judge_is_measured_again_and_the_same_is_not(tmp_path, monkeypatch):
    people = tmp_path / "people.jsonl"
    people.write_text('{"prompt": "q", "chosen": "yes", "rejected": "yesyes"}\n')
    judge, seen = AlphabetJudge(1000), []

    def measured(judge, files):
        seen.append(judge.temperature)
        return [], {"people.jsonl": {"agreement": len(seen)}}

    monkeypatch.setattr(pairs, "judge_model", lambda config, folder: judge)
    monkeypatch.setattr(judge_agreement, "judge_files", measured)
    asked = {"data": numbered_prompts(tmp_path), "agreement": str(people)}
    for budget, temperature in ((0, 1.0), (0, 2.0), (0, 2.0), (1000, 2.0)):
        judge.budget = budget
        how = {**asked, "judge": {"model": "tiny", "temperature": temperature}}
        if budget:
            collected(tmp_path / "run", **how)
        else:
            with pytest.raises(RunError, match="without a label"):
                collected(tmp_path / "run", **how)
    assert seen == [1.0, 2.0]
    assert json.loads((tmp_path / "run" / "judge.json").read_text())["agreement"] == 2


def cut_before_judging(root, **section):
    with pytest.raises(Killed), mock.patch.object(pairs._Collector, "judged", side_effect=Killed):
        collected(root, **section)
    return lines(root / "pairs" / "answers.jsonl")


def test_answers_to_other_prompts_or_of_another_model_are_not_taken(tmp_path):
    """Nothing was judged, so that data and model may still change; ids stay as they were."""
    data, judge = tmp_path / "prompts.jsonl", {"judge": LETTERS, "prompts": 4, "labels": 6}

    def write(*texts):
        rows = ({"id": f"p{n}", "prompt": text} for n, text in enumerate(texts))
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("one", "two", "three", "four")
    asked = {"data": {"path": str(data)}, **judge}
    cut_before_judging(tmp_path / "run", **asked)
    write("one", "two", "drei", "vier")
    _, labels = collected(tmp_path / "run", **asked)
    _, fresh = collected(tmp_path / "fresh", **asked)
    manifests = [
        read_json(tmp_path / name / "pairs" / "manifest.json") for name in ("run", "fresh")
    ]
    assert manifests[0]["model"] == manifests[1]["model"]
    cut_before_judging(tmp_path / "whole", **asked)
    collected(tmp_path / "whole", **asked)  # opens no model
    assert (
        read_json(tmp_path / "whole" / "pairs" / "manifest.json")["model"] == manifests[0]["model"]
    )
    assert labels == fresh and {label.prompt[0].content for label in labels} & {"drei", "vier"}
    cut_before_judging(tmp_path / "other", **asked)
    model = {"source": str(tmp_path / "fine"), "dtype": "float32"}
    tiny_model(1).save_pretrained(tmp_path / "fine")
    tiny_tokenizer().save_pretrained(tmp_path / "fine")
    recipe = journey(
        tmp_path / "other",
        pairs=asked,
        sft=None,
        reward=None,
        ppo=None,
        evaluate=None,
        model=model,
    )
    with pytest.raises(RunError, match=r"drawn otherwise, by .*'model': 'tiny'"):
        run_recipe(recipe)


@pytest.mark.parametrize("gold_difference", [0.4, -0.4])
def test_gold_accuracy_is_asked_of_the_true_order(gold_difference):
    """Annotators said "good"; after the way to a ranking, which turns labels below one half, gold's
    answer must stand first.
    """
    loaded = open_model(ModelConfig(source="tiny"))
    label = Comparison(
        (user("hi"),),
        (assistant("good"),),
        (assistant("bad"),),
        metadata={"gold_difference": gold_difference},
    )
    (ranking,), _ = encode_comparisons([in_true_order(label)], encoder_of(loaded), Limit(64))
    best, worst = (
        loaded.tokenizer.decode(ranking.sequences[side[0]].ids)
        for side in (ranking.chosen, ranking.rejected)
    )
    assert ranking.probability == (1.0,)
    assert (
        ("good" in best and "bad" in worst)
        if gold_difference > 0
        else ("bad" in best and "good" in worst)
    )


def test_only_a_gold_that_knows_fluency_tells_pairs_apart_by_it():
    label = Comparison(
        (user("hi"),),
        (assistant("good"),),
        (assistant("bad"),),
        metadata={"gold_difference": 1.0},
    )
    near, far = (
        replace(label, metadata={"gold_difference": -1.0, "fluent_difference": d})
        for d in (-0.03, 0.2)
    )
    assert set(true_orders([label])) == {"gold_accuracy"}
    orders = true_orders([label, near, far])
    assert len(orders["gold_accuracy"]) == 3 and len(orders["gold_accuracy_equally_fluent"]) == 1
    assert orders["gold_accuracy_equally_fluent"][0].chosen[0].content == "bad"  # in gold's order


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"labels": 25}, "24 pairs at most"),
        ({"judge": None}, "pairs.judge"),
        ({"agreement": "people.jsonl"}, "no effect without a language model"),
        ({"judge": "people"}, "belong together"),
        ({"store": "prefs.db"}, "belong together"),
        ({"ask": 3}, "ask has no effect with this judge: it is of people"),
        ({"how": "soft"}, "how has no effect with this judge: it is of people"),
        (
            {"judge": {"model": "tiny"}, "num_annotators": 5},
            "num_annotators has no effect with this judge: it is of a function",
        ),
        ({"judge": {}}, "judge"),
        (
            {"labels": None, "choose": "length_matched"},
            "choose has no effect where all pairs are judged",
        ),
        ({"samples_per_prompt": 1}, "samples_per_prompt"),
    ],
)
def test_options_of_pairs_without_effect_are_refused(tmp_path, section, message):
    with pytest.raises(ConfigError, match=message):
        collection(tmp_path / "run", **section)
    assert not (tmp_path / "run").exists()


def test_more_prompts_than_there_are_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"pairs.prompts = 13.* 12"):
        run_recipe(collection(tmp_path / "run", prompts=13))
