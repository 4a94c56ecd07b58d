"""Commands to an engine's thread: what is cancelled stays cancelled."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from actors.engine.waits import Answers


def test_a_command_that_is_cancelled_as_its_answer_comes_is_cancelled() -> None:
    async def story(rounds: int) -> bool:
        """Cancel some rounds of the loop after the answer; returns whether it was in time."""
        answer: Future[int] = Future()
        command = asyncio.create_task(Answers().within(answer, 5.0, "answer"))
        await asyncio.sleep(0)
        answer.set_result(1)
        for _ in range(rounds):
            await asyncio.sleep(0)
        in_time = command.cancel()
        await asyncio.wait({command})
        assert command.cancelled() is in_time, f"swallowed after {rounds} rounds"
        return in_time

    async def stories() -> list[bool]:
        return [await story(rounds) for rounds in range(6)]

    assert len(set(asyncio.run(stories()))) == 2  # some in time, the last ones too late
