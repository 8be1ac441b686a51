"""Models opened for a stage or an engine: the one place where a CPU's kernels are put into them."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from tether.core.errors import require
from tether.models import cpu
from tether.models.architecture import check_architecture, differences
from tether.models.loading import LoadedModel, load_model, pick_device
from tether.models.quantized import LIBRARY
from tether.models.sharded import shard_layers
from tether.settings.model import ModelConfig
from tether.settings.section import Section


def open_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    on_host: bool = False,
    mesh: DeviceMesh | None = None,
) -> LoadedModel:
    """The model that `config` names, as fast as this machine allows (models.loading.load_model,
    then cpu.speed_up).

    Over a `mesh` it is cut instead: no kernel of ours knows a weight of which a part is there.
    """
    if mesh is not None and not on_host:
        # whole, it may have no room on the device
        loaded = load_model(config, seed=seed, on_host=True)
        shard_layers(loaded.model, mesh).to(pick_device(config.device))
    else:
        loaded = cpu.speed_up(load_model(config, seed=seed, on_host=on_host))
    loaded.mesh = mesh
    check_architecture(loaded.source, loaded.model)
    for sentence in differences(loaded.model):
        loaded.note(sentence)
    return loaded


def check_libraries(model: ModelConfig, name: str, section: Section) -> None:
    """Check that bitsandbytes is installed if a stage needs it.

    Raises:
        ConfigError: it is not installed.
    """
    if model.quantize:
        require(LIBRARY, "model.quantize", "quantize")
    optimizer = dict(section.learning).get("optimizer")
    if optimizer is not None and optimizer.kind == "adamw8bit":
        require(LIBRARY, f"{name}.optimizer.kind = 'adamw8bit'", "quantize")
