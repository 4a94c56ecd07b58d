"""A version that the probe refuses: pulled again twice, then judged in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec import structs

from actors.engine.engine import StagedWeights
from actors.weights.exact import exact_logprobs
from actors.weights.links import ActorIdentity
from actors.weights.receiver import WeightReceiver
from broker.protocol.manifest import Probe
from broker.protocol.messages import Publication
from broker.transport.keys import new_pair
from buffer.record.episode import PolicyVersion
from configs.errors import WeightsError
from configs.settings import ActorSettings
from tests.actors.support.tiny_model import make_model, reference_logprobs, stage

IDS = (3, 14, 15, 9, 26, 53, 5)
LITTLE, FAR = 4e-5, 0.1
"""Nats; the bound is 5e-5 on average in float32."""


class ShiftedEngine:
    """Computes what it is given, and `off` nats more."""

    def __init__(self, off: float) -> None:
        self.off, self.given = off, [0.0]

    async def apply(self, staged: StagedWeights) -> float:
        self.given = list(staged.manifest.probe.logprobs)
        return 0.0

    async def probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(score + self.off for score in TRUE)

    async def read_back(self, staged: StagedWeights) -> list[str] | None:
        return []


TRUE = [-1.0] * (len(IDS) - 1)


class Bench:
    """A receiver whose transfers are only counted."""

    def __init__(
        self,
        folder: Path,
        *,
        engine: float,
        exact: Callable[[StagedWeights], Sequence[float]] = lambda _: TRUE,
        **settings: float,
    ) -> None:
        self.folder, self.model, self.step = folder, make_model(), 0
        self.engine = ShiftedEngine(engine)
        self.receiver = WeightReceiver(
            self.engine,
            ActorSettings(**settings),
            caller=ActorIdentity(new_pair(), "run", "me"),
            staging=folder,
        )
        self.receiver._exact = exact
        self.pulls: list[bool] = []
        transfer = self.receiver._transfer
        transfer.fetch_again = lambda *, may_borrow=True: self.pulls.append(may_borrow)  # type: ignore[method-assign]

    def version(self, *, learner: float = 0.0) -> StagedWeights:
        self.step += 1
        staged = stage(self.model, self.folder / f"{self.step}", PolicyVersion(1, self.step))
        scores = tuple(score + learner for score in TRUE)
        manifest = structs.replace(staged.manifest, probe=Probe(IDS, scores))
        return StagedWeights(staged.path, manifest)

    async def apply(self, staged: StagedWeights, times: int = 1) -> None:
        for _ in range(times):
            await self.receiver._apply(staged)

    @property
    def serves(self) -> int:
        return -1 if self.receiver.is_dirty else self.receiver.version.step


@pytest.mark.parametrize("tied", [True, False])
def test_float32_scores_the_bytes_that_were_published(tmp_path: Path, tied: bool) -> None:
    make_model(tied=tied, seed=1).save_pretrained(tmp_path / "model")
    model = make_model(tied=tied)
    staged = stage(model, tmp_path / "weights", PolicyVersion(1, 1), dtype="bfloat16")
    manifest = structs.replace(staged.manifest, probe=Probe(IDS, ()))

    scores = exact_logprobs(str(tmp_path / "model"), StagedWeights(staged.path, manifest))

    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert scores == pytest.approx(reference_logprobs(model, list(IDS)).tolist(), abs=1e-5)


def test_a_learner_that_is_wrong_ends_no_actor_and_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path, engine=0.0)
    wrong = bench.version(learner=FAR)

    async def story() -> None:
        await bench.apply(wrong, times=3)
        assert bench.pulls == [True, False], "the second time not out of the same memory"
        assert bench.serves == -1
        assert "the learner is wrong: set learner.compile" in bench.receiver._verdict

        await bench.apply(bench.version(learner=FAR))
        assert bench.pulls == [True, False], "float32 decides at once about the next one"

        await bench.apply(bench.version())
        assert bench.serves == 3

    asyncio.run(story())


def test_an_engine_that_was_wrong_from_its_start_waits_and_names_the_setting(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, engine=FAR)
    staged = bench.version()

    async def story() -> None:
        await bench.apply(staged, times=3)
        assert bench.serves == -1
        assert "the engine is wrong: leave out actors.engine_args" in bench.receiver._verdict

    asyncio.run(story())


def test_an_engine_that_has_spoilt_itself_ends_so_that_another_takes_its_place(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, engine=0.0)

    async def story() -> None:
        await bench.apply(bench.version())
        assert bench.serves == 1
        bench.engine.off = FAR
        await bench.apply(staged := bench.version(), times=2)
        with pytest.raises(WeightsError, match="the engine is wrong"):
            await bench.apply(staged)

    asyncio.run(story())


def test_where_neither_side_is_wrong_the_version_is_served(tmp_path: Path) -> None:
    bench = Bench(tmp_path, engine=LITTLE)

    async def story() -> None:
        await bench.apply(bench.version(learner=-LITTLE), times=3)
        assert bench.serves == 1
        await bench.apply(bench.version(learner=-LITTLE))
        assert bench.serves == 2
        assert len(bench.pulls) == 2, "pulled again for the first version alone"

    asyncio.run(story())


def test_a_bound_of_ones_own_is_kept_where_neither_side_is_wrong(tmp_path: Path) -> None:
    bench = Bench(tmp_path, engine=LITTLE, probe_tolerance=5e-5)

    async def story() -> None:
        await bench.apply(bench.version(learner=-LITTLE), times=3)
        assert bench.serves == -1
        assert "set actors.probe_tolerance above" in bench.receiver._verdict

    asyncio.run(story())


def test_where_float32_cannot_be_computed_the_actor_says_so_and_waits(tmp_path: Path) -> None:
    def fails(_staged: StagedWeights) -> Sequence[float]:
        raise OSError("no such model")

    bench = Bench(tmp_path, engine=FAR, exact=fails)

    async def story() -> None:
        await bench.apply(bench.version(), times=3)
        assert bench.serves == -1
        assert (
            "float32 cannot decide (no such model); set actors.probe_tolerance"
            in bench.receiver._verdict
        )

    asyncio.run(story())


def test_the_first_version_is_waited_for_as_long_as_one_is_here_that_is_not_served(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, engine=FAR, weight_timeout_s=0.05)
    receiver = bench.receiver

    async def story() -> None:
        await bench.apply(bench.version(), times=3)
        wanted = Publication(PolicyVersion(1, 1), "", "tcp://127.0.0.1:1", "")
        waiting = asyncio.create_task(receiver.first_sync(wanted))
        done, _ = await asyncio.wait({waiting}, timeout=4 * 0.05)
        assert not done
        bench.engine.off = 0.0
        await bench.apply(bench.version())
        assert await waiting == PolicyVersion(1, 2)

    asyncio.run(story())
