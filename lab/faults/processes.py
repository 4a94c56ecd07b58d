"""Faults of processes: killed, stopped, drained."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterable

from console.run.supervisor import ENGINE_DIED
from lab.actor_fleet import Actor, descendants
from lab.fault_case import Fault, FaultCase
from lab.live_run import ExpectationFailed

CORE = "EngineCore"  # in the title that vLLM gives the process
COMMIT_TRIES = 30  # checkpoints to stop behind: the window before the commit is a few milliseconds


def kill(pids: Iterable[int]) -> Callable[[], None]:
    """Return a function that kills these processes."""

    def act() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    return act


def send(pid: int, number: signal.Signals) -> Callable[[], None]:
    """Return a function that sends a signal."""
    return lambda: os.kill(pid, number)


def _kill_actors(case: FaultCase, victims: list[Actor]) -> None:
    for victim in victims:
        case.freeze(victim.pid)
    case.follow(victims)
    case.inject(kill([victim.pid for victim in victims]))
    case.run.fleet.refill()
    case.recover()


def kill_actor(case: FaultCase) -> None:
    """Kill one actor in the middle of its episodes."""
    _kill_actors(case, [case.choose()])


def kill_all_actors(case: FaultCase) -> None:
    """Kill all actors at once; new actors have to start their engines first."""
    case.choose()
    _kill_actors(case, list(case.run.fleet.actors))
    case.remark = "includes the start of new engines"


def stop_actor(case: FaultCase) -> None:
    """Stop an actor for longer than its leases last; then it wakes up and writes."""
    victim = case.choose()
    case.freeze(victim.pid)
    case.follow([victim])
    case.inject(lambda: None)
    case.until(lambda: not case.trace.open_ids, "another actor for its work")
    case.lift(send(victim.pid, signal.SIGCONT))
    case.pause(1.0)  # its old leases are refused
    case.recover()


def drain_actor(case: FaultCase) -> None:
    """Drain an actor, as before a spot machine is taken away."""
    victim = case.choose()
    case.follow([victim], is_orderly=True)
    case.inject(send(victim.pid, signal.SIGTERM))
    case.recover()
    case.until(lambda: victim.process.poll() is not None, "the end of the drained actor")
    case.run.fleet.refill()
    if victim.process.poll() != 0:
        case.remark = f"it ended with code {victim.process.poll()}"


def kill_engine_core(case: FaultCase) -> None:
    """Kill the process of an actor's vLLM core, as the kernel does when memory is full.

    Raises:
        ExpectationFailed: The actor does not end with the exit code of a lost engine.
    """
    fleet = case.run.fleet
    victim = fleet.add("actors.engine=vllm", "actors.in_process=false")
    try:
        case.run.until(fleet.all_serve, "a lease of the actor with vLLM")
        case.settle()
        case.choose([victim])
        cores = [pid for pid, words in descendants(victim.pid).items() if CORE in words[0]]
        case.freeze(victim.pid)
        case.follow([victim], is_orderly=True)
        case.inject(kill(cores))
        send(victim.pid, signal.SIGCONT)()
        case.recover()
        case.until(lambda: victim.process.poll() is not None, "the end of the actor")
    finally:
        fleet.remove(victim)
    if victim.process.poll() != ENGINE_DIED:
        raise ExpectationFailed(
            f"the actor must end with code {ENGINE_DIED}, got {victim.process.poll()}; look into "
            f"{case.run.folder.log(victim.process.name)}"
        )


def _no_vllm() -> str | None:
    return None if importlib.util.find_spec("vllm") else "vLLM is not installed"


def kill_broker(case: FaultCase) -> None:
    """Kill the broker, which has no state of its own."""
    case.choose()
    case.follow()
    case.inject(kill(case.run.pids("broker")), case.restarted("broker"))
    case.recover()


def stop_broker(case: FaultCase) -> None:
    """Stop the broker for longer than leases last."""
    case.choose()
    (pid,) = case.run.pids("broker")
    case.follow()
    case.inject(send(pid, signal.SIGSTOP))
    case.pause(2 * case.run.settings.broker.lease_timeout_s)
    case.lift(send(pid, signal.SIGCONT))
    case.recover()


def kill_learner(case: FaultCase) -> None:
    """Kill the learner between two checkpoints; sealed batches are trained again unchanged."""
    case.run.until(lambda: case.run.step > case.run.stats().committed_step, "uncommitted steps")
    case.choose()
    case.follow()
    case.inject(kill(case.run.pids("learner")[:1]), case.restarted("learner"))
    case.recover()


def kill_learner_before_commit(case: FaultCase) -> None:
    """Kill the learner with a checkpoint on disk whose commit the store lacks.

    After 30 checkpoints without that moment nothing is killed, and a remark says so.
    """
    case.follow()
    pid = case.run.pids("learner")[-1]
    for _ in range(COMMIT_TRIES):
        case.run.wait_for_checkpoint()
        case.freeze(pid)
        saved = int((case.run.folder.newest_checkpoint() or "-0").rpartition("-")[2])
        if case.run.stats().committed_step < saved:
            case.inject(kill(case.run.pids("learner")), case.restarted("learner"))
            case.recover()
            return
        os.kill(pid, signal.SIGCONT)
    case.remark = f"the window was not met in {COMMIT_TRIES} checkpoints"


def kill_learner_while_saving(case: FaultCase) -> None:
    """Kill the learner with half a checkpoint on disk.

    Raises:
        ExpectationFailed: It could not be stopped during one of 30 saves.
    """
    case.follow()
    pid = case.run.pids("learner")[-1]
    for _ in range(COMMIT_TRIES):
        case.run.wait_for_save()
        case.freeze(pid)
        if case.run.is_saving:
            case.inject(kill(case.run.pids("learner")), case.restarted("learner"))
            case.recover()
            return
        os.kill(pid, signal.SIGCONT)
    raise ExpectationFailed(
        f"the learner must be stopped during a save, got {COMMIT_TRIES} saves that had ended by "
        f"then; try again with a larger run.model, whose saves take longer"
    )


def kill_publisher(case: FaultCase) -> None:
    """Kill the publisher, during a broadcast or between two."""
    case.follow()
    case.inject(kill(case.run.pids("publisher")), case.restarted("publisher"))
    case.recover()


FAULTS = (
    Fault("actor-kill", "actor killed in mid-episode", kill_actor),
    Fault("actor-stop", "actor stopped for longer than its leases, then woken", stop_actor),
    Fault("actor-drain", "actor asked to leave (SIGTERM)", drain_actor),
    Fault("actors-kill-all", "all actors killed at once", kill_all_actors),
    Fault("core-kill", "process of vLLM's core killed", kill_engine_core, _no_vllm),
    Fault("broker-kill", "broker killed", kill_broker),
    Fault("broker-stop", "broker stopped for two lease timeouts", stop_broker),
    Fault("learner-kill", "learner killed between checkpoints", kill_learner),
    Fault(
        "learner-kill-before-commit",
        "learner killed between checkpoint and commit",
        kill_learner_before_commit,
    ),
    Fault("learner-kill-saving", "learner killed while it saves", kill_learner_while_saving),
    Fault("publisher-kill", "publisher of weights killed", kill_publisher),
)
