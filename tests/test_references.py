"""The pages that come from the code: each has every key, option and format, and a row without a
meaning stops the build.
"""

import inspect
import json
import re

import pytest
from tools.dev import commands, references, tables

from tether.cli import examine, prefs, trained
from tether.cli.options import grouped
from tether.core.types import Problem
from tether.data.formats.registry import FORMATS
from tether.data.formats.table import KINDS
from tether.data.sources import read
from tether.settings.recipe import Recipe, recipe_type
from tether.settings.reference import keys_of
from tether.settings.stages import STAGES

PREFS = {f"tether prefs {name}": command for name, command in prefs.COMMANDS.items()}


@pytest.mark.parametrize("name", references.PAGES)
def test_a_reference_is_what_the_code_says(name):
    written = (references.DOCS / name).read_text(encoding="utf-8")
    assert written == references.PAGES[name](), "run `python -m tools.dev.references`"


def test_a_row_without_a_name_or_a_meaning_stops_the_build():
    assert tables.markdown(("key", "meaning"), [("a|b", "c")]).endswith("| a\\|b | c |\n")
    for row in (("ppo.kl", ""), ("", "a penalty")):
        with pytest.raises(ValueError, match="lacks its name or its meaning"):
            tables.markdown(("key", "meaning"), [row])


def test_every_key_of_a_recipe_has_its_place():
    keys = list(keys_of(recipe_type()))
    assert len(keys) > 900
    page = references.recipes_page()
    inner = [key for key in keys if key.path[-1] not in STAGES]
    assert [
        key.name
        for key in inner
        if f"`{key.path[-1]}`" not in page and f".{key.path[-1]}`" not in page
    ] == []


def test_every_format_has_a_row_that_is_read_as_its_own_kind(tmp_path):
    rows = references.examples()
    assert rows.keys() == {layout.name for layout in FORMATS}
    for layout in FORMATS:
        file = tmp_path / f"{layout.name}.jsonl"
        file.write_text(json.dumps(rows[layout.name]) + "\n")
        records = list(read(file, layout.kind))
        assert records and all(isinstance(record, layout.kind) for record in records)


def test_the_sections_that_read_a_kind_are_those_of_the_table():
    """Sections name their record; only spin and problems are of other settings of a section."""
    for name, kind in STAGES.items():
        assert f"[{name}]" in KINDS[kind.section.record].read_by, name
    assert (
        Recipe.model_validate(
            {
                "run": "r",
                "model": {"source": "tiny"},
                "grpo": {"reward_source": "verifiable", "verifiable": {"kind": "exact"}},
            },
        )
        .section("grpo")
        .kind
        is Problem
    )


def test_the_page_of_commands_has_every_option_that_a_command_takes():
    """The options are counted where they are declared: in the signatures of the functions."""
    sections = dict(
        re.findall(r"^### (tether [^\n]+)\n(.*?)(?=^#|\Z)", commands.page(), re.M | re.S),
    )
    functions = {"tether plan": examine.plan, "tether chat": trained.chat, **PREFS}
    for name, function in functions.items():
        rows = re.findall(r"^\| `", sections[name], re.M)
        assert len(rows) == len(inspect.signature(grouped(function)).parameters), name
    assert "| `--temperature` | number, at least 0 | `0.7` |" in sections["tether chat"]
    assert "| `--port` | integer from 0 to 65535 |" in sections["tether prefs serve"]
    assert "| `--output`, `-o` | file |" in sections["tether prefs agree"]
    assert "those of [`tether sft`](#tether-sft)" in sections["tether dpo"]
