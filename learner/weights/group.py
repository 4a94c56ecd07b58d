"""The sending end of a weight group, in the publisher: a torch process group of its own, rank 0.

Not torch's default group: that one belongs to FSDP2, and no actor may be able to hang it. The
store listens on one address only, and so does gloo; NCCL chooses interfaces and ports itself. None
of them authenticates, so groups are for a trusted network (`learner.broadcast: false` elsewhere).
Every function blocks and belongs in a `GroupThread`.

Not thread-safe, and of no use after an exception: gloo kills the process of a receiver whose stream
is out of step, so a group with any doubt about it is closed and never sent to again.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import socket
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import Store, TCPStore  # re-exported, but not for type checkers
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from broker.protocol.weight_messages import BUCKETS_IN_FLIGHT
from broker.weights.group_thread import answer_no_more, closed_to_strangers

BACKLOG = 128
DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Backend -> the device that it sends from."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Parameters of the group of one weight epoch."""

    backend: str
    """`gloo` or `nccl`."""
    host: str
    size: int
    join_s: float


def can_nccl() -> bool:
    """Return whether this process could be rank 0 of an NCCL group."""
    return torch.cuda.is_available() and distributed.is_nccl_available()


def listen(host: str, ports: tuple[int, int] | None = None) -> socket.socket:
    """Open the socket of a group's store: TCPStore by itself would listen on every interface.

    Args:
        host: Address to listen on.
        ports: First and last port to choose from; None = any.

    Raises:
        OSError: No port is free, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        # A group that has ended leaves its port waiting for a minute.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return listener
    raise OSError(
        f"learner.broadcast_ports must have a free port, got {first} to {last}, all in use; "
        f"name more of them"
    )


class SendingGroup:
    """Rank 0 of a weight group.

    With gloo it is made once all members have joined, or raises torch's error after `join_s`. With
    NCCL the members join at the first broadcast; variables `TORCH_NCCL_...` of this process that
    are not set are set to bound that.
    """

    def __init__(self, plan: GroupPlan, listener: socket.socket) -> None:
        timeout = timedelta(seconds=plan.join_s)
        port = listener.getsockname()[1]
        door = listener.dup()
        self._store: TCPStore | None = TCPStore(
            plan.host,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._device = DEVICES[plan.backend]
        self._can_abort = plan.backend == "nccl"
        with door, closed_to_strangers():
            self._group: Any = _open(self._store, plan, timeout)
            if plan.backend == "gloo":  # NCCL's members meet at the first broadcast
                answer_no_more(door)

    def send(self, memory: mmap.mmap | bytearray, *, bucket_bytes: int, send_s: float) -> None:
        """Broadcast these bytes in buckets. A return does not mean that they have arrived.

        Raises:
            RuntimeError: A member died, or `send_s` passed.
        """
        deadline = time.monotonic() + send_s
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        under_way: deque[Any] = deque()
        for bucket in flat.split(bucket_bytes):
            if len(under_way) == BUCKETS_IN_FLIGHT:
                under_way.popleft().wait(_left(deadline))
            options = BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            options.timeout = _left(deadline)
            under_way.append(self._group.broadcast([bucket.to(self._device)], options))
        for work in under_way:
            work.wait(_left(deadline))
        if self._device == "cuda":
            torch.cuda.synchronize()

    def abort(self) -> None:
        """End the collective under way, from another thread; gloo's ends at its deadline."""
        group = self._group
        if self._can_abort and group is not None:
            group.abort()

    def close(self) -> None:
        """Close all connections, which wakes members that still wait."""
        self.abort()
        self._group = self._store = None


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _open(store: Store, plan: GroupPlan, timeout: timedelta) -> Any:
    """Make the group object itself: torch's stubs have neither its options nor its methods."""
    if plan.backend == "nccl":
        # By default a timeout of NCCL would end this whole process.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        # The communicator is made by the first broadcast. A blocking one would wait for ever for a
        # member that died on its way there; this one has a deadline, and can be aborted.
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(plan.join_s)))
        nccl: Any = distributed.ProcessGroupNCCL
        of_nccl = nccl.Options()
        of_nccl.config.blocking = 0
        of_nccl._timeout = timeout
        return nccl(store, 0, plan.size, of_nccl)
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=plan.host)]
    options._timeout = timeout
    options._threads = BUCKETS_IN_FLIGHT
    return gloo(store, 0, plan.size, options)
