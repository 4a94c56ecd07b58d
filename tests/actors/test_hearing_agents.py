"""Hearing live agents beside the actor's other work."""

from __future__ import annotations

import asyncio

from actors.episodes.sampling import Sampling


class Mail:
    """Brings calls of three conversations at once, and then no more."""

    def __init__(self) -> None:
        self.news = [[(name, "calls") for name in "abc"]]

    async def listen(self) -> list[tuple[str, str]]:
        return self.news.pop() if self.news else await asyncio.Future()


def test_heartbeats_go_on_between_conversations_that_are_read_after_a_death() -> None:
    done: list[str] = []
    sampling = object.__new__(Sampling)
    sampling._mail = Mail()  # type: ignore[assignment]
    sampling._take_calls = lambda held, calls: done.append(str(held))  # type: ignore[method-assign]

    async def beat() -> None:
        hearing = asyncio.create_task(sampling.hear_agents())
        for number in range(4):
            await asyncio.sleep(0)
            done.append(str(number))
        hearing.cancel()

    asyncio.run(beat())

    assert done == ["a", "0", "b", "1", "c", "2", "3"]
