"""Faults of storage: Redis, and the disks under it and under the checkpoints."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from buffer import operations
from buffer.admin import limit_memory, open_port
from configs.secrets import write_secret
from console.run.redis_server import HOST, free_port
from lab.fault_case import Fault, FaultCase

# --------------------------------------------------------------------------------------------------
# A small disk for Redis, where this user may mount one, and a way to fill it.

SIZE_MB = 512  # more than the log of a whole matrix
MOUNT_S = 10.0


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small disk in memory at a folder for the body; nothing if this user may not."""
    if disk_obstacle() is not None:
        yield
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m,mode=700", "tmpfs", str(folder))
    try:
        yield
    finally:
        _run("umount", "--lazy", str(folder))


def disk_obstacle() -> str | None:
    """Return why no such disk can be mounted, or None."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return "it needs root, to mount a small disk"
    return None


@contextmanager
def fill(folder: Path) -> Iterator[None]:
    """Leave no room on the disk of a folder while the body runs."""
    filler = folder / "filler"
    try:
        with filler.open("wb") as file:
            _take_all(file.fileno())
        yield
    finally:
        filler.unlink()


def _take_all(file: int) -> None:
    """Allocate all room in ever smaller pieces, because the disk is in use meanwhile."""
    room, size = os.fstatvfs(file), 0
    piece = room.f_bavail * room.f_frsize
    while piece >= room.f_frsize:
        try:
            os.posix_fallocate(file, size, piece)
            size += piece
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            piece //= 2


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=MOUNT_S, capture_output=True)


# --------------------------------------------------------------------------------------------------
# Faults of storage: Redis, and the disks under it and under the checkpoints.

STOPPED_S = 10.0
FULL_S = 5.0
REWIND_S = 1.5  # what a server that writes its log every second may lose, and a little more
TINY_FILE_BYTES = 4096  # less than any checkpoint's tensors
LEARNER_BACK_S = 90.0


def _pid(case: FaultCase) -> int:
    return case.run.pids("redis")[0]


def kill_redis(case: FaultCase) -> None:
    """Kill Redis, which loads its log again; all acknowledged writes are there."""
    case.choose()
    case.follow()
    case.inject(lambda: os.kill(_pid(case), signal.SIGKILL), case.restarted("redis"))
    case.recover()


def rewind_redis(case: FaultCase) -> None:
    """Cut the log of Redis, as after a loss of power: it lacks the last acknowledged writes."""
    case.choose()
    log = _append_only_log(case)
    size = log.stat().st_size
    step = case.run.step
    case.run.sleep(REWIND_S)
    case.run.until(lambda: case.run.step > step, "a batch that will be lost")
    case.follow()
    lost = log.stat().st_size - size

    def lose_power() -> None:
        os.kill(_pid(case), signal.SIGKILL)
        os.truncate(log, size)  # before `nyala up` starts it again, half a second later

    case.inject(lose_power, case.restarted("redis"))
    case.recover()
    case.remark = f"{lost / 1024:.0f} KiB of its log lost"


def stop_redis(case: FaultCase) -> None:
    """Stop Redis: no process ends because of that, and nothing expires."""
    case.choose()
    case.follow()
    pid = _pid(case)
    case.is_blind = True
    case.inject(lambda: os.kill(pid, signal.SIGSTOP), lambda: False)
    case.run.sleep(STOPPED_S)
    case.lift(lambda: os.kill(pid, signal.SIGCONT))
    case.recover()


def fill_redis(case: FaultCase) -> None:
    """Fill Redis to its memory limit, so that it refuses writes; leasing has to stop before."""
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
    """Fill the disk of Redis' log, so that Redis refuses every write until there is room."""
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
    """Limit the learner's files, so that no checkpoint fits; later batches are replayed."""
    case.follow()
    pid = case.run.pids("learner")[-1]
    limit = (TINY_FILE_BYTES, resource.RLIM_INFINITY)
    back = case.restarted("learner")
    case.inject(lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, limit) and None, back)
    case.until(back, "a new learner")  # it has no limit: the disk has room again
    case.lift(lambda: None)
    case.recover()


def _append_only_log(case: FaultCase) -> Path:
    """Return the log that Redis appends to; from version 7 on it is in a folder of its own."""
    return max(case.run.folder.redis.rglob("*.aof"), key=lambda path: path.stat().st_mtime)


def _broker_log(case: FaultCase) -> str:
    return case.run.folder.log("broker").read_text(encoding="utf-8")


def _redis_log(case: FaultCase) -> str:
    return case.run.folder.log("redis").read_text(encoding="utf-8")


def _restore(url: str, limit_bytes: int) -> None:
    limit_memory(url, limit_bytes)


def _no_recovery() -> str | None:
    if hasattr(operations, "reconcile"):
        return None
    return "this version has no recovery from a store that lost writes"


# --------------------------------------------------------------------------------------------------
# Failover: the address of Redis passes to a replica that had not received the last writes.

LAG_S = 0.7
SYNCHRONISED = "sync: Finished with success"


@contextmanager
def _replica(case: FaultCase) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start a replica of the run's server; yield its process and its folder."""
    run = case.run
    folder = run.folder.path.parent / "replica"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    text = (run.folder.redis / "redis.conf").read_text(encoding="utf-8")
    settings = dict(line.split(" ", 1) for line in text.splitlines() if line and line[0] != "#")
    port = urlsplit(run.url).port
    if port is None:  # it listens on a socket, and replicas need a port
        open_port(run.url, port := free_port(HOST))
    settings.pop("unixsocket", None)
    settings |= {
        "port": str(free_port(HOST)),
        "dir": f'"{folder}"',
        "replicaof": f"{HOST} {port}",
        "masterauth": settings["requirepass"],
    }
    lines = [f"{name} {value}\n" for name, value in settings.items()]
    write_secret(folder / "redis.conf", "".join(lines))
    binary = Path(f"/proc/{run.pids('redis')[0]}/exe").resolve()
    with (folder / "log").open("wb") as output:
        process = subprocess.Popen(
            (str(binary), str(folder / "redis.conf")), stdout=output, stderr=output
        )
    try:
        run.until(lambda: _is_in_step(folder), "a replica in step")
        yield process, folder
    finally:
        process.kill()
        process.wait()


def _is_in_step(folder: Path) -> bool:
    """Return whether a replica has all earlier writes, and follows write by write."""
    if SYNCHRONISED not in (folder / "log").read_text(encoding="utf-8"):
        return False
    is_rewriting = any(folder.rglob("temp-*"))
    return not is_rewriting and any(log.stat().st_size for log in folder.rglob("*incr.aof"))


def fail_over(case: FaultCase) -> None:
    """Replace the primary by its replica, which lacks the last acknowledged writes."""
    with _replica(case) as (replica, copy):
        case.choose()
        step = case.run.step
        replica.kill()  # what it has received is in its files
        replica.wait()
        case.run.sleep(LAG_S)
        case.run.until(lambda: case.run.step > step, "a batch that the replica lacks")
        case.follow()

        def switch() -> None:
            pid, folder = case.run.pids("redis")[0], case.run.folder.redis
            os.kill(pid, signal.SIGSTOP)  # from here on it acknowledges nothing
            for old in folder.glob("appendonly*"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            for new in copy.glob("appendonly*"):
                (shutil.copytree if new.is_dir() else shutil.copy2)(new, folder / new.name)
            os.kill(pid, signal.SIGKILL)  # `nyala up` starts the next one at the same address

        case.inject(switch, case.restarted("redis"))
        case.recover()


FAULTS = (
    Fault("redis-kill", "Redis killed", kill_redis),
    Fault("redis-rewind", "Redis loses its last writes (power loss)", rewind_redis, _no_recovery),
    Fault("redis-stop", f"Redis stopped for {STOPPED_S:g} s", stop_redis),
    Fault("redis-full", f"Redis out of memory for {FULL_S:g} s", fill_redis),
    Fault(
        "redis-disk-full",
        f"disk of Redis full for {FULL_S:g} s",
        fill_disk_of_redis,
        disk_obstacle,
    ),
    Fault("checkpoint-disk-full", "no room for a checkpoint", fill_disk_of_checkpoints),
    Fault("redis-failover", f"failover of Redis to a replica {LAG_S:g} s behind", fail_over),
)
