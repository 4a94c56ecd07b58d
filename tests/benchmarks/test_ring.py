"""The arithmetic of `python -m benchmarks.ring`: what is counted, and which way a ratio points."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from benchmarks.ring.__main__ import ratios
from benchmarks.ring.actor_arm import tokens_within
from benchmarks.ring.learning import difference, reached, together
from benchmarks.ring.slow_environments import HeavyTail
from benchmarks.ring.slow_episodes import summarise
from benchmarks.ring.start import median_run, stages_of
from benchmarks.ring.watched_run import Trace, time_to_accuracy
from benchmarks.ring.watching import own_percent, percent_of_a_batch
from benchmarks.support.machine import REPOSITORY, ProcessTree, pinned
from buffer.record.episode import Completion, Episode
from learner.phase_names import PHASES
from tests.waiting import wait_until


def episode(started_at, finished_at, *, tokens):
    return Episode(
        task_id=0,
        group_id=0,
        purpose="train",
        prompt_ids=np.zeros(1, np.int32),
        completion=Completion(
            token_ids=np.zeros(tokens, np.int32),
            behaviour_logprobs=np.zeros(tokens, np.float32),
            loss_mask=np.ones(tokens, np.uint8),
            versions=(),
            fences=(),
        ),
        reward=0.0,
        reward_parts={},
        finish_reason="stop",
        environment_metrics={},
        incarnation="a",
        started_at=started_at,
        finished_at=finished_at,
    )


def trace(accuracies, *, step_s=2.0):
    """Twenty batches of 100 tokens, each two seconds and four CPU seconds after the one before."""
    batches = range(1, 21)
    return Trace(
        metrics=[
            dict.fromkeys((f"{phase}_s" for phase in PHASES), 0.0)
            | {"time": 50.0 + step_s * k, "trained_tokens": 100}
            | {"wait_s": 0.5, "pack_s": 0.5, "forward_s": 1.0}
            for k in batches
        ],
        evaluations=[{"step": k, "accuracy": a} for k, a in accuracies.items()],
        cpu_ms={k: Counter(actors=3000 * k, learner=1000 * k) for k in batches if k != 7},
    )


def test_an_episode_counts_for_a_window_by_the_share_of_its_time_within():
    inside, before, half = (
        episode(10.5, 11.5, tokens=8),
        episode(8.0, 9.9, tokens=16),
        episode(9.0, 11.0, tokens=32),
    )

    assert tokens_within([inside, before, half], 10.0, 12.0) == pytest.approx(8 + 0 + 16)


def test_the_time_for_which_an_actor_was_stopped_is_no_time_of_its_episodes():
    straddling = episode(1.0, 11.0, tokens=30)

    counted = tokens_within([straddling], 10.0, 12.0, pause=(2.0, 9.0))

    assert counted == pytest.approx(30 / 3)


def test_time_to_accuracy_is_read_between_two_evaluations():
    seen = trace({0: 0.1, 10: 0.5, 20: 0.9})

    # The first batch was complete 1.5 s before its line; the tenth line came 18 s after the first.
    assert seen.seconds(10) == pytest.approx(19.5)
    assert time_to_accuracy(seen, 0.3) == pytest.approx(19.5 / 2)
    assert time_to_accuracy(seen, 0.7) == pytest.approx((19.5 + 39.5) / 2)
    assert time_to_accuracy(seen, 0.95) is None


def test_an_accuracy_that_was_there_from_the_start_took_no_time():
    assert time_to_accuracy(trace({0: 0.6, 10: 0.7}), 0.5) == 0.0


def test_a_target_is_reached_on_the_line_between_two_evaluations_and_after_a_dip():
    curve = {0: (100.0, 0.1), 10: (110.0, 0.5), 20: (120.0, 0.4), 30: (130.0, 0.8)}

    assert reached(curve, 0.3) == pytest.approx(105.0)
    assert reached(curve, 0.6) == pytest.approx(125.0)
    assert reached(curve, 0.9) is None


def learnt(all_s, accuracy):
    return {
        "from_first_batch_s": all_s and all_s - 1.0,
        "from_start_s": all_s,
        "all_batches_s": 50.0,
        "accuracy": accuracy,
    }


def test_times_have_their_median_and_the_least_and_largest_of_all_seeds():
    runs = [learnt(12.0, {30: 0.5}), learnt(None, {30: 0.7}), learnt(10.0, {30: 0.6})]

    found = together(runs)

    assert found["from_start_s"] == 12.0
    assert found["from_start_s_interval"] == [10.0, None]  # one did not get there
    assert found["accuracy_mean_sd"] == {30: (0.6, 0.1)}


def test_the_price_of_lag_is_the_mean_of_the_differences_seed_by_seed():
    # One seed is far better than the other for both: that is no difference between them.
    lagged = [learnt(9.0, {30: 0.50, 60: 0.8}), learnt(9.0, {30: 0.90})]
    in_step = [learnt(9.0, {30: 0.54, 60: 0.9}), learnt(9.0, {30: 0.92, 60: 0.9})]

    assert difference(lagged, in_step) == {30: (-0.03, 0.014), 60: (-0.1, None)}


def test_tokens_are_divided_by_the_cpu_time_of_all_roles():
    seen = trace({})

    assert seen.tokens_per_cpu_s(5, 15) == pytest.approx(100 / 4)
    assert seen.tokens_per_cpu_s(7, 15) == pytest.approx(100 / 4)  # batch 7 was not seen in time
    assert seen.cpu_ms_per_batch(5, 15) == {"actors": 3000.0, "learner": 1000.0}
    assert seen.idle_fraction(5, 15) == pytest.approx(0.5 / 2)


def test_the_least_time_for_a_batch_is_that_of_the_busiest_part():
    # Two seconds a batch, of which the learner waits for half a second; three CPU seconds of actor.
    by_actor = summarise([trace({})], 15, open_s=0.0)
    by_tool = summarise([trace({})], 15, open_s=3.5)

    assert (by_actor["batch_s"], by_actor["learner_s"]) == (2.0, 1.5)
    assert by_actor["least_batch_s"] == by_actor["actor_cpu_s"] == 3.0
    assert by_tool["least_batch_s"] == 3.5


def test_ratios_are_larger_when_the_ring_is_better():
    arms = {
        "bare_engine": {"tokens_per_s": 100.0, "tokens_per_cpu_s": 100.0},
        "bare_core": {"tokens_per_s": 125.0},
        "actor": {"tokens_per_s": 95.0, "tokens_per_cpu_s": 96.0},
        "bare_engine_short": {"tokens_per_s": 100.0, "tokens_per_cpu_s": 100.0},
        "bare_core_short": {"tokens_per_s": 194.0},
        "actor_short": {"tokens_per_s": 97.0, "tokens_per_cpu_s": 98.0},
        "async": {"time_s": 10.0, "tokens_per_cpu_s": 50.0},
        "sync": {"time_s": 15.0, "tokens_per_cpu_s": 40.0},
        "heavy_tail_async": {"tokens_per_s": 20.0},
        "heavy_tail_sync": {"tokens_per_s": 10.0},
        "slow_tool_async": {"tokens_per_s": 30.0, "least_batch_s": 0.4, "batch_s": 0.5},
        "slow_tool_sync": {"tokens_per_s": 10.0, "least_batch_s": 1.0, "batch_s": 1.4},
        "lag_2": {"from_first_batch_s": 20.0, "from_start_s": 30.0},
        "trl_dapo": {"from_first_batch_s": 30.0, "from_start_s": 33.0},
        "trl_dapo_2_threads": {"from_first_batch_s": 24.0, "from_start_s": 28.0},
        "ring": {"tokens_per_cpu_s": 60.0, "tokens_per_s": 70.0},
        "ring_vllm": {
            "tokens_per_cpu_s": 25.0,
            "tokens_per_s": 40.0,
            "cpu_ms_per_batch": {"actors": 2500.0, "learner": 1500.0},
        },
        "torch_0.8m_32": {"tokens_per_cpu_s": 6.0, "tokens_per_s": 9.0},
        "vllm_0.8m_32": {"tokens_per_cpu_s": 5.0, "tokens_per_s": 6.0},
        "trl": {"tokens_per_cpu_s": 20.0, "tokens_per_s": 20.0},
        "trl_2_threads": {"tokens_per_s": 32.0},
        "trl_twice": {"tokens_per_cpu_s": 12.0},
        "lag_2_30m": {"tokens_per_cpu_s": 12.0, "tokens_per_s": 20.0},
        "lag_0_30m": {"tokens_per_s": 16.0},
        "trl_30m": {"tokens_per_cpu_s": 6.0, "tokens_per_s": 8.0},
        "trl_vllm_30m": {"tokens_per_cpu_s": 4.0, "tokens_per_s": 5.0},
    }

    found = {name: value for name, value in ratios(arms).items() if value is not None}

    assert found == {
        "async_over_sync_30m": 1.25,
        "over_trl_tokens_per_s_30m": 2.5,
        "over_trl_tokens_per_cpu_s_30m": 2.0,
        "over_trl_vllm_tokens_per_s_30m": 4.0,
        "over_trl_vllm_tokens_per_cpu_s_30m": 3.0,
        "actor_over_bare_engine": 0.95,
        "actor_over_bare_engine_per_cpu_s": 0.96,
        "actor_over_bare_core": 0.76,
        "actor_over_bare_core_short": 0.5,
        "actor_over_bare_engine_short": 0.97,
        "actor_over_bare_engine_short_per_cpu_s": 0.98,
        "async_over_sync_time": 1.5,
        "async_over_sync_tokens_per_cpu_s": 1.25,
        "async_over_sync_heavy_tail": 2.0,
        "async_over_sync_slow_tool": 3.0,
        "limit_of_async_over_sync_slow_tool": 3.5,
        "time_to_accuracy_over_trl": 1.5,
        "time_to_accuracy_over_trl_from_start": 1.1,
        "time_to_accuracy_over_trl_2_threads": 1.2,
        "small_engine_over_vllm_tokens_per_s_0.8m_32": 1.5,
        "small_engine_over_vllm_tokens_per_cpu_s_0.8m_32": 1.2,
        "over_trl_tokens_per_cpu_s": 3.0,
        "over_trl_tokens_per_cpu_s_vllm": 1.25,
        # A batch of 100 tokens: a second of the bare engine and 1.5 of the learner.
        "limit_of_over_trl_tokens_per_cpu_s_vllm": 2.0,
        "trl_twice_over_trl_tokens_per_cpu_s": 0.6,
        "over_trl_tokens_per_s_2_threads": 2.188,
        "over_trl_tokens_per_s": 3.5,
        "over_trl_tokens_per_s_vllm": 2.0,
    }


def test_a_ratio_without_both_of_its_sides_is_null():
    arms = {"ring": {"tokens_per_cpu_s": 30.0}, "trl": {"skipped": "trl is not installed"}}

    assert set(ratios(arms).values()) == {None}
    assert "null" in json.dumps(ratios(arms))


def test_a_process_tree_counts_what_its_children_use():
    # Given a process that waits for a child that burns CPU time.
    burn = "while True: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    tree = ProcessTree(process.pid)
    try:
        wait_until(lambda: tree.cpu_s() >= 0.5)
    finally:
        os.killpg(process.pid, 9)
        process.wait()

    # Then its time is counted, and still is when both have ended.
    assert tree.cpu_s() >= 0.5


def test_a_process_that_is_started_pinned_stays_on_its_core():
    before = os.sched_getaffinity(0)
    core = {max(before)}
    program = "import os; print(*os.sched_getaffinity(0))"

    with pinned(core):
        shown = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )

    assert {int(word) for word in shown.stdout.split()} == core
    assert os.sched_getaffinity(0) == before


@pytest.mark.slow
def test_the_command_starts_from_any_folder_and_says_what_it_measures(tmp_path):
    shown = subprocess.run(
        [sys.executable, "-m", "benchmarks.ring", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert "TRL's synchronous GRPO" in shown.stdout


def test_stages_of_a_start_count_from_its_beginning(tmp_path):
    line = {"stage": "importing torch", "timestamp": "1970-01-01T00:16:43.600000Z"}
    (tmp_path / "learner.log").write_text(json.dumps(line) + '\n{"event": "trained"}\n')
    (tmp_path / "redis.log").write_text("ready\n")

    assert stages_of(tmp_path, began=1000.0) == {"learner": {"importing torch": 3.6}}


def test_the_run_in_the_middle_stands_for_all_starts():
    runs = [{"first_batch_s": seconds, "run": seconds} for seconds in (9.0, 7.0, 30.0)]

    assert median_run(runs) == {"first_batch_s": 9.0, "run": 9.0, "all_s": [9.0, 7.0, 30.0]}


def test_the_heavy_tail_is_log_normal_and_follows_from_the_first_answer():
    environment = HeavyTail(median=8.0, sigma=1.0, most=10_000)

    turns = [asyncio.run(environment.first(f"answer {n}")) for n in range(2000)]

    assert turns[:3] == [asyncio.run(environment.first(f"answer {n}")) for n in range(3)]
    logs = np.log(turns)
    assert np.median(logs) == pytest.approx(np.log(8.0), abs=0.1)
    assert np.std(logs) == pytest.approx(1.0, abs=0.1)


def test_what_is_handed_over_is_a_share_of_the_cpu_time_of_all_processes():
    handed_over = {"texts": 300.0, "page": 100.0}

    assert percent_of_a_batch(handed_over, cpu_ms=[100.0, 300.0]) == 0.2


def test_what_watching_takes_is_what_its_threads_have_logged(tmp_path):
    events = {
        "learner": [("advice", 0.25), ("samples", 0.5), ("pages", 0.25), ("checkpoint", 99)],
        "actor-0": [("pages", 0.5)],
    }
    for name, entries in events.items():
        lines = [json.dumps({"event": event, "cpu_s": cpu_s}) for event, cpu_s in entries]
        (tmp_path / f"{name}.log").write_text("\n".join(["a warning", *lines]))

    found = own_percent(tmp_path, cpu_s=trace({}).cpu_s(10, 20))

    assert trace({}).cpu_s(10, 20) == 40
    assert found == {"advice": 0.625, "samples": 1.25, "pages": 1.875, "all": 3.75}
