"""An actor's room follows what its engine's cache shows."""

import asyncio

import pytest

from actors.capacity import WINDOW_S, ActorCounts, CacheMeter, ConcurrencyLimit, Tuner, leases_for
from configs.settings import ActorSettings
from tests.waiting import still_waits

BOUNDS = ActorSettings(
    max_concurrent_episodes="auto", least_concurrent_episodes=8, most_concurrent_episodes=64
)


def test_a_room_begins_with_the_least_and_grows_into_the_cache():
    room, meter = ConcurrencyLimit(999, group_size=4), CacheMeter()
    tuner = Tuner(room, BOUNDS, meter)
    assert room.most == leases_for(8)

    tuner.tune_room(0.0, ActorCounts(0, 8, 0))
    assert room.most == 8, "nothing is known of the cache yet"
    meter.record(0.25, 0)
    for second in range(int(WINDOW_S) + 1):
        tuner.tune_room(float(second), ActorCounts(100 * second, 8, 0))

    assert room.most == leases_for(16) == 17


def test_nothing_is_measured_before_a_lower_number_has_been_reached():
    room, meter = ConcurrencyLimit(999, group_size=4), CacheMeter()
    tuner = Tuner(room, BOUNDS, meter)
    meter.record(0.25, 0)

    for second in range(4 * int(WINDOW_S)):
        tuner.tune_room(float(second), ActorCounts(100 * second, 9, 0))

    assert room.most == leases_for(8) == 8
    for second in range(4 * int(WINDOW_S), 5 * int(WINDOW_S) + 1):
        tuner.tune_room(float(second), ActorCounts(100 * second, 8, 0))
    assert room.most == leases_for(16)


def test_evicted_episodes_are_counted_over_all_steps():
    meter = CacheMeter()
    for evicted in (0, 2, 1):
        meter.record(0.5, evicted)

    assert meter.memory is not None
    assert (meter.memory.used, meter.memory.evicted) == (0.5, 3)


def test_a_full_room_is_one_without_place_for_a_group():
    room = ConcurrencyLimit(64, group_size=8)
    assert room.full_from == 57
    room.resize(8)
    assert room.full_from == 7
    room.resize(1)
    assert room.full_from == 1


def test_who_waits_for_another_room_hears_of_it_even_before_it_waits():
    async def wait() -> None:
        room = ConcurrencyLimit(8, group_size=4)
        waiting = asyncio.create_task(room.other_than(8))
        room.resize(8)
        assert await still_waits(waiting, 0.02)

        room.resize(9)
        await asyncio.wait_for(waiting, 5)
        await asyncio.wait_for(room.other_than(8), 5)

    asyncio.run(wait())


@pytest.mark.parametrize(("slots", "in_flight", "leases"), [(256, None, 272), (256, 40, 40)])
def test_a_few_leases_wait_for_a_place(slots, in_flight, leases):
    assert leases_for(slots, in_flight) == leases
    assert leases_for(10**6) == 4096
