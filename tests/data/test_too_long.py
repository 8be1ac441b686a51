"""Rows beyond max_length: left out, or cut behind the limit. The oracle is transformers' own
rendering and tokenization of each row.
"""

from itertools import chain

import pytest

from tether.core.errors import ConfigError
from tether.core.types import Comparison, Demonstration, Feedback, assistant, user
from tether.data.chat import ChatEncoder
from tether.data.prepare import encoded_split
from tether.models.tiny import tiny_tokenizer
from tether.settings.reading import build
from tether.settings.recipe import Recipe
from tether.settings.supervised import DirectConfig, KTOConfig, SFTConfig

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TOKENIZER = tiny_tokenizer()
ENCODER = ChatEncoder(TOKENIZER, (TOKENIZER.eos_token_id,), TEMPLATE)
LIMIT = 60
REPLIES = {n: ("yes " * (2 if n % 3 else 20 + n), f"no, {n}") for n in range(12)}


def ids(*contents, waiting=False):
    """What transformers makes of the turns, the first of which is the user's."""
    roles = ("user", "assistant") * 2
    turns = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    how = {"chat_template": TEMPLATE, "add_generation_prompt": waiting, "tokenize": False}
    text = TOKENIZER.apply_chat_template(turns, **how)
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def question(n):
    return f"q {n}?"


def rows_of(kind):
    for n, (long, short) in REPLIES.items():
        asked, first, second = (user(question(n)),), (assistant(long),), (assistant(short),)
        if kind is SFTConfig:
            yield Demonstration((*asked, *first), str(n))
        elif kind is KTOConfig:
            yield from (
                Feedback(asked, reply, desirable, id=f"{n}-{desirable}")
                for reply, desirable in ((first, True), (second, False))
            )
        else:
            yield Comparison(asked, first, second, id=str(n))


def expected(kind, n):
    return [ids(question(n), reply) for reply in REPLIES[n][: 1 if kind is SFTConfig else 2]]


KINDS = [SFTConfig, DirectConfig, KTOConfig]


def split_of(kind, rows=None, encoder=ENCODER, **settings):
    config = kind(heldout_fraction=0.0, **{"max_length": LIMIT, **settings})
    return encoded_split([*(rows or rows_of(kind))], config, encoder, "sft")


def sequences(kind, split):
    return split.train if kind is SFTConfig else [*chain(*(row.sequences for row in split.train))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_row_is_the_first_tokens_of_the_whole_one_without_a_stop_token(kind):
    split = split_of(kind, too_long="truncate")
    whole = [one for n in REPLIES for one in expected(kind, n)]
    got = sequences(kind, split)
    assert [one.ids for one in got] == [one[:LIMIT] for one in whole]
    for one, full in zip(got, whole, strict=True):
        prompt = len(
            ids(question(next(n for n in REPLIES if full in expected(kind, n))), waiting=True),
        )
        assert one.trained == tuple(place >= prompt for place in range(len(one)))
        assert (one.ids[-1] == TOKENIZER.eos_token_id) == (len(full) <= LIMIT)
    long = [full for full in whole if len(full) > LIMIT]
    assert 0 < len(long) < len(whole)
    assert sum(split.counts["cut"].values()) == len(long) and split.counts["skipped"] == {}


@pytest.mark.parametrize("kind", KINDS)
def test_by_default_long_rows_are_left_out_and_counted_by_the_power_of_two_that_keeps_them(kind):
    split = split_of(kind)
    longest = [max(map(len, expected(kind, n))) for n in REPLIES]
    counts = {}
    for size in (one for one in longest if one > LIMIT):
        keeps = next(2**k for k in range(20) if 2**k >= size)
        reason = f"longer than sft.max_length = {LIMIT} tokens; {keeps} would keep it"
        counts[reason] = counts.get(reason, 0) + 1
    assert split.counts == {"skipped": counts} and len(counts) > 1
    kept = [one.ids for one in sequences(kind, split)]
    assert all(len(one) <= LIMIT and one[-1] == TOKENIZER.eos_token_id for one in kept)


@pytest.mark.parametrize("context", [LIMIT, 130, 1000])
def test_the_limit_that_a_reason_names_keeps_its_rows_within_the_context(context):
    """By default, and cut: no size beyond the context is named, and with the largest one that is named
    only the rows beyond the context are left out.
    """
    encoder = ChatEncoder(
        TOKENIZER,
        (TOKENIZER.eos_token_id,),
        TEMPLATE,
        context_length=context,
    )
    longest = [len(expected(SFTConfig, n)[0]) for n in REPLIES]
    beyond = sum(size > context for size in longest)
    between = sum(LIMIT < size <= context for size in longest)
    assert (beyond, between) == {LIMIT: (4, 0), 130: (1, 3), 1000: (0, 4)}[context]
    for key, how in (("skipped", {}), ("cut", {"too_long": "truncate"})):
        counts = split_of(SFTConfig, encoder=encoder, **how).counts[key]
        of_context = f"longer than the model's context of {context} tokens"
        assert counts.pop(of_context, 0) == beyond and sum(counts.values()) == between
        sizes = [int(reason.partition("; ")[2].split()[0]) for reason in counts]
        larger = max(sizes, default=LIMIT)
        assert larger <= context
        again = split_of(SFTConfig, encoder=encoder, max_length=larger, **how)
        assert again.counts.get(key, {}) == ({of_context: beyond} if beyond else {})


def test_a_prompt_that_fills_the_limit_is_left_out_and_so_are_sides_that_the_cut_makes_equal():
    filled = Comparison((user("x" * LIMIT),), (assistant("a"),), (assistant("b"),), id="filled")
    late = ("the same words " * 8 + end for end in ("a", "b"))
    equal = Comparison((user("q"),), *((assistant(text),) for text in late), id="equal")
    split = split_of(DirectConfig, [*rows_of(DirectConfig), filled, equal], too_long="truncate")
    reasons = {reason.partition(" = ")[0]: n for reason, n in split.counts["skipped"].items()}
    assert reasons == {"longer than sft.max_length": 1, "both sides are the same tokens": 1}
    assert sum(split.counts["cut"].values()) == 1 + sum(n % 3 == 0 for n in REPLIES)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("ppo.too_long=truncate", "prompts are read whole"),
        ("grpo.truncation_mode=keep_end", "prompts are read whole"),
        ("direct.truncation_mode=keep_start", "direct.too_long"),
        ("reward.too_long=truncate", "stop token"),
    ],
)
def test_where_a_cut_makes_no_sense_a_sentence_says_why(override, reason, tmp_path):
    data = {"path": "tether:prompts"}
    sections = {name: {"data": data} for name in ("ppo", "grpo", "direct", "reward")}
    values = {"run": str(tmp_path / "run"), "model": {"source": "tiny"}, **sections}
    with pytest.raises(ConfigError, match="unknown key") as error:
        build(Recipe, values, [override], where="recipe.toml")
    assert reason in str(error.value)
