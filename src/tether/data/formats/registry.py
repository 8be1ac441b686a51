"""All formats, the narrow ones before the wide ones; how the first rows of a file tell which one it is, and how its rows become
records of the kind that is wanted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tether.core.errors import DataError
from tether.core.synonyms import alike
from tether.core.types import Comparison, Conversation, Demonstration, Feedback, Json, Problem, Prompt, StepLabels
from tether.data.formats import conversations, pairs, verdicts
from tether.data.formats.conversations import prompt_reader
from tether.data.formats.fields import Reader, demonstration, is_transcript, leftover
from tether.data.formats.json_rows import Row

KINDS: dict[type, tuple[str, str]] = {
    Prompt: ("prompts", "Prompts need a question to answer, for example a column prompt, question, instruction or messages."),
    Demonstration: ("demonstrations", "Demonstrations need a response, for example columns prompt, response or messages."),
    Comparison: ("preferences", "Preferences need two responses per prompt, for example columns prompt, chosen, rejected."),
    Feedback: ("feedback", "Feedback needs a response and a verdict, for example columns prompt, completion, label."),
    StepLabels: ("step labels", "Step labels need steps and a verdict for each, for example columns prompt, steps, labels."),
    Problem: ("problems", "Problems need a question and a checkable answer, for example columns question, answer."),
}
"""Each kind's name for people, and what a file needs to hold it."""


@dataclass(frozen=True, slots=True)
class Format:
    """A published layout of rows, one line of `registry.FORMATS`.

    `columns` are those that a row must have: `a|b` stands for either, and `+a` only marks the format. `readers` give the records
    by kind; the first kind is the native one. Other kinds may follow by conversion, except those in `refuses`, where a conversion
    would mislead. Columns that are neither in `columns` (without a +) nor in `uses` (regular expressions) become metadata.
    `holds` is a further test, of what stands in the columns.
    """

    name: str
    columns: str
    readers: Mapping[type, Reader]
    uses: str = ""
    holds: Callable[[Row], bool] | None = None
    refuses: tuple[type, ...] = ()

    @property
    def kind(self) -> type:
        return next(iter(self.readers))

    def matches(self, row: Row) -> bool:
        """True if a row has this layout."""
        wanted = (column.removeprefix("+").split("|") for column in self.columns.split())
        return all(any(name in row for name in choices) for choices in wanted) and (self.holds is None or self.holds(row))

    def metadata(self, row: Row) -> Json:
        """The columns that no reader uses, for reports."""
        names = [column for column in self.columns.split() if column[0] != "+"]
        return leftover(row, re.compile("|".join([*names, *self.uses.split(), "id"])).fullmatch)


_PAIR = {Comparison: pairs.read_pair}
_CONVERSATION = {Demonstration: conversations.read_conversation, Prompt: conversations.read_opening}
_INSTRUCTION = {Demonstration: conversations.read_instruction}
_TREE = {Comparison: conversations.read_tree, Demonstration: conversations.read_best_path, Prompt: conversations.read_prompt}
_SOLUTIONS = {Feedback: verdicts.read_gsm8k_solutions, Problem: verdicts.read_gsm8k_truth, Prompt: prompt_reader("question")}
_PROMPTS = ("prompt", "question", "instruction", "problem", "query")


# The middle of a ranking is chosen in one pair and rejected in the next: as single verdicts these would contradict.
# fmt: off
FORMATS: tuple[Format, ...] = (
    Format("hh", "chosen rejected", {Comparison: pairs.read_transcripts},
           holds=lambda row: "prompt" not in row and is_transcript(row["chosen"]) and is_transcript(row["rejected"])),
    Format("sharegpt_pairs", "conversations chosen rejected", _PAIR, pairs.PAIR_COLUMNS),
    Format("preference", "chosen rejected", _PAIR, pairs.PAIR_COLUMNS),
    Format("ultrafeedback", "instruction completions", pairs.readers(pairs.ultrafeedback),
           "models correct_answers incorrect_answers", refuses=(Feedback,)),
    Format("nectar", "prompt answers", pairs.readers(pairs.nectar), "num_responses", refuses=(Feedback,)),
    Format("ranking", "prompt|question|instruction responses scores|ranks", pairs.readers(pairs.lists),
           "system", refuses=(Feedback,)),
    Format("webgpt", "question answer_0 answer_1 score_0 score_1", {Comparison: pairs.read_webgpt}, "(quotes|tokens)_[01]"),
    Format("webgpt_lists", "text score", {Comparison: pairs.read_webgpt_lists}),
    Format("alpaca_eval", "instruction output_1 output_2 preference", {Comparison: pairs.read_alpaca_eval},
           "input generator_1 generator_2 annotator"),
    Format("llmbar", "input output_1 output_2 label", {Comparison: pairs.read_llmbar}),
    Format("pandalm", "instruction response1 response2 annotator1|annotator_1", {Comparison: pairs.read_pandalm},
           r"input cmp_key annotator_?\d{1,9}"),
    Format("open_instruct", "prompt completion_a completion_b preference", {Comparison: pairs.read_open_instruct},
           "model_a model_b evaluator"),
    Format("open_assistant", "prompt", _TREE, "message_tree_id", holds=conversations.is_tree, refuses=(Feedback,)),
    Format("kto_messages", "messages|conversations label|kto_tag", {Feedback: verdicts.read_feedback}, verdicts.KTO_COLUMNS),
    Format("kto", "prompt|question completion|response label", {Feedback: verdicts.read_feedback}, verdicts.KTO_COLUMNS),
    Format("prmbench", "modified_process error_steps", {StepLabels: verdicts.read_prmbench},
           "modified_question original_process original_response modified_steps"),
    Format("steps", "prompt|question|problem steps|completions labels", {StepLabels: verdicts.read_steps}, "system"),
    Format("truthful_qa", "question answer true info", {Feedback: verdicts.read_truthful_qa}),
    Format("mt_bench", "turns", {Prompt: conversations.read_turns}, "question_id"),
    Format("human_eval", "prompt +entry_point +test", {Prompt: prompt_reader("prompt")}, "system task_id"),
    Format("model_written_evals", "question +answer_matching_behavior", {Prompt: prompt_reader("question")}, "system task_id"),
    Format("sycophancy", "prompt +corrects +incorrects", {Prompt: prompt_reader("prompt")}, "system task_id"),
    Format("self_instruct", "instruction instances", {Demonstration: conversations.read_self_instruct}),
    Format("alpaca_eval_instructions", "instruction output +generator", _INSTRUCTION, "response system history input context"),
    Format("dolly", "instruction context response", _INSTRUCTION, "output system history input"),
    Format("alpaca", "instruction output|response", _INSTRUCTION, "system history input context"),
    Format("messages", "messages", _CONVERSATION, "conversations system"),
    Format("sharegpt", "conversations", _CONVERSATION, "messages system"),
    Format("prompt_response", "prompt|question|query response|completion|output",
           {Demonstration: conversations.read_prompt_response}, "answer system"),
    Format("gsm8k_solutions", "question", _SOLUTIONS, ".*", holds=verdicts.has_judged_solutions),
    Format("gsm8k", "question answer", {Problem: verdicts.read_gsm8k}, holds=verdicts.has_final_line),
    Format("math", "problem solution", {Problem: verdicts.read_math}, "answer"),
    Format("question_answer", "question|prompt|problem|instruction answer|ground_truth", {Problem: verdicts.read_question_answer},
           "solution system"),
    Format("prompts", "|".join(_PROMPTS), {Prompt: prompt_reader(*_PROMPTS)}, "system task_id"),
)
# fmt: on
"""The narrow ones before the wide ones: of several that fit a row, the first that can give what is wanted is taken."""


Record = Prompt | Demonstration | Comparison | Feedback | StepLabels | Problem


def prompt_of(record: Record) -> Conversation:
    """The turns before the response; of a demonstration, those before its last assistant turn."""
    if isinstance(record, Prompt):
        return record.messages
    if isinstance(record, Demonstration):
        last = max((i for i, turn in enumerate(record.messages) if turn.role == "assistant"), default=len(record.messages))
        return record.messages[:last]
    return record.prompt


def _judge_both(record: Comparison) -> Iterable[Feedback]:
    """The likelier side is desirable, whatever the source called it."""
    if record.tie:
        return ()
    likelier = record if record.probability >= 0.5 else record.swap()
    return Feedback(record.prompt, likelier.chosen, True), Feedback(record.prompt, likelier.rejected, False)


CONVERSIONS: dict[tuple[type, type], Callable[[Any], Iterable[Any]]] = {
    (Comparison, Demonstration): lambda record: (Demonstration(record.prompt + record.chosen),),
    (Comparison, Feedback): _judge_both,
    (Feedback, Demonstration): lambda record: (Demonstration(record.prompt + record.response),) if record.desirable else (),
    (Problem, Demonstration): lambda record: (demonstration(record.prompt, record.solution or record.answer),),
    (Problem, Prompt): lambda record: (Prompt(record.prompt, metadata={"answer": record.answer}),),
    **{(k, Prompt): lambda record: (Prompt(prompt_of(record)),) for k in (Demonstration, Comparison, Feedback, StepLabels)},
}
"""From a native kind to the kind asked for. A tie becomes a demonstration of its first side, but no feedback; a problem becomes
one of its solution, or of its bare answer."""


def reader_for(layout: Format, kind: type) -> Reader | None:
    """The reader that gives `kind` from rows of this format, natively or by conversion; None if there is no way.

    What the format does not use becomes metadata of its records, beside what they bring along.
    """
    native = layout.readers.get(kind)
    convert = CONVERSIONS.get((layout.kind, kind)) if native is None else lambda record: (record,)
    if convert is None or kind in layout.refuses:
        return None
    parse = native or layout.readers[layout.kind]

    def read(row: Row) -> Iterator[Any]:
        unused = layout.metadata(row)
        for record in parse(row):
            if isinstance(record, DataError):
                yield record
            else:
                metadata = {**unused, **record.metadata}
                yield from (replace(other, metadata={**metadata, **other.metadata}) for other in convert(record))

    return read


def format_named(name: str) -> Format:
    """A format by its name.

    Raises:
        DataError: no format has this name.
    """
    layouts = {layout.name: layout for layout in FORMATS}
    if name in layouts:
        return layouts[name]
    hint = alike(name, layouts) or f"known formats: {', '.join(sorted(layouts))}"
    raise DataError(f"unknown data format {name!r} ({hint}); or leave it at 'auto'.")


def detect(rows: Sequence[Row], kind: type | None, where: str) -> Format:
    """The format that most of these rows have; of a row's several, the narrowest that can give `kind`.

    Raises:
        DataError: no format has such columns.
    """
    votes: Counter[str] = Counter()
    for row in rows:
        fitting = [layout for layout in FORMATS if layout.matches(row)]
        if fitting:
            able = [layout for layout in fitting if kind is not None and reader_for(layout, kind) is not None]
            votes[(able or fitting)[0].name] += 1
    if not votes:
        raise DataError(
            f"{where}: no known format has the columns {_columns(rows[0])}. Name the columns as one of them does, for example "
            "prompt, chosen, rejected (preferences), messages (demonstrations) or prompt (prompts)."
        )
    return format_named(votes.most_common(1)[0][0])


def kind_reader(layout: Format, kind: type, where: str, row: Row) -> Reader:
    """The reader of a file of this format for `kind`.

    Raises:
        DataError: this format holds something else; the message says what it looks like and what `kind` needs.
    """
    reader = reader_for(layout, kind)
    if reader is None:
        wanted, needs = KINDS[kind]
        held = KINDS[layout.kind][0]
        look = held if layout.name.rstrip("s") in held else f"{layout.name} {held}"
        raise DataError(f"{where} looks like {look} (columns {_columns(row)}), not {wanted}. {needs}")
    return reader


def _columns(row: Row) -> str:
    names = ["".join(c if c.isprintable() else "?" for c in name[:40]) or "(unnamed)" for name in row]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
