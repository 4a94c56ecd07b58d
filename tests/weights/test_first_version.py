"""The first version of an actor: how long its bytes are waited for, and what is not counted."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from actors.weights import links, slices
from actors.weights.receiver import WeightReceiver
from broker.protocol.messages import Publication
from broker.protocol.weight_messages import Announce
from configs.errors import DeadlineError
from configs.settings import ActorSettings
from tests.weights.support.scripted_publisher import (
    CALLER,
    CHUNK_BYTES,
    NUM_BYTES,
    ScriptedPublisher,
    manifest,
)

LIMIT_S = 0.2
PLACE = "tcp://127.0.0.1:9"


class BusyEngine:
    """An engine of a machine that has other work."""

    def __init__(self, *, slow_in: str = "") -> None:
        self._slow_in = slow_in

    async def _take(self, what: str) -> None:
        await asyncio.sleep(4 * LIMIT_S if what == self._slow_in else 0)

    async def apply(self, staged) -> float:
        await self._take("apply")
        return 0.001

    async def probe(self, token_ids) -> tuple[float, ...]:
        await self._take("probe")
        return manifest(1).probe.logprobs

    async def read_back(self, staged) -> list[str] | None:
        await self._take("read_back")
        return []


@pytest.fixture
def publisher(monkeypatch) -> ScriptedPublisher:
    publisher = ScriptedPublisher()
    monkeypatch.setattr(slices, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(links.PublisherLink, "post", lambda _, message: publisher.post(message))
    return publisher


def synced(publisher, folder, engine=None, *, is_announced: bool = True):
    """Wait for the first version as an actor does; the link to its publisher is the test's."""

    async def story():
        receiver = WeightReceiver(
            engine or BusyEngine(),
            ActorSettings(weight_timeout_s=LIMIT_S),
            caller=CALLER,
            staging=folder,
        )
        publisher.answer = receiver._on_message
        publication = Publication(manifest(1).version, manifest(1).digest, PLACE, "key")
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(receiver._transfer.run()),
                tasks.create_task(receiver._apply_all()),
            ]
            await asyncio.sleep(0)
            if is_announced:
                receiver._on_message(Announce(manifest(1), 0))
            try:
                return await receiver.first_sync(publication)
            except DeadlineError as error:
                return str(error)
            finally:
                for task in running:
                    task.cancel()

    return asyncio.run(asyncio.wait_for(story(), 20.0))


@pytest.mark.parametrize("slow_in", ["apply", "probe", "read_back"])
def test_what_the_engine_does_with_the_bytes_is_not_counted(publisher, tmp_path, slow_in) -> None:
    assert synced(publisher, tmp_path, BusyEngine(slow_in=slow_in)) == manifest(1).version


def test_bytes_that_keep_coming_are_waited_for(publisher, tmp_path) -> None:
    publisher.delay_s = 0.7 * LIMIT_S  # for each four slices of seven

    assert synced(publisher, tmp_path) == manifest(1).version
    assert len(publisher.asked) == -(-NUM_BYTES // CHUNK_BYTES)


def test_bytes_that_stay_away_end_the_wait_with_what_has_come(publisher, tmp_path) -> None:
    asked, post = itertools.count(1), publisher.post
    publisher.post = lambda pull: next(asked) <= 2 and post(pull)

    text = synced(publisher, tmp_path)

    assert f"must go on arriving from {PLACE} within actors.weight_timeout_s = 0.2 s" in text
    assert "MiB, and nothing more; see in the learner's log whether it is alive, or raise" in text


def test_a_publisher_without_news_is_asked_about_as_such(publisher, tmp_path) -> None:
    text = synced(publisher, tmp_path, is_announced=False)

    assert f"must be announced by {PLACE} within actors.weight_timeout_s = 0.2 s" in text
    assert "that this actor's key is in the learner's keys/allowed" in text
