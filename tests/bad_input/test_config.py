"""Wrong recipes, wrong overrides, wrong names: one message that names the file, the key, the reason
and what would do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import Field

from tether.cli import main
from tether.core.errors import ConfigError, MissingFileError, TetherError
from tether.settings.config import Config
from tether.settings.reading import build, load_recipe, packaged_recipe
from tether.settings.recipe import Recipe

HEAD = b'run = "runs/x"\nseed = 1\n'

# what is wrong, the bytes of a recipe, what the message says
FILES: list[tuple[str, bytes, str]] = [
    ("no value", b"seed =\n", r"not a valid TOML file: Invalid value .at line 1.*Mend that line"),
    ("no key", b"= 1\n", "not a valid TOML file: Invalid statement .at line 1, column 1"),
    ("a word as a value", b"seed = one\n", "Invalid value .at line 1"),
    ("an open text", b'run = "runs\n', "Illegal character .* .at line 1"),
    ("an open list", b"seed = [1, 2\n", "Unclosed array"),
    ("an open table", b"[sft\nseed = 1\n", "Expected .* at the end of a table declaration .at "
                                           "line 1"),
    ("JSON", b'{"seed": 1}', "Invalid statement .at line 1"),
    ("YAML", b"seed: 1\n", "not a valid TOML file"),
    ("a key twice", b"seed = 1\nseed = 2\n", "Cannot overwrite a value .at line 2"),
    ("a table twice", b"[sft]\n[sft]\n", "Cannot declare .*sft.* twice .at line 2"),
    ("a key and a table of one name", b"sft = 1\n[sft]\n", "Cannot"),
    ("an unknown escape", b'run = "a\\qb"\n', "not a valid TOML file"),
    ("half a surrogate pair", b'run = "\\ud800"\n', "not a valid TOML file"),
    ("a byte 0", b'run = "a\0b"\n', "Illegal character"),
    ("an escaped byte 0", b'run = "a\\u0000b"\n', "a text holds a NUL character. Take it out"),
    ("latin-1", b'run = "caf\xe9"\n', "byte 10 is not UTF-8. Save the file as UTF-8"),
    ("UTF-16", 'seed = 1\n'.encode("utf-16"), "is not UTF-8. Save the file as UTF-8"),
    ("UTF-16 without a mark", 'seed = 1\n'.encode("utf-16-le"), "not a valid TOML file"),
    ("deep lists", b"seed = " + b"[" * 100_000, "lists or tables are nested too deeply"),
    ("deep lists that close", b"seed = " + b"[" * 300 + b"]" * 300, "nested too deeply|key 'seed'"),
    ("deep tables", b"seed = " + b"{a=" * 50_000, "nested too deeply"),
    ("deep dotted keys", b".".join([b"a"] * 1500) + b" = 1", "nested too deeply|unknown key 'a'"),
    ("a number of ten thousand digits", b"seed = " + b"9" * 10_000, "not a valid TOML file: a "
                                                                    "number has thousands of "
                                                                    "digits"),
    ("a Parquet file", b"PAR1\x15\x04\xff" * 9, "byte 6 is not UTF-8"),
    ("an unknown key", HEAD + b"sead = 1\n", "unknown key 'sead' .did you mean 'seed'?"),
    ("an unknown table", HEAD + b"[sftt]\n", "unknown key 'sftt' .did you mean 'sft'?"),
    ("an unknown key in a table", HEAD + b"[sft]\nepoch = 1\n", "unknown key 'sft.epoch' .did you "
                                                                "mean 'epochs'?"),
    ("an unknown key two tables deep", HEAD + b"[sft]\noptimizer.rate = 1\n", "unknown key "
                                                                              "'sft.optimizer.rate'"),
    ("an unknown key like no other", HEAD + b"zzzzzz = 1\n", "unknown key 'zzzzzz' .known keys: "
                                                             "arms, .*, sft"),
    ("a needed key left out", HEAD, "key 'model' is required"),
    ("a needed key left out of a table", HEAD + b"[sft]\ndata = {}\n", "key 'sft.data.path' is "
                                                                       "required"),
    ("a list for a number", HEAD.replace(b"1", b"[1]"), r"key 'seed': .*integer.* .got \[1\]"),
    ("a date for a number", HEAD.replace(b"1", b"2020-01-01"), "key 'seed': .*got '2020-01-01'"),
    ("a number for a table", HEAD + b"sft = 5\n", "key 'sft': .*got 5"),
    ("an array of tables for a table", HEAD + b"[[sft]]\nepochs = 1\n", "key 'sft': "),
]  # fmt: skip


@pytest.mark.parametrize(("what", "content", "message"), FILES, ids=[case[0] for case in FILES])
def test_a_wrong_recipe_is_one_message(
    tmp_path: Path,
    what: str,
    content: bytes,
    message: str,
) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        load_recipe(path, Recipe)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value)) < 700 and "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.toml"]


# what is wrong, overrides on a recipe that is right, what the message says
OVERRIDES: list[tuple[str, list[str], str]] = [
    ("nothing", [""], "override '' is not of the form key.sub=value, for example "
                      "optimizer.learning_rate=1e-4"),
    ("no value", ["seed"], "override 'seed' is not of the form"),
    ("no key", ["=5"], "override '=5' is not of the form"),
    ("dashes alone", ["--=5"], "override '--=5' is not of the form"),
    ("an empty part", ["sft..epochs=5"], "override 'sft..epochs=5' is not of the form"),
    ("an empty last part", ["sft.=5"], "override 'sft.=5' is not of the form"),
    ("an unknown key", ["sead=5"], "with 'sead=5': unknown key 'sead' .did you mean 'seed'?"),
    ("an unknown section", ["stf.epochs=5"], "unknown key 'stf' .did you mean 'sft'?"),
    ("an unknown key in a section", ["sft.epochz=5"], "unknown key 'sft.epochz' .did you mean "
                                                      "'epochs'?"),
    ("an unknown key three deep", ["sft.optimizer.learning=5"], "'sft.optimizer.learning' .did "
                                                                "you mean 'learning_rate'?"),
    ("an unknown key in a union", ["sft.lora.rnk=5"], "unknown key 'sft.lora.rnk' .did you mean "
                                                      "'rank'?"),
    ("a value taken for a table", ["seed.more=5"], "'seed' is a value, not a table. Give the "
                                                   "whole value in its place"),
    ("a table replaced by a value", ["sft=5"], "key 'sft': .*got 5"),
    ("an empty value", ["seed="], "key 'seed': .*got ''"),
    ("a word for a number", ["seed=many"], "key 'seed': .*got 'many'"),
    ("a list for a number", ["seed=[1]"], r"key 'seed': .*got \[1\]"),
    ("an open list for a number", ["seed=[1"], r"key 'seed': .*got '\[1'"),
    ("brackets for a number", ["seed=" + "[" * 50_000], r"key 'seed': .*got '\[\[\["),
    ("a truth value for a number", ["seed=true"], "key 'seed': a number belongs here .got True"),
    ("a truth value for a fraction", ["sft.optimizer.learning_rate=false"], "learning_rate': a "
                                                                            "number belongs here"),
    ("a fraction for a whole number", ["seed=1.5"], "key 'seed': .*got 1.5"),
    ("a number for a truth value", ["sft.data.strict=7"], "key 'sft.data.strict': .*got 7"),
    ("a number for a text", ["sft.data.format=7"], "key 'sft.data.format': Input should be a "
                                                   "valid string .got 7"),
    ("a number for a path", ["sft.data.path=7"], "key 'sft.data.path': Input should be a valid "
                                                 "string, or .*tuple .got 7"),
    ("numbers for paths", ["sft.data.path=[1]"], "key 'sft.data.path.0': Input should be a valid "
                                                 "string .got 1"),
    ("two lines for a number", ["seed=1\nrun='y'"], "key 'seed': .*got \"1"),
    ("not a number", ["sft.optimizer.learning_rate=nan"], "the number must be finite and smaller "
                                                          "than 2..63 .got nan"),
    ("infinity", ["sft.optimizer.learning_rate=inf"], "the number must be finite"),
    ("a fraction beyond all fractions", ["sft.optimizer.learning_rate=1e999"], "the number must "
                                                                               "be finite"),
    ("a whole number beyond 64 bits", ["seed=" + "9" * 30], "smaller than 2..63"),
    ("a whole number of thousands of digits", ["seed=" + "9" * 9000], "key 'seed': .*got '9999"),
    ("a negative rate", ["sft.optimizer.learning_rate=-1"], "key 'sft.optimizer.learning_rate': "
                                                            ".*greater than 0 .got -1"),
    ("no epochs", ["sft.epochs=0"], "key 'sft.epochs': .*greater than"),
    ("no batch", ["sft.batch_size=0"], "key 'sft.batch_size': .*greater than"),
    ("a share beyond 1", ["sft.heldout_fraction=1.5"], "key 'sft.heldout_fraction': .*less than"),
    ("a limit of nothing", ["sft.data.limit=0"], "key 'sft.data.limit': .*greater than or equal "
                                                 "to 1 .got 0"),
    ("none of the choices", ["model.dtype=float7"], "key 'model.dtype': .*got 'float7'"),
    ("a variable that is not set", ["sft.data.path=$NO_SUCH_FOLDER_AT_ALL/x"], "that environment "
                                                                               "variable is not "
                                                                               "set. Set it"),
    ("a byte 0", ["run=a\0b"], "a text holds a NUL character"),
    ("half a surrogate pair", ["run=\udcff"], "a text is not UTF-8. Write it in UTF-8"),
    ("such a key", ["\udcff=1"], "a text is not UTF-8"),
    ("two thousand parts", [".".join(["a"] * 2000) + "=1"], "nested too deeply|unknown key 'a'"),
    ("two faults", ["sead=5", "sft.epochs=no"], "key 'sft.epochs': .*; unknown key 'sead'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "overrides", "message"),
    OVERRIDES,
    ids=[case[0] for case in OVERRIDES],
)
def test_a_wrong_override_is_one_message(what: str, overrides: list[str], message: str) -> None:
    values = {
        "run": "runs/x",
        "model": {"source": "tiny"},
        "seed": 3,
        "sft": {"data": {"path": "hub:owner/name"}, "lora": {}},
    }
    build(Recipe, values)
    with pytest.raises(TetherError, match=message) as error:
        build(Recipe, values, overrides, where="mine.toml")
    assert len(str(error.value)) < 700 or "is not of the form" in str(error.value)


class Part(Config):
    name: str = ""
    rate: float = 1.0


class Whole(Config):
    parts: tuple[Part, ...] = ()
    named: Mapping[str, Part] = Field(default_factory=dict)
    either: Part | int | None = None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"parts": [{}, {"nme": "x"}]},
            r"^config: unknown key 'parts\.1\.nme' \(did you mean "
            r"'name'\?\)$",
        ),
        ({"parts": [{"rate": "x"}]}, r"^config: key 'parts\.0\.rate': .* \(got 'x'\)$"),
        (
            {"named": {"a": {"rat": 1}}},
            r"^config: unknown key 'named\.a\.rat' \(did you mean "
            r"'rate'\?\)$",
        ),
        ({"either": {"rat": 1}}, r"^config: unknown key 'either\.rat' \(did you mean 'rate'\?\)$"),
        (
            {"either": "x"},
            r"^config: key 'either': .*, or Input should be a valid integer.* \(got "
            r"'x'\)$",
        ),
    ],
)
def test_places_in_lists_tables_and_unions_have_the_names_that_a_person_wrote(
    values: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(Whole, values)


def test_a_mark_of_bytes_and_dos_lines_simply_work(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[either]\r\nname = 'x'\r\n")
    assert load_recipe(tmp_path / "a.toml", Whole) == Whole(either=Part(name="x"))


NAMES = [
    ("a near miss", "quikstart", "no recipe named 'quikstart' .did you mean 'quickstart'?"),
    (
        "nothing like it",
        "zzzz",
        "no recipe named 'zzzz'. Packaged recipes: .*hh-helpful, .*or give the path of a .toml file",
    ),
    (
        "a packaged name with an ending",
        "loop.toml",
        "recipe not found: loop.toml .did you mean 'loop'?",
    ),
    ("a file that is not there", "/nowhere/mine.toml", "recipe not found: /nowhere/mine.toml"),
    ("a way out of the folder", "../pyproject", "no recipe named"),
    ("nothing", "", "recipe not found: . .it is a folder"),
    ("too many characters", "x" * 5000, "no recipe named 'xxx"),
    (
        "too many characters with an ending",
        "x" * 5000 + ".toml",
        "cannot be read: File name too long",
    ),
    ("a byte 0", "a\0b", "no recipe named"),
    ("a byte 0 with an ending", "a\0b.toml", "recipe not found"),
    ("a device", "/dev/null", "recipe not found: /dev/null"),
]


@pytest.mark.parametrize(("what", "name", "message"), NAMES, ids=[name[0] for name in NAMES])
def test_a_wrong_name_of_a_recipe(what: str, name: str, message: str) -> None:
    with pytest.raises(TetherError, match=message):
        load_recipe(packaged_recipe(name), Recipe)


def test_a_folder_and_an_unreadable_file_are_no_recipes(tmp_path: Path) -> None:
    (tmp_path / "a.toml").mkdir()
    with pytest.raises(MissingFileError, match=r"a\.toml \(it is a folder\)"):
        load_recipe(tmp_path / "a.toml", Recipe)
    if sys.platform.startswith("linux"):
        (tmp_path / "b.toml").symlink_to("/proc/self/mem")
        with pytest.raises(ConfigError, match=r"b\.toml: cannot be read: Input/output error"):
            load_recipe(tmp_path / "b.toml", Recipe)


def test_the_command_line_exits_with_2_and_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.toml").write_bytes(HEAD + b'sead = 1\nmodel.source = "tiny"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tether", "run", "a.toml"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err == "tether: a.toml: unknown key 'sead' (did you mean 'seed'?)\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.toml"]


def test_a_table_of_settings_that_do_not_fit_together_is_not_printed():
    values = {
        "run": "r",
        "model": {"source": "tiny"},
        "grpo": {"data": {"path": "tether:prompts"}, "roles": "shared", "lora": False},
    }
    with pytest.raises(ConfigError) as caught:
        build(Recipe, values)
    assert "needs adapters, and lora is false" in str(caught.value) and "(got" not in str(
        caught.value,
    )
