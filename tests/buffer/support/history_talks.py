"""Live agents of a random history: hosts that crash, agents that go on, actors that answer.

An agent makes a few calls, each with what it heard before in its body, and ends. A reply is the
text of the tokens of one turn, so it tells which tokens must be stored.

C1: every reply in a mailbox is of tokens that the task's chunks have, and an agent has heard
nothing else, when a reply comes and when its end is stored. C2: a call has one reply. C3: an actor
reads the bodies that the agent sent. C4: an outdated ticket gets nothing. C5: only ready and leased
tasks have a mailbox.
"""

from __future__ import annotations

from typing import Any

from buffer import operations
from buffer.operations.operation import Operation
from buffer.operations.values import BeatLine, CallLine, EndLine, ListenLine, ReplyLine, SayLine
from tests.buffer.support import invariants
from tests.buffer.support.history_world import (
    MAX_ATTEMPTS,
    TTL_MS,
    TURN_TOKENS,
    Actor,
    Agent,
    Held,
    Host,
    World,
)

AGENT_MS = 3_600_000


def serve(world: World) -> None:
    """A host takes conversations, and its agents call, hear and end."""
    host = world.rng.choice(world.hosts + (world.zombie_hosts if world.chance(0.4) else []))
    call = operations.take_conversations(host.name, n=2, ttl_ms=TTL_MS, newest=host.newest)
    answer = world.store.run(call)
    if answer.status == "RESTS":  # until its pause is over
        world.client.hset(f"{world.prefix}:h::{host.name}", "rests_until", 1)
    if world.recovering:
        assert answer.status == "WAIT", f"8.6: a host was given {answer} while RECOVERING"
    if not world.chance(0.1):  # else the reply is lost, and the tickets come again
        for task, ticket, _, payload in answer.tickets:
            assert payload == b"task %d" % task, f"C3: agent of {task} was told {payload!r}"
            host.agents[task] = Agent(task, ticket)
            host.newest = ticket
    for agent in list(host.agents.values()):
        if not world.chance(0.2):
            _hear(world, host, agent)
        if agent.task in host.agents:
            _act(world, host, agent)


def _act(world: World, host: Host, agent: Agent) -> None:
    if len(agent.heard) == len(agent.bodies) < agent.turns:
        agent.bodies.append(b"%s[%d]" % (agent.history, len(agent.bodies) + 1))
    for number in range(max(1, len(agent.bodies) - 1), len(agent.bodies) + 1):
        body, parent = agent.bodies[number - 1], number - 1
        before = agent.bodies[parent - 1] if parent else b""
        keep = len(before) if body.startswith(before) else 0
        line = CallLine(agent.task, agent.ticket, number, parent, keep, body[keep:])
        verdict = _exchange(world, agent, operations.add_calls([line]))
        if verdict in ("STALE", "GONE"):
            host.agents.pop(agent.task, None)
            return
    if len(agent.heard) == agent.turns:
        last = EndLine(agent.task, agent.ticket, agent.newest, "ended", 0, 1, b"1")
        end = operations.end_conversations([last])
        if _exchange(world, agent, end) in ("OK", "DUP"):
            stored = _stored_tokens(world, agent.task)
            lost = [text for text in agent.heard.values() if text.decode() not in stored]
            assert not lost, f"C1: {agent.task} ended with {stored!r}, and its agent heard {lost}"
            host.agents.pop(agent.task, None)


def _hear(world: World, host: Host, agent: Agent) -> None:
    line = ReplyLine(agent.task, agent.ticket, agent.newest)
    call = operations.read_replies(
        [line], ttl_ms=TTL_MS, agent_ms=AGENT_MS, max_attempts=MAX_ATTEMPTS
    )
    (answer,) = world.store.run(call)
    _check_ticket(world, agent, answer.verdict)
    if answer.verdict != "OK":
        host.agents.pop(agent.task, None)
        return
    for stamp, number, text in answer.replies:
        assert number not in agent.heard, f"C2: call {number} of {agent.task} was answered twice"
        stored = _stored_tokens(world, agent.task)
        assert text.decode() in stored, f"C1: {text!r} was heard, of {agent.task} is {stored!r}"
        agent.heard[number], agent.newest = text, stamp
        world.said[agent.task, agent.ticket] = [text.decode() for text in agent.heard.values()]


def _exchange(world: World, agent: Agent, call: Operation[list[Any]]) -> str:
    """Send a request through a bad network; a reply that is lost is no verdict."""
    if world.chance(0.05):
        return ""
    (answer,) = world.store.run(call)
    if world.chance(0.1):
        world.store.run(call)
    if world.chance(0.1):
        world.late.append(call)
    verdict = answer if isinstance(answer, str) else answer[0]
    _check_ticket(world, agent, verdict)
    return "" if world.chance(0.05) else verdict


def _check_ticket(world: World, agent: Agent, verdict: str) -> None:
    if verdict in ("STALE", "GONE"):
        return
    newest = world.tickets.setdefault(agent.task, agent.ticket)
    assert agent.ticket >= newest, f"C4: {verdict} for an old ticket"
    world.tickets[agent.task] = agent.ticket


def answer(world: World) -> None:
    """An actor reads calls, makes a turn's tokens, and says them with their reply."""
    actor = world.rng.choice(world.actors + (world.zombies if world.chance(0.4) else []))
    for held in [held for held in actor.held.values() if held.talks]:
        _listen(world, actor, held)
        if held.task in actor.held and held.said < len(held.calls):
            _say(world, actor, held)


def _listen(world: World, actor: Actor, held: Held) -> None:
    want = operations.want_agents([(held.task, held.fence, b"task %d" % held.task)])
    if held.ticket == 0 and world.store.run(want) not in (["OK"], ["DUP"]):
        del actor.held[held.task]
        return
    line = ListenLine(held.task, held.fence, held.ticket, len(held.calls))
    (found,) = world.store.run(operations.read_calls([line], max_attempts=MAX_ATTEMPTS))
    if found.verdict == "UNCALLED":
        return
    if found.verdict != "OK":
        del actor.held[held.task]
        return
    held.ticket, held.is_over = found.ticket, found.why == "ended"
    for parent, keep, tail, _ in found.calls:
        held.calls.append((held.calls[parent - 1][:keep] if parent else b"") + tail)
    for host in world.hosts:
        agent = host.agents.get(held.task)
        if agent is not None and agent.ticket == held.ticket:
            same = zip(held.calls, agent.bodies, strict=False)
            assert all(read == sent for read, sent in same), f"C3: {held.calls} of {agent.bodies}"


def _say(world: World, actor: Actor, held: Held) -> None:
    """A turn whose tokens a predecessor had stored is said again: nobody knows whether it was."""
    number = held.said + 1
    call = operations.say_replies([_make_turn(world, actor, held, number)], ttl_ms=TTL_MS)
    if world.chance(0.2):
        return  # it is lost, or a heartbeat brings its tokens first
    ((verdict, length),) = world.store.run(call)
    if world.chance(0.1):
        again = world.store.run(call)[0].verdict
        assert again in ("DUP", verdict), f"C2: {again} for what was {verdict}"
    if world.chance(0.1):
        world.late.append(call)
    current = held.fence == world.promises.holder.get(held.task)
    assert current or verdict in ("STALE", "GONE"), f"I9: {verdict} for an old fence of {held.task}"
    if world.chance(0.05):
        return
    if verdict in ("OK", "DUP"):
        held.said, held.sent = number, length
    elif verdict == "GAP":
        held.sent = length
    elif verdict != "UNCALLED":
        del actor.held[held.task]


def _make_turn(world: World, actor: Actor, held: Held, number: int) -> SayLine:
    """Make the tokens of a turn that are not made yet, and say all that the store has not."""
    lineage, step = actor.version
    while len(held.tokens) < TURN_TOKENS * number:
        held.tokens.append(f"{held.task}.{held.fence}.{len(held.tokens)}.{lineage}.{step}")
    turn = held.tokens[TURN_TOKENS * (number - 1) : TURN_TOKENS * number]
    tokens = held.tokens[held.sent :]
    beat = BeatLine(held.task, held.fence, held.sent, len(tokens), _text(tokens))
    turn_end = TURN_TOKENS * number
    if world.answers_early:
        beat, turn_end = BeatLine(held.task, held.fence), 0
    elif world.chance(0.05):  # the tokens may be stored, and may be not
        beat = BeatLine(held.task, held.fence)
    return SayLine(beat, held.ticket, number, turn_end, _text(turn))


def _text(tokens: list[str]) -> bytes:
    return "".join(token + " " for token in tokens).encode()


def crash_host(world: World) -> None:
    """A host dies, or seems to: it may go on after its tickets ran out and other agents began."""
    if world.chance(0.5):
        index = world.rng.randrange(len(world.hosts))
        dead = world.hosts[index]
        for task in sorted(dead.agents):
            world.client.zadd(f"{world.prefix}:tickets", {str(task): 1}, xx=True)
        world.zombie_hosts = [*world.zombie_hosts[-1:], dead]
        world.hosts[index] = Host(dead.name + "'")


def check_submitted(world: World, held: Held) -> None:
    """Assert that what an agent has heard is in the episode (C1)."""
    text = _text(held.tokens).decode()
    lost = [said for said in world.said.get((held.task, held.ticket), []) if said not in text]
    assert not lost, f"C1: {lost} was heard, and is not in the episode of {held.task}"


def check(world: World) -> None:
    """Assert C1, C2 and C5 of all that is stored."""
    client, prefix = world.client, world.prefix
    tasks: set[int] = set()
    for key in sorted(map(_name, client.keys(f"{prefix}:m:*"))):
        task, _, part = key.removeprefix(f"{prefix}:m:").partition(":")
        tasks.add(int(task))
        state = client.hget(f"{prefix}:t:{task}", "st")
        assert state in (b"R", b"L"), f"C5: task {task} has a mailbox and the state {state!r}"
        if part == "r":
            stored = _stored_tokens(world, int(task))
            replies = [_name(member).partition("\n") for member in client.zrange(key, 0, -1)]
            numbers = [number for number, _, _ in replies]
            assert len(numbers) == len(set(numbers)), f"C2: replies of {task} to {numbers}"
            lost = [text for _, _, text in replies if text not in stored]
            assert not lost, f"C1: replies {lost} of task {task}, whose tokens are {stored!r}"
    for name in ("wanted", "tickets", "news"):
        left = set(invariants.zset(client, f"{prefix}:{name}")) - tasks
        assert not left, f"C5: {left} are in {name}, and have no mailbox"


def _stored_tokens(world: World, task: int) -> str:
    return "".join(map(_name, world.client.lrange(f"{world.prefix}:t:{task}:p", 0, -1)))


def _name(value: object) -> str:
    assert isinstance(value, bytes)
    return value.decode()
