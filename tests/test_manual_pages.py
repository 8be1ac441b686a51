"""Pages of the manual beside the program: names of other libraries, messages, the loop with one's
own model, and the planner's counts.
"""

import inspect
import re
import sys
import zipfile
from pathlib import Path

import pytest
from tools.dev import library, names, one_card

from tether.settings.recipe import recipe_type
from tether.settings.stages import STAGES
from tether.settings.synonyms import FOREIGN, KEYS, NOTES

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ROOT / "docs" / "guides"


def test_every_synonym_is_in_a_table_and_leads_to_a_key():
    rows = re.findall(r"^\| `([\w.]+)`(?: †)? \| (.*) \|$", names.page(), re.M)
    assert {*KEYS, *NOTES} <= {names.word(name) for name, _ in rows}
    assert [name for name, text in rows if not text.strip()] == []
    assert ("num_generations", "`samples_per_prompt`") in rows
    assert ("actor_rollout_ref.actor.clip_ratio", "`clip_range`") in rows
    listed = {names.word(n) for one in names.LIBRARIES.values() for n in one.names()}
    assert listed <= {*KEYS, *NOTES} and len(names.others()) <= 33


def _kinds_of_trl() -> dict[str, list[type]]:
    """TRL's configurations and trainers by the section here; the last go with every section."""
    import transformers
    import trl
    from trl.experimental import cpo, online_dpo, orpo
    from trl.scripts.utils import DatasetMixtureConfig

    return {
        "sft": [trl.SFTConfig, trl.SFTTrainer],
        "direct": [trl.DPOConfig, trl.DPOTrainer, cpo.CPOConfig, orpo.ORPOConfig],
        "grpo": [trl.GRPOConfig, trl.GRPOTrainer],
        "reinforce": [trl.RLOOConfig, trl.RLOOTrainer],
        "reward": [trl.RewardConfig, trl.RewardTrainer],
        "kto": [trl.KTOConfig, trl.KTOTrainer],
        "online_direct": [online_dpo.OnlineDPOConfig],
        "": [
            trl.ScriptArguments,
            DatasetMixtureConfig,
            trl.ModelConfig,
            transformers.TrainingArguments,
        ],
    }


def test_every_setting_of_trl_has_a_row_or_the_same_name_here():
    top = set(recipe_type().model_fields)
    for section, kinds in _kinds_of_trl().items():
        own = set(STAGES[section].section.model_fields) | {"args"} if section else top | {"seed"}
        taken = {*KEYS, *NOTES, *FOREIGN, *own, *top}
        for kind in kinds:
            assert set(inspect.signature(kind).parameters) <= taken, (section, kind)


def test_the_names_of_trl_are_fields_of_the_installed_one():
    import peft
    import transformers
    from trl.experimental import gkd

    kinds = [kind for some in _kinds_of_trl().values() for kind in some]
    kinds += [peft.LoraConfig, transformers.BitsAndBytesConfig, gkd.GKDConfig]
    there = {name for kind in kinds for name in inspect.signature(kind).parameters}
    library = names.LIBRARIES["TRL"]
    nowhere = {name for name in library.now.split() if name not in there}
    # of experimental trainers alone, and of keyword arguments
    assert nowhere <= {"max_prompt_length", "model_init", "bnb_4bit_use_double_quant"}
    gone = {"vf_coef", "total_episodes", "num_ppo_epochs", "cliprange"}
    assert gone <= set(library.before.split()) and not gone & there


def test_a_name_that_a_wheel_lacks_is_noticed(tmp_path):
    wheel = tmp_path / "verl-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a.yaml", "actor:\n  clip_ratio: 0.2\n")
        archive.writestr("b.py", 'add_argument("--actor.eps_clip")\nadd(f"--{prefix}.adam.lr")')
    now = "actor.clip_ratio actor.eps_clip actor.adam.lr actor.clip_ratios eps"
    assert names.absent(names.Library("", now), [wheel]) == ["actor.clip_ratios", "eps"]


def test_each_message_of_the_troubleshooting_page_is_one_of_the_program():
    page = (GUIDES / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("## By error text")[2]
    fragments = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    files = (ROOT / "src" / "tether").rglob("*.py")
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join(p.read_text(encoding="utf-8") for p in files))
    assert len(fragments) >= 10 and [text for text in fragments if text not in source] == []


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
    page = (GUIDES / "machines.md").read_text(encoding="utf-8")
    page = page.partition("<!-- table -->")[2].partition("<!-- end -->")[0]
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
