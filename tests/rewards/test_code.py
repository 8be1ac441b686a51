"""Programs as answers: what counts as right, and who may find out."""

import json
import random

import pytest

from tether.core.errors import ConfigError, DataError
from tether.rewards import code_tests, values
from tether.rewards.sandbox import CheckResult
from tether.rewards.verifiable import VerifiableReward
from tether.settings.reading import build
from tether.settings.rewards import VerifiableConfig


@pytest.mark.parametrize(
    "program",
    [
        "def f(x): return x * x",
        "Here it is:\n```python\ndef f(x):\n    return 1\n```\nNo, rather:\n```py\ndef f(x):\n    "
        "return x ** 2\n```\nDone.",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nf = lambda x: "
        "A(x).x ** 2",
        "import sys\nif __name__ == '__main__':\n    sys.exit(1)\nf = lambda x: x * x",
        "import asyncio\nasync def g(x): return x * x\ndef f(x): return asyncio.run(g(x))",
        "import threading\ndef f(x):\n    got = []\n    t = threading.Thread(target=lambda: "
        "got.append(x * x))\n    t.start()\n"
        "    t.join()\n    return got[0]",
        "def f(x):\n    with open('note', 'w') as file: file.write('.' * x * x)\n    return "
        "len(open('note').read())",
        "print('chatter')\nf = lambda x: float(x * x)",
        "First:\n```bash\npip install numpy\n```\nthen:\n```python\ndef f(x): return x * "
        "x\n```\nRun it.",
        "```Python3 title='a.py'\r\ndef f(x): return x * x\r\n```\nThat prints:\n```text\n4\n```",
        "``` \ndef f(x): return x * x\n```\n```c++\nint f(int x);\n```",
        "import numpy\nf = lambda x: numpy.int64(x * x)",
        "import numpy\nf = lambda x: numpy.longdouble(x * x)",
        "def g(x: int): pass\nf = lambda x: x * x if g.__annotations__['x'] is int else 0",
    ],
)
def test_right_programs(score, program):
    found = score(program)
    assert (found.value, found.parts, found.reason) == (1.0, {"correct": 1.0}, "")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def f(x): return 4", "f(3): gave 4"),
        ("I do not know.", "SyntaxError"),
        ("", "no program found"),
        ("def f(x): return [x * x]", "f(2): gave ['list', 4]"),
        ("def g(x): return x", "f(2): raised NameError"),
        ("def f(x): raise SystemExit(0)", "f(2): raised SystemExit"),
        ("import os\nos._exit(0)", "before its tests (exit code 0)"),
        (
            "class E:\n    def __eq__(self, other): return True\nf = lambda x: E()",
            "f(2): gave ['E'",
        ),
        (
            "import os, json\nos.write(3, json.dumps(['x', [['gave', 4], ['gave', "
            "9]]]).encode())\nos._exit(0)",
            "before its tests",
        ),
        ("import builtins\nbuiltins.eval = lambda *a: 4\nf = lambda x: 4", "f(3): gave 4"),
    ],
)
def test_wrong_programs_and_tricks(score, program, reason):
    found = score(program)
    assert found.value == 0.0 and reason in found.reason, found


@pytest.mark.parametrize(
    ("right", "same", "other"),
    [
        ("[1, (2, 3)]", "[1, (2, 3)]", "[1, [2, 3]]"),
        ("{1: 'a', 2: {3}}", "{2: {3}, 1: 'a'}", "{1: 'a', 2: [3]}"),
        ("{3, 1, 2}", "frozenset([2, 1, 3])", "[1, 2, 3]"),
        ("None", "None", "'None'"),
        ("1.0", "1", "1.5"),
        ("True", "1", "2"),
        ("b'x'", "b'x'", "'x'"),
        ("[]", "list()", "()"),
        ("-3", "-3.0", "3"),
        ("0.5", "__import__('fractions').Fraction(1, 2)", "__import__('fractions').Fraction(1, 3)"),
        ("0.1", "0.1", "__import__('decimal').Decimal('0.1')"),
        ("3", "__import__('decimal').Decimal('3.0')", "__import__('decimal').Decimal('NaN')"),
        ("1e999", "__import__('decimal').Decimal('Infinity')", "0"),
        ("{'a'}", "{'a': 1}.keys()", "{'b': 1}.keys()"),
        ("{('a', 1)}", "{'a': 1}.items()", "{'a': 2}.items()"),
        ("{1, 2}", "{True, 2}", "{True, 3}"),
        ("{1e16, 12}", "{10**16, 12.0}", "{10**16, 12.5}"),
        ("{1: 'a', 2: 'b'}", "{2: 'b', True: 'a'}", "{2: 'a', True: 'b'}"),
        ("b'x'", "bytearray(b'x')", "bytearray(b'y')"),
    ],
)
def test_values_are_equal_when_python_says_so(score, right, same, other):
    known, equal, unequal = (eval(written) for written in (right, same, other))  # noqa: S307
    assert known == equal and known != unequal
    for written, expected in ((same, 1.0), (other, 0.0)):
        assert score(f"def f(): return {written}", f"assert f() == {right}").value == expected
        assert score(f"def f(): return {written}", f"assert {right} == f()").value == expected


def test_other_tests_run_as_they_stand(score):
    published = (
        "def check(candidate):\n    assert abs(candidate(2) - 4) < 1e-6\n    assert "
        "candidate(3) == 9\ncheck(f)\n"
    )
    assert score("def f(x): return x * x", published).value == 1.0
    assert score("def f(x): return x + x", published).value == 0.0
    lines = ["import math", "assert math.isclose(f(2), 4)", "assert f(3) == 9"]
    assert score("def f(x): return x * x", lines).value == 1.0


@pytest.mark.parametrize(
    "held",
    [
        "for x in range(10):\n    assert f(x) == x * x",
        "class A:\n    square = 9\nfor x in [3]:\n    import pickle\n    assert f(x) == "
        "pickle.loads(pickle.dumps(A)).square",
        "if f(0) is not None:\n    assert f(3) == 9",
        "try:\n    assert f(3) == 9\nfinally:\n    pass",
        "import contextlib\nwith contextlib.nullcontext(9) as nine:\n    assert f(3) == nine",
        "x = 0\nwhile x < 4:\n    x += 1\n    assert f(x) == x * x",
        "if f(3) != 9:\n    raise ValueError('not nine')",
        "if __name__ == '__main__':\n    assert f(3) == 9",
    ],
)
def test_each_assertion_that_holds_counts(score, held):
    for tests in (f"assert f(2) == 4\n{held}", held):
        assert score("def f(x): return x * x", tests).value == 1.0
        assert score("def f(x): return 4", tests).value == 0.0


@pytest.mark.parametrize(
    "written",
    [
        "int32(3)",
        "float64(3)",
        "float32(3)",
        "uint8(3)",
        "complex64(3j)",
        "bool_(True)",
        "array([3])[0]",
    ],
)
def test_scalars_of_numpy_are_plain_values(written):
    import numpy

    value = eval(f"numpy.{written}", {"numpy": numpy})  # noqa: S307
    known, other = (
        (True, 0)
        if written.startswith("bool")
        else (3j, 3)
        if written.startswith("complex")
        else (3, 4)
    )
    assert value == known and values.comparable([value]) == values.comparable([known])
    assert value != other and values.comparable([value]) != values.comparable([other])


def test_credit_is_for_all_tests_or_for_each(score, answered):
    tests = (
        "import math\nassert f(2) == 4\nassert f(3) == 9\nassert f(math.e) == 1\nassert f(0) == 0"
    )
    assert score("def f(x): return x * x", tests).value == 0.0
    config = VerifiableConfig(
        kind="code",
        credit="share",
        format_pattern="def .*",
        format_weight=0.5,
    )
    with VerifiableReward(config) as sharing:
        (found,) = sharing.score([answered("def f(x): return x * x", tests)])
    assert (found.value, found.parts) == (1.25, {"correct": 0.75, "format": 1.0})


def test_programs_that_read_and_print(score):
    tests = [{"input": "3\n4\n", "output": "7"}, {"input": "1\n1\n", "output": "2 \n"}]
    good = (
        "import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin)))\n    "
        "sys.exit()"
    )
    assert score(good, tests).value == 1.0
    assert score("print(int(input()) + int(input()))", tests).value == 1.0
    assert score("print(7)", tests).value == 0.0
    assert score("print(int(input()) + int(input()))\nraise SystemExit(1)", tests).value == 0.0
    large = [{"input": "x" * 300_000, "output": "300000"}]
    assert score("print(len(input()))", large).value == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), "
        "print(7))).start()",
        "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor(2).submit(print, 7)",
        "import atexit, sys\natexit.register(print, 7)\nsys.exit()",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), "
        "daemon=True).start()\nprint(7)",
        "import sys\nprint('working', file=sys.stderr)\nprint(7)\nsys.stderr.write('done')",
        "import warnings\nwarnings.warn('old')\nprint(7)",
    ],
)
def test_a_program_ends_as_python_ends_it(score, program):
    assert score(program, [{"input": "", "output": "7"}]).value == 1.0
    assert score(program, [{"input": "", "output": "8"}]).value == 0.0


def test_white_space_counts_where_it_shows(score):
    tests = [{"input": "", "output": "  *\n ***\n*****\n"}]
    assert score("print('\\n  *  \\n ***\\n*****\\n')", tests).value == 1.0
    assert score("print('*\\n ***\\n*****')", tests).value == 0.0
    assert (
        score("print(7)\nimport sys\nsys.stderr.write('8')", [{"input": "", "output": "78"}]).value
        == 0.0
    )


def test_a_program_never_meets_the_right_answer(score):
    number = random.Random(5).randrange(10**20)
    search = f"""
    import gc, sys
    def f():
        frame, seen = sys._getframe(), []
        while frame:
            seen += [repr(v) for v in list(frame.f_locals.values()) + list(frame.f_globals.values())]
            frame = frame.f_back
        for thing in gc.get_objects():
            try: seen.append(repr(thing))
            except Exception: pass
        return [text for text in seen if "".join({[str(number)[:9], str(number)[9:]]}) in text][:1] or "nowhere"
    """
    score("def f(): return 1", f"assert f() == {number}")  # what came before is not there either
    found = score(search, f"assert f() == {number}")
    assert "gave nowhere" in found.reason


def test_a_program_that_prints_never_meets_the_right_output(score):
    number = random.Random(6).randrange(10**20)
    search = f"""
    import gc, os, sys
    frame, seen = sys._getframe(), [sys.stdin.read(), *os.environ.values(), *sys.argv]
    while frame:
        seen += [repr(v) for v in list(frame.f_locals.values()) + list(frame.f_globals.values())]
        frame = frame.f_back
    for thing in gc.get_objects():
        try: seen.append(repr(thing))
        except Exception: pass
    wanted = "".join({[str(number)[:9], str(number)[9:]]})
    print("".join({[str(number)[:9], str(number)[9:]]}) if any(wanted in text for text in seen) else "nowhere")
    """
    found = score(search, [{"input": "", "output": str(number)}])
    assert found.value == 0.0 and "gave nowhere" in found.reason


def test_a_program_that_no_worker_could_run_has_no_score(answered, monkeypatch):
    """Missing, not wrong: None is left out of a training, and 0 is learned from."""
    with VerifiableReward(VerifiableConfig(kind="code", workers=1)) as reward:
        failed = CheckResult(failure="died", detail="the checking process ended")
        monkeypatch.setattr(reward._sandbox, "run", lambda requests: [failed] * len(requests))
        (found,) = reward.score([answered("f = lambda x: x * x")])
    assert found.value is None and "died: the checking process ended" in found.reason


@pytest.mark.parametrize(
    "tests",
    [
        *("x = 1", "assert f( ==", [{"input": "1"}], [], [3]),
        "def check(candidate):\n    assert candidate(2) == 4",
        "async def check(candidate):\n    raise ValueError",
        "class Checks:\n    def check(self, candidate):\n        assert candidate(2) == 4",
        *(
            "42",
            '["3", "4"]',
            "f(2) == 4",
            "print(f(2))",
            "assert True",
            "assert 1 == 1",
            "x = f(2)",
        ),
        *("assert (f(2) == 4, 'four')", "if False:\n    assert f(2) == 4", "[[2, 4], [3, 9]]"),
        "try:\n    assert f(2) == 4\nexcept Exception as error:\n    print(error)",
        "def check(candidate):\n    return candidate(2) == 4\ncheck(f)",
        '{"inputs": ["1"], "outputs": []}',
        '{"fn_name": "f", "inputs": ["two"], "outputs": ["4"]}',
        [{"input": "2", "output": "4", "testtype": "functional"}],
    ],
)
def test_tests_that_test_nothing_are_refused(tests):
    with pytest.raises(DataError, match="test"):
        code_tests.read_tests(tests)


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]},
        {"inputs": [["2"], ["3"]], "outputs": [["4"], ["9"]]},
        [{"input": "2", "output": "4"}, {"input": ["3"], "output": ["9"]}],
        {"input": "3", "output": "9"},
        {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]},
        {"fn_name": "f", "inputs": [[2], [3]], "outputs": [[4], [9]]},
        {"fn_name": "f", "inputs": ["2", "3"], "outputs": ["4", "9"]},
        {"fn_name": "pair", "inputs": [[2], [3]], "outputs": [[2, 4], [3, 9]]},
    ],
)
def test_published_layouts_are_run_as_what_they_are(score, tests):
    program = (
        "class Solution:\n    def f(self, x): return x ** 2\n    def pair(self, x): return x, x ** 2\n"
        "if __name__ == '__main__':\n    print(Solution().f(int(input())))"
    )
    for written in (tests, json.dumps(tests)):
        assert score(program, written).value == 1.0
        assert score(program.replace("x ** 2", "x + 1"), written).value == 0.0
        assert score("pass", written).value == 0.0


@pytest.mark.parametrize(
    "main",
    ["unittest.main()", "if __name__ == '__main__':\n    unittest.main()"],
)
def test_cases_of_unittest_are_run(score, main):
    case = "class T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(3), 9)"
    assert score("def f(x): return x * x", f"import unittest\n{case}\n{main}").value == 1.0
    assert score("def f(x): return 4", f"import unittest\n{case}\n{main}").value == 0.0


SQUARE = "```python\ndef f(x): return x * x\n```\n"


@pytest.mark.parametrize(
    "text",
    [
        SQUARE + "Usage:\n```python\nprint(f(int(input())))\n```",
        SQUARE + "It gives:\n```\n4\n```",
        SQUARE + "```python\nx = f(2)\nassert x == 5\n```",
        SQUARE + "```python\ndef test_f():\n    assert f(2) == 5\ntest_f()\n```",
        SQUARE + "```python\ndef main():\n    print(f(int(input())))\nmain()\n```",
        SQUARE + "```python\n>>> f(2)\n4\n```",
        "```python\nimport math\n```\n```python\ndef f(x): return math.prod([x, x])\n```",
        "```python\ndef g(x): return x\n```\n```python\ndef f(x): return g(x) * x\n```",
        "~~~python\ndef f(x): return x * x\n~~~",
        "1. So:\n\n   ```python\n   def f(x):\n       return x * x\n   ```\n",
        "Here:\n\n    def f(x):\n        y = x\n\n        return x * y\n\nDone.",
        '````python\ndef f(x):\n    """```a```"""\n    return x * x\n````',
        "<think>\n```python\ndef f(x): return 1\n```\n</think>\n" + SQUARE,
        SQUARE.removesuffix("```\n"),
    ],
)
def test_the_solution_is_found_among_the_blocks(score, text):
    assert score(text).value == 1.0
    assert score(text.replace("return ", "return 1 + ")).value == 0.0


def test_a_main_block_behind_its_functions_is_run(score):
    tests = [{"input": "3", "output": "9"}]
    for main in ("print(f(int(input())))", "n = int(input())\nprint(f(n))"):
        assert score(f"{SQUARE}Run:\n```python\n{main}\n```", tests).value == 1.0
        alone = f"```python\n{main.replace('f(', '(lambda x: x * x)(')}\n```"
        assert score(f"{alone}\n```python\nprint('hello')\n```", tests).value == 1.0


def test_printed_decimals_are_close_and_other_words_equal(score):
    tests = [{"input": "", "output": "0.3 a\n1e-3"}]
    assert score("print(0.1 + 0.2, 'a')\nprint('0.001')", tests).value == 1.0
    for other in ("0.31 a\n1e-3", "0.3 b\n1e-3", "0.3  a\n1e-3", "nan a\n1e-3", "0.3 a"):
        assert score(f"print({other!r})", tests).value == 0.0
    assert score("print(1000001)", [{"input": "", "output": "1000000"}]).value == 0.0


def test_a_row_whose_tests_cannot_be_read_fails_alone(answered):
    with VerifiableReward(VerifiableConfig(kind="code", workers=1)) as reward:
        square = "f = lambda x: x * x"
        broken, fine = reward.score([answered(square, "assert f( =="), answered(square)])
    assert broken.value is None and "p: the tests of a problem are no Python" in broken.reason
    assert fine.value == 1.0


def test_credit_has_no_effect_elsewhere():
    with pytest.raises(ConfigError, match="credit has no effect with kind = 'exact'"):
        build(VerifiableConfig, {"kind": "exact", "credit": "share"})


def test_workers_run_programs_at_the_same_time_and_in_order(answered):
    programs = [f"import time\ntime.sleep({n % 3} / 50)\nf = lambda: {n}" for n in range(12)]
    with VerifiableReward(VerifiableConfig(kind="code", workers=3)) as pool:
        scores = pool.score(
            [answered(program, f"assert f() == {n}") for n, program in enumerate(programs)],
        )
        assert [found.value for found in scores] == [1.0] * 12
