"""`python -m tools.dev.references`: docs/reference/data.md from the table of formats, algorithms.md
from docstrings, and llms.txt. `tests/test_references.py` compares each with what the code says now.

The pages of `MADE` are written with the manual alone: recipes.md from the config classes,
commands.md from the parser of the command line, glossary.md from core/glossary.toml, and names.md
from the synonyms. A row without a meaning stops the build.
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from tools.dev import commands, library, names
from tools.dev.tables import markdown

from tether.core.glossary import ALSO, METRICS, REPORT, TERMS
from tether.data.formats.registry import FORMATS, detect, reader_for
from tether.data.formats.table import KINDS
from tether.settings.recipe import recipe_type
from tether.settings.reference import Key, keys_of
from tether.settings.stages import STAGES

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = Path(__file__).with_name("formats.jsonl")
HEAD = ("key", "type", "default", "what it is")
FAMILY = {"grpo": "ppo", "reinforce": "ppo"}
"""Sections with the keys of another."""

GLOSSARY = """# Glossary

`tether explain WORD` prints the same text.
[Vocabulary](vocabulary.md) adds Python names and files. [Recipes](recipes.md) explains the keys of a recipe.
"""
RECIPES = """# Recipes: every key

A recipe is a TOML file: a few keys at the top, a table `[model]`, and a table for every stage that is to run.
`tether new dpo` writes one, `tether recipes NAME` prints one, `tether explain ppo.kl` says what a key means, and
`tether run RECIPE ppo.kl.coefficient=0.1` overrides one. Keys are checked before a model is loaded: an unknown one
is an error, and so is one that would have no effect.

A key whose type is *table* holds the keys of the table of that name [below](#tables), with its defaults where the
section lists no others. An empty default means that the key is unset. Paths start from the working directory.
"""
DATA = """# Data: every format

*Written by `python -m tools.dev.references` from the table of formats; a test reads [a row of
each](../../tools/dev/formats.jsonl).*

`path` names a file, a folder or a data set, and tether detects the format by the names of the columns; `data = { path = "...",
format = "kto" }` names it. `tether data inspect FILE` shows the contents before training. An unusable row is set aside with its
place and the reason.

- A file is JSON lines, JSON, CSV, TSV, Parquet or Arrow, compressed or not. A text file has one prompt a line.
- A folder means all files in it. Of several splits the training split and files without one are read, the others named as left
  out (`files_left_out`). A folder without a training split is refused. `configs` in its `README.md` count before names, and a
  folder that `save_to_disk` of `datasets` wrote is read too.
- `hub:owner/name:split` is a data set of the hub, `hub:owner/name/config:split` one of its configurations or folders.
- A `.json` file may hold `{"data": [...]}`, `{"train": [...]}`, columns (`{"prompt": [...]}`) or what `DataFrame.to_json`
  writes.
- A cell may hold lists and messages as JSON, or as Python and numpy print them. A text that only begins like messages is
  refused.
- Spreadsheets, archives, YAML, pickles and databases are refused with the way to mend that, and so is a packed file that
  becomes more than 256 MB and more than 200 times its size.

`columns` maps names of your own: `{ prompt = "question", chosen = "good" }`. A name with dots leads into objects and lists,
also where a cell holds them as text: `{ prompt = "input.messages", answer = "reward_model.ground_truth", chosen =
"summaries.0.text" }`. `tether data inspect` and `tether prefs import` take the same as `--columns prompt=question,chosen=good`.
Columns that the reader does not use become metadata and are named (`columns_not_used`); keys inside objects count as well.

## Your own data

1. Write a file with one row a line: a prompt with an answer, with `chosen` and `rejected`, or alone.
2. `tether data inspect FILE` says which format it is, which stages read it, how many rows are usable, and what is wrong with the
   others.
3. Name your columns in the recipe if tether does not know them:

```toml
[direct]
data = { path = "mine.csv", columns = { prompt = "question", chosen = "good", rejected = "bad" } }
```

| rows | stages |
|---|---|
| prompts with an answer to imitate | `[sft]` |
| pairs of a better and a worse answer | `[direct]`, `[reward]` |
| answers that are good or bad by themselves | `[kto]` |
| prompts | `[ppo]`, `[grpo]`, `[reinforce]`, `[best_of_n]`, `[online_direct]`, `[pairs]`, `[evaluate]` |
| problems with their known answers | the same, with `reward_source = "verifiable"` |
| solutions with labels of their steps | `[process]` |

In Python, rows may be a list, a data frame or a `datasets.Dataset` ([arguments](../guides/python.md#arguments)).

## Parts of a row

**Prompt.** `system` (or `system_prompt`, `system_message`, `systemInstruction`, `sys`, `preamble`) is its system turn,
`history` holds earlier turns, as pairs or messages, and so does a `context` of messages. A text in `input` or `context` goes
below the question, and so does a `passage` or an `article`. `choices` or `options` go there with letters, an `instruction`
above a `question`.

| field of a message | also written | meaning |
|---|---|---|
| `role` | `from`, `speaker`, `author` | the speaker, by one of the names below |
| `content` | `value`, `text`, `message`, `parts` | a text, or a list of parts |
| `reasoning_content` | `reasoning`, `thinking` | the thought before a reply |
| `tool_calls` | `function_call`; turns of `function_call` and `tool_call` | calls of the assistant |
| `tool_call_id`, `name` | `tool_use_id` | the call and the function whose result a turn holds |
| `weight`, `train` | `training`, `loss`, `loss_mask` | 0 or false: the turn is context and not trained |

Speakers are user (human, prompter), assistant (gpt, bot, chatbot, model, ai), system (developer) and tool (function,
observation, ipython, tool_response). Parts are text, thinking, tool_use, tool_result, functionCall and functionResponse.
Another speaker, a picture or a sound is refused. A turn may be a question with its answer: `{"user": "...", "assistant":
"..."}`, `{"input": "...", "output": "..."}`.

**Thoughts.** The rows of a source decide together whether a text is a thought. A column of words for a mode (on, off, high) is
a label and stays metadata. A reply that has its own `<think>` keeps that alone.

**Marks.** One of the columns `label`, `kto_tag`, `is_correct`, `correct`, `accepted`, `is_good`, `passed`, `valid`, `verified`,
`is_safe` or a similar name. [sft] leaves out and counts a row whose mark is false.

**Tools.** Schemas go in a column `tools` or `functions` of any kind of row, and both schemas and calls may be JSON texts. Calls
are trained, results are not. A row is set aside if the model's chat template leaves its calls out (Qwen2.5's writes them,
SmolLM2's does not).

```json
{"messages": [{"role": "user", "content": "Rain in Bern?"},
              {"role": "assistant", "content": null, "tool_calls": [{"type": "function",
               "function": {"name": "weather", "arguments": "{\\"city\\": \\"Bern\\"}"}}]},
              {"role": "tool", "content": "sun"}, {"role": "assistant", "content": "No."}],
 "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]}
```
"""
SHOWN = frozenset({"prompts", "messages", "preference", "kto", "steps", "question_answer"})
"""The formats whose row stands on the page of data, one of each kind."""


def recipes_page() -> str:
    """Every key of a recipe."""
    keys = list(keys_of(recipe_type()))
    top = [key for key in keys if len(key.path) == 1 and key.path[0] not in STAGES]
    parts = [RECIPES, "## At the top\n", _table(top)]
    for name, kind in STAGES.items():
        parts += [f"## [{name}]\n", f"{kind.help}.\n"]
        own = [key for key in keys if key.path[0] == name and _shown(key)]
        if like := FAMILY.get(name):
            same = {(key.path[1:], key.type, key.default) for key in keys if key.path[0] == like}
            own = [key for key in own if (key.path[1:], key.type, key.default) not in same]
            parts.append(f"The keys of [[{like}]](#{like}), with these differences:\n")
        parts.append(_table(own))
    parts.append("## Tables\n")
    return "\n".join([*parts, *_tables(keys)])


def _shown(key: Key) -> bool:
    """Whether a section's table lists a key: one of its own, or one of an inner table that starts
    from another value there.
    """
    if len(key.path) == 2:
        return True
    return len(key.path) == 3 and key.default != _own_defaults(key.table).get(
        key.path[-1],
        key.default,
    )


def _own_defaults(table: type[BaseModel]) -> dict[str, str]:
    return {key.path[0]: key.default for key in keys_of(table) if len(key.path) == 1}


def _tables(keys: list[Key]) -> Iterator[str]:
    """The tables that sections share, by the key under which they stand."""
    kinds: dict[tuple[str, type[BaseModel]], list[str]] = {}
    for key in keys:
        *above, holder = key.path[:-1] or ("",)
        if holder and (above or holder not in STAGES):
            kinds.setdefault((holder, key.table), []).append(".".join(key.path[:-1]))
    for (name, table), holders in sorted(
        kinds.items(),
        key=lambda row: (row[0][0], row[0][1].__name__),
    ):
        yield f"### {name}\n"
        yield f"{_first_sentence(table)} In {_listed(holders)}.\n"
        yield _table([key for key in keys_of(table) if len(key.path) == 1])


def _first_sentence(table: type[BaseModel]) -> str:
    text = " ".join((inspect.getdoc(table) or "").partition("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".") + "."


def _listed(holders: Iterable[str]) -> str:
    names = [f"`{name}`" for name in dict.fromkeys(holders)]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _table(keys: Iterable[Key]) -> str:
    rows = []
    for key in keys:
        name = (
            ".".join(key.path[1:])
            if key.path[0] in STAGES and len(key.path) > 1
            else ".".join(key.path)
        )
        rows.append((f"`{name}`", key.type, key.default, key.description))
    return markdown(HEAD, rows)


def examples(part: str = "row") -> dict[str, Any]:
    """A row of every format, by its name; or the notes on those that need one."""
    lines = (json.loads(line) for line in EXAMPLES.read_text(encoding="utf-8").splitlines())
    return {line["format"]: line[part] for line in lines if part in line}


def data_page() -> str:
    """docs/reference/data.md."""
    rows, notes, parts = examples(), examples("note"), [DATA]
    for kind, (name, needs, _, read_by) in KINDS.items():
        others = [
            layout.name
            for layout in FORMATS
            if layout.kind is not kind and reader_for(layout, kind) is not None
        ]
        parts += [f"## {name[0].upper()}{name[1:]}\n", f"{needs} Read by {read_by}.\n"]
        for layout in (layout for layout in FORMATS if layout.kind is kind):
            assert detect([rows[layout.name]], None, layout.name) is layout
            words = [*_columns(layout.columns), *filter(None, [notes.get(layout.name)])]
            parts.append(f"**{layout.name}**: {' '.join(words)}\n")
            if layout.name in SHOWN:
                row = json.dumps(rows[layout.name], ensure_ascii=False)
                parts.append(f"```json\n{row}\n```\n")
        if others:
            listed = textwrap.fill(", ".join(others), 100)
            parts.append(f"These formats can be read as {name}, too:\n\n```text\n{listed}\n```\n")
    return "\n".join(parts)


def _columns(names: str) -> Iterator[str]:
    """A sentence of the columns with one name, and one for each column with several names."""
    columns = [column.split("|") for column in names.split()]
    if single := [f"`{column[0]}`" for column in columns if len(column) == 1]:
        yield f"{'column' if len(single) == 1 else 'columns'} {', '.join(single)}."
    for place, column in enumerate(column for column in columns if len(column) > 1):
        start = "One column of" if single or place else "one column of"
        more = ", or a similar name" if len(column) > 6 else ""
        yield f"{start} {', '.join(f'`{name}`' for name in column[:6])}{more}."


def glossary_page() -> str:
    """Terms and metrics, each with its anchor."""
    other: dict[str, list[str]] = {}
    for name, term in ALSO.items():
        other.setdefault(term, []).append(name)
    terms = [
        (", ".join([f"**{name}**{{ #{anchor(name)} }}", *other.get(name, [])]), text)
        for name, text in sorted(TERMS.items(), key=lambda row: row[0].lower())
    ]
    report = [(f"**{name}**{{ #{anchor(name)} }}", text) for name, text in sorted(REPORT.items())]
    metrics = [(f"`{name}`{{ #{anchor(name, 'metric')} }}", text) for name, text in METRICS.items()]
    return "\n".join(
        (
            GLOSSARY,
            "## Terms\n",
            markdown(("term, and other names of it", "meaning"), terms),
            "## Words of the report\n",
            markdown(("words", "meaning"), report),
            "## Metrics\n",
            "Columns of `metrics.jsonl`.\n",
            markdown(("metric", "meaning"), metrics),
        ),
    )


def anchor(name: str, kind: str = "term") -> str:
    """The anchor of an entry of the glossary."""
    return "".join(letter if letter.isalnum() else "-" for letter in f"{kind}-{name.lower()}")


PAGES = {
    "reference/data.md": data_page,
    "reference/algorithms.md": library.page,
    "../llms.txt": library.llms,
}
"""Pages that are kept."""
MADE = {
    "reference/recipes.md": ("Recipes", recipes_page),
    "reference/commands.md": ("Commands", commands.page),
    "reference/glossary.md": ("Glossary", glossary_page),
    "reference/names.md": ("Names of other libraries", names.page),
}
"""Pages of the manual alone, with their titles."""


def main() -> None:
    """Write every page."""
    parser = argparse.ArgumentParser(prog="python -m tools.dev.references", description=__doc__)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help=("write nothing; only say how long each page is"),
    )
    smoke = parser.parse_args().smoke
    for name, page in PAGES.items():
        text = page()
        if not smoke:
            (DOCS / name).write_text(text, encoding="utf-8")
        print(f"{DOCS / name}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
