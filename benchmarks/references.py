"""`python -m benchmarks.references`: docs/reference/recipes.md from the config classes, data.md from
the table of formats, commands.md from the parser of the command line, algorithms.md from docstrings,
glossary.md from core/glossary.toml, docs/guides/coming_from.md from the synonyms.

`tests/test_references.py` compares each with what the code says now.
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown
from pydantic import BaseModel

from benchmarks import commands, library, names
from tether.core.glossary import METRICS, TERMS
from tether.data.formats.registry import FORMATS, KINDS, detect, reader_for
from tether.data.inspection import READ_BY
from tether.settings.recipe import recipe_type
from tether.settings.reference import Key, keys_of
from tether.settings.stages import STAGES

DOCS = Path(__file__).resolve().parent.parent / "docs"
EXAMPLES = Path(__file__).with_name("formats.jsonl")
HEAD = ("key", "type", "default", "what it is")
FAMILY = {"grpo": "ppo", "reinforce": "ppo"}
"""Sections with the keys of another."""

GLOSSARY = """# Glossary

*Written by `python -m benchmarks.references` from `core/glossary.toml`. `tether explain WORD` prints the same text.*

[Vocabulary](vocabulary.md) adds Python names and files. [Recipes](recipes.md) explains the keys of a recipe.
"""
RECIPES = """# Recipes: every key

*Written by `python -m benchmarks.references` from the config classes.*

A recipe is a TOML file: a few keys at the top, a table `[model]`, and a table for every stage that is to run.
`tether new dpo` writes one, `tether recipes NAME` prints one, `tether explain ppo.kl` says what a key means, and
`tether run RECIPE ppo.kl.coefficient=0.1` overrides one. Keys are checked before a model is loaded: an unknown one
is an error, and so is one that would have no effect.

A key whose type is *table* holds the keys of the table of that name [below](#tables), with its defaults where the
section lists no others. An empty default means that the key is unset. Paths start from the working directory.
"""
DATA = """# Data: every format

*Written by `python -m benchmarks.references` from the table of formats; every row here is read by a test.*

`path` names a file, a folder or a data set:

- A file is JSON lines, JSON, CSV, TSV, Parquet or Arrow, compressed or not. A text file has one prompt a line.
- A folder means all files in it.
- `hub:owner/name:split` is a data set of the hub. `hub:owner/name/config:split` is one of its configurations or folders.

tether detects the format by the names of the columns; `data = { path = "...", format = "kto" }` names it.
An unusable row is set aside with its place and the reason.
`tether data inspect FILE` shows the contents of a file before training.

- If a folder has files of several splits (`train-00000-of-00001.parquet`, `test.jsonl`), tether reads those of the
  training split and those without a split. The log, `tether data inspect` and the summary name the others
  (`files_left_out`). A folder without a training split is refused.
- If `save_to_disk` of `datasets` wrote a folder, tether reads its Arrow files. A `DatasetDict` with several splits is
  refused: name the folder of one. For a data set in the cache of the hub, tether reads the snapshot of `main`.
- Spreadsheets, archives, YAML, pickles and databases are refused, with the way to mend that. In a folder they are named
  as left out.
- A packed file or a table that becomes more than 256 MB, and more than 200 times its size, is refused. Texts shrink to a tenth
  or so. A small file can be made to fill memories.
- A `.json` file may hold `{"data": [...]}`, `{"train": [...]}`, columns (`{"prompt": [...]}`) or what
  `DataFrame.to_json` writes. Several splits in one file are refused.
- A cell of CSV may hold lists and messages as JSON, or as Python and numpy print them (`DataFrame.to_csv` writes that).
  A text that only begins like messages is refused.
- Parquet and Arrow have one schema for all rows. The nulls that it adds to `tool_calls` and `tools` are taken out; those
  of other objects stay.

Names of your own columns are mapped by `columns`: `{ prompt = "question", chosen = "good" }`. A name with dots leads into
objects and lists, also where a cell holds them as text: `{ prompt = "input.messages", answer = "reward_model.ground_truth",
chosen = "summaries.0.text" }`. A column of the whole name comes first. A name that nothing reads is refused with the
nearest ones. `tether data inspect` and `tether prefs import` take the same as `--columns prompt=question,chosen=good`.

Columns that the reader does not use become metadata. `tether data inspect` names them as *columns not used*, and so do
the log of a stage and its summary (`columns_not_used`). Keys inside objects and messages count as well:
`messages.mood` is a key `mood` of a turn.

## Parts of a row

**Columns of a prompt.** Every kind of row has the same ones. `system` (or `system_prompt`, `system_message`,
`systemInstruction`, `sys`, `preamble`) is its system turn. `history` holds earlier turns, as pairs or messages, and so
does a `context` of messages. A text in `input` or `context` goes below the question, after a blank line.
A `passage` or an `article` goes below a `question` in the same way. `choices` or `options` go there with letters.
An `instruction` goes above a `question`.

**Fields of a message.** Other fields are named as not used.

| field | also written | meaning |
|---|---|---|
| `role` | `from`, `speaker`, `author` | the speaker, by one of the names below |
| `content` | `value`, `text`, `message`, `parts` | a text, or a list of parts |
| `reasoning_content` | `reasoning`, `thinking` | the thought before a reply |
| `tool_calls` | `function_call`; turns of `function_call` and `tool_call` | calls of the assistant |
| `tool_call_id`, `name` | `tool_use_id` | the call and the function whose result a turn holds |
| `weight`, `train` | `training`, `loss`, `loss_mask` | 0 or false: the turn is context and not trained |

Speakers: user (human, prompter), assistant (gpt, bot, chatbot, model, ai), system (developer), tool (function,
observation, ipython, tool_response). Another one is refused. Parts: text, thinking, tool_use, tool_result, functionCall,
functionResponse. A part with a picture or sound is refused.

A turn may be a question with its answer: `{"user": "...", "assistant": "..."}`, `{"input": "...", "output": "..."}`.

**Marks.** A mark is one of the columns `label`, `kto_tag`, `is_correct`, `correct`, `accepted`, `is_good`, `passed`, `valid`,
`verified`, `is_safe` or a similar name. A row whose mark is false is no demonstration. [sft] leaves the row out and counts it.
A graded `score` or `rating` is named as not used. A row with `images`, `audio` or `videos` is refused.

**Tools.** A turn of the assistant may call tools, and schemas of tools go in a column `tools` or `functions` of any kind
of row. The calls are trained, the results are not. The model's chat template has to write them (Qwen2.5's does,
SmolLM2's does not); where it leaves them out, the row is set aside.

```json
{"messages": [{"role": "user", "content": "Rain in Bern?"},
              {"role": "assistant", "content": null, "tool_calls": [{"type": "function",
               "function": {"name": "weather", "arguments": "{\\"city\\": \\"Bern\\"}"}}]},
              {"role": "tool", "content": "sun"}, {"role": "assistant", "content": "No."}],
 "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]}
```
"""


def recipes_page() -> str:
    """docs/reference/recipes.md."""
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
    for kind, (name, needs) in KINDS.items():
        others = [
            layout.name
            for layout in FORMATS
            if layout.kind is not kind and reader_for(layout, kind) is not None
        ]
        parts += [f"## {name[0].upper()}{name[1:]}\n", f"{needs} Read by {READ_BY[kind]}.\n"]
        for layout in (layout for layout in FORMATS if layout.kind is kind):
            assert detect([rows[layout.name]], None, layout.name) is layout
            row = json.dumps(rows[layout.name], ensure_ascii=False)
            words = [*_columns(layout.columns), *filter(None, [notes.get(layout.name)])]
            parts.append(f"**{layout.name}**: {' '.join(words)}\n\n```json\n{row}\n```\n")
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
    """docs/reference/glossary.md."""
    terms = sorted(TERMS.items(), key=lambda row: row[0].lower())
    metrics = [(f"`{name}`", text) for name, text in METRICS.items()]
    return "\n".join(
        (
            GLOSSARY,
            "## Terms\n",
            markdown(("term", "meaning"), terms),
            "## Metrics\n",
            "Columns of `metrics.jsonl`.\n",
            markdown(("metric", "meaning"), metrics),
        ),
    )


PAGES = {
    "reference/glossary.md": glossary_page,
    "reference/recipes.md": recipes_page,
    "reference/data.md": data_page,
    "reference/algorithms.md": library.page,
    "reference/commands.md": commands.page,
    "guides/coming_from.md": names.page,
    "../llms.txt": library.llms,
}


def main() -> None:
    """Write every page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.references", description=__doc__)
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
