"""The beats of held leases, the verdicts on them, and the leases that are active."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from actors.engine.engine import Delta
from actors.environments.calls import drive
from actors.episodes import held_leases
from actors.episodes.held_leases import MAX_CHUNK_BYTES, HeldLease, HeldLeases, SwapGate, portions
from actors.episodes.rollout import Rollout, RolloutContext, State
from broker.protocol.messages import Beat, Lease, TaskSpec, TaskVerdict, Verdict
from buffer.record.codec import decode_completion, join_completions
from buffer.record.episode import PolicyVersion, VersionSpan
from tests.actors.support.fake_engine import CharacterTokenizer, sample, scripted
from tests.actors.support.scripted_talk import Talk
from tests.waiting import still_waits

LETTERS = "abcdefghij"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Store:
    """The store's rule for chunks, in five lines."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.length = 0

    def take(self, beat: Beat) -> TaskVerdict:
        if beat.chunk and beat.offset == self.length:
            self.chunks.append(beat.chunk)
            self.length += beat.num_tokens
        elif beat.chunk and beat.offset + beat.num_tokens > self.length:
            return TaskVerdict(beat.task_id, Verdict.GAP, self.length)
        return TaskVerdict(beat.task_id, Verdict.OK, self.length)


def held(
    task_id: int = 1, fence: int = 5, snapshot_s: float = 0.0, limit: int = 64
) -> tuple[Clock, HeldLeases, Rollout]:
    clock = Clock()
    gate = SwapGate(hold_s=0.0)
    leases = HeldLeases(gate, heartbeat_s=2.0, snapshot_s=snapshot_s, clock=clock)
    spec = TaskSpec(group_id=0, index=0, seed=0, purpose="train", temperature=1.0)
    lease = Lease(task_id, fence, spec, length=0)
    talk = Talk("go>")
    tokenizer = CharacterTokenizer()
    rollout = Rollout(
        lease, talk, tokenizer.encode_prompt("go>"), RolloutContext(tokenizer, "me", limit)
    )
    leases.hold(lease).rollout = rollout
    return clock, leases, rollout


def grow(rollout: Rollout, num_tokens: int) -> None:
    delta = sample(scripted({"go>": LETTERS}), rollout.request(), PolicyVersion(1, 0), num_tokens)
    rollout.append_delta(delta)


def test_new_tokens_are_said_once():
    _, leases, rollout = held()
    store = Store()

    for num_tokens in (3, 2):
        grow(rollout, num_tokens)
        beats = leases.due()
        assert [(b.offset, b.num_tokens) for b in beats] == [(store.length, num_tokens)]
        assert leases.apply_verdicts(beats, map(store.take, beats)) == []

    assert leases.due() == []
    joined = join_completions([decode_completion(chunk) for chunk in store.chunks])
    assert CharacterTokenizer().decode(joined.token_ids.tolist()) == LETTERS[:5]


def test_tokens_of_a_young_episode_are_said_once_it_is_old_enough():
    clock, leases, rollout = held(snapshot_s=1.0)
    grow(rollout, 3)

    clock.now += 0.5
    assert leases.due() == []
    assert [b.num_tokens for b in leases.due(final=True)] == [3]
    clock.now += 0.5
    assert [b.num_tokens for b in leases.due()] == [3]


def test_signs_of_life_that_are_more_frequent_than_snapshots_do_not_put_these_off():
    clock, leases, rollout = held(snapshot_s=5.0)  # heartbeats every 2 s
    store, said = Store(), []

    for second in range(1, 12):
        clock.now = float(second)
        grow(rollout, 1)
        beats = leases.due()
        leases.apply_verdicts(beats, map(store.take, beats))
        said += [(second, beat.num_tokens) for beat in beats]

    assert said == [(2, 0), (4, 0), (5, 5), (7, 0), (9, 0), (10, 5)]


def test_a_silent_lease_is_kept_alive_without_tokens():
    clock, leases, _ = held()

    assert leases.due() == []
    clock.now = 2.0

    assert leases.due() == [Beat(1, 5)]


def test_a_gap_is_closed_from_where_the_store_is():
    _, leases, rollout = held()
    store = Store()
    grow(rollout, 2)
    beats = leases.due()
    leases.apply_verdicts(beats, map(store.take, beats))

    # The store was rewound behind the actor's back.
    store.chunks.clear()
    store.length = 0
    grow(rollout, 2)
    beats = leases.due()
    verdicts = [store.take(beat) for beat in beats]
    assert verdicts[0].verdict is Verdict.GAP
    leases.apply_verdicts(beats, verdicts)

    (again,) = leases.due()
    assert (again.offset, again.num_tokens) == (0, 4)
    assert store.take(again).verdict is Verdict.OK


def test_a_lost_answer_leads_to_a_duplicate_that_the_store_ignores():
    _, leases, rollout = held()
    store = Store()
    grow(rollout, 2)
    for beat in leases.due():
        store.take(beat)  # its answer never arrives
    grow(rollout, 1)

    beats = leases.due()
    leases.apply_verdicts(beats, map(store.take, beats))
    beats = leases.due()
    leases.apply_verdicts(beats, map(store.take, beats))

    assert store.length == 3
    assert leases.due() == []


def test_stale_and_gone_leases_are_lost():
    for verdict in (Verdict.OUTDATED, Verdict.GONE):
        clock, leases, rollout = held()
        clock.now = 2.0

        lost = leases.apply_verdicts(leases.due(), [TaskVerdict(1, verdict)])

        assert [held.lease for held in lost] == [rollout.lease]
        assert lost == list(leases), "it is the caller who ends them"


def test_a_verdict_on_an_older_fence_does_not_touch_the_newer_lease():
    _, leases, rollout = held(fence=6)

    assert leases.apply_verdicts([Beat(1, 5)], [TaskVerdict(1, Verdict.OUTDATED)]) == []
    leases.end_lease(1, 5, "OK")

    assert [held.lease.fence for held in leases] == [6]
    assert rollout.lease.fence == 6


def test_a_restarted_episode_is_sent_whole_and_never_behind_stored_tokens():
    clock, leases, rollout = held()
    rollout.restarted = True
    (mine,) = leases
    mine.num_stored = 40  # of those that could not be continued
    mine.start(rollout)

    for length, stored in ((3, 3), (7, 40), (9, 0)):
        grow(rollout, length - rollout.length)
        clock.now += 2.0
        (beat,) = leases.due()
        assert (beat.offset, beat.num_tokens) == (0, length)
        verdict = Verdict.OK if stored else Verdict.GAP
        leases.apply_verdicts([beat], [TaskVerdict(1, verdict, stored)])

    assert [beat.num_tokens for beat in leases.due(final=True)] == [9], "a gap: once more"


def test_the_longer_a_restarted_episode_is_the_less_often_it_is_sent_whole(monkeypatch):
    monkeypatch.setattr(held_leases, "WHOLE_TOKENS_PER_S", 4)
    sent = {}
    for limit in (1000, 2000):
        clock, leases, rollout = held(snapshot_s=1.0, limit=limit)
        rollout.restarted = True
        (mine,) = leases
        mine.start(rollout)
        total, waited = 0, []
        while rollout.length < limit:
            spans = (VersionSpan(PolicyVersion(1, 0), 0),)
            rollout.append_delta(Delta("", (1,) * 4, (-1.0,) * 4, spans, None))
            clock.now += 1.0
            beats = [beat for beat in leases.due() if beat.num_tokens]
            total += sum(beat.num_tokens for beat in beats)
            verdicts = [TaskVerdict(1, Verdict.OK, beat.num_tokens) for beat in beats]
            waited.append(clock.now - mine.stored_at)
            leases.apply_verdicts(beats, verdicts)
        sent[limit] = total
        assert max(waited) <= held_leases.LONGEST_PAUSE_S + 1
        assert [beat.num_tokens for beat in leases.due(final=True)] in ([], [limit])

    assert sent[1000] < 12 * 1000, "whole each second it would be 125 times"


def test_tokens_of_a_finished_episode_travel_only_if_it_is_given_back():
    _, leases, rollout = held()
    grow(rollout, 64)
    rollout.settle(drive(rollout.judge()))
    assert rollout.state is State.FINISHED

    assert leases.due() == []
    assert [b.num_tokens for b in leases.due(final=True)] == [len(LETTERS) + 1]


def test_beats_are_cut_into_messages_of_bounded_size():
    large = Beat(1, 1, 0, 1, b"x" * (MAX_CHUNK_BYTES // 2 + 1))
    small = [Beat(i, 1) for i in range(3000)]

    cut = list(portions([large, large, *small]))

    assert [beat for portion in cut for beat in portion] == [large, large, *small]
    assert all(sum(len(b.chunk) for b in portion) <= MAX_CHUNK_BYTES for portion in cut)
    assert max(map(len, cut)) <= 1024
    assert list(portions([])) == []


def test_a_lease_is_active_from_its_begin_until_it_is_closed_or_ends():
    _, leases, _ = held(task_id=1)
    spec = TaskSpec(group_id=0, index=0, seed=0, purpose="train", temperature=1.0)
    one, other = leases.get(1), leases.hold(Lease(2, 7, spec, length=0))
    assert one is not None
    assert leases.num_active == 0

    leases.begin_work(one, started_at=0.0)
    leases.begin_work(other, started_at=0.0)
    assert leases.num_active == 2

    leases.close(one)
    leases.end_lease(1, 5, "OK")
    leases.end_lease(2, 7, "OK")
    assert (leases.num_active, len(leases)) == (0, 0)
    assert one.has_ended
    assert other.has_ended


def test_the_gate_is_closed_while_an_evaluation_is_active_whatever_ends_it():
    async def story(finish: Callable[[HeldLeases, HeldLease], None]) -> None:
        gate = SwapGate(hold_s=60.0)
        leases = HeldLeases(gate, heartbeat_s=2.0, clock=Clock())
        spec = TaskSpec(group_id=0, index=0, seed=0, purpose="eval", temperature=0.0)
        evaluation = leases.hold(Lease(1, 5, spec, length=0))
        await asyncio.wait_for(gate.wait(), 1)
        leases.begin_work(evaluation, started_at=0.0)
        swap = asyncio.create_task(gate.wait())
        assert await still_waits(swap, 0.02)

        finish(leases, evaluation)
        await asyncio.wait_for(swap, 1)

    asyncio.run(story(lambda leases, evaluation: leases.close(evaluation)))
    asyncio.run(story(lambda leases, _: leases.end_lease(1, 5, "OK")))


def test_a_finished_episode_that_waits_for_its_group_holds_no_place_and_loses_no_token():
    clock, leases, rollout = held(snapshot_s=1.0)
    lease = leases.get(1)
    assert lease is not None
    leases.begin_work(lease, started_at=0.0)
    grow(rollout, 4)
    rollout.state = State.FINISHED
    clock.now = 1.0
    assert not leases.due(), "its record is on its way"

    leases.wait(lease)

    assert leases.num_active == 0
    (beat,) = leases.due()
    assert beat.num_tokens == 4
    leases.apply_verdicts([beat], [Store().take(beat)])
    clock.now = 3.0
    assert [each.num_tokens for each in leases.due()] == [0], "it is still kept alive"
    leases.resume(lease)
    assert leases.num_active == 1
