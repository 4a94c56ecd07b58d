"""A weight plane of real processes: this one as learner rank 0, its sidecar, and actors."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec import convert

from broker.protocol.manifest import Probe
from buffer.record.episode import PolicyVersion
from configs.settings import LearnerSettings, RunSettings
from lab.actor_fleet import descendants, plays
from learner.weights.log import VersionDelivery, read_weight_log
from learner.weights.publish import WeightPublisher
from tests.broker.support.keys import keys_with_actor
from tests.learner.support.forks import FORKS
from tests.waiting import wait_until
from tests.weights.support import actor_process
from tests.weights.support.toy_model import PROBE_IDS, ToyModel, probe_logprobs

JOIN_AND_SEND_S = 4.0  # of Plane's settings: no version takes longer than this to be given up
MAX_PUBLISH_S = 1.5  # waiting for a receiver takes at least `broadcast_join_s`, 2 s
SLACK_S = 5.0  # of a busy machine


class ActorProcess:
    """A process of `actor_process.py` and the lines it has written."""

    def __init__(self, plane: "Plane", name: str, options: dict) -> None:
        self.name = name
        options = {
            "name": name,
            "keys": plane.keys,
            "staging": plane.folder / "staging",
            "publication": plane.publication,
            **options,
        }
        self.lines: list[dict] = []
        self._pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=actor_process.run, args=(options, theirs), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def offer(self, publication) -> None:
        self._pipe.send(publication)

    def wait(self, event: str, *, timeout_s: float = 20.0, **fields) -> dict:
        """Return the first line of this event with these fields, now or later."""
        deadline = time.monotonic() + timeout_s
        while True:
            for line in self.lines:
                if line["event"] == event and all(line[k] == v for k, v in fields.items()):
                    return dict(line)
            assert self._pipe.poll(max(0.0, deadline - time.monotonic())), (
                f"{self.name}: no {event} {fields}; got {self.lines[-3:]}"
            )
            self.lines.append(self._pipe.recv())

    def applied(self, manifest, *, timeout_s: float = 20.0) -> dict:
        return self.wait("applied", timeout_s=timeout_s, version=manifest.version)

    def counters(self) -> dict:
        """The newest counters: those after the last version applied, and 50 ms without another."""
        deadline = time.monotonic() + 5.0
        while True:
            while self._pipe.poll(0.05):
                self.lines.append(self._pipe.recv())
            for line in reversed(self.lines):
                if line["event"] == "counters":
                    return dict(line)
                if line["event"] == "applied":
                    break
            assert time.monotonic() < deadline, f"{self.name}: no counters; got {self.lines[-3:]}"

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


class Plane:
    """The learner's side, and the actors it has been given."""

    def __init__(
        self,
        folder: Path,
        *,
        ballast: int = 0,
        model: Any = None,
        trusted_network: bool = False,
        **settings,
    ) -> None:
        self.folder = folder
        self.keys = keys_with_actor(folder / "keys")
        self.publications: list = []
        self.actors: list[ActorProcess] = []
        self.model = model or ToyModel(ballast)
        self.step = 0
        self.slowest_publish_s = 0.0
        self._run = RunSettings(
            name="toy", model="toy", directory=folder, trusted_network=trusted_network
        )
        self._num_read = 0
        defaults = {"broadcast_join_s": 2.0, "broadcast_send_s": 2.0, "device": "cpu"}
        self.publisher = WeightPublisher(
            self.model,
            self._run,
            LearnerSettings(**{**defaults, **settings}),
            keys=self.keys,
            put_pointer=self.publications.append,
            probe=self._probe,
        )

    def _probe(self) -> Probe:
        return Probe(PROBE_IDS, tuple(probe_logprobs(self.model, PROBE_IDS)))

    @property
    def publisher_pid(self) -> int:
        """Process id of the sidecar."""
        (pid,) = (
            pid
            for pid, words in descendants(os.getpid()).items()
            if plays("publisher", words) and str(self.keys) in words[-1]
        )
        return pid

    def deliveries(self, until=None) -> list[VersionDelivery]:
        """What became of versions since the last call; waits for the one of `until`."""

        def unread() -> list[VersionDelivery]:
            lines = read_weight_log(self._run.folder)
            found = [
                convert(line, VersionDelivery) for line in lines if line["event"] == "delivered"
            ]
            return found[self._num_read :]

        if until is not None:
            wait_until(
                lambda: any(sent.version == until for sent in unread()), f"no report of {until}"
            )
        found = unread()
        self._num_read += len(found)
        return found

    def wait_until_groups_are_possible(self) -> VersionDelivery:
        """The sidecar imports torch in the background; until then its actors pull.

        Returns the first delivery by a group.
        """

        def by_group() -> VersionDelivery | None:
            newest = self.deliveries(until=self.publish().version)[-1]
            return newest if newest.epoch else None

        return wait_until(by_group, timeout_s=60.0, every_s=0.2)

    @property
    def publication(self):
        return self.publications[-1]

    def publish(self, *, lineage: int = 1):
        """One optimizer step and its publication; returns the manifest."""
        self.model.step(self.step + 1)
        return self._seal(lineage)

    def publish_to_all(self):
        """As `publish`, and wait until it is delivered.

        Who joins sooner may be given the version before first, and then has one pull more.
        """
        manifest = self.publish()
        self.deliveries(until=manifest.version)
        return manifest

    def publish_little(self):
        """As `publish`, after a step that changes one weight in a thousand."""
        with torch.no_grad():
            self.model.ballast[::1000].add_(1.0)
        return self._seal(lineage=1)

    def _seal(self, lineage: int):
        self.step += 1
        started = time.monotonic()
        manifest = self.publisher.publish(self.model, PolicyVersion(lineage, self.step))
        self.slowest_publish_s = max(self.slowest_publish_s, time.monotonic() - started)
        return manifest

    def actor(self, name: str, **options) -> ActorProcess:
        self.actors.append(ActorProcess(self, name, options))
        return self.actors[-1]

    def close(self) -> None:
        for actor in self.actors:
            actor.end()
        self.publisher.close()


@contextmanager
def grouped_plane(folder: Path, actors: dict[str, dict]) -> Iterator[Plane]:
    """A plane whose actors have the first version, with groups for those that can be in one."""
    plane = Plane(folder, ballast=100_000)
    try:
        plane.publish()
        for name, options in actors.items():
            plane.actor(name, **options)
        for actor in plane.actors:
            actor.wait("synced", timeout_s=60.0)  # the fork server imports torch first
        plane.wait_until_groups_are_possible()
        yield plane
    finally:
        plane.close()
