import ast
import gzip
import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from tether.core.errors import ConfigError, DataError, RunError
from tether.core.protocols import RewardSource
from tether.core.thoughts import opened_by
from tether.core.types import Problem, Prompt, Rollout, Sampling, StopReason, user
from tether.data.formats.solved import (
    read_gsm8k,
    read_gsm8k_solutions,
    read_gsm8k_truth,
    read_problem,
)
from tether.rewards import verifiable
from tether.rewards.answers import find_answer
from tether.rewards.latex import read_number
from tether.rewards.sandbox import Sandbox
from tether.rewards.verifiable import VerifiableReward, problem_prompt, reasoning_gym_prompts
from tether.settings.reading import build
from tether.settings.rewards import VerifiableConfig

needs_reasoning_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason=("needs reasoning-gym: pip install 'tether-rlhf[verify]'"),
)
TOWER = r"9^{9^{9^9}}"
"""math-verify multiplies it out, which no machine will see the end of."""


def rollout(text, answer=None, **metadata):
    prompt = Prompt((user("How many?"),), "p", {"answer": answer, **metadata})
    return Rollout((1,), (2,), (0.0,), StopReason.STOP_TOKEN, text, 0, 0, Sampling(), prompt)


def values(reward, pairs):
    return [
        score.value for score in reward.score([rollout(text, answer) for text, answer in pairs])
    ]


def reasons(reward, pairs):
    """Why checks gave nothing."""
    scores = reward.score([rollout(text, answer) for text, answer in pairs])
    return [score.reason for score in scores if score.value is None]


@pytest.fixture(scope="module")
def mathematics():
    with VerifiableReward(VerifiableConfig(kind="math", time_limit=20)) as reward:
        yield reward


@pytest.fixture(scope="module")
def gsm8k():
    with VerifiableReward(VerifiableConfig(kind="gsm8k", time_limit=20)) as reward:
        yield reward


@pytest.fixture
def sandbox(tmp_path, monkeypatch):
    """A maker of sandboxes around the checks below, which only the workers import."""
    (tmp_path / "wild_checks.py").write_text(WILD_CHECKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def make(name, workers=1, seconds=20.0, memory_mb=512):
        made.append(
            Sandbox(f"wild_checks:{name}", workers=workers, seconds=seconds, memory_mb=memory_mb),
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid, seconds):
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


WILD_CHECKS = """
import faulthandler, os, socket, subprocess, sys, time

def echo():
    return lambda number, pause=0.0: (time.sleep(pause), print("not a reply", flush=True), number)[2]

def whereabouts():
    def check(pause=0.0):
        start = time.monotonic()
        time.sleep(pause)
        seen = {"modules": sorted(sys.modules), "names": sorted(os.environ)}
        return {"pid": os.getpid(), "span": (start, time.monotonic()), **seen}
    return check

def endings():
    def burn():
        while True:
            pass
    return lambda how: {
        "sleep": lambda: time.sleep(60), "burn": burn, "power": lambda: 9 ** 9 ** 9, "crash": faulthandler._sigsegv,
        "memory": lambda: bytearray(1 << 32), "exit": lambda: sys.exit(0), "error": lambda: [][1], "fine": lambda: "well",
    }[how]()

def deeds():
    return lambda deed, path: {
        "write": lambda: open(path, "w").write("x"), "shell": lambda: os.system("touch " + path),
        "process": lambda: subprocess.run(["touch", path]), "remove": lambda: os.remove(__file__),
        "network": lambda: socket.socket().connect(("127.0.0.1", 9)),
    }[deed]()

def broken():
    raise ImportError("no such library")
"""


# Answers


RIGHT = [
    (r"so \boxed{1,000}", "1000"),
    (r"so \boxed{1000}", "1,000"),
    (r"\boxed{0.5}", r"\frac{1}{2}"),
    (r"\boxed{1/2}", "0.5"),
    (r"\boxed{\frac{1}{2}}", "1/2"),
    (r"\boxed{\frac{2}{4}}", r"\frac12"),
    (r"\boxed{-3}", "-3.0"),
    (r"First \boxed{7}, no: \boxed{8}", "8"),
    (r"\boxed{5 \text{ cm}}", "5"),
    (r"\boxed{5}", r"5\text{ cm}"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{**18.**}", "18"),
    (r"\boxed{18\ }", "18"),
    (r"\boxed{x = 18}", "18"),
    (r"\boxed{3 + 2x}", "2x+3"),
    (r"\boxed{(x-1)(x+1)}", "x^2 - 1"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    (r"\boxed{2, 1}", r"\{1, 2\}"),
    (r"\boxed{\text{evelyn}}", r"\text{Evelyn}"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
    # as written: math-verify cannot read it
    (r"\boxed{\frac{12}{5,\!525}}", r"\frac{12}{5,\!525}"),
]
WRONG = [
    (r"\boxed{3}", "-3"),
    (r"First \boxed{8}, no: \boxed{7}", "8"),
    ("the answer is 8", "8"),
    (r"\boxed{}", "8"),
    (r"\boxed{8", "8"),
    ("", "8"),
    (r"\boxed{0.33}", r"\frac13"),
    (r"\boxed{(2, 1)}", "(1,2)"),
    (r"\boxed{1, 2, 3}", r"\{1, 2\}"),
    (r"\boxed{\frac{}", "8"),
]


def test_mathematics_is_judged_by_its_meaning(mathematics):
    assert values(mathematics, RIGHT) == [1.0] * len(RIGHT)
    assert values(mathematics, WRONG) == [0.0] * len(WRONG)
    assert isinstance(mathematics, RewardSource)


def test_fractions_are_equal_exactly_when_python_says_so(mathematics):
    draw = random.Random(0)
    pairs, expected = [], []
    for _ in range(150):
        a, b = (Fraction(draw.randint(-6, 6), draw.choice([1, 2, 4, 5, 8])) for _ in range(2))
        written = [
            rf"\frac{{{b.numerator}}}{{{b.denominator}}}",
            f"{b.numerator}/{b.denominator}",
            str(float(b)),
        ]
        pairs.append((rf"\boxed{{{draw.choice(written)}}}", str(float(a))))
        expected.append(float(a == b))
    assert 1.0 in expected
    assert values(mathematics, pairs) == expected


def test_an_answer_that_is_missing_or_wrong_says_so_and_a_known_answer_that_nobody_can_read_is_none(
    mathematics,
):
    missing, wrong, *unreadable = mathematics.score(
        [
            rollout("8", "8"),
            rollout(r"\boxed{7}", "8"),
            rollout(r"\boxed{7}", r"\frac{"),
            # of which a lenient reader sees the 2
            rollout(r"\boxed{2}", r"\frac \pi4 + 2 - \sqrt2"),
        ],
    )
    assert (missing.value, missing.parts) == (0.0, {"correct": 0.0})
    assert "no answer found" in missing.reason and "boxed" in missing.reason
    assert wrong.value == 0.0 and "'7'" in wrong.reason
    assert [score.value for score in unreadable] == [None, None]
    assert r"\\frac{" in unreadable[0].reason and unreadable[0].parts == {}


GSM8K_RIGHT = [
    ("16 - 3 - 4 = 9\n#### 18", "18"),
    ("#### 17\nOr rather\n#### 18", "18"),
    ("#### $1,000.00", "1000"),
    ("#### -5", "-5"),
    ("#### -$5", "-5"),
    ("#### 18 eggs in 2 days", "18"),
    ("####\n18", "18"),
    ("#### 1/2", "0.5"),
    (r"#### \frac{1}{2}", "0.5"),
    (r"#### \boxed{18}", "18"),
    ("The answer is 18.", "18"),
    ("The answer is: 9 * 2 = 18 dollars", "18"),
    ("**Final answer:** 18", "18"),
    ("She makes 18 a day\nA: 18", "18"),
    (r"The answer is $\boxed{18}$.", "18"),
]
GSM8K_WRONG = [
    ("18", "18"),
    ("#### 18", "-18"),
    ("#### eighteen", "18"),
    ("#### 1", "18"),
    ("####", "18"),
    ("#### 1.8", "18"),
]


def test_gsm8k_answers_follow_hashes_or_a_phrase(gsm8k):
    assert values(gsm8k, GSM8K_RIGHT) == [1.0] * len(GSM8K_RIGHT)
    assert values(gsm8k, GSM8K_WRONG) == [0.0] * len(GSM8K_WRONG)


def test_the_last_number_counts_only_where_it_is_asked_for():
    responses = [
        ("I have 3, so 18 in all.", "18"),
        ("18 is more than 3", "18"),
        ("#### 5, not 18", "18"),
    ]
    with VerifiableReward(VerifiableConfig(kind="numeric")) as strict:
        assert values(strict, responses) == [0.0, 0.0, 0.0]
    with VerifiableReward(
        VerifiableConfig(kind="numeric", answer_in=("hashes", "last-number")),
    ) as lenient:
        assert values(lenient, responses) == [1.0, 0.0, 0.0]


def test_numbers_are_compared_within_the_tolerance():
    with VerifiableReward(
        VerifiableConfig(kind="numeric", answer_in=("whole",), tolerance=0.01),
    ) as reward:
        rows = [
            ("100.9", 100),
            ("101.1", 100),
            ("-0.009", 0),
            ("0.02", 0),
            ("1e3", "1,000"),
            ("2/0", 0),
            ("none", 0),
            ("1", "none"),
        ]
        assert values(reward, rows) == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, None]
        (reason,) = reasons(reward, rows)
        assert reason.startswith("the check failed: ")


def test_exact_ignores_case_and_white_space_alone():
    with VerifiableReward(VerifiableConfig(kind="exact")) as reward:
        rows = [
            (" Paris\n", "paris"),
            ("New  York", "new york"),
            ("Paris.", "Paris"),
            ("in Paris", "Paris"),
            ("", "Paris"),
        ]
        assert values(reward, rows) == [1.0, 1.0, 0.0, 0.0, 0.0]


# Formats


def test_the_format_is_a_part_of_its_own_with_a_weight():
    config = VerifiableConfig(kind="exact", format="think-answer", format_weight=0.25)
    good = "<think>hm</think>\n<answer>Paris</answer>"
    with VerifiableReward(config) as reward:
        right, wrong, loose, twice, none = reward.score(
            [
                rollout(good, "Paris"),
                rollout(good, "Rome"),
                rollout("hm <answer>Paris</answer>", "Paris"),
                rollout(f"{good}<answer>Rome</answer>", "Rome"),
                rollout("Paris", "Paris"),
            ],
        )
    assert (right.value, right.parts) == (1.25, {"correct": 1.0, "format": 1.0})
    assert (wrong.value, wrong.parts) == (0.25, {"correct": 0.0, "format": 1.0})
    assert (loose.value, loose.parts) == (1.0, {"correct": 1.0, "format": 0.0})
    assert (twice.value, twice.parts) == (1.0, {"correct": 1.0, "format": 0.0})
    # no tag: the whole response is the answer
    assert (none.value, none.parts) == (1.0, {"correct": 1.0, "format": 0.0})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("boxed", [r"So $\boxed{3}$.", "a\n\\boxed{1}\n"], ["3", r"\boxed{3} \boxed{4}"]),
        (
            "hashes",
            ["so\n#### 3", "a\nb\n#### 3 "],
            ["#### 3", "so #### 3", "so\n#### 3\nindeed", "so\n####"],
        ),
    ],
)
def test_named_formats(name, good, bad):
    with VerifiableReward(VerifiableConfig(kind="exact", format=name)) as reward:
        scores = reward.score([rollout(text, "?") for text in good + bad])
    assert [score.parts["format"] for score in scores] == [1.0] * len(good) + [0.0] * len(bad)


def test_a_regular_expression_that_never_ends_is_a_failed_check():
    config = VerifiableConfig(kind="exact", format_pattern="(a+)+b", time_limit=1)
    with VerifiableReward(config) as reward:
        rows = [("aab", "aab"), ("a" * 60, "aab"), ("b", "b")]
        assert values(reward, rows) == [1.1, None, 1.0]
        (reason,) = reasons(reward, rows)
        assert reason.startswith("the check timed out: ")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "'kind' is required"),
        ({"kind": "math", "format": "boxed", "format_pattern": "x"}, "remove one"),
        ({"kind": "math", "format_weight": 0.5}, "format_weight has no effect"),
        ({"kind": "math", "tolerance": 0.1}, "tolerance has no effect with kind = 'math'"),
        ({"kind": "exact", "format_pattern": "("}, "not a regular expression"),
        ({"kind": "exact", "answer_in": ["box"]}, "answer_in"),
    ],
)
def test_settings_without_sense_are_refused(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        build(VerifiableConfig, settings)


def test_a_missing_library_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(verifiable.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tether-rlhf\[verify\]'"):
        VerifiableReward(VerifiableConfig(kind="math"))
    with pytest.raises(ConfigError, match="reasoning-gym"):
        reasoning_gym_prompts("leg_counting", 1)
    VerifiableReward(VerifiableConfig(kind="exact"))


def test_a_prompt_without_its_answer_is_an_error():
    bare = Rollout(
        (1,),
        (2,),
        (0.0,),
        StopReason.STOP_TOKEN,
        "x",
        0,
        0,
        Sampling(),
        Prompt((user("q"),), "row-7"),
    )
    with (
        VerifiableReward(VerifiableConfig(kind="exact")) as reward,
        pytest.raises(DataError, match=r"row-7.*no metadata answer"),
    ):
        reward.score([bare])


def test_a_problem_hands_on_its_answer():
    prompt = problem_prompt(Problem((user("1 + 1?"),), "2", "because", "id-3", {"level": 1}))
    assert prompt == Prompt((user("1 + 1?"),), "id-3", {"level": 1, "answer": "2"})


# Workers


def test_an_expression_that_hangs_the_library_is_none_in_time_and_the_rest_is_judged():
    with VerifiableReward(VerifiableConfig(kind="math", time_limit=1, workers=1)) as reward:
        assert values(reward, [(r"\boxed{2}", r"\frac{4}{2}")]) == [1.0]
        start = time.monotonic()
        (hung,) = reward.score([rollout(rf"\boxed{{{TOWER}}}", "18")])
        assert 1 <= time.monotonic() - start < 2
        assert hung.value is None and "timed out" in hung.reason
        assert values(reward, [(r"\boxed{2}", r"\frac{4}{2}"), (r"\boxed{3}", r"\frac{4}{2}")]) == [
            1.0,
            0.0,
        ]


def test_every_bad_end_costs_one_check_only(sandbox):
    hows = ["fine", "sleep", "burn", "power", "crash", "memory", "exit", "error", "fine"]
    replies = sandbox("endings", workers=2, seconds=1).run([{"how": how} for how in hows])
    failures = ["", "timed out", "timed out", "timed out", "died", "failed", "died", "failed", ""]
    assert [reply.failure for reply in replies] == failures
    assert replies[0].result == replies[-1].result == "well"
    details = [reply.detail for reply in replies]
    assert "SIGSEGV" in details[4] and "out of memory" in details[5] and "IndexError" in details[7]


def test_replies_keep_the_order_of_requests_whoever_is_first(sandbox):
    pauses = random.Random(0)
    requests = [{"number": n, "pause": pauses.choice([0.0, 0.0, 0.01])} for n in range(300)]
    pool = sandbox("echo", workers=3)
    for _ in range(2):
        assert [reply.result for reply in pool.run(requests)] == list(range(300))
    assert pool.run([]) == []


def test_workers_work_at_the_same_time(sandbox):
    replies = sandbox("whereabouts", workers=2).run([{"pause": 0.2}] * 6)
    spans = {reply.result["pid"]: [] for reply in replies}
    assert len(spans) == 2
    for reply in replies:
        spans[reply.result["pid"]].append(reply.result["span"])
    one, other = spans.values()
    assert any(a[0] < b[1] and b[0] < a[1] for a in one for b in other)


def test_a_worker_that_is_killed_from_outside_is_replaced(sandbox):
    pool = sandbox("whereabouts")
    first = pool.run([{}])[0].result["pid"]
    os.kill(first, signal.SIGKILL)  # while it is idle: no check is lost
    assert gone(first, 10)
    second = pool.run([{}])[0].result["pid"]
    assert second != first
    threading.Timer(0.5, os.kill, (second, signal.SIGKILL)).start()  # at work
    lost, fine = pool.run([{"pause": 20}, {}])
    assert lost.failure == "died" and "SIGKILL" in lost.detail
    assert fine.failure == "" and fine.result["pid"] != second


def test_closing_ends_the_workers_and_the_next_run_starts_new_ones(sandbox):
    pool = sandbox("whereabouts", workers=2)
    pids = {reply.result["pid"] for reply in pool.run([{"pause": 0.1}] * 4)}
    pool.close()
    assert not any(alive(pid) for pid in pids)
    assert pool.run([{}])[0].result["pid"] not in pids


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("busy", [False, True])
def test_workers_do_not_outlive_a_parent_that_is_killed(sandbox, tmp_path, busy):
    sandbox("echo")
    program = (
        f"import sys, threading; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from tether.rewards.sandbox import Sandbox\n"
        "pool = Sandbox('wild_checks:endings', workers=1, seconds=1.0, memory_mb=512)\n"
        "pool.run([{'how': 'fine'}])\n"
        "print(pool._workers[0].process.pid, flush=True)\n"
        f"pool.seconds = 1000\npool.run([{{'how': 'burn'}}]) if {busy} else "
        "threading.Event().wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    time.sleep(0.3)
    assert alive(worker)
    parent.kill()
    parent.communicate()
    assert gone(worker, 30)  # at once when idle; after its share of processor time when busy


def test_an_interrupted_run_leaves_no_reply_for_the_next(sandbox):
    pool = sandbox("echo", workers=2)
    pool.run([{"number": 0}] * 2)

    class InterruptError(Exception):
        pass

    def ring(*_):
        raise InterruptError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(InterruptError):
            pool.run([{"number": 0}, {"number": 1, "pause": 1.0}])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [reply.result for reply in pool.run([{"number": n} for n in range(10, 14)])] == [
        10,
        11,
        12,
        13,
    ]


def test_workers_know_no_secret_and_load_no_torch(sandbox, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    seen = sandbox("whereabouts").run([{}])[0].result
    assert "HF_TOKEN" not in seen["names"] and "PATH" in seen["names"]
    assert "torch" not in {name.partition(".")[0] for name in seen["modules"]}
    probe = (
        "import sys, tether.rewards.verifiable as v\n"
        "v.make_check('exact', ['whole'], None, 0.0)('a', answer='a')\n"
        "assert 'torch' not in sys.modules and 'math_verify' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", probe], check=True)


@pytest.mark.parametrize("deed", ["write", "shell", "process", "remove", "network"])
def test_a_check_may_only_compute(sandbox, tmp_path, deed):
    (reply,) = sandbox("deeds").run([{"deed": deed, "path": str(tmp_path / "trace")}])
    assert (reply.failure == "failed" and "PermissionError" in reply.detail) or (
        deed == "shell" and reply.result != 0
    )
    assert not (tmp_path / "trace").exists() and (tmp_path / "wild_checks.py").exists()


def test_a_worker_that_cannot_start_is_an_error_and_not_an_endless_loop(sandbox):
    with pytest.raises(RunError, match="before it was ready"):
        sandbox("broken").run([{}])


# reasoning-gym

TASKS = ("prime_factorization", "string_insertion", "rearc", "word_ladder")


@pytest.fixture(scope="module")
def task_prompts():
    return {task: reasoning_gym_prompts(task, 2, seed=3) for task in TASKS}


@needs_reasoning_gym
def test_the_tasks_own_scorer_judges_its_entries(task_prompts, tmp_path):
    prompts = [prompt for made in task_prompts.values() for prompt in made]
    rollouts = [
        rollout(text, **prompt.metadata)
        for prompt in prompts
        for known in [prompt.metadata["answer"]]
        for text in (f"hm <answer>\n{known}\n</answer>", "<answer>junk</answer>", known)
    ]
    # this scorer evaluates answers
    order = f"<answer>[__import__('os').system('touch {tmp_path}/trace') or 'A']</answer>"
    rollouts.append(rollout(order, **task_prompts["string_insertion"][0].metadata))
    with VerifiableReward(
        VerifiableConfig(kind="reasoning-gym", time_limit=30, workers=1),
    ) as reward:
        *scores, obeyed = reward.score(rollouts)
    assert [score.value for score in scores[0::3]] == [1.0] * len(prompts)
    # the first scorer raises on junk
    assert all(score.value is not None and score.value < 0.1 for score in scores[1::3])
    assert {score.value for score in scores[2::3]} == {0.0}
    assert obeyed.value == 0.0 and not (tmp_path / "trace").exists()


@needs_reasoning_gym
def test_prompts_of_a_task_depend_on_their_arguments_alone(task_prompts):
    # it reads from sets
    once, again = task_prompts["word_ladder"], reasoning_gym_prompts("word_ladder", 2, seed=3)
    assert once == again
    assert [prompt.id for prompt in once] == ["word_ladder-0", "word_ladder-1"]
    assert once[0].messages[0].role == "system" and "<answer>" in once[0].messages[0].content
    assert json.loads(json.dumps(dict(once[0].metadata))) == once[0].metadata
    with pytest.raises(DataError, match="no_such_task"):
        reasoning_gym_prompts("no_such_task", 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_reasoning_gym
def test_all_tasks_score_as_they_do_in_one_process():
    """The library in this process is the oracle: its own answer and a foreign one, scored through
    pipes and literals.
    """
    from reasoning_gym.factory import DATASETS, create_dataset

    # a mixture of the others, which needs their configs
    tasks = sorted(DATASETS.keys() - {"composite"})
    config = {"size": 2, "seed": 5}
    with Sandbox(
        "tether.rewards.verifiable:make_entry_maker",
        workers=2,
        seconds=120,
        memory_mb=4096,
    ) as makers:
        made = makers.run([{"task": task, "config": config, "index": 1} for task in tasks])
    rollouts, expected = [], []
    for task, reply in zip(tasks, made, strict=True):
        dataset = create_dataset(task, **config)
        question, known, entry = reply.result
        original = dataset[1]  # of some tasks another one, since this process has another hash seed
        original = original if original["question"] == question else ast.literal_eval(entry)
        for answer in ([known] if isinstance(known, str) and known.strip() else []) + ["12"]:
            rollouts.append(
                rollout(f"<answer>{answer}</answer>", known, task=task, config=config, entry=entry),
            )
            try:
                expected.append(float(dataset.score_answer(answer.strip(), original)))
            except Exception:  # noqa: BLE001
                expected.append(0.0)
    with VerifiableReward(VerifiableConfig(kind="reasoning-gym", time_limit=60)) as reward:
        found = [score.value for score in reward.score(rollouts)]
    mismatched = [
        (r.prompt.metadata["task"], r.text[:60], a, b)
        for r, a, b in zip(rollouts, found, expected, strict=True)
        if a != b
    ]
    assert mismatched == []


# Published data


def rows(path, limit=None):
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [
            json.loads(line) for _, line in zip(range(limit or sys.maxsize), lines, strict=False)
        ]


def read_math(row):
    return read_problem(row, "problem", "answer")


def marked_solutions(tether_data, limit=None):
    """Text, known answer, and what the publishers said of it."""
    for row in rows(tether_data / "gsm8k" / "model-solutions.jsonl.gz", limit):
        truth = read_gsm8k_truth(row)
        for solution in read_gsm8k_solutions(row):
            yield solution.response[-1].content, truth.answer, float(solution.desirable)


@pytest.mark.parametrize("limit", [40, pytest.param(None, marks=pytest.mark.slow)])
def test_verdicts_agree_with_published_ones(tether_data, gsm8k, limit):
    texts, answers, marks = zip(*marked_solutions(tether_data, limit), strict=True)
    assert 0.2 < sum(marks) / len(marks) < 0.6
    assert values(gsm8k, zip(texts, answers, strict=True)) == list(marks)


@pytest.mark.parametrize("limit", [60, pytest.param(None, marks=pytest.mark.slow)])
def test_reference_solutions_are_right_for_their_own_problem_and_wrong_for_the_next(
    tether_data,
    gsm8k,
    mathematics,
    limit,
):
    sources = [
        (gsm8k, "gsm8k/test.jsonl.gz", read_gsm8k),
        (mathematics, "math/test.jsonl.gz", read_math),
    ]
    for reward, name, read in sources:
        problems = [read(row) for row in rows(tether_data / name, limit)]
        assert set(values(reward, [(p.solution, p.answer) for p in problems])) == {1.0}
        pairs = [
            (p.solution, q.answer) for p, q in itertools.pairwise(problems) if p.answer != q.answer
        ]
        assert values(reward, pairs).count(1.0) <= 0.002 * len(pairs)  # 7\% for 7 and the like


@pytest.mark.parametrize("limit", [60, pytest.param(None, marks=pytest.mark.slow)])
def test_answers_written_otherwise_are_still_right(tether_data, mathematics, limit):
    known = [read_math(row).answer for row in rows(tether_data / "math" / "test.jsonl.gz", limit)]
    spellings = [
        known,
        [a.replace(r"\frac", r"\dfrac") for a in known],
        [f"${a}$" for a in known],
        [rf"{a}\ " for a in known],
    ]
    unreadable = {r"\frac{12}{5,\!525}", r"\frac \pi4 + 2 - \sqrt2"}
    for spelling in spellings:
        found = values(
            mathematics,
            [(rf"\boxed{{{s}}}", a) for s, a in zip(spelling, known, strict=True)],
        )
        missed = {a for a, value in zip(known, found, strict=True) if value != 1.0}
        assert len(missed - unreadable) <= 1, missed


# Numbers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"\frac{3}{4}", "3/4"),
        (r"-\dfrac12", "-1/2"),
        ("1 1/2", "3/2"),
        (r"-1\frac{1}{2}", "-3/2"),
        ("1½ cups", "3/2"),
        (r"0.1\overline{6}", "1/6"),
        ("2{,}450", "2450"),
        (r"2\,450\,000", "2450000"),
        (r"2,\!450", "2450"),
        ("2\u202f450", "2450"),
        (r"1.2 \times 10^{3}", "1200"),
        ("1.2*10^-3", "3/2500"),
        ("1.2e5", "120000"),
        ("16 million people", "16000000"),
        ("2 dozen eggs", "24"),
        ("$1,000.50", "2001/2"),
        ("-€5", "-5"),
        ("Rs. 500", "500"),
        ("−16", "-16"),
        (r"16~\text{cm}^2", "16"),
        ("16 km/h", "16"),
        ("36°", "36"),
        (r"18\%", "18"),
        ("18 eggs in 2 days", "18"),
        ("16, because 3 + 13 is 16", "16"),
        ("9 * 2 = 18 dollars", "18"),
        (r"\textbf{16}.", "16"),
        (r"{\color{red} 16}", "16"),
    ],
)
def test_numbers_are_read_whole(text, number):
    assert read_number(text) == Fraction(number)


@pytest.mark.parametrize(
    "text",
    [
        *("10:30", "16!", "16^2", "x + 2", "(3, 4)", "2^{10}", "4 or 5", r"3\sqrt{2}", "B2", "2x"),
        *("3-4", "3 to 4", "1,5", "1.234,56", "12,34", "8 = 7", r"7\text{ is wrong}", r"2\pi"),
        *("16, 17", "16 and 17", "1/0", "3/4/5", "10/11/2020", "5 feet 3 inches", r"\sqrt{16}"),
        *("2 squared", "3 out of 4", "eighteen", "", "1.2.3", "--5", "9" * 5000, "Step 2: Add"),
    ],
)
def test_an_ambiguous_number_is_none(text):
    assert read_number(text) is None


@pytest.mark.parametrize("kind", ["numeric", "gsm8k"])
def test_a_known_answer_that_is_no_number_is_named_and_scores_nothing(kind):
    with VerifiableReward(VerifiableConfig(kind=kind)) as reward:
        (reason,) = reasons(reward, [("#### 3", "x + 3"), ("#### 3", r"\frac{9}{3}")])
    assert "'x + 3' is no number" in reason and "'math'" in reason


# Places


THOUGHTS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("analysis", "assistantfinal"),
]


@pytest.mark.parametrize(("opened", "ended"), THOUGHTS)
def test_a_thought_holds_no_answer(opened, ended):
    inside = r"So \boxed{36}? #### 36. The answer is 36"
    for marks in (["boxed"], ["hashes"], ["phrase"], ["last-number"], ["whole"]):
        for text in (f"{opened}{inside}", f"{opened}{inside}{ended}", f"{inside}{ended}I give up."):
            assert find_answer(text, marks) in (None, "I give up.")
    said = r"\boxed{35}"
    assert find_answer(f"{opened}{inside}{ended}{said}", ["boxed"]) == "35"
    assert find_answer(f"{inside}{ended}{said}", ["boxed"]) == "35"


def test_a_thought_that_the_prompt_opened_is_one_of_the_response():
    cut, ended = r"So \boxed{36}, but", r"So.</think>\boxed{36}"
    config = VerifiableConfig(kind="exact", answer_in=("boxed",), format="boxed")
    opening = opened_by("<|assistant|>\n<think>\n")
    asked = [replace(rollout(text, "36"), opening=opening) for text in (cut, ended)]
    with VerifiableReward(config) as reward:
        assert [score.value for score in reward.score(asked)] == [0.0, 1.1]
    assert opened_by("<think>\n\n</think>\n") == opened_by("What is <think>? ") == ""


@pytest.mark.parametrize("format", ["think-answer", "boxed", "hashes"])
def test_a_format_sees_what_the_template_opened(format):
    said = {"think-answer": "<answer>16</answer>", "boxed": r"\boxed{16}", "hashes": "So\n#### 16"}
    with VerifiableReward(VerifiableConfig(kind="exact", format=format)) as reward:
        texts = [f"{opened}7 + 9\n</think>\n{said[format]}" for opened in ("", "<think>")]
        found = reward.score([rollout(text, "16") for text in [*texts, "<think>7 + 9"]])
    assert [score.parts["format"] for score in found] == [1.0, 1.0, 0.0]


HEADINGS = [
    "#### Step 1: Add\n7 + 9 = 16\n\n#### Step 2: Conclude\nThe answer is {}.",
    "#### Step 1: Add\n7 + 9 = 16\n\n#### Step 2: Conclude\n$$\\boxed{{{}}}$$",
    "#### Step 1: 7 + 9 = 16\nAnd so on.\n\n#### Final Answer\n{}",
    "#### 1. Add\n7 + 9 = 16\n\n#### **Answer:** {}",
    "The answer is {}.\n\n#### Note\nThe 2 numbers were added.",
    "#### {}\n\n#### Note\nThe 2 numbers were added.",
    "### Final Answer\n{}",
    "#### Solution\nFirst add 7 and 9.\n#### {}",
]


@pytest.mark.parametrize("text", HEADINGS)
@pytest.mark.parametrize("kind", ["gsm8k", "numeric"])
def test_headings_of_markdown_are_no_answers(text, kind):
    config = VerifiableConfig(kind=kind)
    check = verifiable.make_check(kind, config.marks, config.pattern, config.tolerance)
    for answer in ("20", "2", "1"):
        given = [check(text.format(said), answer=answer)[0]["correct"] for said in ("20", "2", "1")]
        assert given == [float(said == answer) for said in ("20", "2", "1")]


# Mathematics


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        (r"\approx 36", "36"),
        (r"{\bf 36}", r"36^\circ"),
        (r"\text{The answer is }36°", r"36^\circ"),
        (r"m \ge \sqrt{2}", r"[\sqrt{2},\infty)"),
        (r"\{x \mid -2 < x < 5\}", "(-2,5)"),
        ("(−∞, 3]", r"x \le 3"),
        ("14 - 1i", "14-i"),
        (r"3 + 4\mathrm{i}", "3+4i"),
        (r"\text{(A) } 5", r"\text{(A)}"),
        ("Option B.", r"\textbf{(B)}"),
        (r"0.1\overline{6}", r"\frac16"),
        (r"1 - \frac1e", r"1 - \frac{1}{\mathrm{e}}"),
        (r"2√2\text{ units}", r"\sqrt{8}"),
        (
            r"\begin{bmatrix} \frac32 \\[1ex] 2 \end{bmatrix}",
            r"\begin{pmatrix} 1.5 \\ 2 \end{pmatrix}",
        ),
        (r"x = 3 \text{ or } x = -1", "-1,3"),
        ("40_{9}", "40_9"),
        ("65%", "0.65"),
        (r"\sqrt2 \approx 1.414", r"\sqrt{2}"),
        ("30π cm", r"30\pi\text{ cm}"),
    ],
)
def test_answers_in_other_styles_are_right(given, answer):
    assert verifiable.same_mathematics(given, answer) == 1.0


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("8 = 7", "7"),
        (r"7\text{ is wrong}", "7"),
        (r"\text{not }7", "7"),
        (r"7 \text{ or } 8", "7"),
        ("5x = 5", "5"),
        ("5c", "5"),
        (r"-2 < x \le 5", "(-2,5)"),
        ("4210_7", "4210_5"),
        ("6500%", r"65\%"),
        ("A or B", r"\text{(A)}"),
        ("3.141593", r"\pi"),
        ("0.333333", r"\frac13"),
        ("(1.414214,1)", r"(\sqrt2,1)"),
        (r"\frac{1}{2005!}", r"\frac{1}{2004!}"),
        ("(10^{-19},1)", "(10^{-20},1)"),
        (r"e^{-51}", r"e^{-50}"),
        ("0", r"\frac{1}{10000000}"),
        ("x+10^{-8}", "x"),
    ],
)
def test_answers_that_differ_are_wrong(given, answer):
    assert verifiable.same_mathematics(given, answer) == 0.0
    assert verifiable.same_mathematics(answer, answer) == 1.0
