"""The program in the fenced blocks of a response."""

from __future__ import annotations

import ast
import contextlib
import re
import textwrap

_FENCE = re.compile(
    r"(?<![ \t])([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+([\w+#.-]*+)[^\n`~]*+\n(.*?)(?:\2|\Z)",
    re.DOTALL,
)
_INDENTED = re.compile(r"(?:\A|(?<=\n\n))(?:(?: {4}|\t)[^\n]*(?:\n+|\Z))+")
_DEFINITION = re.compile(
    r"^(?:async def|def|class) (?!main|test|check|example|demo|usage|run_)|^\w+ = lambda\b",
    re.MULTILINE,
)
_READS = re.compile(r"\binput\(|\bstdin\b|\bopen\(0")
_NAMES = (
    ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign
)


def fenced(text: str) -> str | None:
    """The program in the blocks of a text that are Python or say no language; None without one.

    It is the last block with a definition, behind the blocks before it that only give names. A block
    after it shows how to use it, and runs where the program is the main one and reads no input
    itself. Without a definition it is the last block that reads input, else the last.
    """
    # of every language: else the end of a block of shell would begin one
    sources = [
        textwrap.dedent(indent + body)
        for indent, _, language, body in _FENCE.findall(text)
        if language.lower() in ("", "py", "python", "python3")
    ]
    if not sources and _parsed(text) is None:
        sources = [textwrap.dedent(block) for block in _INDENTED.findall(text)]
    blocks = [source for source in sources if _acts(source)] or sources[-1:]
    if not blocks:
        return None
    defining = [place for place, block in enumerate(blocks) if _DEFINITION.search(block)]
    reading = [place for place, block in enumerate(blocks) if _READS.search(block)]
    if not defining:
        return blocks[reading[-1] if reading else -1]
    place = defining[-1]
    names = (b for b in blocks[:place] if all(isinstance(n, _NAMES) for n in _parsed(b) or []))
    program = "\n".join([*names, blocks[place]])
    if place in reading or not blocks[place + 1 :]:
        return program
    return f'{program}\nif __name__ == "__main__":\n    exec({blocks[-1]!r})\n'


def _parsed(source: str) -> list[ast.stmt] | None:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.parse(source).body
    return None


def _acts(source: str) -> bool:
    """True if a block is Python that does something, unlike a block of output."""
    return any(
        not isinstance(node, ast.Expr) or any(isinstance(part, ast.Call) for part in ast.walk(node))
        for node in _parsed(source) or []
    )
