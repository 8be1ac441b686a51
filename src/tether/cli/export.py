"""The command that turns a result into a folder that other programs load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export_result(
    source: Annotated[str, typer.Argument(help="The folder of a run, stage, trained role or checkpoint; or a model source.")],
    output: Annotated[Path, typer.Argument(help="A new folder.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="Keep the adapter apart, for peft, instead of merging it.")] = False,
    dtype: Annotated[str, typer.Option(help="auto (as it was trained), float32, bfloat16 or float16.")] = "auto",
    shard_size: Annotated[str, typer.Option(help="Largest size of one file of weights.")] = "5GB",
    push: Annotated[str | None, typer.Option(help="Upload the folder to the hub, as owner/name.")] = None,
    private: Annotated[bool, typer.Option("--private", help="The repository of --push is private.")] = False,
) -> None:
    """Write a policy or reward model as a plain folder for transformers, vLLM, TRL or peft, with a model card."""
    from rich.console import Console

    from tether.cli.progress import starting
    from tether.core.errors import ConfigError
    from tether.run.export import export_model
    from tether.run.push import open_hub, push_folder

    if private and push is None:
        raise ConfigError("--private has no effect without --push owner/name. Add that, or leave it out")
    hub = open_hub(push) if push else None
    console = Console(soft_wrap=True, highlight=False)
    with starting("loading, writing and reading again"):
        made = export_model(source, output, adapter=adapter, dtype=dtype, shard_size=shard_size)
    console.print(f"{made['kind']} of {made['source']}: {made['folder']}")
    unit = "nats a token" if made["kind"] == "policy" else "units of its score"
    rounding = "" if made["difference"] < 0.01 else ": merged weights were rounded to 16 bits, which --dtype float32 avoids"
    console.print(f"Read again, it differs by at most {made['difference']:.2g} {unit}{rounding}.")
    if made["constant"]:
        console.print(f"Scores lack a constant of {made['constant']:.6g}, which tether adds again; differences are right.")
    if not made["same_ids"]:
        console.print("[yellow]The chat template's text, tokenized at once, does not always give the ids that were trained on.")
    if push is not None:
        console.print(f"Uploaded to {push_folder(hub, output, push, private=private)}")
