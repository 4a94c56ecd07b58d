"""The receiving end of a weight group: a torch process group of its own, beside vLLM's.

Over NCCL a bucket arrives in the memory of this member's card and goes on to the host at once,
where it is digested: beside the engine's own memory a card needs room for the buckets under way.

Gloo listens only on the address from which this machine reaches the publisher; NCCL chooses its
interface and ports itself. Making a group over NCCL sets variables of this process, so that an
error of NCCL does not end it. Every function blocks and belongs in a `GroupThread`. The group is of
no use after an exception.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import Store, TCPStore  # re-exported, but not for type checkers
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from broker.protocol.weight_messages import BUCKETS_IN_FLIGHT, Epoch
from broker.weights.group_thread import closed_to_strangers

DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Backend -> type of device that it receives on."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """One broadcast under way: the bytes that arrive together."""

    memory: memoryview
    on_host: torch.Tensor
    on_device: torch.Tensor
    work: Any


class ReceivingGroup:
    """One member of a weight group; made and used in one thread, but for `abort`.

    Making one waits for all members, and for NCCL chooses card and stream of the calling thread.

    Args:
        epoch: The group, and this member's rank.
        device: Card that a group of NCCL receives on; None = the first.

    Raises:
        RuntimeError: The group did not form within `epoch.join_s`.
    """

    def __init__(self, epoch: Epoch, *, device: str | None = None) -> None:
        timeout = timedelta(seconds=epoch.join_s)
        self._store: TCPStore | None = TCPStore(
            epoch.host, epoch.port, is_master=False, timeout=timeout
        )
        self._device = DEVICES[epoch.backend]
        if self._device == "cuda":
            # A thread begins on the first card, and on the stream that a process shares by default.
            torch.cuda.set_device(torch.device(device or "cuda:0"))
            torch.cuda.set_stream(torch.cuda.Stream())
        self._can_abort = epoch.backend == "nccl"
        with closed_to_strangers():
            self._group: Any = _open(self._store, epoch, timeout)

    def receive(
        self, memory: mmap.mmap, *, bucket_bytes: int, send_s: float
    ) -> Iterator[memoryview]:
        """Fill `memory` with the bytes that rank 0 sends; yields each bucket when it is whole.

        Args:
            memory: As long as the version.
            bucket_bytes: Bytes of one broadcast; the last may be shorter.
            send_s: Limit for all of the bytes, from the first step of the iterator on.

        Raises:
            RuntimeError: Another member died, or `send_s` passed; the bytes are then a mixture.
        """
        deadline = time.monotonic() + send_s
        whole = memoryview(memory)
        under_way: deque[_Bucket] = deque()
        for start in range(0, len(whole), bucket_bytes):
            if len(under_way) == BUCKETS_IN_FLIGHT:
                yield _wait_for_bucket(under_way.popleft(), deadline)
            under_way.append(self._begin_broadcast(whole[start : start + bucket_bytes], deadline))
        while under_way:
            yield _wait_for_bucket(under_way.popleft(), deadline)

    def _begin_broadcast(self, memory: memoryview, deadline: float) -> _Bucket:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = _time_left(deadline)
        on_host = torch.frombuffer(memory, dtype=torch.uint8)
        on_device = on_host
        if self._device != "cpu":
            on_device = torch.empty_like(on_host, device=self._device)
        work = self._group.broadcast([on_device], options)
        return _Bucket(memory, on_host, on_device, work)

    def abort(self) -> None:
        """End the collective under way, from another thread; gloo's ends at its deadline."""
        group = self._group
        if self._can_abort and group is not None:
            group.abort()

    def close(self) -> None:
        """Close all connections of the group."""
        self.abort()
        self._group = self._store = None


def _wait_for_bucket(bucket: _Bucket, deadline: float) -> memoryview:
    bucket.work.wait(_time_left(deadline))
    if bucket.on_device is not bucket.on_host:
        bucket.on_host.copy_(bucket.on_device)
    return bucket.memory


def _time_left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _open(store: Store, epoch: Epoch, timeout: timedelta) -> Any:
    """Make the group object itself: torch's stubs have neither its options nor its methods."""
    if epoch.backend == "nccl":
        # By default a timeout of NCCL would end this whole process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        # As at rank 0: a blocking communicator would wait for ever for one that died.
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(epoch.join_s)))
        nccl: Any = distributed.ProcessGroupNCCL
        of_nccl = nccl.Options()
        of_nccl.config.blocking = 0
        of_nccl._timeout = timeout
        return nccl(store, epoch.rank, epoch.size, of_nccl)
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_local_address(epoch))]
    options._timeout = timeout
    options._threads = BUCKETS_IN_FLIGHT
    return gloo(store, epoch.rank, epoch.size, options)


def _local_address(epoch: Epoch) -> str:
    """Return the address of the interface that leads to the publisher; sends nothing."""
    family = socket.AF_INET6 if ":" in epoch.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((epoch.host, epoch.port))
        return str(probe.getsockname()[0])
