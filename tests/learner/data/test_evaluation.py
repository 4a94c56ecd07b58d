"""Evaluation rounds against a real store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from broker.protocol.codec import decode_spec
from broker.protocol.messages import TaskSpec
from buffer import operations
from buffer.record.episode import Episode, PolicyVersion
from buffer.store import Store
from configs.tables.algorithm import RewardSettings
from learner.data.evaluation import EvaluationResult, Evaluations, is_due, round_tasks
from learner.data.grades import AnswerMetric, metrics_of
from learner.data.retrying_store import RetryingStore
from tests.learner.support.made_episodes import make_episode
from tests.learner.support.tiny_run import answer_leases, begin_run, new_ledger, tiny_settings


class FakeClock:
    """Time that a test moves: rounds close by it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


@pytest.fixture
def store(redis_url: str, tmp_path: Path) -> Iterator[Store]:
    settings = tiny_settings(tmp_path)
    with Store(redis_url, settings.run.name) as opened:
        begin_run(opened, settings.run)
        assert opened.run(operations.begin_lineage(0, 0)) == 1
        yield opened


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def _evaluations(
    store: Store, tmp_path: Path, reported: list[EvaluationResult], clock: FakeClock
) -> Evaluations:
    settings = tiny_settings(tmp_path, run={"eval_episodes": 4}, learner={"eval_timeout_s": 10})
    return Evaluations(
        RetryingStore(store),
        settings.run,
        rewards=settings.rewards,
        ledger=new_ledger(1),
        timeout_s=settings.learner.eval_timeout_s,
        report=reported.append,
        clock=clock,
    )


def _answer(task_id: int, spec: TaskSpec) -> Episode:
    assert (spec.purpose, spec.temperature) == ("eval", 0.0)
    return make_episode(
        task_id,
        group_id=spec.group_id,
        purpose="eval",
        reward=1.0 if spec.index % 2 else 0.5,
        versions=[(PolicyVersion(1, 2), 0)],
    )


def test_a_complete_round_reports_accuracy_and_versions(
    store: Store, tmp_path: Path, clock: FakeClock
) -> None:
    reported: list[EvaluationResult] = []
    evaluations = _evaluations(store, tmp_path, reported, clock)
    evaluations.begin_round(2)
    assert answer_leases(store, (1, 1), _answer) == 0  # too old for this round
    assert answer_leases(store, (1, 2), _answer) == 4

    clock.now = 3.0
    evaluations.collect()

    (result,) = reported
    assert (result.step, result.episodes, result.expected) == (2, 4, 4)
    assert (result.accuracy, result.reward) == (0.5, 0.75)
    assert result.versions == [[1, 2]]
    assert result.wall_s == 3.0


TWO = [
    {"name": "sums", "environment": "calculator"},
    {"name": "exam", "environment": "dataset", "share": 0, "eval_episodes": 1},
]


def _answer_of_two(task_id: int, spec: TaskSpec) -> Episode:
    """Right but for the sampled answers to question 2."""
    assert spec.purpose == "eval"
    reward = float(spec.index != 2 or not spec.temperature)
    return make_episode(task_id, group_id=spec.group_id, purpose="eval", reward=reward)


def _of_two(
    store: Store, folder: Path, reported: list[EvaluationResult], clock: FakeClock
) -> Evaluations:
    run = tiny_settings(
        folder, run={"eval_episodes": 2, "eval_samples": 3, "environments": TWO}
    ).run
    return Evaluations(
        RetryingStore(store),
        run,
        rewards=RewardSettings(),
        ledger=new_ledger(1),
        timeout_s=10,
        report=reported.append,
        clock=clock,
    )


def test_each_question_of_each_environment_is_answered_greedily_and_sampled(
    store: Store, tmp_path: Path, clock: FakeClock
) -> None:
    reported: list[EvaluationResult] = []
    evaluations = _of_two(store, tmp_path, reported, clock)
    evaluations.begin_round(0)
    assert answer_leases(store, (1, 0), _answer_of_two, n=64) == 3 * 4

    clock.now = 1.0
    evaluations.collect()

    (result,) = reported
    assert (result.score, result.episodes, result.expected) == (1.0, 12, 12)
    assert result.sampled == {"avg@3": 2 / 3, "pass@1": 2 / 3, "pass@2": 2 / 3}
    assert result.environments == {
        "sums": {
            "metric": "accuracy",
            "score": 1.0,
            "reward": 1.0,
            "avg@3": 1.0,
            "pass@1": 1.0,
            "pass@2": 1.0,
            "episodes": 8,
        },
        "exam": {
            "metric": "accuracy",
            "score": 1.0,
            "reward": 1.0,
            "avg@3": 0.0,
            "pass@1": 0.0,
            "pass@2": 0.0,
            "episodes": 4,
        },
    }


def test_answers_of_lost_actors_are_asked_again_or_counted_as_missing(
    store: Store, tmp_path: Path, clock: FakeClock
) -> None:
    reported: list[EvaluationResult] = []
    evaluations = _of_two(store, tmp_path, reported, clock)
    evaluations.begin_round(0)
    store.run(operations.lease("dies", ttl_ms=60_000, n=5, version=(1, 0)))
    assert len(store.run(operations.release_dead_actor("dies", "", max_attempts=3))) == 5
    dead = store.run(operations.lease("fails", ttl_ms=60_000, n=2, version=(1, 0))).tasks
    failures = [(task.task_id, task.fence, "data", "broken") for task in dead]
    store.run(operations.fail(max_attempts=1, max_data_failures=1, failures=failures))
    assert answer_leases(store, (1, 0), _answer_of_two, n=64) == 10

    clock.now = 1.0
    evaluations.collect()

    (result,) = reported
    assert (result.episodes, result.expected) == (10, 12)
    assert sum(int(each["episodes"]) for each in result.environments.values()) == 10


def test_a_round_without_a_greedy_answer_has_no_line(
    store: Store, tmp_path: Path, clock: FakeClock
) -> None:
    reported: list[EvaluationResult] = []
    evaluations = _of_two(store, tmp_path, reported, clock)
    evaluations.begin_round(0)
    store.run(operations.lease("slow", ttl_ms=60_000, n=3, version=(1, 0)))
    assert answer_leases(store, (1, 0), _answer_of_two, n=64) == 9

    clock.now = 1.0
    evaluations.collect()
    clock.now = 11.0
    evaluations.collect()

    assert not reported
    assert store.run(operations.stats()).eval.leased == 0


def test_a_round_has_every_answer_under_a_number_of_its_own(tmp_path: Path) -> None:
    run = tiny_settings(tmp_path, run={"eval_episodes": 2, "eval_samples": 3, "environments": TWO})
    tasks = [task for step in (0, 4) for task in round_tasks(run.run, 1, step)]
    specs = [decode_spec(task.spec) for task in tasks[:12]]

    assert len({task.task_id for task in tasks}) == 24
    assert [spec.index for spec in specs] == [0, 1, 2] * 4
    assert [spec.temperature for spec in specs] == [0.0] * 3 + [1.0] * 9
    assert len({spec.seed for spec in specs}) == 3  # one item, however often it is answered


def test_answers_that_another_version_took_part_in_are_counted(
    store: Store, tmp_path: Path, clock: FakeClock
) -> None:
    exact, newer = PolicyVersion(1, 2), PolicyVersion(1, 3)
    spans = [[(exact, 0)], [(exact, 0), (newer, 1)], [(newer, 0)], [(exact, 0)]]

    def answer(task_id: int, spec: TaskSpec) -> Episode:
        return make_episode(
            task_id, group_id=spec.group_id, purpose="eval", versions=spans[spec.index]
        )

    reported: list[EvaluationResult] = []
    evaluations = _evaluations(store, tmp_path, reported, clock)
    evaluations.begin_round(2)
    assert answer_leases(store, (1, 3), answer) == 4

    clock.now = 3.0
    evaluations.collect()

    (result,) = reported
    assert (result.episodes, result.off_version) == (4, 2)
    assert result.versions == [[1, 2], [1, 3]]


def test_a_round_closes_by_its_deadline_with_what_has_arrived(
    store: Store, tmp_path: Path, clock: FakeClock
) -> None:
    reported: list[EvaluationResult] = []
    evaluations = _evaluations(store, tmp_path, reported, clock)
    evaluations.begin_round(0)
    answer_leases(store, (1, 0), _answer, n=1)

    clock.now = 9.0
    evaluations.collect()
    assert not reported

    clock.now = 11.0
    evaluations.collect()
    assert [(result.episodes, result.expected) for result in reported] == [(1, 4)]
    assert store.run(operations.stats()).eval.ready == 0


def test_a_round_has_no_deadline_before_an_actor_samples(
    store: Store, tmp_path: Path, clock: FakeClock
) -> None:
    reported: list[EvaluationResult] = []
    evaluations = _evaluations(store, tmp_path, reported, clock)
    evaluations.begin_round(0)
    clock.now = 500.0  # actors are being installed, load their model, ...
    evaluations.collect()
    answer_leases(store, (1, 0), _answer, n=1)

    clock.now = 509.0
    evaluations.collect()
    assert not reported

    clock.now = 511.0
    evaluations.collect()
    assert [(result.episodes, result.wall_s) for result in reported] == [(1, 511.0)]


def test_a_round_that_actors_leave_unanswered_closes_by_its_deadline(
    store: Store, tmp_path: Path, clock: FakeClock
) -> None:
    evaluations = _evaluations(store, tmp_path, [], clock)
    evaluations.begin_round(0)
    clock.now = 500.0
    evaluations.collect()
    evaluations.note_sampling()  # batches come

    clock.now = 511.0
    evaluations.collect()

    assert store.run(operations.stats()).eval.ready == 0


def test_waiting_for_the_last_round_ends_when_asked_to_stop(
    store: Store, tmp_path: Path, clock: FakeClock
) -> None:
    reported: list[EvaluationResult] = []
    evaluations = _evaluations(store, tmp_path, reported, clock)
    evaluations.begin_round(0)

    evaluations.finish(until=lambda: True)

    assert not reported


def test_rounds_are_due_at_both_ends_and_in_between(tmp_path: Path) -> None:
    run = tiny_settings(tmp_path, run={"steps": 7, "eval_every": 3, "eval_episodes": 4}).run

    assert [step for step in range(8) if is_due(run, step)] == [0, 3, 6, 7]
    ends = run.model_copy(update={"eval_every": 0})
    assert [step for step in range(8) if is_due(ends, step)] == [0, 7]
    assert not is_due(run.model_copy(update={"eval_episodes": 0}), 0)


def _judged(
    tmp_path: Path,
    parts: dict[str, float],
    *,
    weights: dict[str, float] | None = None,
    **run: object,
) -> tuple[str, float]:
    """Name what an answer with a reward of .25 is judged by, and grade it."""
    settings = tiny_settings(tmp_path, run=run).run
    rewards = RewardSettings(weights=weights or {})
    (metric,) = metrics_of(settings, rewards).values()
    found = metric.in_answers([parts])
    return found.title, found.grade(0.25, parts)


def test_answers_are_judged_by_what_is_trained(tmp_path: Path) -> None:
    """Of whichever reward that is, with the name that says whose it is."""
    own, parts = "rewards.py:number", {"exact": 0.0, "number": 1.0}

    assert _judged(tmp_path, {"exact": 1.0}) == ("accuracy", 1.0)
    assert _judged(tmp_path, {}) == ("reward", 0.25), "a game that says nothing of success"
    assert _judged(tmp_path, parts, reward=own) == ("reward", 0.25)
    assert _judged(tmp_path, parts, eval_metric="number", reward=own) == ("number", 1.0)
    assert _judged(tmp_path, parts, eval_metric="exact", reward=own) == (
        "accuracy of the environment",
        0.0,
    )
    assert _judged(tmp_path, {"exact": 1.0}, eval_metric="reward") == ("reward", 0.25)
    assert _judged(tmp_path, {"exact": 1.0}, weights={"format": 1.0}) == ("reward", 0.25)
    assert _judged(tmp_path, {"exact": 1.0}, weights={"exact": 2.0}) == ("accuracy", 1.0)


def test_a_part_that_no_answer_has_judges_none_and_one_that_some_have_counts_0() -> None:
    metric = AnswerMetric("number", "number")

    assert metric.in_answers([{"exact": 1.0}]).title == "reward"
    assert metric.in_answers([{"number": 1.0}, {}]).grade(1.0, {}) == 0.0


def test_the_held_out_reward_is_weighed_as_that_of_training(
    store: Store, tmp_path: Path, clock: FakeClock
) -> None:
    """`rewards.weights` without `exact`: neither it nor the actor's own sum is what is trained."""
    settings = tiny_settings(tmp_path, run={"eval_episodes": 4})
    reported: list[EvaluationResult] = []
    evaluations = Evaluations(
        RetryingStore(store),
        settings.run,
        rewards=RewardSettings(weights={"format": 2.0}),
        ledger=new_ledger(1),
        timeout_s=10,
        report=reported.append,
        clock=clock,
    )
    evaluations.begin_round(2)

    def answer(task_id: int, spec: TaskSpec) -> Episode:
        return replace(_answer(task_id, spec), reward_parts={"exact": 0.0, "format": 0.75})

    assert answer_leases(store, (1, 2), answer) == 4
    clock.now = 1.0
    evaluations.collect()

    (result,) = reported
    assert (result.metric, result.score, result.reward) == ("reward", 1.5, 1.5)
    assert result.accuracy is None, "nobody trains it"
    assert result.parts == {"exact": 0.0, "format": 0.75}
