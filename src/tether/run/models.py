"""Models opened for a stage or an engine: the one place where a CPU's kernels are put into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tether import cpu
from tether.models.config import ModelConfig
from tether.models.loading import LoadedModel, load_model
from tether.models.quantized import check_installed


def open_model(config: ModelConfig, *, seed: int = 0, on_host: bool = False) -> LoadedModel:
    """The model that `config` names, as fast as this machine allows (models.loading.load_model, then cpu.speed_up)."""
    return cpu.speed_up(load_model(config, seed=seed, on_host=on_host))


def on_folder(model: ModelConfig, folder: Path) -> ModelConfig:
    """The same settings on a model that training left, which carries its own template."""
    own = {"source": str(folder), "fallback": None, "chat_template": None}
    return ModelConfig.model_validate({**model.model_dump(), **own})


def check_quantized(model: ModelConfig, name: str, section: Any) -> None:
    """Whether what the stage `name` trains, or moves about, is not what the model holds in 4 bits.

    Raises:
        ValueError: it is.
    """
    values = dict(section)
    if model.quantize and values.get("lora") is False:
        raise ValueError(
            f"{name}.lora = false trains the whole model, and model.quantize holds its weights frozen in 4 bits. "
            "Train an adapter, or leave model.quantize out"
        )
    if model.quantize and values.get("offload"):
        raise ValueError(f"{name}.offload moves layers of 16 bits, and model.quantize holds them in 4. Drop one of the two")


def check_libraries(model: ModelConfig, name: str, section: Any) -> None:
    """Whether what a stage asks of bitsandbytes can be had.

    Raises:
        ConfigError: it is not installed.
    """
    if model.quantize:
        check_installed("model.quantize")
    values = dict(section)
    learns = values.get("direct", section)
    if "optimizer" in dict(learns) and learns.optimizer.kind == "adamw8bit":
        check_installed(f"{name}.optimizer.kind = 'adamw8bit'")
