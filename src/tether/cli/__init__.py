"""The command line. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import errno
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from tether.cli import bench, doctor, export, journeys, judge, looking, prefs, prove, serve, talk
from tether.cli.version import Version
from tether.core import stopping
from tether.core.errors import TetherError, memory_error
from tether.core.stopping import Interrupted, stop_on_sigterm
from tether.core.synonyms import COMMANDS, METHODS


class Commands(TyperGroup):
    """Knows what other libraries call a command, and the groups in which one may be."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        inside = next((f"{group} {name}" for group, own in GROUPS.items() if name in own), None)
        if name not in self.commands and (right := COMMANDS.get(name) or inside):
            ctx.fail(f"No such command {name!r}. It is `tether {right}`.")
        return super().resolve_command(ctx, args)


GROUPS = {"data": ("inspect",), "prefs": ("serve", *prefs.COMMANDS)}
app = typer.Typer(
    name="tether",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Align language models with human preferences, and know whether they got better.",
)
data_app = typer.Typer(no_args_is_help=True, help="Look at data before training on it.")
app.add_typer(data_app, name="data")
prefs_app = typer.Typer(no_args_is_help=True, help="Collect comparisons from people.")
app.add_typer(prefs_app, name="prefs")
app.command()(journeys.quickstart)
for section, text in journeys.STAGES.items():
    name = section.replace("_", "-")
    app.command(name, help=f"{text}: the \\[{section}] section of a recipe.")(journeys.stage(section))
for method, (section, key, value) in METHODS.items():
    text = f"{journeys.STAGES[section]}: the \\[{section}] section of a recipe with {key} = {value!r}."
    app.command(method.replace("_", "-"), hidden=True, help=text)(journeys.stage(section, method))
for command in (
    export.export,
    prove.prove,
    journeys.compare,
    journeys.overopt,
    journeys.loop,
    journeys.run,
    journeys.resume,
    journeys.plan,
    talk.generate,
    talk.chat,
    looking.report,
    doctor.doctor,
    bench.reward_bench,
    bench.sycophancy,
    judge.judge,
    judge.constitution,
):
    app.command()(command)
data_app.command()(looking.inspect)
prefs_app.command()(serve.serve)
for name, command in prefs.COMMANDS.items():
    prefs_app.command(name)(command)


@app.callback()
def root(_: Version = False) -> None:
    pass


AGAIN = " and start the same command again: it goes on from its last checkpoint."
ADVICE = {
    errno.ENOSPC: f". Free some space{AGAIN}",
    errno.EDQUOT: f". Free some space{AGAIN}",
    errno.EROFS: ". Choose a run directory that can be written to, with run=PATH.",
    errno.EACCES: ". Change its permissions, or choose another path (of the run: run=PATH).",
    errno.ENOMEM: (
        "Lower the stage's micro_batch_tokens (rows_per_micro_batch), engine_rows or max_new_tokens, or set model.recompute=true "
        f"(`tether plan RECIPE` says what each saves){AGAIN}"
    ),
}
"""What to do about an error of the operating system."""


def main() -> None:
    """Exit codes: 0 done, 1 a fault of tether's, 2 something the user can mend, 130 and 143 interrupted."""
    stop_on_sigterm()
    try:
        code = app(standalone_mode=False)
        if code == 130:  # what the command-line library makes of Ctrl-C
            _leave(f"interrupted; {stopping.AGAIN}", 130)
        raise SystemExit(code if isinstance(code, int) else 0)
    except TetherError as error:
        _leave(str(error), 2)
    except Interrupted as stop:
        _leave(str(stop), stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _leave(f"interrupted; {stopping.AGAIN}", 130)
    except OSError as error:
        place = f": {error.filename}" if error.filename else ""
        _leave(f"{error.strerror or error}{place}{ADVICE.get(error.errno or 0, '')}", 2)
    except Exception as error:
        if hasattr(error, "format_message"):  # usage errors of the command-line library
            error.show()  # type: ignore[attr-defined]
            raise SystemExit(2) from None
        if (wanting := memory_error(error)) is not None:
            _leave(f"out of memory: {wanting}. {ADVICE[errno.ENOMEM]}", 2)
        raise


def _leave(message: str, code: int) -> NoReturn:
    from tether.core.secrets import redact

    print(f"tether: {redact(message)}", file=sys.stderr)
    raise SystemExit(code) from None
