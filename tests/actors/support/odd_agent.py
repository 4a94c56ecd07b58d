"""An agent and a policy that do what is odd, both decided by a seed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from actors.engine.tokenizer import ModelTokenizer
from broker.protocol.agent_calls import AgentAnswer
from tests.actors.support.agent_world import Message, StoredMailbox

WORDS = (
    "look",
    "there",
    " at",
    " the",
    "é",
    "漢字",
    "🙂👩‍👩‍👧",
    "\n",
    "  ",
    "x = 1;",
    "{}",
    "7",
    "don't",
)
HALF = "\ud83d"
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object"}},
    }
    for name in ("add", "search")
]


def some_text(rng: Random, control: Sequence[str]) -> str:
    """Make a text, sometimes with control tokens, spaces around it, or half a character."""
    odd = [*control, "</think>", "<tool_call>", "\U0010fffd1\U0010fffd", "AnswerOfTheAssistant"]
    parts = rng.choices(WORDS, k=rng.randint(0, 6))
    parts += rng.choices(odd, k=1) if rng.random() < 0.2 else []
    rng.shuffle(parts)
    return "".join(parts)


# --------------------------------------------------------------------------------------------------
# The policy: what it says to a call is decided by the conversation's seed and the call's number.


class Script:
    """Says odd things; the same to a call however often its actor is killed."""

    def __init__(self, tokenizer: ModelTokenizer, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.turn = cache(self._turn)

    def _turn(self, number: int) -> list[int]:
        """Return all tokens that it would say to a call if it had room."""
        rng = Random(f"{self.seed} {number}")
        ids: list[int] = []
        for part in self._parts(rng):
            pieces = [part]
            if part and rng.random() < 0.4:  # tokens that no tokenizer makes of this text
                at = rng.randrange(len(part))
                pieces = [part[:at], part[at : at + 1], part[at + 1 :]]
            for piece in pieces:
                ids += self.tokenizer._tokenizer.encode(piece, add_special_tokens=False)
        if rng.random() < 0.2:
            ids += [rng.randrange(self.tokenizer.num_tokens) for _ in range(rng.randint(1, 8))]
        ids = [token for token in ids if token not in self.tokenizer.stop_token_ids]
        return [*ids, self.tokenizer.stop_token_ids[0]]

    def _parts(self, rng: Random) -> Iterator[str]:
        if rng.random() < 0.3:
            begin = rng.choice(["<think>\n", "<think>", ""])
            yield begin + some_text(rng, ()) + rng.choice(["</think>", "\n</think>\n\n"])
        way = rng.random()
        if way < 0.35:
            yield from (self._call(rng) for _ in range(rng.randint(1, 3)))
        elif way < 0.45:
            arguments = json.dumps({"a": some_text(rng, ())})
            yield f'{{"name": "add", "parameters": {arguments}}}'
        else:
            yield some_text(rng, self.tokenizer._tokenizer.all_special_tokens)

    def _call(self, rng: Random) -> str:
        name, text = rng.choice(["add", "search"]), some_text(rng, ())
        spacing = rng.choice([(", ", ": "), (",", ":")])
        arguments = json.dumps(
            {"a": text, "b": 2}, ensure_ascii=rng.random() < 0.5, separators=spacing
        )
        written = f'{{"name": "{name}", "arguments": {arguments}}}'
        written = written[:-2] if rng.random() < 0.1 else written
        forms = [
            f"<tool_call>\n{written}\n</tool_call>",
            f"<tool_call>{written}</tool_call>\n",
            f"<tool_call><function={name}><parameter=a>{text}</parameter></function></tool_call>",
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
            f"[TOOL_CALLS][{written}]",
        ]
        begin = self.tokenizer.begin_of_call
        own = [form for form in forms if begin and form.startswith(begin)]
        return rng.choice(own if own and rng.random() < 0.8 else forms)


# --------------------------------------------------------------------------------------------------
# The agent: what it asks is decided by its seed and what it has heard.


@dataclass(frozen=True)
class Asked:
    """A call as its agent made it."""

    messages: list[Message]
    tools: list[Any]
    heard: int
    """Calls that were answered before."""


class OddAgent:
    """Goes on, goes back, rewrites, summarises, begins sub-agents, and asks several at once."""

    def __init__(
        self,
        box: StoredMailbox,
        rng: Random,
        control: Sequence[str],
        *,
        most_cut: float = 0.2,
        tools: list[dict[str, Any]] = TOOLS,
    ) -> None:
        self.box, self.rng, self.control, self.most_cut = box, rng, control, most_cut
        self.left = rng.randint(2, 6)
        self.tools = tools if rng.random() < 0.6 else []
        system = [{"role": "system", "content": "you help"}] if rng.random() < 0.5 else []
        self.chats = [[*system, {"role": "user", "content": "question " + self._text()}]]
        self.calls: dict[int, Asked] = {}
        self.heard = 0
        self.is_done = False

    def act(self) -> None:
        """Call again once all replies are there."""
        if len(self.box.replies) < len(self.calls):
            return
        for number in range(self.heard + 1, len(self.calls) + 1):
            reply = self.box.replies[number]
            if isinstance(reply, AgentAnswer):
                self.chats.append([*self.calls[number].messages, *self._go_on(reply)])
            elif "context_length" in reply.text:
                self.left = 0
        self.heard = len(self.calls)
        if not self.left:
            self.is_done = True
            return
        self.left -= 1
        for messages in self._next_chats():
            self._call(messages)

    def _call(self, messages: list[Message]) -> None:
        rng = self.rng
        tools = self.tools if rng.random() < 0.9 else []
        fields: dict[str, Any] = {"messages": messages, "return_token_ids": True}
        if tools:
            fields["tools"] = tools
        if rng.random() < self.most_cut:
            fields["max_tokens"] = rng.randint(1, 12)
        if rng.random() < 0.1:
            fields["stop"] = [rng.choice(["the", "\n", "7", "字"])]
        self.calls[self.box.call(fields)] = Asked(messages, tools, self.heard)

    def _go_on(self, reply: AgentAnswer) -> Iterator[Message]:
        """Yield the reply as a client sends it back, and what follows."""
        rng = self.rng
        said: Message = {"role": "assistant", "content": reply.text or rng.choice(["", None])}
        if reply.reasoning and rng.random() < 0.5:
            said["reasoning_content"] = reply.reasoning
        calls = [
            {
                "id": f"of the client {call.call_id}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(json.loads(call.arguments), sort_keys=True),
                },
            }
            for call in reply.tool_calls
        ]
        yield {**said, "tool_calls": calls} if calls else said
        for call in calls:
            yield {"role": "tool", "tool_call_id": call["id"], "content": self._content()}
        if not calls or rng.random() < 0.2:
            yield {"role": rng.choice(["user", "user", "tool"]), "content": self._content()}

    def _next_chats(self) -> Iterator[list[Message]]:
        rng, last = self.rng, self.chats[-1]
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            way = rng.random()
            if way < 0.6:
                yield last
            elif way < 0.7:
                yield rng.choice(self.chats)
            elif way < 0.8:
                place = rng.randrange(len(last))
                changed = {**last[place], "content": f"instead {rng.random()}" + self._text()}
                yield [*last[:place], changed, *last[place + 1 :]]
            elif way < 0.9 and len(last) > 3:  # a summary in place of what was said
                yield [last[0], {"role": "user", "content": "so far: " + self._text()}, *last[-1:]]
            else:
                task = [{"role": "user", "content": self._text()}]
                yield [{"role": "system", "content": "you are a sub-agent"}, *task]

    def _text(self) -> str:
        return some_text(self.rng, self.control)

    def _content(self) -> Any:
        text = self._text()
        way = self.rng.random()
        if way < 0.1:
            return [{"type": "text", "text": text}, {"type": "text", "text": "more"}]
        return text + HALF if way < 0.15 else text
