"""The reward of a stage from servers: processes of their own, on this machine or a cluster's, or
those that run already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tether.build.context import Context
from tether.build.rewards import reward_source
from tether.build.roles import load_scorer, reader_beside
from tether.core.digest import digest
from tether.core.rundir import write_json
from tether.core.types import Json
from tether.models.loading import pick_device
from tether.rewards.function import FunctionReward
from tether.rewards.servers import ServedReward, reward_server
from tether.servers.http import JsonServer
from tether.settings.model import ModelConfig
from tether.settings.reading import build
from tether.settings.sampling import OnlineSection

SCORING = {
    "reward_source",
    "verifiable",
    "classifier",
    "function",
    "process_aggregate",
    "reward_combine",
    "uncertainty_weight",
}
"""The keys of a section by which a server scores."""
MODELS = ("learned", "process", "classifier")
"""Sources of rewards that hold a model, which runs on the device of the models."""


def reward_settings(section: OnlineSection, context: Context) -> Json:
    """Everything that a server of a stage's reward needs to know."""
    scoring = section.model_dump(mode="json", include=SCORING, exclude_unset=True)
    if scoring.get("classifier"):
        # with its defaults, which a former version may have set
        scoring |= section.model_dump(mode="json", include={"classifier"})
    scorer = (
        None if section.scorer is None or context.scorer is None else str(context.scorer.resolve())
    )
    return {
        "reward": scoring,
        "scorer": scorer,
        "model": context.model.model_dump(mode="json"),
    }


def served_reward(section: OnlineSection, context: Context) -> ServedReward:
    """The reward of a stage from servers, whose settings and logs are in `reward` of its folder.

    Raises:
        ModelError, RunError: see ServedReward.
        ConfigError: the cluster cannot be reached, or is too small.
    """
    config = section.reward_servers
    settings = reward_settings(section, context)
    folder = context.folder / "reward"
    assert config is not None
    if not context.ranks.first:
        return ServedReward(section.reward_source, None, config, folder, "")
    folder.mkdir(exist_ok=True)
    write_json(folder / "settings.json", settings)

    def command(host: str, port: int) -> Sequence[str]:
        own = str((folder / "settings.json").resolve())
        return sys.executable, "-m", "tether", "rewards", own, "--host", host, "--port", str(port)

    holds_model = section.reward_source in MODELS
    device = pick_device(context.model.device).type if holds_model else "cpu"
    threads = max(1, torch.get_num_threads() // max(1, len(config.names))) if device == "cpu" else 0
    servers = context.placement.servers_for(config, command, folder, threads, device)
    if section.function is not None:  # calls as in this process
        config = config.model_copy(update={"batch": section.function.batch})
    return ServedReward(section.reward_source, servers, config, folder, digest(settings["reward"]))


def settings_server(
    settings: Json,
    address: tuple[str, int],
    stacks: Path | None = None,
    token: str | None = None,
) -> JsonServer:
    """A server that scores by these settings.

    Raises:
        ConfigError, ModelError, MissingFileError: what they name cannot be had.
    """
    section = build(OnlineSection, settings["reward"], where="reward")
    model = build(ModelConfig, settings["model"], where="model")
    scorer: Any = settings["scorer"] and Path(settings["scorer"])
    roles, loaded = load_scorer(scorer, model) if scorer else ((), None)
    reader = reader_beside(scorer, model) if scorer else None
    source = reward_source(section, roles, scorer, loaded, pick_device(model.device), 0, reader)
    if isinstance(source, FunctionReward):
        source.watchdog.path = stacks
    return reward_server(source, digest(settings["reward"]), address, token)
