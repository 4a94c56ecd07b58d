"""Publishing weights: from the model on all ranks to sealed bytes that actors can have.

After step k and before step k + 1 changes parameters, all ranks gather tensor by tensor in one
fixed order: rank 0 writes the canonical wire bytes into a slot. All compute the probe, and then the
model is free. Rank 0 digests and seals, and its publisher process does the rest. The learner waits
for nothing that an actor, or the publisher, could delay.

Example:
    publisher = WeightPublisher(model, run, settings, keys=keys, probe_ids=ids, probe=probe, ...)
    publisher.publish(model, PolicyVersion(lineage, k))  # on every rank
    publisher.close()
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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

from .log import WeightLog
from .publisher_process import PublisherSettings
from .server import Sent
from .sidecar import Sidecar
from .slots import NUM_SLOTS, Slots

log = structlog.get_logger()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names that actors would not know."""

ProbeFunction = Callable[[nn.Module, tuple[int, ...]], Sequence[float]]


def published(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what is published, in wire order. A tied output layer comes once, as the embedding."""
    for name, parameter in model.named_parameters(remove_duplicate=True):
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")  # noqa: PLW2901 - the name without its wrappers
        yield name, parameter


def layout(model: nn.Module, dtype: str) -> tuple[TensorSpec, ...]:
    """Return where each tensor lies in the wire bytes; the same on every rank."""
    specs: list[TensorSpec] = []
    offset = 0
    for name, parameter in published(model):
        num_bytes = parameter.numel() * DTYPES[dtype].itemsize
        specs.append(TensorSpec(name, dtype, tuple(parameter.shape), offset, num_bytes))
        offset += num_bytes
    return tuple(specs)


@torch.no_grad()
def gather(model: nn.Module, specs: Sequence[TensorSpec], memory: mmap.mmap | None) -> None:
    """Write the parameters into `memory`. Collective: call on all ranks; only rank 0 has memory.

    One tensor at a time is whole, in the publish dtype, so the peak is that of the largest tensor.
    """
    for spec, (_, parameter) in zip(specs, published(model), strict=True):
        whole: Tensor = parameter.detach()
        if isinstance(whole, DTensor) and whole.device_mesh.size() == 1:
            whole = whole.to_local()  # all of it; torch takes five times as long to find that out
        whole = whole.to(DTYPES[spec.dtype])
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if memory is not None:
            count = whole.numel()
            flat = torch.frombuffer(
                memory, dtype=DTYPES[spec.dtype], count=count, offset=spec.offset
            )
            flat.copy_(whole.reshape(-1))


class WeightPublisher:
    """The learner's side of the weight plane: rank 0 owns slots and sidecar, others gather.

    Args:
        model: The model whose shapes are published from now on.
        run: For name, folder and publish dtype.
        settings: Endpoint and deadlines.
        rank: Of this process.
        keys: Folder with `learner.key`.
        probe_ids: Fixed tokens that actors check their engine with after each update, at least 2.
        point: Puts the pointer to the newest version where actors find it. May raise `LostLineage`.
        probe: Computes the learner's log-probs of `probe_ids`. Collective, as `publish` is.
    """

    def __init__(
        self,
        model: nn.Module,
        run: RunSettings,
        settings: LearnerSettings,
        *,
        rank: int,
        keys: Path,
        probe_ids: Sequence[int],
        point: Callable[[Publication], None],
        probe: ProbeFunction,
    ) -> None:
        self._specs = layout(model, run.dtype)
        self._num_bytes = self._specs[-1].offset + self._specs[-1].num_bytes
        self._probe_ids = tuple(probe_ids)
        self._probe = probe
        self._threads = settings.threads
        self._front = (
            _Front(run, settings, keys=keys, num_bytes=self._num_bytes, point=point)
            if rank == 0
            else None
        )

    def publish(
        self,
        model: nn.Module,
        version: PolicyVersion,
        *,
        free: Callable[[], None] = lambda: None,
    ) -> WeightManifest | None:
        """Gather, seal and announce these weights. Collective; returns the manifest on rank 0.

        Args:
            model: Whose weights these are.
            version: Their name.
            free: Called when the model may change again, before bytes are digested and announced.

        Raises:
            LostLineage: a newer learner has taken the run over.
            WeightsError: the publisher process keeps dying.
        """
        began = time.monotonic()
        front = self._front
        slot = front.acquire() if front is not None else -1
        memory = front.memories[slot] if front is not None else None
        gather(model, self._specs, memory)
        logprobs = self._probe(model, self._probe_ids)
        held_s = time.monotonic() - began
        free()
        if front is None or memory is None:
            return None
        manifest = WeightManifest(
            version=version,
            digest=digest_of([memory], threads=self._threads),
            checksum=checksum_of(memory),
            num_bytes=self._num_bytes,
            tensors=self._specs,
            probe=Probe(self._probe_ids, tuple(logprobs)),
        )
        # First, so that no version is ever seen that is not written down.
        front.log.sealed(manifest, held_s=held_s)
        front.announce(slot, manifest)
        return manifest

    def close(self) -> None:
        """End the sidecar and free the shared memory."""
        if self._front is not None:
            self._front.close()


class _Front:
    """What rank 0 has beside the gather: slots, their mappings, the sidecar, the pointer."""

    def __init__(
        self,
        run: RunSettings,
        settings: LearnerSettings,
        *,
        keys: Path,
        num_bytes: int,
        point: Callable[[Publication], None],
    ) -> None:
        self._point = point
        self._public_key = load_public(keys, "learner").decode()
        if settings.weight_store is not None:
            WeightStore(settings.weight_store, run.name)  # a wrong URL is the learner's to report
        self.log = WeightLog(run.folder)
        self._pointed: Publication | None = None
        self._lock = threading.Lock()  # training thread against the one that watches the sidecar
        self._folder = SharedFolder(
            "slots", num_bytes=NUM_SLOTS * num_bytes, fallback=(run.folder / "shared").resolve()
        )
        self._slots = Slots(self._folder.path)
        self.memories = [self._map(index, num_bytes) for index in range(NUM_SLOTS)]
        self.sidecar = Sidecar(
            PublisherSettings(
                run=run.name,
                slots=self._folder.path,
                keys=keys.resolve(),
                endpoint=settings.publisher_endpoint,
                broadcast=settings.broadcast,
                join_s=settings.broadcast_join_s,
                send_s=settings.broadcast_send_s,
                use_cuda=settings.device != "cpu",
                sparse=settings.sparse_weights,
                store=settings.weight_store,
            ),
            on_death=self._reclaim,
            on_line=self._heard,
        )
        self.sidecar.start()

    def acquire(self) -> int:
        with self._lock:
            return self._slots.acquire()

    def announce(self, slot: int, manifest: WeightManifest) -> None:
        """Seal the slot, wake the sidecar, and say in the store where the version is."""
        self.sidecar.check()
        with self._lock:
            self._slots.seal(slot, manifest)
        self.sidecar.wake()
        self._pointed = Publication(
            version=manifest.version,
            digest=manifest.digest,
            endpoint=self.sidecar.endpoint,
            public_key=self._public_key,
        )
        self._point(self._pointed)

    def close(self) -> None:
        self.sidecar.close()
        self._folder.close()

    def _map(self, index: int, num_bytes: int) -> mmap.mmap:
        path = self._folder.create(self._slots.path(index, "free").name, num_bytes)
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), num_bytes)

    def _heard(self, line: dict[str, object]) -> None:
        """Take a line of the sidecar, in the watching thread."""
        if line.pop("event") == "sent":
            self.log.delivered(convert(line, Sent))
            return
        pointed = self._pointed
        if pointed is not None and pointed.endpoint != line["endpoint"]:
            try:
                self._point(structs.replace(pointed, endpoint=str(line["endpoint"])))
            except StoreError as error:
                log.warning("new publisher not pointed to", reason=str(error))  # publish() will

    def _reclaim(self) -> None:
        with self._lock:
            self._slots.reclaim()
