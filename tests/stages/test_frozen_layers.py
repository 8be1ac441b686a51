"""States below the first adapter, computed once: the training that comes of them, what it spares,
and what it refuses.
"""

import contextlib

import pytest
import torch

from tether.core.rundir import RunDirectory
from tether.core.types import Comparison, assistant, user
from tether.data.batches import make_batch
from tether.data.chat import ChatEncoder
from tether.data.prepare import sequences_of
from tether.models.heads import ScalarHead
from tether.models.loading import add_adapter
from tether.models.tiny import tiny_model, tiny_tokenizer
from tether.models.trunk import Role
from tether.settings.learner import OptimizerConfig
from tether.settings.model import LoraConfig
from tether.settings.reward import RewardConfig
from tether.stages.frozen_layers import FrozenStates
from tether.stages.reward import RewardModeling

ENCODER = ChatEncoder(tiny_tokenizer(), (1,))
ROWS = [
    Comparison(
        (user(f"q{n}"),),
        (assistant(f"yes {n}!{pair}!!"),),
        (assistant(f"no {n}."),),
        id=f"{n}-{pair}",
        group=f"g{n}",
    )
    for n in range(12)
    for pair in range(2)
]


def stage_of(last_layers: int | None = 1, **settings):
    model = add_adapter(
        tiny_model().requires_grad_(False),
        "reward",
        LoraConfig(rank=8, last_layers=last_layers),
        seed=0,
    )
    config = RewardConfig(
        **{
            "epochs": 3,
            "prompts_per_update": 4,
            "micro_batch_tokens": 200,
            "heldout_fraction": 0.25,
            "checkpoint_every": 1,
            "optimizer": OptimizerConfig(learning_rate=3e-3),
            **settings,
        },
    )
    return RewardModeling(config, Role(model, "reward", ScalarHead(64, zero=False)), ENCODER)


def trained(stage, folder, kill_at=None):
    """Losses of all updates, the final weights, and how many tokens the lowest layer computed."""
    seen = [0]
    lowest = stage.role.decoder_layers[0].mlp
    lowest.register_forward_hook(
        lambda module, args, output: seen.__setitem__(0, seen[0] + args[0].shape[:2].numel()),
    )

    def progress(done, total, metrics):
        if done == kill_at:
            raise KeyboardInterrupt

    run = RunDirectory.open(folder, {})
    with pytest.raises(KeyboardInterrupt) if kill_at else contextlib.nullcontext():
        stage.train(ROWS, run, progress)
    weights = torch.cat([p.detach().flatten() for p in stage.role.parameters()])
    return [row["loss"] for row in run.metrics()], weights, seen[0]


def test_training_is_that_of_every_pass_computed_anew_and_spares_the_lower_layers(tmp_path):
    losses, weights, tokens = trained(stage_of(), tmp_path / "anew")
    again, kept, fewer = trained(stage_of(keep_states_gb=1), tmp_path / "kept")
    assert again == pytest.approx(losses, abs=1e-5)
    assert torch.allclose(kept, weights, atol=1e-4)
    assert fewer < 0.6 * tokens  # three epochs became one; what is held out is computed as before


def test_states_of_a_batch_are_those_of_its_own_pass():
    stage = stage_of(keep_states_gb=1)
    rankings, _ = stage.rankings(ROWS)
    kept = FrozenStates(
        stage.role,
        sequences_of(rankings),
        ENCODER.pad_id,
        stage.config.micro_batch_tokens,
        1.0,
    )
    sequences = [s for ranking in reversed(rankings[2:7]) for s in ranking.sequences]
    # neither the order nor the company in which they were computed
    for document_tokens in (0, 200):
        batch = make_batch(sequences, ENCODER.pad_id, document_tokens=document_tokens)
        found, direct = kept.of(sequences, batch), stage.role.common(batch)
        assert found is not None and direct is not None
        places = batch.places
        assert len(places) == sum(map(len, sequences))
        assert torch.equal(
            batch.ids.flatten()[places],
            torch.tensor([t for s in sequences for t in s.ids]),
        )
        assert torch.allclose(found.flatten(0, 1)[places], direct.flatten(0, 1)[places], atol=1e-5)
    stranger = ENCODER.conversation((user("who"), assistant("nobody knows me")))
    both = [sequences[0], stranger]
    assert kept.of(both, make_batch(both, ENCODER.pad_id)) is None


def test_a_killed_training_goes_on_to_the_bit(tmp_path):
    whole = trained(stage_of(keep_states_gb=1), tmp_path / "whole")
    trained(stage_of(keep_states_gb=1), tmp_path / "killed", kill_at=4)
    resumed = trained(stage_of(keep_states_gb=1), tmp_path / "killed")
    assert resumed[0] == whole[0] and torch.equal(resumed[1], whole[1])


def test_too_little_room_keeps_nothing_says_so_and_loses_nothing(tmp_path, caplog):
    plain = trained(stage_of(), tmp_path / "plain")
    stage = stage_of(keep_states_gb=1e-5)
    summary = stage.train(ROWS, RunDirectory.open(tmp_path / "cramped", {}))
    assert "keep_states_gb = 1e-05" in caplog.text
    assert "None is kept" in caplog.text
    assert summary["kept_states_gb"] == 0
    assert torch.equal(plain[1], torch.cat([p.detach().flatten() for p in stage.role.parameters()]))
