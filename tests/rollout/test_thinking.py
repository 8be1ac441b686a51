"""Budgets for thoughts, against whole forward passes of transformers and against text by hand."""

import json
import threading
from dataclasses import replace

import pytest
import torch
from benchmarks.templates import Published, published

import tether
from tether.core.errors import ConfigError, DataError, TetherError
from tether.core.protocols import DrawArguments
from tether.core.thoughts import answer_start
from tether.core.types import Problem, Prompt, Sampling, StopReason, user
from tether.data.chat import ChatEncoder
from tether.models.tiny import tiny_model
from tether.models.trunk import Role
from tether.rewards.verifiable import VerifiableReward
from tether.rollout.local import LocalEngine
from tether.rollout.served import ServedEngine
from tether.runner.assembly.engines import engine_server
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import encoder_of
from tether.scale.servers.launch import Servers
from tether.settings.engine import EngineConfig
from tether.settings.model import ModelConfig
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.rewards import VerifiableConfig

OPENING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "<think>{% endif %}"
)
"""A template whose prompt opens the thought of a reply."""
PROMPTS = [
    Prompt((user(text),), str(n)) for n, text in enumerate(["one", "and two", "what of three?"])
]
BUDGET, LONGEST = 7, 20
HOW: DrawArguments = {"num_samples": 40, "seed": 3}


@pytest.fixture(scope="module")
def engine():
    published_ = Published(OPENING)
    tokenizer = published_.tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|end|>"]})
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    model = tiny_model(5, vocab=len(tokenizer)).float()
    encoder = ChatEncoder(tokenizer, (end,), OPENING)
    return LocalEngine(Role(model), encoder, context_length=256)


def marks(engine):
    ids = engine.encoder.tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|end|>"])
    return [*ids]


@torch.no_grad()
def greedy(engine, prompt, budget, longest):
    """Token by token from whole forward passes, with the mark that ends a thought after `budget`."""
    _, closed, end = marks(engine)
    ids, given = list(prompt), None
    while len(ids) - len(prompt) < longest:
        if len(ids) - len(prompt) == budget and closed not in ids[len(prompt) :]:
            given = len(ids)
            ids.append(closed)
            continue
        logits = engine.role.causal_model(input_ids=torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits[: engine.role.num_tokens].argmax()))
        if ids[-1] == end:
            break
    return tuple(ids[len(prompt) :]), None if given is None else given - len(prompt)


def test_greedy_replies_are_those_by_hand(engine):
    sampling = Sampling(max_new_tokens=LONGEST, temperature=0.0, thought_tokens=BUDGET)
    for group in engine.generate(PROMPTS, sampling):
        (rollout,) = group.rollouts
        ids, given = greedy(engine, rollout.prompt_ids, BUDGET, LONGEST)
        assert rollout.response_ids == ids and len(ids) <= LONGEST
        length = len(ids)
        assert rollout.spans == (
            ((0, length),) if given is None else ((0, given), (given + 1, length))
        )


@torch.no_grad()
def test_what_is_given_is_not_sampled_and_all_else_has_its_probability(engine):
    sampling = Sampling(max_new_tokens=LONGEST, thought_tokens=BUDGET)
    _, closed, end = marks(engine)
    rollouts = [r for group in engine.generate(PROMPTS, sampling, **HOW) for r in group.rollouts]
    given, early, over = 0, 0, 0
    for rollout in rollouts:
        ids = rollout.response_ids
        whole = torch.tensor([rollout.prompt_ids + ids])
        logits = engine.role.causal_model(input_ids=whole).logits[
            0,
            len(rollout.prompt_ids) - 1 : -1,
        ]
        logprobs = logits[:, : engine.role.num_tokens].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
        sampled = [place for start, stop in rollout.spans for place in range(start, stop)]
        assert list(rollout.logprobs) == pytest.approx([expected[p] for p in sampled], abs=1e-4)
        trained = engine.encoder.sampled(rollout).trained[len(rollout.prompt_ids) :]
        first = ids[:BUDGET]
        if end in first:
            assert ids[-1] == end and len(rollout.spans) == 1
            over += 1
        elif closed in first:
            assert len(rollout.spans) == 1 and all(trained)
            early += 1
        else:
            assert ids[BUDGET] == closed and rollout.spans == ((0, BUDGET), (BUDGET + 1, len(ids)))
            assert [p for p, counts in enumerate(trained) if not counts] == [BUDGET]
            again = marks(engine)[0] in ids[BUDGET:]
            assert again or answer_start(rollout.whole_text) is not None
            given += 1
        assert len(ids) <= LONGEST
        assert (rollout.stop_reason is StopReason.LENGTH) == (ids[-1] != end)
        assert rollout.sampling == sampling
    assert given > 80 and early >= 1 and over >= 1 and given + early + over == 120


def test_replies_do_not_depend_on_their_batch(engine):
    sampling = Sampling(max_new_tokens=LONGEST, thought_tokens=BUDGET)
    together = engine.generate(PROMPTS, sampling, ordinals=[4, 8, 6], **HOW)
    alone = [
        engine.generate([prompt], sampling, ordinals=[ordinal], **HOW)[0]
        for prompt, ordinal in zip(PROMPTS, [4, 8, 6], strict=True)
    ]
    for one, other in zip(together, alone, strict=True):
        assert [r.response_ids for r in one.rollouts] == [r.response_ids for r in other.rollouts]


def test_every_continuation_has_random_numbers_of_its_own(engine, monkeypatch):
    counters = []
    draw = engine.draw

    def noted(draws):
        counters.append([*draws.ordinals])
        return draw(draws)

    monkeypatch.setattr(engine, "draw", noted)
    sampling = Sampling(max_new_tokens=LONGEST, thought_tokens=BUDGET)
    engine.generate(PROMPTS, sampling, ordinals=[4, 8, 6], **HOW)
    first, *later = counters
    own = [ordinal for part in later for ordinal in part]
    assert first == [4, 8, 6] and len(own) > 80
    assert len({*own, *first}) == len(own) + len(first)


def test_a_reply_that_begins_no_thought_goes_on_as_it_is(engine):
    plain = OPENING.replace("<think>{% endif %}", "{% endif %}")
    assert plain != OPENING
    encoder = ChatEncoder(engine.encoder.tokenizer, engine.encoder.stop_ids, plain)
    own = LocalEngine(engine.role, encoder, context_length=256)
    sampling = Sampling(max_new_tokens=LONGEST, thought_tokens=BUDGET)
    opened, closed, _ = marks(engine)
    thoughts = 0
    for group in own.generate(PROMPTS, sampling, **HOW):
        for rollout in group.rollouts:
            begun = rollout.response_ids[:BUDGET]
            thinks = opened in begun and closed not in begun[begun.index(opened) :]
            if thinks and engine.encoder.stop_ids[0] not in begun:
                assert len(rollout.spans) == 2
                thoughts += 1
            else:
                assert len(rollout.spans) == 1
    assert 1 <= thoughts < 30


def test_served_replies_are_the_local_ones(tmp_path):
    tokenizer = Published(OPENING).tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|end|>"]})
    tokenizer.chat_template, tokenizer.eos_token = OPENING, "<|end|>"
    tiny_model(5, vocab=len(tokenizer)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    settings = ModelConfig(source=str(tmp_path / "base"), dtype="float32")
    loaded = open_model(settings)
    server = engine_server(open_model(settings), ("127.0.0.1", 0), 16)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    served = ServedEngine(
        Role(loaded.model),
        encoder_of(loaded),
        Servers(lambda host, port: [], [], tmp_path / "engine", {"s0": address}),
        tmp_path / "engine",
        EngineConfig(kind="served", addresses=(address,)),
        context_length=256,
        ours=True,
    )
    try:
        sampling = Sampling(max_new_tokens=LONGEST, thought_tokens=BUDGET)
        how = {"num_samples": 6, "seed": 3, "ordinals": [5, 1, 2]}
        local = LocalEngine(Role(loaded.model), encoder_of(loaded), context_length=256)
        for one, other in zip(
            served.generate(PROMPTS, sampling, **how),
            local.generate(PROMPTS, sampling, **how),
            strict=True,
        ):
            for a, b in zip(one.rollouts, other.rollouts, strict=True):
                assert (a.response_ids, a.spans, a.stop_reason) == (
                    b.response_ids,
                    b.spans,
                    b.stop_reason,
                )
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    finally:
        served.close()
        server.shutdown()
        server.server_close()


def test_the_mark_is_the_templates_own():
    expected = {
        "qwen3": "\n</think>\n\n",
        "deepseek_r1_distill": "\n</think>\n\n",
        "gptoss": "<|end|><|start|>assistant<|channel|>final<|message|>",
        "gemma4_v5": "\n<channel|>",
        "lfm2_2_5": "</think>",
    }
    templates = published()
    if "trl/qwen3" not in templates:
        pytest.skip("needs trl, which ships chat templates")
    for name, closing in expected.items():
        assert Published(templates[f"trl/{name}"]).encoder.chat.closing == closing
    for name, reason in {
        "llama3": "leaves out the reasoning",
        "muse_glimmer": "has no mark",
    }.items():
        with pytest.raises(DataError, match=reason):
            _ = Published(templates[f"trl/{name}"]).encoder.chat.closing


def test_checks_of_answers_read_what_follows_the_thought(engine):
    """The thought holds an answer too; the one behind the mark that was given counts."""
    sampling = Sampling(max_new_tokens=LONGEST, thought_tokens=BUDGET)
    problem = Problem((user("2 + 2?"),), "4")
    (group,) = engine.generate([Prompt(problem.prompt)], sampling, num_samples=1, seed=0)
    (rollout,) = group.rollouts
    tokenizer = engine.encoder.tokenizer
    for before, after, value in (
        ("#### 5", "#### 4", 1.0),
        ("#### 4", "#### 5", 0.0),
        ("#### 4", "", 0.0),
    ):
        text = f"{before}</think>{after}"
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        cut = len(tokenizer(before, add_special_tokens=False)["input_ids"])
        one = replace(
            rollout,
            response_ids=ids,
            logprobs=(),
            spans=tuple(span for span in ((0, cut), (cut + 1, len(ids))) if span[0] < span[1]),
            text=text,
            prompt=Prompt(problem.prompt, metadata={"answer": "4"}),
        )
        (score,) = VerifiableReward(VerifiableConfig(kind="gsm8k")).score([one])
        assert score.value == value


def test_budgets_that_leave_no_answer_are_refused(engine):
    sampling = Sampling(max_new_tokens=BUDGET + 1, thought_tokens=BUDGET)
    with pytest.raises(ConfigError, match="leave nothing of max_new_tokens = 8"):
        engine.generate(PROMPTS, sampling)
    grpo = {"data": {"path": "tether:prompts"}, "thought_tokens": 64, "max_new_tokens": 64}
    recipe = {"run": "r", "model": {"source": "tiny"}, "grpo": grpo}
    with pytest.raises(
        TetherError,
        match="thought_tokens = 64 leaves nothing of max_new_tokens = 64",
    ):
        build(Recipe, recipe)
    recipe["grpo"] = grpo | {
        "max_new_tokens": 80,
        "max_staleness": 1,
        "importance": "truncate",
        "engine": {"kind": "served", "addresses": ["http://127.0.0.1:1"]},
    }
    with pytest.raises(TetherError, match="thought_tokens is for single answers"):
        build(Recipe, recipe)


def test_grpo_learns_from_the_tokens_that_were_sampled(engine, tmp_path):
    tokenizer = engine.encoder.tokenizer
    tokenizer.chat_template, tokenizer.eos_token = OPENING, "<|end|>"
    engine.role.causal_model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    texts = []

    def reward(completions, **columns):
        texts.extend(completions)
        return [float(len(text) % 3) for text in completions]

    tether.grpo(
        {"source": str(tmp_path / "base"), "dtype": "float32"},
        [{"prompt": f"Say {n}"} for n in range(4)],
        reward=reward,
        steps=2,
        prompts_per_step=4,
        samples_per_prompt=4,
        max_new_tokens=LONGEST,
        thought_tokens=BUDGET,
        run=str(tmp_path / "run"),
    )
    lines = (tmp_path / "run" / "grpo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    first = json.loads(lines[0])
    assert len(texts) == 32 and sum("</think>" in text for text in texts) > 20
    assert first["policy/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert first["policy/engine_gap"] < 1e-5, "the learner's own probabilities of those tokens"
