"""All formats, the narrow ones before the wide ones. The first rows of a file decide its format,
and its rows become records of the wanted kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any

from tether.core.errors import DataError
from tether.core.types import (
    Comparison,
    Conversation,
    Demonstration,
    Feedback,
    Problem,
    Prompt,
    Record,
    StepLabels,
)
from tether.data.formats import (
    arena,
    conversations,
    feedback,
    fields,
    hosted,
    judged,
    nested,
    pairs,
    rankings,
    rated,
    rendered,
    sides,
    solved,
    verdicts,
)
from tether.data.formats.advice import way_out
from tether.data.formats.cells import Cells, without_cells
from tether.data.formats.conversations import prompt_reader
from tether.data.formats.fields import (
    LeftOutError,
    Reader,
    T,
    demonstration,
    is_transcript,
    unfolded,
)
from tether.data.formats.json_rows import Row
from tether.data.formats.marks import refuse_bad_reply, refuse_media
from tether.settings.synonyms import alike

KINDS: dict[type, tuple[str, str]] = {
    Prompt: (
        "prompts",
        "Prompts need a question to answer, for example a column prompt, "
        "question, instruction or messages.",
    ),
    Demonstration: (
        "demonstrations",
        "Demonstrations need a response, for example columns prompt, response or messages.",
    ),
    Comparison: (
        "preferences",
        "Preferences need two responses per prompt, for example columns prompt, chosen, rejected.",
    ),
    Feedback: (
        "feedback",
        "Feedback needs a response and a verdict, for example columns prompt, completion, label.",
    ),
    StepLabels: (
        "step labels",
        "Step labels need steps and a verdict for each, for example columns prompt, steps, labels.",
    ),
    Problem: (
        "problems",
        "Problems need a question and a checkable answer, for example columns question, answer.",
    ),
}
"""Each kind's name for people, and what a file needs to hold it."""


@dataclass(frozen=True, slots=True)
class Format:
    """A published layout of rows, one line of `registry.FORMATS`.

    `columns` are required: `a|b` means either. `readers` give the records by kind; the first kind
    is the native one. Other kinds may follow by conversion, except those in `refuses`, for which a
    conversion would mislead. `holds` is a further test of the contents of the columns. `doubts`
    gives the reason why the first rows of a file, taken together, have another meaning.
    """

    name: str
    columns: str
    readers: Mapping[type, Reader[Record]]
    _: KW_ONLY
    holds: Callable[[Row], bool] | None = None
    refuses: tuple[type, ...] = ()
    doubts: Callable[[Sequence[Row]], str] | None = None

    @property
    def kind(self) -> type:
        return next(iter(self.readers))

    def matches(self, row: Row) -> bool:
        """True if a row has this layout."""
        wanted = (column.split("|") for column in self.columns.split())
        return all(any(name in row for name in choices) for choices in wanted) and (
            self.holds is None or self.holds(row)
        )


_PAIR = {Comparison: pairs.read_pair}
_CONVERSATION = {Demonstration: conversations.read_conversation, Prompt: conversations.read_opening}
_INSTRUCTION = {Demonstration: conversations.read_instruction, Prompt: prompt_reader("instruction")}
_RESPONSE = {
    Demonstration: conversations.read_prompt_response,
    Prompt: prompt_reader(*conversations.ASKED),
}
_TEXT = {Demonstration: rendered.read_text, Prompt: rendered.read_text_opening}
_READING = {
    Demonstration: conversations.read_reading,
    Problem: solved.read_span,
    Prompt: prompt_reader("question"),
}
_WORKED = {Demonstration: verdicts.read_worked}
_ANSWER = "|".join(solved.ANSWERS)
_UNREADABLE = {
    "segments": "segments are pieces of a rendered text, which belong to one template. Write the "
    "conversation as messages, with "
    "train: false at turns that are not to be learned.",
}
"""Columns of published layouts that no reader takes, with the way out."""
_TREE = {
    Comparison: conversations.read_tree,
    Demonstration: conversations.read_best_path,
    Prompt: conversations.read_prompt,
}
_SOLUTIONS = {
    Feedback: verdicts.read_gsm8k_solutions,
    Problem: verdicts.read_gsm8k_truth,
    Prompt: prompt_reader("question"),
}
_FEEDBACK = {Feedback: feedback.read_feedback}
_ANY_PROMPT = "|".join((*conversations.PROMPTS, *conversations.TURNS_BEFORE))
_PROMPTS = ("prompt", "question", "instruction", "problem", "query", "input", "inputs")


# The middle of a ranking is chosen in one pair and rejected in the next: as single verdicts these would contradict.
# fmt: off
FORMATS: tuple[Format, ...] = (
    Format("hh", "chosen rejected", {Comparison: pairs.read_transcripts},
           holds=lambda row: "prompt" not in row and is_transcript(row["chosen"]) and is_transcript(row["rejected"])),
    Format("helpsteer3", "context response1 response2 overall_preference", {Comparison: judged.read_helpsteer3}),
    Format("helpsteer2_preference", "prompt response_1 response_2 "
                                    "preference_strength", {Comparison: judged.read_helpsteer2}),
    Format("safe_rlhf", f"{_ANY_PROMPT} response_0 response_1 "
                        "better_response_id", {Comparison: judged.read_safe_rlhf},
           doubts=judged.other_count("better_response_id", 0, 1)),
    Format("shp", f"history|{_ANY_PROMPT} human_ref_A human_ref_B labels", {Comparison: judged.read_shp},
           doubts=judged.other_count("labels", 0, 1)),
    Format("summarize_from_feedback", "info summaries choice", {Comparison: judged.read_summaries},
           doubts=judged.other_count("choice", 0, 1)),
    Format("arena", "conversation_a conversation_b winner", {Comparison: arena.read_arena}),
    Format("rated_conversations", "conv_A conv_B conv_A_rating "
                                  "conv_B_rating", {Comparison: arena.read_rated}),
    Format("arena_lists", "prompt response_a response_b winner_model_a "
                          "winner_model_b", {Comparison: arena.read_arena_lists}),
    Format("gemini_preference", "contents completions", rankings.readers(hosted.gemini), refuses=(Feedback,),
           holds=rankings.lists_objects("completions", "completion", "score")),
    Format("nova_preference", "messages", {Comparison: hosted.nova}, holds=hosted.has_candidates),
    Format("prometheus_preference", "orig_instruction orig_response_A orig_response_B "
                                    "orig_preference",
           {Comparison: judged.read_prometheus, Prompt: prompt_reader("orig_instruction")}, refuses=(Demonstration,)),
    Format("alpaca_eval", "instruction output_1 output_2 preference", {Comparison: judged.read_alpaca_eval},
           doubts=judged.half_a_scale),
    Format("llmbar", f"{_ANY_PROMPT} output_1 output_2 label", {Comparison: judged.read_llmbar},
           doubts=judged.other_count("label", 1, 2)),
    Format("pandalm", "instruction response1 response2 "
                      "annotator1|annotator_1", {Comparison: judged.read_pandalm}),
    Format("open_instruct", "prompt completion_a completion_b preference", {Comparison: judged.read_open_instruct}),
    Format("webgpt", "question answer_0 answer_1 score_0 score_1", {Comparison: rankings.read_webgpt}),
    Format("webgpt_lists", "text score", {Comparison: rankings.read_webgpt_lists}),
    Format("two_answers", "|".join(sides.VERDICTS), {Comparison: judged.read_two_answers}, holds=sides.names_better),
    Format("sharegpt_pairs", "conversations chosen rejected", _PAIR),
    Format("preference", "chosen rejected", _PAIR, holds=lambda row: pairs.named_pair(row) is not None),
    Format("rejected_beside", "messages|conversations|response|output|completion "
                              "rejected_response|rejected_messages",
           {Comparison: pairs.read_beside}, holds=pairs.is_rejected_beside),
    Format("preference_names", "|".join(sorted({name for pair in pairs.NAMES for name in pair})), _PAIR,
           holds=lambda row: pairs.named_pair(row) is not None),
    Format("ultrafeedback", "instruction completions", rankings.readers(rankings.ultrafeedback), refuses=(Feedback,),
           holds=rankings.lists_objects("completions", "response")),
    Format("stack_exchange", "question answers", rankings.readers(rankings.stack_exchange), refuses=(Feedback,),
           holds=rankings.lists_objects("answers", "pm_score")),
    Format("nectar", "prompt answers", rankings.readers(rankings.nectar), refuses=(Feedback,)),
    Format("ranking", f"{_ANY_PROMPT} {'|'.join(rankings.LISTS)} "
                      f"{'|'.join((*rankings.SCORES, *rankings.RANKS))}",
           rankings.readers(rankings.lists), refuses=(Feedback,)),
    Format("ranked_objects", "|".join(rankings.OBJECTS), rankings.readers(rankings.scored_objects), refuses=(Feedback,),
           holds=rankings.are_objects),
    Format("scored_answers", _ANY_PROMPT, {Comparison: judged.read_scored}, holds=judged.are_scored),
    Format("open_assistant", "prompt", _TREE, holds=conversations.is_tree, refuses=(Feedback,)),
    Format("kto_messages", "messages|conversations|conversation "
                           f"{'|'.join(feedback.LABELS)}", _FEEDBACK,
           holds=feedback.has_verdict, doubts=feedback.scaled),
    Format("kto", f"{_ANY_PROMPT} {'|'.join(feedback.RESPONSES)} "
                  f"{'|'.join(feedback.LABELS)}", _FEEDBACK,
           holds=feedback.has_verdict, doubts=feedback.scaled),
    Format("prm800k", "question label", {StepLabels: rated.read_prm800k}, holds=rated.is_prm800k),
    Format("math_shepherd", "input label", {StepLabels: rated.read_marked_steps}, holds=rated.has_marks),
    Format("answered_steps", "messages|conversations", {StepLabels: rated.read_answered_steps}, holds=rated.has_answered_steps,
           refuses=(Prompt,)),
    Format("process_bench", "prompt|question|problem steps label", {StepLabels: rated.read_first_error},
           holds=lambda row: not isinstance(row["label"], list)),
    Format("rated_steps", "prompt|question|problem|instruction steps", {StepLabels: rated.read_rated_steps},
           holds=rated.has_rated_steps),
    Format("prmbench", "modified_process error_steps", {StepLabels: verdicts.read_prmbench}),
    Format("steps", "prompt|question|problem steps|completions labels", {StepLabels: verdicts.read_steps}),
    Format("truthful_qa", "question answer true info", {Feedback: feedback.read_truthful_qa}),
    Format("mt_bench", "turns", {Prompt: conversations.read_turns}, holds=lambda row: not nested.is_dialogue(row, "turns")),
    Format("human_eval", "prompt entry_point test", {Prompt: prompt_reader("prompt")}),
    Format("model_written_evals", "question answer_matching_behavior", {Prompt: prompt_reader("question")}),
    Format("sycophancy", "prompt corrects incorrects", {Prompt: prompt_reader("prompt")}),
    Format("self_instruct", "instruction instances", {Demonstration: conversations.read_self_instruct}),
    Format("alpaca_eval_instructions", "instruction output generator", _INSTRUCTION),
    Format("dolly", "instruction context response", _INSTRUCTION),
    Format("alpaca", "instruction output|response|completion", _INSTRUCTION),
    Format("function_calls", "query answers tools|functions", {Demonstration: conversations.read_calls}),
    Format("squad", "question answers", _READING, holds=conversations.has_spans),
    Format("messages", "messages", _CONVERSATION, holds=lambda row: not solved.asks(row)),
    Format("sharegpt", "conversations", _CONVERSATION),
    Format("helpsteer", "prompt response helpfulness", {Demonstration: conversations.read_helpsteer}),
    Format("prompt_response", "prompt|question|query|problem|input|message_1|user|human "
           "response|completion|output|generated_solution|message_2|assistant|gpt", _RESPONSE),
    Format("inputs_targets", "input|inputs|inputs_pretokenized "
                             "target|targets|targets_pretokenized", _RESPONSE),
    Format("dialogue", "|".join(conversations.CONVERSATIONS[2:]), _CONVERSATION, holds=conversations.has_dialogue),
    Format("verl", "prompt|question|problem reward_model", {Problem: solved.read_reward_model}, holds=solved.has_ground_truth),
    Format("choices", "question|problem|query|prompt "
                      f"{'|'.join(solved.CORRECT)}", {Problem: solved.read_choice},
           holds=solved.has_choices),
    Format("gsm8k_solutions", "question", _SOLUTIONS, holds=verdicts.has_judged_solutions),
    Format("gsm8k", "question answer", {Problem: verdicts.read_gsm8k, **_WORKED},
           holds=lambda row: verdicts.has_final_line(row) and not is_feedback(row)),
    Format("math", "problem solution", {Problem: verdicts.read_math, **_WORKED}, holds=verdicts.has_answer),
    Format("question_answer", f"question|prompt|problem|instruction {_ANSWER}",
           {Problem: verdicts.read_question_answer, **_WORKED}, holds=lambda row: not is_feedback(row)),
    Format("answered_messages", f"messages {_ANSWER}", {Problem: solved.read_answered_messages}),
    Format("svamp", "Body Question Answer", {Problem: solved.read_svamp}),
    Format("worked_solutions", "problem|question|prompt solution", {**_WORKED, Prompt: prompt_reader(*_PROMPTS)}),
    Format("text", "|".join(rendered.TEXTS), _TEXT, holds=rendered.has_text),
    Format("prompts", "|".join(_PROMPTS), {Prompt: prompt_reader(*_PROMPTS)}),
)
# fmt: on
"""The narrow ones before the wide ones: of several that fit a row, the first that can give what is
wanted is taken.
"""


def is_feedback(row: Row) -> bool:
    """True if the row's answer has a verdict, so that it is an answer to judge and differs from the
    truth.
    """
    return any(layout.matches(row) for layout in FORMATS if layout.kind is Feedback)


def prompt_of(record: Record) -> Conversation:
    """The turns before the response; of a demonstration, those before its last assistant turn."""
    if isinstance(record, Prompt):
        return record.messages
    if isinstance(record, Demonstration):
        last = max(
            (i for i, turn in enumerate(record.messages) if turn.role == "assistant"),
            default=len(record.messages),
        )
        return record.messages[:last]
    return record.prompt


def _judge_both(record: Comparison) -> Iterable[Feedback]:
    """The likelier side is desirable, whatever the source called it."""
    if record.metadata.get("both_bad"):
        return Feedback(record.prompt, record.chosen, False), Feedback(
            record.prompt,
            record.rejected,
            False,
        )
    if record.tie:
        raise LeftOutError("tie: neither response is better, so neither is desirable")
    likelier = record if record.probability >= 0.5 else record.swap()
    return Feedback(record.prompt, likelier.chosen, True), Feedback(
        record.prompt,
        likelier.rejected,
        False,
    )


def _imitate_better(record: Comparison) -> Iterable[Demonstration]:
    """The likelier side; the first one of a tie, unless both are bad."""
    if record.metadata.get("both_bad"):
        raise LeftOutError("undesirable response: both are bad, and demonstrations are imitated")
    return (
        Demonstration(
            record.prompt + (record.chosen if record.probability >= 0.5 else record.rejected),
        ),
    )


def _imitate(record: Feedback) -> Iterable[Demonstration]:
    if not record.desirable:
        raise LeftOutError(
            "undesirable response: its label is false, and demonstrations are imitated",
        )
    return (Demonstration(record.prompt + record.response),)


@dataclass(frozen=True, slots=True)
class Conversion:
    """From a native kind to the kind asked for. `loses`: the fields of the native record that have
    no place in the other.
    """

    make: Callable[[Any], Iterable[Any]]
    loses: tuple[str, ...] = ()

    def lost(self, record: Record) -> Iterator[str]:
        """Names of the lost fields of a record that differ from their defaults."""
        defaults = {field.name: field.default for field in dataclass_fields(record)}
        for name in self.loses:
            # which is then what the demonstration says
            bare = name == "answer" and isinstance(record, Problem) and not record.solution
            if getattr(record, name) != defaults[name] and not bare:
                yield "last reply" if name == "messages" else name


def _question(*loses: str) -> Conversion:
    return Conversion(lambda record: (Prompt(prompt_of(record)),), loses)


_VOTES = ("margin", "tie", "probability", "annotations")
CONVERSIONS: dict[tuple[type, type], Conversion] = {
    (Comparison, Demonstration): Conversion(_imitate_better, ("rejected", *_VOTES)),
    (Comparison, Feedback): Conversion(_judge_both, ("margin", "probability", "annotations")),
    (Feedback, Demonstration): Conversion(_imitate),
    (Problem, Demonstration): Conversion(
        lambda record: (demonstration(record.prompt, record.solution or record.answer),),
        ("answer",),
    ),
    (Problem, Prompt): Conversion(
        lambda record: (Prompt(record.prompt, metadata={"answer": record.answer}),),
        ("solution",),
    ),
    (Demonstration, Prompt): _question("messages"),
    (Comparison, Prompt): _question("chosen", "rejected", *_VOTES),
    (Feedback, Prompt): _question("response", "desirable"),
    (StepLabels, Prompt): _question("steps", "labels"),
}
"""A tie becomes a demonstration of its first side. It gives no feedback. A problem becomes a
demonstration of its solution, or of its bare answer.
"""

_AS_IT_IS = Conversion(lambda record: (record,))


def _with_tools(record: Record, tools: str) -> Record:
    """The record whose first turn has these schemas."""
    where = "messages" if isinstance(record, Prompt | Demonstration) else "prompt"
    turns = getattr(record, where)
    return (
        replace(record, **{where: (replace(turns[0], tools=tools), *turns[1:])})
        if tools and turns
        else record
    )


def reader_for(layout: Format, kind: type[T]) -> Reader[T] | None:
    """The reader that gives `kind` from rows of this format, natively or by conversion; None if
    there is no way.

    Columns that the reader does not read become metadata of its records, beside what they bring
    along. Of a row given as `Cells` the caller can name them: `row.unused()`.
    """
    native = layout.readers.get(kind)
    convert = CONVERSIONS.get((layout.kind, kind)) if native is None else _AS_IT_IS
    if convert is None or kind in layout.refuses:
        return None
    parse = native or layout.readers[layout.kind]

    def read(row: Row) -> Iterator[T | DataError]:
        cells = row if isinstance(row, Cells) else Cells(row)
        if isinstance(dict.get(cells, "id"), str | int):
            cells.get("id")
        refuse_media(cells)
        if kind is Demonstration and native is not None:
            refuse_bad_reply(cells)
        tools = fields.row_tools(cells)
        records = [
            record if isinstance(record, DataError) else _with_tools(record, tools)
            for record in parse(cells)
        ]
        unread = unfolded(cells.unread())
        for record in records:
            if isinstance(record, DataError):
                yield record
                continue
            metadata = {**unread, **without_cells(dict(record.metadata))}
            for name in convert.lost(record):
                cells.leave_out(name)
            try:
                yield from (
                    replace(other, metadata={**metadata, **other.metadata})
                    for other in convert.make(record)
                )
            except DataError as error:
                yield error

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
    """The format that most of these rows have; of a row's several, the narrowest that can give
    `kind`.

    Raises:
        DataError: no format has such columns.
    """
    votes: Counter[str] = Counter()
    for row in rows:
        fitting = [layout for layout in FORMATS if layout.matches(row)]
        if fitting:
            able = [
                layout
                for layout in fitting
                if kind is not None and reader_for(layout, kind) is not None
            ]
            votes[(able or fitting)[0].name] += 1
    if reason := next(
        (reason for name, reason in _UNREADABLE.items() if not votes and name in rows[0]),
        "",
    ):
        raise DataError(f"{where}: {reason}")
    if not votes:
        raise DataError(
            f"{where}: no known format has the columns {_columns(rows[0])}. Name the columns as "
            "one of them does, for example prompt, chosen, rejected (preferences), messages "
            f"(demonstrations) or prompt (prompts). {way_out(kind or Prompt, rows[0])}",
        )
    return format_named(votes.most_common(1)[0][0])


def kind_reader(layout: Format, kind: type[T], where: str, rows: Sequence[Row]) -> Reader[T]:
    """The reader of a file of this format for `kind`; `rows` are its first ones.

    Raises:
        DataError: this format holds another kind. The message names the likely format and the
            columns that `kind` needs. Or these rows have another meaning than the format.
    """
    reader = reader_for(layout, kind)
    if reader is None:
        wanted, needs = KINDS[kind]
        held = KINDS[layout.kind][0]
        look = held if layout.name.rstrip("s") in held else f"{layout.name} {held}"
        held_by = f"{where} looks like {look} (columns {_columns(rows[0])}), not {wanted}."
        raise DataError(f"{held_by} {needs} {way_out(kind, rows[0])}")
    if layout.doubts is not None and kind is not Prompt and (doubt := layout.doubts(rows)):
        raise DataError(f"{where}: {doubt}.")
    return reader


def _columns(row: Row) -> str:
    names = [
        "".join(c if c.isprintable() else "?" for c in name[:40]) or "(unnamed)" for name in row
    ]
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
