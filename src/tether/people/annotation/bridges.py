"""The tools that tasks go to and come back from, by the names of their formats."""

from __future__ import annotations

from tether.people.annotation import argilla, label_studio

BRIDGES = {label_studio.TOOL: label_studio.BRIDGE, argilla.TOOL: argilla.BRIDGE}
