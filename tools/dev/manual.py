"""`python -m tools.dev.manual`: the pages and the configuration that `make docs` builds from.

docs/ stays plain Markdown that a code host shows as it is. This program copies it, with the pages
of the first folder, into build/manual/pages, writes the pages that come from the code (keys,
commands, terms, names of other libraries), adds a page for each public module, and points links
to files outside the manual at the repository. The order of the manual is that of docs/README.md.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

from tools.dev.references import MADE, anchor

from tether.core.glossary import ALSO, EVERY, METRICS

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "manual"
HOME = "https://github.com/tether-rlhf/tether"
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "dev/contributing.md"}
MOVED |= {"CHANGELOG.md": "dev/changelog.md", "SECURITY.md": "trust/security.md"}
MOVED |= {"AGENTS.md": "dev/agents.md", "docs/README.md": "contents.md"}
"""Pages with another place in the manual than in the repository."""
ELSEWHERE = "https://unpkg.com/iframe-worker/shim"
MODULES = {
    "The front door": ["tether.api.methods", "tether.api.runs", "tether.api.workbench"],
    "Protocols and values": ["tether.core.protocols", "tether.core.types", "tether.core.errors"],
    "Statistics": ["tether.stats"],
}
"""Modules of the reference beside those of `tether.algorithms`, by heading."""
CONFIG = """[project]
site_name = "tether"
site_description = "Align language models with human preferences."
docs_dir = "pages"
site_dir = "site"
use_directory_urls = false
extra_css = ["manual.css"]
nav = {nav}

[project.theme]
font = false
language = "en"
features = ["navigation.footer", "navigation.indexes", "search.highlight", "content.code.copy"]

[project.markdown_extensions.admonition]
[project.markdown_extensions.attr_list]
[project.markdown_extensions.md_in_html]
[project.markdown_extensions.tables]
[project.markdown_extensions.toc]
permalink = true
[project.markdown_extensions.toc.slugify]
object = "pymdownx.slugs.slugify"
kwds = {{ case = "lower" }}
[project.markdown_extensions.pymdownx.highlight]
[project.markdown_extensions.pymdownx.superfences]

[project.plugins.search]
[project.plugins.offline]
[project.plugins.mkdocstrings.handlers.python]
paths = [{source}]
[project.plugins.mkdocstrings.handlers.python.options]
show_root_heading = true
show_source = false
docstring_style = "google"
members_order = "source"
show_signature_annotations = true
separate_signature = true
heading_level = 1
"""
SEARCH = Path(__file__).with_name("search.js")
"""The search, with its rooms and synonyms in the file of the same name."""
TROUBLE = "guides/troubleshooting.md"
HEADS = ("symptom", "the message contains")
"""The first cells of the tables on that page."""
RECIPES = "reference/recipes.md"
LISTED = (RECIPES, "reference/commands.md")
"""Pages that list keys of a recipe or options of a command in tables."""
CELLS = re.compile(r"(?<!\\)\|")
"""The border between two cells of a row."""
CSS = """.md-grid { max-width: 84rem; }
:root { --md-accent-fg-color: #3a4fd0; --md-typeset-a-color: #3a4fd0; }
.md-typeset .doc-signature code { white-space: pre-wrap; }
@media (min-width: 60em) { .md-typeset td:first-child > code { white-space: nowrap; } }
.md-typeset .doc-label, .md-typeset .doc-label code { color: #55555c; opacity: 1; }
.md-typeset img { border: 1px solid #d8d8de; border-radius: 4px; }
.md-typeset h1#tether + p + p + .highlight code { white-space: pre-wrap; }
"""
"""Wide pages, readable colours of links and labels, pictures with an edge, and a first verdict whose
lines are read whole.
"""


class Key(NamedTuple):
    """A key or an option: the line of its row, its full name, its anchor, and its cells."""

    line: int
    name: str
    anchor: str
    within: str
    cells: list[str]


def place(path: Path) -> str:
    """The manual's name of a page of the repository."""
    name = path.relative_to(ROOT).as_posix()
    return MOVED.get(name, name.removeprefix("docs/"))


def pages() -> list[Path]:
    """Files of the repository that the manual holds, pictures included."""
    first = [ROOT / name for name in MOVED if (ROOT / name).exists()]
    docs = (ROOT / "docs").rglob("*")
    return sorted({*first, *(p for p in docs if p.suffix in (".md", ".svg", ".png"))})


def linked(text: str, page: Path) -> str:
    """A page's text with links that hold in the manual."""
    inside = set(pages())

    def moved(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        file = (page.parent / target).resolve()
        if re.match(r"\w+:", target) or not file.exists():
            return match[0]
        if file in inside:
            start = Path(place(page)).parent
            return f"]({os.path.relpath(place(file), start)}{anchor})"
        kind = "tree" if file.is_dir() else "blob"
        return f"]({HOME}/{kind}/main/{file.relative_to(ROOT).as_posix()}{anchor})"

    return re.sub(r"\]\(([^)\s#]+)(#[^)\s]*)?\)", moved, text)


def entries(index: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The sections of docs/README.md, each with (title, file) of the pages that it lists."""
    for part in re.split(r"^## ", index, flags=re.M)[1:]:
        title, _, body = part.partition("\n")
        links = re.findall(r"^- \[([^\]]+)\]\(([^)#\s]+)\)", body, re.M)
        yield title, [(name, target) for name, target in links]


def abstracts() -> dict[str, str]:
    """What docs/README.md says of each page, by the page's place in the site."""
    index = ROOT / "docs" / "README.md"
    rows = re.findall(r"^- (\[[^\]]+\]\(([^)#\s]+)\).*)", index.read_text(encoding="utf-8"), re.M)
    places = [place((index.parent / target).resolve()) for _, target in rows]
    names = [re.sub(r"(README)?\.md$", ".html", name).replace("/.", "/index.") for name in places]
    texts = [re.sub(r"\]\([^)]*\)|[\[`]", "", row) for row, _ in rows]
    return dict(zip(names, texts, strict=True))


def modules() -> dict[str, list[str]]:
    """Every module of the reference by heading, those of `tether.algorithms` first."""
    folder = ROOT / "src" / "tether" / "algorithms"
    names = [p.stem for p in sorted(folder.glob("*.py")) if not p.stem.startswith("_")]
    return {"Algorithms": [f"tether.algorithms.{name}" for name in names], **MODULES}


def module_page(name: str) -> str:
    """A page whose text comes from a module's docstrings."""
    file = ROOT / "src" / Path(*name.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), name
    return f"::: {name}\n"


def keys(text: str) -> Iterator[Key]:
    """The keys or options in the tables of a page, each with an anchor of its own."""
    section, within, tables, used = "", "", False, set()
    for number, line in enumerate(text.splitlines()):
        if heading := re.match(r"(##+) (.+)", line):
            tables |= heading[2] == "Tables"
            section = "" if heading[2] == "At the top" else heading[2].strip("[]")
            within = ""
        elif row := re.match(r"\| `([^`]+)`", line):
            name = f"{section}.{row[1]}" if section else row[1]
            anchor = re.sub(r"[^\w.-]+", "-", f"table.{name}" if tables else name)
            while anchor in used:
                anchor += "-"
            used.add(anchor)
            cells = [cell.strip().replace("\\|", "|") for cell in CELLS.split(line)[1:-1]]
            yield Key(number, name, anchor, within, cells)
        elif tables and line and not line.startswith("|"):
            within = line


def anchored(text: str) -> str:
    """A page of keys or options with an anchor at each."""
    lines = text.splitlines()
    for key in keys(text):
        cell = key.cells[0].replace("|", "\\|")
        lines[key.line] = lines[key.line].replace(cell, f"{cell}{{ #{key.anchor} }}", 1)
    return "\n".join(lines) + "\n"


def entry(key: Key, page: str) -> dict[str, object]:
    """What the search shows of a key or an option."""
    _, kind, default, meaning = key.cells
    section, _, name = key.name.partition(".") if "." in key.name else ("", "", key.name)
    given = "required" if default == "required" else f"default: {default or 'unset'}"
    text = f"{meaning}. {kind.capitalize()}; {given}. {key.within}"
    return {
        "location": f"{Path(page).with_suffix('.html')}#{key.anchor}",
        "level": 3,
        "title": f"{name} [{section}]" if section else name,
        "text": f"<p>{escape(text.replace('`', ''), quote=False)}</p>",
        "path": ["Reference", MADE[page][0]],
        "tags": [],
    }


def word(name: str, meaning: str) -> dict[str, object]:
    """What the search shows of a metric or a term."""
    others = ", ".join(other for other, term in ALSO.items() if term == name)
    place = anchor(name, "metric" if name in METRICS else "term")
    return {
        "location": f"reference/glossary.html#{place}",
        "level": 3,
        "title": f"{name} ({others})" if others else name,
        "text": f"<p>{escape(meaning, quote=False)}</p>",
        "path": ["Reference", "Glossary"],
        "tags": [],
    }


def symptoms(text: str) -> Iterator[dict[str, object]]:
    """What the search shows of each row of the page of troubleshooting."""
    section = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in CELLS.split(line)[1:-1]]
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif len(cells) == 3 and "---" not in line and cells[0] not in HEADS:
            words = [re.sub(r"\[([^]]+)\]\([^)]+\)|`", r"\1", cell) for cell in cells]
            yield {
                "location": f"{TROUBLE[:-3]}.html#{section.lower().replace(' ', '-')}",
                "level": 3,
                "title": words[0],
                "text": f"<p>{escape('. '.join(words[1:]), quote=False)}.</p>",
                "path": ["Guides", "Troubleshooting", section],
                "tags": [],
            }


def prepare(folder: Path = BUILD) -> None:
    """Write pages and configuration into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    for page in pages():
        file = folder / "pages" / place(page)
        file.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix == ".md":
            file.write_text(linked(page.read_text(encoding="utf-8"), page), encoding="utf-8")
        else:
            shutil.copyfile(page, file)
    for name, (_, write) in MADE.items():
        text = linked(write(), ROOT / "docs" / name)
        file = folder / "pages" / name
        file.write_text(anchored(text) if name in LISTED else text, encoding="utf-8")
    index = ROOT / "docs" / "README.md"
    nav: list[dict[str, object]] = [{"tether": "index.md"}]
    for title, links in entries(index.read_text(encoding="utf-8")):
        within = [{name: place((index.parent / target).resolve())} for name, target in links]
        if title == "Reference":
            within = [*({shown: name} for name, (shown, _) in MADE.items()), *within]
        nav.append({title: [row for row in within if "index.md" not in row.values()]})
        if title == "Reference":
            nav.append({"Python": list(_module_pages(folder / "pages"))})
    nav.append({"Contents": "contents.md"})
    (folder / "pages" / "manual.css").write_text(CSS, encoding="utf-8")
    text = CONFIG.format(nav=_toml(nav), source=json.dumps(str(ROOT / "src")))
    (folder / "zensical.toml").write_text(text, encoding="utf-8")


def _module_pages(folder: Path) -> Iterator[dict[str, object]]:
    for heading, names in modules().items():
        for name in names:
            (folder / "python").mkdir(exist_ok=True)
            (folder / "python" / f"{name}.md").write_text(module_page(name), encoding="utf-8")
        yield {heading: [{_short(name): f"python/{name}.md"} for name in names]}


def _short(name: str) -> str:
    """A module's name as it fits into the contents."""
    return name.removeprefix("tether.").removeprefix("algorithms.")


def _toml(value: object) -> str:
    """A nested list of tables with one key each, as TOML has it inline."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        rows = (f"{json.dumps(key)} = {_toml(inner)}" for key, inner in value.items())
        return f"{{ {', '.join(rows)} }}"
    return json.dumps(value)


def finish(folder: Path = BUILD) -> None:
    """Make the built pages complete without a network: the search of a page that lies on a disk
    takes `manual.js` in place of a script from elsewhere. `search.js` answers in place of the
    theme's search. Each key of a recipe, option of a command and word of the glossary joins the
    search; arguments are words that many keys share, and stay out.
    """
    for worker in (folder / "site" / "assets" / "javascripts" / "workers").glob("search.*.js"):
        shutil.copyfile(SEARCH, worker)
    shutil.copyfile(Path(__file__).with_suffix(".js"), folder / "site" / "search_on_disk.js")
    for page in (folder / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        depth = len(page.relative_to(folder / "site").parts) - 1
        own = f"{'../' * depth}search_on_disk.js"
        page.write_text(text.replace(ELSEWHERE, own), encoding="utf-8")
    more = [word(name, meaning) for name, meaning in EVERY.items()]
    if (page := folder / "pages" / TROUBLE).is_file():
        more += symptoms(page.read_text(encoding="utf-8"))
    for name in LISTED:
        page = folder / "pages" / name
        if page.is_file():
            text = page.read_text(encoding="utf-8")
            rows = [key for key in keys(text) if "`-" in key.cells[0] or name == RECIPES]
            more += [entry(key, name) for key in rows]
    _index(folder / "site", more)


def _index(site: Path, more: list[dict[str, object]]) -> None:
    """Add entries, rooms and synonyms to the two files that hold the index of the search."""
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    index["config"]["manual"] = {
        **tomllib.loads(SEARCH.with_suffix(".toml").read_text("utf-8")),
        "abstracts": abstracts(),
    }
    index["items"] += more
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    (site / "search.json").write_text(text, encoding="utf-8")
    (site / "search.js").write_text(f"var __index = {text};", encoding="utf-8")


def main() -> None:
    """Write pages and configuration, or with --finish mend the site that was built from them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--finish", action="store_true", help="after the build")
    if parser.parse_args().finish:
        finish()
        print(f"The manual: {BUILD / 'site' / 'index.html'}")
    else:
        prepare()
        print(f"{BUILD}: pages and zensical.toml")


if __name__ == "__main__":
    main()
