"""The process group of the learner: rank, device, and communication between ranks.

Ranks exchange bytes and sums, never pickles. Control messages go over gloo on every machine, so
that waiting for a batch never occupies a GPU. A group that Nyala started itself meets through a
file and talks over loopback, or, on several machines, through a store of rank 0 on their network;
under an external `torchrun`, RANK, WORLD_SIZE and MASTER_ADDR are taken as they are. A rank that is
alone has groups without a transport, so it listens nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # pyright: ignore[reportUnusedImport] - registers
from torch import Tensor
from torch._C._distributed_c10d import TCPStore  # re-exported, but not for type checkers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from broker.weights.group_thread import closed_to_strangers
from configs.errors import SettingsError
from configs.machine import gpu_left_out
from configs.settings import ParallelSettings
from configs.validation.learner import Layout, layout_of

from .cpu import keep_freed_memory
from .rendezvous import RENDEZVOUS_ADDRESS, RENDEZVOUS_FILE, RENDEZVOUS_SOCKET
from .sequence_parallel import ALONE, SequenceGroup
from .tensor_parallel import UNDIVIDED, TensorGroup

BACKGROUND_TIMEOUT = timedelta(hours=1)
"""Timeout of the thread that saves checkpoints: disks of ranks may differ in speed."""
DEFAULT_TIMEOUT_S = 600.0
"""Default of `learner.collective_timeout_s`."""
BACKEND_ALONE = "fake"
"""Torch's backend without a transport, and the only one that listens nowhere. Its collectives copy
this rank's input to the output: with one rank that is what each of them means."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those of the learner."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    """Ranks over which weights are sharded; of two dimensions, the first has copies of them."""
    control: dist.ProcessGroup
    """Group of gloo on the CPU; with one rank it has no transport."""
    background: dist.ProcessGroup
    """A second such group, for another thread: collectives of two threads must not mix."""
    sequence: SequenceGroup = ALONE
    """Ranks that share each microbatch with this one."""
    tensor: TensorGroup = UNDIVIDED
    """Ranks that have the other parts of each matrix."""

    @property
    def in_background(self) -> Ranks:
        """The same ranks, as the thread that saves checkpoints uses them."""
        return replace(self, control=self.background)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which talks to the store and writes the files of the run."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """This rank's place among those with different microbatches."""
        return self.rank // (self.sequence.size * self.tensor.size)

    @property
    def data_size(self) -> int:
        """Number of ranks with different microbatches."""
        return self.size // (self.sequence.size * self.tensor.size)

    def broadcast(self, message: bytes | None) -> bytes:
        """Send rank 0's bytes to all, and return them; the other ranks pass None. Collective."""
        if self.size == 1:
            assert message is not None
            return message
        length = torch.tensor([0 if message is None else len(message)])
        dist.broadcast(length, src=0, group=self.control)
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if message:
            buffer = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if int(length):
            dist.broadcast(buffer, src=0, group=self.control)
        return buffer.numpy().tobytes()

    def gather(self, message: bytes) -> list[bytes]:
        """Exchange one message of each rank; every rank gets all, in their order. Collective."""
        if self.size == 1:
            return [message]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(message)]), group=self.control)
        longest = max(int(length) for length in lengths)
        padded = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8)
        messages = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(messages, padded, group=self.control)
        return [
            all_of_it.numpy().tobytes()[: int(length)]
            for all_of_it, length in zip(messages, lengths, strict=True)
        ]

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over ranks, on the CPU; of ranks with the same microbatch one counts.

        Collective.
        """
        is_first = self.sequence.rank == self.tensor.rank == 0
        counted = values if is_first else torch.zeros_like(values)
        return self._reduce(counted, dist.ReduceOp.SUM)

    def maximum(self, values: Tensor) -> Tensor:
        """Take the maximum over all ranks, element by element, on the CPU. Collective."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        self.sum(torch.zeros(1))

    def destroy_process_group(self) -> None:
        """End the process group."""
        dist.destroy_process_group()

    def _reduce(self, values: Tensor, operator: dist.ReduceOp.RedOpType) -> Tensor:
        reduced = values.detach().cpu().clone()
        if self.size > 1:
            dist.all_reduce(reduced, op=operator, group=self.control)
        return reduced


def join(
    device: str,
    *,
    threads: int,
    parallel: ParallelSettings | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Ranks:
    """Join the process group that the environment describes; a group of one if it describes none.

    Waits for the other ranks. Sets this process's GPU, or on a CPU torch's threads and how memory
    is kept (`cpu.py`).

    Args:
        device: `auto`, `cpu` or `cuda`.
        threads: Threads of torch on a CPU.
        parallel: Groups of ranks; None = the default.
        timeout_s: Longest wait in a collective.

    Raises:
        SettingsError: Torch sees no GPU for `device`, or the ranks cannot be grouped so.
        RuntimeError: The other ranks did not come within `timeout_s`; torch's own error.
    """
    kind = _kind(device)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(threads)
        keep_freed_memory()

    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    layout = layout_of(parallel or ParallelSettings(), size)
    timeout = timedelta(seconds=timeout_s)
    with closed_to_strangers():
        _init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", rank, size, timeout)
        backend = BACKEND_ALONE if size == 1 else "gloo"
        control = dist.new_group(backend=backend, timeout=timeout)
        background = dist.new_group(backend=backend, timeout=BACKGROUND_TIMEOUT)
    assert isinstance(control, dist.ProcessGroup)  # this rank is a member
    assert isinstance(background, dist.ProcessGroup)
    # NCCL connects its ranks as it needs them.
    with closed_to_strangers() if kind == "cpu" else nullcontext():
        mesh, sequence, tensor = arrange(layout, kind, rank=rank, timeout=timeout)
    return Ranks(
        rank=rank,
        size=size,
        device=torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu"),
        mesh=mesh,
        sequence=sequence,
        tensor=tensor,
        control=control,
        background=background,
    )


def _kind(device: str) -> str:
    """Return the type of device to train on; only `cpu` leaves a GPU unused."""
    if device == "cpu" or torch.cuda.is_available():
        return "cpu" if device == "cpu" else "cuda"
    left_out = gpu_left_out(device, torch.version.cuda)
    if left_out is not None:
        raise SettingsError(left_out)
    if device == "cuda":
        raise SettingsError(
            "learner.device must be cpu or auto on this machine, got cuda; torch sees no GPU: set "
            "it to auto, or mend the driver (`nvidia-smi`)"
        )
    return "cpu"


def arrange(
    layout: Layout, kind: str, *, rank: int, timeout: timedelta
) -> tuple[DeviceMesh, SequenceGroup, TensorGroup]:
    """Group the ranks; all of them must call it.

    Neighbours divide matrices, share microbatches and shard one copy of the weights, in this
    order, so that these exchanges stay within a machine where they can.
    """
    alike = layout.replicate * layout.shard
    table = torch.arange(alike * layout.tensor).view(layout.replicate, layout.shard, layout.tensor)
    mesh, tensor = _meshes(layout, kind, table, rank=rank, timeout=timeout)
    if layout.sequence == 1:
        return mesh, ALONE, tensor
    neighbours = table.view(-1, layout.sequence, layout.tensor).transpose(1, 2).flatten(0, 1)
    group = _own_group(neighbours.tolist(), timeout)
    place = rank // layout.tensor % layout.sequence
    return mesh, SequenceGroup(place, layout.sequence, group), tensor


def _meshes(
    layout: Layout, kind: str, table: Tensor, *, rank: int, timeout: timedelta
) -> tuple[DeviceMesh, TensorGroup]:
    """Make the mesh over which weights are sharded, and the group that divides matrices."""
    sizes = {"replicate": layout.replicate, "shard": layout.shard, "tensor": layout.tensor}
    if layout.replicate == layout.tensor == 1:
        return init_device_mesh(kind, (layout.shard,)), UNDIVIDED
    names = tuple(name for name, size in sizes.items() if name == "shard" or size > 1)
    table = table.view([sizes[name] for name in names])
    groups = [
        _own_group(table.movedim(dimension, -1).reshape(-1, sizes[name]).tolist(), timeout)
        for dimension, name in enumerate(names)
    ]
    mesh = DeviceMesh.from_group(groups, kind, mesh=table, mesh_dim_names=names)
    if layout.tensor == 1:
        return mesh, UNDIVIDED
    return mesh[names[:-1]], TensorGroup(rank % layout.tensor, layout.tensor, mesh["tensor"])


def _own_group(members: Sequence[list[int]], timeout: timedelta) -> dist.ProcessGroup:
    """Make groups of ranks, and return the one that this rank is in."""
    group, _ = dist.new_subgroups_by_enumeration([*members], timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _init_process_group(backend: str, rank: int, size: int, timeout: timedelta) -> None:
    file, address = os.environ.get(RENDEZVOUS_FILE), os.environ.get(RENDEZVOUS_ADDRESS)
    meets: dict[str, Any]
    if size == 1:
        backend, meets = BACKEND_ALONE, {"store": dist.HashStore()}  # type: ignore[attr-defined]
    elif file:
        meets = {"init_method": f"file://{file}"}
    elif address:
        meets = {"store": _store_of_rank_zero(address, timeout)}
    else:
        meets = {"init_method": "env://"}
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout, **meets)


def _store_of_rank_zero(address: str, timeout: timedelta) -> TCPStore:
    """Open or reach the store of several machines; by itself it would listen on every interface."""
    host, _, port = address.rpartition(":")
    listener = os.environ.get(RENDEZVOUS_SOCKET)
    return TCPStore(
        host,
        int(port),
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else int(listener),
    )
