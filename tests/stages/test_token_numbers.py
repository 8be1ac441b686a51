"""The numbers of tokens that a step leaves: each with its own text, those alone that were
measured.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.stages.test_ppo import PROMPTS, make

from tether.core.rundir import RunDirectory, read_jsonl
from tether.models.tiny import tiny_tokenizer
from tether.stages.online_loop import train
from tether.stages.token_numbers import MOST_TOKENS, pieces, token_rows


def experience(ids, **flags) -> Any:
    """Two responses; the second is cut, was not compared and teaches nothing."""
    count = len(ids)
    numbers = torch.arange(2.0 * count).reshape(2, count)
    rollouts = [
        SimpleNamespace(response_ids=ids, spans=((0, count),)),
        SimpleNamespace(response_ids=ids[:2], spans=((0, 2),)),
    ]
    return SimpleNamespace(
        rollouts=rollouts,
        logprobs=-numbers,
        reference_logprobs=-numbers - 0.123456,
        values=numbers / 2,
        advantages=numbers - 1,
        has_logprobs=torch.tensor([True, True]),
        has_reference=torch.tensor([True, False]),
        num_taught=[count, 0],
        **flags,
    )


def test_rows_have_the_numbers_of_their_own_tokens():
    encoder: Any = SimpleNamespace(tokenizer=tiny_tokenizer())
    ids = tuple(encoder.tokenizer("a longer one")["input_ids"][:4])
    first, second = token_rows(experience(ids), encoder, [0, 1, 0], 7)
    assert "".join(first["tokens"]) == encoder.tokenizer.decode(ids)
    assert first["kl"] == pytest.approx([0.123] * len(ids), abs=5e-4)
    assert first["value"] == [n / 2 for n in range(len(ids))]
    assert first["advantage"] == [n - 1.0 for n in range(len(ids))]
    assert (first["step"], first["sample"], first["counted"]) == (7, 0, len(ids))
    assert "kl" not in second and (second["sample"], second["counted"]) == (1, 0)
    assert len(second["tokens"]) == len(second["advantage"]) == 2
    long = (ids * MOST_TOKENS)[: MOST_TOKENS + 5]
    (row, _) = token_rows(experience(long), encoder, [0, 1], 1)
    assert len(row["tokens"]) == len(row["kl"]) == row["counted"] == MOST_TOKENS


def test_tokens_of_an_environment_have_no_numbers():
    encoder: Any = SimpleNamespace(tokenizer=tiny_tokenizer())
    ids = tuple(encoder.tokenizer("an answer in two")["input_ids"][:8])
    episode = experience(ids)
    # 2 tokens that were sampled, 3 of an environment, 3 that were sampled
    episode.rollouts[0].spans = ((0, 2), (5, 8))
    row = next(token_rows(episode, encoder, [0, 1], 7))
    assert "".join(row["tokens"]) == encoder.tokenizer.decode(ids) and row["counted"] == 8
    assert row["advantage"] == [-1, 0, None, None, None, 1, 2, 3]
    assert row["value"] == [0, 0.5, None, None, None, 1, 1.5, 2]
    long = ids[:2] + (ids[2:5] * MOST_TOKENS) + ids[5:]
    episode.rollouts[0].response_ids = long
    episode.rollouts[0].spans = ((0, 2), (len(long) - 3, len(long)))
    row = next(token_rows(episode, encoder, [0, 1], 7))
    assert len(row["tokens"]) == len(row["value"]) == 2 * MOST_TOKENS
    assert row["advantage"][:3] == [-1, 0, None] and {*row["advantage"][2:]} == {None}


def test_a_training_notes_the_tokens_of_the_samples_that_it_records(tmp_path):
    ppo = make(steps=2, sample_rows=3)
    run = RunDirectory.open(tmp_path / "run", {})
    train(ppo, PROMPTS, run)
    rows = list(read_jsonl(run.path / "tokens.jsonl"))
    samples = list(read_jsonl(run.path / "samples.jsonl"))
    assert [(row["step"], row["sample"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for row in rows:
        own = [one for one in samples if one["step"] == row["step"]][row["sample"]]
        # the text of a response has no special tokens
        plain = [text for text in row["tokens"] if not text.startswith("<|")]
        assert own["response"] in "".join(plain)
        assert len(row["kl"]) == len(row["advantage"]) == len(row["tokens"])
        # a new value head gives 0
        assert ("value" in row) == (row["step"] > 1)
    assert any(rows[2]["kl"]), "after an update the policy has left its reference"
    assert pieces(ppo.encoder, ()) == []
