"""Folders whose README.md says which files belong to which configuration and split; `datasets`
itself is the oracle.
"""

from __future__ import annotations

import json

import datasets
import pytest

from tether.core.errors import DataError
from tether.core.types import Prompt
from tether.data.formats.containers import left_out
from tether.data.sources import read

FILES = ("one.jsonl", "two.jsonl", "deep/three.jsonl", "deep/four.jsonl", "deep/ten.jsonl")
CONFIGURATIONS = {
    "a split a file": """
- config_name: default
  data_files:
  - split: train
    path: two.jsonl
  - split: test
    path: one.jsonl
""",
    "a list of files for a split": """
- config_name: mine
  data_files:
  - split: train
    path: [one.jsonl, deep/four.jsonl]
  - split: validation
    path: deep/three.jsonl
""",
    "a pattern": """
- config_name: mine
  data_files: deep/t*.jsonl
""",
    "a pattern of all depths": """
- config_name: mine
  data_files:
  - split: test
    path: one.jsonl
  - split: train
    path: "deep/**"
""",
    "a list of patterns": """
- config_name: mine
  data_files: ["*.jsonl", "deep/f*"]
""",
    "a folder of data": """
- config_name: mine
  data_dir: deep
""",
    "several with a default": """
- config_name: talks
  data_files: one.jsonl
- config_name: pairs
  default: true
  data_files: two.jsonl
""",
    "several of which one is called default": """
- config_name: default
  data_files: one.jsonl
- config_name: pairs
  data_files: two.jsonl
""",
}


def folder_of(tmp_path, head):
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"prompt": name}) + "\n")
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\nconfigs:{head}---\n# A data set\n")
    return tmp_path


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_folder_is_read_as_its_readme_has_it(tmp_path, name):
    folder = folder_of(tmp_path / "data", CONFIGURATIONS[name])
    table = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    given = {prompt.text for prompt in read(folder, Prompt)}
    assert given == set(table["prompt"])
    unread = {str(folder / file) for file in FILES} - {str(folder / file) for file in given}
    assert unread == left_out(folder).keys() - {str(folder / "README.md")}


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (
            "\n- config_name: talks\n  data_files: one.jsonl\n"
            "- config_name: pairs\n  data_files: two.jsonl\n",
            ["talks (one.jsonl)", "pairs (two.jsonl)"],
        ),
        (
            "\n- data_files:\n  - split: easy\n    path: one.jsonl\n"
            "  - split: hard\n    path: two.jsonl\n",
            ["easy (one.jsonl)", "hard (two.jsonl)"],
        ),
        (
            "\n- data_files:\n  - split: train\n    path: gone.jsonl\n"
            "  - split: test\n    path: two.jsonl\n",
            ["train (no file)"],
        ),
        ("\n- data_dir: gone\n", ["none of the files"]),
        ("\n- data_files: {train: [}\n", ["README.md"]),
        ("\n- data_files: 3\n", ["README.md"]),
    ],
)
def test_an_ambiguous_readme_is_refused_with_the_choices(tmp_path, head, words):
    with pytest.raises(DataError) as refusal:
        list(read(folder_of(tmp_path, head), Prompt))
    assert all(word in str(refusal.value) for word in words)


def test_splits_that_were_not_downloaded_and_mappings_are_no_faults(tmp_path):
    head = "\n- data_files:\n    train: one.jsonl\n    test: gone.jsonl\n"
    assert [prompt.text for prompt in read(folder_of(tmp_path, head), Prompt)] == ["one.jsonl"]


def test_a_readme_that_gives_no_configuration_changes_nothing(tmp_path):
    folder = folder_of(tmp_path, " []\n")
    assert {prompt.text for prompt in read(folder, Prompt)} == {*FILES}
