"""The figures of runs whose actors keep dying, beside those of the run left alone."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from lab.actor_fleet import CpuTime, cpu_s
from lab.kill_run import Arm, Harm, compare

SUMMARY = {
    "tasks_created": 110,
    "tasks_cancelled": 10,
    "tasks_dropped": 1,
    "tasks_dead": 0,
    "held_out_accuracy_before": 0.2,
    "held_out_accuracy_after": 0.9,
    "resumed_episodes": 3,
    "policy_lag_mean": 1.5,
    "learner_idle_fraction": 0.1,
}
WAIT_S = 10.0


def arm(harm: Harm, *, tokens: float, cpu_s: float, startup_cpu_s: float = 0.0) -> Arm:
    """A run of 10 s that trained nine tenths of what it generated."""
    return Arm(
        harm,
        sampled={"one": tokens, "another": tokens / 9},
        summary=dict(SUMMARY),
        trained_tokens=tokens,
        tokens_in_window=tokens,
        wall_s=10.0,
        cpu_s=cpu_s,
        startup_cpu_s=startup_cpu_s,
        startup_s=[4.0] if startup_cpu_s else [],
        moved_s=[1.0, 2.0, 3.0],
    )


def test_arms_are_compared_with_the_run_left_alone_and_with_one_that_pays_for_the_same_starts() -> (
    None
):
    result = compare(
        {
            Harm.NONE: arm(Harm.NONE, tokens=1000, cpu_s=20),
            Harm.START: arm(Harm.START, tokens=800, cpu_s=20, startup_cpu_s=4),
            Harm.KILL: arm(Harm.KILL, tokens=760, cpu_s=20, startup_cpu_s=4),
        }
    )

    arms = result["arms"]
    assert isinstance(arms, dict)
    killed = arms["kill"]
    assert killed["trained_over_generated_ratio"] == pytest.approx(1.0)
    assert killed["tokens_per_s_ratio"] == pytest.approx(0.76)
    assert killed["outside_startup_wall_ratio"] == pytest.approx(0.95), "against the same starts"
    assert killed["outside_startup_cpu_ratio"] == pytest.approx(0.95), "47.5 for 50 a CPU second"
    assert (killed["moved_s_p50"], killed["moved_s_max"]) == (2.0, 3.0)
    assert killed["dropped_share"] == pytest.approx(0.01)
    assert "tokens_per_s_ratio" not in arms["none"]


def test_an_arm_alone_has_no_ratios() -> None:
    result = compare({Harm.KILL: arm(Harm.KILL, tokens=760, cpu_s=20)})

    arms = result["arms"]
    assert isinstance(arms, dict)
    assert not any(name.endswith("_ratio") for name in arms["kill"])


def test_the_proc_stat_of_a_process_stays_counted_when_it_has_ended() -> None:
    used = CpuTime()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + WAIT_S
        while used.total_s < 0.1 and time.monotonic() < deadline:
            used.note([child.pid])
    finally:
        child.kill()
        child.wait()
    before = used.total_s

    used.note([child.pid])

    assert cpu_s(child.pid) == 0.0
    assert used.total_s == before >= 0.1
