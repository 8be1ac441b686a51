"""Align language models with human preferences, and know whether they got better.

    import tether

    model = "HuggingFaceTB/SmolLM2-135M-Instruct"
    run = tether.grpo(model, prompts=["How do I thank a neighbour?"], reward=my_function)
    print(run.policy.generate("Hello!"))

Every method of a recipe is a function here (docs/guides/python.md); nothing heavy is imported
before one is called.
"""

from __future__ import annotations

import logging
from typing import Any

from tether.core.threads import share_the_machine

share_the_machine()
# peft loads it; on a CPU it warns of kernels that nobody asks for
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
# with a CUDA build on a machine without a GPU
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
__version__ = "0.1.0"

_HOMES = {
    "run": "methods",
    "load": "methods",
    "recipes": "methods",
    "names": "methods",
    "Run": "runs",
    "Policy": "runs",
    "RewardModel": "runs",
    "load_model": "workbench",
}
_ERRORS = [
    "TetherError",
    "ConfigError",
    "DataError",
    "MissingFileError",
    "ModelError",
    "RunError",
    "TrainingError",
    "RewardError",
]
"""Of `tether.core.errors`: what a caller may catch."""


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(f"tether.api.{_HOMES[name]}"), name)
    if name in _ERRORS:
        return getattr(import_module("tether.core.errors"), name)
    from tether.settings.stages import STAGES
    from tether.settings.synonyms import METHODS, SECTIONS, trainers_function

    if name in STAGES or name in METHODS:
        return import_module("tether.api.methods").method(name)
    other = SECTIONS.get(name) or trainers_function(name)
    hint = f": tether.{other} is the function for that, with its settings" if other else ""
    if not other and name.endswith(("Trainer", "Config")):
        hint = (
            ": tether has no such method. docs/guides/coming_from.md lists its methods beside TRL's"
        )
    raise AttributeError(f"module 'tether' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    from tether.settings.stages import STAGES
    from tether.settings.synonyms import METHODS

    return sorted([*_HOMES, *_ERRORS, *STAGES, *METHODS, "__version__"])
