"""Models opened for a stage or an engine: the one place where a CPU's kernels are put into them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tether import cpu
from tether.core.errors import require
from tether.learner.ranks import here
from tether.models.architecture import check_architecture, differences
from tether.models.loading import LoadedModel, load_model, pick_device
from tether.models.quantized import LIBRARY
from tether.models.sharded import shard_layers
from tether.settings.model import ModelConfig


def open_model(config: ModelConfig, *, seed: int = 0, on_host: bool = False) -> LoadedModel:
    """The model that `config` names, as fast as this machine allows (models.loading.load_model,
    then cpu.speed_up).

    Where ranks cut weights over all of them, it is cut instead: no kernel of ours knows a weight of
    which a part is there.
    """
    if here().mesh and not on_host:
        # whole, it may have no room on the device
        loaded = load_model(config, seed=seed, on_host=True)
        shard_layers(loaded.model, here().mesh).to(pick_device(config.device))
    else:
        loaded = cpu.speed_up(load_model(config, seed=seed, on_host=on_host))
    check_architecture(loaded.source, loaded.model)
    for sentence in differences(loaded.model):
        loaded.note(sentence)
    return loaded


def on_folder(model: ModelConfig, folder: Path) -> ModelConfig:
    """The same settings on a model that training left, which carries its own template."""
    own = {"source": str(folder), "fallback": None, "chat_template": None}
    return ModelConfig.model_validate({**model.model_dump(), **own})


def faults_on(model: ModelConfig, name: str, section: Any, shard: bool) -> Iterator[str]:
    """Settings of the stage `name` that are impossible with weights held in 4 bits, or cut over
    ranks (`shard`).
    """
    values = dict(section)
    lora, trains, engine = values.get("lora"), values.get("direct", section), values.get("engine")
    if model.quantize and lora is False:
        yield (
            f"{name}.lora = false trains the whole model, and model.quantize holds its weights "
            "frozen in 4 bits. "
            "Train an adapter, or leave model.quantize out"
        )
    if model.quantize and values.get("offload"):
        yield (
            f"{name}.offload moves layers of 16 bits, and model.quantize holds them in 4. Drop "
            "one of the two"
        )
    precomputed = dict(trains).get("reference_logprobs") == "precomputed"
    hindrances = {
        "model.quantize": (model.quantize, "4 bits are not cut"),
        f"{name}.optimizer.kind = 'adamw8bit'": (
            lora is False and trains.optimizer.kind != "adamw",
            "its blocks are not cut",
        ),
        f"{name}.lora.dora": (lora and lora.dora, "its norms need whole weights"),
        f"{name}.offload": (values.get("offload"), "layers are on the host or on the ranks"),
        f"{name}.reference_logprobs = 'precomputed'": (precomputed, "not each_update"),
        f"{name}.disentangle_length": (
            values.get("disentangle_length"),
            "it has a part without a pass",
        ),
        f"{name}.objectives": (
            values.get("objectives"),
            "rank 0 alone scores by them, and a pass needs all ranks",
        ),
        f"{name}.engine.kind = 'local'": (
            engine and engine.kind == "local",
            "every token would gather all layers: use servers",
        ),
        f"{name}.engine with lora = false": (
            engine and lora is False,
            "servers get weights from rank 0, which has a part",
        ),
    }
    for what, (there, why) in hindrances.items():
        if there and shard:
            yield f"learner.shard does not go with {what} ({why}). Change one of the two"


def check_libraries(model: ModelConfig, name: str, section: Any) -> None:
    """Check that bitsandbytes is installed if a stage needs it.

    Raises:
        ConfigError: it is not installed.
    """
    if model.quantize:
        require(LIBRARY, "model.quantize", "quantize")
    learns = dict(section).get("direct", section)
    if "optimizer" in dict(learns) and learns.optimizer.kind == "adamw8bit":
        require(LIBRARY, f"{name}.optimizer.kind = 'adamw8bit'", "quantize")
