"""The command line. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import difflib
import errno
import inspect
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

from typer import Abort, Context, Exit, Option, Typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from tether import __version__
from tether.cli import env, examine, journeys, judge, prefs, recipes, trained, watch
from tether.cli.options import grouped
from tether.cli.terminal.console import log_to_terminal, print_error
from tether.core import stopping
from tether.core.errors import TetherError, database_fault, memory_error
from tether.core.stopping import Interrupted, begin_program
from tether.settings.stages import STAGES, method_stage
from tether.settings.synonyms import COMMANDS, METHODS, SECTIONS


class _FlagsWithoutType:
    """Shows `--strict` instead of `--strict <bool>`."""

    def get_params(self, ctx: object) -> list[object]:
        params = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if isinstance(param, TyperOption) and param.is_flag and param.metavar is None:
                param.metavar = ""
        return params


class _Command(_FlagsWithoutType, TyperCommand):
    """Breaks the lines of its help at the edge of the terminal."""

    def __init__(self, *names: Any, **words: Any) -> None:
        paragraphs = inspect.cleandoc(words["help"] or "").split("\n\n")
        flowing = [" ".join(paragraph.split()) for paragraph in paragraphs]
        words["help"] = "\n\n".join(flowing)
        words["short_help"] = words["short_help"] or flowing[0]
        super().__init__(*names, **words)


class _Group(_FlagsWithoutType, TyperGroup):
    pass


class Commands(_Group):
    """Knows what other libraries call a command, and the groups in which one may be; lists commands
    by panel.
    """

    def list_commands(self, ctx: object) -> list[str]:
        return sorted(self.commands, key=[*PANEL_OF, *self.commands].index)

    def resolve_command(self, ctx: Context, args: list[str]) -> Any:
        word = args[0].replace("-", "_").lower() if args else ""
        name = SECTIONS.get(word, word).replace("_", "-")
        other = {one: f"{group} {one}" for group, own in GROUPS.items() for one in own} | COMMANDS
        others = [*(other.keys() - self.commands.keys()), *self.commands]
        near = "".join(difflib.get_close_matches(name, others, n=1))
        own = name in self.commands or (near in self.commands and name not in other)
        if not own and (right := other.get(name) or other.get(near)):
            ctx.fail(f"No such command {args[0]!r}. Use `tether {right}`.")
        return super().resolve_command(ctx, [name, *args[1:]] if name in self.commands else args)


GROUPS = {"data": ("inspect",), "env": ("try",), "prefs": prefs.COMMANDS}
PANELS = {
    "Train": "quickstart sft reward process direct dpo kto ppo grpo reinforce rloo distill "
    "best-of-n online-direct rounds",
    "Data": "data",
    "Preferences": "pairs prefs",
    "Judge": "evaluate duel judge constitution reward-bench",
    "Look": "watch dashboard chat generate report export",
    "Run": "new recipes explain plan run sweep resume doctor info engine rewards env",
    "Research": "prove sycophancy",
    "Learn": "lab",
}
"""The commands of `tether --help`, in its order."""
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names.split()}
LOOK = {"no_args_is_help": True, "pretty_exceptions_enable": False, "rich_markup_mode": "rich"}
app = Typer(
    name="tether",
    cls=Commands,
    context_settings={
        "help_option_names": ["--help", "-h"],
        "token_normalize_func": lambda word: word.replace("_", "-"),
    },
    help="Train language models on human preferences, and test whether they became better.",
    **LOOK,
)
data_app = Typer(cls=_Group, help="Examine data before training.", **LOOK)
prefs_app = Typer(
    cls=_Group,
    help="Let people judge which answer is better, and export their judgments.",
    **LOOK,
)
env_app = Typer(cls=_Group, help="Play an environment before training in it.", **LOOK)
for name, group in (("data", data_app), ("prefs", prefs_app), ("env", env_app)):
    app.add_typer(group, name=name, rich_help_panel=PANEL_OF[name])


def _add(command: Callable[..., None], name: str, place: Typer = app, **words: Any) -> None:
    words["rich_help_panel"] = PANEL_OF.get(name) if place is app else None
    place.command(name, cls=_Command, **words)(grouped(command))


for name in (*STAGES, *METHODS):
    kind, fixed = method_stage(name)
    made = "".join(f", with {key} = {value!r}" for key, value in fixed.items())
    what = f"{kind.help}{f': {name.upper()}' if fixed else ''}"
    words = {
        "help": f"{kind.help}. Runs the \\[{kind.name}] section of a recipe{made}; or of a model and "
        f"rows, as tether.{name} in Python.",
        "short_help": what,
        "hidden": name in METHODS and name not in PANEL_OF,
    }
    if name == "evaluate":
        words["help"] += (
            " With --suite, measures a model with evaluators (docs/trust/evaluate_suite.md)."
        )
    command = judge.evaluate if name == "evaluate" else journeys.method_command(name)
    _add(command, name.replace("_", "-"), **words)
for command in (
    journeys.quickstart,
    journeys.run,
    journeys.sweep,
    journeys.resume,
    trained.export,
    trained.engine,
    trained.rewards,
    trained.generate,
    trained.chat,
    examine.report,
    examine.doctor,
    examine.info,
    examine.reward_bench,
    examine.sycophancy,
    judge.judge,
    judge.constitution,
    watch.watch,
    watch.dashboard,
    recipes.new,
    examine.plan,
    recipes.lab,
):
    _add(command, command.__name__.replace("_", "-"))
_add(examine.prove_recipe, "prove")
_add(judge.duel_models, "duel")
_add(recipes.list_recipes, "recipes")
_add(recipes.explain_key, "explain")
_add(examine.inspect, "inspect", data_app)
_add(env.try_environment, "try", env_app)
for name, command in prefs.COMMANDS.items():
    _add(command, name, prefs_app)


def _print_versions(wanted: bool) -> None:
    """Versions, as a report of a fault should name them."""
    if wanted:
        import platform

        from tether.core.rundir import versions

        libraries = versions(("torch", "transformers"))
        used = {"Python": platform.python_version(), **libraries}
        print(f"tether {__version__} ({', '.join(map(' '.join, used.items()))})")
        raise Exit


VERSION = Option(
    "--version",
    callback=_print_versions,
    is_eager=True,
    help="Print the versions of tether, Python and the main libraries.",
)


@app.callback()
def root(_: Annotated[bool, VERSION] = False) -> None:
    pass


ADVICE = {
    errno.ENOSPC: f". Free some space and {stopping.AGAIN}",
    errno.EDQUOT: f". Free some space and {stopping.AGAIN}",
    errno.EROFS: ". Choose a writable run directory with run=PATH.",
    errno.EACCES: ". Change the permissions of this path, or choose another path (for "
    "the run: run=PATH).",
    errno.ENOMEM: "Lower the stage's micro_batch_tokens (rows_per_micro_batch), engine_rows or "
    "max_new_tokens, or set model.recompute=true "
    f"(`tether plan RECIPE` shows how much each change saves) and {stopping.AGAIN}",
}
"""Advice on errors of the operating system."""


def main() -> None:
    """Exit codes: 0 done, 1 a fault of tether's, 2 something the user can mend, 130 and 143
    interrupted.
    """
    begin_program()
    log_to_terminal()
    try:
        code = app(standalone_mode=False)
        if code == 130:  # what the command-line library makes of Ctrl-C
            raise KeyboardInterrupt
        raise SystemExit(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, Abort):
        _leave(f"interrupted; {stopping.AGAIN}", 130)
    except BaseException as error:
        if (number := stopping.Stopping.came) and not isinstance(error, SystemExit | Interrupted):
            error = stopping.ended_by(number)  # whatever a library has made of it
        _explain(error)
        raise


def _explain(error: BaseException) -> None:
    """End the program with a sentence on the error, if it is one that a person can mend."""
    if isinstance(error, Interrupted):
        _leave(str(error), error.exit_code)
    if isinstance(error, TetherError):
        _leave(str(error), 2)
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        _leave("torch is not installed: pip install torch (README.md, Install)", 2)
    if isinstance(error, OSError):
        place = f": {error.filename}" if error.filename else ""
        _leave(f"{error.strerror or error}{place}{ADVICE.get(error.errno or 0, '')}", 2)
    if hasattr(error, "format_message"):  # usage errors of the command-line library
        error.show()  # type: ignore[attr-defined]
        raise SystemExit(2) from None
    if (fault := database_fault(error)) is not None:
        _leave(
            f"the database cannot be used: {fault}. Wait until no other program uses "
            "this database, and "
            f"{stopping.AGAIN}",
            2,
        )
    if (wanting := memory_error(error)) is not None:
        _leave(f"out of memory: {wanting}. {ADVICE[errno.ENOMEM]}", 2)


def _leave(message: str, code: int) -> NoReturn:
    print_error(message)
    raise SystemExit(code) from None
