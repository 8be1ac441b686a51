"""Sampling while the learner learns: which weights sample what, the same bits after a kill, servers
against this process.
"""

import json
import random
import threading
import time
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from tests.every_stage import differences, results
from tests.runner.journeys import Killed, dying_after, lines, numbered_prompts

from tether.core.errors import ConfigError, ModelError
from tether.core.types import Prompt, Sampling, user
from tether.rollout.ahead import AheadEngine
from tether.rollout.served import ServedEngine
from tether.runner.assembly.engines import engine_server
from tether.runner.assembly.models import open_model
from tether.runner.run import run_recipe
from tether.settings.model import ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.stages.learner.checkpoint import complete_checkpoints, load_checkpoint

SERVED = {"kind": "served", "servers": 2, "start_seconds": 60}
STEPS = 6


def recipe(folder, name, stage="grpo", **more):
    settings = {
        "data": numbered_prompts(folder),
        "function": {"call": "tether.quickstart.judges:letters"},
        "steps": STEPS,
    }
    settings |= {
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "max_new_tokens": 8,
        "checkpoint_every": 2,
        "sample_rows": 8,
    }
    settings |= {
        "importance": "truncate",
        "max_staleness": 2,
        "optimizer": {"learning_rate": 1e-2},
        **more,
    }
    return build(
        Recipe,
        {
            "run": str(folder / name),
            "model": {"source": "tiny", "dtype": "float32"},
            stage: settings,
        },
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run_recipe(recipe(folder, "whole"))
    return folder


def test_a_step_learns_from_weights_that_are_as_old_as_allowed_and_no_older(whole):
    ages = [row["policy/staleness"] for row in lines(whole / "whole" / "grpo" / "metrics.jsonl")]
    assert ages == [0, 1, 2, 2, 2, 2]
    assert [
        row["policy/staleness_max"] for row in lines(whole / "whole" / "grpo" / "metrics.jsonl")
    ] == ages
    gaps = [row["policy/engine_gap"] for row in lines(whole / "whole" / "grpo" / "metrics.jsonl")]
    assert gaps[0] < 1e-4 < min(gaps[2:]), (
        "the log-probabilities are those of the weights that sampled"
    )


def test_without_staleness_it_is_the_synchronous_run(tmp_path, monkeypatch):
    """The wrapper with a bound of 0 changes no bit: its order of calls is that of a step without
    it.
    """
    from tether.stages import online_loop

    run_recipe(recipe(tmp_path, "plain", max_staleness=0))
    train = online_loop.train

    def wrapped(stage, *others, **named):
        stage.engine = AheadEngine(stage.engine, 0)
        return train(stage, *others, **named)

    monkeypatch.setattr(online_loop, "train", wrapped)
    run_recipe(recipe(tmp_path, "wrapped", max_staleness=0))
    assert differences(results(tmp_path / "plain"), results(tmp_path / "wrapped")) == []


@pytest.mark.parametrize("calls", range(1, 1 + STEPS))
def test_killed_after_any_step_it_ends_with_the_same_bits(whole, tmp_path, calls):
    with pytest.raises(Killed):
        run_recipe(recipe(tmp_path, "cut"), progress=dying_after(calls))
    run_recipe(recipe(tmp_path, "cut"))
    wanted = {name: value for name, value in results(whole / "whole").items() if "grpo" in name}
    assert (
        differences(
            wanted,
            {name: value for name, value in results(tmp_path / "cut").items() if "grpo" in name},
        )
        == []
    )


def test_samples_under_way_are_part_of_a_checkpoint(tmp_path):
    with pytest.raises(Killed):
        run_recipe(recipe(tmp_path, "cut"), progress=dying_after(5))
    (saved,) = complete_checkpoints(tmp_path / "cut" / "grpo" / "checkpoints")
    _, values = load_checkpoint(saved)
    later = range(values["step"], values["step"] + 2)
    versions = {
        n: {row["policy_version"] for group in values["engine"]["orders"][str(n)] for row in group}
        for n in later
    }
    assert versions == {n: {n - 2} for n in later}


class Noting:
    """An engine that counts requests; a group is the number of its request and its prompt."""

    policy_version = 0

    def __init__(self):
        self.requests = 0

    def generate(self, prompts, sampling, **how):
        self.requests += 1
        return [(self.requests, prompt.text) for prompt in prompts]


def test_an_order_is_for_the_same_samples_alone():
    """A measurement asks for the places 0 to n - 1, which the first step has too."""
    train, test = ([Prompt((user(f"{name} {n}"),)) for n in range(4)] for name in ("a", "b"))
    engine, sampling = AheadEngine(Noting(), 1), Sampling(8)
    how = {"ordinals": range(4), "num_samples": 2, "seed": 0}
    engine.order(0, train, sampling, **how)
    ordered = [(1, prompt.text) for prompt in train]
    assert engine.generate(train, sampling, progress=print, **how) == ordered
    others = [
        engine.generate(test, sampling, **how),
        engine.generate(train, Sampling(8, 0.5), **how),
        *(
            engine.generate(train, sampling, **how | change)
            for change in ({"seed": 1}, {"num_samples": 1}, {"ordinals": range(1, 5)})
        ),
        engine.generate(train, sampling, num_samples=2, seed=0),
    ]
    assert [groups[0][0] for groups in others] == [2, 3, 4, 5, 6, 7]
    assert engine.generate(train, sampling, **how) == ordered


@pytest.mark.parametrize("stage", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_servers_sample_what_this_process_samples(tmp_path, stage):
    """To the token; they compute the log-probabilities in other batches, so losses agree to
    rounding.
    """
    more = {} if stage == "grpo" else {"samples_per_prompt": 1, "epochs": 1}
    run_recipe(recipe(tmp_path, "local", stage, **more))
    run_recipe(recipe(tmp_path, "served", stage, engine=SERVED, **more))
    ours, theirs = (
        lines(tmp_path / name / stage / "samples.jsonl") for name in ("local", "served")
    )
    assert [row["response"] for row in ours] == [row["response"] for row in theirs]
    ours, theirs = (
        lines(tmp_path / name / stage / "metrics.jsonl") for name in ("local", "served")
    )
    for number, row in enumerate(theirs):
        ordered = number < 4  # the last steps' samples are asked for with those of the fourth
        assert (
            (0 < row["engine/busy"] <= 1) >= ordered
            and (row["engine/queue"] >= 1) >= ordered
            and 0 < row["engine/wait"] < 1
        )
    assert [row["policy/staleness"] for row in theirs] == [0, 1, 2, 2, 2, 2]
    # when servers worked, in seconds before the step's end
    work = lines(tmp_path / "served" / stage / "engine" / "work.jsonl")
    assert [row["step"] for row in work] == [row["step"] for row in theirs]
    assert all(
        begin < end <= 0
        for row in work
        for spans in row["servers"].values()
        for begin, end in spans
    )
    assert [row.get("engine/tokens_per_second", 0) > 0 for row in theirs] == [
        any(row["servers"].values()) for row in work
    ]
    assert [row["loss"] for row in theirs] == pytest.approx([row["loss"] for row in ours], abs=1e-4)


@pytest.fixture
def served(monkeypatch):
    """Make a server of a thread of this process, which decodes requests together or each alone, and
    gives the key `engine`.
    """
    monkeypatch.setenv("TETHER_SERVER_TOKEN", "a token of the run")
    started = []

    def make(**how):
        model = open_model(ModelConfig.model_validate({"source": "tiny", "dtype": "float32"}))
        started.append(engine_server(model, ("127.0.0.1", 0), 64, **how))
        threading.Thread(
            target=started[-1].serve_forever,
            kwargs={"poll_interval": 0.02},
            daemon=True,
        ).start()
        return {
            "kind": "served",
            "addresses": [f"http://127.0.0.1:{started[-1].server_address[1]}"],
        }

    yield make
    for server in started:
        server.shutdown()
        server.server_close()


def mixed(folder):
    """Prompts of several lengths, all of them in each step: their batches round otherwise than a
    prompt alone.
    """
    path = folder / "mixed.txt"
    path.write_text("".join(f"{'a longer ' * (n % 5)}{n}\n" for n in range(12)), encoding="utf-8")
    return {"data": {"path": str(path)}, "prompts_per_step": 12, "steps": 4}


def gaps(folder, name):
    return [row["policy/engine_gap"] for row in lines(folder / name / "grpo" / "metrics.jsonl")]


def largest_difference(folder, *names):
    first, second = (
        load_file(next((folder / name / "grpo" / "policy").rglob("adapter_model.safetensors")))
        for name in names
    )
    assert first.keys() == second.keys() and len(first) > 1
    return max(float((first[key] - second[key]).abs().max()) for key in first)


def test_batching_of_requests_changes_bits_and_no_sample(tmp_path, served):
    """The exception of docs/guides/resuming.md: which requests meet depends on time, and an
    importance ratio shows it.
    """
    run_recipe(recipe(tmp_path, "together", **mixed(tmp_path)))
    run_recipe(recipe(tmp_path, "alone", engine=served(alone=True), **mixed(tmp_path)))
    ours, theirs = (
        lines(tmp_path / name / "grpo" / "samples.jsonl") for name in ("together", "alone")
    )
    assert ours == theirs and len(ours) == 8 * 4
    ages = [
        [row["policy/staleness"] for row in lines(tmp_path / name / "grpo" / "metrics.jsonl")]
        for name in ("together", "alone")
    ]
    assert ages == [[0, 1, 2, 2]] * 2
    assert (
        gaps(tmp_path, "together")
        != gaps(tmp_path, "alone")
        == pytest.approx(gaps(tmp_path, "together"), abs=1e-4)
    )
    assert largest_difference(tmp_path, "together", "alone") < 1e-3, "a tenth of the learning rate"


def test_requests_that_are_decoded_alone_give_the_same_bits_whenever_they_come(
    tmp_path,
    served,
    monkeypatch,
):
    """The promise of docs/guides/resuming.md for `deterministic = true`."""
    run_recipe(recipe(tmp_path, "quick", engine=served(alone=True), **mixed(tmp_path)))
    ask, draw = ServedEngine._ask, random.Random(0)

    def late(engine, version, body):
        time.sleep(0.05 * draw.random())
        return ask(engine, version, body)

    monkeypatch.setattr(ServedEngine, "_ask", late)
    run_recipe(recipe(tmp_path, "late", engine=served(alone=True), **mixed(tmp_path)))
    assert gaps(tmp_path, "quick") == gaps(tmp_path, "late")
    assert largest_difference(tmp_path, "quick", "late") == 0.0


def test_without_an_importance_ratio_served_runs_have_the_bits_of_this_process(tmp_path, served):
    plain = {"importance": "none", "max_staleness": 0, **mixed(tmp_path)}
    run_recipe(recipe(tmp_path, "here", **plain))
    run_recipe(recipe(tmp_path, "there", engine=served(), **plain))
    assert largest_difference(tmp_path, "here", "there") == 0.0


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_run_has_each_request_decoded_alone(tmp_path, monkeypatch, deterministic):
    commands = []

    def engine(policy, encoder, servers, *args, **more):
        commands.append(servers.command("127.0.0.1", 1))
        raise ModelError("far enough")

    monkeypatch.setattr("tether.runner.assembly.engines.ServedEngine", engine)
    values = recipe(tmp_path, "one", engine=SERVED).model_copy(
        update={"deterministic": deterministic},
    )
    with pytest.raises(ModelError, match="far enough"):
        run_recipe(values)
    assert ("--alone" in commands[0]) == deterministic


def test_a_server_that_dies_is_given_the_older_weights_again_and_nothing_is_lost_or_drawn_twice(
    tmp_path,
    monkeypatch,
):
    """The process of a server ends in the middle of the run, with samples of older weights under
    way.
    """
    begin, begun = ServedEngine.begin, Counter()

    def killing(engine, prompts, sampling, **how):
        collect = begin(engine, prompts, sampling, **how)
        begun.update(tuple(how["ordinals"]))
        if len(begun) == 16:
            engine.servers.launcher.processes["server-0"].kill()
        return collect

    monkeypatch.setattr(ServedEngine, "begin", killing)
    run_recipe(recipe(tmp_path, "killed", engine={**SERVED, "servers": 1}))
    run_recipe(recipe(tmp_path, "local"))
    assert begun == Counter(range(4 * STEPS))
    ours, theirs = (
        lines(tmp_path / name / "grpo" / "samples.jsonl") for name in ("local", "killed")
    )
    assert [row["response"] for row in ours] == [row["response"] for row in theirs]
    states = [
        json.loads(line)["after"]
        for line in (tmp_path / "killed/grpo/engine/fleet.jsonl").read_text().splitlines()
    ]
    assert "dead" in states and states[-1] == "healthy"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"importance": "none"}, "importance = 'truncate' or 'mask'"),
        ({"algorithm": "dapo"}, "leave filter_groups out"),
        ({"max_staleness": -1}, "max_staleness"),
    ],
)
def test_settings_that_do_not_go_with_it(tmp_path, more, says):
    with pytest.raises(ConfigError, match=says):
        recipe(tmp_path, "run", **more)


@pytest.mark.parametrize(
    ("ahead", "servers", "each", "learner"),
    [(0, 1, None, 4), (0, 2, "2", 4), (1, 1, "2", 2), (2, 3, "1", 1)],
)
def test_servers_and_learner_share_the_cores(
    tmp_path,
    monkeypatch,
    ahead,
    servers,
    each,
    learner,
):
    threads = torch.get_num_threads()
    seen = []

    def engine(policy, encoder, servers, *args, **more):
        seen.extend((servers.environment.get("OMP_NUM_THREADS"), torch.get_num_threads()))
        raise ModelError("far enough")

    monkeypatch.setattr("tether.runner.assembly.engines.ServedEngine", engine)
    torch.set_num_threads(4)
    try:
        with pytest.raises(ModelError, match="far enough"):
            run_recipe(
                recipe(
                    tmp_path,
                    "one",
                    "grpo",
                    engine={"kind": "served", "servers": servers},
                    max_staleness=ahead,
                ),
            )
        assert seen == [each, learner] and torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)
