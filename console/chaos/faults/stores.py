"""Faults of storage: Redis, and the disks under it and under the checkpoints."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import ExitStack
from pathlib import Path

from buffer import operations
from buffer.admin import limit_memory
from console.chaos.fault import Fault
from console.chaos.fault_case import FaultCase

from .disk import fill, is_own_disk

STOPPED_S = 10.0
FULL_S = 5.0
REWIND_S = 1.5  # what a server that writes its log every second may lose, and a little more
TINY_FILE_BYTES = 4096  # less than any checkpoint's tensors
LEARNER_BACK_S = 90.0


def _pid(case: FaultCase) -> int:
    return case.run.pids("redis")[0]


def kill_redis(case: FaultCase) -> None:
    """Redis dies and loads its log again; what it had acknowledged is there."""
    case.choose()
    case.follow()
    case.inject(lambda: os.kill(_pid(case), signal.SIGKILL), case.restarted("redis"))
    case.recover()


def rewind_redis(case: FaultCase) -> None:
    """The machine of Redis loses power: its log ends some moments earlier than its answers."""
    case.choose()
    log = _append_only_log(case)
    size = log.stat().st_size
    step = case.run.step
    case.run.sleep(REWIND_S)
    case.run.until(lambda: case.run.step > step, "batches that will be lost")
    case.follow()
    lost = log.stat().st_size - size

    def lose_power() -> None:
        os.kill(_pid(case), signal.SIGKILL)
        os.truncate(log, size)  # before `nyala up` starts it again, half a second later

    case.inject(lose_power, case.restarted("redis"))
    case.recover()
    case.remark = f"{lost / 1024:.0f} KiB of its log lost"


def stop_redis(case: FaultCase) -> None:
    """Redis hangs: no process dies of it, and nothing expires."""
    case.choose()
    case.follow()
    pid = _pid(case)
    case.is_blind = True
    case.inject(lambda: os.kill(pid, signal.SIGSTOP), lambda: False)
    case.run.sleep(STOPPED_S)
    case.lift(lambda: os.kill(pid, signal.SIGCONT))
    case.recover()


def fill_redis(case: FaultCase) -> None:
    """Redis reaches its memory limit and refuses; leasing has to stop before that."""
    case.choose()
    case.follow()
    used = case.run.store.run(operations.memory()).used_bytes
    before: list[int] = []
    size = len(_broker_log(case))
    case.inject(
        lambda: before.append(limit_memory(case.run.url, used)),
        lambda: "leasing paused" in _broker_log(case)[size:],
    )
    case.pause(FULL_S)
    case.lift(lambda: _restore(case.run.url, *before))
    case.recover()


def fill_disk_of_redis(case: FaultCase) -> None:
    """The disk under Redis' log is full: it refuses every write until there is room."""
    case.choose()
    case.follow()
    folder = case.run.folder.redis
    size = len(_redis_log(case))
    with ExitStack() as disk:
        case.inject(
            lambda: disk.enter_context(fill(folder)),
            lambda: "writing to the AOF file" in _redis_log(case)[size:],
        )
        case.pause(FULL_S)
    case.lift(lambda: None)
    case.recover()


def fill_disk_of_checkpoints(case: FaultCase) -> None:
    """The learner cannot write its checkpoint; the batches since the last one are replayed."""
    case.follow()
    pid = case.run.pids("learner")[-1]
    limit = (TINY_FILE_BYTES, resource.RLIM_INFINITY)
    back = case.restarted("learner")
    case.inject(lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, limit) and None, back)
    case.until(back, "a new learner")  # it has no limit: the disk has room again
    case.lift(lambda: None)
    case.recover()


def _append_only_log(case: FaultCase) -> Path:
    """Find the file that Redis appends to; from version 7 on it is in a folder of its own."""
    return max(case.run.folder.redis.rglob("*.aof"), key=lambda path: path.stat().st_mtime)


def _broker_log(case: FaultCase) -> str:
    return case.run.folder.log("broker").read_text(encoding="utf-8")


def _redis_log(case: FaultCase) -> str:
    return case.run.folder.log("redis").read_text(encoding="utf-8")


def _restore(url: str, limit_bytes: int) -> None:
    limit_memory(url, limit_bytes)


def _no_barrier() -> str | None:
    if hasattr(operations, "reconcile"):
        return None
    return "this version has no recovery from a store that lost writes"


FAULTS = (
    Fault("redis-kill", "Redis killed", kill_redis),
    Fault("redis-rewind", "Redis loses its last writes (power loss)", rewind_redis, _no_barrier),
    Fault("redis-stop", f"Redis stopped for {STOPPED_S:g} s", stop_redis),
    Fault("redis-full", f"Redis out of memory for {FULL_S:g} s", fill_redis),
    Fault(
        "redis-disk-full",
        f"disk of Redis full for {FULL_S:g} s",
        fill_disk_of_redis,
        is_own_disk,
    ),
    Fault("checkpoint-disk-full", "no room for a checkpoint", fill_disk_of_checkpoints),
)
