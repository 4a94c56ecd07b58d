"""Commands to an engine's thread: what is cancelled stays cancelled, what goes on may take long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from actors.engine.engine import Sampled, StagedWeights
from actors.engine.engine_thread import EngineThread
from actors.engine.threaded import LEAST_BYTES_PER_S, ThreadedEngine
from actors.engine.waits import Answers, StallWatch, settle, settle_with_error
from configs.errors import DeadlineError, EngineDied, WeightsError
from tests.waiting import until
from tests.weights.support.scripted_publisher import manifest

LIMIT_S = 0.2


class HeldStepper:
    """A stepper that stands in a start, or in a reading back, until it is let go."""

    vocabulary, has_work = 64, False

    def __init__(self, *, holds: str = "", fails: bool = False, moves: bool = False) -> None:
        self.entered, self.let_go = threading.Event(), threading.Event()
        self._holds, self._fails, self._moves = holds, fails, moves
        self.calls: list[str] = []
        self.fault = ""

    def _hold(self, what: str, moved: Callable[[], object] = lambda: None) -> None:
        if what != self._holds:
            return
        self.entered.set()
        while not self.let_go.wait(LIMIT_S / 20):
            if self._moves:
                moved()
        if self._fails:
            raise RuntimeError("its core was told to end as well")

    def start(self) -> None:
        self._hold("start")

    def prepare(self, staged: StagedWeights) -> bool:
        return False

    def is_prepared(self, staged: StagedWeights) -> bool:
        self.calls.append("is_prepared")
        if self.fault:
            raise WeightsError(self.fault)
        return len(self.calls) > 2

    def pause(self) -> Iterable[Sampled]:
        self.calls.append("pause")
        return ()

    def load(self, staged: StagedWeights) -> None:
        self.calls.append("load")

    def resume(self) -> None:
        self.calls.append("resume")

    def read_back(
        self, staged: StagedWeights, moved: Callable[[], object] = lambda: None
    ) -> list[str] | None:
        self._hold("read_back", moved)
        return []

    def cancel(self, keys: list[int]) -> None:
        pass

    def begin_probe(self, key: int, token_ids: tuple[int, ...]) -> None:
        pass

    def step(self) -> Iterable[Sampled]:
        return ()

    def check_health(self) -> None:
        pass

    def rest(self) -> Iterable[Sampled]:
        return ()

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass


def engine_of(stepper: HeldStepper) -> ThreadedEngine:
    return ThreadedEngine(stepper, max_model_len=64, command_timeout_s=LIMIT_S)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("fails", [False, True])
def test_a_stop_in_an_engines_start_is_no_death(fails: bool) -> None:
    stepper = HeldStepper(holds="start", fails=fails)

    async def story() -> None:
        engine = engine_of(stepper)
        starting = asyncio.create_task(engine.start())
        await until(stepper.entered.is_set)
        starting.cancel()
        await asyncio.wait({starting})
        stepper.let_go.set()
        await engine.close()
        assert engine._thread is not None
        await asyncio.to_thread(engine._thread.join, 10.0)
        assert not engine._thread.is_alive

    with capture_logs() as logs:
        asyncio.run(story())

    assert [line for line in logs if line["log_level"] in ("error", "critical")] == []
    assert not any("InvalidStateError" in str(line) for line in logs)


def test_whoever_has_left_is_given_no_answer_and_the_thread_lives_on(tmp_path: Path) -> None:
    thread = EngineThread(HeldStepper(), max_model_len=64, stall=StallWatch())  # type: ignore[arg-type]
    staged = StagedWeights(tmp_path, manifest(1))
    for command in (thread.halt, lambda answer: thread.read_back(staged, answer)):
        left: Future[Any] = Future()
        left.cancel()
        thread._stood_since = 0.0
        command(left)
        assert left.cancelled()

    told: Future[int] = Future()
    settle_with_error(told, EngineDied("it died"))
    settle(told, 1)
    with pytest.raises(EngineDied, match="it died"):
        told.result()


def test_a_reading_back_that_makes_progress_may_take_longer_than_a_command(tmp_path: Path) -> None:
    staged = StagedWeights(tmp_path, manifest(1))

    async def read(stepper: HeldStepper) -> list[str] | None:
        engine = engine_of(stepper)
        await engine.start()
        reading = asyncio.create_task(engine.read_back(staged))
        asyncio.get_running_loop().call_later(5 * LIMIT_S, stepper.let_go.set)
        try:
            return await reading
        finally:
            stepper.let_go.set()
            await engine.close()

    assert asyncio.run(read(HeldStepper(holds="read_back", moves=True))) == []
    with pytest.raises(DeadlineError, match=r"must read weights back within 0\.2 s, got no answer"):
        asyncio.run(read(HeldStepper(holds="read_back")))


def test_weights_of_a_large_model_have_the_time_that_their_bytes_take(tmp_path: Path) -> None:
    limits = []

    class Noting(Answers):
        async def within(self, answer, seconds, what, **options):
            limits.append((what, seconds))
            return await super().within(answer, seconds, what, **options)

    async def story() -> None:
        engine = engine_of(HeldStepper())
        engine._answers = Noting()
        await engine.start()
        for num_bytes in (10**3, 10**11):
            described = structs.replace(manifest(1), num_bytes=num_bytes)
            await engine.read_back(StagedWeights(tmp_path, described))
        await engine.close()

    asyncio.run(story())

    small, large = [seconds for what, seconds in limits if what == "read weights back"]
    assert small == LIMIT_S
    assert large == LIMIT_S + 10**11 / LEAST_BYTES_PER_S


def test_a_swap_begins_when_the_workers_are_prepared(tmp_path: Path) -> None:
    stepper, staged = HeldStepper(), StagedWeights(tmp_path, manifest(1))

    async def story() -> None:
        engine = engine_of(stepper)
        await engine.start()
        await engine.apply(staged)
        assert stepper.calls == ["is_prepared"] * 3 + ["pause", "load", "resume"]
        stepper.calls, stepper.fault = [], "it is gone"
        with pytest.raises(WeightsError, match="it is gone"):
            await engine.apply(staged)
        assert stepper.calls == ["is_prepared"], "the old weights go on"
        await engine.close()

    asyncio.run(story())
