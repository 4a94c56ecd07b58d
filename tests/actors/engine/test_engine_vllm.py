"""The vLLM engine passes the battery of engines: real vLLM in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest
import torch

from tests.actors.support.engine_battery import BATTERY, TOLERANCE, probe_agrees, swaps_under_load
from tests.actors.support.engine_probe import Bench, tiny_folder
from tests.actors.support.tiny_model import reference_logprobs

pytest.importorskip("vllm", reason="not installed: only the torch engine is tested here")

pytestmark = [
    pytest.mark.live,
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]


BATCHED_TOKENS = 320


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def bench(runner, tmp_path_factory) -> Iterator[Bench]:
    """An engine of a model with tied embeddings, shared: a start takes its time."""
    bench = runner.run(open_bench(tmp_path_factory.mktemp("tied"), tied=True))
    yield bench
    runner.run(bench.engine.close())


async def open_bench(folder: Path, *, tied: bool) -> Bench:
    from actors.engine.vllm_engine import VllmOptions, vllm_engine

    model = tiny_folder(folder / "model", tied=tied)
    options = VllmOptions(
        str(folder / "model"),
        max_model_len=256,
        max_concurrent=64,
        engine_args={"max_num_batched_tokens": BATCHED_TOKENS},
    )
    engine = vllm_engine(options)
    await engine.start()
    return Bench(engine, model, folder)


@pytest.mark.parametrize("check", BATTERY, ids=lambda check: check.__name__)
def test_vllm_engine(check: Callable[[Bench], Coroutine], bench: Bench, runner: asyncio.Runner):
    runner.run(check(bench))


def test_further_arguments_reach_vllm(bench):
    config = bench.engine._stepper._engine.vllm_config

    assert config.scheduler_config.max_num_batched_tokens == BATCHED_TOKENS


def test_probe_sees_a_stale_output_layer(bench, runner, monkeypatch):
    """Without the second packing, tied embeddings sample from a mixture of two versions."""
    gap = runner.run(gap_without_second_packing(bench, monkeypatch))
    assert gap > 0.1

    runner.run(probe_agrees(bench))


def test_untied_embeddings_swap_as_exactly(runner, tmp_path, monkeypatch):
    async def story() -> None:
        bench = await open_bench(tmp_path, tied=False)
        await swaps_under_load(bench)
        assert await gap_without_second_packing(bench, monkeypatch) < TOLERANCE
        await bench.engine.close()

    runner.run(story())


async def gap_without_second_packing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> float:
    """Swap with the fix left out, measure the probe's largest error, swap again as it should be."""
    from actors.engine import vllm_weights

    staged = bench.stage_next()
    with monkeypatch.context() as omitted:
        omitted.setattr(vllm_weights, "refresh_output_layers", lambda _: None)
        await bench.engine.apply(staged)
    token_ids = bench.prompt(40)
    answer = torch.tensor(await bench.engine.probe(token_ids))
    await bench.engine.apply(staged)
    newest = bench.models[staged.manifest.version]
    return float((answer - reference_logprobs(newest, list(token_ids))).abs().max())
