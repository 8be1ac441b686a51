"""Arguments of a chat template, from a recipe to all that renders: stages, judges, engine servers,
exports. The oracle is transformers' `apply_chat_template` with the same keywords.
"""

import json
import threading
from functools import cache

import pytest
import transformers
from benchmarks.templates import TALKS, VALUES, Published, published
from tests.judges.answering import Server, completion
from typer.testing import CliRunner

import tether
from tether.cli import app
from tether.cli.tools.export import export_model
from tether.core.errors import ConfigError, ModelError
from tether.core.rundir import read_json
from tether.core.types import Message, Prompt, Sampling, user
from tether.data.sources import read
from tether.judges.local import LocalChat
from tether.judges.openai import ServedChat
from tether.models.tiny import tiny_model
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.rollout.served import ServedEngine
from tether.runner.assembly.engines import engine_server
from tether.runner.assembly.judges import chat_model
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of, load_policy, local_engine
from tether.runner.prepare import prepare
from tether.scale.servers.launch import Servers
from tether.settings.engine import EngineConfig
from tether.settings.judges import JudgeServerConfig
from tether.settings.model import ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe

TEMPLATES = published()
QWEN = "trl/qwen3"
ASK = TALKS["plain"][:-1]
ROWS = [{"role": turn.role, "content": turn.content} for turn in ASK]
VOCABULARY = 640
pytestmark = pytest.mark.skipif(QWEN not in TEMPLATES, reason="needs trl, which ships templates")


@cache
def cases():
    """Of each template and argument both values: the template, and transformers' ids."""
    templates = [
        Published(text, {argument: value})
        for text in TEMPLATES.values()
        for argument in sorted(Published(text).encoder.chat.arguments)
        for value in VALUES[argument]
    ]
    assert len(templates) == 164
    return [(one, ids_of(one.tokenizer, one.text, **one.arguments)) for one in templates]


def ids_of(tokenizer, text=None, rows=ROWS, **keywords):
    return tuple(
        tokenizer.apply_chat_template(
            rows,
            chat_template=text,
            add_generation_prompt=True,
            return_dict=True,
            **keywords,
        )["input_ids"],
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model with the template of Qwen3."""
    folder = tmp_path_factory.mktemp("base")
    template = Published(TEMPLATES[QWEN])
    tokenizer = template.tokenizer
    tokenizer.eos_token = "<|im_end|>"
    model = tiny_model(0, vocab=VOCABULARY)
    model.config.max_position_embeddings = 4096
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """A run of SFT and GRPO without thoughts, one of whose rows thinks."""
    folder = tmp_path_factory.mktemp("run")
    model = {"source": str(base), "template": {"enable_thinking": False}, "dtype": "float32"}
    rows: list[dict[str, object]] = [{"prompt": f"Say {n}", "response": "yes"} for n in range(8)]
    rows[3]["chat_template_kwargs"] = {"enable_thinking": True}
    tether.sft(model, rows, heldout_fraction=0.0, run=str(folder / "run"), lora=False)
    return folder / "run"


def test_judges_render_with_the_arguments():
    role = Role(tiny_model(vocab=VOCABULARY))
    for template, expected in cases():
        judge = LocalChat("tiny", LocalEngine(role, template.encoder, context_length=4096))
        (branch,) = judge._branches(0, ASK, ("A", "B"))
        assert branch.encoded.ids[: len(expected)] == expected


def test_engine_servers_get_the_ids(base, tmp_path):
    loaded = open_model(ModelConfig(source=str(base), dtype="float32"))
    server = engine_server(
        open_model(ModelConfig(source=str(base), dtype="float32")),
        ("127.0.0.1", 0),
        4,
    )
    seen = []
    draw = server.generate
    server.generate = lambda body: (seen.append(tuple(body["token_ids"])), draw(body))[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    engine = ServedEngine(
        Role(loaded.model),
        encoder_of(loaded),
        Servers(lambda host, port: [], [], tmp_path / "engine", {"s0": address}),
        tmp_path / "engine",
        EngineConfig(kind="served", addresses=(address,)),
        context_length=4096,
        ours=True,
    )
    try:
        for template, expected in cases():
            engine.encoder = template.encoder
            how = {"num_samples": 1, "seed": 0, "ordinals": [0]}
            (group,) = engine.generate([Prompt(ASK)], Sampling(max_new_tokens=1), **how)
            assert seen[-1] == group.rollouts[0].prompt_ids == expected
    finally:
        engine.close()
        server.shutdown()
        server.server_close()


def test_what_sft_left_speaks_as_it_was_taught(run, base, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    quiet, thinking = (
        ids_of(tokenizer, enable_thinking=value) for value in VALUES["enable_thinking"]
    )
    assert quiet != thinking == ids_of(tokenizer)
    for source in (run, run / "sft" / "model"):
        encoder = encoder_of(load_policy(str(source))[1])
        assert encoder.prompt(ASK) == quiet
        row = Message("user", ASK[0].content, template='{"enable_thinking": true}')
        assert encoder.prompt((row,)) == thinking
    later = ModelConfig(source=str(run / "sft" / "model"), template={"enable_thinking": True})
    assert encoder_of(open_model(later)).prompt(ASK) == thinking
    export_model(str(run), tmp_path / "out")
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert ids_of(exported) == quiet and ids_of(exported, enable_thinking=True) == thinking


def test_an_adapter_is_sampled_from_with_the_prompts_of_its_training(base, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = {"source": str(base), "template": {"enable_thinking": False}, "dtype": "float32"}
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    rows = [{"prompt": "Say 1"}, {"prompt": "Say 2", **thinking}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = []

    def reward(prompts, completions, **columns):
        seen.extend(prompts)
        return [0.0 for _ in completions]

    tether.grpo(
        model,
        str(tmp_path / "rows.jsonl"),
        reward=reward,
        steps=1,
        prompts_per_step=2,
        samples_per_prompt=2,
        max_new_tokens=2,
        run=str(tmp_path / "run"),
    )
    assert len(seen) == 4
    encoding = read_json(tmp_path / "run" / "grpo" / "policy" / "role.json")["encoding"]
    assert encoding["template"].startswith(
        "{%- set enable_thinking = enable_thinking | default(False)",
    )
    prompts = [*read(str(tmp_path / "rows.jsonl"), Prompt)]
    how = {"num_samples": 1, "seed": 0, "ordinals": [0, 1]}
    for settings in (None, build(ModelConfig, model, where="model")):
        engine = local_engine(*load_policy(str(tmp_path / "run"), settings))
        groups = engine.generate(prompts, Sampling(max_new_tokens=1), **how)
        for prompt, group, thinks in zip(prompts, groups, (False, True), strict=True):
            said = [{"role": "user", "content": prompt.text}]
            expected = ids_of(tokenizer, rows=said, enable_thinking=thinks)
            assert group.rollouts[0].prompt_ids == expected
    other = build(ModelConfig, {**model, "template": {}}, where="model")
    with pytest.raises(ModelError, match="another chat template"):
        load_policy(str(tmp_path / "run"), other)


def test_an_adapter_of_a_model_with_two_templates_speaks_by_both(base, tmp_path):
    """One for conversations with tools, and one for all others."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    plain = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tokenizer.chat_template = {"default": plain, "tool_use": TEMPLATES[QWEN]}
    tiny_model(0, vocab=VOCABULARY).save_pretrained(tmp_path / "two")
    tokenizer.save_pretrained(tmp_path / "two")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say 1"}\n' * 2)
    short = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 2}
    run = tether.grpo(
        {"source": str(tmp_path / "two"), "dtype": "float32"},
        str(tmp_path / "rows.jsonl"),
        reward="random",
        run=str(tmp_path / "run"),
        **short,
    )
    encoder = encoder_of(load_policy(str(run.path))[1])
    (ask,) = said = [{"role": "user", "content": "Say 1"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert encoder.prompt((user("Say 1"),)) == ids_of(tokenizer, plain, said)
    asked = Message("user", ask["content"], tools=json.dumps(tools))
    assert encoder.prompt((asked,)) == ids_of(tokenizer, TEMPLATES[QWEN], said, tools=tools)


def test_judges_of_a_recipe_take_arguments_of_their_own(base, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    names = set()
    for value in VALUES["enable_thinking"]:
        judge = chat_model(str(base), None, template={"enable_thinking": value})
        assert isinstance(judge, LocalChat)
        assert judge.encoder.prompt(ASK) == ids_of(tokenizer, enable_thinking=value)
        names.add(judge.name)
    assert len(names) == 2, "answers of one are not those of the other"
    server = Server(lambda body, number: completion("A", [{"A": 0.9, "B": 0.1}]))
    try:
        config = JudgeServerConfig(url=server.url, model="m")
        served = ServedChat(config, {"enable_thinking": False})
        own = Message("user", "a", template='{"enable_thinking": true, "n": 1}')
        served.verdicts([(user("a"),), (own,)], ("A", "B"))
        ServedChat(config).verdicts([(user("a"),)], ("A", "B"))
        sent = [body.get("chat_template_kwargs") for body in server.requests]
    finally:
        server.close()
    assert sorted(sent[:2], key=str) == [
        {"enable_thinking": False},
        {"enable_thinking": True, "n": 1},
    ]
    assert sent[2] is None and served.name != ServedChat(config).name


def test_unknown_names_are_refused_before_weights_are_loaded(base, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 4)
    recipe = {
        "run": str(tmp_path / "run"),
        "model": {"source": str(base), "template": {"enable_thinkin": False}},
        "sft": {"data": {"path": str(tmp_path / "rows.jsonl")}},
    }
    with pytest.raises(
        ModelError,
        match=r"template names enable_thinkin, .* takes enable_thinking",
    ):
        prepare(build(Recipe, recipe))
    judged = recipe | {
        "model": {"source": "tiny"},
        "sft": {"data": {"path": str(tmp_path / "rows.jsonl")}},
        "pairs": {
            "data": {"path": str(tmp_path / "rows.jsonl")},
            "judge": {"model": str(base), "template": {"thinking": 1}},
        },
    }
    with pytest.raises((ModelError, ConfigError), match="template names thinking, "):
        prepare(build(Recipe, judged))


def test_inspection_says_what_a_template_does_with_earlier_thoughts(base, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 4)
    rows = str(tmp_path / "rows.jsonl")
    result = CliRunner().invoke(app, ["data", "inspect", rows, "--model", str(base)])
    words = " ".join(result.output.split())
    assert "drops the reasoning of earlier turns; its arguments: enable_thinking" in words
    result = CliRunner().invoke(app, ["data", "inspect", rows, "--model", "tiny"])
    assert "its arguments: none" in " ".join(result.output.split())
    assert "template of" not in CliRunner().invoke(app, ["data", "inspect", rows]).output
