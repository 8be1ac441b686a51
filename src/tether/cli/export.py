"""The command that turns a result into a folder that other programs load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    source: Annotated[str, typer.Argument(help="The folder of a run, stage, trained role or checkpoint; or a model source.")],
    output: Annotated[Path, typer.Argument(help="A new folder.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Keep the adapter apart, for peft, instead of merging it.")] = False,
    dtype: Annotated[str, typer.Option(help="auto (as it was trained), float32, bfloat16 or float16.")] = "auto",
    shard_size: Annotated[str, typer.Option(help="Largest size of one file of weights.")] = "5GB",
) -> None:
    """A policy or reward model as a plain folder for transformers, vLLM, TRL or peft, read again and with a model card."""
    from rich.console import Console

    from tether.pipelines.exporting import export_model

    found = export_model(source, output, adapter=adapter, dtype=dtype, shard_size=shard_size)
    console, unit = Console(soft_wrap=True, highlight=False), "units of its score"
    if found["kind"] == "policy":
        unit = "nats a token"
    console.print(f"{found['kind']} of {found['source']}: {found['folder']}")
    console.print(f"Read again, it differs by at most {found['difference']:.2g} {unit}.")
    if found["constant"]:
        console.print(f"Scores lack a constant of {found['constant']:.6g}, which tether adds again; differences are right.")
    if not found["same_ids"]:
        console.print("[yellow]The chat template's text, tokenized at once, does not always give the ids that were trained on.")
