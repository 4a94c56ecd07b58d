"""Start of a learner from its newest checkpoint, rollback, and trust in another run's checkpoint.

    rank 0, at its start     newest checkpoint -> new lineage -> recovery -> `StartState` to all
    a guard, on each rank    `roll_back`, called by the loop
    `--trust-checkpoint`     `trust_checkpoint`: a checkpoint of another run becomes the run's own

A store that lost writes, or everything, is recovered here as after a rewind in the middle of a run;
one that lost nothing is left as it is. Rank 0 decides and broadcasts, so that every rank loads the
same checkpoint into the same lineage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import structlog

from buffer import operations
from buffer.operations.values import Stats
from configs import durable
from configs.errors import CheckpointError, LostLineage, SettingsError
from configs.hashes import settings_hash
from configs.settings import BufferSettings, RunSettings
from configs.validation.store import memory_shortage
from learner.data.ledger import Ledger, LedgerSnapshot, from_ranges
from learner.data.retrying_store import RetryingStore
from learner.data.sampler import decode_curriculum
from learner.model.lora import reset_adapters
from learner.model.policy import Policy
from learner.model.saved_model import read_weights
from learner.reporting.metrics import Totals
from learner.training.critic import Critic
from learner.training.guards import GuardState
from learner.training.optimizer import ScheduledOptimizer

from .checkpoint import Checkpoints
from .folders import FOLDER, complete_checkpoints, read_lineages, write_lineages
from .learner_state import LearnerState
from .manifest import MANIFEST, encode_manifest, read_manifest, run_key
from .recovery import known_groups, recover, register_run
from .verification import verify

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StartState:
    """The agreed start of a learner. Producer: rank 0. Consumer: all ranks."""

    lineage: int
    lineages: dict[int, int]
    """lineage -> step it forked at, this one included."""
    owner: str
    """Id of the take-over that began this lineage."""
    state: LearnerState
    """State of the checkpoint, or of a run that has not begun."""
    checkpoint: Path | None
    """Checkpoint to load; None = the initial weights."""
    reach: int
    """First group id not yet created."""
    asked_again: dict[int, int | None]
    """Group dropped as too old -> the group that asks its prompt again; None = none yet."""
    vocabulary: int | None = None
    """Tokens of the policy's model."""

    def encode(self) -> bytes:
        """Encode the state as msgpack."""
        return msgspec.msgpack.encode(self, enc_hook=str)  # paths as text

    @classmethod
    def decode(cls, encoded: bytes) -> StartState:
        """Decode a state from msgpack."""
        return msgspec.msgpack.decode(encoded, type=cls, dec_hook=lambda type_, text: type_(text))

    def ledger(self) -> Ledger:
        """Make the ledger with the facts of this start."""
        curriculum = decode_curriculum(self.state.curriculum)
        return Ledger(
            LedgerSnapshot(
                lineage=self.lineage,
                owner=self.owner,
                lineages=self.lineages,
                step=self.state.step,
                checkpoint_step=self.state.step,
                checkpointed=from_ranges(self.state.trained),
                reach=self.reach,
                second_tries={
                    g: dropped for dropped, g in self.asked_again.items() if g is not None
                },
                choices=curriculum.choices,
                results=curriculum.results,
                waiting=tuple(sorted(d for d, group in self.asked_again.items() if group is None)),
                vocabulary=self.vocabulary,
            )
        )


def take_over(
    run: RunSettings,
    buffer: BufferSettings,
    store: RetryingStore,
    checkpoints: Checkpoints,
    *,
    vocabulary: int | None = None,
) -> StartState:
    """Take the run over at its newest checkpoint, or at its beginning if it has none; rank 0 only.

    Registers the run in the store, begins a lineage, which ends the learner that had the run, and
    recovers the store. While it reads checkpoints, the other ranks must be in `newest`.

    Args:
        run: Settings of the run.
        buffer: Settings that the store is registered with.
        store: Store of the run.
        checkpoints: Checkpoints of the run.
        vocabulary: Number of token ids of the policy's model, for the brokers.

    Raises:
        CheckpointError: No checkpoint is intact, or they are of another run.
        SettingsError: The run began with other settings.
        LostLineage: Another learner took the run over at the same moment.
        StoreError: The store refused, or was away for too long.
    """
    newest = checkpoints.newest()
    state, path = fresh_state(run), None
    if newest is not None:
        path, state = newest
        check_same_run(run, state, path)
    run_id = store.trust()
    register_run(store, run, buffer, vocabulary=vocabulary)
    store.run(operations.confirm(run_id))
    if text := memory_shortage(run, buffer, store.run(operations.memory()).limit_bytes):
        log.warning("Redis has too little memory for this run", reason=text)
    stats = store.run(operations.stats())
    _warn_of_gaps(stats, state)
    start = replace(_begin_lineage(run, store, stats, state, path), vocabulary=vocabulary)
    recover(store, run_id, run=run, buffer=buffer, facts=start.ledger().facts)
    log.info(
        "lineage begins", lineage=start.lineage, step=state.step, checkpoint=str(path or "none")
    )
    return start


def _warn_of_gaps(stats: Stats, state: LearnerState) -> None:
    """Warn of gaps between the store and the checkpoint."""
    if stats.lineage < state.lineage:
        log.error(
            "THE STORE IS OLDER THAN THE CHECKPOINT: Redis was wiped, rolled back or replaced; "
            "what it lacks is created again",
            store_lineage=stats.lineage,
            lineage=state.lineage,
            step=state.step,
        )
    if stats.committed_step > state.step:
        log.error(
            "RESUMING BEFORE THE LAST COMMIT: a checkpoint was lost, and its batches with it",
            committed_step=stats.committed_step,
            step=state.step,
        )


def _begin_lineage(
    run: RunSettings, store: RetryingStore, stats: Stats, state: LearnerState, path: Path | None
) -> StartState:
    """Begin a lineage that no learner of this run has had, and write it down."""
    remembered = read_lineages(run.folder)
    owner = operations.new_owner()
    lineage = store.run(
        operations.begin_lineage(
            stats.lineage,
            state.step,
            owner=owner,
            at_least=max([state.lineage, *remembered]) + 1,
        )
    )
    if lineage is None:
        raise LostLineage(
            "a run must have one learner, got another that has just taken it over; this one stops: "
            "leave the other one alone"
        )
    lineages = remembered | store.run(operations.lineages())
    write_lineages(run.folder, lineages)  # before anything is published under it
    groups = np.flatnonzero(known_groups(store, run))
    return StartState(
        lineage,
        lineages,
        owner,
        state,
        path,
        reach=max(state.cursor, int(groups[-1]) + 1 if len(groups) else 0),
        asked_again=store.run(operations.recreations()),
    )


def fresh_state(run: RunSettings) -> LearnerState:
    """Return the state of a run that has not begun."""
    return LearnerState(
        run=run.name,
        settings_hash=settings_hash(run),
        step=0,
        lineage=0,
        cursor=0,
        trained=(),
        totals=Totals(),
        guards=GuardState(),
    )


def check_same_run(run: RunSettings, state: LearnerState, path: Path) -> None:
    """Refuse other settings, under which ids have other tasks, so that some would be trained twice.

    Raises:
        CheckpointError: The checkpoint's settings are others.
    """
    if (state.run, state.settings_hash) != (run.name, settings_hash(run)):
        raise CheckpointError(
            f"{path} must be of run {run.name!r} with the `run:` settings of now, got one of run "
            f"{state.run!r} with other settings or another name; restore them, or begin again "
            "with --fresh"
        )


# --------------------------------------------------------------------------------------------------
# Rollback to the weights of a checkpoint, while batch numbers go on.
#
# The store takes no part: the next version is published under its own number, with older weights
# inside. Batches since the checkpoint stay trained, in vain; a learner that resumes before the next
# checkpoint replays them from their sealed claims, and rolls back at the same batch.


def roll_back(
    checkpoints: Checkpoints,
    policy: Policy,
    optimizer: ScheduledOptimizer,
    *,
    model_path: str,
    before: int | None,
    critic: Critic | None = None,
) -> int:
    """Load the newest checkpoint, or the initial model, into policy, critic and optimizers.

    A checkpoint also sets the random number generators. One that is under way is waited for.
    Collective.

    Args:
        checkpoints: Checkpoints of the run.
        policy: Policy whose weights are replaced.
        optimizer: Optimizer whose moments are replaced.
        model_path: The initial model, loaded where there is no checkpoint.
        before: Only checkpoints of earlier batches than this; None = any.
        critic: Critic of the run, if it has one, as in `checkpoints`.

    Returns:
        Batches that the weights contain now; 0 = those of the initial model.

    Raises:
        CheckpointError: There are checkpoints among them, and none is intact.
    """
    newest = checkpoints.newest(before=before)
    if newest is not None:
        path, state = newest
        checkpoints.load(path, policy, optimizer)
        return state.step
    if policy.adapter is None:
        read_weights(policy.causal_lm, model_path)
    else:
        reset_adapters(policy.causal_lm)
    optimizer.forget()
    if critic is not None:
        critic.reset(model_path)
    return 0


# --------------------------------------------------------------------------------------------------
# Trust in a checkpoint that this run did not write: checked, then made the run's own.
#
#     --trust-checkpoint step-000050 -> digests of all files -> the same run -> MAC of this run
#
# Its weights decide what is trained: so a person has to name it. It is done once, before the
# learner starts; nothing of it is a setting.


def trust_checkpoint(run: RunSettings, name: str) -> None:
    """Verify a checkpoint in the run's folder, and make it the run's own: its manifest is replaced.

    Raises:
        SettingsError: No checkpoint has this name.
        CheckpointError: The checkpoint is damaged, or of a run with other settings.
    """
    by_name = {path.name: path for path in complete_checkpoints(run.folder / FOLDER)}
    if name not in by_name:
        raise SettingsError(
            f"--trust-checkpoint must name a checkpoint in {run.folder / FOLDER}, got {name!r} "
            f"where there is {', '.join(by_name) or 'none'}; name one of these, or copy it there"
        )
    path = by_name[name]
    check_same_run(run, verify(path), path)
    sealed = encode_manifest(read_manifest(path).digests, run_key(run.folder))
    durable.replace_file(path / MANIFEST, sealed)
