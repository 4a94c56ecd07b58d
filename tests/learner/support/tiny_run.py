"""A run in a real store, with settings for a tiny model, and an actor's side of it for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from broker.protocol.codec import decode_spec
from broker.protocol.messages import TaskSpec
from buffer import operations
from buffer.operations.values import SubmitLine
from buffer.record.codec import encode_episode
from buffer.record.episode import Episode
from buffer.store import Store
from configs.hashes import settings_hash
from configs.settings import BufferSettings, RunSettings, Settings
from learner.data.ledger import Ledger, LedgerSnapshot

LEASE_MS = 60_000


def tiny_settings(
    folder: Path,
    *,
    run: Mapping[str, object] | None = None,
    learner: Mapping[str, object] | None = None,
    buffer: Mapping[str, object] | None = None,
    algorithm: Mapping[str, object] | None = None,
    critic: Mapping[str, object] | None = None,
    rewards: Mapping[str, object] | None = None,
    replay: Mapping[str, object] | None = None,
    fleet: Mapping[str, object] | None = None,
    sft: Mapping[str, object] | None = None,
) -> Settings:
    """Make settings of a run in `folder` that batches 2 groups of 4."""
    tables: dict[str, Any] = {
        "run": {
            "name": "tiny",
            "directory": folder,
            "model": "init",
            "steps": 4,
            "group_size": 4,
            "groups_per_batch": 2,
            "max_policy_lag": 1,
            "max_prompt_tokens": 8,
            "max_completion_tokens": 8,
            "eval_every": 0,
            "eval_episodes": 0,
            **(run or {}),
        },
        "learner": {"lr": 1e-3, "device": "cpu", "checkpoint_every": 2, **(learner or {})},
        "buffer": buffer or {},
        "algorithm": algorithm or {},
        "critic": critic or {},
        "rewards": rewards or {},
        "replay": replay or {},
        "fleet": fleet or {},
        "sft": sft or {},
    }
    return Settings.model_validate(tables)


def begin_run(store: Store, run: RunSettings, buffer: BufferSettings | None = None) -> None:
    """Enter a run into the store, as whoever starts it does."""
    buffer = buffer or BufferSettings()
    store.run(
        operations.begin_run(
            settings_hash(run),
            {},
            units_per_batch=run.groups_per_batch,
            max_policy_lag=run.max_policy_lag,
            margin=buffer.margin,
            group_size=run.group_size,
            min_group_size=buffer.min_group_size,
        )
    )


def new_ledger(lineage: int, lineages: Mapping[int, int] | None = None) -> Ledger:
    """Begin the ledger of a learner without a checkpoint."""
    facts = LedgerSnapshot(
        lineage=lineage,
        owner="owner",
        lineages=lineages or {lineage: 0},
        step=0,
        checkpoint_step=0,
        checkpointed=frozenset(),
        reach=0,
    )
    return Ledger(facts)


def answer_leases(
    store: Store,
    version: tuple[int, int],
    answer: Callable[[int, TaskSpec], Episode],
    *,
    n: int = 1000,
    ttl_ms: int = LEASE_MS,
) -> int:
    """Lease up to `n` tasks as an actor at `version` and submit what `answer` makes of them."""
    lease = store.run(operations.lease("actor", ttl_ms=ttl_ms, n=n, version=version))
    submissions = [
        SubmitLine(
            task.task_id, task.fence, encode_episode(answer(task.task_id, decode_spec(task.spec)))
        )
        for task in lease.tasks
    ]
    verdicts = store.run(operations.submit(submissions))
    # Only a store that was rewound between the two calls says anything else.
    assert set(verdicts) <= {"OK"} or ttl_ms != LEASE_MS
    return len(verdicts)
