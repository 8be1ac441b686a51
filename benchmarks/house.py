"""`python -m benchmarks.house`: what the house weighs, counted from its source; `make check` holds
each count to its ceiling.

The ceilings stand in pyproject.toml under [tool.house]; who makes a count smaller writes it there,
and a feature may raise it.
"""

from __future__ import annotations

import ast
import io
import itertools
import sys
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Container, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "src" / "tether"
VAGUE = frozenset({"found", "known", "said", "told", "kept", "asked", "apart"})
"""Names of locals that say nothing of what they hold."""
RIGHT_SPLATS = {
    "algorithms/token_batch.py: replace": "each tensor among the fields, found by reflection",
    "people/annotation/answers.py: Answer": "a typed dictionary, `Origin`",
    "people/annotation/task_json.py: Answer": "a typed dictionary, `Origin`",
    "api/classic/config.py: cls": "keywords of a user, which pydantic checks",
    "runner/assembly/judges.py: FunctionReward": "a typed dictionary, `LimitArguments`",
    "data/formats/registry.py: replace": "the one of two fields that a record has",
    "evaluation/suite.py: Record": "a row that the same class wrote as JSON",
    "runner/methods/pairs.py: Annotation": "a row that the same class wrote as JSON",
    "runner/methods/pairs.py: Comparison": "a row that the same class wrote as JSON",
    "watch/report/figures.py: Trace": "a row of a packaged table, which a test reads",
    "rewards/function.py: FunctionReward": "a typed dictionary, `LimitArguments`",
}
"""Calls of a class that may be given unpacked values, by file and class, each with its reason."""
LAYOUT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    },
)


def code_lines(text: str) -> int:
    """Lines of Python that are neither blank, nor comment, nor docstring."""
    return len({line for token in _code(text) for line in range(token.start[0], token.end[0] + 1)})


def tokens(text: str) -> int:
    """Tokens of Python that are neither comment, nor docstring, nor layout.

    A formatted text counts once, as it does until Python 3.11; later versions list its parts.
    """
    count = depth = 0
    for token in _code(text):
        name = tokenize.tok_name[token.type]
        count += depth == 0
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")
    return count


def _code(text: str) -> Iterator[tokenize.TokenInfo]:
    prose = _docstrings(ast.parse(text))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.start[0] not in prose:
            yield token


def _docstrings(tree: ast.Module) -> set[int]:
    """The lines of texts that stand as statements of their own."""
    return {
        line
        for node, _ in _text_statements(tree)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _text_statements(tree: ast.Module) -> Iterator[tuple[ast.Expr, str]]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node, node.value.value


def public_names(tree: ast.Module) -> Iterator[str]:
    """Of the functions and classes that a module defines."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def vague_locals(tree: ast.Module) -> int:
    """Names of VAGUE that functions bind, each once a function."""
    count = 0
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            stores = (
                n.id
                for n in ast.walk(function)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            )
            count += len(VAGUE.intersection(stores))
    return count


def uses_of_any(tree: ast.Module) -> int:
    """Number of places that name `Any`; imports are left out."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))


def splats(tree: ast.Module, classes: Container[str]) -> Iterator[str]:
    """The class of each `**values` among the arguments of a class; `cls` and `replace` count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in classes or name in ("cls", "replace", "_replace"):
                yield from (name for keyword in node.keywords if keyword.arg is None)


def by_place(tree: ast.Module) -> Iterator[str]:
    """The dataclasses of which more than four fields may be given by place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            words = " ".join(map(ast.unparse, node.decorator_list))
            fields = [ast.unparse(f.annotation) for f in node.body if isinstance(f, ast.AnnAssign)]
            places = itertools.takewhile(lambda annotation: annotation != "KW_ONLY", fields)
            if "dataclass" in words and "kw_only=True" not in words and len([*places]) > 4:
                yield node.name


def counts(package: Path = PACKAGE) -> dict[str, int]:
    """All counts, by the names under which their ceilings stand."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    homes: dict[str, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        for name in public_names(tree):
            homes[name].add(path)
    classes = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    calls = [
        node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Call)
    ]
    return {
        "tokens": sum(map(tokens, sources.values())),
        "tokens_in_100_lines": round(
            100 * sum(map(tokens, sources.values())) / sum(map(code_lines, sources.values())),
        ),
        "public_names_twice": sum(len(paths) > 1 for paths in homes.values()),
        "vague_locals": sum(map(vague_locals, trees.values())),
        "any": sum(map(uses_of_any, trees.values())),
        "splats": sum(
            f"{path.relative_to(package).as_posix()}: {name}" not in RIGHT_SPLATS
            for path, tree in trees.items()
            for name in splats(tree, classes)
        ),
        "by_place": sum(len([*by_place(tree)]) for tree in trees.values()),
        "untyped_dicts": sum(text.count("dict[str, Any]") for text in sources.values()),
        "getattr_defaults": sum(
            isinstance(c.func, ast.Name) and c.func.id == "getattr" and len(c.args) == 3
            for c in calls
        ),
    }


def ceilings() -> dict[str, int]:
    """What each may be at most."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "house"
    ]


def main() -> int:
    """Print the counts beside their ceilings; 1 where one is above."""
    allowed = ceilings()
    for name, count in counts().items():
        print(
            f"{name:28} {count:7,}   at most "
            f"{allowed[name]:7,}{'   TOO MANY' if count > allowed[name] else ''}",
        )
    return int(any(count > allowed[name] for name, count in counts().items()))


if __name__ == "__main__":
    sys.exit(main())
