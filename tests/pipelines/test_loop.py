"""Rounds of preferences on the tiny model: what they ask for, what they keep, and where people are waited for."""

import json
import math
import shutil

import pytest
from sqlalchemy import select

from tether.assemble import load_policy
from tether.core.config import build, packaged_recipe
from tether.core.errors import ConfigError, RunError
from tether.core.protocols import Verdict as JudgeVerdict
from tether.core.types import Comparison
from tether.data.sources import read
from tether.pipelines import labelling
from tether.pipelines.foundation import LetterJudge
from tether.pipelines.loop import Loop, LoopConfig
from tether.preferences.remembered import Remembered
from tether.preferences.store import Store
from tether.preferences.tables import TaskRow
from tether.preferences.work import Verdict, Work
from tether.report.page import write_report
from tether.report.rounds import read_rounds, rounds_figures

VALUES = {
    "judge": "letters",
    "max_prompts": 12,
    "seed": 3,
    "max_new_tokens": 8,
    "model": {"source": "tiny", "dtype": "float32"},
    "sft": {"epochs": 1, "batch_size": 8, "row_tokens": 256, "optimizer": {"learning_rate": 1e-3}},
    "loop": {"rounds": 2, "prompts": 8, "samples_per_prompt": 4, "labels": 12},
    "reward": {"prompts_per_update": 4, "heldout_fraction": 0.25, "optimizer": {"learning_rate": 1e-2}},
    "ppo": {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 2, "optimizer": {"learning_rate": 1e-2}},
}


def config(root, **changes):
    values = {**VALUES, "run": str(root), **{k: v for k, v in changes.items() if k != "loop"}}
    values["loop"] = {**VALUES["loop"], **changes.get("loop", {})}
    return build(LoopConfig, {key: value for key, value in values.items() if value is not None})


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("loop") / "run"
    return root, Loop(config(root, loop={"choose": "uncertain"})).run()


def test_every_round_adds_labels_of_new_answers_and_all_labels_teach(finished):
    root, summary = finished
    first, second = (rows(root / f"round-0{n}" / "pairs.jsonl") for n in (1, 2))
    assert {row["chosen_by"] for row in first} == {"random"} and {row["chosen_by"] for row in second} == {"uncertain"}
    assert not {row["item"] for row in first} & {row["item"] for row in second}
    labels = [list(read(str(root / f"round-0{n}" / "comparisons.jsonl"), Comparison)) for n in (1, 2)]
    assert [one["labels"] for one in summary["rounds"]] == [len(part) for part in labels]
    assert summary["rounds"][1]["labels_so_far"] == sum(map(len, labels))
    taught = json.loads((root / "round-02" / "reward" / "summary.json").read_text())
    assert taught["num_pairs"] + taught["num_heldout_pairs"] == sum(map(len, labels))
    noise = [json.loads((root / f"round-0{n}" / "annotators.json").read_text())["noise"] for n in (1, 2)]
    assert noise[0] == noise[1] > 0


def test_the_chosen_pairs_are_those_that_the_reward_model_is_least_sure_of(finished):
    root, _ = finished
    answers = {row["id"]: row for row in rows(root / "round-02" / "answers.jsonl")}
    chosen = [row["place"] for row in rows(root / "round-02" / "pairs.jsonl")]
    ids = list(answers)
    gaps = [abs(answers[ids[p]]["scores"][a] - answers[ids[p]]["scores"][b]) for p, a, b in chosen]
    every = [
        abs(row["scores"][a] - row["scores"][b]) for row in answers.values() for a in range(4) for b in range(a + 1, 4)
        if row["responses"][a] != row["responses"][b]
    ]  # fmt: skip
    assert sum(gaps) / len(gaps) < 0.8 * sum(every) / len(every)


def test_gold_is_that_of_the_judge_and_the_rounds_add_up(finished):
    root, summary = finished
    judge = lambda texts: [sum(c in "aeiou" for c in t.lower()) / max(1, len(t)) for t in texts]  # noqa: E731
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    texts = [json.loads((root / name / "answers.json").read_text())["texts"] for name in ("sft", "round-01", "round-02")]
    gold = [mean(judge(part)) for part in texts]
    for number, one in enumerate(summary["rounds"], 1):
        assert one["gold_before"] == pytest.approx(gold[0]) and one["gold_after"] == pytest.approx(gold[number])
        assert one["gold_gain_of_round"]["value"] == pytest.approx(gold[number] - gold[number - 1])
        bought = one["gold_per_100_labels"]
        assert bought["value"] == pytest.approx(
            (gold[number] - gold[number - 1]) * 100 / 12
        )  # those without a majority are paid too
        assert bought["low"] <= bought["value"] <= bought["high"] and one["asked"] == 12 >= one["labels"]


def test_gold_reads_the_same_answers_once(tmp_path, monkeypatch):
    read, plain, root = [], LetterJudge.score_texts, tmp_path / "run"
    monkeypatch.setattr(LetterJudge, "score_texts", lambda self, asked, texts: read.append([*texts]) or plain(self, asked, texts))
    Loop(config(root)).run()
    answers = [json.loads((root / name / "answers.json").read_text())["texts"] for name in ("sft", "round-01", "round-02")]
    assert [read.count(texts) for texts in answers] == [1, 1, 1]


def test_it_goes_on_where_it_was_interrupted_and_more_rounds_may_follow(tmp_path):
    root = tmp_path / "run"
    summary = Loop(config(root)).run()
    for gone in ("round-02/summary.json", "round-02/answers.json", "round-02/ppo"):
        path = root / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = Loop(config(root)).run()
    for one, other in zip(again["rounds"], summary["rounds"], strict=True):
        assert one["gold_after"] == other["gold_after"] and one["labels"] == other["labels"]
    longer = Loop(config(root, loop={"rounds": 3})).run()
    assert len(longer["rounds"]) == 3 and longer["rounds"][:2] == again["rounds"]


def test_people_are_waited_for_and_their_labels_are_taken(tmp_path):
    path = tmp_path / "prefs.db"
    asked = config(tmp_path / "run", loop={"judge": "people", "store": str(path), "rounds": 1})
    waiting = Loop(asked).run()
    assert waiting["rounds"] == [] and waiting["waiting"]["open"] == 12
    store = Store(path)
    store.invite("Ada")
    (person,) = store.annotators()
    work = Work(store)
    while held := work.next(person.id):
        longer = "first" if len(held.first[0].content) >= len(held.second[0].content) else "second"
        work.judge(held.assignment, person.id, Verdict(longer))
    store.close()
    summary = Loop(asked).run()
    assert summary["rounds"][0]["labels"] == 12
    labels = list(read(str(tmp_path / "run" / "round-01" / "comparisons.jsonl"), Comparison))
    assert all(len(c.chosen[0].content) >= len(c.rejected[0].content) for c in labels)
    assert Loop(asked).run()["rounds"] == summary["rounds"]


@pytest.mark.parametrize(("how", "low", "high"), [("majority", 1.0, 1.0), ("soft", 0.66, 0.67), ("dawid-skene", 0.8, 1.0)])
def test_several_people_are_believed_as_far_as_they_are_reliable(tmp_path, how, low, high):
    """Two follow length, the third nothing: where he disagrees, a share of votes doubts, and Dawid and Skene hardly do."""
    path = tmp_path / "prefs.db"
    loop = {"judge": "people", "store": str(path), "ask": 3, "how": how, "rounds": 1}
    Loop(config(tmp_path / "run", loop=loop)).run()
    store = Store(path)
    for name in ("Ada", "Bob", "Cleo"):
        store.invite(name)
    work = Work(store)
    for person in store.annotators():
        turn = 0
        while held := work.next(person.id):
            longer, shorter = "first", "second"
            if len(held.first[0].content) < len(held.second[0].content):
                longer, shorter = shorter, longer
            turn += 1
            work.judge(held.assignment, person.id, Verdict(shorter if person.name == "Cleo" and turn % 2 else longer))
    store.close()
    Loop(config(tmp_path / "run", loop=loop)).run()
    labels = list(read(str(tmp_path / "run" / "round-01" / "comparisons.jsonl"), Comparison))
    assert len(labels) == 12 and all(len(c.chosen[0].content) >= len(c.rejected[0].content) for c in labels)
    split = [c.probability for c in labels if len({a.preference for a in c.annotations}) > 1]
    assert 4 <= len(split) <= 8 and all(low <= p <= high for p in split)


def test_a_model_judges_prompts_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TETHER_CPU_DTYPE", "float32")  # a random model's judgements differ by less than bfloat16 tells apart
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Tell me about number {n}.\n" for n in range(10)), encoding="utf-8")
    asked = {"judge": "model", "model": {"model": "tiny"}, "data": {"path": str(prompts)}, "rounds": 1}
    summary = Loop(config(tmp_path / "run", sft=None, loop=asked)).run()
    labels = list(read(str(tmp_path / "run" / "round-01" / "comparisons.jsonl"), Comparison))
    assert summary["rounds"][0]["labels"] == len(labels) == 12 and "gold_gain" not in summary["rounds"][0]
    assert all(c.prompt[-1].content.startswith("Tell me about") and 0 < c.probability < 1 for c in labels)
    assert len({c.probability for c in labels}) > 6


def test_direct_learning_takes_the_same_road(tmp_path):
    direct = {"epochs": 1, "heldout_fraction": 0.0, "optimizer": {"learning_rate": 1e-2}}
    summary = Loop(config(tmp_path / "run", ppo=None, direct=direct)).run()
    assert len(summary["rounds"]) == 2 and "reward" not in summary["rounds"][1]
    assert all(one["kl"]["value"] > 0 for one in summary["rounds"])


def test_direct_learning_may_go_on_for_more_rounds_with_pairs_that_a_reward_model_chose(tmp_path):
    direct = {"epochs": 1, "heldout_fraction": 0.0, "optimizer": {"learning_rate": 1e-2}}
    for rounds, choose in ((2, "uncertain"), (2, "random")):
        root = tmp_path / choose
        Loop(config(root, ppo=None, direct=direct, loop={"rounds": rounds, "choose": choose})).run()
        Loop(config(root, ppo=None, direct=direct, loop={"rounds": rounds + 1, "choose": choose})).run()
        scores = [row["scores"][0] for row in rows(root / "round-03" / "answers.jsonl")]
        assert {row["chosen_by"] for row in rows(root / "round-03" / "pairs.jsonl")} == {choose}
        assert all((score is not None) == (choose == "uncertain") for score in scores)
        assert (root / "round-02" / "reward").is_dir() == (choose == "uncertain")


def test_no_prompt_is_answered_twice_in_a_round(tmp_path):
    Loop(config(tmp_path / "run")).run()  # 12 prompts, 8 a round: the second round crosses the end of the list
    asked = [[row["id"] for row in rows(tmp_path / "run" / f"round-0{n}" / "answers.jsonl")] for n in (1, 2)]
    assert [len(set(part)) for part in asked] == [8, 8] and len({*asked[0], *asked[1]}) == 12


class Judge:
    """Speaks core.protocols.ChatModel: likes the first place a little and the alphabet's beginning more, within its budget."""

    name = "planted"

    def __init__(self, budget):
        self.budget = budget

    def verdicts(self, conversations, options, *, told=None):
        found = []
        for place, talk in enumerate(conversations):
            first, second = (part.split("]\n", 1)[1].split("\n\n[")[0] for part in talk[0].content.split("[answer ")[1:3])
            self.budget -= 1
            odds = 0.3 + (second > first) - (second < first)
            answered = JudgeVerdict((odds, 0.0)) if self.budget >= 0 else JudgeVerdict(None, reason="budget spent")
            found.append(answered)
            if told:
                told(place, answered)
        return found

    def usage(self):
        return {"questions": 1}


@pytest.fixture
def own(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"Tell me about number {n}.\n" for n in range(10)), encoding="utf-8")
    return {"judge": "model", "model": {"model": "tiny"}, "data": {"path": str(prompts)}, "rounds": 1}


def test_a_judge_whose_budget_is_spent_ends_the_loop_and_loses_nothing(tmp_path, own, monkeypatch):
    judges = [Judge(9), Judge(100)]
    kept = tmp_path / "run" / "judge.sqlite"
    monkeypatch.setattr(labelling, "configured", lambda config, folder: Remembered(judges.pop(0), folder / "judge.sqlite"))
    with pytest.raises(RunError, match=r"left 8 of 12 pairs of .*round-01 without a label: budget spent \(8\)"):
        Loop(config(tmp_path / "run", sft=None, loop=own)).run()
    assert kept.is_file() and not (tmp_path / "run" / "round-01" / "comparisons.jsonl").exists()
    second = judges[0]
    own["model"] = {**own["model"], "cache": str(kept)}  # where answers are kept is no other run
    summary = Loop(config(tmp_path / "run", sft=None, loop=own)).run()
    assert summary["rounds"][0]["labels"] == 12 and second.budget == 100 - (24 - 9)
    told = json.loads((tmp_path / "run" / "round-01" / "annotators.json").read_text())
    assert told["judge"] == "planted" and told["position"]["bias"]["value"] == pytest.approx(0.3) and told["num_judged"] == 12


def test_a_judge_by_principles_is_measured_against_people_first(tmp_path, own, monkeypatch):
    pairs = [{"prompt": f"q{n}", "chosen": "yes" * (1 + n % 2), "rejected": "yes" * (2 - n % 2)} for n in range(8)]
    (tmp_path / "people.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    judge = Judge(1000)
    monkeypatch.setattr(labelling, "configured", lambda config, folder: judge)
    own |= {"agreement": str(tmp_path / "people.jsonl"), "model": {"model": "tiny", "rubric": "constitution", "temperature": 2.0}}
    Loop(config(tmp_path / "run", sft=None, loop=own)).run()
    report = json.loads((tmp_path / "run" / "judge.json").read_text())
    assert report["judge"] == "planted" and report["agreement"]["accuracy"]["value"] == 0.5  # people like short and long alike
    labels = list(read(str(tmp_path / "run" / "round-01" / "comparisons.jsonl"), Comparison))
    assert len(labels) == 12 and all(c.chosen[0].content < c.rejected[0].content for c in labels)
    assert all(c.probability == pytest.approx(1 / (1 + math.exp(-0.5))) for c in labels)


def test_two_loops_of_one_name_share_a_store_and_no_labels(tmp_path):
    path = tmp_path / "prefs.db"
    for place, seed in (("x", 3), ("y", 4)):
        asked = config(tmp_path / place / "run", seed=seed, loop={"judge": "people", "store": str(path), "rounds": 1})
        assert Loop(asked).run()["waiting"]["open"] == 12
    with Store(path).reading() as session:
        tasks = session.execute(select(TaskRow.round, TaskRow.strategy)).all()
    assert len({name for name, _ in tasks}) == 2 and {strategy for _, strategy in tasks} == {"random"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loop": {"labels": 25}}, "24 pairs at most"),
        ({"loop": {"prompts": 13}}, "there are 12"),
        ({"loop": {"agreement": "people.jsonl"}}, "no effect without a model"),
        ({"ppo": {**VALUES["ppo"], "evaluate": {"every": 1, "prompts": 4, "keep": "best"}}}, "leave it out"),
        ({"ppo": None}, "exactly one of"),
        ({"loop": {"judge": "people"}}, "belong together"),
        ({"loop": {"judge": "model"}}, "belong together"),
        ({"loop": {"ask": 3}}, "no effect"),
        ({"loop": {"how": "soft"}}, "without people"),
        ({"loop": {"choose": "disagreement"}}, "reward.members"),
        ({"loop": {"choose": "information"}}, "reward.members"),
        ({"sft": None}, "loop.data"),
        ({"pairs": {"samples_per_prompt": 3}}, "pairs.samples_per_prompt has no effect"),
        ({"loop": {"data": {"path": __file__}}}, "gold judge knows the packaged prompts"),
    ],
)
def test_what_cannot_be_is_refused_at_once(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        Loop(config(tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "round-01").exists()


def test_the_packaged_recipe_is_one():
    import tomllib

    values = tomllib.loads(packaged_recipe("loop").read_text(encoding="utf-8"))
    assert build(LoopConfig, values).policy[0] == "ppo"


def test_the_page_tells_every_round_and_chat_finds_the_last_policy(finished):
    root, summary = finished
    page = write_report(root).read_text(encoding="utf-8")
    total = summary["rounds"][-1]["labels_so_far"]
    assert f"2 rounds, {total} labels" in page and "Gold over labels" in page and "Samples from the last round" in page
    drawn = rounds_figures(read_rounds(root))[0].drawing["data"][0]
    first, last = summary["rounds"]
    assert drawn["x"] == [0, first["labels_so_far"], total]
    assert drawn["y"] == pytest.approx([first["gold_before"], first["gold_after"], last["gold_after"]], rel=1e-4)
    role, _ = load_policy(str(root))
    other, _ = load_policy(str(root / "round-02" / "ppo"))
    pairs = zip(role.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    assert role.adapter == "policy" and all((a == b).all() for a, b in pairs)
