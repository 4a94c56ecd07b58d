"""The first message of an actor to the broker."""

from __future__ import annotations

import pytest

from actors.assembly import greeting
from configs.settings import ActorSettings, RunSettings, Settings


@pytest.mark.parametrize(("places", "capacity"), [(8, 8), (256, 272), (4096, 4096)])
def test_a_few_leases_wait_for_a_place_in_the_engine(places, capacity):
    settings = Settings(
        run=RunSettings(model="init"), actors=ActorSettings(max_concurrent_episodes=places)
    )

    assert greeting(settings, "a").capacity == capacity
