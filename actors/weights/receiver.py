"""The weight receiver: from the announcement of a version to an engine that serves it.

Consumes messages of the publisher; waits for announcements, for bytes, and for the gate (a running
evaluation may hold a swap back). Transfer never touches the engine: bytes are staged in shared
memory and their digest is checked first, so generation pauses for the swap alone. Bytes in the
publisher's own memory are checked again after the engine has read them; if they were overwritten
meanwhile, the newest version is fetched. After each swap the engine's own log-probs of the probe
must agree with the learner's (`probe.py`), and now and then the weights that it has stored are
compared with those that it was given (`read_back.py`).

    news ──▶ group, memory, pull ──▶ staged, digest right ──▶ gate ──▶ apply ──▶ probe right:
                             ▲                                           │           serving
                             └────── wrong: DIRTY, pull again ───────────┘

Weights that are stored wrong twice end the actor (WeightsError). A probe that is refused a third
time is judged in float32 (`exact.py`). Where neither side is wrong, the version is served after
all. If the engine is wrong and served versions before, the actor ends, because a new engine may be
right. Otherwise a restart would not help: the actor logs a remedy and waits for a newer version.

A publisher that vanishes changes nothing here: the engine goes on with the version it has.

Example:
    caller = ActorIdentity(keys, run="demo", incarnation=me)
    receiver = WeightReceiver(engine, settings, caller=caller, staging=path)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(receiver.run())
        await receiver.first_sync(welcome.publication)  # before the first lease
        receiver.offer(reply.publication)  # with every reply of the broker
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from actors.engine.engine import StagedWeights
from broker.protocol.manifest import WeightManifest
from broker.protocol.messages import Publication
from broker.protocol.weight_messages import Brokers, Join, Neighbours
from buffer.record.episode import PolicyVersion
from configs.errors import (
    DeadlineError,
    MixedWeights,
    WeightsError,
    WeightsOverwritten,
    first_error,
)
from configs.settings import ActorSettings

from .counters import WeightCounters
from .exact import Exact, Float32Differences, exact_logprobs
from .links import ActorIdentity, PublisherLink
from .place import MemberPlace, OwnProcess
from .probe import LogprobDifference, ProbeJudge
from .read_back import StorageCheck
from .share import WeightShare
from .sources import WeightSources
from .staging_files import StagedVersion, StagingFile, StagingFiles
from .transfer import NOTHING, FromPublisher, WeightTransfer

log = structlog.get_logger()

MOST_PULLS = 2
"""Repeated pulls of one version before float32 decides."""


class Swapping(Protocol):
    """The part of `Engine` that a receiver uses."""

    async def apply(self, staged: StagedWeights) -> float: ...

    async def probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]: ...

    async def read_back(self, staged: StagedWeights) -> list[str] | None: ...


LOOK_S = 1.0
"""Longest pause between two looks at the bytes of a first version."""
ACCEPT = "set actors.probe_tolerance above that difference if you accept the engine's precision"

Gate = Callable[[], Awaitable[None]]


async def open_gate() -> None:
    """Let every swap through at once."""


class WeightReceiver:
    """Keeps an engine on the newest weights.

    Args:
        engine: Engine to keep up to date.
        settings: Deadlines, sources, and the tolerance of the probe.
        caller: Identity of this actor.
        staging: Folder for models that do not fit into shared memory.
        keys_folder: Keys of the run, among them those that may pull from here; for
            `actors.share_endpoint`.
        device: `cuda` if `place` can be in an NCCL group.
        place: Where weight groups are joined; None = this process.
        gate: Returns when a swap may happen; bounds its own waiting.
        model: Model with the shapes of versions, for float32 to judge a refused version; None = a
            refusal ends the actor.
        on_brokers: Receives the addresses of brokers that the publisher sends.
    """

    def __init__(
        self,
        engine: Swapping,
        settings: ActorSettings,
        *,
        caller: ActorIdentity,
        staging: Path,
        keys_folder: Path | None = None,
        device: str = "cpu",
        place: MemberPlace | None = None,
        gate: Gate = open_gate,
        model: str | None = None,
        on_brokers: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        self._on_brokers = on_brokers
        self._engine = engine
        self._settings = settings
        self._device = device
        self._place = place or OwnProcess()
        self._gate = gate
        self._exact: Exact | None = partial(exact_logprobs, model) if model is not None else None
        self._files = StagingFiles("staging", fallback=staging)
        self._link = PublisherLink(caller=caller, join=self._join, on_message=self._on_message)
        self._sources = WeightSources(self._link.post, order=settings.pull_from, caller=caller)
        self._transfer = WeightTransfer(
            self._files,
            post=self._link.post,
            sources=self._sources,
            stage=self._stage,
            place=self._place,
            timeout_s=settings.weight_timeout_s,
        )
        self._counters = self._transfer.counters
        self._judge = ProbeJudge(settings.probe_tolerance)
        self._storage = StorageCheck(engine, self._counters)
        self._share: WeightShare | None = None
        if settings.share_endpoint is not None and keys_folder is not None:
            self._share = WeightShare(
                self._transfer.shared,
                settings.share_endpoint,
                folder=None if settings.site else keys_folder,
                caller=caller,
            )
        self._staged: StagedVersion | None = None
        self._is_applying = False
        self._num_overwritten = 0
        """Overwritten versions in a row."""
        self._num_refused = 0
        """Refused versions in a row, where repeated pulls of one version count."""
        self._verdict = ""
        """Reason why a version that is here is not served."""
        self._arrived = asyncio.Event()
        self._served = asyncio.Condition()
        self._serving_since: float | None = None
        self.version = NOTHING
        """Version that the engine serves, after its probe."""
        self.is_dirty = False
        """The engine's weights may be a mixture of versions, so it gets no new work."""

    @property
    def counters(self) -> WeightCounters:
        """Totals so far, for heartbeats and metrics."""
        return replace(self._counters)

    @property
    def figures(self) -> Mapping[str, float]:
        """Figures of the last version for heartbeats, by their names in `Figures`."""
        return self._counters.of_last_version

    def offer(self, publication: Publication | None) -> None:
        """Follow the publisher to the endpoint that the broker names.

        None changes nothing; a publication of a lower lineage than the weights here is refused.
        """
        if publication is None:
            return
        if publication.version.lineage < self._transfer.held.lineage:
            log.warning("publication refused: lower lineage", offered=tuple(publication.version))
            return
        self._link.follow(publication)

    async def first_sync(self, publication: Publication) -> PolicyVersion:
        """Wait until the engine serves this version or a newer one; `run` must be under way.

        Only the wait for bytes has a limit here. Groups, the engine's commands and the gate have
        deadlines of their own. Where a version is here but refused for good, the wait goes on for a
        newer one.

        Returns:
            The version that is served.

        Raises:
            DeadlineError: No byte of the version comes for `actors.weight_timeout_s`.
        """
        self.offer(publication)
        limit_s = self._settings.weight_timeout_s
        look_s, silent_s, seen = min(LOOK_S, limit_s / 4), 0.0, (0, 0)
        while self.version < publication.version:
            looked_at = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(look_s):
                    await self.newer_than(self.version)
            arrived, wanted = awaited = self._transfer.awaited or seen
            has_come = arrived > 0 and awaited != seen
            if has_come or self._is_applying or self._staged is not None:
                silent_s = 0.0
            elif self._transfer.awaited is not None:  # longer: this process was stopped meanwhile
                silent_s += min(time.monotonic() - looked_at, 2 * look_s)
            seen = awaited if wanted else seen
            if silent_s < limit_s:
                continue
            if not self._verdict:
                raise DeadlineError(self._silence(publication, *seen))
            log.error("weights not served; waiting for newer ones", reason=self._verdict)
            silent_s = 0.0
        return self.version

    def _silence(self, publication: Publication, arrived: int, wanted: int) -> str:
        """Write the error of a first version whose bytes do not come."""
        limit = f"actors.weight_timeout_s = {self._settings.weight_timeout_s:g} s"
        version = f"weights {tuple(publication.version)}"
        if not wanted:
            return (
                f"{version} must be announced by {publication.endpoint} within {limit}, got no "
                "news from there; check that the address is reachable from here, and that this "
                "actor's key is in the learner's keys/allowed"
            )
        return (
            f"{version} must go on arriving from {publication.endpoint} within {limit}, got "
            f"{arrived / 2**20:.1f} of {wanted / 2**20:.1f} MiB, and nothing more; see in the "
            "learner's log whether it is alive, or raise actors.weight_timeout_s on a slow line"
        )

    async def newer_than(self, version: PolicyVersion) -> None:
        """Wait until the engine serves a version above this one."""
        async with self._served:
            await self._served.wait_for(lambda: self.version > version)

    async def run(self) -> None:
        """Receive and apply until cancelled.

        Raises:
            WeightsError: The engine's weights cannot be made to agree with the learner's, or a
                version never comes with its digest, or there is no room for it.
            EngineError: The engine died.
            DeadlineError: The engine does not answer.
            SettingsError: `actors.share_endpoint` cannot be listened on, or lets no actor in.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._transfer.run())
                tasks.create_task(self._link.run())
                tasks.create_task(self._place.run())
                if self._share is not None:
                    tasks.create_task(self._share.run())
                tasks.create_task(self._apply_all())
        except ExceptionGroup as group:
            raise first_error(group) from group  # it has cancelled the others
        finally:
            self._files.close()
            log.info("weights received", **asdict(self._counters))

    def _join(self) -> Join:
        reads_memory = self._transfer.reads_memory
        return Join(
            version=self._transfer.held,
            can_group=self._place.is_open
            and not (self.is_dirty or reads_memory or self._settings.site),
            device=self._device,
            paused_s=self._counters.pause_s,
            served_s=time.monotonic() - self._serving_since if self._serving_since else 0.0,
            share=self._share.peer if self._share is not None else None,
            reads_memory=reads_memory,
            site=self._settings.site or "",
        )

    def _on_message(self, message: object) -> None:
        if isinstance(message, Brokers):
            self._on_brokers(message.endpoints)
            return
        if isinstance(message, Neighbours) and self._share is not None:
            self._share.admit(message)
            return
        if not isinstance(message, FromPublisher):
            log.warning("unexpected message ignored", message=type(message).__name__)
            return
        before = self._transfer.reads_memory
        self._transfer.on_message(message)
        if self._transfer.reads_memory != before:
            self._link.post(self._join())  # before the next group is formed

    def _stage(self, manifest: WeightManifest, file: StagingFile) -> None:
        """Offer a complete version to the engine, in place of an older one that still waits."""
        if self._staged is not None:
            self._files.release(self._staged.file)
        self._staged = StagedVersion(manifest, file)
        self._arrived.set()

    async def _apply_all(self) -> None:
        while True:
            await self._arrived.wait()
            if not self.is_dirty:
                await self._gate()
            self._arrived.clear()
            staged, self._staged = self._staged, None
            assert staged is not None
            self._is_applying = True
            try:
                await self._apply(staged.weights)
            finally:
                self._is_applying = False
                self._files.release(staged.file)

    async def _apply(self, staged: StagedWeights) -> None:
        manifest, was_dirty = staged.manifest, self.is_dirty
        self.is_dirty = True
        try:
            staged.check_not_overwritten()  # it may have waited at the gate
            self._counters.last_pause_s = await self._engine.apply(staged)
            self._counters.pause_s += self._counters.last_pause_s
        except WeightsOverwritten as error:
            self.is_dirty = was_dirty or isinstance(error, MixedWeights)
            self._fetch_overwritten_again(error)
            return
        self._num_overwritten = 0
        refusal = await self._probe(staged)
        fault = await self._storage.fault(staged, is_again=was_dirty or bool(refusal))
        if fault and was_dirty:
            raise WeightsError(
                "weights in the engine must be those that were pulled, got others twice in a row, "
                f"the second time after another pull ({fault}); test the memory of this machine "
                "and of its cards, and run this actor elsewhere"
            )
        if not (fault or refusal):
            self._num_refused = 0
            self._counters.updates += 1
            await self._serve(manifest.version)
        elif fault or self._num_refused < MOST_PULLS:
            self._num_refused += not fault
            log.error("weights in the engine are wrong; pulling again", reason=fault or refusal)
            # The second time into memory of this actor's own, over another way.
            self._transfer.fetch_again(may_borrow=self._num_refused < MOST_PULLS)
        else:
            await self._settle(staged, refusal)

    async def _probe(self, staged: StagedWeights) -> str:
        """Compare the engine's log-probs with the learner's; return the fault, or an empty text."""
        manifest = staged.manifest
        logprobs = await self._engine.probe(manifest.probe.token_ids)
        difference = LogprobDifference.from_logprobs(logprobs, manifest.probe.logprobs)
        bound = self._probe_bound(manifest)
        if difference.is_within(bound):
            self._counters.note_probe(difference.mean, difference.largest)
            return ""
        self._counters.probe_mismatches += 1
        return (
            f"log-probs of the probe under weights {tuple(manifest.version)} must be the learner's "
            f"but for {bound} nats, got a difference of {difference}"
        )

    async def _settle(self, staged: StagedWeights, refusal: str) -> None:
        """Decide in float32 about a version that the probe refuses after every pull.

        Raises:
            WeightsError: The engine is wrong, and a new one may be right.
        """
        manifest = staged.manifest
        if self._exact is None:
            raise WeightsError(f"{refusal}, {MOST_PULLS + 1} times in a row; {ACCEPT}")
        try:
            exact = await asyncio.to_thread(self._exact, staged)
        except (ImportError, KeyError, OSError, RuntimeError, ValueError, WeightsError) as error:
            self._verdict = (
                f"{refusal}, and float32 cannot decide ({error or type(error).__name__}); {ACCEPT}"
            )
        else:
            ours = await self._engine.probe(manifest.probe.token_ids)
            sides = Float32Differences.from_probe(
                ours, manifest.probe, exact, self._probe_bound(manifest)
            )
            self._verdict = f"{refusal}; {sides}"
            if sides.engine_is_right and sides.learner_is_right and not self._judge.is_fixed:
                log.warning(
                    "engine and learner differ, but both are within their bounds", reason=str(sides)
                )
                self._counters.updates += 1
                await self._serve(manifest.version)
                return
            if not sides.engine_is_right and self._serving_since is not None:
                raise WeightsError(self._verdict)
        log.error("weights not served; waiting for newer ones", reason=self._verdict)

    def _fetch_overwritten_again(self, error: WeightsOverwritten) -> None:
        """Fetch the newest version; the second time in a row, as a copy in the actor's memory."""
        log.warning("weights not applied", reason=str(error))
        self._num_overwritten += 1
        self._counters.overwritten += 1
        self._transfer.fetch_again(may_borrow=self._num_overwritten < 2)

    def _probe_bound(self, manifest: WeightManifest) -> LogprobDifference:
        """Return the largest difference from the learner's log-probs that is accepted."""
        return self._judge.bound(manifest.probe, manifest.tensors[0].dtype)

    async def _serve(self, version: PolicyVersion) -> None:
        self.is_dirty, self._verdict = False, ""
        self._serving_since = self._serving_since or time.monotonic()
        async with self._served:
            self.version = version
            self._served.notify_all()
