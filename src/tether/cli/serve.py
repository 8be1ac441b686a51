"""Commands that serve a run elsewhere: responses, and rewards."""

from __future__ import annotations

from typing import Annotated

import typer

from tether.cli.progress import starting


def engine(
    model: Annotated[str, typer.Option(help="A model's folder or name: the base under the adapters that a run sends.")],
    host: Annotated[str, typer.Option(help="Where to listen; only within a network that is trusted.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16; as in the run that it samples for.")] = "auto",
    rows: Annotated[int, typer.Option(min=1, help="Responses decoded at once.")] = 64,
) -> None:
    """Serve tether's engine to runs with engine.addresses. It takes adapters by name from folders that it can read."""
    with starting("loading the model"):
        from tether.core.config import build
        from tether.models.config import ModelConfig
        from tether.run.engines import engine_server
        from tether.run.models import open_model

        loaded = open_model(build(ModelConfig, {"source": model, "dtype": dtype}, where="tether engine"))
    server = engine_server(loaded, (host, port), rows)
    typer.echo("Sampling at http://{}:{}; Ctrl-C ends it.".format(*server.server_address[:2]))
    server.serve_forever()


def rewards(
    recipe: Annotated[str, typer.Argument(help="A recipe, or the settings that a run wrote for its servers.")],
    stage: Annotated[str | None, typer.Argument(help="Which of its stages; unset: the one that samples.")] = None,
    host: Annotated[str, typer.Option(help="Where to listen; only within a network that is trusted.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8100,
) -> None:
    """Serve a stage's reward to runs with reward_servers.addresses. It runs the reward function that the recipe names."""
    with starting("loading what scores"):
        from tether.run.reward_servers import server_of

        server = server_of(recipe, stage, (host, port))
    typer.echo("Scoring at http://{}:{}; Ctrl-C ends it.".format(*server.server_address[:2]))
    server.serve_forever()
