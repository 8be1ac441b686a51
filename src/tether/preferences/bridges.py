"""The tools that tasks go to and come back from, by the names of their formats.

A bridge is a module: `matches` tells its rows from others, `read_task` makes a case of one, `write_task` one of a case. `fields`
are the names of the prompt and of the two answers, where they are unusual.
"""

from __future__ import annotations

from tether.preferences import argilla, label_studio

BRIDGES = {module.TOOL: module for module in (label_studio, argilla)}
