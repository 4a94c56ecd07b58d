"""An engine whose process dies or hangs: its tokens come, then an error, and nobody waits on."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable

import pytest

from actors.engine import waits
from actors.engine.engine import Delta, GenerationRequest, Sampled, StagedWeights
from actors.engine.engine_thread import not_started
from actors.engine.threaded import ThreadedEngine
from actors.engine.waits import FIRST_S, SILENT_S, StallWatch
from configs.errors import (
    DeadlineError,
    EngineDied,
    EngineError,
    EngineNotStarted,
    EngineUnfit,
    exit_code,
)
from tests.actors.support.lost_core import CoreStepper
from tests.waiting import until
from tests.weights.support.scripted_publisher import manifest

NOTICED_S = 5.0
LOST = r"vLLM's core must keep running, got its exit"

Story = Callable[[ThreadedEngine, CoreStepper], Awaitable[None]]


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tell(story: Story, **options: object) -> CoreStepper:
    """Tell a story of a started engine, which must end within the time of any test."""
    stepper = CoreStepper()

    async def told() -> None:
        engine = ThreadedEngine(stepper, max_model_len=64, **options)  # type: ignore[arg-type]
        await engine.start()
        try:
            await story(engine, stepper)
        finally:
            await engine.close()

    try:
        asyncio.run(asyncio.wait_for(told(), 60))
    finally:
        stepper.process.close()
    return stepper


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, 3), 40, 1.0, ())


def made(key: int, *tokens: int) -> Sampled:
    return Sampled(key, list(tokens), [-1.0] * len(tokens), None)


async def all_deltas(engine: ThreadedEngine) -> tuple[list[Delta], EngineDied]:
    """Read until the engine is dead."""
    deltas: list[Delta] = []
    while True:
        try:
            deltas += await engine.deltas()
        except EngineDied as error:
            return deltas, error


def tokens_of(deltas: list[Delta], name: str) -> tuple[int, ...]:
    return sum((delta.token_ids for delta in deltas if delta.request_id == name), ())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_every_token_of_a_core_that_dies_comes_before_the_error(number: signal.Signals) -> None:
    async def story(engine: ThreadedEngine, stepper: CoreStepper) -> None:
        engine.submit([request("a"), request("b")])
        stepper.unsent = [made(2, 9)]
        for n in range(20):
            stepper.outputs.put([made(1, n), made(2, n)])
        died_at = time.monotonic()
        stepper.process.end(number)
        deltas, error = await all_deltas(engine)

        assert time.monotonic() - died_at < NOTICED_S
        assert tokens_of(deltas, "a") == tuple(range(20))
        assert tokens_of(deltas, "b") == (*range(20), 9)
        assert error.args[0].startswith(
            "the process of vLLM's core must keep running, got its exit"
        )
        with pytest.raises(EngineDied, match=LOST):
            engine.submit([request("c")])

    assert tell(story).is_closed


def test_a_core_without_requests_is_missed_as_well() -> None:
    async def story(engine: ThreadedEngine, stepper: CoreStepper) -> None:
        stepper.process.end()
        with pytest.raises(EngineDied, match=LOST):
            await asyncio.wait_for(engine.deltas(), NOTICED_S)

    tell(story)


def test_a_swap_of_weights_does_not_wait_for_a_dead_core(tmp_path) -> None:
    async def story(engine: ThreadedEngine, stepper: CoreStepper) -> None:
        staged = StagedWeights(tmp_path, manifest(1))
        swap = asyncio.create_task(engine.apply(staged))
        await until(lambda: stepper.calls)
        stepper.process.end()
        with pytest.raises(EngineDied, match=LOST):
            await asyncio.wait_for(swap, NOTICED_S)

    tell(story)


def test_a_core_that_makes_nothing_for_long_is_ended_with_its_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("actors.engine.threaded.LOOK_S", 0.001)

    async def story(engine: ThreadedEngine, stepper: CoreStepper) -> None:
        engine.submit([request("a")])
        stepper.outputs.put([made(1, 7)])
        (first,) = await engine.deltas()
        stepper.unsent = [made(1, 8)]
        reading = asyncio.create_task(all_deltas(engine))

        def has_ended_a_second_later() -> bool:
            clock.now += 1.0
            return reading.done()

        await until(has_ended_a_second_later, every_s=0.001)
        deltas, error = reading.result()

        assert first.token_ids == (7,)
        assert tokens_of(deltas, "a") == (8,)
        assert clock.now >= SILENT_S
        assert error.args[0].startswith("the engine must make a token within 60 s while it has")
        assert stepper.process.exitcode == -signal.SIGKILL

    tell(story, stall=StallWatch(clock=clock))


def test_a_command_that_is_not_answered_ends_the_core(tmp_path) -> None:
    async def story(engine: ThreadedEngine, stepper: CoreStepper) -> None:
        with pytest.raises(DeadlineError, match=r"must apply weights within 0.2 s"):
            await engine.apply(StagedWeights(tmp_path, manifest(1)))
        with pytest.raises(EngineDied, match=LOST):
            await engine.deltas()

    tell(story, command_timeout_s=0.2)


def looks(watch: StallWatch, clock: Clock, seconds: float, **requests: object) -> int:
    """Look once a second; return at which look the engine was given up, 0 = never."""
    for n in range(1, int(seconds) + 1):
        clock.now += waits.LOOK_S
        if watch.detect_stall(**requests):  # type: ignore[arg-type]
            return n
    return 0


def test_silence_counts_from_the_last_token_and_the_first_one_may_take_longer() -> None:
    clock = Clock()
    watch = StallWatch(clock=clock)

    assert looks(watch, clock, 1000, num_wanted=0, has_begun=False) == 0
    assert looks(watch, clock, SILENT_S - 1, num_wanted=3, has_begun=True) == 0
    assert looks(watch, clock, 1000, num_wanted=3, has_begun=True) == 1
    watch = StallWatch(clock=clock)
    watch.moved()
    assert looks(watch, clock, 1000, num_wanted=3, has_begun=False) == FIRST_S + 1


def test_a_slow_engine_may_be_silent_for_longer() -> None:
    clock = Clock()
    watch = StallWatch(clock=clock)
    assert looks(watch, clock, 30, num_wanted=1, has_begun=True) == 0
    watch.moved()

    assert looks(watch, clock, 1000, num_wanted=1, has_begun=True) == 8 * 30 + 1


def test_an_actor_that_was_stopped_has_not_seen_its_engine_hang() -> None:
    clock = Clock()
    watch = StallWatch(clock=clock)
    clock.now += 3600.0

    assert looks(watch, clock, SILENT_S - 3, num_wanted=1, has_begun=True) == 0


@pytest.mark.parametrize(
    "fault",
    [
        ImportError("libnuma.so.1: cannot open shared object file"),
        OSError("libcudart.so.13: cannot open shared object file"),
        AttributeError("'_OpNamespace' '_C' object has no attribute 'init_cpu_memory_env'"),
        RuntimeError("InductorError: RuntimeError: No working C++ compiler found"),
        RuntimeError("The NVIDIA driver on your system is too old (found version 12040)"),
        NotImplementedError("head size 24 is not supported"),
        ValueError("No available memory for the cache blocks"),
    ],
)
def test_a_start_that_would_fail_again_is_told_from_others(fault: Exception) -> None:
    error = not_started(fault)

    assert isinstance(error, EngineUnfit)
    assert repr(fault) in str(error)
    assert "restart" not in str(error)


@pytest.mark.parametrize(
    "fault",
    [
        RuntimeError("Engine core initialization failed. See root cause above."),
        json.JSONDecodeError("Expecting value", "{", 1),
        EngineDied("the process of vLLM's core must keep running, got its exit"),
    ],
)
def test_a_start_that_may_succeed_the_next_time_is_tried_once_more(fault: Exception) -> None:
    error = not_started(fault)

    assert isinstance(error, EngineNotStarted)
    assert repr(fault) in str(error)


@pytest.mark.parametrize(
    "fault",
    [
        ValueError("Free memory on device cuda:0 (20/79 GiB) is less than desired"),
        OSError("We couldn't connect to the hub to load this file"),
        TimeoutError("timed out"),
    ],
)
def test_a_start_that_waits_for_others_is_tried_like_any_other_crash(fault: Exception) -> None:
    error = not_started(fault)

    assert type(error) is EngineError
    assert exit_code(error) == 1
