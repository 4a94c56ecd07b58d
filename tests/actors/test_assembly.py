"""The first message of an actor to the broker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors import assembly
from actors.assembly import greeting, prepare, run_actor
from actors.capacity import leases_for
from broker.protocol.messages import Enrol, Receipt
from configs.errors import RefusedError, SettingsError
from configs.settings import ActorSettings, BrokerSettings, RunSettings, Settings


@pytest.mark.parametrize(("places", "capacity"), [(8, 8), (256, 272), (4096, 4096)])
def test_a_few_leases_wait_for_a_place_in_the_engine(places, capacity):
    settings = Settings(
        run=RunSettings(model="init"), actors=ActorSettings(max_concurrent_episodes=places)
    )

    assert greeting(settings, "a").capacity == capacity


def test_an_actor_on_a_cpu_begins_one_batch_where_nothing_else_is_set():
    run = RunSettings(model="init", groups_per_batch=5, group_size=4)

    assert greeting(Settings(run=run), "a").capacity == leases_for(20)


def test_actors_with_different_engines_may_join_one_run():
    run = RunSettings(model="init")
    hashes = [
        greeting(Settings(run=run, actors=ActorSettings(engine=engine)), "a").hashes
        for engine in ("vllm", "torch", "auto")
    ]

    assert hashes[0] == hashes[1] == hashes[2]


class FullBroker:
    """Has no place for another key for a while: a real one has none for a minute at least."""

    def __init__(self, refusals: int, code: str = "full") -> None:
        self.refusals, self.code = refusals, code

    async def order(self, order: Enrol, *, deadline_s: float) -> Receipt:
        self.refusals -= 1
        if self.refusals >= 0:
            raise RefusedError("actors must be at most 2", code=self.code)
        return Receipt("its name")


def test_an_actor_waits_a_while_for_a_place_of_its_enrolment_key(monkeypatch):
    monkeypatch.setattr(assembly, "FULL_PAUSE_S", 0.01)

    def enrol(broker: Any) -> str:
        return asyncio.run(assembly._enrolled(broker, Enrol("k" * 40))).text

    assert enrol(FullBroker(3)) == "its name"
    with pytest.raises(RefusedError, match="at most"):
        enrol(FullBroker(1, code="malformed"))
    monkeypatch.setattr(assembly, "FULL_S", 0.0)
    with pytest.raises(RefusedError, match="at most 2"):
        enrol(FullBroker(10**6))


def test_more_leases_than_places_where_episodes_wait_for_their_environment():
    actors = ActorSettings(max_concurrent_episodes=64, max_episodes_in_flight=256)

    assert greeting(Settings(run=RunSettings(model="init"), actors=actors), "a").capacity == 256


def test_an_actor_without_the_port_of_its_broker_is_refused(tmp_path):
    run = RunSettings(model="init", name="far", directory=tmp_path, environment="calculator")
    with_other = BrokerSettings(endpoint="tcp://h:5757", other_endpoints=("tcp://10.0.0.1:0",))
    for broker, setting in (
        (BrokerSettings(endpoint="tcp://10.0.0.1:0"), "broker.endpoint"),
        (with_other, "broker.other_endpoints"),
    ):
        settings = Settings(run=run, broker=broker)

        with pytest.raises(SettingsError, match=rf"{setting} must .* got tcp://10\.0\.0\.1:0; "):
            asyncio.run(run_actor(settings, "actor-1", asyncio.Event()))


def test_an_actor_without_the_folder_of_an_init_model_names_it(tmp_path):
    run = RunSettings(model="init", name="far", directory=tmp_path, environment="calculator")

    with pytest.raises(SettingsError, match=rf"got no folder {tmp_path}/far/init on this machine"):
        asyncio.run(prepare(Settings(run=run), "a"))
