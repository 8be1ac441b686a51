"""One way to run: recipes, the table of stages, and how a stage is opened, resumed, planned,
examined and exported.

The room has the name of the front door's function, so the module can be called:
`tether.run("quickstart")`.
"""

import importlib
import sys
import types
from typing import Any


class _Room(types.ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return importlib.import_module("tether.api.methods").run(*arguments, **options)


sys.modules[__name__].__class__ = _Room
