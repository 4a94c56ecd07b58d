"""New weights wait for evaluations, but not for ever."""

from __future__ import annotations

import asyncio
import time

from actors.episodes.held_leases import SwapGate
from tests.waiting import still_waits


def test_a_swap_waits_for_the_last_evaluation_episode():
    async def story():
        gate = SwapGate(hold_s=10)
        gate.begin_evaluation(1)
        gate.begin_evaluation(2)
        swap = asyncio.create_task(gate.wait())
        gate.end_evaluation(1)
        assert await still_waits(swap, 0.02)

        gate.end_evaluation(2)
        gate.end_evaluation(3)  # not an evaluation: nothing to it
        await asyncio.wait_for(swap, 1)

    asyncio.run(story())


def test_a_swap_waits_no_longer_than_it_is_told():
    async def story():
        gate = SwapGate(hold_s=0.05)
        gate.begin_evaluation(1)
        begun = time.monotonic()
        await gate.wait()

        assert 0.04 < time.monotonic() - begun < 2

    asyncio.run(story())
