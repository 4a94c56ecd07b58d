"""A teacher's log-probs, its tokenizer, and its loop at a broker in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.engine.tokenizer import check_same_tokenizer
from actors.engine.torch_engine import TorchOptions, torch_engine
from actors.teacher import Teacher, score
from broker.client import BrokerClient
from broker.protocol.messages import LeaseRequest
from broker.transport.keys import make_keys
from buffer import operations
from buffer.record.codec import decode_episode
from buffer.record.episode import Branch
from configs.errors import EngineDied, SettingsError
from configs.settings import ActorSettings, RunSettings
from tests.actors.support.saved_tokenizer import save_tokenizer
from tests.actors.support.tiny_model import VOCABULARY, make_model, reference_logprobs
from tests.broker.support.records import submission
from tests.broker.support.ring import FIRST, Ring, begin, hello, ring, until_stats
from tests.buffer.support.episodes import example_episode
from tests.waiting import until

# --------------------------------------------------------------------------------------------------
# Log-probs of an episode.

PROMPT = [900, 901]


async def prefix_probe(token_ids: tuple[int, ...]) -> list[float]:
    """A model whose log-probs tell all that came before each token, in order."""
    return [-hash(token_ids[: i + 1]) % 10_007 / -10_007 for i in range(1, len(token_ids))]


def tokens_up_to(place: int, branches: Sequence[Branch]) -> list[int]:
    """The path of one token, by its definition; a token's id is its place."""
    parent = dict(branches).get(place, place)
    if parent is None:
        return [place]
    return [*(tokens_up_to(parent - 1, branches) if parent else PROMPT), place]


@pytest.mark.parametrize(
    ("mask", "branches"),
    [
        ([1, 1, 1, 0, 0, 1], ()),
        ([1, 1, 1, 1, 1, 1, 0, 0, 1], (Branch(5, 3), Branch(7, None))),
        ([1, 0, 1, 1, 1, 1], (Branch(2, 0), Branch(4, 1), Branch(5, 1))),
        ([1, 1, 0], (Branch(2, None),)),
    ],
)
def test_each_token_is_scored_after_its_own_path(mask: list[int], branches: tuple) -> None:
    episode = example_episode(tokens=len(mask))
    completion = replace(
        episode.completion,
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=np.array(mask, np.uint8),
        branches=branches,
    )
    episode = replace(episode, prompt_ids=np.array(PROMPT, np.int32), completion=completion)

    logprobs = asyncio.run(score(prefix_probe, episode))

    expected = [
        asyncio.run(prefix_probe((0, *tokens_up_to(place, branches))[1:]))[-1] if trained else 0.0
        for place, trained in enumerate(mask)
    ]
    np.testing.assert_array_equal(logprobs, np.array(expected, np.float32))


def test_the_small_engine_scores_at_the_temperature_of_the_run(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    ids = tuple(range(3, 40))

    async def probe(temperature: float) -> tuple[float, ...]:
        engine = torch_engine(
            TorchOptions(str(tmp_path), max_model_len=64, probe_temperature=temperature)
        )
        await engine.start()
        try:
            with pytest.raises(SettingsError, match=f"vocabulary = {VOCABULARY}, got {VOCABULARY}"):
                await engine.probe((3, VOCABULARY))
            return await engine.probe(ids)
        finally:
            await engine.close()

    for temperature in (1.0, 0.6):
        reference = reference_logprobs(model, list(ids), temperature=temperature)
        np.testing.assert_allclose(asyncio.run(probe(temperature)), reference, atol=1e-5)


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    ours, alike = save_tokenizer(tmp_path / "ours"), save_tokenizer(tmp_path / "alike")
    other = save_tokenizer(tmp_path / "other", letters="zyx")
    run = RunSettings(model=ours)

    check_same_tokenizer(run, alike)
    with pytest.raises(SettingsError, match=r"whose token '\\n' is missing and not \d+; choose"):
        check_same_tokenizer(run, other)


# --------------------------------------------------------------------------------------------------
# The loop, at a real broker and store. The engine's log-probs are numbers: what matters is who
# scores what, and when.


class Engine:
    """An engine whose probes wait until the test lets them go."""

    def __init__(self, *, is_open: bool = True, error: Exception | None = None) -> None:
        self.open, self.error = asyncio.Event(), error
        self.num_probes = 0
        self.is_closed = False
        if is_open:
            self.open.set()

    async def start(self) -> None:
        """It needs no time."""

    async def probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        self.num_probes += 1
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return tuple(-0.25 for _ in token_ids[1:])

    async def close(self) -> None:
        self.is_closed = True


def teacher_of(here: Ring, engine: Engine, name: str = "teacher-1") -> tuple[Teacher, BrokerClient]:
    client = here.client(name)
    teacher = Teacher(
        hello(name, 4, teacher="teacher"),
        actors=ActorSettings(heartbeat_s=0.1),
        max_message_bytes=2**20,
        broker=client,
        engine=engine,  # type: ignore[arg-type]
        give_up_s=20,
    )
    return teacher, client


def play(
    story: Callable[[Ring], Coroutine[object, object, None]], url: str, folder: Path, groups: int
) -> None:
    """Let an actor finish some groups, whose records then wait for a teacher."""

    async def played() -> None:
        keys = make_keys(folder / "keys")
        async with ring(url, keys, teacher="a model") as here:
            await begin(here.store, groups=groups)
            actor = await here.actor()
            for lease in (await actor.lease(LeaseRequest(2 * groups, FIRST))).leases:
                await actor.submit(submission(lease, teacher="teacher"))
            await story(here)

    asyncio.run(asyncio.wait_for(played(), 60))


async def logprobs_of(here: Ring, tasks: Sequence[int]) -> list[list[float]]:
    records = await here.store.run(operations.records(tasks))
    scores = [decode_episode(record or b"").completion.teacher_logprobs for record in records]
    return [[] if each is None else each.tolist() for each in scores]


def test_a_teacher_scores_what_waits_and_ends_with_the_run(redis_url: str, tmp_path: Path) -> None:
    async def story(here: Ring) -> None:
        engine = Engine()
        teacher, _ = teacher_of(here, engine)
        running = asyncio.create_task(teacher.run())
        await until_stats(here, lambda stats: stats.buffered_units == 5)
        assert await logprobs_of(here, range(10)) == [[-0.25] * 3] * 10
        await here.store.run(operations.cancel(1))
        await asyncio.wait_for(running, 20)

        assert (teacher.num_scored, teacher.num_lost, engine.num_probes) == (10, 0, 10)
        assert engine.is_closed

    play(story, redis_url, tmp_path, groups=5)


def test_what_a_teacher_had_is_scored_by_another_when_it_is_told_to_go(
    redis_url: str, tmp_path: Path
) -> None:
    async def story(here: Ring) -> None:
        stuck = Engine(is_open=False)
        teacher, _ = teacher_of(here, stuck)
        running = asyncio.create_task(teacher.run())
        await until_stats(here, lambda stats: stats.scoring == 4)
        teacher.stop()
        await asyncio.wait_for(running, 20)
        stats = await here.store.run(operations.stats())
        assert (stats.scoring, stats.unscored, stuck.is_closed) == (0, {"teacher": 6}, True)

        other, _ = teacher_of(here, Engine(), "teacher-2")
        running = asyncio.create_task(other.run())
        await until_stats(here, lambda stats: stats.buffered_units == 3)
        other.stop()
        await asyncio.wait_for(running, 20)
        assert other.num_scored == 6

    play(story, redis_url, tmp_path, groups=3)


def test_a_teacher_stops_work_on_leases_that_others_have(redis_url: str, tmp_path: Path) -> None:
    async def story(here: Ring) -> None:
        engine = Engine(is_open=False)
        teacher, _ = teacher_of(here, engine)
        running = asyncio.create_task(teacher.run())
        await until_stats(here, lambda stats: stats.scoring == 2)
        [peer] = here.parts.peers.named("teacher-1")
        await here.store.run(operations.suspend(peer.tag, "for the test"))
        await until(lambda: teacher.num_lost == 2, "it keeps its leases")
        await here.store.run(operations.resume())
        await until_stats(here, lambda stats: stats.scoring == 2)  # leased again, by the same
        engine.open.set()
        await until_stats(here, lambda stats: stats.buffered_units == 1)
        teacher.stop()
        await asyncio.wait_for(running, 20)
        assert teacher.num_scored == 2

    play(story, redis_url, tmp_path, groups=1)


def test_a_record_that_cannot_be_scored_is_a_failure_of_the_data(
    redis_url: str, tmp_path: Path
) -> None:
    async def story(here: Ring) -> None:
        teacher, _ = teacher_of(here, Engine(error=SettingsError("it is too long")))
        running = asyncio.create_task(teacher.run())
        stats = await until_stats(here, lambda stats: stats.data_failures >= 2)
        assert stats.data_failure == "not scored: it is too long"
        teacher.stop()
        await asyncio.wait_for(running, 20)

    play(story, redis_url, tmp_path, groups=1)


def test_a_teacher_whose_engine_dies_gives_its_leases_back(redis_url: str, tmp_path: Path) -> None:
    async def story(here: Ring) -> None:
        teacher, _ = teacher_of(here, Engine(error=EngineDied("lost")))
        with pytest.raises(EngineDied, match="lost"):
            await asyncio.wait_for(teacher.run(), 20)
        stats = await here.store.run(operations.stats())
        assert (stats.scoring, stats.unscored) == (0, {"teacher": 2})

    play(story, redis_url, tmp_path, groups=1)
