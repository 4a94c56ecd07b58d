"""The store against its specification, `support/model`: replies and contents are equal.

Other seeds: NYALA_SEED=1000 NYALA_SEEDS=500 pytest tests/buffer/test_model.py.
"""

from __future__ import annotations

import os

import pytest

from buffer.client.scripts import load_script
from tests.buffer.support.model.both import Mismatch
from tests.buffer.support.model.history import play
from tests.buffer.support.model.planted_bugs import LISTS, Bug
from tests.buffer.support.model.stores import FullServer, InMemory
from tests.buffer.support.mutants import broken

FIRST_SEED = int(os.environ.get("NYALA_SEED", "0"))
TALK = {"want_agents", "add_calls", "say_replies"}
SEEDS = int(os.environ.get("NYALA_SEEDS", "1" if "NYALA_SEED" in os.environ else "40"))


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SEEDS))
def test_the_store_does_what_the_model_says(seed: int) -> None:
    history = play(InMemory(load_script), seed)

    assert len(set(history.told)) > 20, "hardly anything happened"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_only_what_brings_content_is_refused_by_a_full_server(redis_url: str, seed: int) -> None:
    refused = frozenset({"begin_run", "create", "create_eval", "beat", "submit", *TALK})
    trims = frozenset({"trim_replay"})  # the more the fuller the server is, which no model has
    store = FullServer(redis_url, load_script, spared=refused | trims)
    try:
        play(store, seed)
    finally:
        store.close()

    assert len(store.called) > 35, "hardly anything was called"


@pytest.mark.parametrize(
    "bug", [bug for bugs in LISTS.values() for bug in bugs], ids=lambda bug: bug.file
)
def test_a_planted_bug_is_still_in_the_scripts(bug: Bug) -> None:
    broken(bug)


def test_a_history_notices_a_store_that_differs() -> None:
    scripts = broken(
        Bug("tasks", "if state == 'L' then give_back", "if state == 'R' then give_back")
    )

    with pytest.raises(Mismatch, match=r"holds|answered"):  # noqa: PT012 - any of these seeds
        for seed in range(20):
            play(InMemory(scripts), seed)
