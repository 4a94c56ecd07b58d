"""Publishing weights: from the model on all ranks to sealed bytes that actors can fetch.

After step k and before step k + 1 changes parameters, all ranks gather tensor by tensor in one
fixed order: rank 0 writes the canonical wire bytes into a slot. All compute the probe, and then the
model is free. Rank 0 digests and seals, and its publisher process does the rest. The learner waits
for nothing that an actor, or the publisher, could delay.

Example:
    publisher = WeightPublisher(model, run, settings, keys=keys, probe_ids=ids, probe=probe, ...)
    publisher.publish(model, PolicyVersion(lineage, k))  # others: a FollowerPublisher's
    publisher.close()
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import structlog
import torch
from msgspec import convert, structs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from broker.protocol.manifest import Probe, TensorSpec, WeightManifest, checksum_of, digest_of
from broker.protocol.messages import Publication
from broker.transport.keys import load_public
from broker.weights.object_store import WeightStore
from broker.weights.shared_memory import SharedFolder
from buffer.record.episode import PolicyVersion
from configs.errors import StoreError
from configs.settings import LearnerSettings, RunSettings
from configs.weight_path import describe_weight_path, uses_groups

from .log import WeightLog
from .publisher_process import PublisherSettings
from .server import Sent
from .sidecar import Sidecar
from .slots import NUM_SLOTS, Slots

log = structlog.get_logger()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that torch.compile and activation checkpointing add to names; actors lack them."""

ProbeFunction = Callable[[nn.Module, tuple[int, ...]], Sequence[float]]


def published(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield published tensors in wire order. A tied output layer comes once, as the embedding."""
    for name, parameter in model.named_parameters(remove_duplicate=True):
        yield unwrapped_name(name), parameter


def unwrapped_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def layout(model: nn.Module, dtype: str) -> tuple[TensorSpec, ...]:
    """Lay the tensors out in the wire bytes; the same on every rank."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, parameter in published(model):
        num_bytes = parameter.numel() * DTYPES[dtype].itemsize
        specs.append(TensorSpec(name, dtype, tuple(parameter.shape), offset, num_bytes))
        offset += num_bytes
    return tuple(specs)


@torch.no_grad()
def gather(model: nn.Module, specs: Sequence[TensorSpec], memory: mmap.mmap | None) -> None:
    """Write the parameters into `memory`. Collective; only rank 0 has memory.

    One tensor at a time is whole, in the publish dtype, so the peak is that of the largest tensor.
    """
    for spec, (_, parameter) in zip(specs, published(model), strict=True):
        whole: Tensor = parameter.detach()
        if isinstance(whole, DTensor) and whole.device_mesh.size() == 1:
            whole = whole.to_local()  # all of it; torch takes five times as long to find that out
        if isinstance(whole, DTensor):
            # An offloaded one is cast and gathered by the cards, too.
            on_card = whole.to(device=whole.device_mesh.device_type, dtype=DTYPES[spec.dtype])
            whole = cast("DTensor", on_card).full_tensor()
        else:
            whole = whole.to(DTYPES[spec.dtype])
        if memory is not None:
            count = whole.numel()
            flat = torch.frombuffer(
                memory, dtype=DTYPES[spec.dtype], count=count, offset=spec.offset
            )
            flat.copy_(whole.reshape(-1))


class WeightPublisher:
    """Rank 0's side of the weight plane: owns slots, their mappings, the sidecar and the pointer.

    Args:
        model: The model whose shapes are published from now on.
        run: For name, folder and publish dtype.
        settings: Endpoint and deadlines.
        keys: Folder with `learner.key`.
        probe_ids: Fixed tokens that actors check their engine with after each update, at least 2.
        put_pointer: Puts the pointer to the newest version where actors find it. May raise
            `LostLineage`.
        probe: Computes the learner's log-probs of `probe_ids`. Collective, as `publish` is.
    """

    def __init__(
        self,
        model: nn.Module,
        run: RunSettings,
        settings: LearnerSettings,
        *,
        keys: Path,
        probe_ids: Sequence[int],
        put_pointer: Callable[[Publication], None],
        probe: ProbeFunction,
    ) -> None:
        self._specs = layout(model, run.dtype)
        self._num_bytes = self._specs[-1].offset + self._specs[-1].num_bytes
        self._probe_ids = tuple(probe_ids)
        self._probe = probe
        self._threads = settings.threads
        self._put_pointer = put_pointer
        self._public_key = load_public(keys, "learner").decode()
        if settings.weight_store is not None:
            WeightStore(settings.weight_store, run.name)  # a wrong URL is the learner's to report
        self._log = WeightLog(run.folder)
        self._pointed: Publication | None = None
        self._lock = threading.Lock()  # publishing thread against the one that watches the sidecar
        fallback = (run.folder / "shared").resolve()
        self._folder = SharedFolder(
            "slots", num_bytes=NUM_SLOTS * self._num_bytes, fallback=fallback
        )
        self._slots = Slots(self._folder.path)
        self._memories = [self._map(index) for index in range(NUM_SLOTS)]
        self._sidecar = Sidecar(
            _publisher_settings(run, settings, slots=self._folder.path, keys=keys),
            on_death=self._reclaim,
            on_line=self._on_line,
        )
        self._sidecar.start()
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
            version: Of its weights.
            free: Called when the model may change again, before bytes are digested and announced.

        Raises:
            LostLineage: A newer learner has taken the run over.
            WeightsError: The publisher process keeps dying.
        """
        began = time.monotonic()
        with self._lock:
            slot = self._slots.acquire()
        memory = self._memories[slot]
        gather(model, self._specs, memory)
        logprobs = self._probe(model, self._probe_ids)
        held_s = time.monotonic() - began
        free()
        manifest = WeightManifest(
            version=version,
            digest=digest_of([memory], threads=self._threads),
            checksum=checksum_of(memory),
            num_bytes=self._num_bytes,
            tensors=self._specs,
            probe=Probe(self._probe_ids, tuple(logprobs)),
        )
        # First, so that every version an actor can see is in the log.
        self._log.sealed(manifest, held_s=held_s)
        self._announce(slot, manifest)
        return manifest

    def close(self) -> None:
        """End the sidecar and free the shared memory."""
        self._sidecar.close()
        self._folder.close()

    def _announce(self, slot: int, manifest: WeightManifest) -> None:
        """Seal the slot, wake the sidecar, and put the pointer to the version."""
        self._sidecar.check()
        with self._lock:
            self._slots.seal(slot, manifest)
        self._sidecar.wake()
        self._pointed = Publication(
            version=manifest.version,
            digest=manifest.digest,
            endpoint=self._sidecar.endpoint,
            public_key=self._public_key,
        )
        self._put_pointer(self._pointed)

    def _map(self, index: int) -> mmap.mmap:
        path = self._folder.create(self._slots.path(index, "free").name, self._num_bytes)
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), self._num_bytes)

    def _on_line(self, line: dict[str, object]) -> None:
        """Process a line of the sidecar, in the watching thread."""
        if line.pop("event") == "sent":
            self._log.delivered(convert(line, Sent))
            return
        pointed = self._pointed
        if pointed is not None and pointed.endpoint != line["endpoint"]:
            try:
                self._put_pointer(structs.replace(pointed, endpoint=str(line["endpoint"])))
            except StoreError as error:
                log.warning("new publisher not pointed to", reason=str(error))  # publish() will

    def _reclaim(self) -> None:
        with self._lock:
            self._slots.reclaim()


class FollowerPublisher:
    """The side of every other rank: takes part in the gather and the probe, and has no bytes."""

    def __init__(
        self,
        model: nn.Module,
        run: RunSettings,
        *,
        probe_ids: Sequence[int],
        probe: ProbeFunction,
    ) -> None:
        self._specs = layout(model, run.dtype)
        self._probe_ids = tuple(probe_ids)
        self._probe = probe

    def publish(
        self,
        model: nn.Module,
        version: PolicyVersion,  # noqa: ARG002 - as rank 0's publish
        *,
        free: Callable[[], None] = lambda: None,
    ) -> None:
        """Gather with rank 0. Collective."""
        gather(model, self._specs, None)
        self._probe(model, self._probe_ids)
        free()

    def close(self) -> None:
        """Nothing to free."""


def _publisher_settings(
    run: RunSettings, settings: LearnerSettings, *, slots: Path, keys: Path
) -> PublisherSettings:
    return PublisherSettings(
        run=run.name,
        slots=slots,
        keys=keys.resolve(),
        endpoint=settings.publisher_endpoint,
        broadcast=uses_groups(run, settings),
        join_s=settings.broadcast_join_s,
        send_s=settings.broadcast_send_s,
        use_cuda=settings.device != "cpu",
        sparse=settings.sparse_weights,
        store=settings.weight_store,
    )
