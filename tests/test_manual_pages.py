"""Pages of the manual beside the program: names of other libraries, messages, the loop with one's
own model, and the planner's counts.
"""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import library, names, one_card
from tether.settings.synonyms import KEYS, NOTES

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ROOT / "docs" / "guides"


def test_every_synonym_is_in_the_table_of_a_library_and_leads_to_a_key():
    listed = {word for words in names.LIBRARIES.values() for word in words.split()}
    assert listed == {*KEYS, *NOTES}
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", names.page(), re.M)
    assert listed <= {name for name, _ in rows}
    assert [name for name, meaning in rows if not meaning.strip()] == []
    assert ("num_generations", "`samples_per_prompt`") in rows


def test_each_message_of_the_troubleshooting_page_is_one_of_the_program():
    page = (GUIDES / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("## By error text")[2]
    fragments = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    files = (ROOT / "src" / "tether").rglob("*.py")
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join(p.read_text(encoding="utf-8") for p in files))
    assert len(fragments) >= 20 and [text for text in fragments if text not in source] == []


def test_the_loop_with_a_model_of_ones_own_learns_and_has_forty_lines():
    sys.path.insert(0, str(library.LOOP.parent))
    from losses_in_your_loop import train

    history = train()
    assert 0.4 < history[0] < 0.6 and min(history[-5:]) > 0.9
    code = library.LOOP.read_text(encoding="utf-8")
    body = code[code.index("def train") : code.index("\n\nif __name__")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 40
    assert "import tether" not in code and re.findall(r"from (tether\S+)", code) == [
        "tether.algorithms.advantages",
        "tether.algorithms.kl",
        "tether.algorithms.masked",
        "tether.algorithms.policy_losses",
    ]


def test_a_first_sentence_fits_a_table():
    assert library.first_sentence("Estimate KL(a || b), ``x``. Then\nmore.\n\nEnd.") == (
        r"Estimate KL(a \|\| b), `x`."
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "direct"])
def test_the_card_table_is_what_the_planner_counts(stage):
    page = (GUIDES / "one_gpu.md").read_text(encoding="utf-8")
    header, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith("| ")
    )
    written = {(row[0], row[1]): dict(zip(header, row, strict=True)) for row in rows}
    assert len(written) == len(one_card.SHAPES) * len(one_card.SETTINGS)
    for name, overrides in one_card.SETTINGS.items():
        shape = one_card.SHAPES[0]
        assert written[shape, name][stage] == one_card.cell(stage, shape, overrides)
