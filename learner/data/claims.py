"""Claims of batches: filled, stale groups dropped, sealed, and replayed after a crash.

    filling -> (drop, top up)* -> sealed -> trained -> committed
                                    ^-- a crash returns here: the same episodes, not judged again

Invariant: only a sealed claim is trained. Claims are made by rank 0 alone. Units (whole groups) are
judged as they arrive, so that decoding is nearly done when the last one is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog

from buffer import operations
from buffer.operations.values import Claim, ClaimedUnit, StaleMask, Stats
from buffer.record.episode import Episode
from configs.errors import DeadlineError, DeterminismError, RecordError
from configs.settings import (
    AlgorithmSettings,
    BufferSettings,
    LearnerSettings,
    ReplaySettings,
    RewardSettings,
    RunSettings,
)
from configs.traces import trace_dropped
from learner.profiling import phase
from learner.stopping import take_left_batch

from .group_filter import (
    IMPOSSIBLE,
    STALE,
    UNREADABLE,
    ZERO_VARIANCE,
    DropCounts,
    GroupFilter,
)
from .ledger import Ledger
from .policy_lag import FreshTokens, Int64, mask_stale, trained_lags
from .records import Records, missing_parts
from .retrying_store import RetryingStore
from .reuse import Reuse, ReusedGroup
from .sampler import RewardsByPrompt, rewards_by_prompt

log = structlog.get_logger()

POLL_EVERY_S = 0.02  # a claim that brings nothing costs the store a fraction of a millisecond
REPORT_EVERY_S = 30.0
# Spot capacity may be gone for an afternoon; after a whole day there are no actors to wait for.
DEADLINE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    """A sealed claim with its episodes."""

    step: int
    episodes: tuple[Episode, ...]
    """Episodes in the order of the claim: oldest unit first, members by id; then those of groups
    that are trained again. Rewards are shaped, and stale tokens masked."""
    sampled: tuple[Episode, ...]
    """The same episodes before stale tokens are masked."""
    mask: StaleMask | None
    """The mask that it was sealed with."""
    tokens: FreshTokens
    """Tokens of its new groups, and of groups dropped as stale while it filled."""
    is_replay: bool
    """Whether an earlier life of the learner sealed it."""
    filtered_groups: int = 0
    """Groups of equal rewards that were replaced by others."""
    filtered: RewardsByPrompt = field(default_factory=dict)
    """Rewards of those groups, where a sampler chose their prompts."""
    uses: Mapping[int, int] = field(default_factory=dict)
    """Group that is trained again -> how often, this batch included."""
    missing_parts: tuple[str, ...] = ()
    """Parts of the reward that have a weight, and that no episode has."""
    in_order: bool = False
    """Whether the run is deterministic, so that a batch has the same groups each time."""


@dataclass(slots=True)
class _Wait:
    """The wait for one batch, over all calls of `wait`."""

    step: int
    began: float
    reported: float


class Claims:
    """Fills and seals one batch after the other."""

    def __init__(
        self,
        store: RetryingStore,
        run: RunSettings,
        *,
        buffer: BufferSettings,
        learner: LearnerSettings,
        algorithm: AlgorithmSettings,
        rewards: RewardSettings,
        replay: ReplaySettings,
        ledger: Ledger,
        vocabulary: int,
    ) -> None:
        self._store = store
        self._run = run
        self._in_order = run.deterministic
        self._recreate_dropped = buffer.recreate_dropped
        self._rewards = rewards
        self._max_attempts = learner.max_claim_attempts
        self._ledger = ledger
        self._lineage = ledger.lineage
        self._episodes: dict[int, list[Episode]] = {}
        """Judged units of the batch that is being filled, by group."""
        self._filter = GroupFilter(
            run, buffer, algorithm, ledger=ledger, vocabulary=vocabulary, rewards=rewards
        )
        self._filtered: RewardsByPrompt = {}
        """Rewards of the groups that were filtered from the batch that is being filled."""
        self._records = Records(store, run, buffer, rewards)
        is_masking = buffer.on_stale == "mask"
        self._mask = (
            StaleMask(ledger.lineage, run.max_policy_lag, replay.max_lag) if is_masking else None
        )
        self._reuse = Reuse(
            store, run, replay, ledger=ledger, records=self._records, is_masking=is_masking
        )
        self._recoveries = store.recoveries
        self._started: int | None = None
        self._left = take_left_batch(run.folder)
        """Batch that a stop of the last life left."""
        self._replays = True
        """True until the first batch that no earlier life of the learner has sealed."""
        self._wait = _Wait(step=0, began=0.0, reported=0.0)
        self.dropped = DropCounts()

    def wait(self, step: int, *, until: Callable[[], bool]) -> ClaimedBatch | None:
        """Wait for batch `step`; None if `until` returns True before.

        Raises:
            DeadlineError: No batch came for a whole day, over however many calls.
            DeterminismError: A deterministic run has lost a task, so its batches would differ.
            RecordError: A batch that an earlier life sealed has a missing or malformed record.
            LostLineage: A newer learner owns the run.
            StoreError: The store refused, or was away for too long.
        """
        if self._wait.step != step:
            now = time.monotonic()
            self._wait = _Wait(step, began=now, reported=now)
        while not until():
            batch = self.poll(step)
            if batch is not None:
                return batch
            self._check_deadline()
            time.sleep(POLL_EVERY_S)
        return None

    @property
    def num_ready(self) -> int:
        """Number of groups that are complete for the batch that is being filled."""
        return len(self._episodes)

    def poll(self, step: int) -> ClaimedBatch | None:
        """Claim, judge and drop groups once; return the batch if it is complete, else None.

        A batch that an earlier life sealed is returned as it was. One that was started more than
        `learner.max_claim_attempts` times is given up: its groups become dead letters. Raises as
        `wait`.
        """
        if self._recoveries != self._store.recoveries:
            self._recoveries = self._store.recoveries
            self._episodes.clear()  # other records may have taken their place
        self._reuse.keep_within_bounds(step)
        claim = self._claim(step)
        if claim.sealed:
            return self._replay(step, claim)
        bad = self._judge(step, claim.units)
        for reason, groups in bad.items():
            log.info("dropping groups", step=step, reason=reason, groups=len(groups))
            if reason == STALE and self._recreate_dropped:
                # Before they are dropped: a life that ends here judges them again, and finds this.
                again = self._ledger.ask_again(groups)
                self._store.run(operations.recreate_dropped(self._lineage, dict.fromkeys(again)))
            self._store.run(operations.drop(self._lineage, step, groups, reason))
            self._count_dropped(groups, reason)
        if self._in_order and (bad or claim.complete):
            refuse_losses(self._store.run(operations.stats()), self._run, step)
        if bad or not claim.complete:
            return None
        reused = self._reuse.draw(step)
        if not self._pin(step, claim, reused, self._mask):
            return None
        ratings = self._reuse.rate(step, self._episodes)
        self._store.run(operations.seal(self._lineage, step, ratings, mask=self._mask))
        return self._assemble(step, claim.units, reused, mask=self._mask, is_replay=False)

    def _pin(self, step: int, claim: Claim, reused: Iterable[int], mask: StaleMask | None) -> bool:
        """Pin the batch in the ledger; False if the store was rewound meanwhile."""
        with self._store.lock:
            if self._recoveries != self._store.recoveries:
                return False
            self._ledger.hold(step, (unit.group_id for unit in claim.units), reused, mask)
            return True

    def _check_deadline(self) -> None:
        """Log now and then that the batch is not full; raise after a day."""
        wait, now = self._wait, time.monotonic()
        groups, of = len(self._episodes), self._run.groups_per_batch
        if now - wait.began > DEADLINE_S:
            raise DeadlineError(
                f"batch {wait.step} must fill within {DEADLINE_S / 3600:.0f} h, got {groups} of "
                f"{of} groups; start actors, or look at their logs with `nyala logs`"
            )
        if now - wait.reported > REPORT_EVERY_S:
            wait.reported = now
            if self._in_order:
                refuse_losses(self._store.run(operations.stats()), self._run, wait.step)
            waited_s = round(now - wait.began)
            log.info(
                "waiting for episodes", step=wait.step, groups=groups, of=of, waited_s=waited_s
            )
            paused = self._store.run(operations.closed()).paused
            if paused:
                command = f"nyala buffer resume {self._run.folder}"
                log.error("LEASING IS PAUSED", why=paused, next=command)

    def _claim(self, step: int) -> Claim:
        starts_now = self._started != step
        if starts_now:
            self._episodes.clear()
            self._filter.begin_batch()
            self._filtered = {}
        units = self._run.groups_per_batch
        num_read = len(self._episodes)
        claim = self._store.run(
            operations.claim(
                self._lineage,
                step,
                units,
                start=starts_now and step != self._left,
                num_read=num_read,
                in_order=self._in_order,
            )
        )
        self._started = step
        most = self._max_attempts
        if claim.sealed and claim.starts > most:
            # A batch during which the learner has died so often is given up, rather than the run.
            self._abandon(step, claim, "poison")
            again = operations.claim(
                self._lineage, step, units, start=True, in_order=self._in_order
            )
            claim = self._store.run(again)
        if self._replays and not claim.sealed:
            self._replays = False
            self._dissolve_later_claims(step)
        return claim

    def _abandon(self, step: int, claim: Claim, reason: str) -> None:
        groups = [unit.group_id for unit in claim.units]
        log.error("giving up a batch", step=step, why=reason, starts=claim.starts, groups=groups)
        self._episodes.clear()
        self._store.run(
            operations.abandon(self._lineage, step, reason, to_dead_letters=reason == "poison")
        )
        self._count_dropped(groups, reason)
        self._dissolve_later_claims(step)

    def _count_dropped(self, groups: Sequence[int], reason: str) -> None:
        self._ledger.forget_choices(groups)
        self.dropped.add_units(reason, len(groups))
        trace_dropped(groups, group_size=self._run.group_size, reason=reason)

    def _dissolve_later_claims(self, step: int) -> None:
        """Let units that an earlier life sealed for later batches be claimed for this one.

        They may take up all that backpressure allows in flight: then this batch would never fill.
        """
        for later in self._store.run(operations.stats()).claims:
            if later.k > step:
                log.info("dissolving a later batch", step=step, later=later.k)
                self._store.run(operations.reconcile(self._lineage, later.k, ()))

    def _judge(self, step: int, units: Iterable[ClaimedUnit]) -> dict[str, list[int]]:
        """Read the units that arrived since the last poll; return those to drop, by reason."""
        new = [unit for unit in units if unit.group_id not in self._episodes]
        bad: dict[str, list[int]] = {}
        for unit, episodes in self._read(new):
            reason = UNREADABLE if episodes is None else self._filter.reason_to_drop(step, episodes)
            if reason is not None:
                bad.setdefault(reason, []).append(unit.group_id)
            if episodes is not None and reason is None:
                self._episodes[unit.group_id] = episodes
            elif episodes is not None and reason not in {UNREADABLE, IMPOSSIBLE}:
                self.dropped.add_episodes(episodes)
                if reason == ZERO_VARIANCE:
                    self._filtered = {**self._filtered, **rewards_by_prompt(episodes)}
        return bad

    def _read(self, units: Sequence[ClaimedUnit]) -> list[tuple[ClaimedUnit, list[Episode] | None]]:
        """Read the episodes of units; None where a record is missing or malformed."""
        if not units:
            return []
        with phase("fetch"):
            return list(self._records.units(units))

    def _replay(self, step: int, claim: Claim) -> ClaimedBatch | None:
        """Read a sealed batch without judging it again; None if the store lost some of its records.

        Records are lost if an earlier life trained them, was reconciled after a rewind, and ended
        before its next checkpoint. No weights contain them any more.

        Raises:
            RecordError: A record of it is malformed, which ends this life.
        """
        ids = [task_id for unit in claim.units for task_id in unit.task_ids]
        is_forgotten = None in self._store.run(operations.records(ids))
        units = [] if is_forgotten else self._read(claim.units)
        if self._recoveries != self._store.recoveries:
            return None  # rewound between the claim and the records: they may be of two histories
        if is_forgotten:
            self._abandon(step, claim, "forgotten")
            return None
        for unit, episodes in units:
            if episodes is None:
                raise RecordError(
                    f"sealed batch {step} must be readable, got a missing or malformed record in "
                    f"group {unit.group_id}; start the learner again, unless `nyala up` does: "
                    f"after {self._max_attempts} start(s) it gives the batch up"
                )
            self._episodes[unit.group_id] = episodes
        reused = self._reuse.replay(step)
        if not self._pin(step, claim, reused, claim.mask):
            return None
        return self._assemble(step, claim.units, reused, mask=claim.mask, is_replay=True)

    def _assemble(
        self,
        step: int,
        units: Iterable[ClaimedUnit],
        reused: Mapping[int, ReusedGroup],
        *,
        mask: StaleMask | None,
        is_replay: bool,
    ) -> ClaimedBatch:
        sampled = [episode for unit in units for episode in self._episodes[unit.group_id]]
        self._episodes.clear()
        sampled += [episode for group in reused.values() for episode in group.episodes]
        lineages = self._ledger.lineages
        episodes = mask_stale(sampled, mask, step=step, lineages=lineages, reused=reused)
        return ClaimedBatch(
            step,
            tuple(episodes),
            sampled=tuple(sampled),
            mask=mask,
            tokens=self._count_fresh(step, sampled, episodes, reused, mask),
            is_replay=is_replay,
            filtered_groups=self._filter.num_filtered,
            filtered=self._filtered,
            uses={group_id: group.uses for group_id, group in reused.items()},
            missing_parts=missing_parts(episodes, self._rewards),
            in_order=self._in_order,
        )

    def _count_fresh(
        self,
        step: int,
        sampled: Iterable[Episode],
        trained: Iterable[Episode],
        reused: Container[int],
        mask: StaleMask | None,
    ) -> FreshTokens:
        """Count the tokens of new groups, and of groups dropped as stale while the batch filled.

        A batch that was sealed with a mask is judged by the mask's bound. Others are judged by the
        bound of this life, because no other is known.
        """
        lineage = self._lineage if mask is None else mask.lineage
        bound = self._run.max_policy_lag if mask is None else mask.max_lag

        def lags_of(episodes: Iterable[Episode]) -> Int64:
            new = (episode for episode in episodes if episode.group_id not in reused)
            return trained_lags(new, step, lineage, self._ledger.lineages)

        trained_N, new_N = lags_of(trained), lags_of(sampled)
        return self._filter.stale_tokens + FreshTokens(
            sampled=len(new_N),
            trained=len(trained_N),
            masked=len(new_N) - len(trained_N),
            fresh=int(np.count_nonzero(new_N <= bound)),
            fresh_trained=int(np.count_nonzero(trained_N <= bound)),
        )


def refuse_losses(stats: Stats, run: RunSettings, step: int) -> None:
    """Refuse to go on where a deterministic run (the same each time) has lost a task.

    Args:
        stats: Counts of the store.
        run: Settings of the run.
        step: The batch that is being filled.

    Raises:
        DeterminismError: A task has died, was dropped, or was trained before an older checkpoint.
    """
    before = (step - 1) * run.groups_per_batch * run.group_size
    lost = stats.dropped | {"dead": stats.dead, "trained already": stats.committed - before}
    counts = ", ".join(f"{number} {reason}" for reason, number in lost.items() if number > 0)
    if counts:
        raise DeterminismError(
            f"every task must be in its own batch with run.deterministic, got {counts} at batch "
            f"{step}; fix what `nyala buffer dead list {run.folder}` and the logs show, then "
            f"begin again with --fresh"
        )
