"""The weight plane of a benchmark: the learner's side here, receivers in processes of their own.

All between the learner's parameters and a receiver's staged bytes is real: gather, digest, slots,
sidecar, CURVE, shared memory, gloo, staging. Without an engine nothing is applied, and no figure
has its time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import uvloop
from msgspec import convert, structs
from torch import nn

from broker.protocol.manifest import Probe
from broker.protocol.messages import Publication
from broker.transport.keys import load_pair, make_client, make_keys
from buffer.record.episode import PolicyVersion
from configs.logging import configure_logging
from configs.settings import ActorSettings, LearnerSettings, RunSettings
from configs.tables.actors import WeightSource
from lab.faults.network import enter
from learner.weights.log import VersionDelivery, read_weight_log

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["actors.engine.weights.group", "actors.weights.receiver", "learner.weights.publish"]
)
NUM_TENSORS = 50
TIMEOUT_S = 120.0


def parameters_of(num_bytes: int) -> nn.Module:
    """Make as many bytes as a model has, in as many tensors as a small one has."""
    count = num_bytes // 4 // NUM_TENSORS
    return nn.ParameterList(torch.zeros(count) for _ in range(NUM_TENSORS))


def change_all(model: nn.Module) -> None:
    """Take a step of every parameter."""
    for parameter in model.parameters():
        parameter.mul_(1.0 + 1e-4)


class NoEngine:
    """Accepts every version and agrees with every probe."""

    async def generate(self) -> None:
        """Nothing runs."""

    async def apply(self, _: Any) -> float:
        return 0.0

    async def probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        return (0.0,) * (len(token_ids) - 1)

    async def read_back(self, _: Any) -> None:
        """It stores nothing."""


async def no_engine() -> NoEngine:
    return NoEngine()


@dataclass(frozen=True, slots=True)
class Place:
    """Name and surroundings of a receiver."""

    name: str
    folder: Path
    publication: Publication
    share_endpoint: str | None
    site: str | None
    pull_from: tuple[WeightSource, ...]
    network: str | None
    copies: bool


class WeightRing:
    """One publisher and its receivers.

    Args:
        folder: For keys and files.
        model: What is published.
        receivers: How many.
        engine: Makes a receiver's engine.
        share_endpoint: Where receivers listen, to pull from each other; None = they do not.
        site: Of all receivers.
        pull_from: As in the settings. With `memory` no receiver is in a group.
        route: Gives the address at which receivers reach the publisher's.
        network: Network of the receivers (`lab.faults.network`); None = ours.
        probe: Computes the learner's side of the probe.
        copies: Whether receivers copy what they find in the publisher's memory, as they once did.
        dtype: Of what is published.
        train: Changes the model between two versions.
        settings: Of the learner.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        *,
        receivers: int = 1,
        engine: Callable[[], Any] = no_engine,
        share_endpoint: str | None = None,
        site: str | None = None,
        pull_from: tuple[WeightSource, ...] = ("peers", "publisher"),
        route: Callable[[str], str] = str,
        network: str | None = None,
        probe: Callable[[nn.Module], Probe] = lambda _: Probe((1, 2), (0.0,)),
        copies: bool = False,
        dtype: Literal["float32", "bfloat16"] = "float32",
        train: Callable[[nn.Module], None] = change_all,
        **settings: Any,
    ) -> None:
        from learner.weights.publish import WeightPublisher

        keys = make_keys(folder / "keys")
        make_client(keys, "actor")
        self._publications: list[Publication] = []
        self._pointed = 0.0
        self._model = model
        self._train = train
        self._step = 0
        self.swaps: list[dict[str, Any]] = []
        """Of every receiver in `pull`: step, pause and bytes that it has copied."""
        self._run = RunSettings(
            name="weights",
            model="none",
            directory=folder,
            dtype=dtype,
            trusted_network=network is not None,
        )
        self._publisher = WeightPublisher(
            model,
            self._run,
            LearnerSettings(device="cpu", **settings),
            keys=keys,
            put_pointer=self._point,
            probe=partial(probe, model),
        )
        self._receivers = []
        self.publish()
        publication = self._publications[-1]
        publication = structs.replace(publication, endpoint=route(publication.endpoint))
        for number in range(receivers):
            ours, theirs = FORKS.Pipe()
            place = Place(
                f"actor-{number}",
                folder,
                publication,
                share_endpoint,
                site,
                pull_from,
                network,
                copies,
            )
            process = FORKS.Process(target=_receive, args=(place, theirs, engine), daemon=True)
            process.start()
            theirs.close()
            self._receivers.append((process, ours))
        for _, pipe in self._receivers:
            assert pipe.poll(TIMEOUT_S) and pipe.recv() == "synced", "a receiver did not come up"
        has_groups = settings.get("broadcast", True) and "memory" not in pull_from
        while has_groups and self.deliver().epoch == 0:
            time.sleep(0.2)  # the sidecar imports torch beside the first pulls

    def publish(self) -> None:
        """Train and publish a version."""
        self._step += 1
        with torch.no_grad():
            self._train(self._model)
        self._publisher.publish(self._model, PolicyVersion(1, self._step))

    def _point(self, publication: Publication) -> None:
        self._pointed = time.perf_counter()  # the sidecar has just been woken
        self._publications.append(publication)

    def deliver(self) -> VersionDelivery:
        """Publish, and wait until all receivers have confirmed."""
        self.publish()
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            for line in read_weight_log(self._run.folder):
                if line["event"] == "delivered" and line["version"] == [1, self._step]:
                    return convert(line, VersionDelivery)
            time.sleep(0.002)
        raise AssertionError("no report of a delivery")

    def pull(self) -> float:
        """Publish, and wait until every receiver has it; returns seconds from the seal."""
        self.publish()
        waiting = {pipe for _, pipe in self._receivers}
        while waiting:
            for pipe in wait(waiting, TIMEOUT_S):
                assert isinstance(pipe, Connection)
                swap = pipe.recv()
                self.swaps.append(swap)
                if swap["step"] == self._step:
                    waiting.discard(pipe)
        return time.perf_counter() - self._pointed

    def pause(self) -> float:
        """Publish; returns for how long generation of the first actor paused, seconds."""
        self.publish()
        _, pipe = self._receivers[0]
        while True:
            assert pipe.poll(TIMEOUT_S), "a version was not applied"
            applied = pipe.recv()
            if applied["step"] == self._step:
                return float(applied["pause_s"])

    def pids(self) -> dict[int, bool]:
        """All processes that have weights mapped, and whether each is a receiver."""
        receivers = {process.pid: True for process, _ in self._receivers if process.pid is not None}
        return {os.getpid(): False, self._publisher._sidecar.pid: False, **receivers}

    def close(self) -> None:
        for process, _ in self._receivers:
            process.kill()
            process.join()
        self._publisher.close()


@dataclass(slots=True)
class _Copied:
    num_bytes: int = 0


def _copy_first(receiver: Any) -> _Copied:
    """Make a receiver copy each version into a file of its own before its engine has it."""
    transfer, copied = receiver._transfer, _Copied()
    borrow = transfer._memory.borrow

    async def copy(wanted: Any) -> Any:
        lent = await borrow(wanted)
        if lent is None:
            return None
        file = transfer._files.acquire(len(lent.memory))
        here, there = (np.frombuffer(each.memory, np.uint8) for each in (file, lent))
        await asyncio.to_thread(np.copyto, here, there)
        copied.num_bytes += len(here)
        return file

    transfer._memory.borrow = copy
    return copied


def _receive(place: Place, pipe: Connection, make_engine: Callable[[], Any]) -> None:
    from actors.weights.links import ActorIdentity
    from actors.weights.receiver import WeightReceiver

    async def live() -> None:
        engine = await make_engine()
        receiver = WeightReceiver(
            engine,
            ActorSettings(
                weight_timeout_s=TIMEOUT_S,
                share_endpoint=place.share_endpoint,
                site=place.site,
                pull_from=place.pull_from,
            ),
            caller=ActorIdentity(load_pair(place.folder / "keys", "actor"), "weights", place.name),
            staging=place.folder / "staging",
            keys_folder=place.folder / "keys",
        )
        copied = _copy_first(receiver) if place.copies else _Copied()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(receiver.run())
            version = await receiver.first_sync(place.publication)
            tasks.create_task(engine.generate())
            pipe.send("synced")
            while True:
                paused_s, copied.num_bytes = receiver.counters.pause_s, 0
                await receiver.newer_than(version)
                version = receiver.version
                swap = {"step": version.step, "pause_s": receiver.counters.pause_s - paused_s}
                pipe.send({**swap, "copied_bytes": copied.num_bytes})

    if place.network is not None:
        enter(place.network)
    configure_logging("actor", run="weights", incarnation=place.name)
    torch.set_num_threads(1)
    uvloop.run(live())
