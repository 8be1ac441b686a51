"""The served engine against the local one, with servers of tether's own on the loopback, some of
which misbehave.
"""

import hashlib
import json
import math
import shutil
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import tether.rollout.server
from tether.core.errors import ConfigError, DataError, ModelError, RunError
from tether.core.stopping import Interrupted
from tether.core.types import Prompt, Sampling, user
from tether.models.loading import add_adapter
from tether.models.trunk import Role
from tether.rewards.environments import EnvironmentThreads
from tether.rollout.episodes import EpisodeEngine
from tether.rollout.local import LocalEngine
from tether.rollout.served import ServedEngine
from tether.rollout.wire import REPLACE
from tether.runner.assembly.engines import engine_server
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of
from tether.scale.servers.fleet import State
from tether.scale.servers.launch import Servers
from tether.settings.engine import EngineConfig
from tether.settings.environment import EpisodeLimits
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe

PROMPTS = [
    Prompt((user(text),), str(n))
    for n, text in enumerate(["a", "what is it?", "tell me a longer story", "no"])
]
SAMPLING = Sampling(max_new_tokens=12, temperature=0.9)
ASKED = {"num_samples": 3, "seed": 5, "ordinals": [9, 2, 7, 4]}
TINY = ModelConfig.model_validate({"source": "tiny", "dtype": "float32"})
OFTEN = TINY.model_copy(update={"stop_tokens": tuple("!#$%&*+-/;=?@^`~QXZ0123456789")})
"""A random model ends many of its replies with one of these."""


@pytest.fixture
def served(tmp_path):
    """A function that makes an engine of so many servers; `change` may spoil a server's class
    before it serves.
    """
    ends = []

    def make(count=1, spoil=None, whole=False, ours=True, lora=None, **config):
        loaded = open_model(TINY)
        role = (
            Role(loaded.model)
            if whole
            else Role(add_adapter(loaded.model, "policy", lora or LoraConfig(), seed=0), "policy")
        )
        moved(role, 0.05)
        servers = [engine_server(open_model(TINY), ("127.0.0.1", 0), 16) for _ in range(count)]
        for number, server in enumerate(servers):
            if spoil is not None:
                spoil(number, server)
            threading.Thread(
                target=server.serve_forever,
                kwargs={"poll_interval": 0.02},
                daemon=True,
            ).start()
            ends.append(server)
        addresses = {
            f"s{n}": f"http://127.0.0.1:{server.server_address[1]}"
            for n, server in enumerate(servers)
        }
        settings = EngineConfig(
            kind="served",
            addresses=tuple(addresses.values()),
            **{"start_seconds": 5, **config},
        )
        fleet = Servers(lambda host, port: [], [], tmp_path / "engine", addresses)
        engine = ServedEngine(
            role,
            encoder_of(loaded),
            fleet,
            tmp_path / "engine",
            settings,
            context_length=256,
            ours=ours,
        )
        ends.insert(0, engine)
        local = LocalEngine(role, encoder_of(loaded), context_length=256)
        return engine, local, servers

    yield make
    for end in ends:
        end.close() if isinstance(end, ServedEngine) else (end.shutdown(), end.server_close())


def moved(role, by):
    """Change the adapter as an update would."""
    generator = torch.Generator().manual_seed(int(by * 1000))
    with torch.no_grad():
        for parameter in role.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator)


def drawn(groups):
    return [
        (r.prompt_ids, r.response_ids, r.stop_reason, r.text, r.sample_index)
        for g in groups
        for r in g.rollouts
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_served_samples_are_the_local_ones_over_updates(served, count):
    engine, local, servers = served(count)
    for version in range(3):
        if version:
            moved(engine.role, 0.02 * version)
            engine.update_weights(version), local.update_weights(version)
        theirs, ours = (one.generate(PROMPTS, SAMPLING, **ASKED) for one in (engine, local))
        assert drawn(theirs) == drawn(ours)
        for a, b in zip(theirs, ours, strict=True):
            for one, other in zip(a.rollouts, b.rollouts, strict=True):
                assert one.spans == ((0, len(one.response_ids)),)
                assert (
                    one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
                    and one.policy_version == version
                )
    assert all(len(server.engines) == 1 for server in servers), "old versions are unloaded"
    assert len(list((engine.folder / "weights").iterdir())) == 1


def merged(role, lora):
    """The model in float64 with the adapter's matrices worked into its weights: rsLoRA's scale
    (2312.03732), DoRA's lengths of columns (2402.09353).
    """
    plain = open_model(TINY).model.double()
    scale = lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)
    changed = 0
    for name, layer in role.decoder.named_modules():
        if "policy" not in getattr(layer, "lora_A", ()):
            continue
        weight = layer.get_base_layer().weight.double()
        down, up = (part["policy"].weight.double() for part in (layer.lora_A, layer.lora_B))
        weight = weight + scale * up @ down
        if lora.dora:
            lengths = layer.lora_magnitude_vector["policy"].weight.double()
            weight = lengths[:, None] * weight / weight.norm(dim=1, keepdim=True)
        plain.model.get_submodule(name).weight.data.copy_(weight)
        changed += 1
    return plain, changed


@pytest.mark.parametrize(
    ("option", "layers"),
    [
        ({}, 14),
        ({"rslora": True}, 14),
        ({"dora": True}, 14),
        ({"rslora": True, "dora": True}, 14),
        ({"targets": "attention"}, 6),
        ({"targets": ("up_proj",)}, 2),
        ({"last_layers": 1}, 7),
        ({"dropout": 0.3}, 14),
        ({"rank": 3, "alpha": 7.0}, 14),
    ],
    ids=str,
)
def test_served_logprobs_are_those_of_the_merged_weights(served, option, layers):
    """Of every option of an adapter, before and after an update, by a model of transformers in
    float64.
    """
    lora = LoraConfig(**{"rank": 4, "alpha": 8.0, **option})
    engine, _, _ = served(lora=lora)
    sampling = Sampling(max_new_tokens=12, temperature=1.0)
    for version in (0, 1):
        if version:
            moved(engine.role, 0.03)
            engine.update_weights(version)
        plain, changed = merged(engine.role, lora)
        assert changed == layers
        for group in engine.generate(PROMPTS, sampling, **ASKED):
            for rollout in group.rollouts:
                ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
                with torch.no_grad():
                    every = plain(ids).logits[0, :-1].log_softmax(-1)
                own = every.gather(1, ids[0, 1:, None])[len(rollout.prompt_ids) - 1 :, 0]
                assert rollout.logprobs == pytest.approx(own.tolist(), abs=2e-5)


def test_an_update_that_was_not_sent_is_caught(served):
    engine, _, (server,) = served()
    load, first = server.load, next(iter((engine.folder / "weights").iterdir()))
    kept = engine.folder / "kept"
    shutil.copytree(first, kept)
    server.load = lambda name, path: load(name, kept / "adapter")  # the server reads what it had
    moved(engine.role, 0.02)
    with pytest.raises(ModelError, match=r"differ from the learner's by .* nats a token"):
        engine.update_weights(1)


def test_two_servers_of_different_weights_are_caught(served):
    def spoil(number, server):
        if number == 1:
            load = server.load

            def other(name, path):
                engine = load(name, path)
                moved(engine.role, 0.05)
                return engine

            server.load = other

    with pytest.raises(ModelError, match=r"s1 .* it holds other weights"):
        served(2, spoil)


def test_a_failed_request_is_the_same_sample_elsewhere(served):
    engine, local, servers = served(2)
    garbage = [
        {"choices": []},
        {"choices": [{"index": 0}]},
        {"model": "policy-other", "choices": [1, 2, 3]},
    ]
    answer, said = servers[0].generate, []

    def spoilt(body):
        if "n" in body["sampling_params"] and len(said) < 3:
            said.append(1)
            return 200, garbage[len(said) - 1]
        return answer(body)

    servers[0].generate = spoilt
    for _ in range(4):
        assert drawn(engine.generate(PROMPTS, SAMPLING, **ASKED)) == drawn(
            local.generate(PROMPTS, SAMPLING, **ASKED),
        )
    assert len(said) == 3
    log = [json.loads(line) for line in (engine.folder / "fleet.jsonl").read_text().splitlines()]
    assert any(
        row["after"] == "suspect" and ("KeyError" in row["why"] or "ValueError" in row["why"])
        for row in log
    )


def test_a_server_whose_probe_is_garbage_is_given_up_and_the_other_goes_on(served):
    engine, local, servers = served(2, restarts=0, start_seconds=2)
    answer = servers[0].generate
    servers[0].generate = lambda body: (
        answer(body) if "n" in body["sampling_params"] else (200, {"prompt_logprobs": [{}]})
    )
    moved(engine.role, 0.02)
    engine.update_weights(1)
    # one failure of the other is enough not to wait for it
    assert engine.fleet.at(State.HEALTHY) == ["s1"]
    assert drawn(engine.generate(PROMPTS, SAMPLING, **ASKED)) == drawn(
        local.generate(PROMPTS, SAMPLING, **ASKED),
    )
    while engine.fleet.at(State.STALE, State.DEAD):
        time.sleep(0.01)
    assert engine.fleet.at(State.RETIRED) == ["s0"]


def test_weights_whose_loading_was_answered_too_late_are_there_and_refused_by_nobody(served):
    """The first request is given up, and the server works on it; the second one finds the name
    taken.
    """
    engine, local, (server,) = served(restarts=0)
    post, first = server.post["/v1/load_lora_adapter"], threading.Event()

    def late(body):
        if first.is_set():
            return post(body)
        first.set()
        threading.Timer(0.3, post, [body]).start()  # done while the second request is under way
        return 500, {"error": "a proxy gave up waiting"}

    listed = server.get["/v1/models"]

    def stale():  # as of the moment when the second one was decided
        answer = listed()
        time.sleep(0.6)
        return answer

    server.post["/v1/load_lora_adapter"] = late
    server.get["/v1/models"] = lambda: (
        stale() if first.is_set() and len(server.engines) < 2 else listed()
    )
    moved(engine.role, 0.02)
    engine.update_weights(1), local.update_weights(1)
    assert drawn(engine.generate(PROMPTS, SAMPLING, **ASKED)) == drawn(
        local.generate(PROMPTS, SAMPLING, **ASKED),
    )


def test_an_error_of_a_servers_own_is_told_and_the_server_lives_on(served, monkeypatch):
    engine, local, (server,) = served()
    scores, broken = (
        tether.rollout.server.score_ids,
        [AttributeError("a slip of ours"), KeyError("lost")],
    )

    def slips(role, ids):
        if broken:
            raise broken.pop()
        return scores(role, ids)

    monkeypatch.setattr(tether.rollout.server, "score_ids", slips)
    moved(engine.role, 0.02)
    engine.update_weights(1), local.update_weights(1)
    assert not broken and server.worker.is_alive()
    assert drawn(engine.generate(PROMPTS, SAMPLING, **ASKED)) == drawn(
        local.generate(PROMPTS, SAMPLING, **ASKED),
    )


def test_a_refusal_of_weights_that_were_replaced_meanwhile_ends_nothing(served):
    engine, local, servers = served(2)
    load, slow = servers[0].load, threading.Event()

    def late(name, path):
        # the server comes back with the old version just when the new one is published
        if not slow.is_set():
            slow.set()
            time.sleep(0.5)
            raise ModelError(f"{path} has gone")
        return load(name, path)

    servers[0].load = late
    servers[0].engines.clear()
    engine.fleet.emptied("s0", "restarted by somebody")
    while not slow.is_set():
        time.sleep(0.01)
    moved(engine.role, 0.02)
    engine.update_weights(1)
    assert engine.fleet.at(State.HEALTHY) == ["s0", "s1"]
    assert drawn(engine.generate(PROMPTS, SAMPLING, **ASKED)) == drawn(
        local.generate(PROMPTS, SAMPLING, **ASKED),
    )


def test_a_server_that_hangs_is_left_after_its_time(served):
    engine, local, servers = served(2, request_seconds=0.5)
    answer, hung = servers[0].generate, threading.Event()

    def hanging(body):
        if not hung.is_set() and "n" in body["sampling_params"]:
            hung.set()
            time.sleep(3)
        return answer(body)

    servers[0].generate = hanging
    start = time.monotonic()
    for _ in range(3):
        assert drawn(engine.generate(PROMPTS, SAMPLING, **ASKED)) == drawn(
            local.generate(PROMPTS, SAMPLING, **ASKED),
        )
    assert hung.is_set() and time.monotonic() - start < 30
    log = (engine.folder / "fleet.jsonl").read_text()
    assert "TimeoutError: no whole answer" in log


def test_a_server_that_forgot_the_adapter_is_given_it_again(served):
    engine, local, (server,) = served()
    (name,) = server.engines
    server.adapt("unload", {"lora_name": name})
    assert drawn(engine.generate(PROMPTS, SAMPLING, **ASKED)) == drawn(
        local.generate(PROMPTS, SAMPLING, **ASKED),
    )
    assert "it has no policy-" in (engine.folder / "fleet.jsonl").read_text()


def test_a_refused_request_is_not_sent_to_another_server(served):
    engine, _, servers = served(2)
    for server in servers:
        server.generate = lambda body: (
            400,
            {"error": {"message": ("token 9 is not in the vocabulary")}},
        )
    with pytest.raises(
        DataError,
        match=r"\d+ tokens: token 9",
    ):
        engine.generate(PROMPTS, SAMPLING, **ASKED)
    assert engine.fleet.at(State.HEALTHY) == ["s0", "s1"]


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_sent(served):
    engine, _, _ = served()
    with pytest.raises(DataError, match="context of 256"):
        engine.generate(PROMPTS, Sampling(max_new_tokens=300))


def test_when_no_server_is_left_the_run_ends_and_says_so(served):
    engine, _, (server,) = served(restarts=0, start_seconds=1)
    server.shutdown(), server.server_close()
    with pytest.raises(RunError, match="no server is left"):
        engine.generate(PROMPTS, SAMPLING, **ASKED)


@pytest.mark.parametrize("count", [1, 2])
def test_a_policy_without_an_adapter_goes_to_the_servers_whole(served, count):
    engine, local, servers = served(count, whole=True)
    first = drawn(local.generate(PROMPTS, SAMPLING, **ASKED))
    for version in range(1, 3):
        moved(engine.role, 0.02 * version)
        engine.update_weights(version)
        theirs, ours = (one.generate(PROMPTS, SAMPLING, **ASKED) for one in (engine, local))
        assert drawn(theirs) == drawn(ours) != first
        assert theirs[0].rollouts[0].policy_version == version
    assert all(len(server.engines) == 1 for server in servers), (
        "a server has one model, with one name"
    )
    assert len(list((engine.folder / "weights").iterdir())) == 1


class Replacing:
    """Makes a server of ours take whole weights as vLLM does: in place, in five requests, and by a
    version that it is told.
    """

    def __init__(self, server, forgets=False):
        self.server, self.version, self.began, self.steps, self.forgets = (
            server,
            "default",
            False,
            [],
            forgets,
        )
        self.generate = server.generate
        server.get["/weight_info"] = lambda: {"weight_version": self.version}
        server.post |= {path: partial(self.replace, path) for path in REPLACE}
        server.generate = self.answer

    def replace(self, path, body):
        self.steps.append(path)
        if path == "/update_weights":
            folder, digests = Path(body["update_info"]["folder"]), body["update_info"]["digests"]
            names = {
                name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in digests
            }
            assert (
                names == digests
                and {one.name for one in folder.glob("*.safetensors")} == digests.keys()
            )
            if not (self.forgets and self.server.engines):
                self.server.adapt(
                    "load",
                    {"lora_name": f"held-{len(self.steps)}", "lora_path": str(folder)},
                )
        if path == "/finish_weight_update":
            self.version = body["weight_version"]
        return 200, {}

    def answer(self, body):
        assert body["model"] == self.server.base, "vLLM knows no other name"
        (held,) = self.server.engines
        status, answer = self.generate({**body, "model": held})
        for one in answer.get("choices", []):
            one["weight_versions"] = [
                {"version": self.version, "start": 0, "end": len(one["token_ids"])},
            ]
        return status, {**answer, "model": self.server.base}


def test_whole_weights_replace_those_of_vllms_servers(served):
    hands = []
    engine, local, _ = served(
        2,
        lambda _, server: hands.append(Replacing(server)),
        whole=True,
        ours=False,
    )
    moved(engine.role, 0.02)
    engine.update_weights(1)
    seeds = ASKED | {"seed": 0, "num_samples": 1}
    for prompt, ordinal in zip(PROMPTS, range(4), strict=True):
        seed = engine._request((1,), SAMPLING, 1, 0, ordinal)["sampling_params"]["seed"]
        (theirs,) = engine.generate([prompt], SAMPLING, **{**seeds, "ordinals": [ordinal]})
        (ours,) = local.generate([prompt], SAMPLING, **{**seeds, "ordinals": [0], "seed": seed})
        assert drawn([theirs]) == drawn([ours])
    assert all(hand.steps == [*REPLACE] * 2 for hand in hands)
    before = drawn(engine.generate(PROMPTS, SAMPLING, **ASKED))
    wrong = hands[0].server.engines[next(iter(hands[0].server.engines))]
    # other weights, which its answers name by another version: thrown away, and drawn by the other
    # server
    moved(wrong.role, 0.3)
    hands[0].version = "policy-of-another"
    assert drawn(engine.generate(PROMPTS, SAMPLING, **ASKED)) == before
    assert any("of policy-of-another" in change.why for change in engine.fleet.changes)


def test_whole_weights_that_did_not_arrive_are_caught(served):
    engine, _, _ = served(
        1,
        lambda _, server: Replacing(server, forgets=True),
        whole=True,
        ours=False,
    )
    moved(engine.role, 0.02)
    with pytest.raises(ModelError, match=r"differ from the learner's by .* nats a token"):
        engine.update_weights(1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"servers": 2}, "servers has no effect with kind = 'local'"),
        ({"kind": "vllm", "servers": 2, "addresses": ["http://127.0.0.1:1"]}, "give one of them"),
    ],
)
def test_settings_without_effect_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        EngineConfig.model_validate(given)


def test_started_servers_end_with_whoever_started_them(tmp_path):
    servers = Servers(lambda host, port: ["sleep", "60"], ["s0"], tmp_path)
    servers.start("s0")
    process = servers.launcher.processes["s0"]
    assert servers.launcher.ended("s0") is None
    servers.launcher.close()
    assert process.poll() == -9 and Path(tmp_path / "s0.log").is_file()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/load_lora_adapter", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"),
        ("/inference/v1/generate", "--enable-scale-out"),
    ],
)
def test_a_server_without_what_is_needed_is_told_before_anything_is_trained(served, path, says):
    def spoil(number, server):
        if path.endswith("generate"):
            server.generate = lambda body: (404, {"detail": "Not Found"})
        else:
            server.adapt = lambda path, body: (404, {"detail": "Not Found"})

    with pytest.raises(ModelError, match=says):
        served(1, spoil)


def test_a_server_that_takes_no_whole_weights_is_told_before_anything_is_trained(served):
    with pytest.raises(ModelError, match="VLLM_SERVER_DEV_MODE=1"):
        served(1, whole=True, ours=False)


def test_older_weights_are_refused_where_a_server_holds_one_model():
    grpo = {
        "reward_source": "random",
        "lora": False,
        "roles": "separate",
        "max_staleness": 1,
        "importance": "truncate",
    }
    grpo |= {"data": {"path": "tether:prompts"}, "engine": {"kind": "served"}}
    with pytest.raises(ConfigError, match=r"whole model \(lora = false\)"):
        build(Recipe, {"run": "run", "model": {"source": "tiny"}, "grpo": grpo})
    with pytest.raises(ConfigError, match="weights from rank 0"):
        build(Recipe, {"run": "run", "model": {"source": "tiny"}, "grpo": {**grpo, "max_staleness": 0, "importance": "none"},
                       "learner": {"ranks": 2, "shard": True}})  # fmt: skip


def test_a_rank_beyond_the_servers_limit_is_told_in_its_words(served):
    def spoil(number, server):
        server.adapt = lambda path, body: (
            400,
            {"error": {"message": ("LoRA rank 16 is greater than max_lora_rank 8.")}},
        )

    with pytest.raises(
        ModelError,
        match=r"s0 \(http.*LoRA rank 16.*max_lora_rank 8",
    ):
        served(1, spoil)


def test_a_server_that_never_answers_ends_the_start_in_time(tmp_path):
    loaded = open_model(TINY)
    role = Role(add_adapter(loaded.model, "policy", LoraConfig(), seed=0), "policy")
    servers = Servers(lambda host, port: [], [], tmp_path, {"s0": "http://127.0.0.1:9"})
    config = EngineConfig(
        kind="served",
        addresses=("http://127.0.0.1:9",),
        start_seconds=0.5,
        restarts=0,
    )
    start = time.monotonic()
    with pytest.raises(RunError, match=r"no server .*after 0.5 s"):
        ServedEngine(
            role,
            encoder_of(loaded),
            servers,
            tmp_path,
            config,
            context_length=256,
            ours=True,
        )
    assert time.monotonic() - start < 20


def test_episodes_on_servers_go_at_their_own_pace_and_are_the_local_ones(served, monkeypatch):
    monkeypatch.setattr(__name__ + ".TINY", OFTEN)
    engine, local, _ = served(2)
    second_has_gone_on = threading.Event()

    class Waits:
        """The first task's environments answer once the second task is in its second turn."""

        def reset(self, task):
            self.turns = 0
            self.waits = task["waits"]

        def step(self, message):
            self.turns += 1
            if self.waits:
                assert second_has_gone_on.wait(20)
            elif self.turns == 2:
                second_has_gone_on.set()
            return "go on", 1.0, self.turns == 3

    tasks = [Prompt((user(name),), row={"waits": name == "one"}) for name in ("one", "two")]
    limits = EpisodeLimits(turns=3, tokens=120)
    finished = []
    groups = []
    for player, own_pace in ((engine, True), (local, False)):
        episodes = EpisodeEngine(
            player,
            EnvironmentThreads(Waits, retries=0),
            local.encoder,
            limits,
            context_length=256,
            own_pace=own_pace,
        )
        groups.append(
            episodes.generate(
                tasks,
                Sampling(max_new_tokens=12),
                num_samples=2,
                seed=3,
                ordinals=[7, 4],
                progress=finished.append,
            ),
        )
    ours, theirs = groups
    for first, second in zip(ours, theirs, strict=True):
        for one, other in zip(first.rollouts, second.rollouts, strict=True):
            assert (one.response_ids, one.spans, one.turns, one.outcome, one.failure) == (
                other.response_ids,
                other.spans,
                other.turns,
                other.outcome,
                other.failure,
            )
            assert torch.allclose(
                torch.tensor(one.logprobs),
                torch.tensor(other.logprobs),
                atol=1e-4,
            )
    assert max(len(rollout.spans) for rollout in ours[0].rollouts) > 1
    assert finished[-1] == 4


def test_what_stops_one_task_stops_at_once_and_ends_the_others_after_their_turn(
    served,
    monkeypatch,
):
    monkeypatch.setattr(__name__ + ".TINY", OFTEN)
    engine, local, _ = served(1)
    steps = []
    begun = threading.Event()

    class Slow:
        def reset(self, task):
            self.stops = task["stops"]

        def step(self, message):
            if self.stops:
                begun.wait(20)
                raise Interrupted("stopped")
            begun.set()
            steps.append(message)
            time.sleep(3)
            return "go on", 1.0, False

        def close(self):
            steps.append("closed")

    tasks = [Prompt((user("x"),), row={"stops": stops}) for stops in (False, True)]
    episodes = EpisodeEngine(
        engine,
        EnvironmentThreads(Slow, retries=0),
        local.encoder,
        EpisodeLimits(turns=40, tokens=1000),
        context_length=4096,
        own_pace=True,
    )
    with pytest.raises(Interrupted):
        episodes.generate(tasks, Sampling(max_new_tokens=100))
    threads = {thread for thread in threading.enumerate() if "Slow" in thread.name}
    assert len(threads) == 1
    for thread in threads:
        thread.join(20)
    time.sleep(1)
    assert steps.count("closed") == 2
    assert len(steps) == 3
