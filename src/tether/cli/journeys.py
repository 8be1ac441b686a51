"""Commands that train."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tether.cli.progress import bars
from tether.core.config import build, load_recipe, packaged_recipe
from tether.core.errors import ConfigError, RunError, memory_error
from tether.pipelines.opening import remember, remembered

if TYPE_CHECKING:
    from tether.assemble import Recipe
    from tether.pipelines.compare import CompareConfig
    from tether.pipelines.loop import LoopConfig
    from tether.pipelines.overopt import OveroptConfig
    from tether.pipelines.quickstart import QuickstartConfig


def quickstart(overrides: list[str], arms: tuple[str, ...], smoke: bool) -> None:
    """See `tether quickstart --help`."""
    from tether.pipelines.quickstart import QuickstartConfig

    recipe = packaged_recipe("smoke" if smoke else "quickstart")
    values = {**tomllib.loads(recipe.read_text(encoding="utf-8")), "arms": list(arms)}
    _quickstart(build(QuickstartConfig, values, overrides, where=str(recipe.name)))


def _quickstart(config: QuickstartConfig) -> None:
    from tether.pipelines.quickstart import Quickstart
    from tether.report.page import write_report

    console = Console()
    remember(Path(config.run), "quickstart", config)
    with bars(console) as announce:
        summary = Quickstart(config, announce).run()
    page = write_report(Path(config.run))
    console.print(_verdict(summary))
    console.print(f"The page: {page}    Talk to it: tether chat {config.run}", highlight=False, soft_wrap=True)


def stages(recipe: str, overrides: list[str], names: list[str]) -> None:
    """See `tether sft | reward | ppo | run --help`."""
    from tether.assemble import Recipe, describe_sections

    path = packaged_recipe(recipe)
    if path.is_file() and (command := _another(path)):
        raise ConfigError(f"{recipe} is a recipe of `tether {command}`, not of single stages: start it with that command.")
    config = load_recipe(path, Recipe, overrides)
    if not (chosen := names or list(describe_sections(config))):
        raise ConfigError(f"{recipe} has no section of a stage, so there is nothing to do. Add one, such as [sft].")
    _stages(config, chosen)


def _another(path: Path) -> str:
    """The command that a recipe of several stages' ground is for."""
    try:
        keys = tomllib.loads(path.read_text(encoding="utf-8-sig")).keys()
    except (OSError, ValueError):
        return ""
    kinds = {"loop": "loop", "proxies": "overopt", "arms": "compare", "pairs": "quickstart"}
    found = next((command for key, command in kinds.items() if key in keys), "")
    return "quickstart --smoke" if found == "quickstart" and path.stem == "smoke" else found


def _stages(config: Recipe, chosen: list[str]) -> None:
    from tether.pipelines.journey import run_recipe
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
        console.print(_stage_table(name, results[name]))
        _set_aside(console, Path(config.run) / name, results[name])
        _alarms(console, results[name].get("alarms", ()))
        page = write_report(Path(config.run) / name)
        console.print(f"{name}: {Path(config.run) / name}    page: {page}", highlight=False, soft_wrap=True)


def compare(recipe: str, overrides: list[str]) -> None:
    """See `tether compare --help`."""
    from tether.pipelines.compare import CompareConfig

    _compare(load_recipe(packaged_recipe(recipe), CompareConfig, overrides))


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

    console = Console()
    remember(Path(config.run), "compare", config)
    with bars(console) as announce:
        summary = Compare(config, announce).run()
    console.print(Markdown(table(summary)))
    console.print(f"The same table: {Path(config.run) / 'compare.md'}", highlight=False, soft_wrap=True)


def overopt(recipe: str, overrides: list[str]) -> None:
    """See `tether overopt --help`."""
    from tether.pipelines.overopt import OveroptConfig

    _overopt(load_recipe(packaged_recipe(recipe), OveroptConfig, overrides))


def _overopt(config: OveroptConfig) -> None:
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


def loop(recipe: str, overrides: list[str]) -> None:
    """See `tether loop --help`."""
    from tether.pipelines.loop import LoopConfig

    _loop(load_recipe(packaged_recipe(recipe), LoopConfig, overrides))


def _loop(config: LoopConfig) -> None:
    from tether.cli.judge import show
    from tether.core.rundir import read_json
    from tether.pipelines.loop import Loop
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
        told = ["" if accuracy is None else _interval(accuracy, percent=True)]
        if "gold_gain" in one:
            kl = f"{one['kl']['value']:.1f}"
            told += [f"{one['gold_before']:.2f} to {one['gold_after']:.2f}", _interval(one["gold_gain_of_round"]), kl]
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


def resume(place: Path, overrides: list[str]) -> None:
    """See `tether resume --help`."""
    from tether.assemble import Recipe
    from tether.pipelines.compare import CompareConfig
    from tether.pipelines.loop import LoopConfig
    from tether.pipelines.overopt import OveroptConfig
    from tether.pipelines.quickstart import QuickstartConfig

    root, started = remembered(place)
    kinds: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
        "quickstart": (QuickstartConfig, _quickstart),
        "compare": (CompareConfig, _compare),
        "overopt": (OveroptConfig, _overopt),
        "loop": (LoopConfig, _loop),
        "stages": (Recipe, lambda config: _stages(config, started["stages"])),
    }
    kind, go_on = kinds[started["command"]]
    go_on(build(kind, {**started["config"], "run": str(root)}, overrides, where=str(root / "command.json")))


def plan(recipe: str, overrides: list[str], gpu_memory: float | None, gpu: str, shape: str | None, prompt_tokens: int) -> None:
    """See `tether plan --help`."""
    from tether.assemble import Recipe
    from tether.pipelines.devices import gpu as gpu_of
    from tether.pipelines.devices import this_machine
    from tether.pipelines.plan import plan as make

    console = Console()
    path = packaged_recipe(recipe)
    if path == packaged_recipe("quickstart"):  # a journey with phases of its own around the same sections
        from tether.pipelines.quickstart import QuickstartConfig

        whole = build(QuickstartConfig, tomllib.loads(path.read_text(encoding="utf-8")), overrides, where=path.name)
        shared = {name: getattr(whole, name) for name in ("run", "seed", "model", "sft", "reward", "ppo")}
        config = Recipe.model_validate(shared)
    else:
        config = load_recipe(path, Recipe, overrides)
    device = this_machine() if gpu_memory is None else gpu_of(gpu_memory, gpu)
    made = make(config, device, shape=shape, prompt_tokens=prompt_tokens)
    title = f"{made.parameters / 1e9:,.2f} billion parameters on {device.name}, {device.memory / 1e9:,.0f} GB"
    table = Table("stage", "phase", "GB", "of these", "seconds an update", title=title, title_justify="left")
    for stage in made.stages:
        for phase in stage.phases:
            shares = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in phase.bytes.items() if size >= 5e6)
            peak = phase.total == stage.peak
            table.add_row(
                stage.name, phase.name, f"{phase.total / 1e9:.2f}{' peak' if peak else ''}", shares, f"{phase.seconds:,.1f}"
            )
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


def _interval(estimate: dict[str, Any], percent: bool = False) -> str:
    form = "{:.1%} [{:.1%}, {:.1%}]" if percent else "{:+.2f} [{:+.2f}, {:+.2f}]"
    return form.format(estimate["value"], estimate["low"], estimate["high"])


def _verdict(summary: dict[str, Any]) -> Table:
    table = Table(title="What happened", show_header=False, title_justify="left")
    reward, rows = summary["reward"], []
    rows.append(("reward model, held-out accuracy", _interval(reward["heldout_accuracy"], percent=True)))
    if "gold_accuracy" in reward:
        rows.append(("  against the true order", _interval(reward["gold_accuracy"], percent=True)))
    for arm, result in summary["arms"].items():
        rows.append((f"{arm}: wins against SFT, by gold", _interval(result["gold_win_rate"], percent=True)))
        rows.append(("  gold gain", _interval(result["gold_gain"])))
        rows.append(("  proxy gain, KL", f"{result['proxy_gain']:+.2f}, {result['kl']:.1f} nats a response"))
    rows.append(("time, memory", f"{summary['seconds'] / 60:.1f} minutes, {summary['peak_rss_bytes'] / 1e9:.1f} GB at most"))
    for row in rows:
        table.add_row(*row)
    return table


def _stage_table(name: str, summary: dict[str, Any]) -> Table:
    table = Table(title=name, show_header=False, title_justify="left")
    for key, value in summary.items():
        if isinstance(value, dict) and {"value", "low", "high"} <= set(value):
            table.add_row(key, _estimate(value))
        elif isinstance(value, (int, float, str)):
            table.add_row(*_plain(key, value))
        elif key == "heldout" and "model" in value:  # of a process reward model, beside who knows less
            others = [name for name in value if name not in ("model", "thresholds")]
            for measure, found in value["model"].items():
                beside = ", ".join(f"{name} {value[name][measure]['value']:.3f}" for name in others if measure in value[name])
                table.add_row(f"{key}: {measure}", f"{_estimate(found)}; {beside}" if beside else _estimate(found))
        elif key in ("heldout", "gold"):
            for part in [p for p in value if isinstance(value[p], dict) and "gain" in value[p]]:
                table.add_row(f"{key}: {part}", _gain(value[part]))
            table.add_row(f"{key}: weights kept", f"of step {value['kept_step']}; the highest score was at {value['best_step']}")
        elif key == "tests":
            for test, result in value.items():
                table.add_row(f"{test}: accuracy", _estimate(result["accuracy"]))
        elif isinstance(value, dict) and value and all(isinstance(v, (int, float)) for v in value.values()):
            table.add_row(key, ", ".join(f"{k}: {v:.4g}" for k, v in value.items()))
    return table


def _plain(key: str, value: float | str) -> tuple[str, str]:
    if key == "peak_rss_bytes":
        return "peak memory", f"{float(value) / 1e9:.2f} GB"
    if key == "seconds":
        return "time", f"{value:.0f} s" if float(value) < 600 else f"{float(value) / 60:.0f} minutes"
    return key, f"{value:.4g}" if isinstance(value, float) else str(value)


def _estimate(found: dict[str, Any]) -> str:
    return f"{found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}] (n = {found.get('count', '?')})"


def _set_aside(console: Console, folder: Path, summary: dict[str, Any]) -> None:
    """What was not trained on, in words: rows in quarantine, updates that were left out."""
    quarantine = summary.get("quarantine") or {}
    if quarantine.get("count"):
        reasons = "; ".join(f"{reason}: {count:,}" for reason, count in list(quarantine["reasons"].items())[:3])
        where = ", ".join(map(str, sorted(folder.glob("quarantine-*.jsonl"))))
        text = f"[bold yellow]{quarantine['count']:,} rows were set aside[/] ({escape(reasons)}): {escape(where)}"
        console.print(text, soft_wrap=True, highlight=False)
    if left_out := summary.get("steps_left_out"):
        text = f"[bold yellow]in {left_out:,} steps an update was left out[/]: its loss or gradient was not finite. Their rows: "
        console.print(text + escape(str(folder / "skipped")), soft_wrap=True, highlight=False)


def _gain(found: dict[str, Any]) -> str:
    gain = "{value:+.3f} [{low:+.3f}, {high:+.3f}]".format(**found["gain"])
    return f"{found['before']['value']:.3f} to {found['after']['value']:.3f}, gain {gain}"


def _alarms(console: Console, alarms: Sequence[dict[str, Any]]) -> None:
    for alarm in alarms:
        text = (
            f"[bold yellow]{alarm['detector']}[/] at step {alarm['step']}: {escape(alarm['message'])}. {escape(alarm['advice'])}"
        )
        console.print(text, soft_wrap=True, highlight=False)
