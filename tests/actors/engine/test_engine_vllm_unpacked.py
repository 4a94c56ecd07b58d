"""vLLM on a CPU with weights as a GPU has them: not packed, no shadow copy, loaded in place.

The twin of `tests/gpu/test_engine_swap.py`: all but the card and its graphs.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engine.wire_tensors import VersionFile, named_tensors
from buffer.record.episode import PolicyVersion
from tests.actors.support.engine_battery import probe_agrees, swaps_under_load
from tests.actors.support.engine_probe import Bench
from tests.actors.support.stale_tensors import lagging
from tests.actors.support.tiny_model import make_model, perturb, stage
from tests.needs import needs

pytestmark = [
    pytest.mark.live,
    needs("vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
]


PADDED = 70
"""Rows of a vocabulary that vLLM pads to 128."""
CALLS = ("nyala_prepare", "sleep", "nyala_load", "wake_up")
"""Of a swap, to the core: the first once more for each look at a file that takes long to open."""


async def open_bench(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, tied: bool = True, dtype: str = "float32"
) -> Bench:
    from vllm import _custom_ops

    from actors.engine.vllm_engine import vllm_engine
    from actors.engine.vllm_options import VllmOptions
    from actors.engine.weights import shadow_model as shadow

    monkeypatch.setattr(_custom_ops, "_supports_onednn", False)
    monkeypatch.setattr(shadow, "shadow_of", lambda _: None)
    model = make_model(tied=tied, vocabulary=PADDED)
    model.save_pretrained(folder / "model")
    engine = vllm_engine(
        VllmOptions(str(folder / "model"), max_model_len=256, max_concurrent=64, dtype=dtype)
    )
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
    stored = dict(worker_of(bench).get_model().named_parameters())
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
    return name, slice(0, PADDED if "embed" in name else len(stored[name]))


def worker_of(bench: Bench) -> Any:
    stepper: Any = bench.engine._stepper
    (worker,) = stepper._engine.collective_rpc(lambda worker: worker)
    return worker


@pytest.mark.parametrize(("tied", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_a_plan_leaves_the_bits_that_layerwise_reload_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, dtype: str
) -> None:
    """Fused, padded and tied weights; each to the place where it was."""

    async def story() -> None:
        bench = await open_bench(tmp_path, monkeypatch, tied=tied, dtype=dtype)
        live = worker_of(bench)._nyala_model()
        versions = []
        for number in (1, 2):
            perturb(bench.model, seed=number)
            staged = stage(
                bench.model, tmp_path / f"{number}", PolicyVersion(0, number), dtype=dtype
            )
            versions.append(
                VersionFile(str(staged.path), staged.manifest.num_bytes, staged.manifest.tensors)
            )
        found: dict[tuple[bool, int], dict[str, torch.Tensor]] = {}
        addresses = [parameter.data_ptr() for parameter in live._model.parameters()]
        for planned in (True, False):
            for number, place in enumerate(versions):
                prepare(live, place)
                assert live.way == "copied into place"
                if not planned:
                    live._opened = live._opened._replace(parts=None)
                live.load()
                found[planned, number] = {n: p.clone() for n, p in live._model.named_parameters()}
        await bench.engine.close()

        assert [parameter.data_ptr() for parameter in live._model.parameters()] == addresses
        table = "model.embed_tokens.weight"
        assert found[True, 0][table].shape == (128, 64)
        for number in (0, 1):
            for name, copied in found[True, number].items():
                assert same_bits(copied, found[False, number][name]), name
            assert not same_bits(found[True, 0][table], found[True, 1][table])

    asyncio.run(story())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def prepare(live: Any, place: VersionFile) -> None:
    while not live.prepare(place):
        pass


def test_a_swap_is_four_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.core_client import InprocClient

    calls: list[str] = []

    def noted(name: str) -> Any:
        inner = getattr(InprocClient, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(args[0] if name == "collective_rpc" else name)
            return inner(self, *args, **kwargs)

        return call

    async def story() -> None:
        bench = await open_bench(tmp_path, monkeypatch)
        told = ("collective_rpc", "sleep", "wake_up", "set_weight_version", "reset_prefix_cache")
        for name in told:
            monkeypatch.setattr(InprocClient, name, noted(name))
        for _ in range(2):
            await bench.engine.apply(bench.stage_next())
        await bench.engine.close()

    asyncio.run(story())

    once = [call for call, before in zip(calls, ["", *calls], strict=False) if call != before]
    assert tuple(once) == 2 * CALLS


def test_weights_in_another_layout_are_loaded_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that keeps integers and a scale of each row, made anew from every version."""
    from vllm.model_executor.layers import linear

    from actors.engine.weights import loading  # it knows the method that is replaced

    assert linear.UnquantizedLinearMethod in loading.KNOWN_METHODS

    def process(self: Any, layer: Any) -> None:
        del self
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        rounded = (layer.weight / scale).round().to(torch.int8)
        layer.weight = torch.nn.Parameter(rounded, requires_grad=False)
        layer.scale = torch.nn.Parameter(scale, requires_grad=False)

    def multiply(self: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        del self
        return torch.nn.functional.linear(x, layer.weight * layer.scale, bias)

    known = linear.UnquantizedLinearMethod
    members = {"process_weights_after_loading": process, "apply": multiply}
    monkeypatch.setattr(linear, "UnquantizedLinearMethod", type("Rounded", (known,), members))

    async def story() -> None:
        bench = await open_bench(tmp_path, monkeypatch)
        live = worker_of(bench)._nyala_model()
        layer: Any = live._model.model.layers[1].mlp.down_proj
        place = layer.weight.data_ptr(), layer.scale.data_ptr()
        await bench.engine.apply(bench.stage_next())
        assert live.way.startswith("layer by layer: ")
        assert live.way.endswith(" keeps its weights as Rounded does")

        theirs: Any = bench.model.model.layers[1]
        weight = theirs.mlp.down_proj.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        assert layer.weight.dtype == torch.int8
        assert torch.equal(layer.scale, scale)
        assert torch.equal(layer.weight, (weight / scale).round().to(torch.int8))
        assert (layer.weight.data_ptr(), layer.scale.data_ptr()) == place
        staged = bench.stage_next()
        assert await bench.engine.read_back(staged) is None
        await bench.engine.close()

    asyncio.run(story())
