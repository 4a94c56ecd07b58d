"""Conversations with live agents: mailboxes, tickets, and a task that waits for its agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from buffer import operations
from buffer.operations.operation import Operation
from buffer.operations.values import (
    BeatLine,
    BeatVerdict,
    CallLine,
    CallsAnswer,
    EndLine,
    LeasedTask,
    ListenLine,
    RepliesAnswer,
    ReplyLine,
    SayLine,
    TakeAnswer,
)
from tests.buffer.support.run_in_store import TTL_MS, RunInStore


class Talk:
    """One task's actor and its agent's host."""

    def __init__(self, run: RunInStore, task: LeasedTask) -> None:
        self.run, self.task, self.order = run, task, 0
        self.ticket = self.newest = 0
        self.most_bytes, self.agent_ms = 10**6, 10**6

    def want(self) -> str:
        call = operations.want_agents([(self.task.task_id, self.task.fence, b"told")])
        return self.run.store.run(call)[0]

    def take(self, host: str = "host") -> None:
        (ticket,) = self.asked(host).tickets
        assert ticket.task_id == self.task.task_id
        self.ticket = self.newest = ticket.ticket

    def asked(self, host: str = "host") -> TakeAnswer:
        call = operations.take_conversations(host, n=1, ttl_ms=TTL_MS, newest=self.newest)
        return self.run.store.run(call)

    def call(self, number: int, tail: bytes = b"body", parent: int = 0, keep: int = 0) -> str:
        line = CallLine(self.task.task_id, self.ticket, number, parent, keep, tail)
        return self.run.store.run(operations.add_calls([line]))[0].verdict

    def say(
        self, number: int, reply: bytes, *, offset: int, tokens: int = 2, end: int | None = None
    ) -> BeatVerdict:
        fence = self.task.fence
        chunk = b"x" * tokens
        beat = BeatLine(self.task.task_id, fence, offset, tokens, chunk)
        beat = beat._replace(first_fence=fence, last_fence=fence)
        turn_end = offset + tokens if end is None else end
        line = SayLine(beat, self.ticket, number, turn_end, reply)
        call = operations.say_replies([line], ttl_ms=TTL_MS)
        return self.run.store.run(call)[0]

    def hear(self, heard: int = 0) -> RepliesAnswer:
        call = operations.read_replies(
            [ReplyLine(self.task.task_id, self.ticket, heard)],
            ttl_ms=TTL_MS,
            agent_ms=self.agent_ms,
            most_bytes=self.most_bytes,
        )
        return self.run.store.run(call)[0]

    def listen(self, num_calls: int = 0, num_said: int = 0) -> CallsAnswer:
        line = ListenLine(self.task.task_id, self.task.fence, self.ticket, num_calls, num_said)
        return self.run.store.run(operations.read_calls([line], most_bytes=self.most_bytes))[0]

    def end(
        self,
        why: str = "",
        number: int = 0,
        reward: bytes = b"",
        *,
        order: int = 0,
        heard: int = 0,
        **bounds: Any,
    ) -> str:
        self.order = order or self.order + 1
        line = EndLine(self.task.task_id, self.ticket, heard, why, number, self.order, reward)
        return self.run.store.run(operations.end_conversations([line], **bounds))[0]

    def lose_host(self, *, max_attempts: int = 3) -> None:
        """The ticket runs out, and a broker looks for expired ones."""
        self.run.redis.zadd(f"{self.run.prefix}:tickets", {str(self.task.task_id): 1}, xx=True)
        self.run.store.run(operations.reap(max_attempts=max_attempts))

    def mailbox_keys(self) -> list[object]:
        task = str(self.task.task_id).encode()
        sets = [
            name
            for name in ("wanted", "tickets", "news")
            if self.run.redis.zscore(f"{self.run.prefix}:{name}", task) is not None
        ]
        return [*self.run.redis.keys(f"{self.run.prefix}:m:*"), *sets]


@pytest.fixture
def talk(run: RunInStore) -> Talk:
    """A conversation that a host has taken."""
    run.create(1)
    talk = Talk(run, run.lease()[0])
    assert talk.want() == "OK"
    talk.take()
    return talk


def test_a_reply_is_written_with_its_tokens_or_not_at_all(talk: Talk) -> None:
    talk.call(1)

    assert talk.say(1, b"early", offset=5) == ("GAP", 0)
    assert talk.hear().replies == ()
    assert talk.say(2, b"to nothing", offset=0) == ("UNCALLED", 0)
    assert talk.say(1, b"before its end", offset=0, end=3) == ("GAP", 2)
    assert talk.hear().replies == (), "its tokens so far are stored, and it is not"
    assert talk.say(1, b"hello", offset=2, tokens=0, end=2) == ("OK", 2)
    assert talk.say(1, b"hello", offset=0) == ("DUP", 2), "its answer was lost, and it came again"
    assert talk.say(1, b"something else", offset=2) == ("OTHER", 2)

    (reply,) = talk.hear().replies
    assert (reply.number, reply.reply) == (1, b"hello")
    assert talk.hear(reply.stamp).replies == ()


def test_a_reply_that_the_store_has_lost_is_said_by_the_next_holder(talk: Talk) -> None:
    talk.call(1)
    talk.say(1, b"hello", offset=0)
    assert talk.listen(num_calls=1, num_said=1).verdict == "OK"
    talk.call(2)
    assert talk.listen(num_calls=1, num_said=1).calls != (), "a call is open, and none was lost"

    assert talk.listen(num_calls=2, num_said=2).verdict == "STALE", "one of two was lost"

    (talk.task,) = talk.run.lease()
    (seen,) = talk.run.store.run(operations.inspect([talk.task.task_id])).values()
    assert seen.attempts == 0
    assert [call.is_answered for call in talk.listen().calls] == [True, False]
    assert talk.say(2, b"again", offset=2) == ("OK", 4)


def test_tokens_without_a_call_are_not_left_to_the_next_agent(talk: Talk) -> None:
    assert talk.run.beat(talk.task, 0, 3) == ("GAP", 0), "the store has lost the call"
    talk.call(1)
    assert talk.run.beat(talk.task, 0, 3) == ("OK", 3), "its host has sent it again"


def test_tokens_that_a_heartbeat_brought_need_not_come_again(talk: Talk) -> None:
    talk.call(1)
    talk.run.beat(talk.task, 0, 3)

    assert talk.say(1, b"all of it", offset=3, tokens=0) == ("OK", 3)


def test_calls_are_numbered_and_hold_what_follows_their_parents(talk: Talk) -> None:
    assert talk.call(1, b"a long history") == "OK"
    assert talk.call(1, b"a long history") == "DUP"
    assert talk.call(1, b"another") == "OTHER"
    assert talk.call(3) == "GAP"
    assert talk.call(2, b" day", parent=1, keep=6) == "OK", "two calls at a time"
    assert talk.call(3, b"x", parent=2, keep=11) == "OTHER", "the body of 2 has 10 bytes"

    heard = talk.listen()

    assert [(c.parent, c.keep, c.tail) for c in heard.calls] == [
        (0, 0, b"a long history"),
        (1, 6, b" day"),
    ]
    assert talk.listen(1).calls == heard.calls[1:]
    talk.say(2, b"reply", offset=0)
    assert [call.is_answered for call in talk.listen().calls] == [False, True]


def test_a_mailbox_is_bounded(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations.conversations, "MAX_OPEN_CALLS", 1)
    monkeypatch.setattr(operations.conversations, "MAX_CALLS", 2)

    assert talk.call(1) == "OK"
    assert talk.call(2) == "BUSY"
    talk.say(1, b"reply", offset=0)
    line = CallLine(talk.task.task_id, talk.ticket, 2, 0, 0, b"body")
    small = operations.add_calls([line], max_bytes=16)
    assert talk.run.store.run(small)[0].verdict == "FULL"
    assert talk.call(2) == "OK"
    talk.say(2, b"reply", offset=2)
    assert talk.call(3) == "FULL"


def test_an_answer_is_bounded_and_the_next_one_goes_on(talk: Talk) -> None:
    talk.most_bytes = 5
    talk.call(1, b"long enough")
    talk.call(2, b"the next")

    heard = talk.listen()
    assert (len(heard.calls), heard.num_calls) == (1, 2)
    assert len(talk.listen(1).calls) == 1
    talk.say(2, b"first reply", offset=0)
    talk.say(1, b"second reply", offset=2)
    (first,) = talk.hear().replies
    (second,) = talk.hear(first.stamp).replies
    assert (first.number, second.number) == (2, 1)


def test_the_last_reward_before_the_end_counts(talk: Talk) -> None:
    talk.call(1)
    assert talk.end(reward=b"0.1") == "OK"
    assert talk.end(number=1, reward=b"0.7") == "OK"
    assert talk.end(number=2, reward=b"0.7") == "GAP"
    assert talk.listen().rewards == {}, "it may be replaced yet"
    assert talk.end("ended", reward=b"0.2") == "OK"
    assert talk.end("died", reward=b"0.3") == "DUP"
    assert talk.call(2) == "ENDED"

    heard = talk.listen()

    assert (heard.why, heard.rewards) == ("ended", {0: b"0.2", 1: b"0.7"})
    talk.lose_host()
    assert talk.listen().why == "ended", "an ended conversation needs no host"


def test_a_late_copy_of_a_reward_does_not_win(talk: Talk) -> None:
    talk.call(1)
    talk.end(number=1, reward=b"first", order=1)
    talk.end(number=1, reward=b"second", order=2)

    assert talk.end(number=1, reward=b"first", order=1) == "DUP"
    talk.end("ended")

    assert talk.listen().rewards == {1: b"second"}


def test_rewards_are_bounded_and_count_as_bytes_of_the_conversation(talk: Talk) -> None:
    talk.call(1)
    talk.call(2)
    before = talk.run.store.run(operations.usage())

    assert talk.end(number=1, reward=b"x" * 98) == "OK"
    assert talk.run.store.run(operations.usage()) - before == 100
    assert talk.end(number=1, reward=b"y" * 98) == "OK", "in place of the first"
    assert talk.run.store.run(operations.usage()) - before == 100
    assert talk.end(number=2, reward=b"z", max_reward_bytes=100) == "FULL"
    assert talk.end("ended", number=2, reward=b"z", max_bytes=100) == "FULL"
    assert talk.end(reward=b"of the whole", max_bytes=100, max_reward_bytes=100) == "OK"
    talk.end("ended")

    assert talk.listen().rewards == {0: b"of the whole", 1: b"y" * 98}


def test_an_end_comes_behind_all_calls(talk: Talk) -> None:
    talk.call(1, b"long enough")
    talk.call(2, b"the next")
    talk.end("ended", reward=b"1")
    talk.most_bytes = 5

    first, second = talk.listen(), talk.listen(1)

    assert [(len(x.calls), x.why, x.rewards) for x in (first, second)] == [(1, "", {})] * 2
    assert (talk.listen(2).why, talk.listen(2).rewards) == ("ended", {0: b"1"})


def test_the_next_actor_reads_all_that_was_called(talk: Talk) -> None:
    talk.call(1)
    talk.say(1, b"reply", offset=0)
    talk.call(2, b"!", parent=1, keep=4)
    talk.run.expire([talk.task])

    (again,) = talk.run.lease(1)
    successor = Talk(talk.run, again)

    assert again.length == 2
    heard = successor.listen()
    assert (heard.ticket, heard.num_calls) == (talk.ticket, 2)
    assert successor.want() == "OK"
    assert talk.say(2, b"of a dead actor", offset=2).verdict == "STALE"
    assert talk.hear().num_calls == 2
    assert len(talk.hear().replies) == 1


def test_a_conversation_without_a_call_is_taken_by_another_host(talk: Talk) -> None:
    first = talk.ticket
    talk.lose_host()

    talk.take()

    assert talk.ticket > first
    assert talk.run.beat(talk.task) == ("OK", 0), "its actor noticed nothing"


def test_a_conversation_whose_host_dies_is_begun_again_so_many_times(run: RunInStore) -> None:
    run.create(1)
    for attempt in range(3):
        talk = Talk(run, run.lease(1)[0])
        assert talk.want() == "OK"
        talk.take()
        talk.call(1)
        talk.say(1, b"reply", offset=0)
        talk.lose_host()
        assert talk.mailbox_keys() == []
        assert talk.hear().verdict == "GONE"
        assert run.beat(talk.task, 2, 1)[0] == "STALE"
        if attempt < 2:
            assert run.store.run(operations.inspect([talk.task.task_id]))[0].length == 0

    (letter,) = run.store.run(operations.dead_letters())
    assert (letter.why, letter.attempts) == ("its host died", 3)


def test_a_ticket_whose_answer_was_lost_comes_again(talk: Talk) -> None:
    talk.newest = 0

    again = talk.asked()

    assert [t.ticket for t in again.tickets] == [talk.ticket]
    assert talk.asked("another").status == "EMPTY"
    talk.call(1)
    assert talk.asked().status == "EMPTY", "it has called, so the answer was not lost"


def test_a_host_whose_agents_end_without_a_call_rests(run: RunInStore) -> None:
    run.create_eval(6)
    talks = [Talk(run, task) for task in run.lease(6)]
    host, newest = f"{run.prefix}:h::host", 0
    for talk in talks:
        talk.want()

    for talk in talks[:4]:  # three, and one to try
        talk.newest = newest
        talk.take()
        talk.end("died")
        newest = talk.newest

    talk = talks[4]
    talk.newest = newest
    rests = talk.asked()
    assert (rests.status, rests.num_silent) == ("RESTS", 4)
    assert 0 < rests.rest_ms <= 1000
    other = Talk(run, talk.task)
    other.take("another")
    talk = talks[5]
    talk.newest = newest
    run.redis.hset(host, "rests_until", 1)
    talk.take()
    assert run.redis.hget(host, "silent") == b"4"
    talk.call(1)
    assert run.redis.hmget(host, "silent", "rests_until") == [None, None]


def test_a_ticket_lives_as_long_as_its_host_asks_for_replies(talk: Talk) -> None:
    talk.call(1)
    talk.run.redis.zadd(f"{talk.run.prefix}:tickets", {str(talk.task.task_id): 1}, xx=True)

    assert talk.hear().verdict == "OK"
    talk.run.store.run(operations.reap(max_attempts=3))

    assert talk.hear().verdict == "OK"


@pytest.mark.parametrize("calls", [0, 1])
def test_a_conversation_whose_agent_does_not_end_in_time_is_lost(talk: Talk, calls: int) -> None:
    for number in range(calls):
        talk.call(number + 1)
    assert talk.hear().verdict == "OK"
    talk.agent_ms = -1

    assert talk.hear().verdict == "GONE"

    assert talk.mailbox_keys() == []
    (task,) = talk.run.store.run(operations.inspect([talk.task.task_id])).values()
    assert (task.state, task.length, task.attempts) == ("R", 0, 0)
    losses = talk.run.redis.hget(f"{talk.run.prefix}:t:{talk.task.task_id}", "losses")
    assert losses == b"1", "a loss, and no reward"


def test_an_ended_conversation_has_no_such_limit(talk: Talk) -> None:
    talk.call(1)
    talk.end("ended")
    talk.agent_ms = -1

    assert talk.hear().verdict == "OK"


@pytest.mark.parametrize("state", ["D", "X"])
@pytest.mark.parametrize("calls", [0, 1])
def test_a_mailbox_of_a_task_that_has_ended_goes_and_the_task_stays(
    talk: Talk, state: str, calls: int
) -> None:
    """Nothing leaves one behind; if something did, it must not begin the task again."""
    for number in range(calls):
        talk.call(number + 1)
    task = f"{talk.run.prefix}:t:{talk.task.task_id}"
    talk.run.redis.hset(task, "st", state)
    before = talk.run.redis.hgetall(task)

    talk.lose_host()

    assert talk.mailbox_keys() == []
    assert talk.run.redis.hgetall(task) == before


def test_a_ticket_without_a_mailbox_expires_alone(talk: Talk) -> None:
    talk.run.redis.delete(f"{talk.run.prefix}:m:{talk.task.task_id}")

    talk.lose_host()

    assert talk.run.redis.zcard(f"{talk.run.prefix}:tickets") == 0


@pytest.mark.parametrize(
    "say",
    [
        lambda talk, stamp: talk.hear(stamp).verdict,
        lambda talk, stamp: talk.end("ended", reward=b"1", heard=stamp),
        lambda talk, stamp: talk.end(reward=b"1", heard=stamp),
    ],
    ids=["hears", "ends", "rewards"],
)
def test_a_reply_that_the_store_has_lost_ends_its_conversation(
    talk: Talk, say: Callable[[Talk, int], str]
) -> None:
    talk.call(1)
    talk.say(1, b"heard", offset=0)
    (heard,) = talk.hear().replies
    assert talk.end(number=1, reward=b"0", heard=heard.stamp) == "OK", "the store has it"
    for key in (f"m:{talk.task.task_id}:r", f"t:{talk.task.task_id}:p"):
        talk.run.redis.delete(f"{talk.run.prefix}:{key}")
    talk.run.redis.hdel(f"{talk.run.prefix}:m:{talk.task.task_id}", "newest", "said:1")

    assert say(talk, heard.stamp) == "GONE"

    assert talk.run.beat(talk.task)[0] == "STALE", "the task begins anew, at another actor"
    assert talk.mailbox_keys() == []
    task = f"{talk.run.prefix}:t:{talk.task.task_id}"
    assert talk.run.redis.hmget(task, "losses", "att", "fails") == [b"1", None, None]


def test_an_end_that_has_come_again_is_known_whatever_its_agent_heard(talk: Talk) -> None:
    talk.call(1)
    talk.say(1, b"heard", offset=0)
    (heard,) = talk.hear().replies

    assert talk.end("ended", heard=heard.stamp) == "OK"

    assert talk.end("ended", heard=heard.stamp) == "DUP"
    assert talk.listen(num_calls=1).why == "ended"


def test_an_actor_that_answers_an_agent_of_before_is_told(talk: Talk) -> None:
    """The store was set back to before a host took the conversation."""
    talk.run.beat(talk.task, 0, 2)
    talk.run.redis.hset(f"{talk.run.prefix}:m:{talk.task.task_id}", "ticket", "17")

    assert talk.listen().verdict == "STALE"
    assert talk.run.store.run(operations.inspect([talk.task.task_id]))[0].length == 0


def test_a_reply_to_an_agent_of_before_ends_the_conversation(talk: Talk) -> None:
    """The store was set back; another host's agent has made a call of the same number."""
    talk.call(1)
    talk.run.beat(talk.task, 0, 2)
    talk.ticket -= 1

    assert talk.say(1, b"to another", offset=2, tokens=0) == ("STALE", 0)
    assert talk.mailbox_keys() == []
    assert talk.run.beat(talk.task)[0] == "STALE"


def test_conversations_that_wait_for_a_host_are_counted(run: RunInStore) -> None:
    run.create(1)
    first, second = (Talk(run, task) for task in run.lease()[:2])
    first.want()
    second.want()
    run.redis.zincrby(f"{run.prefix}:wanted", -60_000, "0")
    waiting = run.store.run(operations.stats())
    assert (waiting.wanted, waiting.hosted, waiting.hosts) == (2, 0, 0)
    assert 60 <= waiting.wanted_s < 120

    first.take()

    one = run.store.run(operations.stats())
    assert (one.wanted, one.hosted, one.hosts) == (1, 1, 1)


def test_hosts_are_counted_by_the_conversations_that_they_have(run: RunInStore) -> None:
    run.create(3)
    for task in run.lease()[:3]:
        Talk(run, task).want()
    for host, n in (("here", 2), ("there", 1)):
        take = operations.take_conversations(host, n=n, ttl_ms=TTL_MS)
        assert len(run.store.run(take).tickets) == n
    counted = run.store.run(operations.stats())

    assert (counted.hosted, counted.hosts) == (3, 2)


def test_tokens_of_a_conversation_that_is_gone_are_cut(run: RunInStore) -> None:
    run.create(1)
    talk = Talk(run, run.lease()[0])
    run.beat(talk.task, 0, 3)

    assert talk.want() == "STALE"

    (again,) = run.lease(1)
    assert again.length == 0
    assert Talk(run, again).want() == "OK"


def test_an_episode_is_not_begun_again_behind_an_agent_that_was_answered(talk: Talk) -> None:
    talk.call(1)
    talk.say(1, b"reply", offset=0)
    talk.run.expire([talk.task])
    (again,) = talk.run.lease(1)
    anew = BeatLine(again.task_id, again.fence, 0, 1, b"x", first_fence=again.fence)

    (answer,) = talk.run.store.run(operations.beat(ttl_ms=TTL_MS, lines=[anew]))

    assert answer.verdict == "TAKEN"
    assert talk.mailbox_keys() == []
    assert talk.hear().verdict == "GONE"


def _age(run: RunInStore, task: LeasedTask, ms: int) -> None:
    """Let a lease be older, and its last token and the call that it works on."""
    seconds, micros = run.redis.time()
    then = seconds * 1000 + micros // 1000 - ms
    run.redis.hset(f"{run.prefix}:meta", "reaped_at", seconds * 1000)
    run.redis.hset(f"{run.prefix}:t:{task.task_id}", "progress", then)
    if run.redis.hexists(mailbox := f"{run.prefix}:m:{task.task_id}", "opened"):
        run.redis.hset(mailbox, "opened", then)


def _beat(task: LeasedTask, **limits: int) -> Operation[list[BeatVerdict]]:
    line = BeatLine(task.task_id, task.fence)
    return operations.beat(ttl_ms=TTL_MS, lines=[line], **{"progress_timeout_ms": 1000, **limits})


def test_a_task_that_waits_for_its_agent_does_not_stand_still(talk: Talk) -> None:
    _age(talk.run, talk.task, 60_000)
    assert talk.run.store.run(_beat(talk.task))[0].verdict == "OK"
    talk.call(1)
    assert talk.run.store.run(_beat(talk.task))[0].verdict == "OK", "its turn has just begun"

    _age(talk.run, talk.task, 60_000)

    assert talk.run.store.run(_beat(talk.task))[0].verdict == "TAKEN"


def test_a_turn_and_not_the_wait_before_it_may_be_too_slow(talk: Talk) -> None:
    limits = {"progress_timeout_ms": 0, "longest_ms": 1}
    _age(talk.run, talk.task, 0)
    assert talk.run.store.run(_beat(talk.task, **limits))[0].verdict == "OK"
    talk.call(1)
    _age(talk.run, talk.task, 60_000)

    assert talk.run.store.run(_beat(talk.task, **limits))[0].verdict == "TAKEN"


def test_an_ended_conversation_is_the_actors_turn(talk: Talk) -> None:
    talk.end("ended")
    assert talk.run.store.run(_beat(talk.task))[0].verdict == "OK"
    _age(talk.run, talk.task, 60_000)

    assert talk.run.store.run(_beat(talk.task))[0].verdict == "TAKEN"


def test_a_lease_that_waits_for_its_agent_is_not_shared(talk: Talk) -> None:
    share = operations.share("other", 1, 4, still_ms=1000, token_ms=0)
    talk.call(1)
    for task in range(4):
        talk.run.beat(talk.task._replace(task_id=task), 0, 1)
    talk.say(1, b"said", offset=1)
    _age(talk.run, talk.task, 60_000)
    assert talk.run.store.run(share) == [], "nothing else stands still"

    talk.call(2)
    assert talk.run.store.run(share) == [], "its turn has just begun"
    _age(talk.run, talk.task, 60_000)

    assert talk.run.store.run(share) == [talk.task.task_id]


@pytest.mark.parametrize(
    "finish",
    [
        lambda talk: talk.run.submit([talk.task]),
        lambda talk: talk.run.store.run(operations.cancel(talk.run.lineage)),
        lambda talk: talk.run.store.run(operations.restore_committed(talk.run.lineage, [0])),
        lambda talk: talk.run.store.run(operations.reconcile(talk.run.lineage, 1, [0])),
        lambda talk: talk.run.store.run(
            operations.fail(
                max_attempts=1,
                max_data_failures=1,
                failures=[(talk.task.task_id, talk.task.fence, "data", "bad")],
            )
        ),
        lambda talk: talk.run.store.run(
            operations.cut([(talk.task.task_id, talk.task.fence)], max_attempts=3)
        ),
        lambda talk: (
            talk.run.store.run(operations.release([(talk.task.task_id, talk.task.fence)])),
            talk.run.store.run(operations.shrink(1)),
        ),
    ],
    ids=["submit", "cancel", "restore", "reconcile", "dead letter", "cut", "shrink"],
)
def test_a_mailbox_goes_with_its_task(talk: Talk, finish) -> None:
    talk.call(1)
    talk.say(1, b"reply", offset=0)

    finish(talk)

    assert talk.mailbox_keys() == []
    assert talk.hear().verdict == "GONE"


def test_a_mailbox_of_an_evaluation_goes_with_its_round(run: RunInStore) -> None:
    run.create_eval(1)
    talk = Talk(run, run.lease()[0])
    talk.want()
    talk.take()
    talk.call(1)

    run.store.run(operations.close_eval(run.lineage, 0))

    assert talk.mailbox_keys() == []


def test_a_drained_lease_keeps_its_conversation(talk: Talk) -> None:
    talk.call(1)
    talk.say(1, b"reply", offset=0)
    talk.run.store.run(operations.release([(talk.task.task_id, talk.task.fence)]))

    (again,) = talk.run.lease(1)

    assert again.length == 2
    assert Talk(talk.run, again).listen().num_calls == 1
    assert len(talk.hear().replies) == 1


def test_mailboxes_count_as_memory_of_the_run(talk: Talk) -> None:
    before = talk.run.store.run(operations.usage())

    talk.call(1, b"x" * 1000)

    assert talk.run.store.run(operations.usage()) - before == 1000


def test_no_host_takes_a_conversation_while_the_store_recovers(run: RunInStore) -> None:
    run.create(1)
    talk = Talk(run, run.lease()[0])
    talk.want()
    run.store.run(operations.confirm("f" * 40))
    assert talk.asked().status == "WAIT"

    run.store.run(operations.recovered(run.lineage, "f" * 40))

    talk.take()
    assert talk.asked().status == "EMPTY"


def test_news_name_the_conversations_that_have_changed(talk: Talk) -> None:
    news = talk.run.store.run(operations.read_news(0))
    assert (news.wanted, news.tasks) == (0, [talk.task.task_id])
    assert talk.run.store.run(operations.read_news(news.newest)).tasks == []

    talk.call(1)

    again = talk.run.store.run(operations.read_news(news.newest))
    assert (again.newest, again.tasks) == (news.newest + 1, [talk.task.task_id])
    assert talk.run.store.run(operations.read_news(10**9)).tasks, "the store was set back"
