"""The manual's source: every page of docs/ has its place, links hold there, and the built site needs
no network.
"""

import re
import shutil
import subprocess
import tomllib

import pytest

from benchmarks import manual


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
    assert {name for name in docs - set(listed) if "decisions/" not in name} <= {"lab/2026-11.md"}


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
    manual.finish(tmp_path)
    assert page.read_text() == '<script src="../search_on_disk.js"></script>'
    assert (tmp_path / "site" / "search_on_disk.js").is_file()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("make"), reason="needs make and a package index")
@pytest.mark.timeout(600)
def test_the_site_is_whole_and_names_no_other_host():
    """Links and anchors of every page lead somewhere; scripts, styles and pictures are its own."""
    done = subprocess.run(
        ["make", "docs"], check=False, cwd=manual.ROOT, capture_output=True, text=True
    )
    if "pip" in done.stderr and done.returncode:
        pytest.skip("the packages of locks/docs.txt cannot be installed here")
    assert done.returncode == 0, done.stdout + done.stderr
    site = manual.BUILD / "site"
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
