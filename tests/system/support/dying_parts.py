"""A run whose live agents talk while each other part of it is killed, and what must hold then."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.engine.tokenizer import ModelTokenizer
from buffer import operations
from buffer.operations.values import Stats
from buffer.store import Store
from configs.errors import StoreError
from configs.loader import load
from lab.actor_fleet import descendants, plays
from lab.faults.proxy import Proxy
from tests.actors.support.saved_tokenizer import CHATML, save_tokenizer
from tests.learner.support.random_models import save_random_model
from tests.system.support import talking_agent
from tests.system.support.live_run import TORCH, LiveRun, end

KILLED = ("actors", "broker", "redis", "learner")
CONNECTION = "connection"
DEATHS = (*KILLED, CONNECTION)
PAUSE_S = 3.0  # longest between two deaths
TASKS = 400
SETTINGS = (
    *TORCH,
    "run.dtype=float32",
    "run.environment=agent",
    "run.steps=100000",
    "run.groups_per_batch=1",
    "run.max_prompt_tokens=200",
    "run.max_completion_tokens=2000",
    "run.max_policy_lag=100",  # so that no conversation is dropped for its age
    "run.eval_every=0",
    "run.eval_episodes=0",
    'run.samples={"every": 1, "groups": 4}',
    "actors.count=2",
    "actors.max_concurrent_episodes=4",
    "actors.drain_s=120",
    "learner.lr=1e-6",
    "learner.checkpoint_every=3",
    "agents.max_conversations=6",
)


@dataclass
class Talk:
    """What one agent has written into the ledger."""

    begun: int = 0
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Ids of each prompt and of the answer to it."""
    reward: float | None = None

    @property
    def text_ids(self) -> list[int]:
        """All tokens that the agent has heard of."""
        prompt, tokens = self.turns[-1]
        return prompt + tokens

    def faults(self) -> Iterator[str]:
        """Say what must not be."""
        if self.begun != 1:
            yield f"its agent began {self.begun} times"
        if self.reward is None:
            yield f"its agent did not end; it had {len(self.turns)} answers"
        for (before, said), (prompt, _) in zip(self.turns, self.turns[1:], strict=False):
            if prompt[: len(before) + len(said)] != before + said:
                yield "a prompt does not begin with all ids before it"


class DyingParts:
    """A ring, a host of agents behind a proxy, and their ledger.

    Args:
        folder: An empty one.
        seed: Of the order and the moments of the deaths.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._rng, self._ledger = random.Random(seed), folder / "ledger.jsonl"
        model = folder / "model"
        save_tokenizer(model, template=CHATML)
        self._tokenizer = ModelTokenizer(str(model))
        save_random_model(
            model,
            "qwen3",
            vocab_size=len(self._tokenizer._tokenizer),
            initializer_range=0.1,
            max_position_embeddings=4096,
            eos_token_id=None,
        )
        rows = folder / "tasks.jsonl"
        rows.write_text("".join(json.dumps({"task": f"task {n}"}) + "\n" for n in range(TASKS)))
        environment = json.dumps({"path": str(rows), "prompt": "task"})
        command = json.dumps([sys.executable, talking_agent.__file__, str(self._ledger)])
        self.run = LiveRun(
            folder,
            "tiny.yaml",
            *SETTINGS,
            f"run.model={model}",
            f"run.environment_settings={environment}",
        )
        self._command = f"agents.command={command}"  # of a host beside `nyala up`
        self.deaths: Counter[str] = Counter()

    def play(self) -> dict[str, Talk]:
        """Let each part die once while agents talk, and all of them end; return what they heard.

        Raises:
            AssertionError: Something does not come, or does not hold.
        """
        with self.run.up() as up:
            self._wait(lambda: self.run.pids("broker") and self._stats(), "a broker")
            with self._host() as (host, proxy):
                self._wait(lambda: any(talk.turns for talk in self._talks().values()), "a turn")
                for part in self._rng.sample(DEATHS, len(DEATHS)):
                    self._strike(part, up, proxy)
                last = len(self._talks())
                self._wait(lambda: self._num_ended() >= last, "ends after the last death")
                host.terminate()
                self._wait(lambda: host.poll() is not None, "the end of the host")
            assert host.returncode == 0, self.run.logs()
            talks = self._talks()
            self._wait(lambda: self._num_finished() >= len(talks), "a record of each conversation")
            trained = self.run.step
            self._wait(lambda: self.run.step > trained or not self._buffered(), "a batch")
            stats = self._stats()
            assert stats is not None
        self._check(talks, stats)
        return talks

    def _strike(self, part: str, up: subprocess.Popen[str], proxy: Proxy) -> None:
        time.sleep(self._rng.uniform(0.0, PAUSE_S))
        victims: list[int] = []

        def is_there() -> bool:
            words = descendants(up.pid)
            victims[:] = sorted(pid for pid, line in words.items() if plays(part, line))
            is_talking = len(self._talks()) > self._num_ended()
            return is_talking and (part == CONNECTION or bool(victims))

        self._wait(is_there, f"a conversation, and {part} to be hurt")
        if part == CONNECTION:
            proxy.reset()
        else:
            os.kill(self._rng.choice(victims[:1] if part == "learner" else victims), signal.SIGKILL)
        self.deaths[part] += 1

    @contextmanager
    def _host(self) -> Iterator[tuple[subprocess.Popen[str], Proxy]]:
        """Start a host of agents, whose connection leads through a proxy."""
        address = load(self.run.folder / "config.yaml").broker.endpoint
        with Proxy("127.0.0.1", int(address.rpartition(":")[2])) as proxy:
            there = f"broker.endpoint=tcp://127.0.0.1:{proxy.port}"
            chosen = ("--set", there, "--set", self._command)
            host = self.run.start("agents", str(self.run.folder), *chosen)
            try:
                yield host, proxy
            finally:
                end(host)

    def _check(self, talks: dict[str, Talk], stats: Stats) -> None:
        faults = [f"{name}: {fault}" for name, talk in talks.items() for fault in talk.faults()]
        tasks = Counter(name.partition("-")[0] for name in talks)
        faults += [f"task {task}: {n} agents" for task, n in tasks.items() if n > 1]
        if self._finished(stats) != len(talks):
            faults.append(f"{len(talks)} conversations, {self._finished(stats)} records")
        if stats.dead or stats.data_failures or stats.accounted != stats.created:
            faults.append(f"tasks lost or charged: {stats}")
        by_task = {name.partition("-")[0]: talk for name, talk in talks.items()}
        trained = self.run.lines("samples")
        tasks = Counter(str(line["task"]) for line in trained)
        faults += [f"task {task}: trained {n} times" for task, n in tasks.items() if n > 1]
        for line in trained:
            talk = by_task[str(line["task"])]
            if line["reward"] != talk.reward:
                faults.append(f"{line['task']}: reward {line['reward']}, posted {talk.reward}")
            text = line["prompt"] + "".join(turn["text"] for turn in line["turns"])
            if text != self._tokenizer.decode(talk.text_ids):
                faults.append(f"{line['task']}: trained on another text than its agent heard")
        assert trained, self.run.logs()
        assert not faults, "\n".join([*faults, self.run.logs()])

    def _talks(self) -> dict[str, Talk]:
        talks: dict[str, Talk] = {}
        text = self._ledger.read_text() if self._ledger.exists() else ""
        for line in text.rpartition("\n")[0].splitlines():
            facts: dict[str, Any] = json.loads(line)
            talk = talks.setdefault(facts["conversation"], Talk())
            talk.begun += "begun" in facts
            if "tokens" in facts:
                talk.turns.append((facts["prompt"], facts["tokens"]))
            talk.reward = facts.get("reward", talk.reward)
        return talks

    def _num_ended(self) -> int:
        return sum(talk.reward is not None for talk in self._talks().values())

    def _num_finished(self) -> int:
        stats = self._stats()
        return 0 if stats is None else self._finished(stats)

    def _buffered(self) -> int:
        stats = self._stats()
        return 1 if stats is None else stats.buffered_units

    @staticmethod
    def _finished(stats: Stats) -> int:
        return stats.buffered + stats.claimed + stats.committed + sum(stats.dropped.values())

    def _stats(self) -> Stats | None:
        try:
            url = (self.run.folder / "redis.url").read_text().strip()
            with Store(url, self.run.folder.name) as store:
                return store.run(operations.stats())
        except (OSError, StoreError):
            return None

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        self.run.wait_until(lambda: bool(condition()), what)
