"""All that runs on the pretended `cuda:0`; `test_pretend.py` starts it, since a process that knows
the device keeps it.

One by hand: `pytest tests/device/test_pretend.py -k killed`. The oracle is the CPU without our
kernels: equal up to rounding.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file
from tests.device.pretend import CARD, DEVICE, NAME, Pretended, counting, ordered, run
from tests.every_stage import differences, recipe, results
from tests.models.architectures import small_folder
from tests.runner.journeys import Killed, dying_after
from torch import nn

from benchmarks import gpu
from tether.classic import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from tether.cli.tools.export import export_model
from tether.core.errors import ConfigError
from tether.core.rundir import read_json, read_jsonl
from tether.core.types import Comparison, Prompt, Sampling, Score, assistant, user
from tether.data.batches import make_batch
from tether.data.prepare import Limit, encode_comparisons
from tether.judges.local import LocalChat
from tether.models.cpu import kernels
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter, keep_on_host, pick_dtype
from tether.models.saving import attach_adapter, load_head
from tether.models.trunk import Role
from tether.rewards.classifier import ClassifierReward
from tether.rewards.learned import LearnedReward
from tether.rollout.local import SlotDecoding
from tether.rollout.sampling import sample_tokens
from tether.runner.assembly.engines import vllm_share
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, local_engine, save_trained
from tether.runner.planning.devices import machine_for
from tether.runner.planning.speeds import RowSizes
from tether.runner.run import run_recipe
from tether.settings.engine import EngineConfig
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.policy import PolicyConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.reward import RewardConfig
from tether.settings.rewards import ClassifierConfig
from tether.settings.stages import STAGES
from tether.settings.supervised import DirectConfig, SFTConfig
from tether.stages.direct import Direct
from tether.stages.learner.local import LocalLearner
from tether.stages.policy_gradient import PolicyGradient
from tether.stages.reward import RewardModeling
from tether.stages.sft import SFT
from tether.stages.supervised import make_step

ON_CPU, THERE = {"device": "cpu", "cpu_kernels": False, "attention": "sdpa"}, {"device": NAME}
TRAINED = [name for name, kind in STAGES.items() if kind.makes not in ("pairs", "verdict")]
SAMPLED = [name for name, kind in STAGES.items() if kind.makes == "policy"]
UNSTEADY = ("second", "memory", "accuracy")
"""In the names of metrics that no two runs share, or that count signs of what is nearly 0."""
PROMPTS = [Prompt((user(text),)) for text in ("one", "two or three", "and four")]


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """A recipe with every stage that trains, one or two steps of those that sample."""
    folder = tmp_path_factory.mktemp("rows")
    made = recipe(folder, folder / "run")
    for name in SAMPLED:
        steps = 2 if name in ("ppo", "reinforce") else 1
        made[name] = {**made[name], "steps": steps, "prompts_per_step": 2, "max_new_tokens": 4}
    made["ppo"]["evaluate"] = {
        "every": 2,
        "prompts": 2,
        "temperatures": [],
        "best_of": [],
        "keep": "best",
    }
    made["ppo"]["epochs"] = 1  # later ones clip what is beyond a bound by a hair
    del made["best_of_n"]["evaluate"]
    made["sft"]["batch_size"] = made["direct"]["prompts_per_update"] = made["kto"][
        "prompts_per_update"
    ] = 4
    made["process"]["solutions_per_update"], made["reward"]["epochs"] = 6, 1
    return made


@pytest.fixture(scope="module")
def whole(values, tmp_path_factory):
    """(stage, on the device) -> the folder of a run in which it was made in one go; made when first
    asked for.
    """
    folders = {side: tmp_path_factory.mktemp("run") for side in (True, False)}

    def made(stage, there=True):
        root, values_there = (
            folders[there],
            {**values, "model": {**values["model"], **(THERE if there else ON_CPU)}},
        )
        before = [
            name for name in ("sft", "reward", "process") if stage in TRAINED[TRAINED.index(name) :]
        ]
        for name in dict.fromkeys([*before, stage]):
            if not (root / name / "summary.json").is_file():
                run_recipe(build(Recipe, {**values_there, "run": str(root)}), [name])
        return root

    return made


def again(values, whole, root, stage, *overrides, **model):
    """A recipe on the device in a folder of its own, which has what `stage` stands on."""
    for name in {"sft", "reward", "process"} - {stage}:
        shutil.copytree(whole("process") / name, root / name)
    return build(
        Recipe,
        {**values, "run": str(root), "model": {**values["model"], **THERE, **model}},
        overrides,
    )


def scorer(**where):
    """A random reward model of the tiny trunk, its encoder, and the trunk as it was loaded."""
    loaded = open_model(ModelConfig(source="tiny", dtype="float32", **where))
    model = add_adapter(loaded.model, "reward", LoraConfig(), seed=1)
    return (
        Role(model, "reward", ScalarHead(64, zero=False).to(model.device)),
        encoder_of(loaded),
        loaded,
    )


# The device itself: a test on it is worth what it refuses.

REFUSED = {
    "a sum": lambda there, here: there + here,
    "a product": lambda there, here: here @ there,
    "a part": lambda there, here: torch.cat([there, here]),
    "a mask": lambda there, here: there.masked_fill(here > 0, 0.0),
    "a choice": lambda there, here: torch.where(here > 0, there, 0.0),
    "an index": lambda there, here: there[here[:, 0].long()],
    "an index of it": lambda there, here: here[there[:, 0].long()],
    "an update": lambda there, here: here.add_(there),
    "a moving average": lambda there, here: here.lerp_(there, 0.5),
    "an output": lambda there, here: torch.mm(there, there, out=here),
    "an array": lambda there, here: there.numpy(),
    "a generator": lambda there, here: torch.randn(3, device=NAME, generator=torch.Generator()),
    "a layer": lambda there, here: nn.Linear(3, 3).to(NAME)(here),
    "data": lambda there, here: setattr(there, "data", here),
}
if kernels.library() is not None:
    REFUSED["a kernel"] = lambda there, here: kernels._call("panel_width", torch.float32, there)


@pytest.mark.parametrize("what", REFUSED)
def test_it_refuses_what_is_not_its_own(what):
    there, here = torch.rand(3, 3, device=NAME), torch.rand(3, 3)
    told = r"among those of|go to the CPU|generator on cpu|is given|read the memory"
    with pytest.raises((RuntimeError, TypeError), match=told):
        REFUSED[what](there, here)


def test_it_computes_what_the_cpu_computes():
    here = torch.arange(12.0).reshape(3, 4)
    there = here.to(NAME)
    assert (
        there.device == DEVICE
        and there.device.type == NAME
        and isinstance(there, Pretended)
        and not there.is_cpu
    )
    counted = torch.arange(3, device=NAME)
    for made in (
        there.T,
        there[1:, ::2],
        there.sum(0),
        torch.zeros_like(there),
        there.new_zeros(2),
        counted,
    ):
        assert made.device == DEVICE and made.stride() == made.raw.stride()
    there[0, :2] = torch.tensor([5.0, 6.0])  # a copy, as on any device
    assert (
        there.tolist()[0] == [5.0, 6.0, 2.0, 3.0]
        and (there * torch.tensor(2.0))[0, 0].item() == 10.0
    )
    assert there.cpu().device.type == "cpu" and torch.tensor([1.5], device=NAME).item() == 1.5
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    layer(here).square().sum().backward()
    expected = layer.weight.grad.clone()
    moved = layer.to(NAME)
    moved.zero_grad()
    moved(here.to(NAME)).square().sum().backward()
    assert moved.weight.grad.device == DEVICE and torch.equal(moved.weight.grad.cpu(), expected)
    assert run(torch.ops.aten.add.Tensor, there, there).device == DEVICE


def test_our_kernels_leave_its_tensors_alone():
    there = torch.rand(4, 8, device=NAME)
    assert kernels.library_for(there) is None and kernels.panel_width(there) == 0
    assert open_model(ModelConfig(source="tiny", dtype="float32", device=NAME)).cpu_kernels == ()


# Models.


def test_a_model_its_adapters_and_heads_lie_there_and_come_back_there(tmp_path):
    role, _, loaded = scorer(**THERE)
    own, _, here = scorer(**ON_CPU)
    assert {
        p.device for p in (*role.model.parameters(), *role.model.buffers(), *role.head.parameters())
    } == {DEVICE}
    assert role.causal_model.lm_head.weight is role.causal_model.model.embed_tokens.weight
    assert loaded.digest == here.digest and loaded.manifest()["model"]["device"] == CARD.name
    ids = torch.arange(10)[None]
    expected = own.model(ids).logits
    assert torch.allclose(role.model(ids.to(NAME)).logits.cpu(), expected, atol=1e-5)
    with torch.no_grad():
        for parameter in role.parameters():
            parameter += 0.1
    save_trained(role, loaded, tmp_path, kind="reward")
    model = attach_adapter(open_model(loaded.config).model, tmp_path, "reward")
    back = Role(model, "reward", load_head(tmp_path, model.device))
    for old, new in zip(role.parameters(), back.parameters(), strict=True):
        assert new.device == DEVICE and torch.equal(old, new)


# Stages.


@pytest.mark.parametrize("stage", TRAINED)
def test_a_stage_gives_the_numbers_of_the_cpu(whole, stage):
    there, here = (whole(stage, side) / stage for side in (True, False))
    files = sorted(path.relative_to(here) for path in here.rglob("metrics.jsonl"))
    lay = [read_json(path).get("model", {}).get("device") for path in there.rglob("manifest.json")]
    assert files and CARD.name in lay and "cpu" not in lay
    for name in files[:1]:  # the second of two rounds starts from where the first has gone
        rows, expected = list(read_jsonl(there / name)), list(read_jsonl(here / name))
        assert [row["step"] for row in rows] == [row["step"] for row in expected]
        # Answers sampled after an update may differ: one token that was nearly another.
        for row, wanted in zip(rows[: 1 if stage in SAMPLED else None], expected, strict=False):
            numbers = {
                key: value
                for key, value in wanted.items()
                if isinstance(value, float) and not key.startswith("time")
            }
            numbers = {
                key: value
                for key, value in numbers.items()
                if not any(part in key for part in UNSTEADY)
            }
            assert len(numbers) >= 3
            assert {key: row[key] for key in numbers} == pytest.approx(
                numbers,
                rel=2e-2,
                abs=1e-3,
                nan_ok=True,
            )


@pytest.mark.parametrize("stage", ["reward", "ppo", "reinforce"])
def test_a_killed_stage_goes_on_from_a_checkpoint_to_the_same_bits(values, whole, tmp_path, stage):
    """The moments of AdamW, the best weights so far and (reinforce) the moving average come back to
    where the weights are.
    """
    cut = again(values, whole, tmp_path, stage)
    with pytest.raises(Killed):
        run_recipe(cut, [stage], dying_after(1))
    assert list((tmp_path / stage / "checkpoints").glob("step-*"))
    run_recipe(cut, [stage])
    assert differences(results(whole(stage) / stage), results(tmp_path / stage)) == []


def test_layers_on_the_host_change_nothing_but_the_place(values, whole, tmp_path):
    folders = []
    for offload in ("false", "true"):
        apart = again(
            values,
            whole,
            tmp_path / offload,
            "reinforce",
            "reinforce.roles=separate",
            f"reinforce.offload={offload}",
        )
        run_recipe(apart, ["reinforce"])
        folders.append(tmp_path / offload / "reinforce")
    assert differences(*map(results, folders)) == []


def test_layers_on_the_host_are_nowhere_between_two_passes():
    model = open_model(ModelConfig(source="tiny", dtype="float32", **THERE), on_host=True).model
    expected = model(torch.arange(6)[None]).logits
    keep_on_host(model, DEVICE)
    for _ in range(2):
        found = model(torch.arange(6, device=NAME)[None]).logits
        assert found.device == DEVICE and torch.allclose(found.cpu(), expected, atol=1e-5)
        assert all(parameter.is_meta for parameter in model.model.layers.parameters())
    assert {
        p.device
        for p in (model.model.embed_tokens.weight, model.lm_head.weight, model.model.norm.weight)
    } == {DEVICE}


def test_layers_computed_again_give_the_same_bits(values, whole, tmp_path):
    run_recipe(again(values, whole, tmp_path, "sft", recompute=True), ["sft"])
    assert differences(results(whole("sft") / "sft"), results(tmp_path / "sft")) == []


def test_weights_in_bfloat16_have_masters_there_and_go_on_from_them(values, whole, tmp_path):
    ends = []
    for name in ("whole", "cut"):
        one = again(values, whole, tmp_path / name, "sft", dtype="bfloat16")
        if name == "cut":
            with pytest.raises(Killed):
                run_recipe(one, ["sft"], dying_after(1))
        run_recipe(one, ["sft"])
        ends.append(load_file(tmp_path / name / "sft/model/model.safetensors"))
    assert {tensor.dtype for tensor in ends[0].values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, ends[1][key]) for key, tensor in ends[0].items())


def test_an_ensemble_scores_and_a_whole_model_learns(values, whole, tmp_path):
    many = again(values, whole, tmp_path, "reward", "reward.members=2", "direct.lora=false")
    run_recipe(many, ["reward", "direct", "online_direct"])
    (row,) = read_jsonl(tmp_path / "online_direct/metrics.jsonl")
    assert (
        abs(row["reward/proxy"]) < 3.0
        and (tmp_path / "direct/policy/model/model.safetensors").is_file()
    )


# Engines, rewards, judges, the textbooks' interface.


def test_the_engine_draws_what_it_draws_on_the_cpu():
    drawn = []
    for where in (THERE, ON_CPU):
        loaded = open_model(ModelConfig(source="tiny", dtype="float32", **where))
        # fewer than there are: rows leave, and others come
        engine = local_engine(Role(loaded.model), loaded, max_rows=4)
        for how in ({}, {"top_p": 0.9, "top_k": 50}, {"temperature": 0.0}):
            sampling = Sampling(max_new_tokens=8, **how)
            groups = engine.generate(PROMPTS, sampling, num_samples=3, seed=5)
            drawn.append([r for group in groups for r in group.rollouts])
    for there, here in zip(drawn[:3], drawn[3:], strict=True):
        assert [r.response_ids for r in there] == [r.response_ids for r in here]
        assert [x for r in there for x in r.logprobs] == pytest.approx(
            [x for r in here for x in r.logprobs],
            abs=1e-4,
        )


@pytest.mark.parametrize("per_token", [False, True])
def test_learned_scores_are_those_of_the_cpu(per_token):
    scores = []
    for where in (THERE, ON_CPU):
        role, encoder, loaded = scorer(**where)
        groups = local_engine(Role(role.model), loaded).generate(
            PROMPTS,
            Sampling(max_new_tokens=6),
            num_samples=2,
        )
        given = LearnedReward(role, encoder, per_token=per_token).score(
            [r for group in groups for r in group.rollouts],
        )
        scores.append([score.value for score in given])
    assert (
        len(scores[0]) == 6
        and scores[0] == pytest.approx(scores[1], abs=1e-5)
        and len(set(scores[0])) == 6
    )


def test_a_judge_answers_as_on_the_cpu():
    answers = []
    for where in (THERE, ON_CPU):
        loaded = open_model(ModelConfig(source="tiny", dtype="float32", **where))
        chat = LocalChat("tiny", local_engine(Role(loaded.model), loaded))
        found = chat.verdicts([prompt.messages for prompt in PROMPTS], ("yes", "yellow", "no"))
        answers.append([logprob for verdict in found for logprob in verdict.logprobs])
    assert len(answers[0]) == 9 and answers[0] == pytest.approx(answers[1], abs=1e-5)


def test_a_classifier_scores_as_on_the_cpu(tmp_path):
    from transformers import LlamaForSequenceClassification

    loaded = open_model(ModelConfig(source="tiny", dtype="float32", device="cpu"))
    config = loaded.model.config
    config.num_labels = 1
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    talks = [(user("one"), assistant(text)) for text in ("a", "bb", "ccc ccc")]
    settings = {"source": str(tmp_path), "batch": 2}
    assert ClassifierReward.load(ClassifierConfig(**settings), NAME).model.dtype == torch.bfloat16
    rewards = [
        ClassifierReward.load(ClassifierConfig(**settings, dtype="float32"), place)
        for place in (NAME, "cpu")
    ]
    there, here = (
        [score.value for score in reward.score_conversations(talks)] for reward in rewards
    )
    assert there == pytest.approx(here, abs=1e-5) and len(set(here)) == 3


def test_the_classic_step_is_that_of_the_cpu(tmp_path, monkeypatch):
    loaded = open_model(
        ModelConfig(source="tiny", dtype="float32", device="cpu", cpu_kernels=False),
    )
    loaded.model.save_pretrained(tmp_path)
    stats = []
    for place in (NAME, "cpu"):
        for module in ("tether.api.classic.ppo", "tether.api.classic.models"):
            monkeypatch.setattr(f"{module}.pick_device", lambda _, place=place: torch.device(place))
        model = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path))
        config = PPOConfig(batch_size=2, ppo_epochs=2, learning_rate=1e-3, init_kl_coef=0.1)
        trainer = PPOTrainer(config, model, tokenizer=loaded.tokenizer)
        queries = [torch.tensor([70, 71, 72]), torch.tensor([80, 81])]
        responses = trainer.generate(
            queries,
            return_prompt=False,
            do_sample=False,
            max_new_tokens=4,
        )
        assert {response.device.type for response in responses} == {place}
        stats.append(trainer.step(queries, responses, [torch.tensor(1.0), torch.tensor(-0.5)]))
    for key in (
        "ppo/loss/total",
        "objective/kl",
        "ppo/policy/clipfrac",
        "ppo/mean_scores",
        "ppo/policy/entropy",
    ):
        assert stats[0][key] == pytest.approx(stats[1][key], abs=1e-4)


# Waits of the host.


@pytest.mark.parametrize(
    "how",
    [{}, {"top_p": 0.9}, {"temperature": 0.0}, {"stop_strings": ("zzqq",)}],
)
@pytest.mark.parametrize("adapter", [True, False])
def test_the_host_waits_once_a_token_whatever_layers_and_rows(adapter, how, monkeypatch):
    """Rows end at every step, new ones come, and the last move together."""
    loaded = open_model(ModelConfig(source="tiny", dtype="bfloat16", device=NAME))
    role = (
        Role(add_adapter(loaded.model, "policy", LoraConfig(), seed=1), "policy")
        if adapter
        else Role(loaded.model)
    )
    engine, steps = local_engine(role, loaded, max_rows=40), []
    with torch.no_grad():
        role.causal_model.get_output_embeddings().weight[1] *= 0
    step = SlotDecoding.step

    def watched(self):
        with counting() as counted:
            step(self)
        steps.append(counted)

    monkeypatch.setattr(SlotDecoding, "step", watched)
    prompts = [Prompt((user(f"{n} " + "x" * (n % 7)),), str(n)) for n in range(60)]
    groups = engine.generate(prompts, Sampling(max_new_tokens=24, **how), seed=3)
    assert len({len(group.rollouts[0].response_ids) for group in groups}) > (
        0 if how.get("temperature") == 0.0 else 3
    )
    assert len(steps) > 30 and all(sum(one.waits.values()) == 1 for one in steps), steps[0].waits
    assert {kind for one in steps for kind, _ in one.copies} <= {"asynchronous"}


def pairs_of_length(count):
    """Comparisons, each of which fills a micro-batch of 64 tokens."""
    return [
        Comparison(
            (user(f"say {n}"),),
            (assistant("good one " * 3),),
            (assistant("bad one " + "d" * n),),
        )
        for n in range(count)
    ]


def supervised(stage):
    """An objective on a tiny policy of the device in bfloat16, and a function that makes rows of a
    number of micro-batches.
    """
    loaded = open_model(ModelConfig(source="tiny", dtype="bfloat16", device=NAME))
    encoder, model = (
        encoder_of(loaded),
        add_adapter(loaded.model, "own", LoraConfig(dropout=0.1), seed=1),
    )
    small = {"micro_batch_tokens": 64, "max_length": 256}
    if stage == "sft":
        config = SFTConfig(row_tokens=64, rows_per_micro_batch=1, max_length=64)

        def talks(count):
            return [(user(f"say {n}"), assistant("abc " * 10 + str(n))) for n in range(count)]

        rows = lambda count: [encoder.conversation(talk, "last") for talk in talks(count)]  # noqa: E731
        return SFT(config, Role(model, "own"), encoder), rows

    def encode(count):
        return encode_comparisons(pairs_of_length(count), encoder, Limit(256), one_turn=True)[0]

    if stage == "direct":
        return Direct(DirectConfig(**small), Role(model, "own"), Role(model), encoder), encode
    head = ScalarHead(64, zero=False).to(DEVICE)
    return RewardModeling(RewardConfig(**small), Role(model, "own", head), encoder), encode


@pytest.mark.parametrize("stage", ["sft", "reward", "direct"])
def test_the_host_waits_in_no_micro_batch_of_a_supervised_update(stage):
    objective, rows = supervised(stage)
    learner = LocalLearner(objective.role.parameters(), OptimizerConfig(learning_rate=1e-3), 10)
    make_step(objective, learner, rows(3))
    found = {}
    for count in (3, 6):
        with counting() as found[count]:
            make_step(objective, learner, rows(count))
    assert sum(found[3].waits.values()) <= 2, found[3].waits
    assert found[6].waits == found[3].waits
    assert {kind for one in found.values() for kind, _ in one.copies} == {"asynchronous"}, found[
        3
    ].copies
    assert found[6].launches > 1.5 * found[3].launches


@pytest.mark.parametrize("critic", [True, False])
def test_the_host_waits_in_no_micro_batch_of_a_policy_update(critic):
    loaded = open_model(ModelConfig(source="tiny", dtype="bfloat16", device=NAME))
    policy = Role(add_adapter(loaded.model, "policy", LoraConfig(), seed=1), "policy")
    value = Role(policy.model, "policy", ScalarHead(64).to(DEVICE)) if critic else None
    kl, how = ({"place": "token"}, {}) if critic else ({"place": "loss"}, {"baseline": "group"})
    found = {}
    for samples in (2, 8):
        engine = local_engine(policy, loaded, max_rows=16)
        config = PolicyConfig(
            prompts_per_step=3,
            samples_per_prompt=samples,
            max_new_tokens=8,
            micro_batch_tokens=64,
            epochs=2,
            critic=critic,
            kl=kl,
            **how,
        )
        stage = PolicyGradient(
            config=config,
            policy=policy,
            reference=Role(policy.model),
            value=value,
            reward=None,
            engine=engine,
            encoder=encoder_of(loaded),
        )
        groups = engine.generate(PROMPTS, Sampling(max_new_tokens=8), num_samples=samples)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        with counting() as found[samples]:
            stage.learn(rollouts, [Score(float(place % 3)) for place in range(len(rollouts))], 0)
        found[samples].batches = len(stage.experience.batches)
    few, many = found[2], found[8]
    assert many.batches >= few.batches + 3
    assert many.waits == few.waits, many.waits - few.waits
    assert {kind for one in found.values() for kind, _ in one.copies} == {"asynchronous"}, (
        few.copies
    )


# Architectures, dtypes, and operations that have no order.

ARCHITECTURES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3_text",
    "phi3",
    "olmo2",
    "cohere",
    "granite",
    "smollm3",
]
ARCHITECTURES += ["gpt_neox", "gpt2", "opt", "mixtral"]
NO_SDPA = ("gemma2", "gpt_oss", "vaultgemma", "mimo_v2_flash", "granite_swa", "granitemoe_swa")
"""Decoders for which transformers has no sdpa attention."""


@pytest.mark.parametrize("name", [*ARCHITECTURES, *NO_SDPA])
def test_an_architecture_computes_there_what_it_computes_on_the_cpu(name, tmp_path):
    """Device and attention are left at auto; a batch of single rows, one of documents, the
    gradient, and what is drawn.
    """
    source, results = str(small_folder(name, tmp_path / "model")), []
    for where in ({}, {"device": "cpu", "cpu_kernels": False}):
        loaded = open_model(ModelConfig(source=source, dtype="float32", **where))
        role, encoder = (
            Role(add_adapter(loaded.model, "policy", LoraConfig(), seed=1), "policy"),
            encoder_of(loaded),
        )
        groups = local_engine(role, loaded, max_rows=4).generate(
            PROMPTS,
            Sampling(max_new_tokens=5),
            num_samples=2,
            seed=7,
        )
        rows = [rollout for group in groups for rollout in group.rollouts]
        sequences = [encoder.rollout(row.prompt_ids, row.response_ids) for row in rows]
        numbers = []
        for limit in (0, role.document_tokens(512)):
            batch = make_batch(sequences, encoder.pad_id, document_tokens=limit).to(role.device)
            logprobs = batch.scatter(role.logprobs(batch)[0])
            numbers.append(logprobs.detach().cpu())
        for parameter in role.parameters():
            parameter.requires_grad_(True)
        role.logprobs(batch)[0].sum().backward()
        slope = sum(float(p.grad.norm()) for p in role.parameters() if p.grad is not None)
        results.append((role.device.type, [row.response_ids for row in rows], numbers, slope))
    (place, drawn, numbers, slope), (_, drawn_here, numbers_here, slope_here) = results
    assert place == NAME and drawn == drawn_here and slope == pytest.approx(slope_here, rel=1e-2)
    for there, here in zip(numbers, numbers_here, strict=True):
        torch.testing.assert_close(there, here, atol=1e-3, rtol=0)


def test_the_journey_runs_in_bfloat16_with_nothing_named(values, tmp_path):
    made = build(Recipe, {**values, "run": str(tmp_path), "model": {"source": "tiny"}})
    run_recipe(made, ["sft", "reward", "ppo"])
    for stage in ("sft", "reward", "ppo"):
        model = read_json(tmp_path / stage / "manifest.json")["model"]
        assert (model["dtype"], model["device"]) == ("bfloat16", CARD.name)
    assert CARD.emptied >= 3  # memory goes back between stages


@pytest.mark.parametrize("stage", SAMPLED)
def test_a_stage_that_samples_runs_where_only_ordered_operations_are_allowed(
    values,
    whole,
    tmp_path,
    stage,
):
    one = again(values, whole, tmp_path, stage).model_copy(update={"deterministic": True})
    run_recipe(one, [stage])
    with pytest.raises(RuntimeError, match="no ordered kernel"), ordered():
        torch.rand(4, device=NAME).cumsum(0)


def test_a_mixture_of_experts_runs_where_only_ordered_operations_are_allowed(tmp_path):
    source = str(small_folder("mixtral", tmp_path / "model"))
    with ordered():
        loaded = open_model(ModelConfig(source=source, **THERE))
        groups = local_engine(Role(loaded.model), loaded).generate(
            PROMPTS,
            Sampling(max_new_tokens=4),
        )
    assert len(groups) == len(PROMPTS)


@pytest.mark.parametrize("bias", [False, True])
def test_a_carried_change_is_rounded_once_there(bias):
    """In float32 before: a product that `addmm` could have rounded is not asked for."""
    from tests.models.test_one_rounding import SHARES, carrying, share_of

    for share in SHARES[:2]:
        layer, change = carrying(share, DEVICE, bias=bias)
        weight, states = layer.weight.double(), torch.randn(600, 384, device=DEVICE).bfloat16()
        slopes = torch.randn(600, 512, device=DEVICE).bfloat16()
        made = layer(states.requires_grad_())
        (back,) = torch.autograd.grad(made, states, slopes)
        exact, offset = states.detach().double(), layer.bias.double() if bias else 0.0
        there = share_of(made.detach(), exact @ weight.T + offset, exact @ change.T)
        again = share_of(back, slopes.double() @ weight, slopes.double() @ change)
        assert there == pytest.approx(1, abs=0.05) and again == pytest.approx(1, abs=0.05)


def test_sampling_by_ordered_sums_draws_what_running_sums_draw():
    logits = 3 * torch.randn(512, 5000, generator=torch.Generator().manual_seed(0))
    uniforms = torch.rand(512, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for how in ({}, {"top_p": 0.9}, {"top_k": 40, "temperature": 0.7}):
        here = sample_tokens(logits, uniforms, Sampling(**how), cpu_kernels=False)
        there = sample_tokens(logits.to(NAME), uniforms.to(NAME), Sampling(**how))
        assert torch.equal(here[0], there[0].cpu())
        torch.testing.assert_close(there[1].cpu(), here[1], atol=1e-5, rtol=0)


def test_bfloat16_is_chosen_where_the_card_multiplies_it(monkeypatch):
    assert pick_dtype("auto", NAME) == torch.bfloat16
    # a T4 computes it by float32, at a tenth of the speed
    monkeypatch.setattr(CARD, "capability", (7, 5))
    assert pick_dtype("auto", NAME) == torch.float32


def test_a_plan_is_for_the_card_that_will_run(monkeypatch):
    monkeypatch.setattr(CARD, "name", "NVIDIA GeForce RTX 4090")
    made = machine_for("auto")
    assert (
        made.gpu and "rtx4090" in made.name and made.memory == pytest.approx(CARD.total, rel=0.01)
    )
    monkeypatch.setattr(CARD, "name", "NVIDIA A100-SXM4-80GB")
    assert "a100" in machine_for("cuda").name
    assert not machine_for("cpu").gpu


def test_the_share_of_vllm_is_what_it_needs_or_a_sentence(monkeypatch):
    role = Role(open_model(ModelConfig(source="tiny", **THERE)).model)
    weights = sum(parameter.numel() * 2 for parameter in role.model.parameters())
    share = float(vllm_share(EngineConfig(kind="vllm", python="python"), role, 64, 100))
    assert weights + 2e9 < share * CARD.total < weights + 2.2e9
    monkeypatch.setattr(CARD, "free", int(1.5e9))
    with pytest.raises(
        ConfigError,
        match=(
            r"needs 2\.\d GB of this GPU .* 1\.5 of 25\.8 GB are "
            r"free\. Lower engine_rows"
        ),
    ):
        vllm_share(EngineConfig(kind="vllm", python="python"), role, 64, 100)
    own = EngineConfig(kind="vllm", python="python", arguments=("--gpu-memory-utilization=0.5",))
    assert vllm_share(own, role, 64, 100) == "0.2"


@pytest.mark.parametrize("stage", ["policy", "reward"])
def test_an_export_needs_host_memory_alone(values, whole, tmp_path, stage):
    """Nothing is read back from the device but the weights that went there; the numbers are those
    of what tether computes.
    """
    source = (
        whole("ppo") / "ppo" / "policy"
        if stage == "policy"
        else whole("reward") / "reward" / "model"
    )
    assert export_model(str(source), tmp_path / "out")["difference"] < 1e-3


def test_the_benchmark_of_a_card_runs_and_leaves_out_what_does_not_fit(capsys):
    card = machine_for("auto")
    for part in (gpu.rollouts, gpu.update, gpu.trunk):
        part(card, True)
    table = capsys.readouterr().out
    assert table.count("tokens/s") == 2 and table.count("s a step") == 2
    assert (
        gpu.planned(
            card,
            "llama-2-7b",
            False,
            RowSizes(),
            sft={"row_tokens": 4096, "rows_per_micro_batch": 4},
        )
        is None
    )
    assert "llama-2-7b, sft | left out: " in capsys.readouterr().out
