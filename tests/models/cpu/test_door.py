"""The one door to a CPU's kernels: what it puts in place, how it is kept shut, and what is loaded
behind it.
"""

import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
import torch
import transformers

from tether.core.errors import ConfigError, ModelError
from tether.core.once import once
from tether.core.rundir import read_json
from tether.core.types import Prompt, Sampling, user
from tether.models.cpu import kernels, native
from tether.models.cpu.attention import pick_attention
from tether.models.cpu.memory import needs_heap
from tether.models.loading import load_model
from tether.models.trunk import GROUPED, Role
from tether.rollout.decoding import TreeDecoder
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import local_engine
from tether.runner.jobs import expand
from tether.runner.methods.stage import run_stage
from tether.settings.model import ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe

TINY = ModelConfig(source="tiny", dtype="float32", device="cpu")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 50,
}
needs_kernels = pytest.mark.skipif(kernels.library() is None, reason="needs a C compiler")


def classes(model):
    return {type(module) for module in model.modules()}


def test_loading_a_model_compiles_nothing_and_replaces_nothing():
    script = """
        import subprocess, sys
        from tether.core.stopping import begin_program
        begin_program()
        from tether.runner.jobs import expand
from tether.settings.model import ModelConfig
        from tether.models.loading import load_model
        from tether.models.tiny import tiny_model
        ran = []
        subprocess.run = lambda *a, **k: ran.append(a)
        model = load_model(ModelConfig(source="tiny", device="cpu")).model
        assert [type(m) for m in model.modules()] == [type(m) for m in tiny_model().modules()]
        assert model.config._attn_implementation == "eager" and not ran
        print(*(name for name in sys.modules if name.startswith("tether.models.cpu")))
    """
    lines = "\n".join(line.strip() for line in script.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", lines],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == ""


@needs_kernels
def test_the_door_says_what_it_put_in_place_and_rounding_is_all_that_changes(caplog):
    once.cache_clear()
    with caplog.at_level(logging.INFO, logger="tether.models.cpu"):
        loaded, _ = open_model(TINY), open_model(TINY)
    plain = load_model(TINY)
    assert loaded.cpu_kernels[:2] == ("attention", "decoding") and plain.cpu_kernels == ()
    assert [record.getMessage() for record in caplog.records] == [
        f"CPU kernels in use: {', '.join(loaded.cpu_kernels)}",
    ]
    assert loaded.model.config._attn_implementation == GROUPED and classes(loaded.model) == classes(
        plain.model,
    )
    ids = torch.arange(60).view(2, 30)
    torch.testing.assert_close(
        loaded.model(ids).logits,
        plain.model(ids).logits,
        rtol=1e-4,
        atol=1e-4,
    )
    assert loaded.digest == plain.digest


def test_a_recipe_keeps_the_door_shut(tmp_path, monkeypatch):
    """Training and sampling then are transformers' and torch's alone: no function of ours is
    called.
    """
    monkeypatch.setattr(kernels, "_call", None)
    off = TINY.model_copy(update={"cpu_kernels": False})
    loaded = open_model(off)
    assert classes(loaded.model) == classes(load_model(TINY).model)
    assert loaded.model.config._attn_implementation == "eager" and loaded.cpu_kernels == ()
    engine = local_engine(Role(loaded.model), loaded)
    assert (
        isinstance(engine.decoder, TreeDecoder)
        and not engine.decoder.products
        and not engine.decoder.in_place
    )
    groups = engine.generate(
        [Prompt((user("a"),)), Prompt((user("bcd"),))],
        Sampling(max_new_tokens=6),
        num_samples=2,
        seed=1,
    )
    assert all(len(rollout.response_ids) for group in groups for rollout in group.rollouts)
    (tmp_path / "rows.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
    )
    sft = {
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "epochs": 1,
        "batch_size": 1,
        "heldout_fraction": 0.0,
    }
    recipe = build(
        Recipe,
        {"run": "unused", "model": {"source": "tiny", "cpu_kernels": False}, "sft": sft},
        [],
        where="test",
    )
    (job,) = expand(recipe, ["sft"])
    run_stage(replace(job, folder=tmp_path / "sft"))
    assert read_json(tmp_path / "sft" / "manifest.json")["cpu_kernels"] == []


@needs_kernels
def test_samples_are_the_same_tokens_with_and_without(monkeypatch):
    prompts, sampling = (
        [Prompt((user(text),)) for text in ("a", "what is it?", "no")],
        Sampling(max_new_tokens=20),
    )
    texts = []
    for on in (True, False):
        loaded = open_model(TINY.model_copy(update={"cpu_kernels": on}))
        groups = local_engine(Role(loaded.model), loaded).generate(
            prompts,
            sampling,
            num_samples=3,
            seed=5,
        )
        texts.append([rollout.response_ids for group in groups for rollout in group.rollouts])
    assert texts[0] == texts[1]


def test_grouped_attention_and_no_kernels_contradict_each_other():
    with pytest.raises(ConfigError, match="cpu_kernels = false leaves out"):
        build(
            ModelConfig,
            {"source": "tiny", "attention": "grouped", "cpu_kernels": False},
            where="model",
        )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.LlamaConfig(**SMALL), GROUPED),
        (transformers.LlamaConfig(**SMALL, attention_dropout=0.1), "eager"),
        # its dropout has another name
        (transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=50), "eager"),
        (
            transformers.DeepseekV3Config(
                **SMALL,
                first_k_dense_replace=1,
                q_lora_rank=8,
                kv_lora_rank=8,
                qk_rope_head_dim=8,
            ),
            "eager",  # values narrower than keys
        ),
    ],
)
def test_grouped_attention_is_chosen_only_where_it_computes_what_the_model_does(config, expected):
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert pick_attention("auto", torch.device("cpu"), model) == expected
    if expected == "eager":
        with pytest.raises(ModelError, match="grouped"):
            pick_attention("grouped", torch.device("cpu"), model)


@pytest.fixture
def cached_library(tmp_path, monkeypatch):
    """A small library of our own in an empty cache, as `compiled` gives it."""
    if native.shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TETHER_KERNELS", raising=False)
    source = tmp_path / "small.c"
    source.write_text("int seven(void) { return 7; }")
    load = lambda: native.compiled(source, ("cc",), ["-O1"], [])  # noqa: E731
    assert load().seven() == 7
    (built,) = (tmp_path / "cache" / "kernels").glob("*.so")
    return load, built


def trusted(built):
    opened = os.open(built, os.O_RDONLY)
    try:
        return native.is_trusted(opened, built.name)
    finally:
        os.close(opened)


@pytest.mark.parametrize("fault", ["other contents", "others may write"])
def test_a_library_that_another_could_have_written_is_not_loaded(
    cached_library,
    fault,
    monkeypatch,
):
    load, built = cached_library
    assert trusted(built)
    if fault == "other contents":
        other = built.with_suffix(".other")
        other.write_bytes(built.read_bytes() + b"!")
        other.replace(built)  # in another file: this process has the first one in its memory
    else:
        built.chmod(0o775)
    assert not trusted(built)
    seen = []
    check = native.is_trusted
    monkeypatch.setattr(
        native,
        "is_trusted",
        lambda opened, file: seen.append(check(opened, file)) or seen[-1],
    )
    assert load().seven() == 7
    # the one in the cache is not taken, the one that is built again is
    assert seen == [False, True]


def test_a_library_or_folder_of_another_owner_is_not_loaded(cached_library, monkeypatch):
    load, built = cached_library
    owner = os.geteuid()
    monkeypatch.setattr(native.os, "geteuid", lambda: owner + 1)
    assert not trusted(built) and load() is None


def test_a_folder_of_another_owner_is_not_used_whoever_owns_the_library(
    cached_library,
    monkeypatch,
):
    load, built = cached_library
    look = os.fstat

    def foreign(opened):
        status = look(opened)
        other = (*status[:4], status.st_uid + stat.S_ISDIR(status.st_mode), *status[5:10])
        return os.stat_result(other)

    monkeypatch.setattr(native.os, "fstat", foreign)
    assert trusted(built) and load() is None


@pytest.mark.parametrize("cache", ["a file", "a folder of another owner"])
def test_where_the_cache_takes_no_file_a_library_is_built_for_this_process(
    cached_library,
    tmp_path,
    monkeypatch,
    caplog,
    cache,
):
    load, built = cached_library
    if cache == "a file":
        monkeypatch.setenv("TETHER_CACHE", str(built))
    elif os.geteuid() == 0:
        os.chown(built.parent, 12345, -1)
    else:
        pytest.skip("only root gives a folder to another owner")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = sorted(built.parent.iterdir())
    assert load().seven() == 7
    assert sorted(built.parent.iterdir()) == before
    assert not list(tmp_path.glob("*tether-kernels*"))
    assert "cannot be kept in the cache" in caplog.text and "TETHER_CACHE" in caplog.text


def test_a_compiler_that_fails_is_named(cached_library, tmp_path, caplog):
    source = tmp_path / "bad.c"
    source.write_text("int seven(void) { return 7 }")
    assert native.compiled(source, ("cc",), ["-O1"], []) is None
    assert "CPU kernels of bad.c cannot be built" in caplog.text
    assert "expected" in caplog.text  # gcc and clang both miss the semicolon in this word


def test_others_lose_the_right_to_write_to_the_folder(cached_library):
    load, built = cached_library
    built.parent.chmod(0o777)
    assert load().seven() == 7
    assert built.parent.stat().st_mode & 0o022 == 0


def test_a_library_swapped_after_the_check_is_not_loaded(cached_library, tmp_path, monkeypatch):
    """Between the check and the loading another library takes the place of the file, and of its
    folder.
    """
    load, built = cached_library
    # the loader would give what it has already loaded by a path, whatever lies there now
    shutil.copytree(built.parents[1], tmp_path / "fresh")
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "fresh"))
    evil = tmp_path / "evil.c"
    evil.write_text("int seven(void) { return 666; }")
    native.subprocess.run(
        ["cc", "-shared", "-fPIC", str(evil), "-o", str(tmp_path / "evil.so")],
        check=True,
    )
    check = native.is_trusted

    def swapped(opened, file):
        result = check(opened, file)
        folder = tmp_path / "fresh" / "kernels"
        folder.rename(folder.with_name("moved"))
        folder.mkdir()
        shutil.copy(tmp_path / "evil.so", folder / file)
        return result

    monkeypatch.setattr(native, "is_trusted", swapped)
    assert load().seven() == 7


@pytest.mark.parametrize(
    ("version", "needed"),
    [("glibc 2.36", True), ("glibc 2.38", False), ("glibc 2.41", False), (None, False)],
)
def test_the_allocator_is_for_older_c_libraries_alone(monkeypatch, version, needed):
    monkeypatch.setattr(os, "confstr", lambda name: version)
    assert needs_heap() is needed
