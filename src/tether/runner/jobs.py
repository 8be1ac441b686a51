"""Jobs of a recipe: each stage to run, in order, with everything that it depends on.

The list comes from the recipe alone, without models or files. Arms, rounds and the combinations of
a sweep become jobs here and nowhere else. A job has parts where its stage is made of several
trainings (`Section.parts`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tether.core.digest import digest
from tether.core.errors import ConfigError
from tether.core.types import Json, Prompt
from tether.runner.assembly.job import AnyJob, Job
from tether.runner.folder import round_folder
from tether.settings.reading import build, set_key
from tether.settings.recipe import BaseRecipe
from tether.settings.section import Section
from tether.settings.sweep import combinations


def expand(recipe: BaseRecipe, stages: Sequence[str] | None = None) -> list[AnyJob]:
    """The jobs of a recipe in the order in which they run.

    Args:
        stages: names of stages and arms to run, in their order; None: all that the recipe has. The
            jobs of a sweep are in the order of the recipe.

    Raises:
        ConfigError: the recipe has no such stage.
    """
    if recipe.sweep is not None:
        return _swept(recipe, stages)
    names = recipe.stages if stages is None else stages
    if not recipe.repeat:
        return [_job(recipe, name, None) for name in names]
    jobs = [_job(recipe, name, None) for name in names if name == "sft"]
    for number in range(1, recipe.repeat + 1):
        jobs += [_job(recipe, name, number) for name in names if name != "sft"]
    return jobs


def with_parts(jobs: Iterable[AnyJob]) -> list[AnyJob]:
    """All jobs with their parts, each part before the job that needs it."""
    return [each for job in jobs for each in (*job.parts, job)]


def by_run(jobs: Iterable[AnyJob]) -> list[list[AnyJob]]:
    """The jobs of each run, in their order; a sweep has one for each combination."""
    groups: dict[Path, list[AnyJob]] = {}
    for job in jobs:
        groups.setdefault(job.root, []).append(job)
    return [*groups.values()]


def before(job: AnyJob, jobs: Sequence[AnyJob]) -> list[AnyJob]:
    """The jobs on which a job depends, directly or through others, in their order."""
    needs = {*job.needs}
    chosen = list[AnyJob]()
    for other in reversed(jobs):
        if other.folder in needs and other.folder != job.folder:
            chosen.insert(0, other)
            needs |= {*other.needs}
    return chosen


def _job(recipe: BaseRecipe, name: str, number: int | None) -> AnyJob:
    section_of = recipe.section
    home = Path(recipe.run)
    settings = section_of(name)
    if settings is None:
        raise ConfigError(f"the recipe has no [{name}] section")
    place = round_folder(home, number)
    earlier = tuple(round_folder(home, before) for before in range(1, number or 1))
    start = home / "sft" if name != "sft" and section_of("sft") is not None else None
    job = Job(
        name=name,
        kind=recipe.kind(name),
        settings=settings,
        folder=place / name,
        model=recipe.model if start is None else recipe.model.on_folder(start / "model"),
        seed=recipe.seed,
        round=number,
        earlier=earlier,
        start=start,
        scorer=settings.scorer_in(place),
        on=recipe.on,
    )
    if recipe.from_pairs(name) and settings.kind is Prompt:
        job = replace(job, prompts=section_of("pairs").data)
    if recipe.from_pairs(name):
        return replace(job, pairs=tuple(at / "pairs" for at in (*earlier, place)))
    if job.kind.makes != "verdict":
        return job
    return replace(
        job,
        policies={policy: place / policy for policy in recipe.policies},
        others={other: section_of(other) for other in recipe.stages if other != name},
    )


def variants(recipe: BaseRecipe) -> list[BaseRecipe]:
    """The recipes of a sweep, one a combination, each with a folder of its own in `sweep/`; the
    recipe itself where it has none.

    Raises:
        ConfigError: a key is unknown, a value does not fit, or two values are the same.
    """
    if recipe.sweep is None:
        return [recipe]
    plain = recipe.model_dump_json(exclude_unset=True, exclude={"sweep"})
    recipes: dict[str, BaseRecipe] = {}
    for folder, chosen in combinations(recipe.sweep):
        values = {**json.loads(plain), "run": str(Path(recipe.run) / "sweep" / folder)}
        where = f"sweep with {folder!r:.200}"
        for key, value in chosen.items():
            set_key(values, key, value, where)
        variant = build(type(recipe), values, where=where)
        content = variant.model_dump_json(exclude_unset=True, exclude={"run"})
        if same := recipes.get(content):
            raise ConfigError(
                f"{where}: these values are those of {Path(same.run).name!r:.200} in another form. "
                "Leave one of them out",
            )
        recipes[content] = variant
    return [*recipes.values()]


def _swept(recipe: BaseRecipe, stages: Sequence[str] | None) -> list[AnyJob]:
    """The jobs of all combinations, each once."""
    jobs = {job.folder: job for _, own in _combined(recipe) for job in own}
    names = recipe.stages if stages is None else stages
    for name in names:
        if recipe.section(name) is None:
            raise ConfigError(f"the recipe has no [{name}] section")
    return [job for job in jobs.values() if job.name in names]


def _combined(recipe: BaseRecipe) -> Iterator[tuple[Json, list[AnyJob]]]:
    """The value of each key in each combination, and all of its jobs. A job that depends on no
    swept key runs once for all combinations. A job of the recipe without its sweep keeps its
    folder.
    """
    values = recipe.model_dump(mode="json", exclude_unset=True, exclude={"sweep"})
    plain = build(type(recipe), values, where="recipe")
    own = dict(_identified(plain))
    jobs: dict[str, AnyJob] = {}
    for variant, (_, chosen) in zip(
        variants(recipe),
        combinations(recipe.sweep or {}),
        strict=True,
    ):
        folders: dict[Path, Path] = {}
        mine = []
        for identity, job in _identified(variant):
            same = jobs.get(identity) or own.get(identity) or _moved(job, folders)
            jobs.setdefault(identity, same)
            folders[job.folder] = same.folder
            mine.append(same)
        yield chosen, mine


def sweep_table(recipe: BaseRecipe) -> list[Json]:
    """The combinations of a sweep: the value of each key, and by stage its folder within the run;
    of rounds the last one's.
    """
    root = Path(recipe.run)
    return [
        {
            "values": chosen,
            "stages": {job.name: job.folder.relative_to(root).as_posix() for job in jobs},
        }
        for chosen, jobs in _combined(recipe)
    ]


def _identified(recipe: BaseRecipe) -> Iterator[tuple[str, AnyJob]]:
    """Jobs with a digest of everything that decides their results, those before them included."""
    above = recipe.model.model_dump_json() + str(recipe.deterministic)
    identities: dict[Path, str] = {}
    for job in expand(recipe):
        settings = job.settings.model_dump_json(exclude_unset=True)
        parts = [above, job.title, str(job.seed), settings]
        parts += [identities.get(path, str(path)) for path in (*job.needs, *job.earlier)]
        identity = identities[job.folder] = digest(parts)
        yield identity, job


def _moved(job: AnyJob, folders: Mapping[Path, Path]) -> AnyJob:
    """The job, with the folders of its dependencies where they are."""
    scorer = job.scorer
    start = job.start
    model = job.model
    if scorer is not None and scorer.parent in folders:
        scorer = folders[scorer.parent] / scorer.name
    if start is not None and start in folders:
        start = folders[start]
        model = model.on_folder(start / "model")
    return replace(
        job,
        start=start,
        model=model,
        pairs=tuple(folders.get(path, path) for path in job.pairs),
        scorer=scorer,
        policies={name: folders.get(path, path) for name, path in job.policies.items()},
    )


def combination_folder(job: AnyJob, root: Path) -> Path:
    """The folder of the combination of a sweep that a job belongs to; `root` for other jobs."""
    parts = job.folder.relative_to(root).parts if job.folder.is_relative_to(root) else ()
    return root.joinpath(*parts[:2]) if parts[:1] == ("sweep",) else root


def job_row(job: AnyJob, root: Path) -> tuple[str, str, str, str]:
    """Name, dependencies, rows and folder of a job, for a table.

    Args:
        root: the run; folders below it, and below the job's combination, are shown without it.
    """
    own = combination_folder(job, root)

    def short(path: Path) -> str:
        for folder in (own, root):
            if path.is_relative_to(folder):
                return str(path.relative_to(folder))
        return str(path)

    needs = [short(path) for path in (job.start, job.scorer) if path is not None]
    needs += map(short, job.policies.values())
    rows = ", ".join(map(short, job.pairs)) or _named(job.settings)
    if job.part:
        needs += [short(job.place / name) for name in job.part.needs]
        rows = rows or short(job.place)
    title = job.title
    if counts := Counter(part.part.kind for part in job.parts if part.part):
        parts = (f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items())
        title = f"{title} ({', '.join(parts)})"
    return title, ", ".join(needs), rows, short(job.folder)


def _named(settings: Section) -> str:
    """The data of a section, as its recipe names them; of absolute paths the end."""
    if settings.data is None:
        return ""
    path = settings.data.path
    return ", ".join(map(_short_path, [path] if isinstance(path, str) else path))


def _short_path(name: str) -> str:
    path = Path(name)
    return str(Path("…", *path.parts[-2:])) if path.is_absolute() else name
