"""Claims against a real store: training, dropping, replay and abandoning of batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from broker.protocol.codec import encode_spec
from broker.protocol.messages import TaskSpec
from buffer import operations
from buffer.operations.keys import run_prefix
from buffer.operations.operation import Operation
from buffer.operations.values import Claim, NewTask, Stats
from buffer.record.episode import Episode, PolicyVersion
from buffer.store import Store
from configs.errors import DeadlineError, DeterminismError, LostLineage, RecordError, StoreError
from configs.settings import Settings
from learner.data.batch import plan_batch
from learner.data.claims import DEADLINE_S, Claims
from learner.data.ledger import Ledger
from learner.data.retrying_store import RetryingStore
from tests.configs.support.recording import recording
from tests.learner.support.made_claims import make_claims
from tests.learner.support.made_episodes import answers_at, make_episode
from tests.learner.support.tiny_run import answer_leases, begin_run, new_ledger, tiny_settings

VOCABULARY = 32


@dataclass(slots=True)
class Bench:
    """A begun run with a learner's and an actor's side."""

    store: Store
    url: str
    settings: Settings
    lineage: int
    ledger: Ledger = field(init=False)
    patient: RetryingStore = field(init=False)

    def claims(self) -> Claims:
        """Start a life of the learner in the present lineage."""
        self.ledger = new_ledger(self.lineage, self.store.run(operations.lineages()))
        self.patient = RetryingStore(self.store)
        return make_claims(self.patient, self.settings, ledger=self.ledger, vocabulary=VOCABULARY)

    def restart(self, step: int) -> Claims:
        """Begin a new lineage at `step`, as after a crash."""
        lineage = self.store.run(operations.begin_lineage(self.lineage, step))
        assert lineage is not None
        self.lineage = lineage
        return self.claims()

    def fill(
        self,
        units: int,
        *,
        first: int = 0,
        version: tuple[int, int] | None = None,
        answered_by: tuple[int, int] | None = None,
        prompt: Sequence[int] = (5, 6, 7),
        completion: Sequence[int] = (8, 9),
        reward: Callable[[int], float] = lambda task_id: float(task_id % 2),
    ) -> None:
        """Create `units` groups and let an actor at `version` finish them.

        `answered_by` is what it says its version is, `reward` what it gives for a task.
        """
        size = self.settings.run.group_size
        ids = range(first * size, (first + units) * size)
        spec = TaskSpec(0, 0, 0, "train", 1.0)
        tasks = [NewTask(i, i // size, encode_spec(spec)) for i in ids]
        self.store.run(operations.create(self.lineage, tasks))
        version = version or (self.lineage, 0)

        def answer(task_id: int, _spec: TaskSpec) -> Episode:
            group_id = task_id // size
            span = (PolicyVersion(*(answered_by or version)), 0)
            return make_episode(
                task_id,
                group_id=group_id,
                prompt=prompt,
                completion=completion,
                versions=[span],
                reward=reward(task_id),
            )

        assert answer_leases(self.store, version, answer) == units * size

    def answer(self, number: int) -> None:
        """Let an actor with the first weights finish so many tasks that are there."""
        at_first = (self.lineage, 0)
        found = answer_leases(self.store, at_first, answers_at(PolicyVersion(*at_first)))
        assert found == number

    def stats(self) -> Stats:
        """Count tasks by state."""
        return self.store.run(operations.stats())


@pytest.fixture
def bench(redis_url: str, tmp_path: Path) -> Iterator[Bench]:
    settings = tiny_settings(tmp_path)
    store = Store(redis_url, settings.run.name)
    begin_run(store, settings.run)
    lineage = store.run(operations.begin_lineage(0, 0))
    assert lineage is not None
    yield Bench(store, redis_url, settings, lineage)
    store.close()


def _groups(episodes: tuple[Episode, ...]) -> list[int]:
    return sorted({episode.group_id for episode in episodes})


def test_a_batch_is_handed_over_once_it_is_full_and_sealed(bench: Bench) -> None:
    claims = bench.claims()
    bench.fill(1)
    assert claims.poll(1) is None

    bench.fill(1, first=1)
    batch = claims.poll(1)

    assert batch is not None
    assert [episode.task_id for episode in batch.episodes] == list(range(8))
    assert not batch.is_replay
    assert bench.stats().claims[0].sealed


def _repeatable(bench: Bench) -> None:
    """Make it a run that is to be the same each time."""
    run = bench.settings.run.model_copy(update={"deterministic": True})
    bench.settings = bench.settings.model_copy(update={"run": run})


def test_a_repeatable_batch_has_its_own_groups_whatever_came_first(bench: Bench) -> None:
    _repeatable(bench)
    claims = bench.claims()
    for group in (2, 1):
        bench.fill(1, first=group)
    assert claims.poll(1) is None

    bench.fill(1)
    batch = claims.poll(1)

    assert batch is not None
    assert [episode.task_id for episode in batch.episodes] == list(range(8))


def test_a_repeatable_run_ends_where_a_group_lacks_a_member(bench: Bench) -> None:
    _repeatable(bench)
    claims = bench.claims()
    bench.fill(1)
    ids = range(4, 8)
    spec = encode_spec(TaskSpec(1, 1, 0, "train", 1.0))
    bench.store.run(operations.create(bench.lineage, [NewTask(i, 1, spec) for i in ids]))
    lease = operations.lease("actor", ttl_ms=60_000, n=1, version=(bench.lineage, 0))
    (task,) = bench.store.run(lease).tasks
    failures = [(task.task_id, task.fence, "data", "no such file")]
    bench.store.run(operations.fail(max_attempts=1, max_data_failures=1, failures=failures))
    bench.answer(3)

    with pytest.raises(
        DeterminismError, match=r"must be in its own batch with .*, got 1 dead at batch 1; mend"
    ):
        claims.poll(1)


def test_a_repeatable_run_ends_while_it_waits_for_groups_that_are_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.data.claims.REPORT_EVERY_S", 0.0)
    _repeatable(bench)
    claims = bench.claims()
    bench.fill(1)
    assert claims.poll(1) is None
    bench.store.run(operations.abandon(bench.lineage, 1, "forgotten"))
    looks = count()

    with pytest.raises(DeterminismError, match="got 4 forgotten at batch 1; mend"):
        claims.wait(1, until=lambda: next(looks) > 20)


def test_a_repeatable_run_does_not_go_on_from_before_its_last_commit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.data.claims.REPORT_EVERY_S", 0.0)
    _repeatable(bench)
    claims = bench.claims()
    for step in (1, 2):
        bench.fill(2, first=2 * step - 2, version=(bench.lineage, step - 1))
        assert claims.poll(step) is not None
        bench.store.run(operations.advance(bench.lineage, step))
    bench.store.run(operations.commit(bench.lineage, 2))

    claims = bench.restart(1)
    looks = count()

    with pytest.raises(DeterminismError, match="got 8 trained already at batch 2; mend"):
        claims.wait(2, until=lambda: next(looks) > 20)


def test_a_repeatable_run_ends_where_a_group_cannot_be_trained(bench: Bench) -> None:
    _repeatable(bench)
    claims = bench.claims()
    bench.fill(1)
    _break(bench, 3)

    with pytest.raises(DeterminismError, match="got 4 unreadable at batch 1; mend"):
        claims.poll(1)


@dataclass(slots=True)
class Wire:
    """Between a learner and its store: hears what claims list, and fails where it is told to."""

    run: Callable[[Operation[object]], object]
    listed: list[list[int]] = field(default_factory=list)
    fails: str | None = None
    """The next operation of this name fails."""
    is_done: bool = False
    """The one that fails is done nevertheless."""

    def __call__(self, operation: Operation[object]) -> object:
        """Carry an operation out, or not."""
        fails, self.fails = self.fails, None if operation.name == self.fails else self.fails
        if operation.name != fails:
            return self._heard(self.run(operation))
        if self.is_done:
            self.run(operation)
        raise StoreError("the line is dead")

    def _heard(self, answer: object) -> object:
        if isinstance(answer, Claim):
            self.listed.append([unit.group_id for unit in answer.units])
        return answer


@pytest.fixture
def wire(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire(bench.store.run)
    monkeypatch.setattr(bench.store, "run", wire)
    return wire


def _break(bench: Bench, task_id: int) -> None:
    """Make a record unreadable."""
    with redis.Redis.from_url(bench.url) as client:
        client.set(f"{run_prefix('tiny')}:e:{task_id}", b"nonsense")


def test_a_look_lists_what_has_come_and_a_full_batch_whole(bench: Bench, wire: Wire) -> None:
    claims = bench.claims()
    bench.fill(1)
    for _ in range(3):
        assert claims.poll(1) is None
    assert wire.listed == [[0], [], []]

    bench.fill(1, first=1)
    assert claims.poll(1) is not None
    assert claims.poll(2) is None
    assert wire.listed[3:] == [[0, 1], []]


def test_a_new_life_and_a_recovered_store_list_the_batch_again(bench: Bench, wire: Wire) -> None:
    bench.fill(1)
    bench.claims().poll(1)

    claims = bench.restart(0)
    claims.poll(1)
    claims.poll(1)
    bench.patient.recoveries += 1
    claims.poll(1)

    assert wire.listed == [[0], [0], [], [0]]


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("fails", ["claim", "records", "drop"])
def test_a_look_after_one_that_failed_judges_what_had_come(
    bench: Bench, wire: Wire, tmp_path: Path, fails: str, is_done: bool
) -> None:
    bench.settings = tiny_settings(tmp_path, run={"groups_per_batch": 3})
    claims = bench.claims()
    bench.fill(1)
    claims.poll(1)
    bench.fill(1, first=1)
    _break(bench, 5)
    wire.fails, wire.is_done = fails, is_done

    with pytest.raises(StoreError, match="the line is dead"):
        claims.poll(1)
    assert claims.poll(1) is None

    assert bench.stats().dropped == {"unreadable": 4}
    bench.fill(1, first=2)
    assert claims.poll(1) is None
    assert wire.listed[-1] == [2]
    bench.fill(1, first=3)
    batch = claims.poll(1)
    assert batch is not None
    assert _groups(batch.episodes) == [0, 2, 3]


@pytest.mark.parametrize("is_done", [True, False])
def test_a_full_batch_whose_seal_failed_is_handed_over_by_the_next_look(
    bench: Bench, wire: Wire, is_done: bool
) -> None:
    bench.fill(2)
    claims = bench.claims()
    wire.fails, wire.is_done = "seal", is_done

    with pytest.raises(StoreError, match="the line is dead"):
        claims.poll(1)
    batch = claims.poll(1)

    assert batch is not None
    assert _groups(batch.episodes) == [0, 1]
    assert batch.is_replay == is_done


def test_a_batch_that_was_given_up_is_known_anew(bench: Bench, wire: Wire) -> None:
    bench.fill(2)
    claims = bench.claims()
    wire.fails, wire.is_done = "seal", True
    with pytest.raises(StoreError, match="the line is dead"):
        claims.poll(1)
    with redis.Redis.from_url(bench.url) as client:
        client.delete(f"{run_prefix('tiny')}:e:1")
    assert claims.poll(1) is None
    assert claims.dropped.units == {"forgotten": 2}

    bench.fill(1, first=2)
    for _ in range(2):
        assert claims.poll(1) is None

    assert wire.listed[-2:] == [[2], []]


def test_a_stale_group_is_dropped_and_its_place_filled(bench: Bench) -> None:
    bench.fill(2)
    bench.store.run(
        operations.advance(bench.lineage, 2)
    )  # batch 3 allows lag 1: version 1 or newer
    claims = bench.claims()

    with recording() as recorded:
        assert claims.poll(3) is None
        assert [span.attributes["task"] for span in recorded.named("drop")] == list(range(8))
    assert bench.stats().dropped == {"stale": 8}
    assert claims.dropped.units == {"stale": 2}
    assert claims.dropped.tokens == 16

    bench.fill(2, first=2, version=(bench.lineage, 1))
    batch = claims.poll(3)
    assert batch is not None
    assert _groups(batch.episodes) == [2, 3]


def test_drops_are_counted_by_length_and_their_prompts_asked_again(
    bench: Bench, tmp_path: Path
) -> None:
    bench.settings = tiny_settings(tmp_path, run={"max_completion_tokens": 200})
    bench.fill(2, completion=[8] * 200)
    bench.store.run(operations.advance(bench.lineage, 2))
    claims, ledger = bench.claims(), bench.ledger

    assert claims.poll(3) is None

    assert claims.dropped.episodes_by_length == {"<=512": 8}
    assert list(ledger.facts.waiting) == [0, 1]

    bench.settings = tiny_settings(tmp_path, buffer={"recreate_dropped": False})
    bench.fill(2, first=2, version=(bench.lineage, 2), answered_by=(bench.lineage, 0))
    claims = bench.claims()
    assert claims.poll(3) is None
    assert claims.dropped.units == {"stale": 2}
    assert not bench.ledger.facts.waiting


def test_stale_groups_are_trained_where_the_settings_say_so(bench: Bench, tmp_path: Path) -> None:
    bench.settings = tiny_settings(tmp_path, buffer={"on_stale": "train"})
    bench.fill(2)

    assert bench.claims().poll(3) is not None


def test_an_unreadable_record_drops_its_group(bench: Bench) -> None:
    bench.fill(3)
    _break(bench, 1)
    claims = bench.claims()

    assert claims.poll(1) is None  # drops group 0
    batch = claims.poll(1)

    assert batch is not None
    assert _groups(batch.episodes) == [1, 2]
    assert bench.stats().dropped == {"unreadable": 4}


def test_a_record_under_a_wrong_id_is_unreadable(bench: Bench) -> None:
    bench.fill(2)
    with redis.Redis.from_url(bench.url) as client:
        other = client.get(f"{run_prefix('tiny')}:e:6")
        assert isinstance(other, bytes)
        client.set(f"{run_prefix('tiny')}:e:1", other)

    bench.claims().poll(1)

    assert bench.stats().dropped == {"unreadable": 4}


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [([5, VOCABULARY], [5]), ([5], [5, VOCABULARY]), ([5], [5] * 9), ([5] * 9, [5])],
)
def test_what_no_actor_of_this_run_can_have_made_drops_its_group(
    bench: Bench, prompt: list[int], completion: list[int]
) -> None:
    bench.fill(1, prompt=prompt, completion=completion)
    bench.fill(1, first=1, completion=[5, VOCABULARY - 1])
    claims = bench.claims()

    assert claims.poll(1) is None

    assert claims.dropped.units == {"impossible": 1}
    assert bench.stats().dropped == {"impossible": 4}


@pytest.mark.parametrize("newer", [(1, 1), (2, 0)])
def test_tokens_of_a_version_that_is_not_there_yet_drop_their_group(
    bench: Bench, newer: tuple[int, int]
) -> None:
    bench.fill(1)
    bench.fill(1, first=1, answered_by=newer)
    claims = bench.claims()

    assert claims.poll(1) is None

    assert claims.dropped.units == {"impossible": 1}


def _filter(bench: Bench, tmp_path: Path, **algorithm: object) -> None:
    algorithm = {"filter_zero_variance": True, **algorithm}
    bench.settings = tiny_settings(tmp_path, algorithm=algorithm)


def test_groups_of_equal_rewards_make_way_for_others(bench: Bench, tmp_path: Path) -> None:
    _filter(bench, tmp_path)
    bench.fill(2, reward=lambda _: 1.0)
    claims = bench.claims()

    assert claims.poll(1) is None
    bench.fill(1, first=2)
    bench.fill(1, first=3, reward=lambda _: 0.0)
    assert claims.poll(1) is None
    bench.fill(1, first=4)
    batch = claims.poll(1)

    assert batch is not None
    assert _groups(batch.episodes) == [2, 4]
    assert batch.filtered_groups == 3
    assert claims.dropped.units == {"zero_variance": 3}
    assert claims.dropped.tokens == 24
    stats = bench.stats()
    assert stats.dropped == {"zero_variance": 12}
    assert stats.accounted == stats.created == 20


def test_filtered_groups_give_their_room_back(bench: Bench, tmp_path: Path) -> None:
    _filter(bench, tmp_path)
    bench.fill(4, reward=lambda _: 1.0)  # all that admission allows: (lag 1 + 1) x 2 groups
    assert answer_leases(bench.store, (bench.lineage, 0), _no_answer) == 0
    claims = bench.claims()

    assert claims.poll(1) is None
    assert claims.poll(1) is None

    bench.fill(4, first=4)
    batch = claims.poll(1)
    assert batch is not None
    assert _groups(batch.episodes) == [4, 5]


def _no_answer(task_id: int, _spec: TaskSpec) -> Episode:
    raise AssertionError(f"task {task_id} should not have been leased")


def test_equal_rewards_are_judged_after_shaping(bench: Bench, tmp_path: Path) -> None:
    shaping = {"weights": {"exact": 0.0, "other": 1.0}}
    bench.settings = tiny_settings(
        tmp_path, algorithm={"filter_zero_variance": True}, rewards=shaping
    )
    bench.fill(2)  # rewards differ, but only in a part that does not count
    claims = bench.claims()

    assert claims.poll(1) is None
    assert claims.dropped.units == {"zero_variance": 2}


def test_a_metric_by_its_name_may_be_compared_instead(bench: Bench, tmp_path: Path) -> None:
    _filter(bench, tmp_path, filter_metric="exact")
    bench.fill(2, reward=lambda task_id: 0.5 + 0.1 * (task_id % 2))  # none is right
    bench.fill(2, first=2, reward=lambda task_id: 0.5 + 0.5 * (task_id % 2))
    claims = bench.claims()

    assert claims.poll(1) is None
    batch = claims.poll(1)

    assert batch is not None
    assert _groups(batch.episodes) == [2, 3]
    assert claims.dropped.units == {"zero_variance": 2}


def test_a_metric_that_there_is_not_is_an_error_and_the_reward_is_compared(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _filter(bench, tmp_path, filter_metric="acc")
    bench.fill(2)

    assert bench.claims().poll(1) is not None
    assert "algorithm.filter_metric must be a part of the reward" in capsys.readouterr().out


def test_after_so_many_groups_those_of_equal_rewards_are_trained(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _filter(bench, tmp_path, max_gen_batches=2)
    claims = bench.claims()
    bench.fill(4, reward=lambda _: 1.0)  # two batches' worth

    assert claims.poll(1) is None  # drops the first two
    batch = claims.poll(1)

    assert batch is not None
    assert _groups(batch.episodes) == [2, 3]
    assert batch.filtered_groups == 2
    assert "a group of equal rewards is trained" in capsys.readouterr().out

    bench.store.run(operations.advance(bench.lineage, 1))
    bench.fill(2, first=4, version=(bench.lineage, 1), reward=lambda _: 1.0)
    assert claims.poll(2) is None  # each batch has its own budget
    assert claims.dropped.units == {"zero_variance": 4}


def test_a_sealed_batch_replays_whatever_filter_is_set(bench: Bench, tmp_path: Path) -> None:
    bench.fill(2, reward=lambda _: 1.0)
    first = bench.claims().poll(1)
    assert first is not None
    _filter(bench, tmp_path)

    replay = bench.restart(0).poll(1)

    assert replay is not None
    assert replay.is_replay
    assert replay.filtered_groups == 0
    plans = [
        plan_batch(
            1,
            batch.episodes,
            ranks=1,
            settings=bench.settings.algorithm,
            max_completion_tokens=8,
            microbatch_tokens=16384,
        )
        for batch in (first, replay)
    ]
    assert plans[0].encode() == plans[1].encode()


def test_a_weight_of_a_part_that_no_episode_has_is_an_alarm_and_not_the_end(
    bench: Bench, tmp_path: Path
) -> None:
    bench.settings = tiny_settings(tmp_path, rewards={"weights": {"exakt": 1.0, "exact": 1.0}})
    bench.fill(2)

    batch = bench.claims().poll(1)

    assert batch is not None
    assert batch.missing_parts == ("exakt",)


def test_a_sealed_batch_replays_unchanged_and_is_not_judged_again(bench: Bench) -> None:
    bench.fill(3)
    first = bench.claims().poll(1)
    assert first is not None
    bench.settings = bench.settings.model_copy(
        update={"run": bench.settings.run.model_copy(update={"max_policy_lag": 0})}
    )

    replay = bench.restart(0).poll(1)

    assert replay is not None
    assert replay.is_replay
    assert [e.task_id for e in replay.episodes] == [e.task_id for e in first.episodes]
    assert bench.stats().claims[0].starts == 2


def test_a_batch_that_was_filling_at_a_crash_is_judged_anew(bench: Bench) -> None:
    bench.fill(1)
    assert bench.claims().poll(1) is None

    claims = bench.restart(0)
    bench.fill(1, first=1)
    batch = claims.poll(1)

    assert batch is not None
    assert not batch.is_replay
    assert _groups(batch.episodes) == [0, 1]


def test_a_batch_that_keeps_killing_the_learner_is_given_up(bench: Bench) -> None:
    bench.fill(4)
    assert bench.claims().poll(1) is not None
    for _ in range(2):
        replay = bench.restart(0).poll(1)
        assert replay is not None
        assert replay.is_replay

    claims = bench.restart(0)
    batch = claims.poll(1)  # the fourth start

    assert batch is not None
    assert not batch.is_replay
    assert _groups(batch.episodes) == [2, 3]
    assert claims.dropped.units == {"poison": 2}
    stats = bench.stats()
    assert stats.dead == 8
    letter = bench.store.run(operations.dead_letter(0))
    assert letter is not None
    assert letter.letter.why == "poison"
    assert letter.record is not None
    assert stats.accounted == stats.created


def test_lives_that_train_a_batch_do_not_count_against_it(bench: Bench) -> None:
    bench.fill(2)
    first = bench.claims().poll(1)
    assert first is not None
    bench.store.run(operations.advance(bench.lineage, 1))

    for _ in range(4):  # each dies after the batch and before a checkpoint
        claims = bench.restart(0)
        replay = claims.poll(1)
        assert replay is not None
        assert replay.is_replay
        assert _groups(replay.episodes) == _groups(first.episodes)
        bench.store.run(operations.advance(bench.lineage, 1))

    assert bench.stats().dropped == {}
    assert bench.stats().claims[0].starts == 0


def test_an_unreadable_record_in_a_sealed_batch_ends_the_life(bench: Bench) -> None:
    bench.fill(2)
    assert bench.claims().poll(1) is not None
    with redis.Redis.from_url(bench.url) as client:
        client.set(f"{run_prefix('tiny')}:e:1", b"changed")

    with pytest.raises(RecordError, match="sealed batch 1 must be readable"):
        bench.restart(0).poll(1)


@pytest.mark.parametrize("left", [b"changed", None])
def test_a_sealed_batch_that_is_read_across_a_rewind_is_claimed_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, left: bytes | None
) -> None:
    bench.fill(2)
    assert bench.claims().poll(1) is not None
    claims, run, key = bench.restart(0), bench.store.run, f"{run_prefix('tiny')}:e:1"
    with redis.Redis.from_url(bench.url) as client:
        record = client.get(key)
        assert isinstance(record, bytes)

        def rewound(operation: Operation[object]) -> object:
            if operation.name == "records":
                bench.patient.recoveries = 1
                client.delete(key) if left is None else client.set(key, left)
            return run(operation)

        monkeypatch.setattr(bench.store, "run", rewound)
        assert claims.poll(1) is None
        monkeypatch.setattr(bench.store, "run", run)
        client.set(key, record)

    batch = claims.poll(1)
    assert batch is not None
    assert batch.is_replay
    assert claims.dropped.units == {}


def test_a_sealed_batch_whose_records_the_store_forgot_is_claimed_anew(bench: Bench) -> None:
    bench.fill(4)
    assert bench.claims().poll(1) is not None
    with redis.Redis.from_url(bench.url) as client:
        client.delete(f"{run_prefix('tiny')}:e:1")

    claims = bench.claims()

    assert claims.poll(1) is None
    again = claims.poll(1)
    assert again is not None
    assert {episode.group_id for episode in again.episodes} == {2, 3}
    assert claims.dropped.units == {"forgotten": 2}


def test_an_older_learner_is_refused(bench: Bench) -> None:
    old = bench.claims()
    bench.restart(0)

    with pytest.raises(LostLineage):
        old.poll(1)


def test_waiting_ends_when_there_is_something_better_to_do(bench: Bench) -> None:
    assert bench.claims().wait(1, until=lambda: True) is None


def _look_in_slices(claims: Claims, step: int, *, slices: int) -> None:
    """Wait as the loop does: a short while, over and over."""
    for _ in range(slices):
        answers = [True, False]
        assert claims.wait(step, until=answers.pop) is None


def test_a_day_without_a_batch_is_counted_over_many_short_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.data.claims.DEADLINE_S", 0.1)

    with pytest.raises(DeadlineError, match="batch 1 must fill within"):
        _look_in_slices(bench.claims(), 1, slices=50)


def test_the_wait_for_each_batch_counts_by_itself(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = bench.claims()
    _look_in_slices(claims, 1, slices=1)
    bench.fill(2)
    assert claims.wait(1, until=lambda: False) is not None
    a_day_later = SimpleNamespace(
        monotonic=lambda: time.monotonic() + DEADLINE_S, sleep=lambda _: None
    )
    monkeypatch.setattr("learner.data.claims.time", a_day_later)

    _look_in_slices(claims, 2, slices=1)


def test_a_long_wait_is_reported_however_it_is_cut(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("learner.data.claims.REPORT_EVERY_S", 0.05)

    _look_in_slices(bench.claims(), 1, slices=6)

    assert "waiting for episodes" in capsys.readouterr().out


def test_a_short_wait_is_not_reported(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    _look_in_slices(bench.claims(), 1, slices=3)

    assert "waiting for episodes" not in capsys.readouterr().out
