"""Random conversations of live agents over many chat templates, with kills: what must hold of each.

    python -m tests.system.random_conversations --count 10000 --model FOLDER_OR_NAME

An agent without I/O asks, rewrites, forks and begins sub-agents; a policy without a model says what
is odd: tokens that no tokenizer would make of their text, halves of characters, control tokens,
thinking, calls of tools, malformed ones. What must hold is found a second time, from the texts that
the chat template renders. In some conversations a small engine samples, and what it recorded is
compared with the learner's log-probs and gradients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from actors.engine.engine import Engine
from actors.engine.tokenizer import ModelTokenizer
from actors.engine.torch_engine import TorchOptions, torch_engine
from broker.protocol.agent_calls import AgentAnswer, ids_of
from buffer.record.codec import decode_completion, join_completions
from buffer.record.episode import Episode
from configs.errors import SettingsError
from learner.model.policy import Policy
from learner.model.saved_model import load_causal_lm
from tests.actors.support.agent_world import Actors, Message, check_record
from tests.actors.support.chat_families import (
    FAMILIES,
    chat_tokenizer,
    takes_tools,
    wheel_templates,
)
from tests.actors.support.odd_agent import HALF, TOOLS, Asked, OddAgent, Script
from tests.learner.support.exact_gradients import (
    EXACT,
    SHAPE,
    assert_equal,
    packed,
    packed_alone,
    train,
)
from tests.learner.support.made_branches import tokens_to_train, trained_tokens
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.padded import PaddedPolicy
from tests.learner.support.random_models import make_random_model

# --------------------------------------------------------------------------------------------------
# What must hold of the prompts: texts are compared with the chat template's, and ids with those
# that were sampled.
#
# Each control token is one character of private use in the messages of this second way, so that
# those in a text are only what the template writes.


@dataclass(frozen=True)
class Answered:
    """A turn that was answered."""

    number: int
    message: Message
    ids: tuple[int, ...]
    """All up to its last token."""


class Prompts:
    """The prompt that each turn must have."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self.tokenizer = tokenizer
        self.control = sorted(set(tokenizer._tokenizer.all_special_tokens), key=len, reverse=True)
        self.stops = tokenizer._tokenizer.convert_ids_to_tokens(list(tokenizer.stop_token_ids))
        self.answered: defaultdict[str, list[Answered]] = defaultdict(list)
        """By the chat that they end."""
        self.kinds: Counter[str] = Counter()

    def check(self, number: int, asked: Asked, reply: AgentAnswer) -> None:
        """Check the prompt of a turn, and note what was said."""
        messages = [self._read(message) for message in asked.messages]
        restored = self._restored(asked, messages)
        whole = self._render(restored, asked.tools)
        prompt = tuple(ids_of(reply.prompt_ids))
        for count, earlier in self._earlier(asked, messages):
            length = len(earlier.ids)
            behind = self._behind(whole, restored[:count], asked.tools, earlier)
            if prompt[:length] == earlier.ids and any(
                self._is_text(prompt[length:], text) for text in behind
            ):
                self.kinds["continued"] += 1
                break
        else:
            assert self._is_text(prompt, whole), number
            self.kinds["rendered"] += 1
        said = self._read(said_of(reply))
        answered = Answered(number, said, (*prompt, *ids_of(reply.completion_ids)))
        self.answered[key([*messages, said], asked.tools)].append(answered)

    def _earlier(self, asked: Asked, messages: list[Message]) -> Iterator[tuple[int, Answered]]:
        for count in range(len(messages) - 1, 0, -1):
            for earlier in self._same(asked, messages[:count]):
                yield count, earlier

    def _same(self, asked: Asked, messages: list[Message]) -> list[Answered]:
        """Answers that ended this chat before the call was made, those of its reasoning first."""
        same = [a for a in self.answered[key(messages, asked.tools)] if a.number <= asked.heard]
        sent = messages[-1].get("reasoning_content")
        return sorted(same, key=lambda a: a.message.get("reasoning_content") != sent)

    def _restored(self, asked: Asked, messages: list[Message]) -> list[Message]:
        restored = []
        for place, message in enumerate(messages):
            same = self._same(asked, messages[: place + 1])
            reasoning = same[0].message.get("reasoning_content") if same else None
            restored.append(message | ({"reasoning_content": reasoning} if reasoning else {}))
        return restored

    def _behind(
        self, whole: str, before: list[Message], tools: list[Any], earlier: Answered
    ) -> Iterator[str]:
        """Yield what a prompt may have behind a turn that a chat goes on from."""
        has_end = earlier.ids[-1] in self.tokenizer.stop_token_ids
        said = before[-1]
        thought = said.get("reasoning_content") or said["content"].rpartition("</think>")[0]
        any_stop = "|".join(map(re.escape, self.stops))
        closed = self._render(before, tools, go_on=False)
        closing = re.search(f"(?:(?:{any_stop})\\s*)*\\Z", closed)
        opened = self._render(before[:-1], tools)
        stop = re.search(any_stop, whole[len(opened) :])
        ends = [closing.start()] if closing and whole.startswith(closed[: closing.start()]) else []
        ends += [len(opened) + stop.start()] if stop else []
        for end in ends if whole.startswith(opened) else ():
            turn, rest = whole[len(opened) : end], whole[end:]
            if (
                thought.strip() in turn
                and said["content"].strip().rpartition("</think>")[2] in turn
            ):
                stop = re.match(any_stop, rest) if has_end else None
                yield rest[stop.end() :] if stop else rest

    def _is_text(self, ids: tuple[int, ...], text: str) -> bool:
        """Compare tokens that are not the policy's with a text."""
        spelled, has_spelled = text, False
        for number, token in enumerate(self.control):
            has_spelled |= chr(FIRST + number) in text
            spelled = spelled.replace(chr(FIRST + number), token)
        inner = self.tokenizer._tokenizer
        encoded = inner.encode(self.stops[0] + text, add_special_tokens=False)[1:]
        special = set(inner.all_special_ids)
        return (
            self.tokenizer.decode(ids) == spelled
            and [i for i in ids if i in special] == [i for i in encoded if i in special]
            and (has_spelled or list(ids) == encoded)
        )

    def _render(self, messages: list[Message], tools: list[Any], *, go_on: bool = True) -> str:
        text: str = self.tokenizer._tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=go_on,
            date_string="1 Jan 2026",
        )
        return text

    def _read(self, message: Message) -> Message:
        """Return a message as a template takes it."""
        content = message.get("content") or ""
        parts = content if isinstance(content, list) else [{"text": content}]
        kept: Message = {
            "role": message["role"],
            "content": "".join(part["text"] for part in parts).replace(HALF, "\ufffd"),
        }
        if "reasoning_content" in message:
            kept["reasoning_content"] = message["reasoning_content"]
        if calls := [call["function"] for call in message.get("tool_calls", ())]:
            kept["tool_calls"] = [{"function": self._call(call)} for call in calls]
        written = json.dumps(kept, ensure_ascii=False)
        for number, token in enumerate(self.control):
            written = written.replace(token, chr(FIRST + number))
        read: Message = json.loads(written)
        return read

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.loads(call["arguments"])
        if "function.arguments }}" in str(self.tokenizer._tokenizer.chat_template):
            arguments = json.dumps(arguments, ensure_ascii=False)  # the template takes a text
        return {**call, "arguments": arguments}


FIRST = 0xE000  # of the characters that stand for control tokens


def said_of(reply: AgentAnswer) -> Message:
    """Return what was said as a message."""
    calls = [{"function": {"name": c.name, "arguments": c.arguments}} for c in reply.tool_calls]
    return {
        "role": "assistant",
        "content": reply.text,
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": reply.reasoning} if reply.reasoning else {}),
    }


def key(messages: list[Message], tools: list[Any]) -> str:
    """Return what makes two chats equal."""
    said = [[m["role"], m["content"], m.get("tool_calls")] for m in messages]
    return json.dumps([tools, said], sort_keys=True)


# --------------------------------------------------------------------------------------------------
# Whole conversations.

LIMIT = 50_000  # tokens: more than any of them has
LONG = {"max_position_embeddings": 4096}


@dataclass
class Outcome:
    """A conversation that was played to its end."""

    actors: Actors
    agent: OddAgent
    script: Script


def play(
    tokenizer: ModelTokenizer, seed: int, *, kills: float = 0.04, limit: int = LIMIT
) -> Outcome:
    """Play a conversation; its actor is killed at any moment."""
    actors = Actors(tokenizer, seed=seed, limit=limit, prompt=3000)
    control = tokenizer._tokenizer.all_special_tokens
    tools = TOOLS if takes_tools(tokenizer) else []
    agent = OddAgent(actors.box, Random(seed), control, tools=tools)
    script = Script(tokenizer, seed)
    rng = Random(f"{seed} world")
    while not agent.is_done:
        agent.act()
        actors.listen()
        if actors.running:
            request_id = rng.choice(list(actors.running))
            request, so_far = actors.running[request_id]
            number = int(request_id.rpartition(".")[2])
            ready = len(request.turn) + len(so_far)
            actors.sample(request_id, script.turn(number)[ready : ready + rng.randint(1, 9)])
        for happens, what in ((kills, actors.kill), (0.1, actors.snapshot), (0.5, actors.say)):
            if rng.random() < happens:
                what()
    return Outcome(actors, agent, script)


def check(outcome: Outcome) -> Counter[str]:
    """Check a conversation: what is recorded, after what it was sampled, and what was answered."""
    actors, calls = outcome.actors, outcome.agent.calls
    check_record(actors)
    prompts = Prompts(actors.tokenizer)
    for number, asked in calls.items():
        reply = actors.box.replies[number]
        if not isinstance(reply, AgentAnswer):
            prompts.kinds["refused"] += 1
            continue
        sampled, script = ids_of(reply.completion_ids), outcome.script.turn(number)
        assert sampled == script[: len(sampled)]
        prompts.check(number, asked, reply)
        prompts.kinds["calls of tools"] += len(reply.tool_calls)
        prompts.kinds["cut"] += reply.finish_reason == "length"
    prompts.kinds["kills"] = actors.kills
    prompts.kinds["branches"] = len(actors.rollout.completion().branches)
    return prompts.kinds


def record(outcome: Outcome, task_id: int) -> Episode:
    """Return the episode as the store has it, after the last tokens are written."""
    actors = outcome.actors
    actors.snapshot()
    stored = join_completions([decode_completion(chunk) for chunk in actors.box.chunks])
    return make_episode(
        task_id,
        group_id=task_id // 2,
        reward=float(task_id % 2),
        prompt=actors.rollout.prompt_ids,
        completion=stored.token_ids.tolist(),
        logprobs=stored.behaviour_logprobs.tolist(),
        mask=stored.loss_mask.tolist(),
        branches=stored.branches,
    )


def check_training(episodes: Sequence[Episode]) -> None:
    """Check that each sampled token is trained once, behind the path that it was sampled after."""
    (microbatch,) = packed(episodes, 10**9)
    expected = Counter(facts for episode in episodes for facts in tokens_to_train(episode))
    assert trained_tokens(microbatch) == expected


def check_family(
    tokenizer: ModelTokenizer, seeds: Sequence[int], *, undisturbed: float = 0.2
) -> Counter[str]:
    """Check conversations of one tokenizer; some are compared with a life without kills."""
    kinds: Counter[str] = Counter()
    episodes = []
    for seed in seeds:
        rng = Random(f"{seed} family")
        limit = LIMIT if rng.random() < 0.9 else 300
        outcome = play(tokenizer, seed, limit=limit)
        try:
            kinds += check(outcome)
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        if outcome.actors.rollout.length:
            episodes.append(record(outcome, seed))
        if limit == LIMIT and rng.random() < undisturbed:
            calm = play(tokenizer, seed, kills=0.0)
            assert outcome.actors.box.replies == calm.actors.box.replies
            kinds["compared"] += 1
    for begin in range(0, len(episodes), 20):
        check_training(episodes[begin : begin + 20])
    return kinds + Counter(conversations=len(seeds))


# --------------------------------------------------------------------------------------------------
# Conversations that an engine samples, and the learner scores.


def save_model(folder: Path) -> ModelTokenizer:
    """Save a small random model beside a tokenizer; its turns end by themselves now and then."""
    tokenizer = chat_tokenizer(folder, FAMILIES["thinking"])
    model = make_random_model("qwen3", vocab_size=tokenizer.num_tokens, **SHAPE, **LONG)
    with torch.no_grad():
        model.get_output_embeddings().weight[tokenizer.stop_token_ids[0]] *= 4
    model.save_pretrained(folder)
    return tokenizer


async def sample(folder: Path, tokenizer: ModelTokenizer, seeds: Iterable[int]) -> list[Episode]:
    """Let the small engine be the policy of conversations, and kill their actors."""
    length = LONG["max_position_embeddings"]
    engine = torch_engine(TorchOptions(str(folder), max_model_len=length, max_concurrent=4))
    await engine.start()
    try:
        return [await _converse(engine, tokenizer, seed) for seed in seeds]
    finally:
        await engine.close()


async def _converse(engine: Engine, tokenizer: ModelTokenizer, seed: int) -> Episode:
    actors = Actors(tokenizer, seed=seed, limit=LIMIT, prompt=1000)
    agent, rng = OddAgent(actors.box, Random(seed), (), most_cut=1.0), Random(f"{seed} engine")
    submitted: set[str] = set()
    while not agent.is_done:
        agent.act()
        actors.listen()
        new = {name: r for name, (r, _) in actors.running.items() if name not in submitted}
        engine.submit(list(new.values()))
        submitted |= new.keys()
        for delta in await engine.deltas() if actors.running else ():
            goes_on = actors.rollout.append_delta(delta)
            if delta.finish_reason is not None or not goes_on:
                engine.abort([delta.request_id])
                actors.running.pop(delta.request_id, None)
        if rng.random() < 0.03:
            actors.snapshot()
        if rng.random() < 0.02:
            engine.abort(list(actors.running))
            actors.kill()
        actors.say()
    return record(Outcome(actors, agent, Script(tokenizer, seed)), seed)


def check_scores(folder: Path, episodes: Sequence[Episode]) -> float:
    """Return by how much the learner's log-probs differ from the engine's at most, nats."""
    policy = Policy(load_causal_lm(folder), temperature=1.0)
    (microbatch,) = packed(episodes, 10**9)
    with torch.no_grad():
        scores = policy(microbatch.sequences, microbatch.indices_N)
    return float((scores.logprobs_N - microbatch.behaviour_logprobs_N).abs().max())


def check_gradients(folder: Path, episodes: Sequence[Episode]) -> None:
    """Compare the gradients of trees with those of their paths written out, in float64."""

    def model() -> Any:
        return load_causal_lm(folder).double()

    tree = train(Policy(model(), temperature=1.0), packed(episodes, 10**9))
    assert_equal(tree, train(PaddedPolicy(model()), packed_alone(episodes)), EXACT)


def is_usable(name: str, template: str) -> bool:
    """Find out whether a template takes texts; those of models that see may not."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            chat_tokenizer(Path(folder), template)
        except SettingsError as error:
            print(f"{name}: refused, {error}"[:100])
            return False
    return True


def main() -> None:
    """Play conversations of all families, then some with an engine; print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--sampled", type=int, default=100)
    parser.add_argument("--model", help="its tokenizer is used; left out = a small one")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    arguments = parser.parse_args()
    templates = FAMILIES | {n: t for n, t in wheel_templates() if is_usable(n, t)}
    count = -(-arguments.count // len(templates))
    total: Counter[str] = Counter()
    for name, template in templates.items():
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = chat_tokenizer(Path(folder), template, model=arguments.model)
            kinds = check_family(tokenizer, range(arguments.first, arguments.first + count))
        print(f"{name}: {dict(kinds)}", flush=True)
        total += kinds
    print(f"all: {dict(total)}")
    with tempfile.TemporaryDirectory() as saved:
        model = Path(saved)
        tokenizer = save_model(model)
        episodes = asyncio.run(sample(model, tokenizer, range(arguments.sampled)))
        differ = max(check_scores(model, [episode]) for episode in episodes)
        assert differ <= 1e-4, differ
        check_gradients(model, episodes[:4])
    print(f"log-probs of {len(episodes)} sampled conversations differ by at most {differ:.1e}")


if __name__ == "__main__":
    main()
