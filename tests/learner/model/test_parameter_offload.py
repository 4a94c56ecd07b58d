"""Parameters in host memory: weights, gradients and moments. There is no card: `tests/gpu`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from configs.settings import CriticSettings, LearnerSettings
from learner.checkpointing.checkpoint import Checkpoints
from learner.model.policy import Policy, has_room, probe_logprobs, shard
from learner.model.ranks import Ranks
from learner.model.saved_model import allocate
from learner.training.critic import make_critic
from learner.training.optimizer import ScheduledOptimizer
from learner.training.step import train_batch
from tests.learner.support.exact_gradients import SETTINGS, packed
from tests.learner.support.made_episodes import random_group_episodes
from tests.learner.support.ranks.forced_shards import forced_shards
from tests.learner.support.ranks.layouts import STATE
from tests.learner.support.tiny_policy import (
    constant_rate,
    parameters_of,
    save_tiny_model,
    tiny_causal_lm,
)

EPISODES = random_group_episodes(4, 3, seed=1)
CARD = torch.device("meta")
"""Stands in for one: what is there is not in host memory."""


def _policy(ranks: Ranks, *, offload: bool) -> Policy:
    policy = Policy(tiny_causal_lm(), temperature=1.0).eval()
    where = ("parameters",) if offload else ()
    return shard(policy, ranks.mesh, dtype=torch.float32, offload=where)


def _units(module: torch.nn.Module) -> list[FSDPModule]:
    return [each for each in module.modules() if isinstance(each, FSDPModule)]


def _is_offloaded(unit: FSDPModule) -> bool:
    group = unit._get_fsdp_state()._fsdp_param_group
    assert group is not None
    return isinstance(group.offload_policy, CPUOffloadPolicy)


@pytest.mark.parametrize("of_critic", [None, (), ("parameters",)])
@pytest.mark.parametrize("offload", [False, True])
def test_parameters_of_every_unit_are_offloaded_and_buffers_of_none(
    ranks: Ranks, tmp_path: Path, of_critic: tuple[str, ...] | None, *, offload: bool
) -> None:
    save_tiny_model(tmp_path)
    with forced_shards():  # as on a card
        policy = _policy(ranks, offload=offload)
        critic = make_critic(
            policy,
            CriticSettings.model_validate({"kind": "model", "offload": of_critic}),
            LearnerSettings(offload=("parameters",) if offload else ()),
            model_path=str(tmp_path),
            ranks=ranks,
            dtype=torch.float32,
        )
    assert critic is not None
    allocate(policy, CARD, offload=offload)

    assert [_is_offloaded(unit) for unit in _units(policy)] == 3 * [offload]
    expected = offload if of_critic is None else bool(of_critic)
    assert [_is_offloaded(unit) for unit in _units(critic.model)] == 4 * [expected]
    assert {p.device.type for p in policy.parameters()} == {"cpu" if offload else "meta"}
    buffers = list(policy.buffers())
    assert buffers and all(buffer.is_meta for buffer in buffers)
    on_card = replace(ranks, device=CARD)
    assert has_room([policy], on_card) == offload, "one rank spares transfers, not reductions"


def test_training_and_checkpoints_do_not_depend_on_it(ranks: Ranks, tmp_path: Path) -> None:
    microbatches = packed(EPISODES, 24)
    assert len(microbatches) > 1
    found = []
    for offload in (False, True):
        policy = _policy(ranks, offload=offload)
        optimizer = ScheduledOptimizer(policy, constant_rate(1e-3), LearnerSettings())
        checkpoints = Checkpoints(tmp_path, keep=1, ranks=ranks)
        if offload:  # goes on from the checkpoint of the other
            newest = checkpoints.newest()
            assert newest is not None
            checkpoints.load(newest[0], policy, optimizer)
        for step in (2,) if offload else (1, 2):
            train_batch(policy, optimizer, step, microbatches, settings=SETTINGS, ranks=ranks)
            if step == 1:
                checkpoints.save(STATE, policy, optimizer)
        found.append(
            [*parameters_of(policy, optimizer), torch.tensor(probe_logprobs(policy, (3, 4, 5)))]
        )

    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
