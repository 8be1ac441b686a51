"""Jobs of a recipe: each stage to run, in order, with everything that it depends on.

The list comes from the recipe alone, without models or files. Arms, rounds and the combinations of
a sweep become jobs here and nowhere else. A job has parts where its stage is made of several
trainings (`settings.parts`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tether.core.digest import digest
from tether.core.errors import ConfigError
from tether.core.types import Json
from tether.runner.folder import round_folder
from tether.settings.parts import StagePart, parts_of
from tether.settings.reading import build, set_key
from tether.settings.recipe import BaseRecipe
from tether.settings.sampling import RewardedSection
from tether.settings.section import Section
from tether.settings.stages import StageKind
from tether.settings.sweep import combinations


@dataclass(frozen=True, kw_only=True)
class Job:
    """A stage to run.

    Args:
        recipe: what the stage belongs to; of a sweep, the recipe of one combination.
        name: of the stage in its recipe, or of an arm: `ppo`, `ppo-beta0`.
        kind: the row of the table of stages.
        settings: the section.
        folder: of its files; a finished one holds `summary.json`.
        round: its number, of a recipe that repeats.
        earlier: folders of the rounds before this one.
        start: folder of the fine-tuned model from which it starts; None: the recipe's model.
        pairs: folders of the [pairs] stages whose comparisons, or prompts, the stage uses; empty:
            the stage reads its own data.
        scorer: folder, or run, of the trained model that scores its answers.
        policies: folders, by name, of the policies that it compares with their start.
        seed: of everything random.
        part: the row of `parts_of` that this job runs; None: the job is a whole stage.
    """

    recipe: BaseRecipe
    name: str
    kind: StageKind
    settings: Section
    folder: Path
    round: int | None = None
    earlier: tuple[Path, ...] = ()
    start: Path | None = None
    pairs: tuple[Path, ...] = ()
    scorer: Path | None = None
    policies: Mapping[str, Path] = field(default_factory=dict)
    seed: int = 0
    part: StagePart | None = None

    @property
    def parts(self) -> tuple[Job, ...]:
        """The trainings within this stage, in their order: members, objectives, a test model, a
        student, or rounds. The stage runs them itself, on one base and in one lock.
        """
        return tuple(
            replace(
                self,
                name=f"{self.name}/{part.name}",
                settings=part.settings,
                folder=self.folder / part.name,
                part=part,
            )
            for part in (parts_of(self.settings) if self.part is None else ())
        )

    @property
    def needs(self) -> tuple[Path, ...]:
        """Folders of the jobs on which this one depends."""
        scorers = () if self.scorer is None else (self.scorer.parent,)
        starts = () if self.start is None else (self.start,)
        return (*starts, *self.pairs, *self.policies.values(), *scorers)

    @property
    def place(self) -> Path:
        """The folder that holds this job's folder and those of its round."""
        return self.folder.parent

    @property
    def title(self) -> str:
        """Name for people, with the round."""
        stage, slash, part = self.name.partition("/")
        return self.name if self.round is None else f"{stage} {self.round}{slash}{part}"


def expand(recipe: BaseRecipe, stages: Sequence[str] | None = None) -> list[Job]:
    """The jobs of a recipe in the order in which they run.

    Args:
        stages: names of stages and arms to run, in their order; None: all that the recipe has. The
            jobs of a sweep are in the order of the recipe.

    Raises:
        ConfigError: the recipe has no such stage.
    """
    if recipe.sweep is not None:
        return _swept(recipe, stages)
    names = list(recipe.stages if stages is None else stages)
    again = [name for name in names if name != "sft"] if recipe.repeat else []
    once = [_job(recipe, name, None) for name in names if name not in again]
    rounds = range(1, (recipe.repeat or 0) + 1)
    return [*once, *(_job(recipe, name, number) for number in rounds for name in again)]


def with_parts(jobs: Iterable[Job]) -> list[Job]:
    """All jobs with their parts, each part before the job that needs it."""
    return [each for job in jobs for each in (*job.parts, job)]


def by_recipe(jobs: Iterable[Job]) -> list[list[Job]]:
    """The jobs of each recipe, in their order; a sweep has a recipe for each combination."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.recipe.run, []).append(job)
    return [*groups.values()]


def before(job: Job, jobs: Sequence[Job]) -> list[Job]:
    """The jobs on which a job depends, directly or through others, in their order."""
    needs, chosen = {*job.needs}, list[Job]()
    for other in reversed(jobs):
        if other.folder in needs and other.folder != job.folder:
            chosen.insert(0, other)
            needs |= {*other.needs}
    return chosen


def _job(recipe: BaseRecipe, name: str, number: int | None) -> Job:
    root = Path(recipe.run)
    settings = recipe.section(name)
    if settings is None:
        raise ConfigError(f"the recipe has no [{name}] section")
    place = round_folder(root, number)
    earlier = tuple(round_folder(root, before) for before in range(1, number or 1))
    return Job(
        recipe=recipe,
        name=name,
        kind=recipe.kind(name),
        settings=settings,
        folder=place / name,
        round=number,
        earlier=earlier,
        start=root / "sft" if name != "sft" and recipe.section("sft") is not None else None,
        pairs=tuple(at / "pairs" for at in (*earlier, place)) if recipe.from_pairs(name) else (),
        scorer=_scorer(settings, place),
        policies={n: place / n for n in recipe.policies} if name == "evaluate" else {},
        seed=recipe.seed,
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


def _swept(recipe: BaseRecipe, stages: Sequence[str] | None) -> list[Job]:
    """The jobs of all combinations, each once."""
    jobs = {job.folder: job for _, own in _combined(recipe) for job in own}
    names = recipe.stages if stages is None else stages
    if unknown := [name for name in names if recipe.section(name) is None]:
        raise ConfigError(f"the recipe has no [{unknown[0]}] section")
    return [job for job in jobs.values() if job.name in names]


def _combined(recipe: BaseRecipe) -> Iterator[tuple[Json, list[Job]]]:
    """The value of each key in each combination, and all of its jobs. A job that depends on no
    swept key runs once for all combinations. A job of the recipe without its sweep keeps its
    folder.
    """
    values = recipe.model_dump(mode="json", exclude_unset=True, exclude={"sweep"})
    plain = build(type(recipe), values, where="recipe")
    own = dict(_identified(plain))
    jobs: dict[str, Job] = {}
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


def _identified(recipe: BaseRecipe) -> Iterator[tuple[str, Job]]:
    """Jobs with a digest of everything that decides their results, those before them included."""
    above = recipe.model.model_dump_json() + str(recipe.deterministic)
    identities: dict[Path, str] = {}
    for job in expand(recipe):
        parts = [above, job.title, str(job.seed), job.settings.model_dump_json(exclude_unset=True)]
        parts += [identities.get(path, str(path)) for path in (*job.needs, *job.earlier)]
        identities[job.folder] = digest(parts)
        yield identities[job.folder], job


def _moved(job: Job, folders: Mapping[Path, Path]) -> Job:
    """The job, with the folders of its dependencies where they are."""
    scorer = job.scorer
    if scorer is not None and scorer.parent in folders:
        scorer = folders[scorer.parent] / scorer.name
    return replace(
        job,
        start=None if job.start is None else folders.get(job.start, job.start),
        pairs=tuple(folders.get(path, path) for path in job.pairs),
        scorer=scorer,
        policies={name: folders.get(path, path) for name, path in job.policies.items()},
    )


def _scorer(settings: Section, place: Path) -> Path | None:
    if settings.scorer is None:
        return None
    if isinstance(settings, RewardedSection) and settings.reward_model is not None:
        return Path(settings.reward_model)
    return place / settings.scorer / "model"


def combination_folder(job: Job, root: Path) -> Path:
    """The folder of the combination of a sweep that a job belongs to; `root` for other jobs."""
    parts = job.folder.relative_to(root).parts if job.folder.is_relative_to(root) else ()
    return root.joinpath(*parts[:2]) if parts[:1] == ("sweep",) else root


def job_row(job: Job, root: Path) -> tuple[str, str, str, str]:
    """Name, dependencies, rows and folder of a job, for a table.

    Args:
        root: the run; folders below it, and below the job's combination, are shown without it.
    """
    own = combination_folder(job, root)

    def short(path: Path) -> str:
        above = next((folder for folder in (own, root) if path.is_relative_to(folder)), None)
        return str(path.relative_to(above) if above else path)

    needs = [short(path) for path in (job.start, job.scorer) if path is not None]
    needs += map(short, job.policies.values())
    needs += [short(job.place / name) for name in job.part.needs] if job.part else []
    rows = ", ".join(map(short, job.pairs)) or _named(job.settings)
    counts = Counter(part.part.kind for part in job.parts if part.part)
    parts = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items())
    return (
        f"{job.title} ({parts})" if parts else job.title,
        ", ".join(needs),
        rows or (short(job.place) if job.part else ""),
        short(job.folder),
    )


def _named(settings: Section) -> str:
    """The data of a section, as its recipe names them; of absolute paths the end."""
    if settings.data is None:
        return ""
    path = settings.data.path
    return ", ".join(map(_short_path, [path] if isinstance(path, str) else path))


def _short_path(name: str) -> str:
    path = Path(name)
    return str(Path("…", *path.parts[-2:])) if path.is_absolute() else name
