"""Switches of the learner on one card: the same training, in the memory that was computed."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from console.run.card_memory import card_memory
from learner.model.ranks import Ranks
from learner.model.sequence_cost import SequenceCost
from learner.profiling import PER_MULTIPLY_ADD
from tests.gpu.support.training_on_cards import (
    FULL,
    LOAD_OF_PEAKS,
    PEAKS,
    QWEN3_600M,
    SMALL,
    SWITCHES,
    Load,
    Training,
    settings_of,
)

pytestmark = pytest.mark.gpu
LOAD = Load(episodes=16, prompt=64, completion=192, microbatch_tokens=1024)


@pytest.fixture(scope="module")
def plain(card: Ranks) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and parameters without any switch."""
    training = Training(card, SMALL, LOAD, settings_of(LOAD, {"activation_checkpointing": "none"}))
    return [training.step(number) for number in (1, 2, 3)], training.parameters()


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_changes_nothing_but_time_and_memory(
    card: Ranks, plain: tuple[list[float], list[torch.Tensor]], name: str
) -> None:
    training = Training(card, SMALL, LOAD, settings_of(LOAD, SWITCHES[name]))

    losses = [training.step(number) for number in (1, 2, 3)]

    assert losses == pytest.approx(plain[0], abs=1e-4)
    for ours, theirs in zip(training.parameters(), plain[1], strict=True):
        assert float((ours - theirs).abs().max()) < 2e-4, "three steps of 1e-4"
    is_offloaded = "parameters" in SWITCHES[name].get("offload", ())
    where = {p.device.type for p in training.policy.parameters()}
    assert where == {"cpu" if is_offloaded else "cuda"}
    for parameter in training.optimizer.parameters:
        assert {m.device.type for m in training.optimizer.moments_of(parameter).values()} == where


@pytest.mark.parametrize("kind", ["adamw8bit", "muon"])
def test_an_optimizer_lowers_the_loss_on_a_card(card: Ranks, kind: str) -> None:
    training = Training(card, SMALL, LOAD, settings_of(LOAD, {"optimizer": kind}))

    losses = [training.step(number) for number in range(1, 11)]

    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_is_the_one_computed(card: Ranks, table: list[str], name: str) -> None:
    settings = settings_of(LOAD_OF_PEAKS, PEAKS[name], "bfloat16")
    memory = torch.cuda.get_device_properties(0).total_memory
    computed = card_memory(settings, SMALL, on_gpu=True, card_bytes=memory).total
    gc.collect()  # FSDP's modules refer to themselves: policies before this one would be counted
    training = Training(card, SMALL, LOAD_OF_PEAKS, settings)
    training.step(1)
    torch.cuda.reset_peak_memory_stats()

    training.step(2)

    measured = torch.cuda.max_memory_allocated()
    table.append(
        f"{name:28} {measured / 2**20:8.0f} MiB at the peak, {computed / 2**20:8.0f} computed"
    )
    assert 0.85 < computed / measured < 1.15


def test_a_model_of_600m_parameters_trains_for_twenty_steps(card: Ranks, table: list[str]) -> None:
    load = Load(episodes=16, prompt=128, completion=384, microbatch_tokens=4096)
    settings = settings_of(load, FULL, "bfloat16")
    memory = torch.cuda.get_device_properties(0).total_memory
    computed = card_memory(settings, QWEN3_600M, on_gpu=True, card_bytes=memory).total
    gc.collect()
    training = Training(card, QWEN3_600M, load, settings)
    torch.cuda.reset_peak_memory_stats()

    losses = [training.step(number) for number in range(1, 21)]

    measured = torch.cuda.max_memory_allocated()
    table.append(f"0.6B, 20 steps: {measured / 2**30:.1f} GiB, {computed / 2**30:.1f} computed")
    assert losses[-1] < losses[0]
    assert 0.75 < computed / measured < 1.35


def _matmul_tflops() -> float:
    """Measured peak of the card, in bfloat16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - began) / 1e12


@pytest.mark.parametrize("length", [4096, 16384])
@pytest.mark.parametrize("name", ["none", "full", "compile, full", "both"])
def test_how_much_of_the_card_is_used(
    card: Ranks, table: list[str], length: int, name: str
) -> None:
    switches: Mapping[str, Any] = SWITCHES.get(name, {"activation_checkpointing": "none"})
    load = Load(4 * 16384 // length, length // 8, length - length // 8, 16384)
    try:
        training = Training(card, QWEN3_600M, load, settings_of(load, switches, "bfloat16"))
        for number in (1, 2):
            training.step(number)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number in (3, 4, 5):
            training.step(number)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        table.append(f"0.6B, {length:6} tokens, {name:20} out of memory")
        return
    seconds = (time.perf_counter() - began) / 3
    cost = SequenceCost.from_config(QWEN3_600M)
    needed = sum(
        cost.of_packed(
            each.sequences.lengths,
            (each.sequences.seen or each.sequences).lengths,
            len(each.indices_N),
        )
        for each in training.microbatches
    )
    achieved, peak = PER_MULTIPLY_ADD * needed / seconds / 1e12, _matmul_tflops()
    table.append(
        f"0.6B, {length:6} tokens, {name:20} {achieved:6.0f} TFLOP/s, {achieved / peak:4.0%} of "
        f"the {peak:.0f} of a matrix product"
    )
    assert achieved > 0
