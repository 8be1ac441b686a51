"""Collecting preferences in a recipe: a policy answers prompts, and a judge compares chosen pairs
of answers.

The method follows Stiennon et al. 2020 (https://arxiv.org/abs/2009.01325). There are three kinds of
judges: a language model with a rubric, people who open the pages of a store, or a function. A
function scores answers, and simulated annotators vote by these scores
(https://arxiv.org/abs/2210.10760). Answers and pairs are stored as they come, so that an
interrupted collection continues.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path

from tether.core.budget import time_limit
from tether.core.command import command_line
from tether.core.digest import digest
from tether.core.errors import ConfigError, DataError, RunError, TetherError
from tether.core.protocols import count_of, doing
from tether.core.rundir import (
    RunDirectory,
    append_jsonl,
    read_json,
    read_jsonl,
    write_json,
    write_jsonl,
)
from tether.core.types import Annotation, Comparison, Feedback, Json, Prompt, assistant
from tether.data.formats.messages import TEMPLATE_ARGUMENTS
from tether.data.rows import answer_rows, turns_of, without_faults, write_rows
from tether.data.sources import group_of, look
from tether.judges.constitution import read_rubric
from tether.judges.pairwise import PairJudge
from tether.judges.verdicts import DOWN, QUOTA, SPENT
from tether.models.loading import LoadedModel
from tether.models.trunk import Role
from tether.people.labels.annotators import label_pairs
from tether.people.labels.pairs import PairsConfig, Response, choose_pairs
from tether.runner.assembly.checks import rows_up_to
from tether.runner.assembly.data.fitting import FITTING, Fitting
from tether.runner.assembly.data.prompts import usable_once
from tether.runner.assembly.job import Job
from tether.runner.assembly.judges import judge_model, text_judge
from tether.runner.assembly.manifest import note_machine
from tether.runner.assembly.rewards import learned_reward
from tether.runner.assembly.roles import load_policy, local_engine
from tether.runner.methods.judge_agreement import judge_report, judged_pairs, measure_once, reasons
from tether.settings.judges import FunctionJudge, JudgeConfig
from tether.settings.model import ModelConfig
from tether.settings.pairs import SCORED, PairsSection, Strategy
from tether.stages.learner.loop import endless
from tether.stages.learner.ranks import Ranks

Pair = tuple[int, int, int]
"""Prompt, response, later response: places in the answers."""
Labelled = tuple[list[Comparison], Json]
"""Judged comparisons, and the summary's entries on the judges."""
Answers = Sequence[Json]
"""Rows of `answers.jsonl`: id and prompt, with responses and what a reward model thinks of them."""
MOST_FAILED = 0.1


class WaitingError(TetherError):
    """Comparisons that lie in a store are not all judged yet."""


def train(
    job: Job[PairsSection],
    rows: Sequence[Prompt],
    run: RunDirectory,
    ranks: Ranks,
) -> Json:
    """Leave the judged pairs in `pairs.jsonl`.

    Raises:
        WaitingError: they are not done yet.
        DataError: the answers give no pair.
        RunError: the language model failed too often, or no pair has a verdict.
    """
    section = job.settings
    start = time.perf_counter()
    policy = cache(
        lambda: load_policy(
            str(job.policy or job.model.source),
            job.model,
            job.seed,
        ),
    )
    note = run.path / "left_out.json"
    usable = usable_once(job, rows, section.max_new_tokens, note, lambda: policy()[1])
    prompts = _asked(job, usable)
    answers = _answered(job, prompts, run, policy)
    prompts = {place: prompt for place, prompt in prompts.items() if prompt.id in answers}
    rows_of = [without_faults(answers[p.id], job.quarantine) for p in prompts.values()]
    policy.cache_clear()  # the judge may need the memory
    chosen = None if section.labels is None else _chosen(job, rows_of, run)
    collector = _Collector(
        job=job,
        prompts=[*prompts.values()],
        answers=rows_of,
        run=run,
    )
    comparisons, summary = collector.judged(chosen)
    if not comparisons:
        raise RunError(
            f"{run.path}: no pair has a verdict of more than half: ask more people, or "
            "about more pairs",
        )
    write_rows(run.path / "pairs.jsonl", comparisons)
    if chosen is not None:
        summary["asked"] = len(chosen)
    return {
        "num_pairs": len(comparisons),
        "num_prompts": len(prompts),
        **summary,
        "seconds": time.perf_counter() - start,
    }


def check_pairs(job: Job[PairsSection], _: ModelConfig) -> None:
    """Check comparisons, store and prompts before the first stage begins."""
    section = job.settings
    if section.agreement is not None:
        look((section.agreement,), Comparison)
    if section.store is not None:
        from tether.people.annotation.store import Store

        with contextlib.closing(Store(section.store)):
            pass
    if section.prompts and section.data is not None:
        _check_prompts(section.prompts, rows_up_to(section.data, Prompt, section.prompts))


def _check_prompts(wanted: int, there: int) -> None:
    if there < wanted:
        raise ConfigError(
            f"pairs.prompts = {wanted}, and there are {there} to use: raise "
            "samples_per_prompt instead",
        )


def comparisons_of(folder: Path) -> Iterator[Comparison]:
    """Comparisons that were judged, from the folder of a finished stage. Their texts may contain
    any characters.
    """
    for row in read_jsonl(folder / "pairs.jsonl"):
        for turn in row["prompt"][:1]:
            turn |= {name: row.pop(name) for name in ("tools", TEMPLATE_ARGUMENTS) if name in row}
        prompt, chosen, rejected = (
            turns_of(row.pop(name)) for name in ("prompt", "chosen", "rejected")
        )
        votes = tuple(Annotation(**vote) for vote in row.pop("annotations", ()))
        yield Comparison(prompt, chosen, rejected, annotations=votes, **row)


def feedback_of(comparisons: Sequence[Comparison]) -> list[Feedback]:
    """Each side of each comparison as a single answer that was good or bad."""
    return [
        Feedback(c.prompt, side, side is c.chosen)
        for c in comparisons
        for side in (c.chosen, c.rejected)
    ]


def _asked(job: Job[PairsSection], prompts: Sequence[Prompt]) -> dict[int, Prompt]:
    """The prompts to answer, by the place on which the randomness of their answers depends.

    With rounds: the next ones of endless epochs, none of them twice in a round.
    """
    there = len(prompts)
    size = job.settings.prompts or there
    _check_prompts(size, there)
    if job.round is None:
        return dict(enumerate(prompts[:size]))
    first: dict[int, int] = {}
    begin = (job.round - 1) * size
    places = range(begin, begin + 2 * there)
    for place, row in zip(places, endless(there, places, job.seed), strict=True):
        first.setdefault(row, place)
    return {place: prompts[row] for row, place in islice(first.items(), size)}


def _answered(
    job: Job[PairsSection],
    prompts: dict[int, Prompt],
    run: RunDirectory,
    policy: Callable[[], tuple[Role, LoadedModel]],
) -> dict[str, Json]:
    """Answers prompt by prompt, by the prompts' ids, written as they come. If the choice of pairs
    needs scores, the last round's reward model gives them. With a budget, as many as fit.
    """
    section = job.settings
    path = run.path / "answers.jsonl"
    progress = job.progress
    texts = {prompt.id: prompt.text for prompt in prompts.values()}
    # before anything is judged, the data may change, and have another prompt of this id
    answers = {row["id"]: row for row in read_jsonl(path) if row["prompt"] == texts.get(row["id"])}
    _check_sampling(job, run.path / "sampling.json", begun=bool(answers))
    fitting = Fitting(time_limit(), run.path / FITTING, len(prompts))
    order = fitting.order(list(prompts.items()), job.seed)
    missing = [(place, prompt) for place, prompt in order if prompt.id not in answers]
    if missing:
        role, loaded = policy()
        note_machine(run, loaded)
        engine = local_engine(role, loaded, max_rows=section.engine_rows)
        scored = section.choose in SCORED and job.earlier
        scorer = learned_reward(job.earlier[-1] / "reward" / "model", job.model) if scored else None
        doing(progress, "sampling")
        chunk = max(1, section.engine_rows // section.samples_per_prompt)
        chunk *= 1 if fitting.count is None else 2
        judge = None
        if isinstance(section.judge, FunctionJudge) and fitting.count is None:
            judge = text_judge(section.judge, job.root)

        def answer(items: Sequence[tuple[int, Prompt]]) -> Answers:
            places, part = zip(*items, strict=True)
            groups = engine.generate(
                list(part),
                section.sampling,
                num_samples=section.samples_per_prompt,
                seed=job.seed,
                ordinals=places,
                progress=count_of("sampling", len(part) * section.samples_per_prompt),
            )
            fresh = list(answer_rows(groups, scorer))
            append_jsonl(path, fresh)
            answers.update({row["id"]: row for row in fresh})
            if progress is not None:
                progress(len(answers), len(prompts), {})
            return fresh

        fitting.answer(missing, chunk, answer, judge)
    fitting.close(len(answers))
    return answers


def _check_sampling(job: Job[PairsSection], note: Path, *, begun: bool) -> None:
    """Answers that are there were drawn as the section says now; judges may change before anything
    is judged.

    Raises:
        RunError: they were drawn otherwise.
    """
    sampling = job.settings.model_dump(
        include={"samples_per_prompt", "max_new_tokens", "temperature"},
    ) | {"seed": job.seed, "model": job.sampler}
    before = read_json(note) if begun and note.is_file() else sampling
    if before != sampling:
        raise RunError(
            f"{note.parent} has answers that were drawn otherwise, by {before}. Choose "
            "another run directory",
        )
    write_json(note, sampling)


def _chosen(
    job: Job[PairsSection],
    answers: Answers,
    run: RunDirectory,
) -> list[Pair]:
    """The pairs that are worth a label; never one that an earlier round had."""
    section = job.settings
    how: Strategy = section.choose if section.choose not in SCORED or job.earlier else "random"
    asked = [
        row["item"]
        for folder in job.earlier
        for row in read_jsonl(folder / "pairs" / "chosen.jsonl")
    ]
    responses = {}
    places = {row["id"]: place for place, row in enumerate(answers)}
    for row in answers:
        # A response goes by its text, which is the same in all rounds.
        distinct = {
            text: Response(text, text, score, members=tuple(members))
            for text, score, members in zip(
                row["responses"],
                row["scores"],
                row["members"],
                strict=True,
            )
            # one whose score failed
            if text and (score is not None or how not in SCORED)
        }
        responses[row["id"]] = list(distinct.values())
    seed = job.seed + len(job.earlier)
    config = PairsConfig.model_validate(
        {"strategy": how, "num_pairs": section.labels, "seed": seed},
    )
    rows = []
    for pair in choose_pairs(responses, config, asked=asked):
        place = places[pair.prompt]
        first, second = sorted(map(answers[place]["responses"].index, (pair.first, pair.second)))
        rows.append({"place": (place, first, second), "item": pair.item, "chosen_by": how})
    if not rows:
        raise DataError(
            f"{run.path}: the answers give no pair to judge: they are all alike. "
            "Sample more, or hotter",
        )
    write_jsonl(run.path / "chosen.jsonl", rows)
    return [row["place"] for row in rows]


@dataclass(kw_only=True)
class _Collector:
    """Has pairs of answers to the prompts, place by place, judged as the section says."""

    job: Job[PairsSection]
    prompts: Sequence[Prompt]
    answers: Answers
    run: RunDirectory

    def judged(self, chosen: Sequence[Pair] | None) -> Labelled:
        """Labels of the chosen pairs (None: of all), and what is known of those who gave them."""
        judge = self.job.settings.judge
        if isinstance(judge, FunctionJudge):
            return self._simulated(judge, chosen)
        if chosen is None:
            texts = [row["responses"] for row in self.answers]
            chosen = [
                (p, a, b)
                for p, row in enumerate(texts)
                for b in range(len(row))
                for a in range(b)
                if row[a] and row[b] and row[a] != row[b]
            ]
        return self._by_people(chosen) if judge == "people" else self._by_model(judge, chosen)

    def _simulated(self, judge: FunctionJudge, chosen: Sequence[Pair] | None) -> Labelled:
        """Annotators who follow the function's scores, with the noise of the first round."""
        job = self.job
        section = job.settings
        noise = None
        if job.earlier:
            noise = read_json(job.earlier[0] / "pairs" / "summary.json")["noise"]
        responses = [row["responses"] for row in self.answers]
        asked = [
            (prompt, text)
            for prompt, texts in zip(self.prompts, responses, strict=True)
            for text in texts
        ]
        flat = text_judge(judge, job.root)(
            [prompt for prompt, _ in asked],
            [text for _, text in asked],
        )
        scored = [score.value for score in flat if score.value is not None]
        # An answer whose score failed stands in no pair, as an empty one does.
        usable = iter(
            [
                ("", 0.0) if s.value is None else (text, s.value)
                for s, (_, text) in zip(flat, asked, strict=True)
            ],
        )
        judged = [[next(usable) for _ in texts] for texts in responses]
        comparisons, figures = label_pairs(
            self.prompts,
            [[text for text, _ in row] for row in judged],
            [[score for _, score in row] for row in judged],
            agreement=section.annotator_agreement,
            num_annotators=section.num_annotators,
            seed=job.seed if job.round is None else f"{job.seed}/round-{job.round:02d}",
            only=None if chosen is None else set(chosen),
            noise=noise,
        )
        fluent = {
            (p.id, text): s.parts["fluent"]
            for (p, text), s in zip(asked, flat, strict=True)
            if "fluent" in s.parts
        }
        summary = {**figures, "gold_of_answers": statistics.fmean(scored)}
        if failed := len(flat) - len(scored):
            summary["failed_scores"] = failed
        return [_with_fluency(c, fluent) for c in comparisons], summary

    def _by_model(self, config: JudgeConfig, chosen: Sequence[Pair]) -> Labelled:
        """Soft labels of a language model that sees each pair in both orders."""
        job = self.job
        section = job.settings
        run = self.run
        model = judge_model(config, job.root)
        judge = PairJudge(model, read_rubric(config.rubric), temperature=config.temperature)
        if section.agreement is not None:
            settings = config.model_dump(mode="json")
            measure_once(judge, settings, section.agreement, job.root / "judge.json")
        rows = [self._pair(*pair) for pair in chosen]
        judgments = judged_pairs(judge, rows, job.progress)
        why = reasons(judgments)
        if why.total() > MOST_FAILED * len(rows) or why.keys() & {SPENT, DOWN, QUOTA}:
            listed = "; ".join(f"{reason} ({count})" for reason, count in why.most_common(3))
            raise RunError(
                f"{judge.name} left {why.total()} of {len(rows)} pairs of {run.path} without a "
                f"label: {listed}. "
                "Mend that and start again: what it has judged is kept, and only the rest is asked",
            )
        summary = judge_report(rows, judgments, judge.temperature)
        summary |= {"judge": judge.name, "usage": dict(model.usage())}
        return judge.label(rows, judgments), summary

    def _by_people(self, chosen: Sequence[Pair]) -> Labelled:
        """Put the pairs into the store, and take their labels once all are judged."""
        from tether.people.annotation.exchange import Case, comparisons, ready
        from tether.people.annotation.importing import import_cases
        from tether.people.annotation.store import Answer, Store

        job = self.job
        section = job.settings
        rows = list(read_jsonl(self.run.path / "chosen.jsonl"))
        items = [row["item"] for row in rows] or [
            [row["id"], row["responses"]] for row in self.answers
        ]
        # Another run may have a folder of this name and the same store: a round is known by its
        # pairs, too, and keeps its name where the folder is moved.
        name = f"{job.root.name}/{job.folder.parent.name}/{digest(items)[:6]}"
        name = read_json(self.run.path / "manifest.json").get("store_round", name)
        self.run.update_manifest(store_round=name)
        model = (
            job.model.source if job.policy is None else f"{job.root.name} before round {job.round}"
        )
        how = {"temperature": section.temperature, "max_new_tokens": section.max_new_tokens}
        strategy = rows[0]["chosen_by"] if rows else "random"
        cases = []
        for p, a, b in chosen:
            pair = self._pair(p, a, b)
            scores = self.answers[p]["scores"]
            sides = [
                Answer(
                    pair.prompt,
                    text,
                    group=pair.group,
                    score=scores[k],
                    model=model,
                    sampling=how,
                )
                for k, text in ((a, pair.chosen), (b, pair.rejected))
            ]
            first, second = sides
            cases.append(Case(first, second, needed=section.ask, strategy=strategy, round=name))
        assert section.store is not None
        with contextlib.closing(Store(section.store)) as store:
            import_cases(store, cases)
            tasks = store.round(name)
            unready = store.round(name, ~ready(section.how))
            if waiting := sum(unready.values()):
                total = sum(tasks.values())
                raise WaitingError(
                    f"{self.run.path} waits for people: {total - waiting} of {total} comparisons are "
                    f"judged, {unready['expert']} wait for an expert. Let them in with\n"
                    f"  {command_line('prefs', 'serve', section.store)}\nand run the same command again when they are done.",
                )
            summary = {"store": section.store, **tasks}
            return list(comparisons(store, section.how, round=name)), summary

    def _pair(self, place: int, a: int, b: int) -> Comparison:
        """Two answers, in the order of their sampling."""
        prompt = self.prompts[place]
        responses = self.answers[place]["responses"]
        sides = [(assistant(responses[k]),) for k in (a, b)]
        return Comparison(
            prompt.messages,
            *sides,
            id=f"{prompt.id}-{a}-{b}",
            group=group_of(prompt),
            probability=0.5,
        )


def _with_fluency(c: Comparison, fluent: dict[tuple[str, str], float]) -> Comparison:
    """With the difference of that part of the scores, if they have it: pairs that read alike are
    judged apart.
    """
    if not fluent:
        return c
    chosen, rejected = (
        fluent.get((c.group, side[-1].content), 0.0) for side in (c.chosen, c.rejected)
    )
    return replace(c, metadata={**c.metadata, "fluent_difference": chosen - rejected})
