"""A real actor against the bare engine, in turns on one and the same core.

    stopped <--SIGSTOP, SIGCONT--> actor    broker, Redis, sink: the other cores
    waiting <------stdin, stdout-> bare engine, bare core

The bare engine is vLLM's `LLMEngine`; the bare core is the actor's own stepper, which is all that
an actor could reach if leases, episodes and records took no time.

The actor's tokens are those in the records that reach the sink, which rests while a window is open:
two cores of a virtual machine are often the two threads of one, where a busy neighbour halves what
a core does in a second of its time.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.support.machine import ProcessTree, actor_core, other_cores, pinned
from benchmarks.support.sink import Sink
from benchmarks.support.workload import THROUGHPUT, Workload, environment, make_model
from buffer.record.episode import Episode
from configs.loader import load
from configs.settings import Settings
from console.run.plan import commands, prepare, redis_command
from console.run.process import Process
from console.run.process_guard import ProcessGuard
from console.run.redis_server import wait_until_ready
from console.run.run_folder import RunFolder

PATIENT = (
    "run.max_policy_lag=50000",  # one version of the weights for ever
    "buffer.maxmemory_mb=16384",  # a bound, not a reservation: what such a lag could hold
    "buffer.on_stale=train",
    "broker.lease_timeout_s=600.0",  # a stopped actor is not a dead one
    "broker.heartbeat_timeout_s=600.0",
)
WARM_UP_S = 1.5
TAIL_S = 60.0  # for the episodes that a window cuts off; they take a second on a quiet machine
START_S = 300.0


@dataclass(frozen=True, slots=True)
class Window:
    """What one arm did in one window."""

    tokens: float
    wall_s: float
    cpu_s: float
    """Of the engine's or the actor's process."""
    load: float
    """Of the machine afterwards."""
    tokens_per_episode: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / self.cpu_s


def compare(
    folder: Path,
    *,
    passes: int,
    window_s: float,
    say: Callable[[str], None],
    suffix: str = "",
    overrides: Sequence[str] = (),
) -> dict[str, dict[str, object]]:
    """Measure the arms in turns; returns medians and every window.

    Args:
        folder: Where the run and its model are kept.
        passes: Windows of each arm.
        window_s: How long one is.
        say: Told of progress.
        suffix: Of the names of the arms.
        overrides: Settings over those of all throughput arms.
    """
    workload = Workload(f"sink{suffix}", "demo.yaml", folder, (*THROUGHPUT, *PATIENT, *overrides))
    say("making the model")
    workload = replace(workload, model=make_model(workload))
    windows: dict[str, list[Window]] = {"engine": [], "core": []}
    actor_windows: list[Window] = []
    with ExitStack() as stack:
        settings = workload.settings()
        say("starting broker, actor, sink and the bare engine")
        actor, sink = stack.enter_context(ring(settings))
        bare = stack.enter_context(_bare_engine(RunFolder(settings.run.folder)))
        _until_ready(bare)
        until_episodes(sink)
        for number in range(passes):
            with _stopped(actor) as pause:
                for arm, made in windows.items():
                    made.append(_measure_bare(bare, arm, window_s))
            actor_windows.append(measure_actor(actor, sink, pause, window_s))
            rates = [round(w[-1].tokens_per_s) for w in (*windows.values(), actor_windows)]
            say("pass {}: engine {}, core {}, actor {} tokens/s".format(number + 1, *rates))
    return {
        **{f"bare_{arm}{suffix}": _summary(made) for arm, made in windows.items()},
        f"actor{suffix}": _summary(actor_windows),
    }


def tokens_within(
    episodes: Iterable[Episode], start: float, stop: float, *, pause: Sequence[float] = (0.0, 0.0)
) -> float:
    """Count the tokens made between two Unix times, each episode's evenly spread over its time.

    Args:
        episodes: All that were under way between the two.
        start: Unix seconds.
        stop: Unix seconds.
        pause: An earlier time in which none of them got anywhere; ends before `start`.
    """
    tokens = 0.0
    for episode in episodes:
        began = episode.started_at
        if began < pause[1]:
            began += pause[1] - max(began, pause[0])
        inside = min(episode.finished_at, stop) - max(began, start)
        share = max(0.0, inside) / max(episode.finished_at - began, 1e-9)
        tokens += len(episode.completion.token_ids) * share
    return tokens


def _measure_bare(bare: subprocess.Popen[str], arm: str, window_s: float) -> Window:
    assert bare.stdin is not None and bare.stdout is not None
    bare.stdin.write(f"{arm} {WARM_UP_S} {window_s}\n")
    bare.stdin.flush()
    return Window(**json.loads(bare.stdout.readline()), load=os.getloadavg()[0])


def measure_actor(actor: Process, sink: Sink, pause: Sequence[float], window_s: float) -> Window:
    assert actor.pid is not None
    process = ProcessTree(actor.pid)
    start = time.time() + WARM_UP_S
    stop = start + window_s
    time.sleep(max(0.0, start - time.time()))
    cpu_s = process.cpu_s()
    time.sleep(max(0.0, stop - time.time()))
    cpu_s = process.cpu_s() - cpu_s
    episodes: list[Episode] = []
    for batch in sink.batches(until=stop + TAIL_S):
        episodes += batch
        if min(episode.started_at for episode in batch) > stop:
            break
    tokens = tokens_within(episodes, start, stop, pause=pause)
    lengths = [len(episode.completion.token_ids) for episode in episodes]
    return Window(
        tokens=tokens,
        wall_s=window_s,
        cpu_s=cpu_s,
        load=os.getloadavg()[0],
        tokens_per_episode=statistics.mean(lengths),
    )


def _summary(windows: list[Window]) -> dict[str, object]:
    return {
        "tokens_per_s": round(statistics.median(w.tokens_per_s for w in windows), 1),
        "tokens_per_cpu_s": round(statistics.median(w.tokens_per_cpu_s for w in windows), 1),
        "windows": [
            {
                "tokens_per_s": round(w.tokens_per_s, 1),
                **{k: round(v, 3) for k, v in asdict(w).items()},
            }
            for w in windows
        ],
    }


@contextmanager
def ring(settings: Settings) -> Iterator[tuple[Process, Sink]]:
    """Start Redis, broker, one actor and the sink as `nyala up` would with a learner."""
    folder = RunFolder(settings.run.folder)
    server = prepare(settings, folder, redis_url=None)
    assert server is not None
    settings = load(folder.config)
    guard = ProcessGuard(grace_s=5.0)
    started: list[Process] = []
    try:
        with pinned(other_cores()):
            redis = Process(redis_command(server, folder, settings), guard)
            started.append(redis)
            redis.start()
            wait_until_ready(server.url, has_ended=lambda: redis.poll() is not None)
            by_role = {c.role: Process(c, guard) for c in commands(settings, folder)}
            by_role["broker"].start()
            started.append(by_role["broker"])
        with pinned(actor_core()):
            by_role["actor"].start()
            started.append(by_role["actor"])
        with pinned(other_cores()), Sink(settings) as sink:
            yield by_role["actor"], sink
    finally:
        for process in reversed(started):
            process.kill()
        guard.close()


@contextmanager
def _bare_engine(folder: RunFolder) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.ring.bare_engine", "--config", str(folder.config)]
    with folder.log("bare-engine").open("w") as log, pinned(actor_core()):
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(),
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _until_ready(bare: subprocess.Popen[str]) -> None:
    """Wait for the engine; whatever libraries print before is passed over."""
    assert bare.stdout is not None
    for line in bare.stdout:
        if line.strip() == "ready":
            return
    raise RuntimeError(f"the bare engine ended with {bare.wait()} before it was ready")


def until_episodes(sink: Sink) -> None:
    for _ in sink.batches(until=time.time() + START_S):
        return
    raise RuntimeError(f"no episode came within {START_S:g} s")


@contextmanager
def _stopped(process: Process) -> Iterator[list[float]]:
    """Hold a process up; the list has, in the end, when that began and ended, Unix seconds."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    times = [time.time()]
    try:
        yield times
    finally:
        times.append(time.time())
        os.kill(process.pid, signal.SIGCONT)
