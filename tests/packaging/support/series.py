"""Series of a healthy run for an hour, as promtool's tests have them, and each alert's fault."""

from __future__ import annotations

MINUTES = 60
RUN = 'run="r"'


def _steady(value: float) -> str:
    return f"{value:g}x{MINUTES}"


def _growing(per_minute: float) -> str:
    return f"0+{per_minute:g}x{MINUTES}"


BATCHES_PER_MINUTE = 30
HEALTHY: dict[str, str] = {
    f'up{{role="broker",{RUN}}}': _steady(1),
    f'up{{role="learner",{RUN}}}': _steady(1),
    f'up{{role="actor",{RUN},name="actor-0"}}': _steady(1),
    f'up{{role="actor",{RUN},name="actor-1"}}': "1x20 0x40",  # one that goes is no fault
    f'nyala_ready{{role="learner",{RUN},name="learner"}}': _steady(1),
    f'nyala_ready{{role="actor",{RUN},name="actor-0"}}': _steady(1),
    f"nyala_learner_step{{{RUN}}}": _growing(BATCHES_PER_MINUTE),
    f'nyala_actor_policy_step{{{RUN},name="actor-0"}}': _growing(BATCHES_PER_MINUTE),
    f'nyala_actor_engine_busy_seconds_total{{{RUN},name="actor-0"}}': _growing(54),
    f"nyala_buffer_created_tasks_total{{{RUN}}}": _growing(6000),
    f'nyala_buffer_dropped_tasks_total{{{RUN},reason="stale"}}': _growing(6),
    f"nyala_buffer_dead_letters{{{RUN}}}": _steady(2),
    f'nyala_broker_leasing_closed{{{RUN},reason="memory"}}': _steady(0),
    f'nyala_broker_leasing_closed{{{RUN},reason="paused"}}': _steady(0),
    f'nyala_learner_phase_seconds_total{{{RUN},phase="wait"}}': _growing(6),
    f'nyala_learner_phase_seconds_total{{{RUN},phase="forward"}}': _growing(54),
    f'nyala_learner_step_seconds_bucket{{{RUN},le="2.0"}}': _growing(BATCHES_PER_MINUTE),
    f'nyala_learner_step_seconds_bucket{{{RUN},le="120.0"}}': _growing(BATCHES_PER_MINUTE),
    f'nyala_learner_step_seconds_bucket{{{RUN},le="+Inf"}}': _growing(BATCHES_PER_MINUTE),
    f"nyala_learner_kl_nats{{{RUN}}}": _steady(0.002),
    f"nyala_learner_skipped_steps_total{{{RUN}}}": _steady(1),
    f"nyala_learner_reward{{{RUN}}}": _steady(0.6),
    f"nyala_buffer_memory_bytes{{{RUN}}}": _steady(2e8),
    f"nyala_buffer_memory_limit_bytes{{{RUN}}}": _steady(1e9),
}
FAULTS: dict[str, dict[str, str]] = {
    "NyalaRoleDown": {f'up{{role="broker",{RUN}}}': "1x50 0x10"},
    "NyalaNoActor": {f'up{{role="actor",{RUN},name="actor-0"}}': "1x50 0x10"},
    "NyalaNotReady": {f'nyala_ready{{role="learner",{RUN},name="learner"}}': "1x40 0x20"},
    "NyalaDrops": {f'nyala_buffer_dropped_tasks_total{{{RUN},reason="stale"}}': _growing(120)},
    "NyalaDeadLetters": {f"nyala_buffer_dead_letters{{{RUN}}}": "2x55 9x5"},
    "NyalaLeasingClosed": {f'nyala_broker_leasing_closed{{{RUN},reason="memory"}}': "0x50 1x10"},
    "NyalaActorsIdle": {
        f'nyala_actor_engine_busy_seconds_total{{{RUN},name="actor-0"}}': _growing(30)
    },
    "NyalaLearnerIdle": {
        f'nyala_learner_phase_seconds_total{{{RUN},phase="wait"}}': _growing(40),
        f'nyala_learner_phase_seconds_total{{{RUN},phase="forward"}}': _growing(20),
    },
    "NyalaSlowSteps": {
        f'nyala_learner_step_seconds_bucket{{{RUN},le="2.0"}}': _growing(0.9 * BATCHES_PER_MINUTE)
    },
    "NyalaKl": {f"nyala_learner_kl_nats{{{RUN}}}": "0.002x50 0.3x10"},
    "NyalaNotFinite": {f"nyala_learner_skipped_steps_total{{{RUN}}}": "1x55 3x5"},
    "NyalaReward": {f"nyala_learner_reward{{{RUN}}}": _steady(0.01)},
    "NyalaRedisMemory": {f"nyala_buffer_memory_bytes{{{RUN}}}": _steady(7.8e8)},
    "NyalaOldWeights": {f'nyala_actor_policy_step{{{RUN},name="actor-0"}}': _growing(20)},
}
"""Alert -> the series of the healthy run that differ; it alone must fire."""
