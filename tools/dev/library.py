"""`python -m tools.dev.references` writes docs/reference/algorithms.md and llms.txt with it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "src" / "tether" / "algorithms"
LOOP = ROOT / "examples" / "losses_in_your_loop.py"
INTERNAL = frozenset({"transfer", "token_batch"})
"""Modules that serve tether's own stages and no other trainer."""
HEAD = """# Losses, advantages and samplers as a library

*Written by `python -m tools.dev.references` from the docstrings.*

`tether.algorithms` needs only torch and jaxtyping. Its functions take tensors and return tensors: no
configuration, model, logger or device. So they fit into any trainer. Each docstring holds the equation, the paper, the
shapes and the one trap; [the manual](../README.md) shows them in full after `make docs`.

Three conventions hold everywhere:

- A mask is boolean. True means that a token counts.
- A loss is a sum divided by `denominator`. Count it over the whole optimizer step, so micro-batches give the same gradient.
- Log-probabilities are natural logarithms, and belong to the distribution that was sampled from, temperature included.

## A loop of your own

GRPO with a policy that is not tether's, from `examples/losses_in_your_loop.py`. The reward rises from 0.5 to 1.

"""
SAMPLERS = """## Samplers

tether's sampler is usable alone, too. [A loop of your own](../guides/python.md#a-loop-of-your-own) shows
`tether.load_model`, `model.engine` and `engine.generate` in a loop of 40 lines.
A sample depends on (seed, prompt, number of the sample, position) alone, so another
batch size or a resumed run draws the same tokens.
"""


def page() -> str:
    """docs/reference/algorithms.md."""
    code = LOOP.read_text(encoding="utf-8")
    program = code[code.index("import torch") : code.index("\n\nif __name__")].rstrip()
    parts = [HEAD + f"```python\n{program}\n```\n", SAMPLERS, "## Functions\n"]
    for path in sorted(FOLDER.glob("[!_]*.py")):
        if path.stem not in INTERNAL:
            parts.append(_module(path))
    return "\n".join(parts)


def _module(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    rows = [
        f"| `{node.name}` | {first_sentence(ast.get_docstring(node) or '')} |"
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    return "\n".join([f"### {path.stem}\n", "| name | use |", "|---|---|", *rows]) + "\n"


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, in one line and fit for a table."""
    joined = (
        " ".join(text.split("\n\n", maxsplit=1)[0].split())
        .replace("``", "`")
        .replace("||", r"\|\|")
    )
    return re.split(r"(?<=\.) +(?=[A-Z`])", joined)[0]


def llms() -> str:
    """llms.txt: the pages of docs/README.md, each with its address in the repository."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    parts = [
        "# tether",
        "> Align language models with human preferences: SFT, reward models, PPO, GRPO, DPO. "
        "Each run ends with a verdict and its controls.",
        "Start with AGENTS.md. `tether explain WORD` describes any key, metric or term.",
    ]
    for title, body in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", index, re.M | re.S):
        items = re.findall(r"^- (\[[^\]]+\])\(([^)]+)\)(.*)$", body, re.M)
        lines = []
        for name, target, rest in items:
            place = (ROOT / "docs" / target).resolve().relative_to(ROOT).as_posix()
            words = re.sub(r"\]\([^)]*\)", "", rest).replace("[", "").strip(" :,")
            lines.append(f"- {name}({place}): {words}" if words else f"- {name}({place})")
        parts.append("\n".join([f"## {title}\n", *lines]))
    return "\n\n".join(parts) + "\n"
