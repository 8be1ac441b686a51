"""The labs: exercises of the textbooks, each done in a minute or two on a laptop.

docs/guides/labs.md lists them.
"""

from tether.api.labs.lab import Lab, level, line, points, ratio

__all__ = ["Lab", "level", "line", "points", "ratio"]
