"""vLLM on a CPU with weights as a GPU has them: not packed, no shadow copy, loaded in place.

The twin of `tests/gpu/test_engine_swap.py`: all but the card and its graphs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine.wire_tensors import named_tensors
from tests.actors.support.engine_battery import probe_agrees, swaps_under_load
from tests.actors.support.engine_probe import Bench, tiny_folder
from tests.actors.support.stale_tensors import lagging
from tests.needs import needs

pytestmark = [
    pytest.mark.live,
    needs("vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]


async def open_bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    from vllm import _custom_ops

    from actors.engine.vllm_engine import vllm_engine
    from actors.engine.vllm_options import VllmOptions
    from actors.engine.weights import shadow_model as shadow

    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    monkeypatch.setattr(shadow, "shadow_of", lambda _: None)
    model = tiny_folder(folder / "model", tied=True)
    engine = vllm_engine(VllmOptions(str(folder / "model"), max_model_len=256, max_concurrent=64))
    await engine.start()
    return Bench(engine, model, folder)


def test_swaps_in_place_are_exact_and_what_lags_is_read_back(tmp_path, monkeypatch) -> None:
    async def story() -> None:
        bench = await open_bench(tmp_path, monkeypatch)
        await swaps_under_load(bench)
        await finds_what_lags(bench)
        await probe_agrees(bench)
        await bench.engine.close()

    asyncio.run(story())


async def finds_what_lags(bench: Bench) -> None:
    """Plant 200 tensors that are a step behind into the model in use, one after the other."""
    staged = bench.stage_next()
    await bench.engine.apply(staged)
    assert await bench.engine.read_back(staged) == []
    stepper: Any = bench.engine._stepper
    (worker,) = stepper._engine.collective_rpc(lambda worker: worker)
    stored = dict(worker.get_model().named_parameters())
    assert all(parameter.numel() for parameter in stored.values())
    tensors = dict(named_tensors(staged.path, staged.manifest.tensors, staged.manifest.num_bytes))
    places = {name: place_of(name, stored) for name in tensors}

    for name, behind in lagging(tensors, count=200):
        parameter, rows = places[name]
        with torch.no_grad():
            before = stored[parameter][rows].clone()
            stored[parameter][rows] = behind[name]
            assert await bench.engine.read_back(staged) == [parameter]
            stored[parameter][rows] = before

    assert await bench.engine.read_back(staged) == []


def place_of(name: str, stored: dict[str, torch.nn.Parameter]) -> tuple[str, slice]:
    """Return the parameter and rows of a tensor of Qwen3, as its loader has fused them."""
    width = {"q_proj": slice(0, 64), "k_proj": slice(64, 96), "v_proj": slice(96, 128)}
    width |= {"gate_proj": slice(0, 192), "up_proj": slice(192, 384)}
    for part, rows in width.items():
        if part in name:
            fused = "qkv_proj" if "self_attn" in name else "gate_up_proj"
            return name.replace(part, fused), rows
    return name, slice(0, 64 if "embed" in name else len(stored[name]))
