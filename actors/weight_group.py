"""The receiving end of a weight group: a torch process group of its own, beside vLLM's.

Listens only on the address from which this machine reaches the publisher. Every function blocks and
belongs into a `GroupThread`. Of no use after an exception.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import Store, TCPStore  # re-exported, but not for type checkers
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from broker.weights import Epoch


class ReceivingGroup:
    """One member of a weight group."""

    def __init__(self, epoch: Epoch) -> None:
        timeout = timedelta(seconds=epoch.join_s)
        self._store = TCPStore(epoch.host, epoch.port, is_master=False, timeout=timeout)
        self._is_cuda = epoch.backend == "nccl"
        self._group = _open(self._store, epoch, timeout)

    def receive(self, memory: mmap.mmap, *, bucket_bytes: int, send_s: float) -> None:
        """Fill `memory` with the bytes that rank 0 sends.

        Raises:
            RuntimeError: another member died, or `send_s` passed; the bytes are then a mixture.
        """
        deadline = time.monotonic() + send_s
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        for bucket in flat.split(bucket_bytes):
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 0.001))
            on_device = torch.empty_like(bucket, device="cuda") if self._is_cuda else bucket
            self._group.broadcast([on_device], options).wait(options.timeout)
            if self._is_cuda:
                bucket.copy_(on_device)

    def close(self) -> None:
        """Close all connections."""
        if self._is_cuda:
            self._group.abort()
        del self._group, self._store


def _open(store: Store, epoch: Epoch, timeout: timedelta) -> Any:
    """Make the group object itself: torch's stubs know neither its options nor its methods."""
    if epoch.backend == "nccl":
        # By default a timeout of NCCL would end this whole process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        nccl: Any = distributed.ProcessGroupNCCL
        return nccl(store, epoch.rank, epoch.size, timeout)
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=_local_address(epoch))]
    options._timeout = timeout
    options._threads = 1
    return gloo(store, epoch.rank, epoch.size, options)


def _local_address(epoch: Epoch) -> str:
    """Return the address of the interface that leads to the publisher; sends nothing."""
    family = socket.AF_INET6 if ":" in epoch.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((epoch.host, epoch.port))
        return str(probe.getsockname()[0])
