"""The choice of pairs for people, of the number of people, and of the side of an answer.

Every draw is a hash of the seed and of the drawn thing. So the order of prompts, responses and
people changes nothing. Adding or removing a prompt changes no draw of another one.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from pydantic import Field

from tether.core.errors import ConfigError, DataError
from tether.people.labels.votes import Side
from tether.settings.config import Config
from tether.settings.pairs import Strategy


class PairsConfig(Config):
    """The pairs to ask, and the number of people to ask.

    `uncertain`: the reward model's P(first preferred) is nearest to one half. `information`: the
        answer is most informative about which member of an ensemble is right. `disagreement`: the
        members differ
    most about the difference. `length_matched`: lengths differ by `length_difference` of the longer
    at most, so that length cannot decide. `ranking`: all pairs of `ranked` responses of a prompt,
    or of all that it has.
    """

    strategy: Strategy = "random"
    num_pairs: int = Field(100, ge=1)
    per_prompt: int | None = Field(None, ge=1)
    """The largest number of pairs of one prompt, by default 3; a ranking takes a prompt whole."""
    ranked: int | None = Field(None, ge=2)
    length_difference: float | None = Field(None, ge=0, lt=1)
    """By default 0.1."""
    overlap: int = Field(1, ge=1)
    """The number of people who judge a pair."""
    shared_share: float = Field(0.0, ge=0, le=1)
    """This share of the pairs, drawn at random, is judged by `shared_overlap` people, to measure
    agreement.
    """
    shared_overlap: int | None = Field(None, ge=2)
    seed: int = 0

    def faults(self) -> Iterator[str]:
        useless = {
            "per_prompt": self.per_prompt is not None and self.strategy == "ranking",
            "ranked": self.ranked is not None and self.strategy != "ranking",
            "length_difference": self.length_difference is not None
            and self.strategy != "length_matched",
            "shared_overlap": self.shared_overlap is not None and not self.shared_share,
        }
        because = f"with strategy = '{self.strategy}', shared_share = {self.shared_share:g}"
        yield from (
            f"{option} has no effect {because}"
            for option, without_effect in useless.items()
            if without_effect
        )
        if self.shared_share and (self.shared_overlap or 0) <= self.overlap:
            yield (
                "shared_share asks for a shared_overlap above overlap: how many people judge a "
                "shared pair"
            )


@dataclass(frozen=True)
class Response:
    """A response that may be asked about; scores are a reward model's log-odds, `members` one a
    member of an ensemble.

    Without members, `score` and `spread` may give their mean and standard deviation.
    """

    id: str
    text: str
    score: float | None = None
    spread: float | None = None
    _: KW_ONLY
    members: tuple[float, ...] = ()


@dataclass(frozen=True)
class Pair:
    """Two responses of a prompt, `first` the one whose id sorts first. `value` is the strategy's,
    higher is asked earlier.
    """

    prompt: str
    first: str
    second: str
    strategy: str = ""
    _: KW_ONLY
    value: float = 0.0
    people: int = 1

    @property
    def item(self) -> str:
        return f"{self.prompt}/{self.first}/{self.second}"


def choose_pairs(
    responses: Mapping[str, Sequence[Response]],
    config: PairsConfig,
    *,
    asked: Collection[str] = (),
) -> list[Pair]:
    """The pairs to ask, the most telling first, at most `config.num_pairs`.

    `responses` gives those of each prompt; `asked` the items that were asked before. Empty texts
    are never asked about, and of texts that differ in white space alone one is.
    Trap: what is uncertain to a reward model is often uncertain to people: agreement on such pairs
        understates that on others.

    Raises:
        ConfigError: the strategy needs scores that a response lacks.
        DataError: two responses of a prompt have one id.
    """
    fresh = []
    before = set(asked)
    for prompt, some in responses.items():
        if len({response.id for response in some}) < len(some):
            raise DataError(f"{prompt}: two responses have one id; every response needs its own")
        usable = _distinct(some)
        if config.ranked is not None:
            drawn = sorted(usable, key=lambda response: _uniform(config.seed, prompt, response.id))[
                : config.ranked
            ]
            usable = sorted(drawn, key=lambda response: response.id)
        for x, y in itertools.combinations(usable, 2):
            pair = Pair(prompt, x.id, y.id, config.strategy)
            if pair.item not in before and (value := _value(x, y, config, prompt)) is not None:
                fresh.append(replace(pair, value=value))
    # A ranking is asked prompt by prompt; else equal values fall in an order of their own for each
    # seed.
    fresh.sort(
        key=lambda pair: (
            -pair.value,
            _uniform(config.seed, pair.prompt if config.strategy == "ranking" else pair.item),
        ),
    )
    return _shared(_covering(fresh, config), config)


def shown_left(seed: int, item: str, annotator: str) -> Side:
    """The left response of a pair for a person: random, and the same every time."""
    return "first" if _uniform(seed, "left", item, annotator) < 0.5 else "second"


def _value(x: Response, y: Response, config: PairsConfig, prompt: str) -> float | None:
    """The value of a pair to a strategy; None where it does not want the pair at all."""
    if config.strategy in ("random", "ranking"):
        return 0.0
    if config.strategy == "length_matched":
        limit = 0.1 if config.length_difference is None else config.length_difference
        shorter, longer = sorted((len(_text(x)), len(_text(y))))
        # None is preferred among those that match: the nearest lengths are mostly those of cut-off
        # or very short texts.
        return 0.0 if longer - shorter <= limit * longer else None
    differences = (
        [a - b for a, b in zip(x.members, y.members, strict=False)]
        if len(x.members) == len(y.members)
        else []
    )
    single = [x.score - y.score] if x.score is not None and y.score is not None else []
    match config.strategy:
        case "uncertain" if chances := _chances(differences or single):
            return _entropy(statistics.fmean(chances))
        case "information" if len(chances := _chances(differences)) > 1:
            return _entropy(statistics.fmean(chances)) - statistics.fmean(map(_entropy, chances))
        case "disagreement" if len(differences) > 1:
            return statistics.pstdev(differences)
        case "disagreement" if x.spread is not None and y.spread is not None:
            # without the members their errors are taken to be independent
            return math.hypot(x.spread, y.spread)
    needs = {
        "uncertain": "score or members",
        "information": "members, two at least",
        "disagreement": "members or spread",
    }
    raise ConfigError(
        f"strategy = '{config.strategy}' needs {needs[config.strategy]} of each "
        f"response; {prompt} lacks them",
    )


def _covering(pairs: Sequence[Pair], config: PairsConfig) -> list[Pair]:
    """The first pairs within the limits of the whole and of each prompt; of a ranking, whole
    prompts.
    """
    of_prompt = Counter(pair.prompt for pair in pairs)
    taken = Counter()
    chosen = []
    for pair in pairs:
        if config.strategy == "ranking":
            # Begun is finished: a part of a ranking is none.
            fits = (
                bool(taken[pair.prompt]) or len(chosen) + of_prompt[pair.prompt] <= config.num_pairs
            )
        else:
            fits = len(chosen) < config.num_pairs and taken[pair.prompt] < (config.per_prompt or 3)
        if fits:
            taken[pair.prompt] += 1
            chosen.append(pair)
    return chosen


def _shared(pairs: Sequence[Pair], config: PairsConfig) -> list[Pair]:
    number = round(config.shared_share * len(pairs))
    chosen = {
        pair.item
        for pair in sorted(pairs, key=lambda pair: _uniform(config.seed, "shared", pair.item))[
            :number
        ]
    }
    return [
        replace(p, people=(config.shared_overlap or 1) if p.item in chosen else config.overlap)
        for p in pairs
    ]


def _distinct(responses: Iterable[Response]) -> list[Response]:
    """The responses that are not empty, one of each text, sorted by id."""
    by_text = {
        _text(response): response
        for response in sorted(responses, key=lambda r: r.id, reverse=True)
    }
    return sorted((response for text, response in by_text.items() if text), key=lambda r: r.id)


def _text(response: Response) -> str:
    return " ".join(response.text.split())


def _uniform(*key: object) -> float:
    """A number in [0, 1) that depends on the key alone."""
    text = "\0".join(map(str, key))
    return (
        int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:7], "big")
        / 2**56
    )


def _chances(differences: Iterable[float]) -> list[float]:
    """P(first preferred) of differences of scores."""
    return [0.5 * (1 + math.tanh(difference / 2)) for difference in differences]


def _entropy(p: float) -> float:
    """Of a coin, in bits."""
    return -sum(q * math.log2(q) for q in (p, 1 - p) if q > 0)
