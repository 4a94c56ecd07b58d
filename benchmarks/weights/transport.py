"""Lower bounds of a transfer: `memcpy`, and one `torch.distributed.broadcast` of all bytes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch import distributed

from benchmarks.weights.ring import FORKS
from broker.protocol.manifest import digest_of
from lab.faults.network import SecondNetwork, enter


def memcpy(num_bytes: int, *, passes: int) -> list[float]:
    """Copy a buffer that has been touched into another; returns seconds."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    target = source.clone()
    return [_timed(lambda: target.copy_(source)) for _ in range(passes)]


def digest(num_bytes: int, *, passes: int) -> list[float]:
    """Digest a buffer on one thread; returns seconds."""
    source = memoryview(bytearray(num_bytes))
    return [_timed(lambda: digest_of([source])) for _ in range(passes)]


def raw_broadcast(
    num_bytes: int, *, passes: int, network: SecondNetwork | None = None
) -> list[float]:
    """Broadcast one flat buffer to one receiver over gloo; returns seconds until it has it.

    Args:
        num_bytes: Of the buffer.
        passes: How often.
        network: Where the receiver is; None = in ours.
    """
    ours, theirs = FORKS.Pipe()
    host = "127.0.0.1" if network is None else network.here
    with socket.create_server((host, 0)) as free:
        address = f"tcp://{host}:{free.getsockname()[1]}"
    ranks = [
        FORKS.Process(
            target=_rank, args=(rank, address, (num_bytes, passes), network, theirs), daemon=True
        )
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    assert ours.poll(120.0), "the raw broadcast did not end"
    seconds: list[float] = ours.recv()
    for rank in ranks:
        rank.join(30.0)
    return seconds


def _rank(
    rank: int,
    address: str,
    shape: tuple[int, int],
    network: SecondNetwork | None,
    pipe: Connection,
) -> None:
    num_bytes, passes = shape
    if network is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = network.far if rank else network.near
        if rank:
            enter(network.name)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=address,
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    flat, seconds = torch.ones(num_bytes, dtype=torch.uint8), []
    for _ in range(passes + 1):  # the first one touches memory and opens connections
        distributed.barrier()
        began = time.perf_counter()
        distributed.broadcast(flat, 0)
        distributed.barrier()
        seconds.append(time.perf_counter() - began)
    distributed.destroy_process_group()
    if rank == 0:
        pipe.send(seconds[1:])


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
