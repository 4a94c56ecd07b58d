"""The publisher's server: an actor's name is its own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from broker.protocol.weight_messages import Announce, Join, Pull, WeightChunk
from broker.weights.port import Route
from buffer.record.episode import PolicyVersion
from learner.weights.memory import WeightSlots
from learner.weights.server import WeightServer
from tests.weights.support.scripted_publisher import contents, manifest


def test_another_key_cannot_take_an_actors_weights_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[Route, object]] = []
    unused: Any = None
    join = Join(PolicyVersion(-1, -1), False, "cpu", reads_memory=False)

    async def story() -> None:
        slots = WeightSlots(tmp_path)
        slots.path(0).write_bytes(contents(1))
        slots.add(0)
        assert slots.acquire() == 0
        slots.seal(0, manifest(1))
        server = WeightServer(unused, slots, run="toy", broadcast=None, report=lambda _sent: None)
        monkeypatch.setattr(server._port, "post", lambda route, news: sent.append((route, news)))
        server._on_message(Route(b"liar"), "another", "actor-0", join)  # before its true holder
        server._on_message(Route(b"honest"), "its key", "actor-0", join)
        server._versions.advance()
        server._on_message(Route(b"again"), "its key", "actor-0", join)  # it has connected again
        server._on_message(Route(b"liar"), "another", "actor-0", Pull(PolicyVersion(1, 1), 0, 4))
        server._on_message(Route(b"again"), "its key", "actor-0", Pull(PolicyVersion(1, 1), 0, 4))

    asyncio.run(story())

    told = [(route.id, type(news)) for route, news in sent]
    assert told == [(b"again", Announce), (b"liar", WeightChunk), (b"again", WeightChunk)]
