"""Live agents: many that wait, and what the door adds to a turn: `python -m benchmarks.agents`.

Real store, broker, host (`nyala agents --print`) with its door, actor's loop and tokenizer, each in
a process of its own; the engine is simulated. Bodies begin with 40 kB and grow with every turn.

    busy        256 conversations over 64 places in the engine, which call again at once
    waiting     the same, in turns with `busy`; each waits a second between two turns
    chat        one conversation of 30 turns, whose engine answers at once
    short_chat  the same, with bodies that begin with 200 bytes
    tokens      the same by tokens, which the actor neither renders nor parses

In the first two the engine makes a token for each place every 20 ms, and 32 to 96 tokens a turn;
memory is resident memory of a process while all conversations wait, less that before the first,
over their number. In the others the bodies also go, in turns, to a bare route of starlette, which
answers at once: `added_ms` is the difference of the medians, and `added_least_ms` that of the
smallest times, which a busy machine delays less. One JSON object comes last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.agents.clients import (
    ChatClient,
    TokenClient,
    Window,
    take_many,
    take_turns,
)
from benchmarks.agents.simulated_actor import save_tokenizer
from benchmarks.delivery.ring import ring
from benchmarks.support.machine import ProcessTree, describe_machine
from benchmarks.support.progress import Say, say_since
from benchmarks.support.workload import environment
from broker.transport.allow_list import Role, add
from buffer import operations

SLOTS = 64
CONVERSATIONS = 256
WAIT_S = 1.0
START_S = 120.0
STEP_S = 0.02  # of a model of 7B parameters on a card, with so many sequences
POINTER = {"digest": "d", "endpoint": "tcp://127.0.0.1:1", "public_key": "k" * 40}
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    windows: int
    window_s: float
    conversations: int
    """One after the other, through an engine that answers at once."""


BRIEF, FULL = Extent(1, 6.0, 2), Extent(5, 15.0, 20)
TURNS = 30
CLIENTS: dict[str, Callable[..., ChatClient | TokenClient]] = {
    "chat": ChatClient,
    "short_chat": partial(ChatClient, body_bytes=200),
    "tokens": TokenClient,
}


@dataclass(frozen=True, slots=True)
class Agents:
    """A run with live agents: its processes, and the lines of its host."""

    host: subprocess.Popen[str]
    actor: subprocess.Popen[str]
    folder: Path

    def lines(self, count: int) -> list[dict[str, Any]]:
        """Wait for conversations; return the host's line about each."""
        assert self.host.stdout is not None
        limit = threading.Timer(START_S, self.host.kill)
        limit.start()
        texts = [self.host.stdout.readline() for _ in range(count)]
        limit.cancel()
        if not all(texts):
            logs = "".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
            raise RuntimeError(f"{count} conversations must begin within {START_S:g} s: {logs}")
        return [json.loads(text) for text in texts]

    def resident_kib(self) -> dict[str, float]:
        """Return the resident memory of host and actor, KiB."""
        return {"host": _resident_kib(self.host.pid), "actor": _resident_kib(self.actor.pid)}


def main() -> None:
    """Run the arms and print what they gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="numbers to quote; five minutes")
    parser.add_argument("--only", choices=MEASURED, action="append", help="may be repeated")
    parser.add_argument("--folder", type=Path, help="keep runs and logs here")
    chosen = parser.parse_args()
    extent = FULL if chosen.full else BRIEF
    machine = describe_machine()
    say = say_since(time.monotonic())
    with (
        tempfile.TemporaryDirectory(prefix="nyala-agents-") as scratch,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        folder = (chosen.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        arms: dict[str, dict[str, Any]] = {}
        for name in chosen.only or MEASURED:
            arms |= MEASURED[name](runner, folder, extent, say)
    machine["load_after"] = describe_machine()["load"]
    print(json.dumps({"arms": arms, "ratios": ratios(arms), "machine": machine}))


def ratios(arms: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Divide waiting by busy agents, and the bare endpoint's times by the door's."""
    found = {
        f"bare_over_{name}": round(arms[name]["bare_ms"] / arms[name]["turn_ms"], 3)
        for name in CLIENTS
        if name in arms
    }
    if "waiting" in arms:
        rates = arms["waiting"]["tokens_per_s"], arms["busy"]["tokens_per_s"]
        found["waiting_over_busy"] = round(rates[0] / rates[1], 3)
    return found


def measure_many(
    runner: asyncio.Runner, folder: Path, extent: Extent, say: Say
) -> dict[str, dict[str, Any]]:
    """Measure conversations that wait between turns and ones that do not."""
    with running_agents(folder / "many", conversations=CONVERSATIONS, step_s=STEP_S) as agents:
        waits = (0.0, WAIT_S) * extent.windows
        tree = ProcessTree(os.getpid())
        lines = agents.lines(CONVERSATIONS)
        before, used = agents.resident_kib(), tree.look()
        say(f"{len(lines)} conversations")
        windows = runner.run(take_many(lines, waits, extent.window_s, say=say))
        cpu = tree.look() - used
        after = agents.resident_kib()
    memory = {name: round((after[name] - before[name]) / CONVERSATIONS, 1) for name in after}
    by_process = {name: ms / 1e3 for name, ms in cpu.most_common()}
    common = {"kib_per_conversation": memory, "cpu_s_by_process": by_process}
    return {"busy": _shown(windows[::2]), "waiting": _shown(windows[1::2]) | common}


def measure_door(
    runner: asyncio.Runner, folder: Path, extent: Extent, say: Say
) -> dict[str, dict[str, Any]]:
    """Measure one conversation's turns beside those of a bare endpoint."""
    arms: dict[str, dict[str, Any]] = {}
    with (
        running_agents(folder / "door", conversations=1, step_s=0.0) as agents,
        _process("benchmarks.agents.bare_endpoint", log=folder / "bare.log") as bare,
    ):
        assert bare.stdout is not None
        url, tree = bare.stdout.readline().strip(), ProcessTree(os.getpid())
        for name, client in CLIENTS.items():
            door_ms: list[float] = []
            bare_ms: list[float] = []
            used = tree.look()
            for _ in range(extent.conversations):
                line = agents.lines(1)[0]
                times = runner.run(take_turns(line, url, TURNS, client))
                door_ms, bare_ms = door_ms + times[0], bare_ms + times[1]
            door, plain = median(door_ms), median(bare_ms)
            cpu = {r: ms / len(door_ms) for r, ms in (tree.look() - used).most_common()}
            say(f"{name}: {door:.2f} ms, bare {plain:.2f} ms")
            arms[name] = {
                "turn_ms": round(door, 3),
                "bare_ms": round(plain, 3),
                "added_ms": round(door - plain, 3),
                "added_least_ms": round(min(door_ms) - min(bare_ms), 3),
                "cpu_ms_by_process": {role: round(ms, 2) for role, ms in cpu.items()},
            }
    return arms


@contextmanager
def running_agents(folder: Path, *, conversations: int, step_s: float) -> Iterator[Agents]:
    """Start a run whose host prints its conversations, and an actor with a simulated engine."""
    folder.mkdir()
    save_tokenizer(folder / "model")
    (folder / "tasks.jsonl").write_text('{"task": "read on"}\n' * 64)
    overrides = (
        "run.environment=agent",
        "run.eval_episodes=0",
        f"run.environment_settings={{path: {folder}/tasks.jsonl, prompt: task}}",
        f"run.model={folder}/model",
        "run.max_prompt_tokens=32768",
        "run.max_completion_tokens=131072",
        "buffer.max_episode_bytes=16777216",
        f"actors.max_concurrent_episodes={SLOTS}",
        f"agents.max_conversations={conversations}",
        "agents.timeout_s=3600",
    )
    with ring(folder, *overrides) as running, ExitStack() as stack:
        running.store.run(operations.publish(1, 0, POINTER))
        add(running.settings.run.folder / "keys", "host", Role.HOST)
        config = str(running.config)
        module = "benchmarks.agents.simulated_actor"
        actor = stack.enter_context(_process(module, config, str(step_s), log=folder / "actor.log"))
        host = stack.enter_context(
            _process("agents", "--config", config, "--print", log=folder / "host.log")
        )
        yield Agents(host, actor, folder)


@contextmanager
def _process(module: str, *arguments: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", module, *arguments]
    alone = {"TOKENIZERS_PARALLELISM": "false"}  # as `nyala up` starts actors
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, env=environment() | alone, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


MEASURED = {"waiting": measure_many, "door": measure_door}


def _shown(windows: list[Window]) -> dict[str, Any]:
    return {
        "tokens_per_s": round(median(window.tokens_per_s for window in windows), 1),
        "turn_ms": round(median(window.turn_ms for window in windows), 1),
        "windows": [round(window.tokens_per_s, 1) for window in windows],
    }


def _resident_kib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 1024


if __name__ == "__main__":
    main()
