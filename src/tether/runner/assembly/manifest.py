"""The model of a stage, what its manifest says of the machine, and which weights gave answers."""

from __future__ import annotations

from pathlib import Path

from tether.core.digest import digest
from tether.core.rundir import RunDirectory, environment, file_digest, read_if_there, read_json
from tether.core.types import Facts
from tether.models.loading import LoadedModel
from tether.runner.assembly.job import AnyJob
from tether.runner.assembly.models import open_model
from tether.runner.assembly.roles import newest_policy
from tether.stages.learner.ranks import Ranks


def stage_model(job: AnyJob, run: RunDirectory, ranks: Ranks) -> LoadedModel:
    """The model from which a job starts, whose digest is noted in the run."""
    loaded = open_model(job.model, seed=job.seed, mesh=ranks.mesh)
    note_machine(run, loaded)
    return loaded


def note_machine(run: RunDirectory, loaded: LoadedModel, **more: object) -> None:
    """Write into the manifest what a stage computes with; of a stage that goes on with something
    else, the model notes what.
    """
    before = read_json(run.path / "manifest.json")
    now = loaded.manifest()
    code = environment()["code_digest"]
    if (began := before.get("code_digest", code)) != code:
        loaded.note(
            f"{run.path.name} began with other code of tether (code_digest {began}, now {code}): "
            "the end may differ from that of a run in one go. For the same bits, go on with that "
            "code, or begin anew with run=PATH",
        )
    pairs = zip(_decisive(before), _decisive({**environment(), **now}), strict=True)
    if changes := [f"{new} after {old}" for old, new in pairs if old and old != new]:
        loaded.note(
            f"{run.path.name} goes on with {'; '.join(changes)}: numbers are rounded otherwise "
            "from here on, and the end is not that of a run in one go (docs/trust/determinism.md)",
        )
    run.update_manifest(**now, **more)


def _decisive(noted: Facts) -> list[str]:
    """The part of a manifest that decides how numbers are rounded, in words; empty ones where it
    says nothing.
    """
    model = noted.get("model")
    threads = noted.get("threads")
    kernels = noted.get("cpu_kernels")
    own = [name for name in kernels or () if name != "allocator"]  # which rounds nothing
    return [
        f"torch {noted.get('packages', {}).get('torch')}",
        f"{noted.get('processor')}",
        f"{threads} thread{'s' * (threads != 1)}" if threads else "",
        f"{model['dtype']} on {model['device']}" if model else "",
        ""
        if kernels is None
        else f"CPU kernels for {' and '.join(own)}"
        if own
        else "no CPU kernels",
    ]


def weights_of(source: str | Path) -> str:
    """The digest of the weights of a model, a run's stage or a trained role; for a model without a
    folder, its name.
    """
    folder = Path(source).expanduser()
    folder = newest_policy(folder) or folder
    if not folder.is_dir():
        return str(source)
    files = file_digest(sorted(folder.rglob("*.safetensors")))
    return digest([[str(Path(file).relative_to(folder)), one] for file, one in files.items()])


def drawn_from(folder: Path) -> str | None:
    """The weights that gave the answers in a folder; None without answers, or where they do not
    name them.
    """
    return read_if_there(folder / "answers.json").get("weights")
