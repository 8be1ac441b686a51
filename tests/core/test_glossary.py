"""Every metric of a log and every word of a report has a meaning to look up."""

import ast
import re
import tomllib
from pathlib import Path

import pytest
from benchmarks.prose import broken, sentences

from tether.core.glossary import EVERY, METRICS, meanings, near
from tether.core.rundir import read_jsonl

SOURCE = Path(__file__).resolve().parents[2] / "src" / "tether"
INNER = {"run/share"}
"""Given to the detectors, and not logged."""


def test_metrics_that_stages_write_have_an_entry():
    found = set()
    for room in ("stages", "rollout", "learner", "evaluation", "run"):
        for path in (SOURCE / room).rglob("*.py"):
            names = re.findall(
                r'"((?:policy|value|kl|reward|response|group|kept|pairs|heldout|gold|engine|time)/[a-z_0-9]+)"',
                path.read_text(encoding="utf-8"),
            )
            found |= set(names)
    assert len(found) > 35 and sorted(found - METRICS.keys() - INNER) == []


def test_titles_of_charts_and_names_of_tiles_have_an_entry():
    charts = tomllib.loads((SOURCE / "report" / "charts.toml").read_text(encoding="utf-8"))
    titles = re.findall(
        r"^title = \"(.+)\"$",
        (SOURCE / "report" / "charts.toml").read_text(encoding="utf-8"),
        re.M,
    )
    table = ast.parse((SOURCE / "report" / "tiles.py").read_text(encoding="utf-8"))
    tiles = [
        row.elts[0].value
        for row in ast.walk(table)
        if isinstance(row, ast.Tuple)
        and len(row.elts) == 4
        and isinstance(row.elts[0], ast.Constant)
        and isinstance(row.elts[0].value, str)
    ]
    assert charts and len(titles) > 35 and len(tiles) > 25
    studies = {
        title for title in titles if title.startswith(("Best-of-n", "PPO:", "Step ", "{"))
    }  # of pages with captions of their own
    missing = [word for word in {*titles, *tiles} - studies if not meanings(word)]
    assert sorted(missing) == []


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("length", "response/length"),
        ("kl", "KL"),
        ("clip", "clip"),
        ("explained variance", "value/explained_variance"),
        ("response/stop_rate", "response/stop_rate"),
        ("Gold win rate", "gold win rate"),
    ],
)
def test_a_word_is_found_by_its_whole_name_or_its_last_part(word, name):
    assert name in meanings(word)


def test_slips_of_the_fingers_find_their_word():
    assert near("explained_varience")[0] in ("value/explained_variance", "explained variance")
    assert near("zzzzqq") == [] and meanings("explained_varience") == {}


def test_meanings_are_short_sentences():
    """Rules 1 to 4 of docs/dev/style.md, which `benchmarks.house` does not count in TOML."""
    texts = EVERY.values()
    assert all(text.endswith(".") and not text[0].islower() for text in texts)
    assert [one for text in texts for one in sentences(text) if set(broken(one))] == []


def test_every_entry_is_found_by_its_name():
    assert [name for name in EVERY if name not in meanings(name)] == []
    assert len({name.lower() for name in EVERY}) == len(EVERY)


@pytest.mark.slow
def test_metrics_of_every_stage_have_an_entry(tmp_path):
    from benchmarks.every_stage import recipe

    from tether.runner.run import run_recipe
    from tether.settings.reading import build
    from tether.settings.recipe import Recipe

    run_recipe(build(Recipe, recipe(tmp_path, tmp_path / "run")))
    logged = {
        key
        for path in (tmp_path / "run").rglob("metrics.jsonl")
        for row in read_jsonl(path)
        for key in row
    }
    assert len(logged) > 50 and sorted(name for name in logged if not meanings(name)) == []
