"""The Redis in memory answers as a real one: both do what the model says, on the same seeds."""

from __future__ import annotations

import pytest

from buffer.client.scripts import load_script
from tests.buffer.support.model.history import play
from tests.buffer.support.model.stores import OnServer


@pytest.mark.parametrize("seed", range(6))
def test_a_real_server_does_what_the_model_says(redis_url: str, seed: int) -> None:
    store = OnServer(redis_url, load_script)
    try:
        history = play(store, seed)
    finally:
        store.close()

    assert len(set(history.told)) > 20, "hardly anything happened"
