"""Several actors of one machine: started together, restarted on failure, drained together.

    start all ──▶ watch ──▶ all have drained: the run has ended           exit code 0
                    │  └──▶ one cannot be kept up: the others drain       1, or 2 for settings
                    └─────▶ Ctrl-C, SIGTERM: all drain                    `actors.exit_when_told`
                              └──▶ once more: all end at once             130

Waits for nothing but these. The processes are supervised as `nyala up` does it, without Redis: the
leases of an actor that dies go to others when the broker has missed it for long enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from configs.settings import Settings
from console.display.stages import Stages
from console.run.process import Command, Process
from console.run.process_guard import ProcessGuard
from console.run.restart_policy import SETTINGS_ERROR, RestartPolicy
from console.run.supervisor import (
    SUPERVISE_EVERY_S,
    Outcome,
    Supervisor,
    sigterm_as_interrupt,
)

FAILED = 1
STOPPED = 130  # what shells give to Ctrl-C
ENDING_S = 20.0
"""Beyond `actors.drain_s`: taking leave, and the end of engine and rewards (docs/fleet.md)."""


def run_group(commands: Sequence[Command], settings: Settings, say: Callable[[str], None]) -> int:
    """Start, watch, drain; return the exit code."""
    grace_s = settings.actors.drain_s + ENDING_S
    guard = ProcessGuard(grace_s=grace_s)
    processes = [Process(command, guard) for command in commands]
    stages = Stages({command.name: command.log for command in commands})
    supervisor = Supervisor(
        processes,
        RestartPolicy(settings.console.max_restarts, exit_when_told=settings.actors.exit_when_told),
        is_finished=lambda: False,
        log=say,
        last_error=stages.take_error,
    )
    try:
        with sigterm_as_interrupt():
            return _watch(supervisor, commands, settings, say, grace_s)
    finally:
        guard.close()


def _watch(
    supervisor: Supervisor,
    commands: Sequence[Command],
    settings: Settings,
    say: Callable[[str], None],
    grace_s: float,
) -> int:
    code = settings.actors.exit_when_told
    try:
        supervisor.start()
        for command in commands:
            say(f"{_described(command)}; its log is {command.log}")
        outcome = _until_the_end(supervisor)
        if outcome is None:
            say("all actors have drained: the run has ended")
            return 0
        say(f"{outcome.reason}: {outcome.error or 'it ended without a word'}")
        code = SETTINGS_ERROR if outcome.code == SETTINGS_ERROR else FAILED
    except KeyboardInterrupt:
        say("the actors drain; once more ends them at once")
    try:
        killed = supervisor.stop(timeout_s=grace_s)
    except KeyboardInterrupt:
        supervisor.kill()
        return STOPPED
    if killed:
        say(f"had to be killed: {', '.join(killed)}")
    return code


def _until_the_end(supervisor: Supervisor) -> Outcome | None:
    """Return what failed; None once all have drained."""
    while not supervisor.is_over:
        outcome = supervisor.tick()
        if outcome is not None:
            return outcome
        time.sleep(SUPERVISE_EVERY_S)
    return None


def _described(command: Command) -> str:
    cards = command.environment.get("CUDA_VISIBLE_DEVICES")
    return f"{command.name} on {'GPU ' + cards if cards else 'the CPU'}"
