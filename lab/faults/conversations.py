"""Faults beside live agents: of their host, of their process, and of an actor that answers them."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import configs
from lab.actor_fleet import descendants
from lab.fault_case import Fault, FaultCase
from lab.faults.processes import kill, kill_actor, send

HOST = "agents"
FILES = Path(configs.__file__).parent / "agent"
PROGRAM = str(FILES / "swap.py")
OVERRIDES = (
    "run.environment=agent",
    f"run.environment_settings={{path: {FILES / 'tasks.jsonl'}, prompt: task}}",
    "run.max_prompt_tokens=64",
    f"agents.command=[python, {PROGRAM}]",
    "agents.serves_many=true",
    "agents.max_conversations=64",
)
"""Settings of a run whose policy an agent of `configs/agent/` asks; all of it in one process."""


@contextmanager
def with_agents(_: Path) -> Iterator[Mapping[str, str]]:
    """Mark runs with live agents, which need nothing but their settings."""
    yield {}


def kill_agents(case: FaultCase) -> None:
    """Kill the process of all agents; their conversations fail, and the host starts another."""
    case.choose()
    case.until(lambda: _agents(case), "a process of the agents")
    pids = _agents(case)
    case.follow()
    case.inject(kill(pids))
    case.recover()
    case.until(lambda: set(_agents(case)) - set(pids), "another process of the agents")


def kill_host(case: FaultCase) -> None:
    """Kill the host, and so its agents; its tickets expire, and its conversations are lost."""
    case.choose()
    _lose_conversations(case)
    case.inject(kill(case.run.pids(HOST)), case.restarted(HOST))
    case.recover()
    case.until(lambda: case.run.pids(HOST), "a host of agents")


def stop_host(case: FaultCase) -> None:
    """Stop the host for longer than its tickets last; then it wakes up and goes on."""
    case.choose()
    (pid,) = case.run.pids(HOST)
    _lose_conversations(case)
    case.inject(send(pid, signal.SIGSTOP), lambda: _num_hosted(case) == 0)
    case.until(lambda: _num_hosted(case) == 0, "the end of the host's tickets")
    case.lift(send(pid, signal.SIGCONT))
    case.recover()
    case.until(lambda: _num_hosted(case) > 0, "further conversations of the host")


def _lose_conversations(case: FaultCase) -> None:
    """Say what a fault costs; tokens that are kept or lost are not those of the same agents."""
    case.remark = f"{_num_hosted(case)} conversations lost"


def _num_hosted(case: FaultCase) -> int:
    return case.run.stats().hosted


def _agents(case: FaultCase) -> list[int]:
    """Return the process that holds the conversations; those that keep it name it as well."""
    below = [item for host in case.run.pids(HOST) for item in descendants(host).items()]
    return [pid for pid, words in below if words[1:] == [PROGRAM]]


FAULTS = tuple(
    Fault(name, what, act, place=with_agents, overrides=OVERRIDES)
    for name, what, act in (
        ("agents-kill", "process of live agents killed", kill_agents),
        ("host-kill", "host of live agents killed", kill_host),
        ("host-stop", "host of live agents stopped for longer than its tickets last", stop_host),
        ("agents-actor-kill", "actor killed that live agents ask", kill_actor),
    )
)
