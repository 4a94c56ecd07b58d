"""The alarm of a learner that waits for episodes that nobody makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from buffer import operations
from buffer.operations.values import ActorSeen, LeasingPauses, RedisMemory, SuspendedKey
from buffer.sampling import why_nobody_samples
from buffer.store import Store
from configs.settings import Settings
from learner.data.alarms import SamplingAlarm
from learner.data.curriculum import training_tasks
from learner.data.retrying_store import RetryingStore
from tests.broker.support.fake_clock import FakeClock
from tests.learner.support.tiny_run import begin_run, tiny_settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return tiny_settings(tmp_path)


@pytest.fixture
def store(redis_url: str, settings: Settings) -> Iterator[Store]:
    with Store(redis_url, settings.run.name) as opened:
        begin_run(opened, settings.run)
        lineage = opened.run(operations.begin_lineage(0, 0))
        assert lineage is not None
        opened.run(operations.create(lineage, training_tasks(settings.run, range(3), {})))
        yield opened


def test_each_cause_names_what_helps(store: Store) -> None:
    stats = store.run(operations.stats())
    here, gone = ActorSeen("a", 1.0, {}), ActorSeen("b", 75.0, {})
    left = ActorSeen("c", 1.0, {"left": "1"})

    def why(
        *actors: ActorSeen,
        used: int = 10,
        run_bytes: int = 0,
        paused: str = "",
        suspended: str = "",
        num_processes: int = 0,
        **changes: object,
    ) -> str | None:
        keys = {"tag": SuspendedKey(9.0, suspended)} if suspended else {}
        return why_nobody_samples(
            replace(stats, **changes),  # type: ignore[arg-type]
            actors,
            RedisMemory(used, 100, run_bytes),
            LeasingPauses(paused, keys),
            folder="runs/x",
            heartbeat_timeout_s=6.0,
            pause_at_memory=0.8,
            max_run_bytes=50,
            num_processes=num_processes,
        )

    words: dict[str, Any] = {"unscored": {"sums": 0, "words": 7}, "leased": 4}
    sums = ActorSeen("t", 1.0, {"teacher": "sums"})
    of_teacher = str(why(here, sums, **words))
    assert of_teacher.startswith("finished episodes that wait for their score: 7, and no process")
    assert "of their teacher, words, was heard; start one: nyala actor runs/x --teacher words" in (
        of_teacher
    )
    assert why(here, ActorSeen("t", 9.0, {"teacher": "words"}), **words) == of_teacher  # silent
    words_too = ActorSeen("t", 1.0, {"teacher": "words"})
    assert why(here, words_too, **words) is None
    assert str(why(here, words_too, **words | {"leased": 0, "scoring": 2})) == (
        "finished episodes that wait for their score: 9, and until more are scored no actor gets "
        "work; start more teachers: nyala actor runs/x --teacher words"
    )
    assert "no actor was heard" in str(why(sums, leased=4)), "a teacher makes no episodes"
    start = "start one: nyala actor runs/x (the log of one that ended says why)"
    assert why() == f"no actor was heard at all; {start}"
    assert why(gone, leased=4) == f"no actor was heard for 75 s, as if it died; {start}"
    of_one = str(why(gone, num_processes=1))
    assert of_one.startswith(
        "no actor was heard for 75 s (processes: 1): they are starting, or cannot"
    )
    assert "start one" not in of_one
    assert why(gone, left) == f"no actor was heard for 1 s, and the last one left; {start}"
    assert why(here, gone, leased=4, used=90) is None
    assert "Redis is 90% full" in str(why(here, used=90))
    assert "has 50 bytes in Redis, so no work is given out above buffer.max_run_bytes = 50" in str(
        why(here, run_bytes=50)
    )
    assert "no actor has work (present: 1, tasks ready: 12)" in str(why(here))
    assert "paused: too many die; mend the cause" in str(why(here, leased=4, paused="too many die"))
    only = str(why(here, suspended="20 of its last 20 leases failed"))
    assert (
        "(tag: 20 of its last 20 leases failed); mend the cause, then: nyala buffer resume" in only
    )
    assert why(here, leased=4, suspended="one of several") is None
    waiting: dict[str, Any] = {"leased": 4, "wanted": 5, "wanted_s": 61.0}
    assert str(why(here, **waiting)).startswith(
        "conversations that wait for a host of agents: 5, the first for 61 s; start one: nyala "
        "agents runs/x ("
    )
    assert why(here, **waiting, hosted=1) is None, "an agent may call at any moment"
    assert why(here, **waiting | {"wanted": 3}) is None, "the fourth is sampled"
    assert "the run is PAUSED" in str(why(here, leased=4, state="PAUSED"))


def test_one_alarm_begins_when_nobody_samples_and_ends_when_episodes_come(
    store: Store, settings: Settings
) -> None:
    clock = FakeClock()
    alarm = SamplingAlarm(RetryingStore(store), settings, clock=clock)

    def look(progress: object, after_s: float) -> None:
        clock.now += after_s
        alarm.check_progress(progress)

    with structlog.testing.capture_logs() as lines:
        look((1, 0), 1.0)
        look((1, 0), settings.console.alarm_s - 0.1)
        look((1, 1), 1.0)  # a group came
        look((1, 1), settings.console.alarm_s - 0.1)
        assert lines == []
        for _ in range(5):
            look((1, 1), 5.0)
        assert [line["log_level"] for line in lines] == ["warning"]
        assert "nyala actor" in lines[0]["why"]
        store.run(operations.actor_seen({"a": {"host": "h"}}))
        look((1, 1), 5.0)  # another cause: it is here, and has no work
        assert "no actor has work" in lines[1]["why"]
        look((1, None), 5.0)

    assert [line["log_level"] for line in lines] == ["warning", "warning", "info"]
    assert lines[2]["lasted_s"] == 30
    assert alarm.alarms == 1


def test_an_actor_that_takes_its_time_is_no_alarm(store: Store, settings: Settings) -> None:
    clock = FakeClock()
    alarm = SamplingAlarm(RetryingStore(store), settings, clock=clock)
    store.run(operations.actor_seen({"slow": {"host": "h"}}))
    store.run(operations.lease("slow", ttl_ms=60_000, n=4, version=(1, 0)))

    with structlog.testing.capture_logs() as lines:
        for _ in range(100):
            clock.now += 60.0
            alarm.check_progress((1, 0))

    assert lines == []
