"""`benchmarks.delivery`: what its arms carry, what it counts, and which way a ratio points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice, repeat

import pytest

from benchmarks.delivery import arms as delivery_arms
from benchmarks.delivery.__main__ import ratios, reverb
from benchmarks.delivery.arms import ARMS, _receive, measure
from benchmarks.delivery.fleet import Times
from benchmarks.delivery.records import BATCH, FIRST_TASK, GROUP_SIZE, RECORD_BYTES, Records
from benchmarks.delivery.soak import Memory, resident_bytes, slope
from benchmarks.support.machine import REPOSITORY
from buffer.record.codec import decode_episode

pytestmark = pytest.mark.slow


def test_a_record_has_16_kib_and_is_the_episode_of_its_task():
    records = Records()

    for task_id in (FIRST_TASK, FIRST_TASK + 1001, 2**32 - 1):
        record = records.of(task_id)
        episode = decode_episode(record)

        assert len(record) == RECORD_BYTES
        assert (episode.task_id, episode.group_id) == (task_id, task_id // GROUP_SIZE)
        assert records.task_of(record) == task_id


def test_batches_hold_every_task_once():
    records = Records()

    ids = [records.task_of(record) for batch in islice(records.batches(), 3) for record in batch]

    assert ids == list(range(FIRST_TASK, FIRST_TASK + 3 * BATCH))


def test_an_arm_that_delivers_a_record_twice_is_an_error():
    records = Records()
    batch = next(records.batches())

    with pytest.raises(AssertionError, match="every record must come once, got 64 again"):
        _receive(iter([batch, batch, []] + [[]] * 10**6), records, seconds=0.05)


@pytest.mark.parametrize("arm", sorted(ARMS))
def test_an_arm_carries_records_through_real_processes(arm, tmp_path):
    with ARMS[arm](tmp_path) as batches:
        figures = measure(batches, 0.5).shown()

    assert figures["episodes"] >= BATCH
    assert figures["cpu_s"] > 0


def test_ratios_are_larger_when_nyala_is_cheaper_and_null_without_the_other_side():
    arms = {
        "nyala": {"episodes_per_cpu_s": 3000.0},
        "streams_ack": {"episodes_per_cpu_s": 6000.0},
        "streams_behind_broker": {"episodes_per_cpu_s": 4500.0},
        "reverb_writer": {"skipped": "dm-reverb is not installed"},
    }

    assert ratios(arms)["over_streams_ack"] == 0.5
    assert ratios(arms)["bare_broker_over_streams_ack"] == 0.75
    assert ratios(arms)["over_streams_behind_broker"] == 0.667
    assert ratios(arms)["over_reverb_writer"] is None
    assert "null" in json.dumps(ratios(arms))


def test_an_interpreter_without_reverb_is_named_as_the_reason():
    skipped = reverb(sys.executable, 0.1)

    assert "--reverb-python" in skipped["reverb_writer"]["skipped"]


def test_percentiles_are_in_milliseconds_and_the_warm_up_is_forgotten():
    times = Times()
    times.seconds["beat"] += [5.0]
    times.clear()
    times.seconds["beat"] += [0.001] * 99 + [0.101]

    shown = times.shown()["beat"]

    assert shown["count"] == 100
    assert shown["p50_ms"] == pytest.approx(1.0)
    assert 1.0 < shown["p99_ms"] < 101.0


def test_the_slope_is_that_of_the_settled_part():
    memory = Memory()
    for second in range(90):
        memory.seconds.append(float(second))
        grown = min(second, 20) * 2.0**20
        memory.broker_rss.append(grown)
        memory.redis_used.append(grown + 100.0 * second)

    shown = memory.shown()

    assert shown["broker_rss"]["slope_bytes_per_s"] == pytest.approx(0.0)
    assert shown["redis_used"]["slope_bytes_per_s"] == pytest.approx(100.0)
    assert slope([1.0], [7.0]) == 0.0


def test_resident_memory_is_that_of_the_process():
    assert 2**20 < resident_bytes(os.getpid()) < 2**36


def test_the_command_starts_from_any_folder_and_says_what_it_measures(tmp_path):
    shown = subprocess.run(
        [sys.executable, "-m", "benchmarks.delivery", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "episodes per CPU second" in shown.stdout


def test_an_arm_whose_sender_has_ended_is_an_error_and_no_wait(monkeypatch):
    monkeypatch.setattr(delivery_arms, "STALLED_S", 0.05)

    with pytest.raises(RuntimeError, match="got none for"):
        measure(repeat([]), window_s=60.0)
