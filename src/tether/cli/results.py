"""What the commands that train show at their end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tether.core.trend import vague


def interval(estimate: dict[str, Any], percent: bool = False) -> str:
    form = "{:.1%} [{:.1%}, {:.1%}]" if percent else "{:+.2f} [{:+.2f}, {:+.2f}]"
    if estimate["low"] is None:
        form = form.split(" ", maxsplit=1)[0]
    return form.format(estimate["value"], estimate["low"], estimate["high"])


def verdict(summary: dict[str, Any]) -> Table:
    table = Table(title="What happened", show_header=False, title_justify="left")
    reward, rows = summary["reward"], []
    rows.append(("reward model, held-out accuracy", interval(reward["heldout_accuracy"], percent=True)))
    if "gold_accuracy" in reward:
        rows.append(("  against the true order", interval(reward["gold_accuracy"], percent=True)))
    for arm, result in summary["arms"].items():
        rows.append((f"{arm}: wins against SFT, by gold", interval(result["gold_win_rate"], percent=True)))
        rows.append(("  gold gain", interval(result["gold_gain"])))
        if "over_best_decoding" in result:
            rows += [(f"  {name}", value) for name, value in _decoded(result)]
        gain = result["proxy_gain"]
        rows.append(("  proxy gain", interval(gain) if isinstance(gain, dict) else f"{gain:+.2f}"))
        rows.append(("  KL", _kl(result)))
    rows.append(("time, memory", f"{summary['seconds'] / 60:.1f} minutes, {summary['peak_rss_bytes'] / 1e9:.1f} GB at most"))
    for row in rows:
        table.add_row(*row)
    return table


def _decoded(control: dict[str, Any]) -> list[tuple[str, str]]:
    """What the policy gains over the best decoding of the model before, and the verdict that follows from it."""
    from tether.report.decoding import WORDS, named

    over = control["over_best_decoding"]
    won = f"{interval(over['win_rate'], percent=True)} won, {interval(over)}"
    return [(f"over its best, {named(over['temperature'])}", won), ("verdict", WORDS[control["verdict"]][1])]


def stage_table(name: str, summary: dict[str, Any]) -> Table:
    table = Table(title=name, show_header=False, title_justify="left")
    shown: dict[str, Any] = dict(summary)
    if shown.get("kl") is not None:
        shown["kl"] = _kl(summary)
    shown.pop("kl_noise", None)
    for key, value in shown.items():
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
            for line, told in _measured(value):
                table.add_row(f"{key}: {line}", told)
        elif key == "tests":
            for test, result in value.items():
                table.add_row(f"{test}: accuracy", _estimate(result["accuracy"]))
        elif isinstance(value, dict) and value and all(isinstance(v, (int, float)) for v in value.values()):
            table.add_row(key, ", ".join(f"{k}: {v:.4g}" for k, v in value.items()))
    return table


def _measured(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What the held-out prompts say: every score, what decoding alone gives, and which weights were kept."""
    rows = [(part, _gain(value)) for part, value in found.items() if isinstance(value, dict) and "gain" in value]
    rows += _decoded(found) if "over_best_decoding" in found else []
    return [*rows, ("weights kept", f"of step {found['kept_step']}; the highest score was at {found['best_step']}")]


def _plain(key: str, value: float | str) -> tuple[str, str]:
    if key == "peak_rss_bytes":
        return "peak memory", f"{float(value) / 1e9:.2f} GB"
    if key == "seconds":
        return "time", f"{value:.0f} s" if float(value) < 600 else f"{float(value) / 60:.0f} minutes"
    return key, f"{value:.4g}" if isinstance(value, float) else str(value)


def _kl(summary: dict[str, Any]) -> str:
    kl, noise = summary["kl"], summary.get("kl_noise")
    why = vague(kl, noise)
    return f"{kl:.3g}{'' if noise is None else f' ± {noise:.2g}'} nats a response{f' ({why})' if why else ''}"


def _estimate(found: dict[str, Any]) -> str:
    bounds = "no interval" if found["low"] is None else f"[{found['low']:.3f}, {found['high']:.3f}]"
    return f"{found['value']:.3f} {bounds} (n = {found.get('count', '?')})"


def set_aside(console: Console, folder: Path, summary: dict[str, Any]) -> None:
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


def show_alarms(console: Console, alarms: Sequence[dict[str, Any]]) -> None:
    for alarm in alarms:
        text = (
            f"[bold yellow]{alarm['detector']}[/] at step {alarm['step']}: {escape(alarm['message'])}. {escape(alarm['advice'])}"
        )
        console.print(text, soft_wrap=True, highlight=False)
