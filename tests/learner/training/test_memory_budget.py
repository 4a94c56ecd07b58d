"""Tokens of a microbatch after the memory ran out: halved from that batch on, bounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs.errors import CheckpointError, OutOfMemory, SettingsError
from learner.loop import MEMORY_FILE, MOST_HALVINGS, MemoryBudget, is_out_of_memory
from tests.learner.support.stored_bytes import ALONE


def _of_the_cpu() -> RuntimeError:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**62, dtype=torch.uint8)
    return raised.value


def test_the_next_life_trains_the_batch_with_half_and_those_before_it_as_they_were(
    tmp_path: Path,
) -> None:
    for batch, used in ((5, 4096), (5, 2048), (9, 1024)):
        budget = MemoryBudget(tmp_path, 4096, ALONE)
        assert budget.tokens(batch) == used
        with pytest.raises(OutOfMemory, match=f"of {used} tokens .*it then trains .* {used // 2}"):
            budget.halve(batch, _of_the_cpu())

    budget = MemoryBudget(tmp_path, 4096, ALONE)
    assert [budget.tokens(step) for step in (4, 5, 8, 9, 100)] == [4096, 1024, 1024, 512, 512]


def test_two_ranks_that_run_out_together_halve_once(tmp_path: Path) -> None:
    ranks = [MemoryBudget(tmp_path, 4096, ALONE) for _ in range(2)]
    for budget in ranks:
        with pytest.raises(OutOfMemory):
            budget.halve(3, _of_the_cpu())

    assert MemoryBudget(tmp_path, 4096, ALONE).tokens(3) == 2048


def test_halving_is_bounded_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    for _ in range(MOST_HALVINGS):
        with pytest.raises(OutOfMemory):
            MemoryBudget(tmp_path, 4096, ALONE).halve(1, _of_the_cpu())
    with pytest.raises(
        SettingsError, match=r"batch 1 must fit .* got out of memory with microbatches of 64 tokens"
    ):
        MemoryBudget(tmp_path, 4096, ALONE).halve(1, _of_the_cpu())

    (tmp_path / MEMORY_FILE).write_text("{")
    with pytest.raises(CheckpointError, match="must list the batches that ran out"):
        MemoryBudget(tmp_path, 4096, ALONE)


def test_only_an_allocators_error_counts() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(_of_the_cpu())
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
