"""Result of a method: the run's folder, with its numbers, its models, its page, and the way to
continue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from tether.cli.tools.reward_bench import scorer_of
from tether.core.errors import DataError
from tether.core.rundir import RunDirectory, missing_run, read_jsonl, stage_folder
from tether.core.types import Json, Prompt, Rollout, Sampling, assistant
from tether.data.formats.fields import turns
from tether.rollout.conversations import as_rollout
from tether.runner.assembly.roles import load_policy, local_engine
from tether.runner.call import finished_stages
from tether.runner.folder import remembered
from tether.settings.stages import STAGES


class Run:
    """A run's folder. `metrics`, `samples` and `alarms` are of `stage`: the one that a call has
    run, else the last that trained.

    A run is a recipe that grows: handed to the next method as its model, it gets one more stage.
    """

    def __init__(self, path: str | Path, stage: str = "") -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise missing_run(self.path)
        trained = (name for name in reversed(self.stages) if STAGES[name].makes != "verdict")
        self.stage = stage or next(trained, "")
        self._whole = not stage and (self.path / "summary.json").is_file()

    @property
    def stages(self) -> list[str]:
        """Names of the finished stages, in the order of a recipe."""
        return finished_stages(self.path)

    @property
    def _folder(self) -> Path:
        return stage_folder(self.path, self.stage)

    @property
    def summary(self) -> Json:
        """The numbers of the stage, or of the whole run, at its end (summary.json)."""
        return RunDirectory(self.path if self._whole else self._folder).summary()

    def metrics(self) -> list[Json]:
        """The stage's numbers, a dict a step: `pandas.DataFrame(run.metrics())`."""
        return RunDirectory(self._folder).metrics()

    def samples(self) -> list[Json]:
        """Texts that were sampled, a dict each, with their step."""
        return list(read_jsonl(self._folder / "samples.jsonl"))

    @property
    def alarms(self) -> list[Json]:
        """Alarms of the detectors."""
        return RunDirectory(self._folder).alarms()

    @property
    def pairs(self) -> Path:
        """The file of judged pairs."""
        return stage_folder(self.path, "pairs") / "pairs.jsonl"

    @cached_property
    def policy(self) -> Policy:
        """The run's newest policy, ready to answer."""
        return Policy(self.path)

    @cached_property
    def reward_model(self) -> RewardModel:
        """The run's trained reward model, ready to score."""
        return RewardModel(self.path)

    @property
    def verdict(self) -> str:
        """The result and its judge, the interval, the control: a line each."""
        from tether.cli.terminal.results import concluded, to_judge

        verdict, _ = concluded(self.path, to_judge(self.path, in_python=True))
        return "\n".join((verdict.headline, *verdict.sentences))

    @property
    def report(self) -> Report:
        """The path of the run's page; called, it writes the page anew."""
        return Report(self.path / "report.html")

    def export(self, folder: str | Path, **options: Any) -> Path:
        """Write the newest policy as a plain folder of transformers (`adapter=True`: of peft), with
        a model card; its path.

        Args:
            options: `adapter`, `dtype`, `shard_size`, `gguf`, as of `tether export`.

        Raises:
            ConfigError: the folder exists.
        """
        from tether.cli.tools.export import export_model

        return Path(export_model(str(self.path), Path(folder), **options)["folder"])

    def sections(self) -> Json:
        """The recipe that was run here so far.

        Raises:
            RunError: none was.
        """
        return remembered(self.path)[1]["config"]

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, stages={self.stages})"

    def _repr_html_(self) -> str:
        from tether.watch.report.narrative import conclusion, loop_conclusion
        from tether.watch.report.reading import read_journey, read_loop

        verdict = (
            loop_conclusion(loop)
            if (loop := read_loop(self.path))
            else conclusion(read_journey(self.path))
        )
        lines = "".join(
            f"<p>{escape(text)}</p>" for text in (*verdict.sentences, *verdict.warnings)
        )
        return f"<h4>{escape(verdict.headline)}</h4>{lines}<p><code>{escape(str(self.path))}</code></p>"


class Report(str):
    """The path of a page, which a notebook shows as the page itself."""

    def __call__(self, *others: Run) -> Report:
        """Write the run's page, or with others one that lays all of them over each other."""
        from tether.watch.report.overlay import write_overlay
        from tether.watch.report.page import write_report

        paths = [Path(self).parent, *(other.path for other in others)]
        return Report(write_overlay(paths) if others else write_report(paths[0]))

    def _repr_html_(self) -> str:
        page = escape(Path(self).read_text(encoding="utf-8"), quote=True)
        return (
            f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 1px solid '
            '#8888" title="report"></iframe>'
        )


class Policy:
    """A model that answers: of a run, of a role's folder, or any model source."""

    def __init__(self, source: str | Path) -> None:
        self.source = str(source)
        self.role, self.loaded = load_policy(self.source)
        self.engine = local_engine(self.role, self.loaded)

    def generate(
        self,
        prompts: str | Sequence[object],
        *,
        samples: int = 1,
        max_new_tokens: int = 128,
        temperature: float = 0.7,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> Any:
        """Answers: a text for a prompt, a list for a list of prompts. With `samples` > 1, each text
        is replaced by a list of texts.

        Args:
            prompts: texts, or conversations (lists of messages).
            max_new_tokens: the longest answer, in tokens.
            temperature: 0 takes the likeliest token.
            seed: the same seed gives the same answers.
        """
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], Mapping))
        rows = [
            Prompt(turns(row, "user", "prompts"), str(n))
            for n, row in enumerate([prompts] if single else prompts)
        ]
        sampling = Sampling(max_new_tokens, temperature, top_k, top_p)
        groups = self.engine.generate(rows, sampling, num_samples=samples, seed=seed)
        answers = [[rollout.text for rollout in group.rollouts] for group in groups]
        shaped = answers if samples > 1 else [texts[0] for texts in answers]
        return shaped[0] if single else shaped

    def chat(self) -> None:
        """Talk with it on the terminal; an empty line ends."""
        from tether.cli.terminal.talk import talk

        talk(self.source, Sampling(256, 0.7, top_p=0.95))


class RewardModel:
    """A model that scores: of a run, or of the folder of a trained reward model."""

    def __init__(self, source: str | Path) -> None:
        self.source, self.encoder = scorer_of(str(source))

    def score(self, prompts: Sequence[object], responses: Sequence[str]) -> list[float | None]:
        """A number for each response, in the reward model's own units; None where scoring failed.

        Args:
            prompts: texts, conversations (lists of messages), or records of `tether.core.types`.
        """
        rollouts: dict[int, Rollout] = {}
        for place, (prompt, text) in enumerate(zip(prompts, responses, strict=True)):
            messages = (
                prompt.messages if isinstance(prompt, Prompt) else turns(prompt, "user", "prompts")
            )
            # an empty response, or a prompt that the template refuses
            with contextlib.suppress(DataError):
                rollouts[place] = as_rollout((*messages, assistant(text)), self.encoder)
        scores = dict(
            zip(rollouts, self.source.score([*rollouts.values()]) if rollouts else (), strict=True),
        )
        return [scores[place].value if place in scores else None for place in range(len(responses))]
