"""Publishing weights: from the model on all ranks to sealed bytes that actors can fetch.

After step k and before step k + 1 changes parameters, all ranks gather tensor by tensor in one
fixed order: rank 0 writes the canonical wire bytes into a slot. All compute the probe, and then the
model is free. Rank 0 digests and seals, and its publisher process does the rest. The learner waits
for nothing that an actor, or the publisher, could delay.

Example:
    publisher = WeightPublisher(model, run, settings, keys=keys, probe=probe, ...)
    publisher.publish(model, PolicyVersion(lineage, k))  # others: a FollowerPublisher's
    publisher.close()
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast

import structlog
import torch
from msgspec import convert, structs
from torch import nn

from broker.protocol.manifest import AdapterSpec, Probe, WeightManifest, checksum_of, digest_of
from broker.protocol.messages import Publication
from broker.transport.keys import load_public
from broker.weights.host_pins import Cudart, HostPins
from broker.weights.shared_memory import SharedFolder
from buffer.record.episode import PolicyVersion
from configs.errors import StoreError
from configs.settings import LearnerSettings, RunSettings
from configs.weight_path import describe_weight_path, uses_groups

from .broker_list import BrokerList, BrokerWatch, FindBrokers
from .gather import adapted_weights, gather, gather_adapter
from .layout import layout
from .log import VersionDelivery, WeightLog
from .memory import NUM_SLOTS, WeightSlots
from .publisher_process import PublisherSettings
from .sidecar import Sidecar

log = structlog.get_logger()


class WeightPublisher:
    """Rank 0's side of the weight plane: owns slots, their mappings, the sidecar and the pointer.

    Making one allocates the shared memory and starts the publisher process, up to 30 s. It raises
    SettingsError if the learner's key is missing, and WeightsError if the process does not start.

    Args:
        model: The model whose shapes are published from now on.
        run: Settings with name, folder and publish dtype.
        settings: Endpoint and deadlines.
        keys: Folder with `learner.key`.
        put_pointer: Puts the pointer to the newest version where actors find it. May raise
            `LostLineage`.
        probe: Computes the learner's log-probs of tokens, at least 2, with which actors check their
            engine after each update. Collective, as `publish` is.
        on_delivered: Called with the delivery of each version, in a thread of the publisher's.
        find_brokers: Reads from the store where brokers are, for actors; None = they are not told.
        environment: Variables that the publisher's process inherits; None = this process's.
    """

    def __init__(
        self,
        model: nn.Module,
        run: RunSettings,
        settings: LearnerSettings,
        *,
        keys: Path,
        put_pointer: Callable[[Publication], None],
        probe: Callable[[], Probe],
        on_delivered: Callable[[VersionDelivery], None] = lambda _: None,
        find_brokers: FindBrokers | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._specs = layout(model, run.dtype)
        self._num_bytes = self._specs[-1].offset + self._specs[-1].num_bytes
        self._adapted = adapted_weights(model)
        self._base: str | None = None
        """Digest of what they are added to, once its bytes are on offer."""
        self._probe = probe
        self._threads = settings.threads
        self._put_pointer = put_pointer
        self._public_key = load_public(keys, "learner").decode()
        self._log = WeightLog(run.folder)
        self._on_delivered = on_delivered
        self._pointed: Publication | None = None
        self._lock = threading.Lock()  # publishing thread against the one that watches the sidecar
        fallback = (run.folder / "shared").resolve()
        room = (NUM_SLOTS + bool(self._adapted)) * self._num_bytes
        self._folder = SharedFolder("slots", num_bytes=room, fallback=fallback)
        self._slots = WeightSlots(self._folder.path)
        self._pins = _host_pins(settings)
        self._memories = [self._map(index) for index in range(NUM_SLOTS)]
        self._sidecar = Sidecar(
            _publisher_settings(run, settings, slots=self._folder.path, keys=keys),
            on_death=self._reclaim,
            on_line=self._on_line,
            environment=environment,
        )
        self._sidecar.start()
        self._brokers = BrokerList(self._folder.path)
        self._watch = (
            BrokerWatch(find_brokers, self._introduce) if find_brokers is not None else None
        )
        log.info("weights to other machines", path=describe_weight_path(run, settings))

    def publish(
        self,
        model: nn.Module,
        version: PolicyVersion,
        *,
        free: Callable[[], None] = lambda: None,
    ) -> WeightManifest:
        """Gather, seal and announce these weights. Collective; other ranks call a follower's.

        Args:
            model: The model to publish.
            version: Version of these weights.
            free: Called when the model may change again, before bytes are digested and announced.

        Raises:
            LostLineage: A newer learner has taken the run over.
            StoreError: The announcement cannot be put into the store.
            WeightsError: The publisher process keeps dying.
        """
        began = time.monotonic()
        with self._lock:
            slot = self._slots.acquire()
        memory = self._memories[slot]
        gather(model, self._specs, memory, merging=self._adapted)
        spec, adapter = self._adapter(model) if self._adapted else (None, b"")
        probe = self._probe()
        held_s = time.monotonic() - began
        free()
        manifest = WeightManifest(
            version=version,
            digest=digest_of([memory], threads=self._threads),
            checksum=checksum_of(memory),
            num_bytes=self._num_bytes,
            tensors=self._specs,
            probe=probe,
            adapter=spec,
        )
        # First, so that every version an actor can see is in the log.
        self._log.sealed(manifest, held_s=held_s)
        self._announce(slot, manifest, adapter)
        return manifest

    def close(self) -> None:
        """End the sidecar and free the shared memory."""
        if self._watch is not None:
            self._watch.close()
        self._sidecar.close()
        if self._pins is not None:
            self._pins.close()
        self._folder.close()

    def _adapter(self, model: nn.Module) -> tuple[AdapterSpec, bytes]:
        """Gather the adapter, after the bytes that all of them are added to."""
        if self._base is None:
            path = self._folder.create(self._slots.base_path.name, self._num_bytes)
            with path.open("r+b") as file, mmap.mmap(file.fileno(), self._num_bytes) as memory:
                gather(model, self._specs, memory)
                self._base = digest_of([memory], threads=self._threads)
        return gather_adapter(model, self._base, self._adapted)

    def _announce(self, slot: int, manifest: WeightManifest, adapter: bytes) -> None:
        """Seal the slot, wake the sidecar, and put the pointer to the version."""
        self._sidecar.check_publisher()
        if self._watch is not None:
            self._watch.check_broker_thread()
        with self._lock:
            self._slots.seal(slot, manifest, adapter)
        self._sidecar.wake()
        self._pointed = Publication(
            version=manifest.version,
            digest=manifest.digest,
            endpoint=self._sidecar.endpoint,
            public_key=self._public_key,
        )
        self._put_pointer(self._pointed)

    def _introduce(self, brokers: tuple[str, ...]) -> None:
        """Have the sidecar tell actors where brokers are; in the thread that looks for them."""
        with suppress(FileNotFoundError):  # closed meanwhile
            self._brokers.write(brokers)
        self._sidecar.wake()

    def _map(self, index: int) -> mmap.mmap:
        path = self._folder.create(self._slots.path(index).name, self._num_bytes)
        self._slots.add(index)
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), self._num_bytes)
        refusal = "" if self._pins is None else self._pins.pin(memory)
        if refusal:
            log.warning("weights are gathered slowly", reason=refusal)
        return memory

    def _on_line(self, line: dict[str, object]) -> None:
        """Process a line of the sidecar, in the watching thread."""
        if line.pop("event") == "sent":
            sent = convert(line, VersionDelivery)
            self._log.delivered(sent)
            self._on_delivered(sent)
            return
        pointed = self._pointed
        if pointed is not None and pointed.endpoint != line["endpoint"]:
            try:
                self._put_pointer(structs.replace(pointed, endpoint=str(line["endpoint"])))
            except StoreError as error:
                log.warning(
                    "address of the new publisher not stored", reason=str(error)
                )  # publish() will

    def _reclaim(self) -> None:
        with self._lock:
            self._slots.reclaim()


class FollowerPublisher:
    """The publisher of all other ranks: takes part in gather and probe, and has no bytes."""

    def __init__(
        self,
        model: nn.Module,
        run: RunSettings,
        *,
        probe: Callable[[], Probe],
    ) -> None:
        self._specs = layout(model, run.dtype)
        self._adapted, self._has_base = adapted_weights(model), False
        self._probe = probe

    def publish(
        self,
        model: nn.Module,
        version: PolicyVersion,  # noqa: ARG002 - as rank 0's publish
        *,
        free: Callable[[], None] = lambda: None,
    ) -> None:
        """Gather and probe with rank 0. Collective."""
        gather(model, self._specs, None, merging=self._adapted)
        if self._adapted:
            if not self._has_base:
                gather(model, self._specs, None)
                self._has_base = True
            gather_adapter(model, "", self._adapted)
        self._probe()
        free()

    def close(self) -> None:
        """Free nothing: a follower holds no slots."""


def _host_pins(settings: LearnerSettings) -> HostPins | None:
    """Return a function that registers the slots with the card's driver; None without a card."""
    if settings.device == "cpu" or not torch.cuda.is_available():
        return None

    def forget_error() -> None:
        with suppress(RuntimeError):  # a kernel, after whose start torch takes the error
            torch.ones(1, device="cuda")

    return HostPins(cast("Cudart", torch.cuda.cudart()), forget_error=forget_error)


def _publisher_settings(
    run: RunSettings, settings: LearnerSettings, *, slots: Path, keys: Path
) -> PublisherSettings:
    return PublisherSettings(
        run=run.name,
        slots=slots,
        keys=keys.resolve(),
        endpoint=settings.publisher_endpoint,
        advertise=settings.advertise,
        broadcast=uses_groups(run, settings),
        join_s=settings.broadcast_join_s,
        send_s=settings.broadcast_send_s,
        use_cuda=settings.device != "cpu",
        ports=settings.broadcast_ports,
        sparse=settings.sparse_weights,
    )
