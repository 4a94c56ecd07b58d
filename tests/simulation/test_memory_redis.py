"""The Redis in memory answers as a real one does: both play the same random histories.

Both read the time from a key that the test sets, so that fences and deadlines are the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis

from buffer import operations
from buffer.client.scripts import Script, load_script, make_script
from buffer.operations.keys import EVAL_BASE, run_prefix
from buffer.operations.operation import Call, Operation
from buffer.operations.values import BeatLine, NewTask
from buffer.store import incoming
from configs.errors import StoreError
from tests.simulation.lua import Scripts
from tests.simulation.memory_redis import MemoryRedis, Reply

PREFIX = run_prefix("twice")
CLOCK = "clock"
STEPS = 600


def _script(name: str) -> Script:
    source = load_script(name).source
    return make_script(source.replace("call('TIME')", f"call('HMGET', '{CLOCK}', 's', 'us')"))


class Both:
    """A real server and the one in memory, which must agree on every call."""

    def __init__(self, url: str) -> None:
        self.real = redis.Redis.from_url(url)
        self.real.flushdb()
        self.memory = MemoryRedis(lambda: 0.0)
        self.memory.run_id = self.real.info("server")["run_id"]
        self.scripts = Scripts(self.memory)
        self.now_us = 1_800_000_000_000_000

    def run(self, operation: Operation[Any]) -> Any:
        """Run an operation on both; None if both refuse it."""
        steps, reply = operation.steps(), None
        while True:
            try:
                call = steps.send(reply)
            except StopIteration as end:
                return end.value
            assert isinstance(call, Call), "what is fetched is compared with all else, at the end"
            script = _script(call.script)
            for place, record in incoming(PREFIX, call.records).items():
                self.real.set(place, record)
                self.memory.execute(b"SET", place.encode(), record)
            real = _outcome(partial(self.real.eval, script.source, 1, PREFIX, *call.arguments))
            memory = _outcome(partial(self.scripts.run, script, PREFIX, call.arguments))
            assert _sorted(call.script, memory) == _sorted(call.script, real), call
            if isinstance(real, str):
                return None
            reply = real

    def tick(self, seconds: float) -> None:
        """Let time pass."""
        self.now_us += round(seconds * 1e6)
        parts: dict[Any, Any] = {"s": self.now_us // 10**6, "us": self.now_us % 10**6}
        self.real.hset(CLOCK, mapping=parts)
        flat = [str(x).encode() for name in parts for x in (name, parts[name])]
        self.memory.execute(b"HSET", CLOCK.encode(), *flat)

    def compare(self) -> None:
        """Assert that both hold the same."""
        held = self.memory.dump()
        assert set(self.real.keys("*")) == set(held)
        for key, value in held.items():
            assert _read(self.real, key) == value, key


def _outcome(call: Callable[[], Reply]) -> Any:
    """A reply, or the text of a refusal."""
    try:
        return call()
    except redis.ResponseError as error:
        return str(error).split(" script:")[0]


def _sorted(script: str, reply: Reply) -> Reply:
    """Hashes and sets have no order on a real server."""
    if script in ("read", "stats", "eval_round", "actors") and isinstance(reply, list):
        return sorted(repr(_sorted(script, part)) for part in reply)
    return reply


def _read(client: redis.Redis, key: bytes) -> Any:
    kind = client.type(key)
    if kind == b"zset":
        pairs: Any = client.zrange(key, 0, -1, withscores=True)
        return [(score, member) for member, score in pairs]
    if kind == b"set":
        return sorted(client.smembers(key))
    if kind == b"hash":
        return client.hgetall(key)
    return client.lrange(key, 0, -1) if kind == b"list" else client.get(key)


class Play:
    """A random history of one run, sense and nonsense mixed."""

    def __init__(self, both: Both, seed: int) -> None:
        self.both, self.rng = both, random.Random(seed)
        self.held: list[list[int]] = []
        self.lineage, self.k, self.units = 0, 0, 0
        both.tick(1)
        both.run(
            operations.begin_run(
                "c",
                {"settings": "h"},
                units_per_batch=2,
                max_policy_lag=1,
                margin=1.5,
                group_size=3,
                min_group_size=2,
            )
        )
        self.learner()

    def step(self) -> None:
        self.both.tick(self.rng.choice([0.001, 0.1, 1.0]))
        acts = [self.create, self.lease, self.lease, self.beat, self.beat, self.submit, self.end]
        acts += [self.batch, self.batch, self.learner, self.look]
        self.rng.choices(acts, [4, 4, 4, 6, 6, 20, 2, 4, 4, 0.3, 2])[0]()

    def create(self) -> None:
        first = max(0, self.units - 1)
        ids = range(first * 3, (first + 3) * 3)
        tasks = [NewTask(i, i // 3, b"spec %d" % i) for i in ids]
        tasks += [NewTask(EVAL_BASE + self.rng.randrange(20), 0, b"e", eval_step=self.k)]
        self.both.run(operations.create(self.lineage, tasks))
        self.units = first + 3

    def lease(self) -> None:
        answer = self.both.run(
            operations.lease(
                f"a{self.rng.randrange(3)}",
                ttl_ms=5000,
                n=self.rng.randint(1, 9),
                version=(self.lineage, self.k),
            )
        )
        self.held += [[task.task_id, task.fence, task.length] for task in answer.tasks]

    def beat(self) -> None:
        lines = []
        for held in self._some():
            offset = max(0, held[2] + self.rng.choice([0, 0, 0, 0, -1, 1]))
            lines.append(BeatLine(held[0], held[1], offset, 2, b"<%d>" % offset))
        for held, answer in zip(
            self._rows(lines), self.both.run(operations.beat(ttl_ms=5000, lines=lines)), strict=True
        ):
            held[2] = answer.length

    def submit(self) -> None:
        rows = [(held[0], held[1], b"record %d" % held[0]) for held in self._some()]
        self.both.run(operations.submit(rows))

    def end(self) -> None:
        some = [(held[0], held[1]) for held in self._some()]
        kind = self.rng.randrange(3)
        if kind == 0:
            self.both.run(operations.release(some))
        elif kind == 1:
            rows = [(*row, self.rng.choice(["data", "infra"]), "why") for row in some]
            self.both.run(operations.fail(max_attempts=3, failures=rows))
        elif kind == 2:
            self.both.tick(4)
            self.both.run(operations.reap(max_attempts=3))
        else:
            self.both.run(operations.actor_seen({"a1": {"host": "h"}}))

    def batch(self) -> None:
        k = self.k + 1
        claim = self.both.run(operations.claim(self.lineage, k, 2, start=self.rng.random() < 0.1))
        if claim is None or not claim.units:
            return
        kind = self.rng.randrange(12)
        if kind == 0:
            groups = [claim.units[0].group_id]
            self.both.run(operations.drop(self.lineage, k, groups, "stale"))
        elif kind == 1:
            self.both.run(operations.abandon(self.lineage, k, "poison"))
        elif claim.complete:
            self.both.run(operations.seal(self.lineage, k))
            self.both.run(operations.advance(self.lineage, k))
            self.k = k
            if kind < 6:
                self.both.run(operations.commit(self.lineage, k))

    def learner(self) -> None:
        self.lineage = self.both.run(operations.begin_lineage(self.lineage, self.k)) or self.lineage

    def look(self) -> None:
        self.both.run(operations.stats())
        self.both.run(operations.lineages())
        self.both.run(operations.actors())
        self.both.run(operations.eval_round(self.lineage, self.k))

    def _some(self) -> list[list[int]]:
        return self.rng.sample(self.held, min(len(self.held), self.rng.randint(1, 6)))

    def _rows(self, lines: list[BeatLine]) -> Iterator[list[int]]:
        for line in lines:
            yield next(held for held in self.held if held[:2] == [line.task_id, line.fence])


@pytest.mark.parametrize("seed", range(4))
def test_the_redis_in_memory_answers_as_a_real_one(redis_url: str, seed: int) -> None:
    both = Both(redis_url)
    try:
        play = Play(both, seed)
        for _ in range(STEPS):
            play.step()
        both.run(operations.cancel(play.lineage))

        both.compare()
        assert play.k > 1
    except StoreError as error:
        raise AssertionError("refusals come from the scripts here") from error
    finally:
        both.real.close()
