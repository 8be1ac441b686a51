"""The command line. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tether.cli import prefs
from tether.cli.export import export
from tether.cli.prove import prove
from tether.cli.serve import serve
from tether.cli.version import Version
from tether.core.errors import TetherError, memory_error
from tether.core.stopping import Interrupted, stop_on_sigterm

app = typer.Typer(
    name="tether",
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
prefs_app.command()(serve)
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
RecipeArgument = Annotated[str, typer.Argument(help="A recipe: a .toml file, or the name of one that comes with tether.")]
AskedArgument = Annotated[
    str, typer.Argument(help="Who is asked: a model folder, a hub id, a run directory; with --url a model's name at that server.")
]
Url = Annotated[str | None, typer.Option(help="An OpenAI-compatible server, such as http://127.0.0.1:8000/v1.")]
KeyVariable = Annotated[
    str | None, typer.Option(help="Environment variable that holds the server's key; the key itself goes nowhere.")
]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Requests to the server at a time; default 8.")]
MaxRequests = Annotated[int | None, typer.Option(min=0, help="Budget: requests to the server, repeated ones counted.")]
MaxTokens = Annotated[int | None, typer.Option(min=0, help="Budget: tokens of prompts and replies.")]
Cache = Annotated[
    Path | None, typer.Option(help="Where answers are kept, so that none is asked for twice; default: tether's cache.")
]
ReasoningTokens = Annotated[
    int, typer.Option(min=0, help="Tokens of the reasons that it writes before each verdict; 0: a verdict at once.")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides such as ppo.kl.coefficient=0.1 or run=runs/mine.")]


@app.command()
def quickstart(
    overrides: Overrides = None,
    arms: Annotated[
        str, typer.Option(help="Comma-separated runs: ppo, beta0 (the string cut), random (a reward without information).")
    ] = "ppo",
    smoke: Annotated[
        bool, typer.Option("--smoke", help="The same stages on a tiny random model: under a minute, no download.")
    ] = False,
) -> None:
    """The whole pipeline from one command: SFT, preferences, reward model, PPO, report. Run again to go on."""
    from tether.cli.journeys import quickstart as command

    command(overrides or [], tuple(a.strip() for a in arms.split(",") if a.strip()), smoke)


STAGES = {
    "sft": "Supervised fine-tuning",
    "reward": "Train a reward model on comparisons",
    "ppo": "Optimise the policy against the reward model",
    "grpo": "The same without a critic, answers to one prompt compared with each other (GRPO, DAPO, GSPO ...)",
    "reinforce": "The plain policy gradient and its baselines (REINFORCE, RLOO, REINFORCE++)",
    "best_of_n": "Rejection sampling: sample many answers, imitate the best, again and again",
    "online_direct": "DPO and its kin on pairs of the policy's own answers, ordered by the reward",
    "rounds": "Iterative DPO or self-play (SPIN): sample, make pairs, train, and again",
    "direct": "Direct preference optimisation (DPO, IPO, ORPO, SimPO)",
    "kto": "Kahneman-Tversky optimisation on single answers, good or bad",
    "process": "Train a process (or outcome) reward model on solutions with labelled steps",
}


def _stage(section: str) -> Callable[[str, list[str] | None], None]:
    def command(recipe: RecipeArgument, overrides: Overrides = None) -> None:
        _stages(recipe, overrides, [section])

    return command


for section, text in STAGES.items():
    app.command(section.replace("_", "-"), help=f"{text}: the \\[{section}] section of a recipe.")(_stage(section))


app.command()(export)
app.command()(prove)


@app.command()
def compare(recipe: RecipeArgument = "compare", overrides: Overrides = None) -> None:
    """Methods side by side from the same SFT model, preferences and reward model, over several seeds. Run again to go on."""
    from tether.cli.journeys import compare as command

    command(recipe, overrides or [])


@app.command()
def overopt(recipe: RecipeArgument = "overopt", overrides: Overrides = None) -> None:
    """How far a reward model bears optimisation: proxies by best-of-n and by PPO, judged by gold, over several seeds. Hours."""
    from tether.cli.journeys import overopt as command

    command(recipe, overrides or [])


@app.command()
def loop(recipe: RecipeArgument = "loop", overrides: Overrides = None) -> None:
    """Preferences in rounds: the policy answers, pairs are judged, reward model and policy learn. Run again to go on."""
    from tether.cli.journeys import loop as command

    command(recipe, overrides or [])


@app.command()
def run(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """All stages of a recipe, in order."""
    _stages(recipe, overrides, [])


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="The run directory, or a stage's folder in it.")],
    overrides: Overrides = None,
) -> None:
    """Go on with what was started in a run directory, from its last checkpoint."""
    from tether.cli.journeys import resume as command

    command(run, overrides or [])


@app.command()
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", min=1, help="GB of the GPU to plan for; without it: this machine.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="Kind of that GPU, for the times: a100, h100, h200, l40s.")] = "h100",
    shape: Annotated[
        str | None, typer.Option(help="Plan for another model: a well-known shape such as llama-2-7b, or a config.json.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompts.")] = 128,
) -> None:
    """Memory by role and phase, and time, before anything is loaded; what to switch on where it does not fit (exit 1)."""
    from tether.cli.journeys import plan as command

    command(recipe, overrides or [], gpu_memory, gpu, shape, prompt_tokens)


def _stages(recipe: str, overrides: list[str] | None, stages: list[str]) -> None:
    from tether.cli.journeys import stages as command

    command(recipe, overrides or [], stages)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A model folder, a hub id, or a run directory.")],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be given several times.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A file of prompts, in any format that tether reads.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON lines here instead of text to the terminal.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1)] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    seed: int = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first so many prompts of the file.")] = None,
) -> None:
    """Answers to prompts, from a model or from a finished run."""
    from tether.cli.talk import generate as command
    from tether.core.types import Sampling

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p)
    command(model, prompt or [], file, output, sampling, samples, seed, limit)


@app.command()
def chat(
    model: Annotated[str, typer.Argument(help="A model folder, a hub id, or a run directory.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0)] = 0.95,
    seed: int = 0,
) -> None:
    """Talk with a model or with the result of a run. An empty line or Ctrl-D ends it; /new starts over."""
    from tether.cli.talk import chat as command
    from tether.core.types import Sampling

    command(model, Sampling(max_new_tokens, temperature, top_p=top_p), seed)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(help="A run directory.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the page; default: report.html in the run.")
    ] = None,
) -> None:
    """One self-contained page from a run directory."""
    from tether.report.page import write_report

    typer.echo(str(write_report(directory, output)))


@app.command()
def doctor(
    subject: Annotated[str, typer.Argument(help="A recipe, before training; or the folder of a run or of one of its stages.")],
    overrides: Overrides = None,
) -> None:
    """Find faulty set-ups: a wrong or moving reference, a KL of the wrong sign, masked stop tokens ... (exit 2 on an error)."""
    from tether.cli.doctor import doctor as command

    command(subject, overrides or [])


@app.command("reward-bench")
def reward_bench(
    model: Annotated[
        str, typer.Argument(help="A run with a reward model, a trained role's folder, or a hub sequence classifier.")
    ],
    files: Annotated[list[str], typer.Argument(help="Comparisons that it never saw, in any format that tether reads.")],
    format: Annotated[str, typer.Option(help="Name of a format; auto finds out.")] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many pairs of each file.")] = None,
    label: Annotated[str | None, typer.Option(help="Of a classifier with several outputs: the one that is a reward.")] = None,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens; longer pairs are left out and counted.")] = 2048,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write everything as JSON here.")] = None,
) -> None:
    """How far a reward model can be believed: accuracy by slice, calibration, what length alone would say."""
    from tether.cli.bench import reward_bench as command

    command(model, files, format, limit, label, max_length, output)


@app.command()
def sycophancy(
    model: Annotated[str, typer.Argument(help="A model folder, a hub id, or a run directory.")],
    first: Annotated[Path, typer.Argument(help="Prompts in which one kind of person asks questions with two options.")],
    second: Annotated[Path, typer.Argument(help="The same questions, row by row, asked by the opposite kind.")],
    pairs: Annotated[int | None, typer.Option(min=4, help="Only so many rows, evenly from all questions.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the numbers as JSON here.")] = None,
) -> None:
    """Whether a model's answers depend on who asks: the same questions with opposite premises about the asker."""
    from tether.cli.bench import sycophancy as command

    command(model, first, second, pairs, output)


@app.command()
def judge(
    model: AskedArgument,
    files: Annotated[list[str], typer.Argument(help="Comparisons, in any format that tether reads.")],
    rubric: Annotated[
        str, typer.Option(help="What makes an answer better: a text file, helpful, harmless; or a .toml of principles.")
    ] = "helpful",
    format: Annotated[str, typer.Option(help="Name of a format; auto finds out.")] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many pairs of each file.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the judge's soft labels here, as JSON lines.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the figures as JSON here.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0.01, help="Divides the labels' log-odds: above 1 for a judge too sure.")
    ] = 1.0,
    reasoning_tokens: ReasoningTokens = 0,
    cache: Cache = None,
    url: Url = None,
    key_variable: KeyVariable = None,
    concurrency: Concurrency = None,
    max_requests: MaxRequests = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Label comparisons with a language model, and see first how far it agrees with people and how much the place counts."""
    from tether.cli.judge import judge as command

    server = _server(url, key_variable, concurrency, max_requests, max_tokens)
    command(model, files, rubric, format, limit, output, report, temperature, reasoning_tokens, cache, server)


@app.command()
def constitution(
    model: AskedArgument,
    prompts: Annotated[str, typer.Argument(help="Prompts, in any format that tether reads.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write demonstrations here, as JSON lines.")],
    principles: Annotated[str, typer.Option(help="A .toml file of principles.")] = "constitution",
    comparisons: Annotated[
        Path | None,
        typer.Option(help="Also sample two answers to each prompt, compare them by a principle, and write that here."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Critiques and revisions of each answer.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0)] = 1.0,
    seed: int = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    reasoning_tokens: ReasoningTokens = 0,
    cache: Cache = None,
    url: Url = None,
    key_variable: KeyVariable = None,
    concurrency: Concurrency = None,
    max_requests: MaxRequests = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Constitutional AI: a model criticises and rewrites its answers by principles; demonstrations, and comparisons if asked."""
    from tether.cli.judge import constitution as command
    from tether.core.types import Sampling

    server = _server(url, key_variable, concurrency, max_requests, max_tokens)
    sampling = Sampling(max_new_tokens, temperature, top_p=top_p)
    command(model, prompts, principles, output, comparisons, rounds, sampling, seed, limit, reasoning_tokens, cache, server)


def _server(*values: str | int | None) -> dict[str, str | int | None]:
    return dict(zip(("url", "key_variable", "concurrency", "max_requests", "max_tokens"), values, strict=True))


@data_app.command("inspect")
def inspect_data(
    path: Annotated[str, typer.Argument(help="A file, a folder, or hub:owner/name:split.")],
    format: Annotated[str, typer.Option(help="Name of a format; auto finds out.")] = "auto",
    limit: Annotated[int | None, typer.Option(min=1, help="Read only the first so many rows.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 2 if any row had to be set aside.")] = False,
) -> None:
    """Format, counts, lengths, length bias of chosen against rejected, duplicates, examples."""
    from rich.console import Console

    from tether.core.errors import DataError
    from tether.data.inspection import inspect, render

    found = inspect(path, format=format, limit=limit)
    Console().print(render(found))
    if strict and found.quarantined:
        raise DataError(f"{path}: {found.quarantined} rows cannot be used, and --strict was given. The reasons stand above.")


def main() -> None:
    """Exit codes: 0 done, 1 a fault of tether's, 2 something the user can mend, 130 and 143 interrupted."""
    stop_on_sigterm()
    try:
        code = app(standalone_mode=False)
        if code == 130:  # what the command-line library makes of Ctrl-C
            _leave("interrupted; start the same command again to go on from what is saved.", 130)
        raise SystemExit(code if isinstance(code, int) else 0)
    except TetherError as error:
        _leave(str(error), 2)
    except Interrupted as stop:
        _leave(str(stop), stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _leave("interrupted.", 130)
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
