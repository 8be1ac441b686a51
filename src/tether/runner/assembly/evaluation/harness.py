"""Tasks of lm-eval (EleutherAI's evaluation harness) on a policy of tether's, behind its `LM` class.

lm-eval 0.4.13 seeds Python's, numpy's and torch's generators of the process, unless it is passed
None for each, as here; and it draws from Python's. A training that is measured along its way would
resume with other samples, so the generators have their states again after a call. Examples in a
prompt come from a generator of lm-eval's own, which keeps its seed.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tether.core.errors import ConfigError, DataError, require
from tether.core.once import once
from tether.core.protocols import count_of
from tether.core.types import Facts, Prompt, Sampling, user
from tether.data.batches import batches_for
from tether.data.chat import Encoded
from tether.evaluation.multiple_choice import encode_choice, first_token
from tether.evaluation.suite import Figures, MeasuredPolicy
from tether.rollout.drawn import Draws, as_groups
from tether.rollout.local import LocalEngine
from tether.settings.synonyms import alike
from tether.stats import Estimate, without_interval
from tether.stats.means import grouped_mean

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

_LOG = logging.getLogger("tether.evaluation")
_FUNCTION = re.compile(r"!function\s+([\w.]+)")
LONGEST_ANSWER = 256
"""Tokens of an answer whose task names no number, as lm-eval has it."""
MICRO_BATCH_TOKENS = 2048
AT_ONCE = 256
"""Tokens whose logits are computed at once."""


def look_at_tasks(tasks: Sequence[str]) -> list[str]:
    """Load tasks and their data. A file of a task is a program, and the log says so.

    Returns:
        The names of the figures, a group having all that its tasks have; empty if they are known
        only once they are measured.

    Raises:
        ConfigError: lm-eval is not installed, or has no such task.
        DataError: a file or its data cannot be read.
    """
    require("lm_eval", "an evaluator of lm-eval's tasks", "lm-eval")
    manager = _manager(True)
    fixed = True
    figures: list[str] = []
    for task in tasks:
        if task not in manager.all_tasks and not Path(task).is_file():
            hint = alike(task, manager.all_tasks)
            raise ConfigError(f"lm-eval has no task {task!r}, and no file lies there. {hint}")
        if task not in manager.all_tasks:
            once(_LOG.warning, "%s", program_words(Path(task)))
        try:
            loaded = manager.load(task)
        except Exception as error:
            raise DataError(
                f"the task {task!r} of lm-eval cannot be loaded ({type(error).__name__}: {error}). "
                "Most tasks read their rows from a hub: download them there first, or write a "
                "task that names local files",
            ) from error
        # what is generated may be measured under names that the measure gives
        parts = loaded["tasks"].values()
        fixed &= not any(
            part.OUTPUT_TYPE == "generate_until"
            or part.config.process_results
            or part.config.filter_list
            for part in parts
        )
        figures += [
            f"{name}/{metric}"
            for name in (*loaded["tasks"], *loaded["groups"])
            for part in parts
            for metric in part.aggregation()
        ]
    return figures if fixed else []


def program_words(file: Path) -> str:
    """The sentences on what a task's file runs: its templates, and functions of Python files."""
    names = ", ".join(dict.fromkeys(_functions(file, set())))
    return (
        f"The task {file} is a program: lm-eval runs its templates"
        f"{f' and its functions {names}' if names else ''} with your rights. Read a file that is not "
        "yours before you use it."
    )


def _functions(file: Path, read: set[Path]) -> Iterator[str]:
    """The Python functions that a task's file names, with those of the files that it includes."""
    place = file.resolve()
    if place in read or not place.is_file():
        return
    read.add(place)
    text = place.read_text(encoding="utf-8", errors="replace")
    yield from _FUNCTION.findall(text)
    for name in re.findall(r"^include:\s*(\S+)", text, re.M):
        yield from _functions(place.parent / name.strip("'\""), read)


@cache
def _manager(defaults: bool) -> TaskManager:
    """The index of tasks; lm-eval's own are 14,000 files."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=defaults)


class HarnessTasks:
    """Implements core.protocols.Evaluator: the figures of lm-eval's tasks, named TASK/METRIC, with
    intervals over rows.

    Args:
        tasks: names, files or inline tables, as `lm_eval.simple_evaluate` takes them.
        options: of `simple_evaluate`, such as `limit` and `num_fewshot`.

    Raises:
        ConfigError: lm-eval is not installed, or an option is one of those that are set here.
    """

    name = "lm_eval"

    def __init__(self, tasks: Sequence[str | Facts], **options: object) -> None:
        require("lm_eval", "an evaluator of lm-eval's tasks", "lm-eval")
        if taken := OWN_OPTIONS.keys() & options.keys():
            raise ConfigError(f"{min(taken)} is set by tether. Leave it out")
        self.tasks = list(tasks)
        self.options = options

    def __call__(self, policy: MeasuredPolicy, step: int) -> Figures:
        """Raises: DataError: a request does not fit the model's context."""
        from lm_eval import simple_evaluate

        options = {"bootstrap_iters": 0, **self.options, **OWN_OPTIONS}
        options.setdefault("task_manager", _manager(any(isinstance(t, str) for t in self.tasks)))
        with _same_generators(policy.role.device):
            measured = simple_evaluate(harness_model(policy), tasks=self.tasks, **options)
        return _figures(measured["results"], measured["samples"], measured["group_subtasks"])


@contextmanager
def _same_generators(device: torch.device) -> Iterator[None]:
    """Give the generators of the process their states again afterwards."""
    own = random.getstate()
    arrays = np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(own)
            np.random.set_state(arrays)


OWN_OPTIONS = {
    "random_seed": None,
    "numpy_random_seed": None,
    "torch_random_seed": None,
    "log_samples": True,
}
"""Options of `simple_evaluate` that tether sets."""


Samples = Mapping[str, Sequence[Facts]]
"""By task the rows that lm-eval has measured."""


def _rows(
    task: str,
    metric: str,
    filtered: str,
    samples: Samples,
    members: Mapping[str, Sequence[str]],
) -> dict[str, float | None]:
    """The number of each row of a task, or of all tasks of a group."""
    if task not in samples:
        return {
            f"{member}/{row}": value
            for member in members.get(task, ())
            for row, value in _rows(member, metric, filtered, samples, members).items()
        }
    return {
        str(sample["doc_id"]): float(sample[metric])
        for sample in samples[task]
        if sample.get("filter", filtered) == filtered
        and isinstance(sample.get(metric), int | float)
    }


def _figures(
    results: Mapping[str, Facts],
    samples: Samples,
    members: Mapping[str, Sequence[str]],
) -> Figures:
    estimates: dict[str, Estimate] = {}
    rows: dict[str, dict[str, float | None]] = {}
    for task, values in results.items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not filtered:
                continue
            name = f"{task}/{metric}" + ("" if filtered == "none" else f"/{filtered}")
            own = _rows(task, metric, filtered, samples, members)
            column = np.array(list(own.values()))
            # what lm-eval computes of all rows together, such as a perplexity, is no mean of them
            if len(column) and np.isclose(column.mean(), value):
                estimates[name] = grouped_mean(column, None)
                rows[name] = own
            else:
                estimates[name] = without_interval(
                    float(value),
                    len(column),
                    "rows: lm-eval gives no number a row",
                )
    return Figures(estimates, rows)


def harness_model(policy: MeasuredPolicy) -> LM:
    """The policy as an `LM` of lm-eval, for its own functions.

    Texts are tokenized as lm-eval's own `HFLM` does it. A request that is too long loses its first
    tokens, as there.

    Raises:
        ConfigError: lm-eval is not installed.
    """
    require("lm_eval", "a model of lm-eval", "lm-eval")
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    tokenizer = policy.encoder.tokenizer
    length = policy.role.context_length

    class PolicyForHarness(LM):
        """See lm_eval.api.model.LM."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            texts = [request.args for request in requests]
            return list(_read(policy, [encode_choice(tokenizer, *pair) for pair in texts]))

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            sums = []
            for (text,) in (request.args for request in requests):
                ids = tokenizer.encode(text, add_special_tokens=False)
                windows = get_rolling_token_windows(ids, first_token(tokenizer), length - 1, 1)
                parts = [_joined(*make_disjoint_window(window)) for window in windows]
                sums.append(sum(value for value, _ in _read(policy, parts)))
            return sums

        def generate_until(self, requests: list[Any]) -> list[str]:
            engine = policy.engine
            if not isinstance(engine, LocalEngine):  # a server takes conversations, not texts
                engine = LocalEngine(policy.role, policy.encoder)
            return [_answer(policy, engine, *request.args) for request in requests]

        def apply_chat_template(
            self,
            chat_history: list[dict[str, str]],
            add_generation_prompt: bool = True,
        ) -> str:
            return tokenizer.apply_chat_template(
                chat_history,
                chat_template=policy.encoder.template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        @property
        def tokenizer_name(self) -> str:
            return str(tokenizer.name_or_path).replace("/", "__")

    return PolicyForHarness()


def _joined(context: Sequence[int], continuation: Sequence[int]) -> Encoded:
    counted = (False,) * len(context) + (True,) * len(continuation)
    return Encoded((*context, *continuation), counted)


@torch.no_grad()
def _read(policy: MeasuredPolicy, sequences: Sequence[Encoded]) -> Iterator[tuple[float, bool]]:
    """For each sequence the log-probability in nats of its counted tokens, and whether each of them
    is the likeliest.
    """
    role = policy.role
    role.train_mode(False)
    cut = [_shortened(sequence, role.context_length) for sequence in sequences]
    results: list[tuple[float, bool]] = [(0.0, True)] * len(cut)
    tell = count_of("reading requests", len(cut))
    read = 0
    for places, batch in batches_for(role, cut, policy.encoder.pad_id, MICRO_BATCH_TOKENS):
        hidden = role.hidden(batch)
        sums = batch.scatter(role.logprobs_of(hidden, batch)[0]).double().sum(-1)
        states = hidden[batch.predict].split(AT_ONCE)
        likeliest = torch.cat([role.logits(part).argmax(-1) for part in states])
        others = batch.scatter((likeliest != batch.targets).double()).sum(-1)
        for place, value, other in zip(places, sums.tolist(), others.tolist(), strict=True):
            results[place] = value, not other
        read += len(places)
        tell(read)
    yield from results


def _shortened(sequence: Encoded, length: int) -> Encoded:
    """The last tokens that fit.

    Raises:
        DataError: those that count do not fit.
    """
    if sequence.num_trained >= length:
        raise DataError(
            f"{sequence.num_trained} tokens to score do not fit the model's context of {length}",
        )
    return Encoded(sequence.ids[-length:], sequence.trained[-length:])


def _answer(policy: MeasuredPolicy, engine: LocalEngine, context: str, settings: Facts) -> str:
    """The likeliest answer to a text, or a sample of one where a task asks for it."""
    until = settings.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    sampling = Sampling(
        int(settings.get("max_gen_toks", LONGEST_ANSWER)),
        float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0,
        stop_strings=tuple(filter(None, stops)),
    )
    room = policy.role.context_length - sampling.max_new_tokens
    if room < 1:
        raise DataError(
            f"answers of {sampling.max_new_tokens} tokens do not fit the model's context of "
            f"{policy.role.context_length}",
        )
    ids = tuple(policy.encoder.tokenizer.encode(context)[-room:])
    draws = Draws([ids], [0], sampling)
    prompt = Prompt((user(context),))
    (group,) = as_groups(policy.encoder, [prompt], draws, engine.draw(draws), 0)
    return group.rollouts[0].text
