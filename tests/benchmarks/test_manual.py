"""The manual's source: every page of docs/ has its place, links hold there, and the built site needs
no network.
"""

import json
import re
import shutil
import subprocess
import tomllib
from functools import cache

import pytest
from tools.dev import manual

from tether.core.glossary import EVERY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manual")
    manual.prepare(folder)
    return folder


def files_of(nav):
    for row in nav:
        for value in row.values():
            yield from [value] if isinstance(value, str) else files_of(value)


def test_every_page_of_the_index_is_in_the_manuals_contents(folder):
    nav = tomllib.loads((folder / "zensical.toml").read_text())["project"]["nav"]
    listed = list(files_of(nav))
    assert len(listed) == len(set(listed)) > 60
    assert [name for name in listed if not (folder / "pages" / name).is_file()] == []
    docs = {manual.place(page) for page in (manual.ROOT / "docs").rglob("*.md")}
    assert {name for name in docs - set(listed) if "decisions/" not in name} == set()
    assert set(manual.MADE) <= set(listed) - docs


def test_links_hold_within_the_manual_and_lead_to_the_repository_otherwise(folder):
    broken = []
    for page in (folder / "pages").rglob("*.md"):
        text = re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
        for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)", text):
            if not re.match(r"\w+:", target) and not (page.parent / target).exists():
                broken.append((page.name, target))
    assert broken == []
    text = manual.linked("[a](../../CONTRIBUTING.md#x) [b](../../Makefile)", DEEP)
    assert text == f"[a](../dev/contributing.md#x) [b]({manual.HOME}/blob/main/Makefile)"


DEEP = manual.ROOT / "docs" / "guides" / "python.md"


def test_every_public_module_of_the_algorithms_has_a_page(folder):
    source = manual.ROOT / "src" / "tether" / "algorithms"
    for path in source.glob("[!_]*.py"):
        page = folder / "pages" / "python" / f"tether.algorithms.{path.stem}.md"
        assert page.read_text() == f"::: tether.algorithms.{path.stem}\n"


def test_a_finished_site_takes_its_search_from_itself(tmp_path):
    page = tmp_path / "site" / "guides" / "page.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<script src="{manual.ELSEWHERE}"></script>')
    worker = tmp_path / "site" / "assets" / "javascripts" / "workers" / "search.0a1b.min.js"
    worker.parent.mkdir(parents=True)
    worker.write_text("the theme's")
    (tmp_path / "site" / "search.json").write_text('{"config": {}, "items": []}')
    manual.finish(tmp_path)
    assert worker.read_text() == manual.SEARCH.read_text()
    assert page.read_text() == '<script src="../search_on_disk.js"></script>'
    assert (tmp_path / "site" / "search_on_disk.js").is_file()


ROWS = """## At the top

| key | type | default | what it is |
|---|---|---|---|
| `run` | text | required | the run directory |

## [judge]

| `loss` | "a" \\| "b" |  | one <or> the other |

## Tables

### judge

A function. In `pairs.judge`.

| key | type | default | what it is |
|---|---|---|---|
| `call` | text | required | `module:name` |

### judge

| `call` | text | "" | a model |
"""


def test_each_key_of_a_recipe_has_an_anchor_and_an_entry_in_the_search(tmp_path):
    keys = list(manual.keys(ROWS))
    anchors = ["run", "judge.loss", "table.judge.call", "table.judge.call-"]
    assert [key.anchor for key in keys] == anchors
    lines = manual.anchored(ROWS).splitlines()
    marked = [re.findall(r"`\{ #(.+) \} \|", lines[key.line]) for key in keys]
    assert marked == [[anchor] for anchor in anchors]
    page = tmp_path / "pages" / "reference" / "recipes.md"
    page.parent.mkdir(parents=True)
    page.write_text(manual.anchored(ROWS))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "search.json").write_text('{"config": {}, "items": [{"title": "a page"}]}')
    manual.finish(tmp_path)
    index = json.loads((tmp_path / "site" / "search.json").read_text())
    titles = ["run", "loss [judge]", "call [judge]", "call [judge]"]
    assert index["items"][0]["title"] == "a page"
    rows = index["items"][-4:]
    assert [item["title"] for item in rows] == titles
    assert rows[2]["location"] == "reference/recipes.html#table.judge.call"
    assert "In pairs.judge." in rows[2]["text"]
    assert rows[1]["text"].startswith('<p>one &lt;or&gt; the other. "a" | "b";')
    words = [item for item in index["items"] if "glossary" in item.get("location", "")]
    assert len(words) == len({item["location"] for item in words}) == len(EVERY)
    assert "KL coefficient (beta, β)" in [item["title"] for item in words]
    script = (tmp_path / "site" / "search.js").read_text()
    assert json.loads(script.removeprefix("var __index = ").removesuffix(";")) == index


@pytest.mark.parametrize("page", manual.LISTED)
def test_every_row_of_the_reference_is_a_key_or_an_option(page):
    text = manual.MADE[page][1]()
    keys = list(manual.keys(text))
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(keys) == len(rows) > 150
    assert len({key.anchor for key in keys}) == len(keys)
    assert {len(key.cells) for key in keys} == {4}
    assert manual.anchored(text).count("{ #") == len(keys)


def test_an_option_joins_the_search_with_its_command():
    text = "### tether run\n\n| `--on`, `-o` | text |  | Where. |\n| `[A \\| B=C]...` | text |  | x |\n"
    option, argument = manual.keys(text)
    shown = manual.entry(option, "reference/commands.md")
    assert shown["title"] == "--on [tether run]"
    assert shown["location"] == "reference/commands.html#tether-run.--on"
    assert (shown["path"], argument.anchor) == (["Reference", "Commands"], "tether-run.-A-B-C-...")
    assert manual.anchored(text).splitlines()[2].startswith("| `--on`, `-o`{ #tether-run.--on } |")


def test_a_symptom_joins_the_search():
    text = (manual.ROOT / "docs" / manual.TROUBLE).read_text()
    rows = {item["title"]: item for item in manual.symptoms(text)}
    assert rows["rows are missing"]["location"] == "guides/troubleshooting.html#by-symptom"
    assert "bad input" in str(rows["rows are missing"]["text"])
    assert rows["has no effect"]["location"] == "guides/troubleshooting.html#by-error-text"


def test_what_the_search_knows_of_pages_is_true_of_the_manual(folder):
    places = {
        page.relative_to(folder / "pages").with_suffix(".html").as_posix()
        for page in (folder / "pages").rglob("*.md")
    }
    places = {re.sub(r"README\.html$", "index.html", place) for place in places}
    assert manual.abstracts().keys() <= places
    assert "QLoRA" in manual.abstracts()["guides/machines.html"]
    search = tomllib.loads(manual.SEARCH.with_suffix(".toml").read_text())
    rooms = [room for room in search["rooms"] if not any(p.startswith(room) for p in places)]
    assert rooms == []
    assert max(search["rooms"], key=search["rooms"].get) in {"guides/", "index.html", "methods/"}


QUESTIONS = """
out of memory: guides/machines.html#out-of-memory
dpo: methods/direct.html
how to install: index.html#install
resume after crash: guides/resuming.html
custom reward function: guides/python.html#your-own-reward-function
early stopping: trust/distrust.html#early-stopping-and-the-best-checkpoint
multi gpu: guides/scale.html
ppo vs dpo: methods/index.html#which-method
my own data: reference/data.html#your-own-data
reward hacking: trust/distrust.html#the-limits-of-a-reward-model
kl divergence: methods/kl.html
learning rate: methods/index.html#learning-rates
lora: guides/machines.html#lora
export to ollama: guides/export.html#ollama-and-llamacpp
human annotation: guides/preferences.html
llm as a judge: guides/judges.html
sweep: guides/sweeps.html
how long does it take: guides/machines.html#how-long-a-run-takes
vllm: guides/
notebook: guides/python.html#in-a-notebook
tokeniser: methods/reward_models.html#another-tokenizer
resumming: guides/resuming.html
continue from checkpoint: guides/resuming.html
loss is nan: guides/troubleshooting.html
upload to huggingface: guides/export.html#to-the-hub
gpt-4 as judge: guides/judges.html
training is slow: guides/machines.html
wandb: guides/tracking.html
clip_range: reference/recipes.html#ppo.clip_range
dpo_loss: python/tether.algorithms.preference_losses.html
"""
"""What newcomers type, and the page that answers it."""


@cache
def built():
    """The site, as `make docs` builds it."""
    done = subprocess.run(
        ["make", "docs"],
        check=False,
        cwd=manual.ROOT,
        capture_output=True,
        text=True,
    )
    if "pip" in done.stderr and done.returncode:
        pytest.skip("the packages of locks/docs.txt cannot be installed here")
    assert done.returncode == 0, done.stdout + done.stderr
    return manual.BUILD / "site"


HITS = """() => {
  const links = (root) => [...root.querySelectorAll("*")].flatMap((node) => [
    ...(node.tagName === "A" && root !== document ? [node.href] : []),
    ...(node.shadowRoot ? links(node.shadowRoot) : []),
  ]);
  return links(document);
}"""
"""The addresses that the search shows, the first first; it stands apart from the page."""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("make"), reason="needs make and a package index")
def test_questions_of_newcomers_find_their_guide_first(chromium_path):
    from playwright.sync_api import sync_playwright

    start = (built() / "index.html").as_uri()
    wrong, problems = {}, []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium_path, args=["--no-sandbox"])
        page = browser.new_context(offline=True).new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(start)
        page.keyboard.press("/")
        box = page.locator("input[type=text], input:not([type])").last
        for row in QUESTIONS.strip().splitlines():
            question, answer = row.split(": ")
            box.fill(question)
            typed = question.replace(" ", "+")
            page.wait_for_function(
                f"() => ({HITS})().some((a) => a.includes({f'h={typed}#'!r}) || a.endsWith({f'h={typed}'!r}))",
            )
            first = page.evaluate(HITS)[0].removeprefix(start.removesuffix("index.html"))
            if not re.sub(r"\?[^#]*", "", first).startswith(answer):
                wrong[question] = first
        box.fill("kl divergence")
        page.get_by_role("button", name="Filters").click()
        parts = page.get_by_role("toolbar").get_by_role("button")
        parts.filter(has_text="Methods").click()
        page.wait_for_function(f"() => ({HITS})().every((a) => a.includes('/methods/'))")
        shown = dict(text.split("\n") for text in parts.all_inner_texts())
        assert len(page.evaluate(HITS)) == int(shown["Methods"]) < int(shown["Reference"])
        browser.close()
    assert wrong == {} and problems == []


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("make"), reason="needs make and a package index")
@pytest.mark.timeout(600)
def test_the_site_is_whole_and_names_no_other_host():
    """Links and anchors of every page lead somewhere; scripts, styles and pictures are its own."""
    site = built()
    pages = {page: page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        assert re.findall(r'(?:<script|<img)[^>]*src="(https?:[^"]+)"', text) == []
        for target in set(re.findall(r'(?:href|src)="([^"]+)"', text)):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not re.match(r"\w+:", target) and not (
                file.exists() and (not anchor or anchor in anchors.get(file, {anchor}))
            ):
                broken.append((page.name, target))
    assert broken == []
