"""A learner of one rank: its groups answer as any do, and nobody can connect to them."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from learner.model.ranks import join
from tests.learner.support.forks import run_in_fork
from tests.learner.support.listening import listening

pytestmark = pytest.mark.slow


def exchange_alone(variables: dict[str, str]) -> None:
    """Use all groups of one rank; in a process of its own, as a process has them once."""
    patch = pytest.MonkeyPatch()
    for name, value in variables.items():
        patch.setenv(name, value)
    ranks = join("cpu", threads=1)
    for group in (ranks.control, ranks.background, ranks.mesh.get_group()):
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        copies = [torch.zeros(3)]
        dist.all_gather(copies, ones, group=group)
        assert torch.equal(copies[0], torch.ones(3))
        dist.barrier(group=group)

    assert listening(os.getpid()) == set()
    ranks.destroy_process_group()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "21599"},
        {"RANK": "0", "WORLD_SIZE": "1", "NYALA_RENDEZVOUS_FILE": "/nowhere/ranks"},
    ],
    ids=["alone", "torchrun", "launched"],
)
def test_a_single_rank_has_groups_and_no_listener(variables: dict[str, str]) -> None:
    run_in_fork(exchange_alone, variables, within_s=120)
