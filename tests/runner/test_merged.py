"""The model that SFT saves, against the one that it trained: an adapter lies beside rounded weights,
or is merged into them.
"""

import json
import logging

import pytest

from tether.core.rundir import read_json
from tether.runner.methods import supervised
from tether.runner.run import run_recipe
from tether.settings.reading import build
from tether.settings.recipe import Recipe


def trained(folder, rate, lora=None, **model):
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"say {n}", "response": f"{n} and {n} " * 3}) + "\n"
            for n in range(40)
        ),
    )
    sft = {
        "data": {"path": str(rows)},
        "epochs": 4,
        "batch_size": 4,
        "heldout_fraction": 0.25,
        "optimizer": {"learning_rate": rate, "schedule": "constant"},
        "lora": {"rank": 4, "alpha": 8, **(lora or {})},
    }
    values = {
        "run": str(folder / "run"),
        "model": {"source": "tiny", "cpu_kernels": False, **model},
        "sft": sft,
    }
    return run_recipe(build(Recipe, values), ["sft"])["sft"], folder / "run" / "sft"


@pytest.mark.parametrize(
    ("rate", "carried", "loses"),
    # 2e-6 moves weights by far less than half a step of bfloat16, on every processor
    [(2e-5, True, False), (2e-6, False, True), (2e-2, False, False)],
)
def test_the_loss_of_the_merged_model_stands_beside_that_of_the_adapter(
    rate,
    carried,
    loses,
    tmp_path,
    caplog,
    monkeypatch,
):
    """A small change is lost in bfloat16 weights, a large one is kept; beside them, both are."""
    if not carried:
        monkeypatch.setattr(
            supervised,
            "settle",
            lambda model, adapter, *_: model.merge_and_unload(adapter_names=[adapter]),
        )
    with caplog.at_level(logging.WARNING):
        summary, folder = trained(tmp_path, rate, dtype="bfloat16")
    before, after, merged = (
        summary[key] for key in ("eval_loss_before", "eval_loss", "eval_loss_merged")
    )
    lost = (merged - after) / (before - after)
    assert before > after and (lost > 0.05) is loses
    notes = [
        note for note in summary.get("notes", []) if ("is lost where the adapter is merged") in note
    ]
    assert len(notes) == loses and all(
        f"{lost:.0%} of what" in note and f"{merged:.4f} with the merged" in note for note in notes
    )
    assert read_json(folder / "summary.json")["eval_loss_merged"] == merged


def test_nothing_is_measured_where_nothing_is_rounded(tmp_path):
    summary, _ = trained(tmp_path, 1e-3, dtype="float32")
    assert "eval_loss_merged" not in summary


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_adapter_that_no_layer_can_carry_is_noted_with_the_share_that_is_left(tmp_path, dtype):
    summary, _ = trained(tmp_path, 2e-5, {"dora": True}, dtype=dtype)
    notes = [note for note in summary.get("notes", []) if "The rounded weights hold" in note]
    assert len(notes) == (dtype == "bfloat16")
    assert all("layers are merged into bfloat16 weights" in note for note in notes)
