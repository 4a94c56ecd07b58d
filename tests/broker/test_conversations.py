"""Conversations through a broker: who may say what, long polls, and what a broker bounds."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import structlog
from msgspec.structs import replace

from broker.protocol.agent_calls import AgentAnswer, AgentError, encode_reply
from broker.protocol.conversation_messages import (
    Call,
    CallRequest,
    Hear,
    Listen,
    ListenRequest,
    RepliesReply,
    RepliesRequest,
    SayRequest,
    TakeRequest,
    Want,
    WantRequest,
)
from broker.protocol.messages import Beat, BeatRequest, LeaseRequest, ReleaseRequest, Verdict
from broker.server import conversations
from broker.server.conversations import ChangeLog, LongPoll
from broker.transport.allow_list import TAG
from buffer import operations
from buffer.operations.keys import run_prefix
from buffer.operations.operation import Operation
from buffer.operations.values import ReplyLine
from configs.errors import RefusedError
from tests.broker.support.ring import FIRST, RUN, Ring, begin, fingerprint, ring
from tests.broker.support.talks import (
    TOKENS,
    ActorSide,
    HostSide,
    agent_ring,
    answer_all,
    host_of,
    host_pair,
)
from tests.waiting import still_waits

LATENCY_CALLS = 60


async def both(here: Ring) -> tuple[ActorSide, HostSide]:
    actor = await ActorSide.begin(await here.actor())
    return actor, await HostSide.begin(host_of(here))


async def expire_ticket(here: Ring, redis_url: str, task: int) -> None:
    async with redis.asyncio.from_url(redis_url) as client:
        await client.zadd(f"{run_prefix(RUN)}:tickets", {str(task): 1}, xx=True)
    await here.store.run(operations.reap(max_attempts=3))


def test_an_agent_is_told_asks_is_answered_and_ends(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor, host = await both(here)
            assert host.ticket.payload == b"told"
            assert host.ticket.spec == actor.lease.spec

            answering = asyncio.create_task(answer_all(actor, 3))
            for turn in range(3):
                reply = await host.ask(b"turn %d" % turn)
                assert (reply.number, reply.reply) == (turn + 1, b"re: turn %d" % turn)
            await answering
            assert await host.end(reward=0.5, parts={"exact": 1.0}) is Verdict.OK
            ended = await actor.listen()

            assert ended is not None and ended.why == "ended"
            ((number, reward, parts),) = [(r.number, r.reward, r.parts) for r in ended.rewards]
            assert (number, reward, parts) == (0, 0.5, {"exact": 1.0})
            seen = await here.store.run(operations.inspect([actor.lease.task_id]))
            assert seen[actor.lease.task_id].length == actor.length == 9

    asyncio.run(story())


def test_an_actor_with_an_outdated_fence_answers_nobody(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor, host = await both(here)
            await host.call(b"question")
            lease = actor.lease
            await actor.client.release(ReleaseRequest(((lease.task_id, lease.fence),)))
            successor = await here.actor("actor-2")
            (again,) = (await successor.lease(LeaseRequest(1, FIRST))).leases
            assert again.task_id == lease.task_id

            assert (await actor.say(1, b"late")).verdict is Verdict.OUTDATED
            found = await actor.listen(0.0)
            assert found is not None and found.verdict is Verdict.OUTDATED
            assert await host.hear(0.0) is None
            assert (await ActorSide(successor, again).say(1, b"answer")).verdict is Verdict.OK

    asyncio.run(story())


def test_a_host_with_the_ticket_of_another_changes_nothing(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor, host = await both(here)
            await host.call(b"question")
            await actor.say(1, b"secret")
            thief = HostSide(host_of(here, "thief"), host.ticket)
            thief.number = 1
            before = fingerprint(redis_url)

            assert await thief.call(b"another") is Verdict.OUTDATED
            assert await thief.end() is Verdict.OUTDATED
            heard = await thief.hear()
            assert heard is not None
            assert (heard.verdict, heard.replies) == (Verdict.OUTDATED, ())

            assert fingerprint(redis_url) == before

    asyncio.run(story())


def test_a_host_may_be_a_host_and_nothing_else(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor, host = await both(here)
            lease = actor.lease
            held = ((lease.task_id, lease.fence),)
            wants = WantRequest((Want(*held[0]),))
            for refused in (
                host.client.beat(BeatRequest((), FIRST)),
                host.client.release(ReleaseRequest(held)),
                host.client.lease(LeaseRequest(1, FIRST)),
                host.client.want(wants),
                host.client.listen(ListenRequest((Listen(*held[0]),))),
                host.client.say(SayRequest((), FIRST)),
                host.client.status(),
                actor.client.take(TakeRequest(1)),
                actor.client.call(CallRequest(())),
                actor.client.hear(RepliesRequest((Hear(*held[0]),))),
            ):
                with pytest.raises(RefusedError, match="must come from"):
                    await refused
            stranger = here.client("stranger")
            with pytest.raises(RefusedError, match="say HELLO first"):
                await stranger.want(wants)

    asyncio.run(story())


def test_calls_out_of_order_or_too_long_are_refused(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            _, host = await both(here)
            task, ticket = host.ticket.task_id, host.ticket.ticket
            before = fingerprint(redis_url)

            for call, complaint in (
                (Call(task, ticket, 0, 0, 0, b""), "number of a call must be between 1 and"),
                (Call(task, ticket, 10**6, 0, 0, b""), "number of a call must be between 1 and"),
                (Call(task, ticket, 1, 1, 0, b""), "parent of a call must be between 0 and 0"),
                (Call(task, ticket, 1, 0, 0, bytes(2**18 + 1)), "bytes of a call must be between"),
            ):
                with pytest.raises(RefusedError, match=complaint):
                    await host.client.call(CallRequest((call,)))
            ahead = CallRequest((Call(task, ticket, 2, 1, 0, b""),))
            (line,) = (await host.client.call(ahead)).verdicts
            assert (line.verdict, line.length) == (Verdict.GAP, 0)

            assert fingerprint(redis_url) == before

    asyncio.run(story())


def test_a_reply_too_long_to_be_delivered_is_refused(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor, host = await both(here)
            await host.call(b"question")

            with pytest.raises(RefusedError, match="bytes of a reply must be between 0 and"):
                await actor.say(1, bytes(2**18 + 1))

            seen = await here.store.run(operations.inspect([actor.lease.task_id]))
            assert seen[actor.lease.task_id].length == 0, "its tokens are not stored either"

    asyncio.run(story())


def test_an_answer_waits_for_the_end_of_its_turn_and_must_name_one(
    redis_url: str, keys: Path
) -> None:
    answer = encode_reply(AgentAnswer("stop", 5, 3))
    error = encode_reply(AgentError(400, "too long"))

    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor, host = await both(here)
            await host.call(b"question")
            await host.call(b"another")

            with pytest.raises(RefusedError, match=r"turn_end of an answer must be at least 1"):
                await actor.say(1, answer, turn_end=0)
            early = await actor.say(1, answer, turn_end=TOKENS + 1)
            assert (early.verdict, early.length) == (Verdict.GAP, TOKENS)
            assert await host.hear(0.0) is None
            assert (await actor.say(1, answer, offset=0)).verdict is Verdict.OK
            assert (await actor.say(2, error, offset=0, turn_end=0)).verdict is Verdict.OK

            heard = await host.hear()
            assert heard is not None
            assert [reply.reply for reply in heard.replies] == [answer, error]

    asyncio.run(story())


def test_a_host_hears_of_calls_that_the_store_lacks(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            _, host = await both(here)
            await host.call(b"question")

            assert await host.hear(0.0, num_calls=1) is None
            heard = await host.hear(0.0, num_calls=2)

            assert heard is not None
            assert (heard.verdict, heard.num_calls) == (Verdict.OK, 1)

    asyncio.run(story())


def test_a_host_that_took_a_task_again_hears_of_both_tickets(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor, host = await both(here)
            lost, task = host.ticket, actor.lease.task_id
            await expire_ticket(here, redis_url, task)
            again = await HostSide.begin(host.client)
            assert again.ticket.task_id == task
            await again.call(b"question")
            await actor.say(1, b"answer")

            lines = tuple(Hear(task, ticket.ticket) for ticket in (lost, again.ticket))
            reply = await host.client.hear(RepliesRequest(lines))

            found = {part.ticket: (part.verdict, len(part.replies)) for part in reply.conversations}
            assert found == {
                lost.ticket: (Verdict.OUTDATED, 0),
                again.ticket.ticket: (Verdict.OK, 1),
            }

    asyncio.run(story())


def test_a_ticket_whose_answer_was_lost_is_given_again(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            _, host = await both(here)

            again = await host.client.take(TakeRequest(1))
            nothing = await host.client.take(TakeRequest(1, newest=host.ticket.ticket))

            assert again.tickets == (host.ticket,)
            assert nothing.tickets == ()

    asyncio.run(story())


def test_a_host_whose_agents_end_without_a_call_rests_and_is_named(
    redis_url: str, keys: Path
) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            client, newest = host_of(here), 0
            await ActorSide.begin(await here.actor())
            for _ in range(4):
                (ticket,) = (await client.take(TakeRequest(1, newest))).tickets
                newest = ticket.ticket
                await expire_ticket(here, redis_url, ticket.task_id)
            with structlog.testing.capture_logs() as lines:
                rests = await client.take(TakeRequest(1, newest, wait_s=20.0))

            assert (rests.status, rests.num_silent, rests.tickets) == ("RESTS", 4, ())
            assert 0.0 < rests.rest_s <= 1.0
            assert [(line["host"], line["agents"]) for line in lines] == [("host-1", 4)]
            (other,) = (await host_of(here, "host-2").take(TakeRequest(1))).tickets
            assert other.ticket > newest

    asyncio.run(story())


def test_late_copies_of_rewards_do_not_win_and_long_ones_are_refused(
    redis_url: str, keys: Path
) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor, host = await both(here)

            assert await host.end(1.0, why="", order=2) is Verdict.OK
            assert await host.end(0.0, why="", order=1) is Verdict.DUP
            with pytest.raises(RefusedError, match=r"bytes of a reward .* between 0 and 4096"):
                await host.end(1.0, why="", order=3, parts={"x" * 5000: 1.0})
            await host.end(None)
            ended = await actor.listen()

            assert ended is not None
            assert [reward.reward for reward in ended.rewards] == [1.0]

    asyncio.run(story())


def test_only_conversations_that_have_changed_are_read_again(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[int]] = []

    def recorded(lines: list[ReplyLine], *args: Any, **limits: Any) -> Operation[Any]:
        read.append([line.task_id for line in lines])
        return original(lines, *args, **limits)

    original = operations.read_replies
    monkeypatch.setattr(operations, "read_replies", recorded)

    async def story() -> None:
        async with agent_ring(redis_url, keys, lease_timeout_s=60.0) as here:
            await begin(here.store, groups=2)
            client = await here.actor()
            actors = [await ActorSide.begin(client) for _ in range(3)]
            host = host_of(here)
            tickets = (await host.take(TakeRequest(2))).tickets
            first, _ = hosts = [HostSide(host, ticket) for ticket in tickets]
            for side in hosts:
                await side.call(b"question")
            lines = [Hear(side.ticket.task_id, side.ticket.ticket) for side in hosts]
            both_tasks = [line.task_id for line in lines]

            await host.hear(RepliesRequest(tuple(lines), 0.5))  # the tick tells of the calls
            assert read[0] == both_tasks
            read.clear()
            (answering,) = [a for a in actors if a.lease.task_id == first.ticket.task_id]
            await answering.say(1, b"answer")
            heard = await host.hear(RepliesRequest(tuple(lines), 2.0))
            (replies,) = heard.conversations
            lines[0] = replace(lines[0], heard=replies.replies[0].stamp)
            await host.hear(RepliesRequest(tuple(lines), 0.3))
            assert set(map(tuple, read)) == {(first.ticket.task_id,)}

            waiting = asyncio.create_task(host.hear(RepliesRequest(tuple(lines), 1.0)))
            await asyncio.sleep(0.2)
            assert set(both_tasks) not in map(set, read)
            here.parts.service.conversations.read_all_anew()
            await waiting
            assert set(both_tasks) in map(set, read), "Redis is another one"
            read.clear()
            await host.hear(RepliesRequest(tuple(lines), 0.1))
            assert read[0] == both_tasks, "its answer was of the time before"

            (third,) = (await host.take(TakeRequest(1, tickets[0].ticket))).tickets
            read.clear()
            lines.append(Hear(third.task_id, third.ticket))
            await host.hear(RepliesRequest(tuple(lines), 0.1))
            assert read[0] == [*both_tasks, third.task_id], "one of them is new"

    asyncio.run(story())


def test_news_of_an_answer_that_was_lost_and_news_between_two_requests_are_told(
    redis_url: str, keys: Path
) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            actor, host = await both(here)
            service = here.parts.service.conversations
            tag = host_pair(here.keys, "host-1").public.decode()[:TAG]

            async def hear(since: str, heard: int = 0) -> RepliesReply:
                line = Hear(host.ticket.task_id, host.ticket.ticket, heard)
                request = RepliesRequest((line,), 0.5, since)
                answer = await service.answer_host(request, "host-1", tag)
                answer = await answer.answer() if isinstance(answer, LongPoll) else answer
                assert isinstance(answer, RepliesReply)
                return answer

            nothing = await hear("")
            await host.call(b"question")
            await actor.say(1, b"answer")
            first, again = await hear(nothing.since), await hear(nothing.since)
            (reply,) = first.conversations[0].replies
            assert reply.reply == b"answer"
            assert again == first, "its first copy was lost"
            assert not (await hear(first.since, reply.stamp)).conversations

            assert len((await hear("another-life 99")).conversations) == 1, "of another broker"

    asyncio.run(story())


def test_changes_are_told_since_a_mark_of_the_same_log_that_is_not_too_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversations, "MAX_CHANGES", 3)
    changes = ChangeLog()
    begin_ = changes.mark

    changes.add([1, 2])
    after_two = changes.mark
    changes.add([3, 1])

    assert changes.since(changes.mark) == []
    assert changes.since(after_two) == [1, 3]
    assert sorted(changes.since(begin_) or ()) == [1, 2, 3]
    changes.add([4])
    assert changes.since(begin_) is None, "the change of 2 has been dropped"
    assert changes.since(after_two) == [4, 1, 3]
    assert ChangeLog().since(after_two) is None
    assert changes.since("") is changes.since(after_two + "x") is None


def test_an_answer_names_a_bounded_number_of_conversations(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_NEWS", 1)

    async def story() -> None:
        async with agent_ring(redis_url, keys) as here:
            await begin(here.store, groups=1)
            client = host_of(here)
            lines = tuple(Hear(task, 1) for task in (90, 91))

            reply = await client.hear(RepliesRequest(lines))

            assert [(x.task_id, x.verdict) for x in reply.conversations] == [(90, Verdict.GONE)]

    asyncio.run(story())


def test_a_long_poll_ends_at_its_time_or_when_the_peer_asks_again(
    redis_url: str, keys: Path
) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys, long_poll_s=30.0) as here:
            await begin(here.store, groups=1)
            actor, _ = await both(here)
            began = time.monotonic()
            assert await actor.listen(0.3) is None
            assert 0.25 < time.monotonic() - began < 5.0

            first = asyncio.create_task(actor.listen(20.0))
            assert await still_waits(first, 0.3)
            second = asyncio.create_task(actor.listen(20.0))

            assert await asyncio.wait_for(first, 5) is None
            assert await still_waits(second, 0.3)
            second.cancel()

    asyncio.run(story())


def test_the_long_polls_of_a_key_are_bounded(
    redis_url: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_WAITING", 2)

    async def story() -> None:
        async with agent_ring(redis_url, keys, long_poll_s=30.0) as here:
            await begin(here.store, groups=1)
            pair = host_pair(keys, "host-1")
            clients = [here.client(f"life-{number}", keys=pair) for number in range(3)]
            polls = [
                asyncio.create_task(client.take(TakeRequest(1, wait_s=20.0))) for client in clients
            ]
            assert await still_waits(polls[0], 1.0)

            assert here.parts.audit.refusals["busy"] >= 1
            assert not any(poll.done() for poll in polls), "one of them tries again"
            for poll in polls:
                poll.cancel()

    asyncio.run(story())


def test_a_lost_host_costs_its_conversations_alone(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys, lease_timeout_s=2.0, reap_every_s=0.1) as here:
            await begin(here.store, groups=1)
            client = await here.actor()
            first, second = await ActorSide.begin(client), await ActorSide.begin(client)
            lost = await HostSide.begin(host_of(here, "host-1"))
            alive = await HostSide.begin(host_of(here, "host-2"))
            actors = {actor.lease.task_id: actor for actor in (first, second)}
            for host in (lost, alive):
                assert await host.call(b"question") is Verdict.OK
                await actors[host.ticket.task_id].say(1, b"answer")
            kept = actors[alive.ticket.task_id]
            deadline = time.monotonic() + 20

            while await gone_verdict(actors[lost.ticket.task_id]) is not Verdict.OUTDATED:
                assert time.monotonic() < deadline
                beats = tuple(sign_of_life(actor) for actor in actors.values())
                await client.beat(BeatRequest(beats, FIRST))
                await alive.hear(0.1)

            assert await alive.call(b"another") is Verdict.OK
            assert (await kept.say(2, b"answer")).verdict is Verdict.OK
            seen = await here.store.run(operations.inspect([lost.ticket.task_id]))
            (task,) = seen.values()
            assert (task.state, task.length, task.attempts) == ("R", 0, 0)

    asyncio.run(story())


def test_a_conversation_goes_back_to_hosts_when_nothing_was_called(
    redis_url: str, keys: Path
) -> None:
    async def story() -> None:
        async with agent_ring(redis_url, keys, lease_timeout_s=1.0, reap_every_s=0.1) as here:
            await begin(here.store, groups=1)
            client = await here.actor()
            actor = await ActorSide.begin(client)
            first = await HostSide.begin(host_of(here, "host-1"))

            beating = asyncio.create_task(keep_alive(actor))
            second = await HostSide.begin(host_of(here, "host-2"))
            beating.cancel()

            assert second.ticket.task_id == first.ticket.task_id
            assert second.ticket.ticket > first.ticket.ticket
            assert await first.call(b"late") is Verdict.OUTDATED

    asyncio.run(story())


def test_news_of_another_broker_wake_a_long_poll(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with (
            agent_ring(redis_url, keys, long_poll_s=30.0) as here,
            agent_ring(redis_url, keys, long_poll_s=30.0) as there,
        ):
            await begin(here.store, groups=1)
            actor = await ActorSide.begin(await here.actor())
            host = await HostSide.begin(host_of(there))
            listening = asyncio.create_task(actor.listen(25.0))
            assert await still_waits(listening, 0.3)

            began = time.monotonic()
            await host.call(b"question")
            calls = await listening

            assert calls is not None and len(calls.calls) == 1
            assert time.monotonic() - began < 5.0

    asyncio.run(story())


def test_the_round_trip_of_a_call_is_measured(
    redis_url: str, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through one broker it takes no tick; through two it takes one or two of them."""

    async def story(number: int) -> float:
        async with (
            agent_ring(redis_url, keys, long_poll_s=5.0) as here,
            agent_ring(redis_url, keys, long_poll_s=5.0) as there,
        ):
            if number == 1:
                await begin(here.store, groups=2)
            actor = await ActorSide.begin(await here.actor(f"actor-{number}"))
            host = await HostSide.begin(host_of(here if number == 1 else there))
            calls = LATENCY_CALLS // number
            answering = asyncio.create_task(answer_all(actor, calls))
            times = []
            for _ in range(calls):
                began = time.monotonic()
                await host.ask(b"x" * 1000)
                times.append(time.monotonic() - began)
            await answering
            return statistics.median(times)

    one, two = asyncio.run(story(1)), asyncio.run(story(2))

    with capsys.disabled():
        print(f"\nmedian round trip: {1e3 * one:.1f} ms through one broker, {1e3 * two:.0f} two")
    assert one < 0.1, "slower than the tick: nothing was woken in memory"
    assert two < 1.0


async def gone_verdict(actor: ActorSide) -> Verdict | None:
    found = await actor.listen(0.0)
    return None if found is None else found.verdict


def sign_of_life(actor: ActorSide) -> Beat:
    return Beat(actor.lease.task_id, actor.lease.fence)


async def keep_alive(actor: ActorSide) -> None:
    while True:
        await actor.client.beat(BeatRequest((sign_of_life(actor),), FIRST))
        await asyncio.sleep(0.1)


def test_a_run_without_live_agents_refuses_conversations(redis_url: str, keys: Path) -> None:
    async def story() -> None:
        async with ring(redis_url, keys) as here:
            await begin(here.store, groups=1)

            with pytest.raises(RefusedError, match=r"run.environment must be agent .* reasoning"):
                await ActorSide.begin(await here.actor())
            with pytest.raises(RefusedError, match=r"run.environment must be agent"):
                await HostSide.begin(host_of(here))

    asyncio.run(story())
