"""The engine that a section asks for, and the server of tether's own engine."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from tether.core.errors import ConfigError
from tether.models.adapter_folders import holds_adapter
from tether.models.carried import carriers, carries_all, drop, factors_of, rounding_of
from tether.models.cpu.llama import cache_bytes
from tether.models.cpu.memory import free_memory
from tether.models.loading import LoadedModel, load_model, save_model
from tether.models.saving import attach_adapter, refill_adapter, refill_model
from tether.models.trunk import Role
from tether.rollout.local import LocalEngine
from tether.rollout.served import ServedEngine
from tether.rollout.server import EngineServer
from tether.runner.assembly.launching import Placement
from tether.runner.assembly.roles import encoder_of, local_engine
from tether.settings.engine import EngineConfig
from tether.settings.sampling import OnlineSection
from tether.settings.section import Lora

VLLM = (
    *("-m", "vllm.entrypoints.openai.api_server", "--logprobs-mode", "processed_logprobs"),
    *("--generation-config", "vllm", "--enable-scale-out", "--middleware", "tether_door.Door"),
)
"""vLLM's own words for: log-probabilities of the distribution that was sampled, tokens in and out,
the token at every path.
"""
VLLM_WORKSPACE = int(2e9)
"""Bytes that vLLM takes beside weights and cache: activations of its largest pass, graphs, the CUDA
context.
"""
IN_VLLM = Path(__file__).parents[2] / "scale" / "servers" / "in_vllm"
"""A folder with what runs inside vLLM: a check of the token, and an engine for its transfer of
whole weights.

Both import nothing of tether, which vLLM's environment lacks.
"""
WHOLE = (
    *("--worker-extension-cls", "tether_weights.Registered"),
    *("--weight-transfer-config", json.dumps({"backend": "folder"})),
)
"""Options of vLLM for the transfer of whole weights (lora = false)."""


def check_engine(config: EngineConfig, lora: Lora, *, quantize: str | None) -> None:
    """Check that servers can sample for such a policy.

    Raises:
        ConfigError: vLLM's Python is not there, or the policy is what servers cannot take.
    """
    if quantize or (lora and lora.dora and config.kind == "vllm"):
        what = "model.quantize" if quantize else "lora.dora"
        raise ConfigError(
            f"engine.kind = {config.kind!r} samples with plain adapters or whole models, and "
            f"{what} is another thing: drop one",
        )
    python = Path(config.python).expanduser()
    if config.kind == "vllm" and not config.addresses and not python.exists():
        raise ConfigError(
            f"engine.kind = 'vllm' needs a Python that has vLLM, and there is none at {python}. "
            "Make an environment for it, name its program with engine.python, or give the "
            "addresses of servers that run (engine.addresses)",
        )


def served_engine(
    section: OnlineSection,
    policy: Role,
    loaded: LoadedModel,
    folder: Path,
    seed: int,
    expected: list[float],
    *,
    placement: Placement,
) -> ServedEngine:
    """Engine servers for a policy: started here, or those at `addresses`.

    Those that work at the same time on this machine's processor share its cores; the learner is one
    of them with max_staleness.

    Args:
        expected: log-probabilities of the probe.
        folder: of the stage; servers find the model that they begin with, and all weights after it,
            in `engine` there.

    Raises:
        ConfigError: vLLM's Python is not there, or the policy is what servers cannot take.
        ModelError, RunError: see ServedEngine.
    """
    device_type = policy.device.type
    config = section.engine
    lora = section.lora
    root = (folder / "engine").absolute()
    free_memory()  # vLLM counts what torch keeps for later as taken
    check_engine(config, lora, quantize=loaded.config.quantize)
    shutil.rmtree(root / "weights", ignore_errors=True)
    combined = config.kind == "vllm" and not config.addresses and bool(lora)
    combined = combined and carries_all(policy.model, policy.adapter)
    if config.kind == "vllm" and not combined:
        _note_rounded(policy, loaded)
    base = _base(loaded, root, seed, bare=combined)
    dtype = str(policy.model.dtype).removeprefix("torch.")
    # whose weights are held, too
    ahead = section.ahead
    ours = config.kind == "served"

    def command(host: str, port: int) -> Sequence[str]:
        where = (
            "--model",
            str(base),
            "--host",
            host,
            "--port",
            str(port),
            "--dtype",
            dtype,
            *config.arguments,
        )
        if ours:
            rows = "--rows", str(section.engine_rows)
            alone = ("--alone",) if torch.are_deterministic_algorithms_enabled() else ()
            return sys.executable, "-m", "tether", "engine", *where, *rows, *alone
        beside = placement.beside_learner(device_type)
        return _vllm_command(host, where, section, policy, beside=beside, combined=combined)

    threads = 0
    at_once = len(config.names) + (ahead > 0)
    if device_type == "cpu" and at_once > 1:  # else they would wait for each other's threads
        threads = max(1, torch.get_num_threads() // at_once)
    if threads and ahead:
        torch.set_num_threads(threads)
    servers = placement.servers_for(config, command, root, threads, device_type)
    return ServedEngine(
        policy,
        encoder_of(loaded),
        servers,
        root,
        config,
        context_length=loaded.context_length,
        ours=ours,
        expected=expected,
        combined=combined,
    )


def _vllm_command(
    host: str,
    where: Sequence[str],
    section: OnlineSection,
    policy: Role,
    *,
    beside: bool,
    combined: bool,
) -> Sequence[str]:
    """The command of a server of vLLM.

    Args:
        beside: the server shares memory with the learner.
        combined: adapters hold what the policy's layers carry, too.
    """
    config = section.engine
    lora = section.lora
    length = 2 * dict(section)["max_new_tokens"]  # a guess: prompts as long as answers
    share = (
        ("--gpu-memory-utilization", vllm_share(config, policy, section.engine_rows, length))
        if beside
        else ()
    )
    paths = os.pathsep.join(filter(None, (str(IN_VLLM), os.environ.get("PYTHONPATH"))))
    variables = f"PYTHONPATH={paths}", f"TETHER_SERVER_NAME={host}"
    start = (
        "env",
        *variables,
        str(Path(config.python).expanduser().absolute()),
        *VLLM,
        *share,
        *where,
    )
    if not lora:
        return "env", "VLLM_SERVER_DEV_MODE=1", *start[1:], *WHOLE
    factors = factors_of(policy.model, policy.adapter) if combined else {}
    rank = max([lora.rank, *(len(down) for down, _ in factors.values())])
    slots = str(adapter_slots(section))
    # the limits that vLLM takes
    limit = next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)
    return *start, "--enable-lora", "--max-loras", slots, "--max-lora-rank", str(limit)


def _note_rounded(policy: Role, loaded: LoadedModel) -> None:
    """Note how much of what layers carry beside their weights reaches servers that hold rounded
    weights alone.
    """
    model = policy.model
    if not any(carriers(model)):
        return
    share = rounding_of(model, factors_of(model), model.dtype).share
    loaded.note(
        f"vLLM samples from rounded weights, which hold {share or 1.0:.0%} of what fine-tuning's "
        "adapter changed; the learner computes with all of it. An adapter (lora) and servers that "
        "tether starts, or engine.kind = 'local', sample from all of it",
    )


def vllm_share(config: EngineConfig, policy: Role, rows: int, length: int) -> str:
    """The part of a GPU's memory that vLLM may take beside a learner: weights, cache and
    `VLLM_WORKSPACE`; on a CPU a fifth.

    vLLM counts the whole GPU, holds its part from the start on, and refuses to start where less is
    free.

    Args:
        rows, length: of its cache; length in tokens, of a prompt with its answer.

    Raises:
        ConfigError: less is free.
    """
    from tether.stages.learner.planner import weight_bytes

    if policy.device.type != "cuda" or any(
        word.startswith("--gpu-memory-utilization") for word in config.arguments
    ):
        return "0.2"  # of the two that the command then has, the user's stands last, and counts
    free, total = torch.cuda.mem_get_info(policy.device)
    model = policy.causal_model
    size = policy.model.dtype.itemsize
    weights = weight_bytes(model.parameters())
    # vLLM wants room for one text of the whole context
    longest = max(rows * length, policy.context_length)
    cache = cache_bytes(model.config, 1, longest, size)
    needed = weights + cache + VLLM_WORKSPACE
    if needed > free:
        parts = (
            f"{weights / 1e9:.1f} of weights, {cache / 1e9:.1f} of cache, "
            f"{VLLM_WORKSPACE / 1e9:.1f} to work with"
        )
        raise ConfigError(
            f"engine.kind = 'vllm' needs {needed / 1e9:.1f} GB of this GPU ({parts}), and beside "
            f"the learner {free / 1e9:.1f} of {total / 1e9:.1f} GB are free. Lower engine_rows, "
            "give vLLM a GPU of its own, or take engine.kind = 'local'",
        )
    return f"{needed / total:.3f}"


def adapter_slots(section: OnlineSection) -> int:
    """Adapters that a server has room for: the wanted one, the one before, one that comes, and
    those of older samples.
    """
    return 3 + section.ahead


def _base(loaded: LoadedModel, root: Path, seed: int, *, bare: bool = False) -> Path:
    """The folder of the model under the adapters. A copy is written for a model from a package or
    from code, and for one without what its layers carry (`bare`).
    """
    source = Path(loaded.source)
    folder = root / ("bare" if bare else "base")
    whole = source.is_dir() and any(source.glob("*.safetensors")) and not holds_adapter(source)
    if whole and not bare:
        return source.resolve()
    if not (folder / "config.json").is_file():
        fresh = load_model(loaded.config.model_copy(update={"quantize": None}), seed=seed)
        if bare:
            drop(fresh.model)
        save_model(fresh.model, fresh.tokenizer, encoder_of(fresh).templates, folder)
    return folder.resolve()


def engine_server(
    loaded: LoadedModel,
    address: tuple[str, int],
    rows: int,
    token: str | None = None,
    *,
    alone: bool = False,
) -> EngineServer:
    """A server of tether's engine with this model, or adapters on it; `serve_forever` makes it
    answer.

    Token: see JsonServer. `alone`: see EngineServer.
    """
    # of engines with an adapter; those that have let go of it
    settings = dict[LocalEngine, str]()
    spare = list[LocalEngine]()

    @cache
    def whole() -> LocalEngine:
        return local_engine(Role(loaded.model), loaded, max_rows=rows)

    def load(name: str, path: Path) -> LocalEngine:
        if path.name == "model":
            refill_model(loaded.model, path)
            return whole()
        own = (path / "adapter_config.json").read_text(encoding="utf-8")
        if engine := next((one for one in spare if settings[one] == own), None):
            # making modules and engine anew takes a second
            refill_adapter(loaded.model, path.parent, str(engine.role.adapter))
            spare.remove(engine)
        else:
            loaded.model = attach_adapter(loaded.model, path.parent, name)
            engine = local_engine(Role(loaded.model, name), loaded, max_rows=rows)
            settings[engine] = own
        return engine

    return EngineServer(
        address,
        loaded.source,
        load,
        spare.append,
        whole,
        context=loaded.context_length,
        vocabulary=loaded.model.get_input_embeddings().weight.shape[0],
        alone=alone,
        token=token,
    )
