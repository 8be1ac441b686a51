"""Groups of options: one parameter of a command, one option each on the command line."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer.testing import CliRunner

import tether
from tether.cli import app
from tether.cli.options import AskingOptions, Options, grouped
from tether.cli.prefs import ChoiceOptions
from tether.people.labels.pairs import PairsConfig
from tether.settings.judges import JudgeServerConfig


@dataclass(frozen=True, kw_only=True)
class Size(Options):
    width: Annotated[int, typer.Option(min=1, help="Of the page.")] = 80
    height: int | None = None


@dataclass(frozen=True, kw_only=True)
class Wide(Size):
    width: Annotated[int, typer.Option("--broad", min=1, help="Of a wide page.")] = 120


def app_of(seen):
    app = typer.Typer()

    @app.command()
    @grouped
    def draw(name: str, *, first: Size, title: str = "none", bold: bool = False) -> None:
        """Draw a page."""
        seen.append((name, first, title, bold))

    @app.command()
    @grouped
    def stretch(*, size: Wide) -> None:
        seen.append(size)

    return app


def test_fields_are_options_and_arrive_as_one_group():
    seen = []
    app = app_of(seen)
    run = CliRunner().invoke
    assert run(app, ["draw", "a"]).exit_code == 0
    words = ["draw", "b", "--height", "3", "--title", "x", "--bold", "--width", "9"]
    assert run(app, words).exit_code == 0
    assert seen == [("a", Size(), "none", False), ("b", Size(width=9, height=3), "x", True)]
    refused = run(app, ["draw", "a", "--width", "0"])
    assert refused.exit_code == 2 and len(seen) == 2
    page = run(app, ["draw", "--help"], env={"COLUMNS": "120"}).output
    assert page.index("--width") < page.index("--height") < page.index("--title")
    assert "Of the page." in page and "Draw a page." in page


def test_a_child_of_a_group_has_its_own_default_and_name():
    seen = []
    assert CliRunner().invoke(app_of(seen), ["stretch"]).exit_code == 0
    assert CliRunner().invoke(app_of(seen), ["stretch", "--broad", "7"]).exit_code == 0
    assert seen == [Wide(width=120), Wide(width=7)]


def test_groups_name_their_options_as_the_settings_do():
    """What a group holds goes into these settings by name."""
    assert vars(ChoiceOptions()).keys() < PairsConfig.model_fields.keys()
    assert PairsConfig(**vars(ChoiceOptions())) == PairsConfig()
    given = AskingOptions(url="http://127.0.0.1:1/v1", concurrency=3, reasoning_tokens=5).server()
    assert given == {"url": "http://127.0.0.1:1/v1", "concurrency": 3}
    others = {"reasoning_tokens", "cache"}
    assert vars(AskingOptions()).keys() - others < JudgeServerConfig.model_fields.keys()


def test_no_command_has_more_than_ten_parameters():
    counts = {}
    for path in (Path(tether.__file__).parent / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                counts[f"{path.name}:{node.name}"] = len(
                    [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs],
                )
    assert max(counts.values()) == 10, [name for name, count in counts.items() if count > 10]


def test_a_folder_is_no_output_and_is_refused_before_any_work(tmp_path):
    """Every command that has the option."""

    def commands(group, *words):
        for name, command in getattr(group, "commands", {}).items():
            yield from commands(command, *words, name)
        if any("--output" in one.opts for one in group.params):
            yield words, group

    found = dict(commands(typer.main.get_command(app)))
    assert len(found) > 8
    for words, command in found.items():
        needed = [one for one in command.params if one.param_type_name == "argument"]
        arguments = ["missing" for one in needed if one.required]
        done = CliRunner().invoke(app, [*words, *arguments, "--output", str(tmp_path)])
        assert done.exit_code == 2, (words, done.output)
        assert "is a directory" in " ".join(done.output.replace("│", " ").split()), words
