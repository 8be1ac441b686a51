"""Published chat templates against transformers' own rendering: prompts, and what is trained behind
them.

    TETHER_TEMPLATES=FOLDER[:FOLDER...] python -m benchmarks.templates

reads every template that an installed package ships, and all `.jinja` files below the folders. Each
template meets conversations with system turns, thoughts, calls, parallel calls and results. For
every prefix that ends before a reply, two things must hold:

1. The ids of the prompt are those of transformers' text for this prefix with
   `add_generation_prompt`.
2. What is trained behind them is the rest of transformers' text for the prefix and its reply, up to
   and with the stop token that ends it.

Some templates rewrite the turns before a reply once it is there, so that there is no such rest. Of
these the reply must be in the text, and repeat nothing that the prompt ends with. A refusal must be
true: the template raises, or its text lacks a part of the conversation.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from tether.core.errors import DataError
from tether.core.types import Conversation, Facts, Message, assistant, user
from tether.data.chat import ChatEncoder
from tether.models.tiny import tiny_tokenizer

MARK = re.compile(
    r"<[|｜][^<>\s'\"]{1,40}[|｜]>|</?s>|<\|[a-z_]+>|<[a-z_]+\|>|\[[eg]~\[|\]~[a-z!]+\[?|"
    r"<(?:eos|bos|end_of_turn|start_of_turn|turn\||\|turn|sep)>|\[/?[A-Z_]{3,20}\]",
)
"""Special tokens of published templates, by their looks."""
END = re.compile(r"(?i)end|eo[stm]|return|[|]call[|]>|</s>|<sep>|message_sep|close|turn\|>|\[e~\[")
"""Marks that end a turn, by their names."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
REASONS = (
    "leaves out 2 tools",
    "leaves out tool calls",
    "leaves out the reasoning",
    "no thought can follow",
    "rewrites an assistant turn",
    "leaves out or rewrites",
)
TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Gives the {name}.",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "string", "description": "A place."}},
                    "required": ["city"],
                },
            },
        }
        for name in ("rain", "wind")
    ],
)


def call(name: str, city: str, number: int = 0) -> str:
    return json.dumps(
        {
            "id": f"abcdefgh{number}",
            "type": "function",
            "function": {"name": name, "arguments": {"city": city}},
        },
    )


def called(words: str, *calls: str, thought: str = "") -> Message:
    return Message("assistant", words, tool_calls=calls, reasoning=thought)


def result(words: str, number: int = 0, name: str = "rain") -> Message:
    return Message("tool", words, name=name, tool_call_id=f"abcdefgh{number}")


RULES = Message("system", "Obey the rulebook.")
ASK = user("Do I need an umbrella?")
ASK_WITH_TOOLS = Message("user", "Rain there?", tools=TOOLS)
MORE = user("And what of Chur?")
ONE = (call("rain", "Bernex"),)
TWO = (*ONE, call("wind", "Churwalden", 1))
SUN = result('{"sky": "sunlit"}')
TALKS: dict[str, Conversation] = {
    "plain": (ASK, assistant("Better take one.")),
    "system": (RULES, ASK, assistant("Better take one.")),
    "turns": (ASK, assistant("Better take one."), MORE, assistant("There, 1 < 2.\n\nNo.")),
    "system and turns": (RULES, ASK, assistant("Yes."), MORE, assistant("No.")),
    "thought": (ASK, Message("assistant", "Yes.", reasoning="Clouds gather.")),
    "thoughts": (
        ASK,
        Message("assistant", "Yes.", reasoning="Clouds gather."),
        MORE,
        Message("assistant", "No.", reasoning="It lies\nbehind hills."),
    ),
    "call": (ASK_WITH_TOOLS, called("Let me look.", *ONE)),
    "call without words": (ASK_WITH_TOOLS, called("", *ONE)),
    "parallel calls": (ASK_WITH_TOOLS, called("", *TWO)),
    "thought and call": (ASK_WITH_TOOLS, called("", *ONE, thought="A tool knows.")),
    "result": (ASK_WITH_TOOLS, called("", *ONE), SUN, assistant("Dry.")),
    "results": (
        ASK_WITH_TOOLS,
        called("", *TWO),
        SUN,
        result("breezy", 1, "wind"),
        assistant("Dry and windy."),
    ),
    "call after call": (
        ASK_WITH_TOOLS,
        called("", *ONE),
        SUN,
        called("", call("wind", "Churwalden", 1)),
        result("breezy", 1, "wind"),
        assistant("Dry and windy."),
    ),
    "system, result, turns": (
        Message("system", RULES.content, tools=TOOLS),
        ASK,
        called("", *ONE, thought="A tool knows."),
        SUN,
        assistant("Dry."),
        MORE,
        assistant("Dry too."),
    ),
}


SWITCHES = (False, True)
VALUES: dict[str, tuple[object, ...]] = {
    "add_vision_id": SWITCHES,
    "builtin_tools": (["browser"], ["python", "browser"]),
    "current_date": ("2025-01-31", "2026-02-28"),
    "custom_tools": tuple([{"type": "function", "function": {"name": n}}] for n in ("fog", "hail")),
    "date_string": ("31 Jan 2025", "28 Feb 2026"),
    "enable_thinking": SWITCHES,
    "knowledge_cutoff": ("2024-06", "2025-06"),
    "low_effort": SWITCHES,
    "medium_effort": SWITCHES,
    "model_identity": ("You are Ann.", 'You are "Bo", 100 %} sure.\n'),
    "preserve_thinking": SWITCHES,
    "reasoning_effort": ("low", "medium"),
    "reasoning_strength": ("low", "high"),
    "tool_namespace_descriptions": ({"rain": "Wet."}, {"rain": "Not dry."}),
    "tools_in_user_message": SWITCHES,
    "truncate_history_thinking": SWITCHES,
}
"""Values of the arguments of published templates."""


def published() -> dict[str, str]:
    """The texts of all templates, each once, by package and name."""
    further = filter(None, os.environ.get("TETHER_TEMPLATES", "").split(os.pathsep))
    paths = (
        path
        for folder in (sysconfig.get_path("purelib"), *further)
        for path in Path(folder).rglob("*.jinja*")
    )
    texts = {
        path.read_text(encoding="utf-8", errors="replace"): path
        for path in sorted(paths, reverse=True)
    }
    return {
        f"{path.parent.parent.name}/{path.stem}": text
        for text, path in sorted(texts.items(), key=lambda item: str(item[1]))
        if "add_generation_prompt" in text or "messages" in text
    }


@dataclass(frozen=True)
class Published:
    """A template beside a tokenizer of bytes whose special tokens are the template's marks.

    `arguments` reach transformers as keywords of `apply_chat_template`, and tether as settings.
    """

    text: str
    arguments: Facts = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Any:
        tokenizer = tiny_tokenizer()
        tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>"})
        tokenizer.chat_template = self.text
        shown = [self.rendered(talk) or "" for talk in TALKS.values()]
        marks = sorted({mark for text in (self.text, *shown) for mark in MARK.findall(text)})
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
        return tokenizer

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """The marks that end a reply, or that begin the turn behind it where no mark ends it; the
        EOS comes first, as in a model's own list.
        """
        found = []
        for earlier, reply, later in (
            (TALKS["plain"][:1], assistant("answer"), MORE),
            (TALKS["call"][:1], called("", call("rain", "answer")), SUN),
        ):
            alone, followed = (
                (self.rendered(talk) or "").rpartition("answer")[2]
                for talk in ((*earlier, reply), (*earlier, reply, later))
            )
            between = followed[: max(followed.find(later.content), 0)]
            ends = [mark for mark in MARK.findall(alone) if END.search(mark)]
            found += ends[:1] if "<|end|>" in ends else ends[-1:] or MARK.findall(between)[:1]
        return tuple(dict.fromkeys(("<eos>", *found)))

    @cached_property
    def encoder(self) -> ChatEncoder:
        return ChatEncoder(
            self.tokenizer,
            tuple(self.tokenizer.convert_tokens_to_ids(stop) for stop in self.stops),
            arguments=self.arguments,
        )

    def rendered(self, messages: Conversation, *, waiting: bool = False) -> str | None:
        """transformers' text for a conversation; None where the template raises.

        Words come as text or as a list of parts, and thoughts under the key that the template knows.
        """
        words = _said(messages)
        texts = list[str]()
        for key, in_parts in product(THOUGHTS, (False, True)):
            text = self._rendered(messages, key, in_parts, waiting)
            if text is not None:
                texts.append(text)
                if all(word in text for word in words):
                    return text
        return max(texts, key=lambda text: sum(map(text.count, words)), default=None)

    def _rendered(self, messages: Conversation, key: str, parts: bool, waiting: bool) -> str | None:
        rows = []
        for message in messages:
            row = {key if k == "reasoning_content" else k: v for k, v in message.as_row().items()}
            row.pop("tools", None)
            rows.append(
                row | {"content": [{"type": "text", "text": message.content}]} if parts else row,
            )
        tools = next((json.loads(m.tools) for m in messages if m.tools), None)
        template = self.tokenizer if "tokenizer" in self.__dict__ else _bare(self.text)
        try:
            return template.apply_chat_template(
                rows,
                tools=tools,
                tokenize=False,
                add_generation_prompt=waiting,
                **self.arguments,
            )
        except Exception:  # noqa: BLE001  (a template may raise anything)
            return None

    def check(self, messages: Conversation) -> str:
        """What comes of a conversation's last reply: `equal`, `rewritten` or `refused: reason`.

        Raises:
            AssertionError: a prompt or a reply is wrong, or a refusal is untrue.
        """
        earlier, reply = messages[:-1], messages[-1]
        before = self.rendered(earlier, waiting=True)
        after = self.rendered(messages)
        try:
            prompt = self.encoder.prompt(earlier)
            encoded = self.encoder.conversation(messages, "last")
        except DataError as error:
            if self._is_true(str(error), messages, before, after):
                return f"refused: {error}"
            raise AssertionError(f"untrue: {error}") from error
        assert before is not None and after is not None, "transformers refuses what tether takes"
        assert list(prompt) == self._ids(before), "the prompt is not transformers' text"
        trained = self.tokenizer.decode(list(encoded.ids[encoded.prompt_length :]))
        assert all(encoded.trained[encoded.prompt_length :]), "a gap in what is trained"
        assert any(trained.endswith(stop) for stop in self.stops), "no stop token"
        for part in _said((reply,)):
            assert part in trained or json.dumps(part)[1:-1] in trained, f"not trained: {part!r}"
        assert encoded.prompt == prompt, "the reply follows another prompt"
        if not after.startswith(before):
            end = next(trained[: -len(s)] for s in self.stops if trained.endswith(s))
            if not _written(reply.reasoning, after):
                end = end.rpartition("</think>")[2]  # a thought behind the mark that opens it
            assert end.strip() in after, "not transformers' words"
            assert not _repeated(before, trained), f"trained again: {_repeated(before, trained)!r}"
            return "rewritten"
        assert trained == self._expected(messages, before, after), "not the rest of the text"
        return "equal"

    def _expected(self, messages: Conversation, before: str, after: str) -> str:
        """The rest of the text behind a prompt up to the stop token behind its last part."""
        rest = after[len(before) :]
        called = [part for part in _said(messages[-1:]) if messages[-1].tool_calls]
        start = max(
            rest.find(messages[-1].content, rest.find(messages[-1].reasoning))
            + len(messages[-1].content),
            *(rest.rfind(part) + len(part) for part in called[-1:]),
            0,
        )
        ends = [i + len(stop) for stop in self.stops if (i := rest.find(stop, start)) >= 0]
        if ends:
            return rest[: min(ends)]
        later = SUN if messages[-1].tool_calls else MORE
        thoughtless = Message("assistant", messages[-1].content)
        for turn in (messages[-1], thoughtless):
            alone = self.rendered((*messages[:-1], turn))
            longer = self.rendered((*messages[:-1], turn, later))
            if alone and longer and longer.startswith(alone):
                gap = longer[len(alone) :]
                for stop in self.stops:
                    if gap.lstrip().startswith(stop):
                        return rest + gap[: gap.find(stop) + len(stop)]
                break
        return rest + self.stops[0]

    def _is_true(
        self,
        reason: str,
        messages: Conversation,
        before: str | None,
        after: str | None,
    ) -> bool:
        """True if the template does what a refusal says of it."""
        if "refuses this conversation" in reason:
            return before is None or after is None
        reply = messages[-1]
        before, after = before or "", after or ""
        thoughtless = reply.reasoning and not _written(reply.reasoning, after)
        calls = [part for m in messages for part in _said((m,), calls_alone=True)]
        words = [m.content for m in messages if m.content]
        return {
            "leaves out 2 tools": not _written("Gives the rain.", before),
            "leaves out tool calls": any(not _written(part, after) for part in calls),
            "leaves out the reasoning": bool(thoughtless),
            "no thought can follow": bool(reply.reasoning) and not after.startswith(before),
            "rewrites an assistant turn": not _written(reply.content, after),
            "leaves out or rewrites": any(not _written(part, after) for part in words),
        }[next(key for key in REASONS if key in reason)]

    def check_all(self, messages: Conversation) -> None:
        """Every reply counts once, behind its own prompt and with its own tokens."""
        try:
            alone = [self.encoder.conversation(part, "last") for part in prefixes(messages)]
            sequences = self.encoder.conversations(messages)
        except DataError:
            return
        runs = []
        for ids, trained in ((sequence.ids, sequence.trained) for sequence in sequences):
            edges = [i for i in range(len(ids) + 1) if (*trained, False)[i] != (False, *trained)[i]]
            runs += [(ids[:a], ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
        own = [(one.prompt, one.ids[one.prompt_length :]) for one in alone]
        assert sorted(runs) == sorted(own), "not each reply once behind its own prompt"

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def _bare(template: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>"})
    tokenizer.chat_template = template
    return tokenizer


def _said(messages: Conversation, *, calls_alone: bool = False) -> list[str]:
    """What the turns say, in the order in which templates write it: thought, words, calls."""
    parts = []
    for message in messages:
        parts += [] if calls_alone else [message.reasoning, message.content]
        for text in message.tool_calls:
            function = json.loads(text)["function"]
            parts += [function["name"], *function["arguments"].values()]
    return [part for part in parts if part]


def _written(part: str, text: str) -> bool:
    return part in text or json.dumps(part)[1:-1] in text


def _repeated(before: str, trained: str) -> str:
    """The longest beginning of what is trained, with a mark in it, that the prompt ends with."""
    told, again = "".join(before.split()), "".join(trained.split())
    sizes = range(min(len(told), len(again)), 0, -1)
    found = next((again[:size] for size in sizes if told.endswith(again[:size])), "")
    return found if MARK.search(found) or "think>" in found else ""


def prefixes(messages: Conversation) -> Iterator[Conversation]:
    """The conversation up to each of its replies."""
    for place, message in enumerate(messages, 1):
        if message.role == "assistant":
            yield messages[:place]


def main() -> None:
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {}
    templates = published()
    for name, text in templates.items():
        template = Published(text)
        for kind, talk in TALKS.items():
            try:
                template.check_all(talk)
            except AssertionError as error:
                wrong.setdefault(name, []).append(f"{kind}: {error}")
            for prefix in prefixes(talk):
                try:
                    outcome = template.check(prefix)
                except AssertionError as error:
                    outcome = "wrong"
                    wrong.setdefault(name, []).append(f"{kind}, {len(prefix)} turns: {error}")
                counts[outcome.partition(":")[0]] += 1
                if outcome.startswith("refused"):
                    reasons[re.sub(r"this conversation: .*", "it", outcome, flags=re.DOTALL)] += 1
    print(f"{len(templates)} templates, {sum(counts.values())} prefixes: {dict(counts)}")
    for reason, count in reasons.most_common():
        print(f"{count:6} {reason}")
    for name, failures in wrong.items():
        print(name, *failures, sep="\n    ")


if __name__ == "__main__":
    main()
