"""Places of calls in the log of a live agent: behind an earlier turn wherever that is possible.

A chat that goes on from an earlier turn keeps the sampled tokens, and what the chat template writes
behind that turn is all that is encoded. That holds if the template still writes all that was before
the turn as it did when the turn was sampled; else the call forks. Each call is rendered once,
whatever its length: what a template writes for one turn is seen in a chat of its own. No I/O.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from actors.engine.tokenizer import Chat, ModelTokenizer
from actors.engine.turns import StopStrings
from buffer.record.episode import Int32
from configs.errors import SettingsError

from .agent_chat import TurnRequest, next_prefix, prefixes
from .agent_log import place_on_path
from .rollout import Transcript


class RenderedChat(NamedTuple):
    """A chat as the template writes it, with the reasoning that its agent left out."""

    chat: Chat
    digests: tuple[bytes, ...]
    """Digests of the chat up to each message; the first is of none."""
    text: str


@dataclass(eq=False, slots=True)
class AgentTurn:
    """A call that is answered by the policy."""

    number: int
    request: TurnRequest
    """Empty once it is answered: a chat has the whole history."""
    parent: int | None
    context: tuple[int, ...]
    """Tokens of the environment between its parent and its first sampled token."""
    prompt_ids: tuple[int, ...]
    """All that its first token is sampled after; empty once it is answered."""
    stops: StopStrings | None
    room: int
    """Most tokens that it may have."""
    rendered: RenderedChat | None
    """What it answers; None for tokens, and once it is answered."""
    tokens: Transcript = field(default_factory=Transcript)
    """Its sampled tokens; empty once it is answered."""
    num_written: int = 0
    has_begun: bool = False
    """Its context, and maybe tokens, are in the log."""
    end: int = 0
    """Tokens of the log up to its last one there."""
    is_over: bool = False
    is_cut: bool = False
    message: dict[str, Any] | None = None
    """What it said, once it is answered."""
    after: tuple[int, int] = (0, 0)
    """Length and hash of the text that it was sampled after, once it is answered."""
    path: tuple[Sequence[tuple[int, int]], bool] | None = None
    """Stretches of the log up to its end, and whether they begin at a root, once asked for."""

    @property
    def length(self) -> int:
        """Tokens of its path so far."""
        return len(self.prompt_ids) + len(self.tokens)

    @property
    def num_waiting(self) -> int:
        """Tokens that are not in the log."""
        return len(self.tokens) - self.num_written + (0 if self.has_begun else len(self.context))


class TurnPlaces:
    """Places of new turns in a log."""

    def __init__(self, tokenizer: ModelTokenizer, transcript: Transcript) -> None:
        self.prompt = np.array((), dtype=np.int32)
        """Tokens of the first call. Shape [P]."""
        self._tokenizer = tokenizer
        self._transcript = transcript
        self._ended: defaultdict[bytes, list[AgentTurn]] = defaultdict(list)
        """Answered turns by the chat that they end."""

    def begin(self, prompt_ids: tuple[int, ...]) -> None:
        """Take the prompt of the first call."""
        self.prompt = np.array(prompt_ids, dtype=np.int32)

    def render(self, chat: Chat) -> RenderedChat:
        """Write a chat as the template does, with the reasoning that its agent left out.

        Raises:
            SettingsError: The template does not take it, or writes nothing for it.
        """
        digests = tuple(prefixes(chat))
        restored = chat._replace(messages=list(self._restored(chat, digests)))
        try:
            return RenderedChat(restored, digests, self._tokenizer.render_chat(restored))
        except SettingsError:  # a template may refuse reasoning, which the agent did not send
            return RenderedChat(chat, digests, self._tokenizer.render_chat(chat))

    def note(self, turn: AgentTurn) -> None:
        """Let calls go on from a turn that is answered."""
        if turn.rendered is None or turn.message is None:
            return
        text = turn.rendered.text
        turn.after = len(text), hash(text)
        self._ended[next_prefix(turn.rendered.digests[-1], turn.message)].append(turn)
        turn.rendered = None

    def place(
        self, rendered: RenderedChat, turns: Iterable[AgentTurn]
    ) -> tuple[int | None, tuple[int, ...]]:
        """Return the parent of a chat's next turn, and its tokens behind that.

        Args:
            rendered: The chat.
            turns: All turns of the log.
        """
        for count in range(len(rendered.chat.messages) - 1, 0, -1):
            ended = self._ended.get(rendered.digests[count])
            if not ended:
                continue
            turn = self._first_of(ended, rendered.chat.messages[count - 1])
            context = self._behind(turn, rendered, count)
            if context:
                return turn.end, context
        return self.fork_from(self._tokenizer.encode_rendered(rendered.text), turns)

    def fork_from(
        self, token_ids: tuple[int, ...], turns: Iterable[AgentTurn]
    ) -> tuple[int | None, tuple[int, ...]]:
        """Return the longest path that begins as these tokens do, and the tokens behind it."""
        wanted = np.array(token_ids, dtype=np.int32)
        of_prompt = _num_equal(self.prompt, wanted)
        best: tuple[int, int | None] = (0, None)
        for stretches, is_rooted in self._leaves(turns):
            before = 0 if is_rooted else len(self.prompt)
            if not is_rooted and of_prompt < before:
                continue
            common = before + self._num_common(stretches, wanted[before:])
            if common == len(wanted) and common > before:
                common -= 1  # a turn begins with a token of the environment
            if common > best[0]:
                best = common, place_on_path(stretches, common - before)
        common, parent = best
        return parent, token_ids[common:]

    def path_ids(self, stop: int | None) -> tuple[int, ...]:
        """Return the tokens on the path of the first `stop` of the log; None = of nothing."""
        if stop is None:
            return ()
        stretches, is_rooted = self._transcript.path(stop)
        ids: list[int] = [] if is_rooted else self.prompt.tolist()
        for stretch in stretches:
            ids += self._transcript.tokens(*stretch)
        return tuple(ids)

    def _leaves(
        self, turns: Iterable[AgentTurn]
    ) -> Iterator[tuple[Sequence[tuple[int, int]], bool]]:
        """Yield paths to whole turns that no turn goes on from, and the one to the prompt."""
        turns = list(turns)
        parents = {turn.parent for turn in turns}
        for turn in turns:
            if turn.message is not None and turn.end not in parents:
                turn.path = turn.path or self._transcript.path(turn.end)
                yield turn.path
        yield [], False

    def _num_common(self, stretches: Sequence[tuple[int, int]], wanted: Int32) -> int:
        """Count the first tokens of a path that are the wanted ones."""
        common = 0
        for start, stop in stretches:
            equal = _num_equal(self._transcript.array(start, stop), wanted[common:])
            common += equal
            if equal < stop - start:
                break
        return common

    def _restored(self, chat: Chat, digests: Sequence[bytes]) -> Iterator[Mapping[str, Any]]:
        """Yield the messages, with the reasoning of the policy's turns."""
        for digest, message in zip(digests[1:], chat.messages, strict=True):
            turns = self._ended.get(digest)
            said = self._first_of(turns, message).message if turns else None
            reasoning = said.get("reasoning_content") if said else None
            is_left_out = reasoning is not None and "reasoning_content" not in message
            yield {**message, "reasoning_content": reasoning} if is_left_out else message

    @staticmethod
    def _first_of(turns: Sequence[AgentTurn], message: Mapping[str, Any]) -> AgentTurn:
        """Of turns that said the same, return the first, of those of this reasoning if any."""
        sent = message.get("reasoning_content")
        return min(
            turns,
            key=lambda turn: ((turn.message or {}).get("reasoning_content") != sent, turn.number),
        )

    def _behind(
        self, turn: AgentTurn, rendered: RenderedChat, count: int
    ) -> tuple[int, ...] | None:
        """Return the tokens of a chat behind a turn; None if it is not written as it was."""
        length, before = turn.after
        if hash(rendered.text[:length]) != before:
            return None
        last = self._transcript.tokens(turn.end - 1, turn.end)[0]
        return self._tokenizer.encode_behind(
            rendered.chat.messages[count - 1],
            rendered.chat.messages[count],
            rendered.text[length:],
            variables=rendered.chat.variables,
            is_open=last not in self._tokenizer.stop_token_ids,
        )


def _num_equal(ids: Int32, wanted: Int32) -> int:
    """Count the tokens up to the first that is not equal, or one's end."""
    length = min(len(ids), len(wanted))
    differ = ids[:length] != wanted[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length
