"""The vLLM engine passes the battery of engines: real vLLM in this process."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from actors.engine.vllm_private import PACKED
from actors.engine.wire_tensors import named_tensors
from buffer.record.episode import PolicyVersion
from tests.actors.support.engine_battery import (
    BATTERY,
    TOLERANCE,
    probe_agrees,
    recomputes_kv,
    swaps_under_load,
)
from tests.actors.support.engine_probe import Bench, tiny_folder
from tests.actors.support.stale_tensors import lagging
from tests.actors.support.tiny_model import reference_logprobs, stage
from tests.needs import needs

pytestmark = [
    pytest.mark.live,
    needs("vLLM"),
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
    folder = tmp_path_factory.mktemp("tied")
    bench = runner.run(open_bench(folder, tied=True, max_num_batched_tokens=BATCHED_TOKENS))
    yield bench
    runner.run(bench.engine.close())


async def open_bench(
    folder: Path,
    *,
    tied: bool,
    dtype: str = "float32",
    recompute_kv: bool = False,
    probe_temperature: float = 1.0,
    **engine_args: int,
) -> Bench:
    from actors.engine.vllm_engine import vllm_engine
    from actors.engine.vllm_options import VllmOptions

    model = tiny_folder(folder / "model", tied=tied)
    options = VllmOptions(
        str(folder / "model"),
        max_model_len=256,
        max_concurrent=64,
        dtype=dtype,
        recompute_kv=recompute_kv,
        engine_args=engine_args,
        probe_temperature=probe_temperature,
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


def test_logits_in_float32_are_asked_of_vllm():
    from actors.engine.vllm_options import VllmOptions, engine_arguments

    options = VllmOptions("model", max_model_len=64, dtype="bfloat16", head_dtype="float32")

    assert engine_arguments(options)["hf_overrides"] == {"head_dtype": "float32"}


@pytest.mark.parametrize(
    ("device", "gib", "expected"),
    [("cpu", None, 1), ("cpu", 3, 3), ("cuda", None, 0), ("cuda", 3, 3)],
)
def test_the_kv_cache_is_as_large_as_asked_and_else_measured_on_a_gpu(
    monkeypatch, device, gib, expected
):
    from actors.engine import vllm_options as module

    monkeypatch.setattr(module, "engine_device", lambda: device)
    options = module.VllmOptions("model", max_model_len=64, kv_cache_gib=gib)
    arguments = module.engine_arguments(options)

    assert arguments.get("kv_cache_memory_bytes", 0) == expected * 2**30
    assert ("gpu_memory_utilization" in arguments) is (device == "cuda")
    assert arguments.get("block_size") == (32 if device == "cpu" else None)
    given = module.VllmOptions("model", max_model_len=64, engine_args={"block_size": 64})
    assert module.engine_arguments(given)["block_size"] == 64


def test_probe_sees_a_stale_output_layer(bench, runner, monkeypatch):
    """Without the second packing, tied embeddings sample from a mixture of two versions."""
    gap = runner.run(gap_without_second_packing(bench, monkeypatch))
    assert gap > 0.1

    runner.run(probe_agrees(bench))


@torch.no_grad()
def test_a_fill_by_the_plan_equals_one_by_the_loader(bench, runner):
    shadow = bench.engine._stepper._shadow
    staged = bench.stage_next()
    tensors = dict(named_tensors(staged.path, staged.manifest.tensors, staged.manifest.num_bytes))
    shadow.load(tensors)
    by_loader = answers_of(shadow._shadow)
    shadow.load({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    assert not answers_of(shadow._shadow).keys() ^ by_loader.keys()

    assert shadow._plan is not None
    shadow.copy(shadow._plan, tensors)

    by_plan = answers_of(shadow._shadow)
    assert {name for name in by_loader if torch.equal(by_loader[name], by_plan[name])} == {
        *by_loader
    }
    runner.run(bench.engine.apply(staged))
    runner.run(probe_agrees(bench))


def test_every_tensor_that_lags_by_a_step_is_read_back(bench, runner):
    runner.run(finds_what_lags(bench, "float32"))
    runner.run(bench.engine.apply(bench.stage_next()))


def test_in_bfloat16_too(runner, tmp_path):
    async def story() -> None:
        bench = await open_bench(tmp_path, tied=False, dtype="bfloat16")
        await finds_what_lags(bench, "bfloat16")
        await bench.engine.close()

    runner.run(story())


def test_probes_of_a_teacher_are_at_its_temperature(runner, tmp_path):
    token_ids = tuple(2 + i * i % 60 for i in range(200))

    async def probe() -> tuple[Bench, list[tuple[float, ...]]]:
        bench = await open_bench(tmp_path, tied=True, probe_temperature=0.6)
        try:
            probes = [bench.engine.probe(token_ids[:length]) for length in (2, 60, 200)]
            return bench, list(await asyncio.gather(*probes))
        finally:
            await bench.engine.close()

    bench, probes = runner.run(probe())

    for logprobs in probes:
        ids = list(token_ids[: 1 + len(logprobs)])
        expected = reference_logprobs(bench.model, ids, temperature=0.6)
        assert torch.allclose(torch.tensor(logprobs), expected, atol=TOLERANCE)


async def finds_what_lags(bench: Bench, dtype: str) -> None:
    """In either of the two copies of the model, packed weights and tied ones among them."""
    shadow = bench.engine._stepper._shadow  # type: ignore[attr-defined]
    staged = stage(bench.model, bench.folder / "lags", PolicyVersion(9, 9), dtype=dtype)
    tensors = dict(named_tensors(staged.path, staged.manifest.tensors, staged.manifest.num_bytes))
    bench.models[PolicyVersion(9, 9)] = copy.deepcopy(bench.model)
    await bench.engine.apply(staged)
    assert await bench.engine.read_back(staged) == []
    rows = shadow._plan._pieces

    for name, behind in lagging(tensors, count=200):
        shadow.copy(shadow._plan, behind)
        shadow._is_whole = True
        shadow.exchange()
        found = await bench.engine.read_back(staged)
        assert [name in {piece.tensor for piece in rows[each]} for each in found or ()] == [True]

    await bench.engine.apply(staged)
    assert await bench.engine.read_back(staged) == []


def test_untied_embeddings_swap_as_exactly_and_kv_is_recomputed(runner, tmp_path, monkeypatch):
    async def story() -> None:
        bench = await open_bench(tmp_path, tied=False, recompute_kv=True)
        scheduler = bench.engine._stepper._engine.vllm_config.scheduler_config  # type: ignore[attr-defined]
        assert scheduler.max_num_batched_tokens == 4096, "vLLM's default for a batch on a CPU"
        await swaps_under_load(bench)
        await recomputes_kv(bench)
        assert await gap_without_second_packing(bench, monkeypatch) < TOLERANCE
        await bench.engine.close()

    runner.run(story())


def answers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters as they are, and what packed ones multiply to."""
    found = {name: p.detach().clone() for name, p in model.named_parameters() if p.numel()}
    for name, layer in model.named_modules():
        if PACKED in vars(layer):
            width = getattr(layer, "input_size_per_partition", None) or layer.embedding_dim
            unit = torch.eye(width, dtype=torch.float32)
            found[f"{name} packed"] = getattr(layer, PACKED)(unit, layer.weight, None)
    return found


async def gap_without_second_packing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> float:
    """Swap with the fix left out, measure the probe's largest error, swap again as it should be."""
    from actors.engine.weights import loading

    staged = bench.stage_next()
    with monkeypatch.context() as omitted:
        stepper: Any = bench.engine._stepper
        omitted.setattr(stepper._shadow, "_plan", None)  # it packs all by itself
        omitted.setattr(loading, "refresh_output_layers", lambda _: None)
        await bench.engine.apply(staged)
    token_ids = bench.prompt(40)
    answer = torch.tensor(await bench.engine.probe(token_ids))
    await bench.engine.apply(staged)
    newest = bench.models[staged.manifest.version]
    return float((answer - reference_logprobs(newest, list(token_ids))).abs().max())
