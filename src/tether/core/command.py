"""Command lines of tether that a person may copy: the one place that makes them."""

import shlex


def command_line(*words: object) -> str:
    """A command of tether as a shell takes it: what is no plain word is quoted."""
    return shlex.join(["tether", *map(str, words)])
