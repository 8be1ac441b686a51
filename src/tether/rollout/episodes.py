"""Episodes: rollouts of several replies, with what an environment says between them.

The engine draws token ids, and what the environment says is appended to them (`data.bridge`). So
the policy learns exactly the tokens that it drew. A draw depends on (seed, task, sample, turn,
position) and on the policy alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from typing import Unpack

from tether.core.errors import DataError
from tether.core.protocols import DrawArguments, Environments, Finished, Turn
from tether.core.stopping import in_thread
from tether.core.types import (
    ChatRole,
    Conversation,
    Message,
    Prompt,
    Rollout,
    RolloutGroup,
    Sampling,
    Score,
    Spans,
    StopReason,
)
from tether.data.bridge import TurnBridge
from tether.data.calls import Calls
from tether.data.chat import ChatEncoder
from tether.rollout.drawn import (
    Drawn,
    Draws,
    Ids,
    TokenEngine,
    draws_of,
    opening_of,
    ordinal_of_part,
    prompt_ids,
)
from tether.rollout.talk import talk_with
from tether.settings.environment import EpisodeLimits

_COMPLAINERS: tuple[ChatRole, ...] = ("tool", "user")


@dataclass(kw_only=True)
class _Episode:
    """An episode that is played; `ids` are those behind its prompt, and `spans` what the policy
    wrote of them. `shown` turns of its `talk` are the prompt's.
    """

    prompt: Prompt
    sample: int
    opened: Prompt | None = None
    place: int = 0
    start: Ids = ()
    ids: Ids = ()
    spans: Spans = ()
    forks: Ids = ()
    talk: Conversation = ()
    shown: int = 0
    logprobs: tuple[float, ...] = ()
    rewards: tuple[tuple[int, float], ...] = ()
    calls: int = 0
    unread: int = 0
    text: str = ""
    end: StopReason | None = None
    over: bool = False
    failure: str = ""

    @property
    def ordinal(self) -> int:
        """The number by which the draws of the next reply differ from all others of a run."""
        return ordinal_of_part(self.place, self.sample, len(self.spans))

    @property
    def context(self) -> Ids:
        """The ids that precede the next reply."""
        return self.ids[self.forks[-1] :] if self.forks else self.start + self.ids

    def write(self, drawn: Drawn, room: int) -> None:
        """Append a reply, or as much of it as there is room for."""
        ids = drawn.ids[:room]
        begin = len(self.ids)
        self.ids += ids
        self.spans += ((begin, begin + len(ids)),)
        self.logprobs += drawn.logprobs[:room]
        if len(ids) < len(drawn.ids) or drawn.reason is StopReason.LENGTH:
            self.end = StopReason.LENGTH

    def fail(self, reason: str) -> None:
        self.failure = reason
        self.end = self.end or StopReason.STOP_TOKEN

    @property
    def outcome(self) -> Score:
        """The sum of the replies' rewards; failed where the environment failed, or gave none."""
        parts = {
            "turns": len(self.spans),
            "calls": self.calls,
            "unread_calls": self.unread,
            "segments": 1 + len(self.forks),
        }
        if self.failure or not self.rewards:
            return Score(None, parts, self.failure or "the environment gave no reward")
        return Score(sum(reward for _, reward in self.rewards), parts, steps=self.rewards)


@dataclass(eq=False)
class EpisodeEngine:
    """Has the interface of core.protocols.Engine; its rollouts are episodes.

    Args:
        engine: draws the replies.
        context_length: of the model, in tokens.
        own_pace: the episodes of each task make their turns by themselves, in a thread of their
            own, since the engine takes requests from several; otherwise all make them together.

    Raises:
        DataError: the chat template leaves out the tools, or has calls that cannot be read.
    """

    engine: TokenEngine
    environments: Environments
    encoder: ChatEncoder
    limits: EpisodeLimits
    _: KW_ONLY
    context_length: int = 2**31
    own_pace: bool = False
    longest: int = 0
    """Context that leaves room for a reply, in tokens."""

    def __post_init__(self) -> None:
        tools = self.environments.tools
        self.policy_version = self.engine.policy_version
        self.bridge = TurnBridge(self.encoder, tools)
        self.calls = Calls(self.encoder, tools) if tools else None

    def update_weights(self, version: int) -> None:
        self.engine.update_weights(version)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        **how: Unpack[DrawArguments],
    ) -> list[RolloutGroup]:
        """See core.protocols.Engine.generate.

        Raises:
            DataError: a prompt and its first reply do not fit the model's context.
        """
        self.policy_version = self.engine.policy_version
        self.longest = self.context_length - sampling.max_new_tokens
        progress = how.pop("progress", None)
        num_samples = how.get("num_samples", 1)
        episodes = [
            _Episode(prompt=prompt, sample=sample)
            for prompt in prompts
            for sample in range(num_samples)
        ]
        try:
            openings = [*self._openings(episodes, num_samples)]
            draws = draws_of(self, openings, sampling, **how)
            for number, episode in enumerate(episodes):
                task = number // num_samples
                episode.place = draws.ordinals[task]
                episode.start = draws.rows[task]
                episode.opened = openings[task]
                episode.talk = episode.opened.messages
            if self.own_pace:
                self._play_apart(episodes, draws, progress)
            else:
                self._play(dict(enumerate(episodes)), draws, progress)
            self._end(episodes)
        finally:
            self.environments.end()
        rollouts = [self._rollout(episode, sampling) for episode in episodes]
        return [
            RolloutGroup(prompt, tuple(rollouts[first : first + num_samples]))
            for prompt, first in zip(prompts, range(0, len(rollouts), num_samples), strict=True)
        ]

    def _play_apart(self, episodes: Sequence[_Episode], draws: Draws, progress: Finished) -> None:
        """All turns of all episodes, those of each task by themselves."""
        count = draws.num_samples
        starts = range(0, len(episodes), count)
        tasks = [{n: episodes[n] for n in range(first, first + count)} for first in starts]
        with self.environments.several():
            try:
                parts = (
                    draws._replace(rows=[row], ordinals=[ordinal])
                    for row, ordinal in zip(draws.rows, draws.ordinals, strict=True)
                )
                played = [
                    in_thread(partial(self._play, task, part, None))
                    for task, part in zip(tasks, parts, strict=True)
                ]
                for done, future in enumerate(as_completed(played), 1):
                    future.result()
                    if progress:
                        progress(done * count)
            finally:  # a thread that goes on finds no episode, and ends
                for task in tasks:
                    task.clear()

    def _play(self, episodes: Mapping[int, _Episode], draws: Draws, progress: Finished) -> None:
        """All turns of episodes, which make them together."""
        room = min(self.limits.tokens, self.context_length - max(map(len, draws.rows)))
        room *= self.limits.history == "sampled"
        talk = talk_with(self.engine, draws, room)
        replies = dict(zip(episodes, talk.begin(), strict=True))
        while replies:
            following = self._take(episodes, replies)
            if progress:
                progress(len(episodes) - len(following))
            contexts = {number: episodes[number].context for number in following}
            keys = {number: episodes[number].ordinal for number in following}
            replies = talk.go_on(contexts, keys) if following else {}

    def _end(self, episodes: Sequence[_Episode]) -> None:
        """Let go of the environments; those whose episode a limit ended may still give a reward."""
        cut = [n for n, one in enumerate(episodes) if not (one.over or one.failure)]
        for number, reward in self.environments.end(cut).items():
            episode = episodes[number]
            if isinstance(reward, str):
                episode.fail(reward)
            elif reward is not None:
                episode.rewards += ((len(episode.ids) - 1, reward),)

    def _openings(self, episodes: Sequence[_Episode], num_samples: int) -> Iterator[Prompt]:
        """Begin all episodes; the opening of each task, which its episodes share."""
        begun = self.environments.begin({n: e.prompt for n, e in enumerate(episodes)})
        for first in range(0, len(episodes), num_samples):
            group = range(first, first + num_samples)
            prompt = episodes[first].prompt
            openings = (one for n in group if not isinstance(one := begun[n], str))
            opening = next(openings, prompt.messages)
            length = len(prompt.messages)
            for number in group:
                result = begun[number]
                episodes[number].shown = length * (opening[:length] == prompt.messages)
                if isinstance(result, str):
                    episodes[number].failure = result
                elif result != opening:
                    episodes[number].failure = "the environment begins one task in several ways"
            head, *others = opening
            shown = replace(
                head,
                tools=self.environments.tools or head.tools,
                template=prompt.messages[0].template,
            )
            opened = replace(prompt, messages=(shown, *others))
            try:
                room = self.context_length - self.longest
                prompt_ids(self.encoder, opened, room, self.context_length)
            except DataError as error:
                opened = prompt
                for number in group:
                    episodes[number].failure = f"the environment's opening {error}"
            yield opened

    def _take(
        self,
        episodes: Mapping[int, _Episode],
        replies: Mapping[int, Drawn],
    ) -> list[int]:
        """Append a reply to each episode, and what its environment says to it; the numbers of those
        that go on.
        """
        messages: dict[int, Message] = {}
        answers: dict[int, Turn | str] = {}
        for number, drawn in replies.items():
            episode = episodes[number]
            episode.write(drawn, self._room(episode))
            episode.text = self.encoder.decode(episode.ids[slice(*episode.spans[-1])])
            if episode.failure:
                answers[number] = episode.failure
                continue
            try:
                message = self._read(episode)
            except DataError as error:  # for the policy to read
                episode.unread += 1
                episode.talk += (Message("assistant", episode.text),)
                fault = json.dumps({"error": str(error)})
                answers[number] = Turn((Message(self._complainer, fault),))
            else:
                messages[number] = message
                episode.talk += (message,)
                episode.calls += len(message.tool_calls)
        answers |= self.environments.step(messages)
        return [number for number in replies if self._go_on(episodes[number], answers[number])]

    def _room(self, episode: _Episode) -> int:
        """Tokens that an episode may still have."""
        most = min(len(episode.start) + self.limits.tokens, self.context_length)
        return most - len(episode.context)

    def _read(self, episode: _Episode) -> Message:
        """The last reply as a message. One that was cut calls nothing.

        Raises:
            DataError: it has a call that cannot be read.
        """
        if self.calls is None or episode.end is not None:
            return Message("assistant", episode.text)
        first, stop = episode.spans[-1]
        before = episode.start + episode.ids[:first]
        return self.calls.read(before, episode.ids[first:stop], episode.calls)

    def _go_on(self, episode: _Episode, answer: Turn | str) -> bool:
        """Append what the environment said, or end the episode; True if it goes on."""
        if isinstance(answer, str):
            episode.fail(answer)
            return False
        if answer.reward is not None:
            episode.rewards += ((len(episode.ids) - 1, answer.reward),)
        episode.over = answer.done
        if episode.end is None and answer.done:
            episode.end = StopReason.STOP_TOKEN
        if episode.end is None and len(episode.spans) >= self.limits.turns:
            episode.end = StopReason.TURNS
        if episode.end is not None:
            return False
        calls = [json.loads(call) for call in episode.talk[-1].tool_calls]
        try:
            template = episode.talk[0].template
            ids = self.bridge.after(episode.ids[-1], calls, answer.messages, template)
        except DataError as error:
            episode.fail(str(error))
            return False
        before = episode.ids, episode.forks
        talk = (*episode.talk, *answer.messages)
        anew = self._rewritten(episode.context + ids, talk)
        episode.forks += (len(episode.ids),) * bool(anew)
        episode.ids += anew or ids
        if self._room(episode) <= 0 or len(episode.context) > self.longest:
            episode.ids, episode.forks = before
            episode.end = StopReason.FULL
            return False
        episode.talk = talk
        return True

    def _rewritten(self, row: Ids, talk: Conversation) -> Ids:
        """The template's own ids of a conversation that `row` spells otherwise; none where it does
        not, or the template refuses the replies.
        """
        if self.limits.history == "sampled":
            return ()
        with suppress(DataError):
            anew = self.encoder.prompt(talk)
            one, other = (
                self.encoder.tokenizer.decode([*ids], skip_special_tokens=False)
                for ids in (row, anew)
            )
            return anew if one != other else ()
        return ()

    @cached_property
    def _complainer(self) -> ChatRole:
        """The role of the turn that names a fault of a reply: a tool's, if the template knows one
        without a call.
        """
        for role in _COMPLAINERS:
            with suppress(DataError):
                self.bridge.after(self.encoder.stop_ids[0], (), (Message(role, "fault"),))
                return role
        raise DataError("the chat template takes no turn behind a reply")

    def _rollout(self, episode: _Episode, sampling: Sampling) -> Rollout:
        assert episode.end is not None
        return Rollout(
            episode.start,
            episode.ids,
            episode.logprobs,
            episode.end,
            episode.text,
            episode.sample,
            self.policy_version,
            sampling,
            episode.prompt,
            spans=episode.spans,
            forks=episode.forks,
            opening=opening_of(self.encoder, episode.start),
            turns=episode.talk[episode.shown :],
            opened=episode.opened,
            outcome=episode.outcome,
            failure=episode.failure,
        )
