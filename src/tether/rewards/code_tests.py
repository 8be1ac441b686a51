"""Tests of programs in the layouts in which they are published, as questions to a program.

Python source, or a list of it, asserts something. A row {"input", "output"} is a run of a whole
program. {"inputs", "outputs"} (APPS, https://arxiv.org/abs/2105.09938; TACO,
https://arxiv.org/abs/2312.14852; PRIME, https://arxiv.org/abs/2502.01456) holds several runs, or
calls of the function `fn_name`.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tether.core.errors import DataError
from tether.core.types import Json, JsonValue
from tether.rewards.values import as_json, comparable

_ASSERTING = re.compile(r"_*(?:assert|check|verify|raises|fail|exit)", re.IGNORECASE)
_BROAD = re.compile(r"\b(?:AssertionError|Exception|BaseException)\b")
_UNITTEST = re.compile(r"\bunittest\.main\([^()]*\)")
_RUN_UNITTEST = (
    'assert unittest.TextTestRunner(stream=__import__("io").StringIO()).run(unittest'
    '.defaultTestLoader.loadTestsFromModule(__import__("__main__"))).wasSuccessful()'
)


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One thing inputs of a program, and what is right (None: only that it runs without an
    error).
    """

    ask: str
    kind: str
    right: object = None
    counts: bool = True


def read_tests(given: JsonValue) -> tuple[CodeTest, ...]:
    """The tests of a problem, in any of these layouts, also as JSON text.

    Raises:
        DataError: it is none of these, is no Python, or tests nothing.
    """
    if isinstance(given, str) and given.lstrip().startswith(("[", "{")):
        with contextlib.suppress(json.JSONDecodeError):
            given = json.loads(given)
    rows: Sequence[JsonValue] = given if isinstance(given, list | tuple) else [given]
    if rows and all(isinstance(row, Mapping) for row in rows):
        return tuple(test for row in rows for test in _runs(row))
    shown = str(given)[:80]
    if not all(isinstance(row, str) for row in rows):
        raise DataError(
            f"tests are Python source, a list of it, or a list of {{input, output}}; "
            f"these are not: {shown}",
        )
    try:
        tree = ast.parse(_UNITTEST.sub(_RUN_UNITTEST, "\n".join(rows)))
        tests = tuple(map(_Asserted(tree).test, tree.body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DataError(f"the tests of a problem are no Python ({error}): {shown}") from None
    if not any(test.counts for test in tests):
        raise DataError(
            f"the tests of a problem assert nothing, so every program would meet them: {shown}",
        )
    return tests


def _runs(row: Json) -> Iterator[CodeTest]:
    """The runs or calls of a row {input, output} or {inputs, outputs}."""
    if "inputs" in row:
        inputs = row["inputs"]
        rights = row.get("outputs")
    else:
        inputs = [row.get("input")]
        rights = [row.get("output")]
    name = row.get("fn_name")
    if (
        not (isinstance(inputs, list) and isinstance(rights, list) and inputs)
        or len(inputs) != len(rights)
        or None in (inputs[0], rights[0])
        or (name is None and row.get("testtype") == "functional")
    ):
        raise DataError(
            "tests in JSON are {input, output} or {inputs, outputs}, as many of both, and fn_name "
            f"where a function is called; these are not: {str(row)[:80]}",
        )
    for given, right in zip(inputs, rights, strict=True):
        yield _call(name, given, right) if name else CodeTest(_text(given), "program", _text(right))


def _text(value: JsonValue) -> str:
    """A text that is read or printed; of a list its lines."""
    return "\n".join(map(_text, value)) if isinstance(value, list) else str(value)


def _call(name: str, given: JsonValue, right: JsonValue) -> CodeTest:
    """A call of a function, or of the method of `Solution`; arguments and result as values, or as
    lines of JSON. A result may be the only item of a list.
    """
    if isinstance(given, str):
        try:
            given = [json.loads(line) for line in given.splitlines()]
            right = json.loads(right) if isinstance(right, str) else right
        except json.JSONDecodeError:
            raise DataError(
                f"tests call {name} with what are no lines of JSON: {given[:80]}",
            ) from None
    rights = [right, *(right if isinstance(right, list) and len(right) == 1 else [])]
    values = ", ".join(map(repr, given if isinstance(given, list) else [given]))
    call = f"(Solution().{name} if 'Solution' in globals() else {name})({values})"
    # as JSON, which has no tuples
    ask = f"__import__('json').loads(__import__('json').dumps({call}))"
    return CodeTest(ask, "call", json.loads(json.dumps(list(map(comparable, rights)))))


class _Asserted:
    """Statements of tests, and which of them assert something when they are run."""

    def __init__(self, tree: ast.Module) -> None:
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        self.functions = {node.name: node for node in functions}

    def test(self, statement: ast.stmt) -> CodeTest:
        match statement:
            case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
                for call, literal in ((left, right), (right, left)):
                    with contextlib.suppress(ValueError, TypeError):
                        value = as_json(ast.literal_eval(literal))
                        counts = self.holds(statement)
                        return CodeTest(ast.unparse(call), "value", value, counts)
        return CodeTest(ast.unparse(statement), "run", counts=self.holds(statement))

    def holds(self, node: ast.AST, callers: tuple[str, ...] = ()) -> bool:
        """True if running this can fail by an assertion or a raise of the tests themselves."""
        parts = ast.iter_child_nodes(node)
        match node:
            case ast.Assert(test=test):
                is_true = isinstance(test, ast.Tuple)
                return not is_true and any(isinstance(part, ast.Name) for part in ast.walk(test))
            case ast.Raise():
                return True
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                return False
            case ast.With() if "suppress(" in ast.unparse(node.items[0]):
                return False
            case ast.If(test=ast.Constant(value=False)):
                parts = node.orelse
            case ast.Try() if any(map(self._swallows, node.handlers)):
                parts = [*node.handlers, *node.orelse, *node.finalbody]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                if name not in self.functions and _ASSERTING.match(name):
                    return True
                if name in self.functions and name not in callers:
                    parts = [*parts, *self.functions[name].body]
                    callers = (*callers, name)
        return any(self.holds(part, callers) for part in parts)

    def _swallows(self, handler: ast.ExceptHandler) -> bool:
        """True if a handler catches what asserts raise, and goes on."""
        caught = _BROAD.search(ast.unparse(handler.type)) if handler.type else True
        return bool(caught) and not any(map(self.holds, handler.body))
