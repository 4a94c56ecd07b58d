"""Failover: the address of Redis passes to a replica that had not received the last writes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from buffer.admin import open_port
from configs.secrets import write_secret
from console.chaos.fault import Fault
from console.chaos.fault_case import FaultCase
from console.run.redis_server import HOST, free_port

LAG_S = 0.7
SYNCHRONISED = "sync: Finished with success"


@contextmanager
def _replica(case: FaultCase) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Let a second server follow the run's; yields it and its folder."""
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
    """True once a replica has all that was written before it, and follows write by write."""
    if SYNCHRONISED not in (folder / "log").read_text(encoding="utf-8"):
        return False
    is_rewriting = any(folder.rglob("temp-*"))
    return not is_rewriting and any(log.stat().st_size for log in folder.rglob("*incr.aof"))


def fail_over(case: FaultCase) -> None:
    """The primary is gone; its replica, under another id, lacks what was acknowledged last."""
    with _replica(case) as (replica, copy):
        case.choose()
        step = case.run.step
        replica.kill()  # what it has received is in its files
        replica.wait()
        case.run.sleep(LAG_S)
        case.run.until(lambda: case.run.step > step, "batches that the replica lacks")
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


FAULTS = (Fault("redis-failover", f"failover of Redis to a replica {LAG_S:g} s behind", fail_over),)
