"""Rollback to the weights of a checkpoint, while batch numbers go on.

The store takes no part: the next version is published under its own number, with older weights
inside. Batches since the checkpoint stay trained, in vain; a learner that resumes before the next
checkpoint replays them from their sealed claims, and rolls back at the same batch.
"""

from __future__ import annotations

import structlog

from learner.model.lora.adapters import reset_adapters
from learner.model.policy import Policy
from learner.model.saved_model import read_weights
from learner.training.critic import Critic
from learner.training.optimizer import ScheduledOptimizer

from .checkpoint import Checkpoints

log = structlog.get_logger()


def roll_back(
    checkpoints: Checkpoints,
    policy: Policy,
    optimizer: ScheduledOptimizer,
    *,
    model_path: str,
    before: int | None,
    critic: Critic | None = None,
) -> int:
    """Load the newest checkpoint into policy, critic and optimizers; collective.

    Args:
        checkpoints: Of the run.
        policy: Its weights are replaced.
        optimizer: Its moments are replaced.
        model_path: The initial model, loaded where there is no checkpoint.
        before: Only checkpoints of earlier batches than this; None = any.
        critic: Of the run, if it has one, as in `checkpoints`.

    Returns:
        Batches that the weights contain now.

    Raises:
        CheckpointError: None of these checkpoints is intact.
    """
    newest = checkpoints.newest(before=before)
    if newest is not None:
        path, state = newest
        checkpoints.load(path, policy, optimizer)
        return state.step
    if policy.adapter is None:
        read_weights(policy.causal_lm, model_path)
    else:
        reset_adapters(policy.causal_lm)
    optimizer.forget()
    if critic is not None:
        critic.reset(model_path)
    return 0
