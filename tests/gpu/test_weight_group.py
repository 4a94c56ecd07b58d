"""Weight groups over NCCL: rank 0 on the first card, the member of a worker on the second."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.weights.support import member_process as stories
from tests.weights.support.member_process import Group

NUM_BUCKETS = 64
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture
def group(tmp_path: Path) -> Group:
    return Group("nccl", "cuda:1", 16 * 2**20, tmp_path)


def test_versions_arrive_over_nccl(group: Group, table: list[str]) -> None:
    took_s = asyncio.run(stories.a_version_arrives(group, NUM_BUCKETS))

    table.append(f"weight group over NCCL: 1 GiB in {took_s:.2f} s, digest included")


def test_a_killed_member_costs_the_sender_its_deadline_at_most(
    group: Group, table: list[str]
) -> None:
    took_s = asyncio.run(stories.a_killed_member_costs_the_deadline(group, NUM_BUCKETS))

    table.append(f"weight group over NCCL: a killed member is seen after {took_s:.1f} s")


def test_a_member_that_leaves_a_broadcast_is_in_the_next_group(group: Group) -> None:
    asyncio.run(stories.one_that_leaves_is_free_at_once(group, NUM_BUCKETS))
