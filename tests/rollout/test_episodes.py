"""Episodes against a scripted engine and against the engine of single replies."""

import asyncio
import json
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from benchmarks.templates import Published, published

from tether.core.errors import DataError
from tether.core.once import once
from tether.core.types import Message, Prompt, Sampling, Score, StopReason, user
from tether.data.chat import ChatEncoder
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.rewards.environments import EnvironmentThreads
from tether.rewards.forms import LastReply
from tether.rewards.limit import FailureLimit
from tether.rewards.tools import ToolEnvironment, schemas
from tether.rollout import talk
from tether.rollout.drawn import Drawn
from tether.rollout.episodes import EpisodeEngine
from tether.rollout.local import LocalEngine
from tether.settings.environment import EpisodeLimits
from tether.stages.online_loop import _sample
from tether.stages.rollouts import sample_metrics

TASKS = [Prompt((user(text),), text) for text in ("one", "two")]
SAMPLING = Sampling(max_new_tokens=64)
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Scripted:
    """An engine that writes given texts: the n-th reply of each episode."""

    policy_version = 3

    def __init__(self, encoder, *texts, cut=()):
        self.encoder, self.texts, self.cut = encoder, texts, cut
        self.rows, self.ordinals = [], []

    def draw(self, draws):
        self.rows.append([*draws.rows])
        self.ordinals.append([*draws.ordinals])
        turn = len(self.rows) - 1
        ids = tuple(self.encoder.tokenizer(self.texts[turn])["input_ids"])
        ends = turn not in self.cut
        reply = Drawn(
            (*ids, 1) if ends else ids,
            tuple(-0.1 * n for n in range(len(ids) + ends)),
            StopReason.STOP_TOKEN if ends else StopReason.LENGTH,
        )
        return [[reply] * draws.num_samples for _ in draws.rows]


class Echo:
    """Repeats what it is told, and pays one for each reply; the third ends it."""

    def reset(self, task):
        self.turns = 0

    def step(self, message):
        self.turns += 1
        return f"you said {message['content']}", 1.0, self.turns == 3


def encoder(template=None):
    return ChatEncoder(tiny_tokenizer(), (1,), template)


def episodes(make, *texts, limits=None, tools="", template=None, cut=(), **how):
    reader = encoder(template)
    engine = Scripted(reader, *texts, cut=cut)
    pool = EnvironmentThreads(make, tools, **how)
    return EpisodeEngine(engine, pool, reader, limits or EpisodeLimits()), engine


def play(engine, **how):
    return [r for group in engine.generate(TASKS, SAMPLING, **how) for r in group.rollouts]


def test_an_episode_is_what_the_template_writes_of_the_conversation():
    engine, script = episodes(Echo, "a", "b <think>", "c")
    for rollout in play(engine, num_samples=2):
        asked = [rollout.prompt.messages[0].as_row()]
        for text in ("a", "b <think>"):
            asked += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"you said {text}"},
            ]
        whole = engine.encoder.tokenizer.apply_chat_template(
            [*asked, {"role": "assistant", "content": "c"}],
            return_dict=True,
        )["input_ids"]
        assert [*rollout.prompt_ids, *rollout.response_ids] == whole
        texts = [
            engine.encoder.tokenizer.decode(rollout.response_ids[start:stop])
            for start, stop in rollout.spans
        ]
        assert texts == ["a<|end|>", "b <think><|end|>", "c<|end|>"]
        assert len(rollout.logprobs) == rollout.num_written == 2 + 10 + 2
        assert rollout.outcome.value == 3 and rollout.text == "c" and rollout.finished
        ends = [stop - 1 for _, stop in rollout.spans]
        assert rollout.outcome.steps == tuple((end, 1.0) for end in ends)
    assert [len(rows) for rows in script.rows] == [2, 4, 4]


def test_arguments_of_a_row_hold_between_its_replies():
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{{ mood | default('') }}{% endif %}"
    )
    one, two = (
        Prompt((replace(user("a"), template=json.dumps({"mood": mood})),))
        for mood in ("calm", "wild")
    )
    engine, _ = episodes(Echo, "a", "b", "c", template=template)
    for group, mood in zip(engine.generate([one, two], SAMPLING), ("calm", "wild"), strict=True):
        (rollout,) = group.rollouts
        read = engine.encoder.tokenizer.decode(rollout.prompt_ids + rollout.response_ids)
        assert read.count(f"<|assistant|>{mood}") == read.count("<|assistant|>") == 3


def test_draws_of_two_episodes_or_turns_never_have_the_same_counter():
    engine, script = episodes(Echo, "a", "b", "c")
    play(engine, num_samples=3, ordinals=[0, 1])
    later = [place for places in script.ordinals[1:] for place in places]
    assert len(set(later)) == len(later) == 12
    assert not {0, 1} & set(later)


def test_one_reply_is_the_rollout_of_the_engine_itself():
    class Once:
        def reset(self, task):
            return None

        def step(self, message):
            return None, float(len(message["content"])), True

    local = LocalEngine(Role(tiny_model(0)), encoder())
    engine = EpisodeEngine(local, EnvironmentThreads(Once), local.encoder, EpisodeLimits())
    sampling = Sampling(max_new_tokens=16)
    plain = local.generate(TASKS, sampling, num_samples=3, seed=5, ordinals=[4, 9])
    mine = engine.generate(TASKS, sampling, num_samples=3, seed=5, ordinals=[4, 9])
    for one, other in zip(plain, mine, strict=True):
        for a, b in zip(one.rollouts, other.rollouts, strict=True):
            for name in ("prompt_ids", "response_ids", "logprobs", "stop_reason", "text", "spans"):
                assert getattr(a, name) == getattr(b, name)
            assert b.outcome.value == len(b.text)


def test_a_random_policy_plays_on_until_its_limits():
    class Forever(Echo):
        def step(self, message):
            return "go on", None, False

    local = LocalEngine(Role(tiny_model(1)), encoder())
    with torch.no_grad():  # a model that often ends its turn
        local.role.causal_model.get_output_embeddings().weight[1] *= 3
    limits = EpisodeLimits(turns=3, tokens=90)
    engine = EpisodeEngine(local, EnvironmentThreads(Forever), local.encoder, limits)
    sampling = Sampling(max_new_tokens=8)
    groups = engine.generate(TASKS, sampling, num_samples=16, seed=2)
    rollouts = [r for group in groups for r in group.rollouts]
    assert {r.stop_reason for r in rollouts} >= {StopReason.LENGTH, StopReason.TURNS}
    for r in rollouts:
        assert len(r.response_ids) <= 90 and len(r.spans) <= 3
        assert r.outcome.value is None and "no reward" in r.outcome.reason
        scores = local.role.model(input_ids=torch.tensor([[*r.prompt_ids, *r.response_ids]])).logits
        logprobs = scores[0].log_softmax(-1)
        places = [p for start, stop in r.spans for p in range(start, stop)]
        first = len(r.prompt_ids) - 1
        for place, logprob in zip(places, r.logprobs, strict=True):
            own = float(logprobs[first + place, r.response_ids[place]])
            assert own == pytest.approx(logprob, abs=2e-4)
    again = engine.generate(TASKS, sampling, num_samples=16, seed=2)
    assert [r.response_ids for g in again for r in g.rollouts] == [r.response_ids for r in rollouts]


def test_a_reply_that_a_string_ends_gets_the_end_of_its_turn_unsampled():
    class Talks(Echo):
        def step(self, message):
            return super().step(message) if message["content"] else (None, 0.0, True)

    local = LocalEngine(Role(tiny_model(1)), encoder())
    engine = EpisodeEngine(local, EnvironmentThreads(Talks), local.encoder, EpisodeLimits())
    sampling = Sampling(max_new_tokens=64, stop_strings=tuple("abcdefghijklmnopqrst"))
    groups = engine.generate(TASKS, sampling, num_samples=8, seed=1)
    several = [r for group in groups for r in group.rollouts if len(r.spans) > 1]
    assert several
    for rollout in several:
        for _, stop in rollout.spans[:-1]:
            ended = rollout.response_ids[stop - 1] == 1
            assert ended or rollout.response_ids[stop] == 1
            assert rollout.response_ids[stop + (not ended)] == 3  # the next turn begins


def test_a_cut_reply_ends_the_episode_without_an_invented_end():
    engine, _ = episodes(Echo, "a", "b", cut=(1,))
    for rollout in play(engine):
        assert rollout.stop_reason is StopReason.LENGTH and not rollout.finished
        assert rollout.response_ids[-1] != 1
        assert rollout.outcome.value == 2


def test_an_environment_reads_as_much_of_a_reply_as_there_was_room_for():
    heard = []

    class Listens(Echo):
        def step(self, message):
            heard.append(message["content"])
            return super().step(message)

    engine, _ = episodes(Listens, "a" * 40 + " right", limits=EpisodeLimits(tokens=8))
    for rollout in play(engine):
        assert rollout.text == "a" * 8 and len(rollout.response_ids) == 8
    assert heard == ["a" * 8] * 2


def test_an_episode_ends_where_no_reply_would_fit_the_context():
    """Engines refuse a request that may grow beyond it."""
    for room, turns in ((200, 3), (75, 1)):
        engine, script = episodes(Echo, "a", "b", "c")
        engine.context_length = room
        for rollout in play(engine):
            assert len(rollout.spans) == turns
        longest = max(len(row) for rows in script.rows for row in rows)
        assert longest + SAMPLING.max_new_tokens <= room


def test_words_that_do_not_fit_end_the_episode():
    class Long(Echo):
        def step(self, message):
            return "long " * 100, 0.5, False

    engine, _ = episodes(Long, "a", limits=EpisodeLimits(tokens=100))
    for rollout in play(engine):
        assert rollout.stop_reason is StopReason.FULL
        assert len(rollout.response_ids) == 2 and rollout.outcome.value == 0.5


class Raises(Echo):
    def step(self, message):
        raise OSError("the disk is gone")


class Hangs(Echo):
    def step(self, message):
        time.sleep(20)


class Nonsense(Echo):
    def step(self, message):
        return 3


class Silent(Echo):
    def step(self, message):
        return [], 1.0, False


class Huge(Echo):
    def step(self, message):
        return "x" * 10_000_000, 1.0, False


class Assistant(Echo):
    def step(self, message):
        return [{"role": "assistant", "content": "I say"}], 1.0, False


class NoReset(Echo):
    def reset(self, task):
        raise KeyError("task")


class NotANumber(Echo):
    def step(self, message):
        return "x", "three", False


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Raises, "OSError: the disk is gone"),
        (Hangs, "no answer within 0.3 s"),
        (Nonsense, "(messages, reward, done)"),
        (Silent, "neither a message nor the end"),
        (Huge, "10,000,000 characters"),
        (Assistant, "role 'assistant'"),
        (NoReset, "KeyError"),
        (NotANumber, "the environment returned a str, not a number"),
    ],
)
def test_a_failure_is_named_and_no_reward(make, reason):
    engine, script = episodes(make, "a", "b", time_limit=0.3)
    for rollout in play(engine, num_samples=2):
        assert rollout.outcome.value is None and reason in rollout.outcome.reason
        assert len(rollout.spans) == 1
    assert len(script.rows) == 1


def test_a_function_does_not_score_what_the_environment_failed():
    class Even:
        name = "even"

        def score(self, rollouts):
            return [Score(1.0)] * len(rollouts)

    engine, _ = episodes(Raises, "a")
    scores = FailureLimit(Even(), 1.0).score(play(engine))
    assert [score.value for score in scores] == [None, None]
    assert "the disk is gone" in scores[0].reason
    engine, _ = episodes(Echo, "a", "b", "c")
    assert [score.value for score in FailureLimit(Even(), 1.0).score(play(engine))] == [1, 1]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("go", ["go"]),
        (
            [{"role": "system", "content": "rules"}, {"role": "user", "content": "go"}],
            ["rules", "go"],
        ),
        (None, []),
    ],
)
def test_turns_begin_with_what_the_first_reply_answers(said, shown):
    class Says(Echo):
        def reset(self, task):
            super().reset(task)
            return said

    engine, _ = episodes(Says, "a", "b", "c")
    for rollout in play(engine):
        answers = ["a", "you said a", "b", "you said b", "c"]
        assert [turn.content for turn in rollout.turns] == shown + answers
        first = engine.encoder.decode(rollout.prompt_ids)
        assert all(text in first for text in shown) and rollout.outcome.value == 3


def test_one_that_fails_leaves_the_others_alone():
    class Odd(Echo):
        def reset(self, task):
            super().reset(task)
            self.bad = task["prompt"][0]["content"] == "two"

        def step(self, message):
            if self.bad:
                time.sleep(20)
            return super().step(message)

    began = time.monotonic()
    engine, _ = episodes(Odd, "a", "b", "c", time_limit=0.3, retries=0)
    one, two = play(engine)
    assert one.outcome.value == 3 and two.outcome.value is None
    assert time.monotonic() - began < 5


def test_a_fresh_environment_is_led_to_where_the_other_failed():
    made = []

    class Flaky(Echo):
        def __init__(self):
            made.append(self)
            self.number = len(made)

        def step(self, message):
            if self.number <= 2 and self.turns == 1:
                raise OSError
            return super().step(message)

    engine, _ = episodes(Flaky, "a", "b", "c")
    assert [r.outcome.value for r in play(engine)] == [3, 3]
    assert len(made) == 4


def test_a_fresh_environment_that_begins_another_game_is_a_failure():
    """The reply was to the other one's opening."""
    boards = iter("abcdefgh")

    class Drawn(Echo):
        def reset(self, task):
            super().reset(task)
            self.board = next(boards)
            return f"board {self.board}"

        def step(self, message):
            if self.board in "ab":
                raise OSError
            return super().step(message)

    engine, _ = episodes(Drawn, "a", "b", "c")
    for rollout in play(engine):
        assert rollout.outcome.value is None
        assert "begins the same task otherwise" in rollout.outcome.reason


@pytest.mark.parametrize(
    ("said", "reason"),
    [("x" * 3000, "does not fit the model's context of 2048"), ({"role": "tool"}, "no text")],
)
def test_an_opening_that_cannot_be_read_leaves_the_others_alone(said, reason):
    class Says(Echo):
        def reset(self, task):
            super().reset(task)
            return said if task["prompt"][0]["content"] == "two" else None

    engine, _ = episodes(Says, "a", "b", "c")
    engine.context_length = 2048
    one, two = play(engine)
    assert one.outcome.value == 3 and two.outcome.value is None
    assert reason in two.outcome.reason


def test_coroutines_of_an_environment_share_an_event_loop_to_its_close():
    """A connection that `reset` opens answers in `step`, and what is left of it is cancelled."""
    ended = []

    class Connected(Echo):
        async def reset(self, task):
            super().reset(task)
            self.loop = asyncio.get_running_loop()
            self.asked, self.answers = asyncio.Queue(), asyncio.Queue()
            self.work = asyncio.create_task(self.answer())

        async def answer(self):
            try:
                while True:
                    await self.answers.put(f"heard {await self.asked.get()}")
            finally:
                ended.append("work")

        async def step(self, message):
            assert asyncio.get_running_loop() is self.loop
            await self.asked.put(message["content"])
            _, reward, done = super().step(message)
            return await self.answers.get(), reward, done

        async def close(self):
            assert asyncio.get_running_loop() is self.loop
            ended.append("closed")

    engine, _ = episodes(Connected, "a", "b", "c")
    for rollout in play(engine):
        assert rollout.outcome.value == 3
        assert [turn.content for turn in rollout.turns[1::2]] == ["heard a", "heard b"]
    deadline = time.monotonic() + 10
    while len(ended) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(ended) == ["closed", "closed", "work", "work"]


@pytest.mark.parametrize("number", [np.float32(0.5), torch.tensor(0.5), np.array(0.5), True])
def test_rewards_are_numbers_of_any_kind(number):
    class Pays(Echo):
        def step(self, message):
            return "on", number, super().step(message)[2]

    engine, _ = episodes(Pays, "a", "b", "c")
    assert {rollout.outcome.value for rollout in play(engine)} == {3 * float(number)}


def test_a_key_of_a_message_that_is_not_used_is_named_once(caplog):
    class Misspelt(Echo):
        def step(self, message):
            turns, *others = super().step(message)
            return [{"role": "user", "content": turns, "contents": "y"}], *others

    once.cache_clear()
    engine, _ = episodes(Misspelt, "a", "b", "c")
    assert [rollout.outcome.value for rollout in play(engine)] == [3, 3]
    assert [text.count("'contents' of an environment's message") for text in caplog.messages] == [1]


def test_an_opening_may_have_replies_and_calls_that_are_none_of_the_policys():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

    class Shows(Echo):
        def reset(self, task):
            super().reset(task)
            return [
                *task["prompt"],
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "6", "name": "add", "tool_call_id": "1"},
                {"role": "user", "content": "ok?"},
            ]

        def step(self, message):
            _, _, done = super().step(message)
            return "next", 10.0**self.turns, done

    engine, _ = episodes(Shows, "a", "b", "c", template=CHATML)
    for rollout in play(engine):
        assert rollout.opened.messages[1].as_row()["tool_calls"] == [call]
        turns = [turn.as_row() for turn in rollout.turns]
        assert [turn["content"] for turn in turns if turn["role"] == "assistant"][-3:] == [*"abc"]
        reply = LastReply.of(rollout)
        assert [turn["content"] for turn in reply.turns] == ["a", "next", "b", "next", "c"]
        row = _sample(1, rollout, rollout.outcome)
        paid = {turn["content"]: turn["reward"] for turn in row["turns"] if "reward" in turn}
        assert paid == {"a": 10.0, "b": 100.0, "c": 1000.0}


def test_environments_are_closed_where_sampling_fails():
    closed = []

    class Held(Echo):
        def close(self):
            closed.append(self)

    engine, script = episodes(Held, "a", "b", "c")
    script.texts = ("a",)
    with pytest.raises(IndexError):
        play(engine)
    deadline = time.monotonic() + 10
    while len(closed) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(closed) == 2


def test_an_environment_that_answers_too_late_gets_no_reply_twice():
    """The late answer comes while a fresh environment begins."""
    heard = []

    class Late(Echo):
        made = 0

        def __init__(self):
            type(self).made += 1
            self.number = self.made
            self.words = []
            heard.append(self.words)

        def reset(self, task):
            super().reset(task)
            time.sleep(0.6 * (self.number > 1))

        def step(self, message):
            self.words.append(message["content"])
            time.sleep(1.2 * (self.number == 1))
            return super().step(message)

    pool = EnvironmentThreads(Late, time_limit=1.0)
    pool.begin({0: TASKS[0]})
    assert pool.step({0: Message("assistant", "a")})[0].messages[0].content == "you said a"
    assert heard == [["a"], ["a"]]


def test_surrogates_reach_no_tokenizer():
    class Broken(Echo):
        def step(self, message):
            return "a\ud800b", 1.0, bool(self.turns) or setattr(self, "turns", 1)

    engine, _ = episodes(Broken, "a", "b")
    assert all(r.outcome.value == 2 for r in play(engine))


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    if a == 13:
        raise ValueError("bad luck")
    return a + b


def test_calls_are_run_and_wrong_ones_are_answered_with_their_fault():
    texts = [
        '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "two"}}</tool_call>'
        '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add"</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 13}}</tool_call>',
        "It is 5.",
    ]
    engine, _ = episodes(
        lambda: ToolEnvironment([add]),
        *texts,
        tools=schemas([add]),
        template=CHATML,
    )
    played = play(engine)
    for rollout in played:
        said = [turn.content for turn in rollout.turns if turn.role == "tool"]
        assert said[0] == "5"
        faults = [json.loads(text)["error"] for text in said[1:]]
        for fault, word in zip(
            faults,
            ["integer", "no function sub", "cannot be read", "bad luck"],
            strict=True,
        ):
            assert word in fault
        assert rollout.text == "It is 5." and rollout.stop_reason is StopReason.STOP_TOKEN
        parts = rollout.outcome.reason
        assert "no reward" in parts
        assert '"add"' in engine.encoder.decode(rollout.prompt_ids)
    # the third of five replies cannot be read, whatever scores them
    for scores in ([Score(1.0)] * len(played), [Score(None, reason="none")] * len(played)):
        measured = sample_metrics(played, scores)
        assert (measured["episode/turns"], measured["episode/unread_calls"]) == (5, 0.2)


THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if loop.last or m.role == 'user' %}{{ m.content }}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Drops the thoughts of earlier replies, as Qwen3's template does."""


@pytest.mark.parametrize("template", [THINKS, None])
def test_replies_that_the_template_rewrites_begin_a_segment(template):
    replies = ("<think>x</think>a", "b", "<think>y</think>c")
    limits = EpisodeLimits(history="template")
    engine, script = episodes(Echo, *replies, limits=limits, template=template)
    sampled, _ = episodes(Echo, *replies, template=template)
    text = partial(engine.encoder.tokenizer.decode, skip_special_tokens=False)
    for rollout, whole in zip(
        play(engine, num_samples=2),
        play(sampled, num_samples=2),
        strict=True,
    ):
        said = [*rollout.prompt.messages]
        parts = engine.encoder.sampled(rollout).segments
        segments = iter([text(part.ids) for part in parts])
        before = next(segments)
        for reply, drawn in zip(rollout.turns[::2], rollout.spans, strict=True):
            prompt = text(engine.encoder.prompt(tuple(said)))
            if not before.startswith(prompt):
                before = next(segments)
            assert before.startswith(prompt + reply.content + "<|end|>")
            assert text(rollout.response_ids[slice(*drawn)]) == reply.content + "<|end|>"
            said += [reply, user(f"you said {reply.content}")]
        assert next(segments, None) is None
        # only the first reply has a thought that a later prompt lacks
        assert len(rollout.forks) == (template is not None)
        assert rollout.written == whole.written and rollout.logprobs == whole.logprobs
        assert sum(part.num_trained for part in parts) == rollout.num_written
        assert rollout.outcome.value == whole.outcome.value == 3 and not whole.forks
    # each reply is drawn behind its segment
    last = parts[-1].ids
    assert script.rows[-1][-1] == last[: len(last) - (rollout.spans[-1][1] - rollout.spans[-1][0])]


@pytest.mark.parametrize(("role", "forks"), [("user", 2), ("tool", 0)])
def test_qwen3_drops_thoughts_behind_a_user_and_keeps_them_behind_a_tool(role, forks):
    templates = published()
    if "trl/qwen3" not in templates:
        pytest.skip("needs trl, which ships the template")
    reader = Published(templates["trl/qwen3"]).encoder

    class Says(Echo):
        def step(self, message):
            _, reward, done = super().step(message)
            return {"role": role, "content": "so"}, reward, done

    class Ends(Scripted):
        def draw(self, draws):
            end = reader.stop_ids[-1:]
            groups = super().draw(draws)
            return [[one._replace(ids=one.ids[:-1] + end) for one in group] for group in groups]

    script = Ends(reader, *["<think>\nx\n</think>\n\na"] * 2, "b")
    limits = EpisodeLimits(history="template")
    for rollout in play(EpisodeEngine(script, EnvironmentThreads(Says), reader, limits)):
        assert len(rollout.forks) == forks and rollout.outcome.value == 3
        last = reader.tokenizer.decode(reader.sampled(rollout).segments[-1].ids)
        assert last.count("<think>") == (0 if forks else 2)


def test_a_template_without_calls_is_refused():
    with pytest.raises(DataError, match="tools"):
        episodes(lambda: ToolEnvironment([add]), "a", tools=schemas([add]))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(("tokens", "reply", "words"), [(200, 16, 1), (90, 64, 1), (400, 16, 12)])
def test_a_kept_conversation_draws_what_one_read_anew_does(
    monkeypatch,
    tokens,
    reply,
    words,
    kernels,
):
    """Also where the last reply is longer than what the episode may still have, and where what is
    said has more tokens than there are episodes: then it costs a pass an episode.
    """

    class Forever(Echo):
        def step(self, message):
            return f"{'go on ' * words}{len(message['content'])}", 0.0, False

    passes = []

    def counted(decode):
        def counts(*given):
            passes.append(given)
            return decode(*given)

        return counts

    def played():
        local = LocalEngine(Role(tiny_model(1)), encoder(), cpu_kernels=kernels)
        monkeypatch.setattr(local.decoder, "decode", counted(local.decoder.decode))
        with torch.no_grad():
            local.role.causal_model.get_output_embeddings().weight[1] *= 3
        limits = EpisodeLimits(turns=5, tokens=tokens)
        engine = EpisodeEngine(local, EnvironmentThreads(Forever), local.encoder, limits)
        how = {"num_samples": 8, "seed": 3}
        groups = engine.generate(TASKS, Sampling(max_new_tokens=reply), **how)
        return [r for group in groups for r in group.rollouts]

    kept = played()
    assert words == 1 or len(passes) < 5 * reply
    monkeypatch.setattr(talk, "rows_that_fit", lambda *_: 0)
    anew = played()
    assert max(len(r.spans) for r in kept) > 2
    for one, other in zip(kept, anew, strict=True):
        assert one.response_ids == other.response_ids and one.spans == other.spans
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
