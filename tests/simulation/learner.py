"""A simulated learner: the real start, claims, feeder and recovery around a step that takes time.

Between any two operations it may die, and its disk may lose power in the middle of one. Checkpoints
and lineages are the real ones, with the tasks of all trained batches in the place of weights.
"""

from __future__ import annotations

import asyncio
import errno
import json
import random
from collections.abc import Callable
from typing import TypeVar

from broker.protocol.messages import Publication
from buffer import operations
from buffer.operations.operation import Operation
from buffer.record.episode import Episode, PolicyVersion
from configs.errors import LostLineage, StoreUnreachable
from configs.hashes import settings_hash
from configs.settings import Settings
from learner.checkpointing.learner_state import LearnerState
from learner.checkpointing.recovery import publish_pointer, recover
from learner.checkpointing.resume import StartState, take_over
from learner.data.claims import ClaimedBatch
from learner.data.curriculum import Feeder
from learner.data.ledger import Ledger, as_ranges
from learner.data.policy_lag import oldest_lag
from learner.data.retrying_store import RetryingStore
from learner.reporting.metrics import Totals
from tests.learner.support.made_claims import make_claims
from tests.learner.support.stored_bytes import WEIGHTS, StoredBytes
from tests.simulation.disk import PowerLossError
from tests.simulation.history import History
from tests.simulation.store import LearnersStore, Server

T = TypeVar("T")
LOOK_S = 0.1


class Learner:
    """One life of the learner."""

    def __init__(
        self,
        settings: Settings,
        server: Server,
        history: History,
        rng: random.Random,
        *,
        train_s: float,
        check: Callable[[Episode], None],
        vocabulary: int,
        on_power_loss: Callable[[], None],
    ) -> None:
        self._settings, self._history, self._rng = settings, history, rng
        self._train_s, self._on_power_loss = train_s, on_power_loss
        self._check_episode, self._vocabulary = check, vocabulary
        self._checkpoints = StoredBytes(settings.run.folder, keep=2)
        # Patience would sleep in real time: here an unreachable store is asked again by `_until`.
        self._store = RetryingStore(LearnersStore(server, settings.run.name), patience_s=0.0)
        self._trained: dict[int, list[int]] = {}
        self._saving: asyncio.Task[None] | None = None
        """The save under way."""
        self.is_ending = False
        """Asked to finish the run after the batch at hand."""

    async def live(self) -> None:
        """Take the run over and train until it is asked to end, or another learner takes over."""
        try:
            run, buffer = self._settings.run, self._settings.buffer
            start = await self._until(
                lambda: take_over(run, buffer, self._store, self._checkpoints)
            )
            ledger = start.ledger()
            self._store.on_rewind(
                lambda fresh, run_id: recover(
                    fresh,
                    run_id,
                    run=self._settings.run,
                    buffer=self._settings.buffer,
                    facts=ledger.facts,
                )
            )
            if start.checkpoint is not None:
                trained = json.loads((start.checkpoint / WEIGHTS).read_bytes())
                self._trained = {int(k): tasks for k, tasks in trained.items()}
            self._history.life_begins(start.lineage, start.state.step)
            await self._train(start, ledger)
        except LostLineage:
            self._history.note("learner lost its lineage")
        except PowerLossError:
            self._on_power_loss()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._history.note("lives that ended at a full disk")
        finally:
            if self._saving is not None:
                self._saving.cancel()

    async def _train(self, start: StartState, ledger: Ledger) -> None:
        run = self._settings.run
        claims = make_claims(
            self._store, self._settings, ledger=ledger, vocabulary=self._vocabulary
        )
        feeder = Feeder(
            self._store, run, self._settings.buffer, ledger=ledger, cursor=start.state.cursor
        )
        recoveries = self._store.recoveries
        await self._publish(ledger)
        while not self.is_ending:
            await self._until(feeder.feed)
            batch = await self._until(lambda: claims.poll(ledger.facts.step + 1))
            if batch is None:
                await asyncio.sleep(self._rng.uniform(0.5, 1.5) * LOOK_S)
                continue
            self._judge(batch, ledger)
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._train_s)
            self._trained[batch.step] = [episode.task_id for episode in batch.episodes]
            ledger.advance(batch.step)
            await self._ask(lambda: operations.advance(ledger.lineage, ledger.facts.step))
            self._history.trained(batch, self._trained)
            await self._publish(ledger)
            due = ledger.facts.step % self._settings.learner.checkpoint_every == 0
            if due or recoveries != self._store.recoveries:
                recoveries = self._store.recoveries
                await self._checkpoint(ledger, feeder)
            reasons = set(claims.dropped.units) - {"stale", "poison", "forgotten"}
            assert not reasons or self._history.spoiled, claims.dropped
        await self._finish(ledger, feeder)

    def _judge(self, batch: ClaimedBatch, ledger: Ledger) -> None:
        """Assert that the batch is what actors made, and not too old (I3, I4, I7, I11, I13)."""
        self._history.sealed(batch)
        for episode in batch.episodes:
            self._history.check_makers(episode)
            if episode.task_id in self._history.spoiled:
                continue
            self._check_episode(episode)
            if not batch.is_replay:
                lag = oldest_lag(episode, batch.step, ledger.lineage, ledger.lineages)
                assert lag <= self._settings.run.max_policy_lag, f"I13: lag {lag} in {batch.step}"

    async def _publish(self, ledger: Ledger) -> None:
        version = PolicyVersion(ledger.lineage, ledger.facts.step)
        digest = f"weights of {version.lineage}.{version.step}"
        publication = Publication(version, digest, "tcp://publisher", "key")
        ledger.publish(publication)
        await self._until(lambda: publish_pointer(self._store, publication))

    async def _checkpoint(self, ledger: Ledger, feeder: Feeder) -> None:
        """Begin a save once the one before is committed; training goes on meanwhile."""
        run = self._settings.run
        await self._settle()
        state = LearnerState(
            run=run.name,
            settings_hash=settings_hash(self._settings.run),
            step=ledger.facts.step,
            lineage=ledger.lineage,
            cursor=feeder.cursor,
            trained=tuple(as_ranges(ledger.facts.groups_up_to(ledger.facts.step))),
            totals=Totals(),
        )
        weights = json.dumps(self._trained).encode()
        self._saving = asyncio.create_task(self._save(state, weights, ledger))

    async def _save(self, state: LearnerState, weights: bytes, ledger: Ledger) -> None:
        """Save, then COMMIT; the life may end between the two."""
        await asyncio.sleep(self._rng.uniform(0.1, 0.5))
        self._checkpoints.save_bytes(state, weights)
        ledger.checkpoint(state.step)
        await asyncio.sleep(self._rng.uniform(0.0, 0.5))
        await self._ask(lambda: operations.commit(ledger.lineage, state.step))

    async def _settle(self) -> None:
        """Wait until a save under way is committed."""
        if self._saving is not None:
            await self._saving
            self._saving = None

    def _check_saving(self) -> None:
        """Raise what ended a save, if anything did."""
        if self._saving is not None and self._saving.done():
            self._saving.result()

    async def _finish(self, ledger: Ledger, feeder: Feeder) -> None:
        await self._checkpoint(ledger, feeder)
        await self._settle()
        await self._ask(lambda: operations.cancel(ledger.lineage))
        self._history.finished(self._trained)

    async def _ask(self, make: Callable[[], Operation[T]]) -> T:
        operation = make()
        return await self._until(lambda: self._store.run(operation))

    async def _until(self, attempt: Callable[[], T]) -> T:
        """Try until the store answers; time passes before and after, so that faults can strike."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.001, 0.02))
            self._check_saving()
            try:
                return attempt()
            except StoreUnreachable:
                await asyncio.sleep(self._rng.uniform(0.1, 0.5))
