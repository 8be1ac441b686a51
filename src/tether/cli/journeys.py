"""Commands that train."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tether.cli.options import Overrides, RecipeArgument, StudyArgument
from tether.cli.progress import bars, starting
from tether.cli.results import interval, set_aside, show_alarms, stage_table, verdict
from tether.core.errors import ConfigError, RunError, memory_error
from tether.core.synonyms import METHODS

if TYPE_CHECKING:
    from tether.assemble import Recipe
    from tether.pipelines.compare import CompareConfig
    from tether.pipelines.loop import LoopConfig
    from tether.pipelines.overopt import OveroptConfig
    from tether.pipelines.quickstart import QuickstartConfig


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
    with starting():
        from tether.core.config import build, packaged_recipe
        from tether.pipelines.quickstart import QuickstartConfig

        recipe = packaged_recipe("smoke" if smoke else "quickstart")
        chosen = [a.strip() for a in arms.split(",") if a.strip()]
        values = {**tomllib.loads(recipe.read_text(encoding="utf-8")), "arms": chosen}
        config = build(QuickstartConfig, values, overrides or (), where=str(recipe.name))
    _quickstart(config)


def _quickstart(config: QuickstartConfig) -> None:
    from tether.pipelines.opening import remember
    from tether.pipelines.quickstart import Quickstart
    from tether.report.page import write_report

    console = Console()
    remember(Path(config.run), "quickstart", config)
    with bars(console) as announce:
        summary = Quickstart(config, announce).run()
    page = write_report(Path(config.run))
    console.print(verdict(summary))
    console.print(f"The page: {page}    Talk to it: tether chat {config.run}", highlight=False, soft_wrap=True)


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


def stage(section: str, method: str = "") -> Callable[[str, list[str] | None], None]:
    """The command of one of them; of a method, that sets what makes the stage this method."""

    def command(recipe: RecipeArgument, overrides: Overrides = None) -> None:
        _run(recipe, overrides, [section], method)

    return command


def run(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """All stages of a recipe, in order."""
    _run(recipe, overrides, [])


def _run(recipe: str, overrides: list[str] | None, names: list[str], method: str = "") -> None:
    with starting():
        from tether.assemble import Recipe, describe_sections
        from tether.core.config import load_recipe

        path = recipe_of(recipe, "")
        config = load_recipe(path, Recipe, overrides or ())
        if method:
            config = load_recipe(path, Recipe, [*(overrides or ()), *_what_makes(method, config, recipe)])
        if not (chosen := names or list(describe_sections(config))):
            raise ConfigError(f"{recipe} has no section of a stage, so there is nothing to do. Add one, such as [sft].")
    _stages(config, chosen)


def _what_makes(method: str, config: Recipe, recipe: str) -> list[str]:
    """The override by which a stage becomes this method; none where it is.

    Raises:
        ConfigError: the recipe has not the method's section, or says in it that it is another.
    """
    name, key, value = METHODS[method]
    section = getattr(config, name)
    if section is None:
        how = f"`tether {method}` runs [{name}] with {key} = {value!r}"
        raise ConfigError(f'{how}, and {recipe} has no such section. Add one, with data = {{ path = "..." }} in it.')
    if (own := getattr(section, key)) == value:
        return []
    if key in section.model_fields_set:
        right = f"start it with `tether {name.replace('_', '-')}`, or add {name}.{key}={value}"
        raise ConfigError(f"{recipe} says {name}.{key} = {own!r}, and `tether {method}` is {value!r}: {right}.")
    return [f"{name}.{key}={value}"]


def recipe_of(recipe: str, command: str) -> Path:
    """The file of a recipe for `command`, a study's, or for those of single stages where that is empty.

    Raises:
        ConfigError: the recipe is another command's.
    """
    from tether.core.config import packaged_recipe

    path = packaged_recipe(recipe)
    if path.is_file() and (own := _command_of(path)) not in ("", command):
        other = f"`tether {command}`" if command else "single stages"
        raise ConfigError(f"{recipe} is a recipe of `tether {own}`, not of {other}: start it with that command.")
    return path


def _command_of(path: Path) -> str:
    """The command that a recipe of several stages' ground is for; empty for one of single stages."""
    try:
        keys = tomllib.loads(path.read_text(encoding="utf-8-sig")).keys()
    except (OSError, ValueError):
        return ""
    kinds = {"loop": "loop", "proxies": "overopt", "arms": "compare"}
    if path.stem in ("quickstart", "smoke") and "pairs" in keys:
        return "quickstart --smoke" if path.stem == "smoke" else "quickstart"
    return next((command for key, command in kinds.items() if key in keys), "")


def _stages(config: Recipe, chosen: list[str]) -> None:
    from tether.pipelines.journey import run_recipe
    from tether.pipelines.opening import remember
    from tether.report.page import write_report

    console = Console()
    remember(Path(config.run), "stages", config, chosen)
    try:
        with bars(console) as announce:
            results = run_recipe(config, chosen, announce)
    except (MemoryError, RuntimeError) as error:
        if (wanting := memory_error(error)) is None:
            raise
        raise RunError(f"out of memory: {wanting}. {_smaller(config, chosen)}") from error
    for name in chosen:
        console.print(stage_table(name, results[name]))
        set_aside(console, Path(config.run) / name, results[name])
        show_alarms(console, results[name].get("alarms", ()))
        page = write_report(Path(config.run) / name)
        console.print(f"{name}: {Path(config.run) / name}    page: {page}", highlight=False, soft_wrap=True)


def _study(command: str, recipe: str, overrides: list[str] | None) -> None:
    """One of compare, overopt and loop: by its packaged recipe where the first word is an override already."""
    with starting():
        from tether.core.config import is_override, load_recipe

        if is_override(recipe):
            recipe, overrides = command, [recipe, *(overrides or ())]
        kind, start = _kinds()[command]
        config = load_recipe(recipe_of(recipe, command), kind, overrides or ())
    start(config)


def compare(recipe: StudyArgument = "compare", overrides: Overrides = None) -> None:
    """Methods side by side from the same SFT model, preferences and reward model, over several seeds. Run again to go on."""
    _study("compare", recipe, overrides)


def _smaller(config: Recipe, chosen: list[str]) -> str:
    """What would lower the peak of these stages most, by the planner."""
    from tether.assemble import STAGES
    from tether.pipelines.devices import this_machine
    from tether.pipelines.plan import plan as make

    alone = config.model_copy(update={name: None for name in STAGES if name not in chosen})
    made = make(alone, this_machine(), advise=True)
    changes = "; ".join(f"{what} ({peak / 1e9:.2f} GB)" for what, peak in made.advice[:3] if peak < made.peak)
    return (
        f"The planner counts {made.peak / 1e9:.2f} GB at the peak; what lowers it most: {changes or 'a smaller model'}. Start "
        "the same command again with one of them and another run directory."
    )


def _compare(config: CompareConfig) -> None:
    from rich.markdown import Markdown

    from tether.pipelines.compare import Compare, table
    from tether.pipelines.opening import remember

    console = Console()
    remember(Path(config.run), "compare", config)
    with bars(console) as announce:
        summary = Compare(config, announce).run()
    console.print(Markdown(table(summary)))
    console.print(f"The same table: {Path(config.run) / 'compare.md'}", highlight=False, soft_wrap=True)


def overopt(recipe: StudyArgument = "overopt", overrides: Overrides = None) -> None:
    """How far a reward model bears optimisation: proxies by best-of-n and by PPO, judged by gold, over several seeds. Hours."""
    _study("overopt", recipe, overrides)


def _overopt(config: OveroptConfig) -> None:
    from tether.pipelines.opening import remember
    from tether.pipelines.overopt import Overopt
    from tether.report.overopt import POLICY_COLUMNS, PROXY_COLUMNS, policy_rows, proxy_rows, read_study, study_verdict
    from tether.report.page import write_report

    console = _wide()
    remember(Path(config.run), "overopt", config)
    with bars(console) as announce:
        Overopt(config, announce).run()
    page, study = write_report(Path(config.run)), read_study(Path(config.run))
    assert study is not None
    for title, columns, rows in (
        ("best of n", PROXY_COLUMNS, proxy_rows(study)),
        ("policies", POLICY_COLUMNS, policy_rows(study)),
    ):
        table = Table(*columns, title=title, title_justify="left")
        for row in rows:
            table.add_row(*map(escape, row))
        if rows:
            console.print(table)
    verdict = study_verdict(study)
    for sentence in (verdict.headline, *verdict.sentences, *verdict.warnings):
        console.print(sentence, markup=False, highlight=False)
    console.print(f"The page: {page}", highlight=False, soft_wrap=True)


def _wide() -> Console:
    """For tables of many columns: a file or a pipe has no edge."""
    return Console() if sys.stdout.isatty() else Console(width=170)


def loop(recipe: StudyArgument = "loop", overrides: Overrides = None) -> None:
    """Preferences in rounds: the policy answers, pairs are judged, reward model and policy learn. Run again to go on."""
    _study("loop", recipe, overrides)


def _loop(config: LoopConfig) -> None:
    from tether.cli.judge import show
    from tether.core.rundir import read_json
    from tether.pipelines.loop import Loop
    from tether.pipelines.opening import remember
    from tether.report.page import write_report

    console = _wide()
    remember(Path(config.run), "loop", config)
    with bars(console) as announce:
        summary = Loop(config, announce).run()
    if (found := Path(config.run) / "judge.json").is_file():
        show(console, str(config.loop.agreement), read_json(found))
    columns = (
        "round",
        "labels so far",
        "reward model, held-out",
        "gold of held-out answers",
        "gain of the round",
        "KL",
        "alarms",
    )
    table = Table(*columns, title="rounds", title_justify="left")
    for number, one in enumerate(summary["rounds"], 1):
        accuracy = one.get("reward", {}).get("heldout_accuracy")
        told = ["" if accuracy is None else interval(accuracy, percent=True)]
        if "gold_gain" in one:
            kl = f"{one['kl']['value']:.1f}"
            told += [f"{one['gold_before']:.2f} to {one['gold_after']:.2f}", interval(one["gold_gain_of_round"]), kl]
        table.add_row(str(number), str(one["labels_so_far"]), *told, *[""] * (4 - len(told)), str(one["alarms"]))
    if summary["rounds"]:
        console.print(table)
    if "waiting" in summary:
        left = summary["waiting"]
        judged = left["done"] + left["settled"]
        every = judged + left["open"] + left["expert"]
        console.print(
            f"Round {left['round']} waits for people: {judged} of {every} comparisons are judged, "
            f"{left['expert']} wait for an expert. Let them in with\n  tether prefs serve {left['store']}\n"
            "and run the same command again when they are done.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return
    page = write_report(Path(config.run))
    console.print(f"The page: {page}    Talk to the last policy: tether chat {config.run}", highlight=False, soft_wrap=True)


def resume(
    run: Annotated[Path, typer.Argument(help="The run directory, or a stage's folder in it.")], overrides: Overrides = None
) -> None:
    """Go on with what was started in a run directory, from its last checkpoint."""
    with starting():
        from tether.core.config import build
        from tether.pipelines.opening import remembered

        root, started = remembered(run)
        kind, go_on = _kinds(started["stages"])[started["command"]]
        config = build(kind, {**started["config"], "run": str(root)}, overrides or (), where=str(root / "command.json"))
    go_on(config)


def _kinds(stages: list[str] | None = None) -> dict[str, tuple[type[Any], Callable[[Any], None]]]:
    """By command the config that it takes, and what it does with one."""
    from tether.assemble import Recipe
    from tether.pipelines.compare import CompareConfig
    from tether.pipelines.loop import LoopConfig
    from tether.pipelines.overopt import OveroptConfig
    from tether.pipelines.quickstart import QuickstartConfig

    return {
        "quickstart": (QuickstartConfig, _quickstart),
        "compare": (CompareConfig, _compare),
        "overopt": (OveroptConfig, _overopt),
        "loop": (LoopConfig, _loop),
        "stages": (Recipe, lambda config: _stages(config, stages or [])),
    }


def stages_of(recipe: str, overrides: Sequence[str]) -> Recipe:
    """A recipe of single stages; of the quickstart, a journey around the same sections, those that it trains."""
    from tether.assemble import DataConfig, Recipe
    from tether.core.config import build, load_recipe, packaged_recipe

    path = packaged_recipe(recipe)
    if not (path.is_file() and _command_of(path).startswith("quickstart")):
        return load_recipe(recipe_of(recipe, ""), Recipe, overrides)
    from tether.pipelines.foundation import DATA
    from tether.pipelines.quickstart import QuickstartConfig

    whole = build(QuickstartConfig, tomllib.loads(path.read_text(encoding="utf-8")), overrides, where=path.name)
    shared = {key: getattr(whole, key) for key in ("run", "seed", "model", "sft", "reward")}
    data = DataConfig(path=str(DATA / "prompts.jsonl"))
    return Recipe(**shared, ppo=whole.ppo.model_copy(update={"data": data}))


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
    with starting():
        from tether.pipelines.devices import gpu as gpu_of
        from tether.pipelines.devices import this_machine
        from tether.pipelines.plan import plan as make

        config = stages_of(recipe, overrides or ())
    console = Console()
    device = this_machine() if gpu_memory is None else gpu_of(gpu_memory, gpu)
    made = make(config, device, shape=shape, prompt_tokens=prompt_tokens)
    title = f"{made.parameters / 1e9:,.2f} billion parameters on {device.name}, {device.memory / 1e9:,.0f} GB"
    table = Table("stage", "learning rate", "phase", "GB", "of these", "seconds an update", title=title, title_justify="left")
    for stage in made.stages:
        for phase in stage.phases:
            shares = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in phase.bytes.items() if size >= 5e6)
            size = f"{phase.total / 1e9:.2f}{' peak' if phase.total == stage.peak else ''}"
            table.add_row(stage.name, f"{stage.learning_rate:g}", phase.name, size, shares, f"{phase.seconds:,.1f}")
    console.print(table)
    if made.fits:
        console.print(f"It fits: {made.peak / 1e9:.1f} GB of {device.memory / 1e9:.0f}.")
        return
    console.print(
        f"It does not fit: {made.peak / 1e9:.1f} GB are needed, {device.memory / 1e9:.0f} are there. One change at a time:"
    )
    for change, peak in made.advice:
        verdict = "fits" if peak <= device.memory else "not enough by itself"
        console.print(f"  {change}: {peak / 1e9:.1f} GB, {verdict}", markup=False, highlight=False)
    raise SystemExit(1)
