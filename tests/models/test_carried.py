"""Changes that are carried beside rounded weights, against base + scale B A in double precision."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import PeftModel
from torch import nn

from tether.cli.tools.export import export_model
from tether.core.errors import ModelError
from tether.core.rundir import RunDirectory
from tether.core.types import Prompt, Sampling, user
from tether.models.average import average_roles
from tether.models.carried import (
    ADAPTER_WEIGHTS,
    MERGED_ADAPTER,
    Rounding,
    base_weights,
    carriers,
    carries_all,
    drop,
    fold_in,
    merged_weights,
    read_change,
    rounding_of,
    settle,
)
from tether.models.cpu.products import _merged
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter, keep_on_host, save_model
from tether.models.precision import cast
from tether.models.saving import refill_model, save_role, save_weights
from tether.models.tiny import TEMPLATE, tiny_tokenizer
from tether.models.trunk import Role
from tether.runner.assembly.engines import _note_rounded
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, local_engine, new_role
from tether.runner.methods.supervised import _save_merged
from tether.settings.model import LoraConfig, ModelConfig
from tether.stages.learner.ranks import ALONE
from tether.stages.reference import role_digest

SHARES = (3e-4, 1e-3, 3e-3, 1e-2)
NEAREST = {3e-4: 0.40, 1e-3: 0.75, 3e-3: 0.97, 1e-2: 1.01}
"""Of the gain, rounding to nearest keeps less than this: the tests below could fail."""
LORA = LoraConfig(rank=4, alpha=8)
SCALE = 2.0
SHAPE = transformers.LlamaConfig(
    vocab_size=261,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)

PLACE = SimpleNamespace(seed=0, ranks=ALONE)
"""What a merge takes of a context."""


@dataclass
class Base:
    """A bfloat16 model in a folder, rows of tokens, and the gradient of their loss."""

    folder: object
    weights: dict
    ids: torch.Tensor
    gradients: dict

    @property
    def settings(self):
        return ModelConfig(source=str(self.folder), dtype="bfloat16", cpu_kernels=False)

    def loss(self, weights):
        """In double precision, by transformers' own model."""
        model = transformers.LlamaForCausalLM(SHAPE).double()
        model.load_state_dict({name: weight.double() for name, weight in weights.items()})
        with torch.no_grad():
            return float(model(input_ids=self.ids, labels=self.ids).loss)

    def kept(self, weights, oracle):
        """The share of the oracle's gain that a model with `weights` has."""
        before = self.loss(self.weights)
        return (before - self.loss(weights)) / (before - self.loss(oracle))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("carried") / "base"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(SHAPE)
        for parameter in model.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, 0, 0.05)
        ids = torch.randint(0, 261, (16, 48))
    model = model.bfloat16()
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    exact = copy.deepcopy(model).double()
    exact(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: weight.grad for name, weight in exact.named_parameters()}
    return Base(folder, weights, ids, gradients)


@torch.no_grad()
def fill(role, base, share, first=0):
    """Give a role's adapter the directions in which the loss falls most, at a share of the weights
    (rms). Returns scale B A of every layer in double precision.
    """
    changes = {}
    for name, layer in role.causal_model.named_modules():
        if role.adapter not in getattr(layer, "lora_A", ()):
            continue
        left, sizes, right = torch.linalg.svd(-base.gradients[f"{name}.weight"])
        rank = slice(first, first + LORA.rank)
        norm = share * base.weights[f"{name}.weight"].double().norm() / SCALE
        root = (sizes[rank] * norm / sizes[rank].norm()).sqrt()
        down, up = layer.lora_A[role.adapter].weight, layer.lora_B[role.adapter].weight
        down.copy_(root[:, None] * right[rank])
        up.copy_(left[:, rank] * root)
        changes[f"{name}.weight"] = SCALE * up.double() @ down.double()
    assert len(changes) == 14
    return changes


def plus(weights, *changes):
    """The oracle: weights and changes added up in double precision."""
    whole = {name: weight.double() for name, weight in weights.items()}
    for change in changes:
        whole = {name: weight + change.get(name, 0) for name, weight in whole.items()}
    return whole


def held(model):
    """The weights that a model computes with, in double precision, with what its layers carry."""
    causal = Role(model).causal_model
    weights = {}
    for name, weight in causal.state_dict().items():
        plain = name.replace(".base_layer.", ".")
        if "lora_" in name or "carried" in name:
            continue
        weights[plain] = weight.double()
    for name, layer in carriers(model):
        change = layer.carried_up.double() @ layer.carried_down.double()
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + change
    return weights


def tuned(base, run, share, *, dtype="bfloat16", first=0, lora=LORA, source=None):
    """What fine-tuning leaves in a run's folder: settings that load it, and the oracle's changes."""
    loaded = open_model((source or base.settings).model_copy(update={"dtype": dtype}))
    role = new_role(loaded, "sft", lora, seed=0)
    changes = fill(role, base, share, first)
    _save_merged(role, loaded, PLACE, RunDirectory.open(run, {}), ALONE)
    return base.settings.on_folder(run / "model"), changes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("share", SHARES)
def test_a_later_stage_starts_with_all_that_fine_tuning_gained(base, tmp_path, share, dtype):
    """Whatever type fine-tuning computed in: the folder alone, merged and rounded, has less."""
    settings, changes = tuned(base, tmp_path / "run", share, dtype=dtype)
    oracle = plus(base.weights, changes)
    loaded = open_model(settings)
    assert 0.99 <= base.kept(held(loaded.model), oracle) <= 1.01
    plain = transformers.AutoModelForCausalLM.from_pretrained(settings.source, dtype="bfloat16")
    assert base.kept(plain.state_dict(), oracle) < NEAREST[share]
    exact = open_model(settings.model_copy(update={"dtype": "float32"}))
    assert not any(carriers(exact.model))
    assert 0.99 <= base.kept(exact.model.state_dict(), oracle) <= 1.01


def test_policy_reference_reward_and_whole_models_share_what_is_carried(base, tmp_path):
    """The reference is the trunk with its adapters off; a fresh adapter, and one that scores, add
    nothing to it.
    """
    settings, changes = tuned(base, tmp_path / "run", 1e-3)
    loaded = open_model(settings)
    before = held(loaded.model)
    policy = new_role(loaded, "policy", LORA, seed=1)
    reward = Role(add_adapter(loaded.model, "reward", LORA, seed=2), "reward")
    with torch.no_grad():
        reference = Role(loaded.model)
        reference.activate()
        states = reference.states(base.ids)
        for role in (policy, reward):
            role.activate()
            assert torch.equal(role.states(base.ids), states)
    learned = fill(policy, base, 1e-3, first=4)
    own = plus(held(loaded.model), learned)
    oracle = plus(base.weights, changes, learned)
    assert 0.99 <= base.kept(own, oracle) <= 1.01
    after = held(loaded.model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    whole = new_role(open_model(settings), "policy", False, seed=1)
    names = {id(parameter) for parameter in whole.parameters()}
    assert all(id(layer.carried_up) not in names for _, layer in carriers(whole.model))
    assert 0.99 <= base.kept(held(whole.model), plus(base.weights, changes)) <= 1.01


def test_passes_are_those_of_an_adapter_that_is_switched_on(base, tmp_path):
    """bfloat16 passes of the saved model differ from those of the trained role by less than a tenth
    of what the change makes.
    """
    loaded = open_model(base.settings)
    with torch.no_grad():
        bare = Role(loaded.model).states(base.ids).double()
        role = new_role(loaded, "sft", LORA, seed=0)
        fill(role, base, 1e-2)
        role.activate()
        trained = role.states(base.ids).double()
        _save_merged(role, loaded, PLACE, RunDirectory.open(tmp_path / "run", {}), ALONE)
        saved = Role(open_model(base.settings.on_folder(tmp_path / "run" / "model")).model)
        states = saved.states(base.ids).double()
    assert (states - trained).norm() < 0.1 * (trained - bare).norm()


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("adapter", [False, True])
def test_the_engines_weights_hold_the_gain(base, tmp_path, share, adapter):
    """Rounded by dithering, as the CPU's products are; with an adapter of the policy's and
    without.
    """
    settings, changes = tuned(base, tmp_path / "run", share)
    loaded = open_model(settings)
    role = new_role(loaded, "policy", LORA, seed=1) if adapter else Role(loaded.model)
    learned = fill(role, base, share, first=4) if adapter else {}
    weights = dict(base.weights)
    for name, layer in role.causal_model.named_modules():
        if f"{name}.weight" in changes:
            weights[f"{name}.weight"] = _merged(layer, role.adapter)[0]
    # dithering keeps the mean, and its noise is one part in a hundred of the least gain here: the
    # more weights there are, the less it is
    noise = 0.01 if share > 3e-4 else 0.03
    kept_share = base.kept(weights, plus(base.weights, changes, learned))
    assert kept_share == pytest.approx(1, abs=noise)


@pytest.mark.parametrize("cpu_kernels", [False, True])
def test_sampled_tokens_have_the_learners_log_probabilities(base, tmp_path, cpu_kernels):
    """Two bfloat16 passes differ in what they round; the model without the change is further off
    by far.
    """
    settings, _ = tuned(base, tmp_path / "run", 3e-2)
    loaded = open_model(settings.model_copy(update={"cpu_kernels": cpu_kernels}))
    engine = local_engine(Role(loaded.model), loaded)
    sampling = Sampling(max_new_tokens=24, temperature=1.0)
    prompts = [Prompt((user(text),), text) for text in ("a", "what is it?", "no")]
    groups = engine.generate(prompts, sampling, num_samples=4, seed=3)
    rollouts = [one for group in groups for one in group.rollouts]
    bare = Role(open_model(base.settings).model)

    def distance(role):
        role.activate()
        gaps = []
        for one in rollouts:
            ids = torch.tensor([one.prompt_ids + one.response_ids])
            with torch.no_grad():
                logits = role.logits(role.states(ids))[0, :-1].double().log_softmax(-1)
            own = logits.gather(1, ids[0, 1:, None])[len(one.prompt_ids) - 1 :, 0]
            gaps.append((own - torch.tensor(one.logprobs)).abs())
        return float(torch.cat(gaps).mean())

    assert distance(Role(loaded.model)) < 0.02 < 0.1 < distance(bare)


def test_changes_of_several_stages_add_up(base, tmp_path):
    first, one = tuned(base, tmp_path / "first", 1e-3)
    second, two = tuned(base, tmp_path / "second", 1e-3, first=4, source=first)
    oracle = plus(base.weights, one, two)
    loaded = open_model(second)
    assert 0.99 <= base.kept(held(loaded.model), oracle) <= 1.01
    assert {len(layer.carried_down) for _, layer in carriers(loaded.model)} == {8}
    # trained whole on top, and saved as a role
    folder = tmp_path / "policy"
    save_role(Role(loaded.model), loaded, folder, kind="policy", encoding=_encoding(loaded))
    again = open_model(base.settings.on_folder(folder / "model"))
    assert 0.99 <= base.kept(held(again.model), oracle) <= 1.01


def _encoding(loaded):
    return encoder_of(loaded).describe()


@pytest.mark.parametrize("share", SHARES)
def test_an_export_in_float32_holds_all_and_one_in_bfloat16_says_what_is_lost(
    base,
    tmp_path,
    share,
    caplog,
):
    settings, changes = tuned(base, tmp_path / "run", share)
    loaded = open_model(settings)
    policy = new_role(loaded, "policy", LORA, seed=1)
    learned = fill(policy, base, share, first=4)
    oracle = plus(base.weights, changes, learned)
    folder = tmp_path / "policy"
    save_role(policy, loaded, folder, kind="policy", encoding=_encoding(loaded))
    made = export_model(str(folder), tmp_path / "exact", dtype="float32")
    exact = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exact")
    assert exact.dtype == torch.float32 and made["difference"] < 1e-3
    assert 0.99 <= base.kept(exact.state_dict(), oracle) <= 1.01
    assert made["share_kept"] == pytest.approx(1.0) and not caplog.records

    made = export_model(str(folder), tmp_path / "rounded", dtype="bfloat16")
    rounded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "rounded")
    assert rounded.dtype == torch.bfloat16
    left = whole = 0.0
    for name in changes:
        change = changes[name] + learned[name]
        left += ((rounded.state_dict()[name].double() - base.weights[name].double()) * change).sum()
        whole += change.square().sum()
    assert made["share_kept"] == pytest.approx(float(left / whole), abs=0.005)
    sentence = f"Rounded weights hold {made['share_kept']:.0%} of what adapters changed"
    lost = made["share_kept"] < 0.99
    assert lost == (share < 1e-2) == (sentence in caplog.text)
    assert lost == (sentence in (tmp_path / "rounded" / "README.md").read_text())


def test_an_export_of_an_adapter_that_no_layer_can_carry_says_what_is_lost(base, tmp_path, caplog):
    loaded = open_model(base.settings)
    lora = LORA.model_copy(update={"dora": True})
    policy = new_role(loaded, "policy", lora, seed=1)
    fill(policy, base, 1e-3)
    save_role(policy, loaded, tmp_path / "policy", kind="policy", encoding=_encoding(loaded))
    made = export_model(str(tmp_path / "policy"), tmp_path / "rounded", dtype="bfloat16")
    assert 0.4 < made["share_kept"] < 0.9
    assert f"Rounded weights hold {made['share_kept']:.0%} of what adapters" in caplog.text
    exact = export_model(str(tmp_path / "policy"), tmp_path / "exact", dtype="float32")
    assert exact["share_kept"] == pytest.approx(1.0)


def test_vllm_servers_of_whole_policies_are_noted_to_hold_rounded_weights(base, tmp_path):
    settings, changes = tuned(base, tmp_path / "run", 1e-3)
    loaded = open_model(settings)
    _note_rounded(Role(loaded.model), loaded)
    sent = merged_weights(loaded.model)
    left = whole = 0.0
    for name, change in changes.items():
        left += float(((sent[name].double() - base.weights[name].double()) * change).sum())
        whole += float(change.square().sum())
    (note,) = loaded.notes
    assert f"rounded weights, which hold {left / whole:.0%} of what" in note

    bare = open_model(base.settings)
    _note_rounded(Role(bare.model), bare)
    assert not bare.notes


def test_an_exported_adapter_says_what_its_base_has_lost(base, tmp_path, caplog):
    settings, _ = tuned(base, tmp_path / "run", 1e-3)
    loaded = open_model(settings)
    policy = new_role(loaded, "policy", LORA, seed=1)
    fill(policy, base, 1e-3, first=4)
    save_role(policy, loaded, tmp_path / "policy", kind="policy", encoding=_encoding(loaded))
    made = export_model(str(tmp_path / "policy"), tmp_path / "out", adapter=True)
    assert 0.4 < made["share_kept"] < 0.7 and made["difference"] > 1e-4
    assert f"hold {made['share_kept']:.0%} of what fine-tuning changed" in caplog.text


def test_a_mean_of_adapters_on_a_carried_change_rounds_nothing_away(base, tmp_path):
    settings, changes = tuned(base, tmp_path / "run", 1e-3)
    loaded = open_model(settings)
    members, learned = [], []
    for number in range(2):
        name = f"reward-{number}"
        head = ScalarHead(128, seed=number)
        members.append(new_role(loaded, name, LORA, seed=number, head=head))
        learned.append(fill(members[-1], base, 1e-3, first=4 * number))
    mean = average_roles(members, "mean", LORA)
    oracle = plus(base.weights, changes)
    for name in changes:
        oracle[name] = oracle[name] + (learned[0][name] + learned[1][name]) / 2
    own = held(loaded.model)
    for name, layer in mean.causal_model.named_modules():
        if "mean" in getattr(layer, "lora_A", ()):
            up, down = layer.lora_B["mean"].weight.double(), layer.lora_A["mean"].weight.double()
            own[f"{name}.weight"] += layer.scaling["mean"] * up @ down
    assert 0.99 <= base.kept(own, oracle) <= 1.01


@pytest.mark.parametrize("beside", [True, False])
def test_an_adapter_of_another_program_is_carried_too(base, tmp_path, beside):
    """A folder of peft: with the weights of its base, or with the name of it alone."""
    loaded = open_model(base.settings)
    role = new_role(loaded, "default", LORA, seed=0)
    changes = fill(role, base, 1e-3)
    folder = tmp_path / "adapter"
    role.model.peft_config["default"].base_model_name_or_path = str(base.folder)
    role.model.save_pretrained(folder)
    if beside:
        for path in base.folder.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    settings = base.settings.model_copy(update={"source": str(folder)})
    oracle = plus(base.weights, changes)
    assert 0.99 <= base.kept(held(open_model(settings).model), oracle) <= 1.01
    exact = open_model(settings.model_copy(update={"dtype": "float32"}))
    assert 0.999 <= base.kept(held(exact.model), oracle) <= 1.001


def test_an_adapter_on_a_folder_of_rounded_weights_finds_what_they_lack(base, tmp_path):
    """`tether export --adapter` of a policy, loaded as a model."""
    settings, changes = tuned(base, tmp_path / "run", 1e-3)
    loaded = open_model(settings)
    role = new_role(loaded, "default", LORA, seed=1)
    learned = fill(role, base, 1e-3, first=4)
    role.model.peft_config["default"].base_model_name_or_path = settings.source
    role.model.save_pretrained(tmp_path / "adapter")
    top = base.settings.model_copy(update={"source": str(tmp_path / "adapter")})
    oracle = plus(base.weights, changes, learned)
    for dtype in ("bfloat16", "float32"):
        loaded = open_model(top.model_copy(update={"dtype": dtype}))
        assert 0.99 <= base.kept(held(loaded.model), oracle) <= 1.01


def test_float32_stays_float32(base, tmp_path):
    """The merged weights, to the bit, are those of peft's own merge, saved and loaded."""
    settings, _ = tuned(base, tmp_path / "run", 1e-3, dtype="float32")
    loaded = open_model(base.settings.model_copy(update={"dtype": "float32"}))
    role = new_role(loaded, "sft", LORA, seed=0)
    fill(role, base, 1e-3)
    expected = role.model.merge_and_unload().state_dict()
    own = open_model(settings.model_copy(update={"dtype": "float32"})).model.state_dict()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], expected[name]) for name in own)


def test_the_adapter_beside_is_one_of_peft(base, tmp_path):
    """On the bare base, peft itself computes with it what the oracle does."""
    _, changes = tuned(base, tmp_path / "run", 1e-3)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float64)
    folder = tmp_path / "run" / "model" / MERGED_ADAPTER
    merged = PeftModel.from_pretrained(plain, folder).merge_and_unload().state_dict()
    oracle = plus(base.weights, changes)
    assert all(torch.allclose(merged[name], oracle[name], atol=1e-7) for name in oracle)


def test_servers_without_the_change_get_it_with_each_adapter(base, tmp_path):
    """As vLLM's do: the bare model in a folder, and one adapter for fine-tuning and policy."""
    settings, changes = tuned(base, tmp_path / "run", 1e-3)
    loaded = open_model(settings)
    policy = new_role(loaded, "policy", LORA, seed=1)
    learned = fill(policy, base, 1e-3, first=4)
    assert carries_all(policy.model, "policy")
    save_weights(policy, tmp_path / "sent", merged=True)
    bare = drop(open_model(settings).model)
    save_model(bare, loaded.tokenizer, TEMPLATE, tmp_path / "bare")
    assert not (tmp_path / "bare" / MERGED_ADAPTER).exists()
    server = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "bare",
        dtype=torch.float64,
    )
    adapted = PeftModel.from_pretrained(server, tmp_path / "sent" / "adapter")
    weights = adapted.merge_and_unload().state_dict()
    assert 0.99 <= base.kept(weights, plus(base.weights, changes, learned)) <= 1.01


def test_servers_of_our_own_carry_what_the_learner_does(base, tmp_path):
    """A whole model that is sent replaces the weights, and what is carried stays."""
    settings, _ = tuned(base, tmp_path / "run", 1e-3)
    learner, server = open_model(settings), open_model(settings)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(1.5)
    save_weights(Role(learner.model), tmp_path / "sent")
    refill_model(server.model, tmp_path / "sent" / "model")
    own, theirs = held(learner.model), held(server.model)
    assert all(torch.equal(own[name], theirs[name]) for name in own)


@torch.no_grad()
def test_dora_is_merged_and_its_rounding_reported(base, tmp_path):
    """DoRA scales whole weights: no product of two small matrices does that."""
    loaded = open_model(base.settings)
    role = new_role(loaded, "sft", LORA.model_copy(update={"dora": True}), seed=0)
    fill(role, base, 1e-3)
    assert not carries_all(role.model, "sft")
    exact = copy.deepcopy(role.model).double().merge_and_unload().state_dict()
    model = settle(role.model, "sft", rounding := Rounding(torch.bfloat16))
    assert not any(carriers(model))
    left = whole = 0.0
    for name, before in base.weights.items():
        change = exact[name] - before.double()
        left += float(((model.get_parameter(name).double() - before.double()) * change).sum())
        whole += float(change.square().sum())
    assert rounding.layers == 14 and rounding.share == pytest.approx(left / whole, abs=0.02)
    assert rounding.share < 0.9
    save_model(model, loaded.tokenizer, TEMPLATE, tmp_path / "model")
    assert read_change(tmp_path / "model") is None


@torch.no_grad()
def test_dora_on_a_carried_change_is_merged_as_it_computes(base, tmp_path):
    settings, _ = tuned(base, tmp_path / "run", 1e-2)
    loaded = open_model(settings)
    role = new_role(loaded, "policy", LORA.model_copy(update={"dora": True}), seed=0)
    fill(role, base, 1e-1, first=4)
    cast(role.model, torch.float32)
    assert role.reads_masks  # whose proof switches adapters off
    role.activate()
    expected = role.states(base.ids)
    merged = Role(fold_in(settle(role.model, "policy")))
    assert not any(carriers(merged.model))
    torch.testing.assert_close(merged.states(base.ids), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_gpt2_keeps_its_weights_the_other_way_round(tmp_path):
    config = transformers.GPT2Config(vocab_size=261, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    config.bos_token_id = config.eos_token_id = 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(config).bfloat16().save_pretrained(tmp_path / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path / "base")
    settings = ModelConfig(source=str(tmp_path / "base"), dtype="bfloat16", cpu_kernels=False)
    loaded = open_model(settings)
    before = base_weights(loaded.model)
    before = {name: weight.double().clone() for name, weight in before.items()}
    role = new_role(loaded, "sft", LORA, seed=0)
    changes = {}
    for name, layer in role.causal_model.named_modules():
        if "sft" in getattr(layer, "lora_A", ()):
            down, up = layer.lora_A["sft"].weight, layer.lora_B["sft"].weight
            up.copy_(5e-5 * torch.randn(up.shape, generator=torch.Generator().manual_seed(1)))
            changes[f"{name}.weight"] = SCALE * (up.double() @ down.double()).T
    assert len(changes) == 8
    _save_merged(role, loaded, PLACE, RunDirectory.open(tmp_path / "run", {}), ALONE)
    model = open_model(settings.on_folder(tmp_path / "run" / "model")).model
    for name, layer in carriers(model):
        own = layer.weight.double() + (layer.carried_up.double() @ layer.carried_down.double()).T
        change = changes[f"{name}.weight"]
        error = own - before[f"{name}.weight"] - change
        assert error.norm() < 0.1 * change.norm()
    exact = fold_in(cast(model, torch.float32))
    factors = read_change(tmp_path / "run" / "model").factors
    left = whole = 0.0
    for name, change in changes.items():
        rounded = exact.get_parameter(name).bfloat16().double()
        left += float(((rounded - before[name]) * change).sum())
        whole += float(change.square().sum())
    share = rounding_of(exact, factors, torch.bfloat16).share
    assert share == pytest.approx(left / whole, abs=0.01)
    assert left < 0.99 * whole
    for name, change in changes.items():
        error = exact.get_parameter(name).double() - before[name] - change
        assert error.norm() < 0.1 * change.norm()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@torch.no_grad()
def test_four_bits_round_the_base_and_leave_the_change(base, tmp_path, dtype):
    """Merged first, and held in 4 bits then, a change of a thousandth would be gone."""
    settings, changes = tuned(base, tmp_path / "run", 1e-3, dtype=dtype)
    four = {"dtype": "float32", "quantize": "nf4"}
    own = Role(open_model(settings.model_copy(update=four)).model)
    bare = Role(open_model(base.settings.model_copy(update=four)).model)
    name, layer = next(iter(carriers(own.model)))
    states = torch.randn(200, 128, generator=torch.Generator().manual_seed(0)).to(own.model.dtype)
    made = (layer(states) - bare.model.get_submodule(name)(states)).double()
    expected = states.double() @ changes[f"{name}.weight"].T
    # as far as the few weights that missed their old place changed their level
    assert float((made * expected).sum() / expected.square().sum()) == pytest.approx(1, abs=0.1)


@torch.no_grad()
def test_a_model_that_is_kept_on_the_host_carries_its_change(base, tmp_path):
    settings, _ = tuned(base, tmp_path / "run", 1e-2)
    expected = Role(open_model(settings).model).states(base.ids)
    offloaded = keep_on_host(open_model(settings, on_host=True).model, torch.device("cpu"))
    assert torch.equal(Role(offloaded).states(base.ids), expected)


def test_references_that_differ_in_what_they_carry_have_other_digests(base, tmp_path):
    digests = {
        role_digest(Role(open_model(tuned(base, tmp_path / str(n), 1e-3, first=n)[0]).model))
        for n in (0, 4)
    }
    assert len(digests) == 2


def test_a_folder_of_an_older_run_is_taken_as_it_is_and_a_damaged_one_refused(base, tmp_path):
    settings, changes = tuned(base, tmp_path / "run", 1e-3)
    path = tmp_path / "run" / "model" / MERGED_ADAPTER / ADAPTER_WEIGHTS
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ModelError, match=r"merged_adapter.*cannot be used.*delete"):
        open_model(settings)
    path.unlink()
    loaded = open_model(settings)
    assert not any(carriers(loaded.model))
    assert base.kept(held(loaded.model), plus(base.weights, changes)) < NEAREST[1e-3]
